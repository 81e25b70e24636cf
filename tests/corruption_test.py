"""Corruption: schedules, times, masks, and the bound they add up to."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffusion_objectives as do
from diffusion_objectives import corruption

TIMES = np.array([1e-3, 0.1, 1 / 3, 0.5, 0.9, 0.999, 1.0], np.float32)

# Mask probability and weight of each schedule, in closed form.
SCHEDULES = {
  "linear": (
    corruption.linear_mask_probability,
    lambda t: t,
    lambda t: 1 / t,
  ),
  "cosine": (
    corruption.cosine_mask_probability,
    lambda t: np.sin(np.pi * t / 2),
    lambda t: np.pi / 2 / np.tan(np.pi * t / 2),
  ),
  "quadratic": (
    corruption.polynomial_mask_probability(2.0),
    lambda t: t**2,
    lambda t: 2 / t,
  ),
  "root": (
    corruption.polynomial_mask_probability(0.5),
    np.sqrt,
    lambda t: 0.5 / t,
  ),
}
schedules = pytest.mark.parametrize(
  ("schedule", "probability", "weight"), SCHEDULES.values(), ids=SCHEDULES
)


# Schedules.


@schedules
def test_probabilities_and_weights_have_their_closed_forms(
  schedule, probability, weight
):
  times = TIMES.astype(np.float64)
  # cot(pi / 2) is 0, and is not quite in float32.
  close = dict(rtol=2e-6, atol=2e-7)
  np.testing.assert_allclose(schedule(TIMES), probability(times), **close)
  for run in (
    corruption.elbo_weights,
    jax.jit(corruption.elbo_weights, static_argnums=1),
  ):
    weights = run(TIMES, schedule)
    assert weights.dtype == jnp.float32 and weights.shape == times.shape
    np.testing.assert_allclose(weights, weight(times), **close)


@schedules
def test_a_weight_is_the_slope_of_the_mask_probability_over_it(
  schedule, probability, weight
):
  del weight
  times = np.linspace(0.05, 0.95, 19)
  h = 1e-6
  alpha = lambda t: 1 - probability(t)  # noqa: E731
  slope = (alpha(times + h) - alpha(times - h)) / (2 * h)
  expected = -slope / (1 - alpha(times))
  weights = corruption.elbo_weights(times.astype(np.float32), schedule)
  np.testing.assert_allclose(weights, expected, rtol=5e-6)


@schedules
def test_a_schedule_runs_from_nothing_masked_to_all_masked(
  schedule, probability, weight
):
  del probability, weight
  ends = schedule(jnp.array([0.0, 1.0]))
  np.testing.assert_allclose(ends, [0, 1], atol=1e-7)
  assert np.all(np.diff(schedule(jnp.linspace(0, 1, 50))) > 0)


def test_a_schedule_of_ones_own_gets_its_weights():
  weights = corruption.elbo_weights(
    jnp.array([0.5]), lambda t: 1 - jnp.exp(-3 * t)
  )
  expected = 3 * math.exp(-1.5) / (1 - math.exp(-1.5))
  np.testing.assert_allclose(weights, [expected], rtol=1e-6)


@pytest.mark.parametrize(
  ("exponent", "error"),
  [(0, ValueError), (-1.0, ValueError), (np.nan, ValueError), ("2", TypeError)],
)
def test_a_polynomial_needs_a_positive_exponent(exponent, error):
  with pytest.raises(error, match=r"^exponent must be"):
    corruption.polynomial_mask_probability(exponent)


@pytest.mark.parametrize("times", [0.5, np.array([1]), [0.5]])
def test_weights_need_an_array_of_floating_point_times(times):
  with pytest.raises(TypeError, match=r"^times must"):
    corruption.elbo_weights(times)


# Times.


@pytest.mark.parametrize("min_time", [0.0, 1e-3, 0.5])
@pytest.mark.parametrize("batch_size", [1, 2, 7, 1000])
def test_each_stratum_holds_one_time_within_range(batch_size, min_time):
  times = corruption.stratified_times(
    jax.random.key(batch_size), batch_size, min_time=min_time
  )
  assert times.shape == (batch_size,) and times.dtype == jnp.float32
  assert np.all(times <= 1) and np.all(times >= min_time - 1e-7)
  unit = (np.sort(np.float64(times)) - min_time) / (1 - min_time)
  strata = np.arange(batch_size) / batch_size
  assert np.all(unit >= strata - 1e-6)
  assert np.all(unit <= strata + 1 / batch_size + 1e-6)


def distance_to_uniform(sample):
  """Kolmogorov's distance to the uniform distribution on [0, 1]."""
  ordered = np.sort(np.float64(sample))
  count = len(ordered)
  above = np.arange(1, count + 1) / count - ordered
  below = ordered - np.arange(count) / count
  return max(above.max(), below.max())


def test_each_row_by_itself_is_uniform():
  keys = jax.random.split(jax.random.key(0), 4000)
  times = jax.vmap(
    lambda key: corruption.stratified_times(key, 5, min_time=0.0)
  )(keys)
  # The distance exceeds 2 / sqrt(n) once in 1500 samples.
  for row in range(5):
    assert distance_to_uniform(times[:, row]) < 2 / math.sqrt(4000)
  # A row's neighbours lie in other strata, otherwise rows are exchangeable.
  assert abs(np.corrcoef(times[:, 0], times[:, 4])[0, 1] + 1 / 5) < 0.08


def test_times_are_a_function_of_the_key():
  draw = jax.jit(lambda key: corruption.stratified_times(key, 16))
  one, other = jax.random.split(jax.random.key(1))
  np.testing.assert_array_equal(draw(one), draw(one))
  np.testing.assert_allclose(
    draw(one), corruption.stratified_times(one, np.int64(16)), rtol=1e-6
  )
  assert not np.array_equal(draw(one), draw(other))


@pytest.mark.parametrize(
  ("arguments", "error", "message"),
  [
    (
      dict(batch_size=-1),
      ValueError,
      "batch_size must be nonnegative; received -1",
    ),
    (dict(batch_size=2.0), TypeError, "batch_size must be an integer"),
    (dict(batch_size=True), TypeError, "batch_size must be an integer"),
    (
      dict(min_time=0.8, max_time=0.3),
      ValueError,
      "min_time must be at most max_time; received 0.8 and 0.3",
    ),
    (
      dict(min_time=1.5),
      ValueError,
      "min_time must be at most max_time; received 1.5 and 1.0",
    ),
    (dict(max_time=1.5), ValueError, "max_time must be at most 1; received"),
    (dict(max_time=None), TypeError, "max_time must be a finite real scalar"),
    (dict(min_time=-0.1), ValueError, "min_time must be nonnegative"),
    (dict(min_time="0"), TypeError, "min_time must be a finite real scalar"),
  ],
)
def test_times_out_of_range_are_refused(arguments, error, message):
  with pytest.raises(error, match=f"^{message}"):
    corruption.stratified_times(
      jax.random.key(0), **{"batch_size": 4, **arguments}
    )


# Masks.

ROWS, LENGTH = 4, 3000


def tokens(dtype=np.int32):
  ids = np.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % 7
  supervised = np.arange(LENGTH) % 3 > 0
  return ids.astype(dtype), np.tile(supervised, (ROWS, 1))


RATES = np.array([0.0, 0.25, 0.9, 1.0], np.float32)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.int16, np.uint32])
@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_only_supervised_positions_are_masked_at_their_rows_rate(dtype, run):
  ids, supervised = tokens(dtype)
  noisy, is_masked = run(
    lambda *arrays: corruption.mask_bernoulli(*arrays, mask_id=200 % 128)
  )(jax.random.key(3), ids, supervised, RATES)
  assert noisy.dtype == dtype and is_masked.dtype == bool
  assert not np.any(is_masked & ~supervised)
  np.testing.assert_array_equal(noisy, np.where(is_masked, 72, ids))
  count = supervised[0].sum()
  rates = is_masked.sum(axis=1) / count
  deviation = np.sqrt(RATES * (1 - RATES) / count)
  assert np.all(np.abs(rates - RATES) <= 4 * deviation)


def test_positions_are_masked_independently():
  ids = np.zeros((1, 20000), np.int32)
  _, is_masked = corruption.mask_bernoulli(
    jax.random.key(4), ids, ids == 0, np.array([0.3], np.float32), mask_id=1
  )
  one, next_one = is_masked[0, :-1], is_masked[0, 1:]
  assert abs(np.mean(one & next_one) - 0.09) < 0.01
  _, again = corruption.mask_bernoulli(
    jax.random.key(4), ids, ids == 0, np.array([0.3], np.float32), mask_id=1
  )
  np.testing.assert_array_equal(is_masked, again)


def small(**changes):
  arguments = dict(
    key=jax.random.key(0),
    token_ids=np.zeros((2, 3), np.uint8),
    is_supervised=np.ones((2, 3), bool),
    mask_probability=np.ones(2, np.float32),
    mask_id=7,
  )
  return {**arguments, **changes}


@pytest.mark.parametrize(
  ("changes", "error", "message"),
  [
    (
      dict(token_ids=[[1, 2]]),
      TypeError,
      "token_ids must be a JAX/NumPy array or ShapeDtypeStruct; received list",
    ),
    (
      dict(token_ids=np.zeros((2, 3))),
      TypeError,
      "token_ids must have integer dtype; received float64",
    ),
    (
      dict(token_ids=np.zeros(3, np.int32)),
      ValueError,
      "token_ids must have shape [batch, length]; received int32[3]",
    ),
    (
      dict(is_supervised=np.ones((2, 3), np.int32)),
      TypeError,
      "is_supervised must have boolean dtype; received int32",
    ),
    (
      dict(is_supervised=np.ones((2, 4), bool)),
      ValueError,
      "is_supervised must match token_ids shape; received (2, 4) and (2, 3)",
    ),
    (
      dict(mask_probability=np.ones(3, np.float32)),
      ValueError,
      "mask_probability must have shape [batch] or [batch, length]; received"
      " (3,) for [batch, length] = (2, 3)",
    ),
    (
      dict(mask_probability=np.ones((2, 1), np.float32)),
      ValueError,
      "mask_probability must have shape [batch] or [batch, length]; received"
      " (2, 1) for [batch, length] = (2, 3)",
    ),
    (
      dict(mask_probability=np.ones(2, np.int32)),
      TypeError,
      "mask_probability must have floating-point dtype; received int32",
    ),
    (
      dict(mask_probability=0.5),
      TypeError,
      "mask_probability must be a JAX/NumPy array; received float",
    ),
    (
      dict(mask_id=256),
      ValueError,
      "mask_id must be nonnegative and fit uint8; received 256",
    ),
    (
      dict(mask_id=-1),
      ValueError,
      "mask_id must be nonnegative and fit uint8; received -1",
    ),
    (
      dict(mask_id=-1, token_ids=np.zeros((2, 3), np.int32)),
      ValueError,
      "mask_id must be nonnegative and fit int32; received -1",
    ),
    (
      dict(mask_id=7.0),
      TypeError,
      "mask_id must be an integer; received float",
    ),
    (
      dict(mask_id=True),
      TypeError,
      "mask_id must be an integer; received bool",
    ),
  ],
)
def test_masking_refuses_wrong_arguments(changes, error, message):
  with pytest.raises(error) as raised:
    corruption.mask_bernoulli(**small(**changes))
  assert str(raised.value) == message
  if "mask_probability" in changes:
    return
  arguments = small(**changes)
  del arguments["mask_probability"]
  with pytest.raises(error) as raised:
    corruption.masked_diffusion_batch(**arguments)
  assert str(raised.value) == message


# Batches.


@schedules
def test_a_batch_weighs_masked_positions_alone(schedule, probability, weight):
  del probability
  rng = np.random.default_rng(0)
  ids = rng.integers(0, 7, (6, 40), dtype=np.int32)
  supervised = rng.random((6, 40)) < 0.7
  build = jax.jit(
    lambda key, ids, supervised: corruption.masked_diffusion_batch(
      key,
      ids,
      supervised,
      mask_id=7,
      model_inputs=lambda noisy, times: {"noisy": noisy, "times": times},
      mask_probability=schedule,
    )
  )
  batch = build(jax.random.key(5), ids, supervised)
  batch.check_values(7)
  noisy, times = batch.model_inputs["noisy"], batch.model_inputs["times"]
  is_masked = np.asarray(noisy == 7)
  assert is_masked.any() and not np.any(is_masked & ~supervised)
  np.testing.assert_array_equal(batch.target_ids, ids)
  np.testing.assert_array_equal(batch.is_supervised, supervised)
  np.testing.assert_array_equal(noisy, np.where(is_masked, 7, ids))
  expected = np.where(is_masked, weight(np.float64(times))[:, None], 0)
  np.testing.assert_allclose(batch.loss_weights, expected, rtol=1e-5, atol=1e-6)
  assert np.all(np.asarray(batch.loss_weights)[~is_masked] == 0)
  logits = np.zeros((6, 40, 7), np.float32)
  loss = do.weighted_cross_entropy_loss(logits, batch).primary_loss
  assert float(loss.denominator) == supervised.sum()


def test_a_batch_is_a_function_of_its_key():
  ids, supervised = tokens()
  build = lambda key: corruption.masked_diffusion_batch(  # noqa: E731
    key, ids, supervised, mask_id=7
  )
  one, again, other = (build(jax.random.key(seed)) for seed in (0, 0, 1))
  for got, want in zip(
    jax.tree.leaves(one), jax.tree.leaves(again), strict=True
  ):
    np.testing.assert_array_equal(got, want)
  assert not np.array_equal(one.loss_weights, other.loss_weights)


@pytest.mark.parametrize("min_time", [0.0, 0.5])
def test_the_least_time_bounds_the_weights(min_time):
  ids = np.zeros((512, 8), np.int32)
  batch = corruption.masked_diffusion_batch(
    jax.random.key(0), ids, ids == 0, mask_id=1, min_time=min_time
  )
  batch.check_values(1)
  largest = np.max(batch.loss_weights)
  assert 1 < largest <= 2 + 1e-5 if min_time else largest > 8


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_a_wide_clean_id_stays_out_of_the_vocabulary(dtype):
  ids = np.array([[1, 2**32 + 5, 3]], dtype)
  batch = corruption.masked_diffusion_batch(
    jax.random.key(0), ids, np.ones((1, 3), bool), mask_id=7, min_time=0.999
  )
  assert np.all(batch.loss_weights > 0)
  with pytest.raises(ValueError, match="active target_ids"):
    batch.check_values(7)
  assert np.all(np.asarray(batch.target_ids)[0, ::2] == [1, 3])


def test_a_batch_may_have_no_rows():
  batch = corruption.masked_diffusion_batch(
    jax.random.key(0),
    np.zeros((0, 3), np.int32),
    np.zeros((0, 3), bool),
    mask_id=7,
  )
  assert batch.loss_weights.shape == (0, 3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_narrow_probabilities_mask_at_their_own_rate(dtype):
  """A uniform drawn in bfloat16 masks 8 times too often at 1e-3."""
  probability = jnp.full((400,), 1e-3, dtype)
  ids = jnp.zeros((400, 1000), jnp.int32)
  _, is_masked = corruption.mask_bernoulli(
    jax.random.key(0), ids, jnp.ones(ids.shape, bool), probability, mask_id=1
  )
  expected = float(probability[0])
  deviation = (expected / ids.size) ** 0.5
  assert abs(float(is_masked.mean()) - expected) < 5 * deviation


@pytest.mark.parametrize("probability", [-0.1, 1.5, np.nan])
def test_a_probability_outside_0_to_1_is_refused(probability):
  with pytest.raises(ValueError, match=r"within \[0, 1\]; received"):
    corruption.mask_bernoulli(
      jax.random.key(0),
      np.zeros((1, 3), np.int32),
      np.ones((1, 3), bool),
      np.full((1,), probability, np.float32),
      mask_id=1,
    )


# The bound of a network that knows the data's distribution is exact.

LETTERS, SEQUENCE = 3, (2, 0, 1)
POSITIONS = len(SEQUENCE)
MASKS = list(itertools.product((False, True), repeat=POSITIONS))


def distribution():
  joint = np.random.default_rng(7).random((LETTERS,) * POSITIONS) ** 3
  return joint / joint.sum()


def conditionals(mask):
  """`p(x_i | visible)` of each position of `SEQUENCE`, `[position, letter]`."""
  rows = np.full((POSITIONS, LETTERS), 1 / LETTERS)
  visible = tuple(
    slice(None) if hidden else letter
    for hidden, letter in zip(mask, SEQUENCE, strict=True)
  )
  joint = distribution()[visible]
  hidden = [i for i in range(POSITIONS) if mask[i]]
  for axis, i in enumerate(hidden):
    others = tuple(a for a in range(len(hidden)) if a != axis)
    rows[i] = joint.sum(axis=others) / joint.sum()
  return rows


def negative_log_likelihood():
  return -math.log(distribution()[SEQUENCE])


def cost(mask):
  """The sum of `-log p(x_i | visible)` over the masked positions."""
  rows = conditionals(mask)
  return -sum(
    math.log(rows[i, SEQUENCE[i]]) for i in range(POSITIONS) if mask[i]
  )


def test_the_weights_of_all_masks_integrate_to_the_likelihood():
  # Int w(t) m^k (1 - m)^(n - k) dt = 1 / (k C(n, k)), whatever the schedule.
  exact = sum(
    cost(mask) / (sum(mask) * math.comb(POSITIONS, sum(mask)))
    for mask in MASKS
    if any(mask)
  )
  np.testing.assert_allclose(exact, negative_log_likelihood(), rtol=1e-12)


@pytest.mark.parametrize("name", ["linear", "cosine", "quadratic"])
def test_the_expected_bound_is_the_likelihood(name):
  schedule, _, _ = SCHEDULES[name]
  grid = ((np.arange(20000) + 0.5) / 20000).astype(np.float32)
  rates = np.float64(schedule(grid))
  weights = np.float64(corruption.elbo_weights(grid, schedule))
  bound = 0.0
  for mask in MASKS:
    chances = np.prod(
      [rates if hidden else 1 - rates for hidden in mask], axis=0
    )
    bound += np.mean(weights * chances) * cost(mask)
  np.testing.assert_allclose(bound, negative_log_likelihood(), rtol=1e-4)


@pytest.mark.parametrize("name", ["linear", "cosine", "quadratic"])
def test_the_mean_of_drawn_batches_is_near_the_likelihood(name):
  rows, draws = 8192, 8
  logits_of_mask = np.log(np.stack([conditionals(mask) for mask in MASKS]))
  ids = np.tile(np.array(SEQUENCE, np.int32), (rows, 1))

  @jax.jit
  def draw(key):
    batch = corruption.masked_diffusion_batch(
      key,
      ids,
      np.ones(ids.shape, bool),
      mask_id=LETTERS,
      mask_probability=SCHEDULES[name][0],
    )
    is_masked = batch.model_inputs["input_tokens"] == LETTERS
    powers = jnp.array([4, 2, 1])  # the order of `MASKS`
    index = jnp.sum(jnp.where(is_masked, powers, 0), axis=1)
    logits = jnp.asarray(logits_of_mask, jnp.float32)[index]
    return do.weighted_cross_entropy_loss(
      logits, batch, denominator="sequences"
    )

  outputs = [draw(key) for key in jax.random.split(jax.random.key(11), draws)]
  bounds = [float(output.primary_loss.compute()) for output in outputs]
  error = np.std(bounds, ddof=1) / math.sqrt(draws)
  merged = do.merge(outputs).primary_loss
  assert merged.denominator == rows * draws
  assert error < 0.01 * negative_log_likelihood()
  np.testing.assert_allclose(
    merged.compute(), negative_log_likelihood(), atol=4 * error
  )


# The laws of masks, against enumeration.

DRAWS = 2048
IDS4 = np.tile(np.int32([2, 5, 0, 1]), (DRAWS, 1))
SUPERVISED4 = np.tile([True, False, True, True], (DRAWS, 1))
WHERE = np.flatnonzero(SUPERVISED4[0])
SUBSETS = list(itertools.product((False, True), repeat=len(WHERE)))


def assert_is_law(is_masked, chances):
  """The supervised positions' masks have `chances`, in `SUBSETS`'s order."""
  is_masked = np.asarray(is_masked)
  assert not np.any(is_masked & ~SUPERVISED4)
  index = is_masked[:, WHERE] @ np.array([4, 2, 1])
  counts, expected = np.bincount(index, minlength=8), DRAWS * np.array(chances)
  possible = expected > 0
  assert np.all(counts[~possible] == 0)
  freedom = possible.sum() - 1
  surprise = np.sum((counts - expected)[possible] ** 2 / expected[possible])
  # Exceeded once in 10^5 right laws, or less.
  assert surprise <= freedom + 5 * math.sqrt(2 * freedom) + 8


def bernoulli_chances(rates):
  return np.array([np.prod(np.where(s, rates, 1 - rates)) for s in SUBSETS])


def size_chances(chance_of_size):
  sizes = [sum(s) for s in SUBSETS]
  return [chance_of_size[k] / math.comb(len(WHERE), k) for k in sizes]


RATES4 = np.float32([0.1, 0.6, 0.35, 0.8])
NONEMPTY = bernoulli_chances(RATES4[WHERE]) * (np.arange(8) > 0)
NONEMPTY /= NONEMPTY.sum()


def nonempty_masks(key):
  return corruption.mask_nonempty(
    key, IDS4, SUPERVISED4, np.tile(RATES4, (DRAWS, 1)), mask_id=9
  )[1]


def forced_masks(key):
  """A uniformly chosen token is masked where none was."""
  mask_key, choice_key = jax.random.split(key)
  _, is_masked = corruption.mask_bernoulli(
    mask_key, IDS4, SUPERVISED4, np.tile(RATES4, (DRAWS, 1)), mask_id=9
  )
  choice = jax.random.choice(choice_key, WHERE, (DRAWS, 1))
  forced = jnp.arange(4, dtype=choice.dtype)[None] == choice
  return is_masked | (forced & ~is_masked.any(axis=1, keepdims=True))


def counted_masks(extra):
  counts = np.full(DRAWS, 2 + extra, np.int32)
  return lambda key: corruption.mask_exact_count(
    key, IDS4, SUPERVISED4, counts, mask_id=9
  )[1]


def first_masks(key):
  """The right number, and always the same subset."""
  del key
  return jnp.asarray(SUPERVISED4) & (np.cumsum(SUPERVISED4, axis=1) <= 2)


def any_position_masks(key):
  """The right number of all positions, supervised or not."""
  return corruption.mask_exact_count(
    key, IDS4, np.ones_like(SUPERVISED4), np.full(DRAWS, 2), mask_id=9
  )[1]


def masks_at_times_of_tokens(key):
  """A time for each token where one for the block belongs."""
  time_key, mask_key = jax.random.split(key)
  return corruption.mask_bernoulli(
    mask_key,
    IDS4,
    SUPERVISED4,
    jax.random.uniform(time_key, IDS4.shape),
    mask_id=9,
  )[1]


def law(masking):
  return lambda key: masking(key, IDS4, SUPERVISED4, mask_id=9).is_masked


MASK_LAWS = {
  "nonempty": (
    NONEMPTY,
    nonempty_masks,
    {"forced": forced_masks},
  ),
  "exact count": (
    size_chances([0, 0, 1, 0]),
    counted_masks(0),
    {
      "one less": counted_masks(-1),
      "one more": counted_masks(1),
      "not shuffled": first_masks,
      "of all positions": any_position_masks,
    },
  ),
  "count weighted": (
    size_chances([1 / 4] * 4),
    law(corruption.count_weighted_masking),
    {
      "without the empty": law(corruption.uniform_count_masking),
      "a time a token": masks_at_times_of_tokens,
    },
  ),
  "uniform count": (
    size_chances([0, 1 / 3, 1 / 3, 1 / 3]),
    law(corruption.uniform_count_masking),
    {
      "with the empty": law(corruption.count_weighted_masking),
      "time drawn before": law(corruption.nonempty_masking),
    },
  ),
}
SEEDS = 20


def at_all_seeds(draw):
  """What `draw` gives at each seed, in NumPy, by one compiled call."""
  keys = jax.random.split(jax.random.key(0), SEEDS)
  drawn = jax.jit(lambda keys: jax.lax.map(draw, keys))(keys)
  drawn = jax.tree.map(np.asarray, drawn)
  return [jax.tree.map(lambda a, i=i: a[i], drawn) for i in range(SEEDS)]


@pytest.mark.parametrize("name", MASK_LAWS)
def test_masks_have_their_law_and_planted_ones_have_not(name):
  chances, right, wrong = MASK_LAWS[name]
  for is_masked in at_all_seeds(right):
    assert_is_law(is_masked, chances)
  for draw in wrong.values():
    for is_masked in at_all_seeds(draw):
      with pytest.raises(AssertionError):
        assert_is_law(is_masked, chances)


@pytest.mark.parametrize("rate", [1e-6, 1.0])
def test_a_nonempty_mask_at_the_ends_of_the_rates(rate):
  _, is_masked = corruption.mask_nonempty(
    jax.random.key(0),
    IDS4,
    SUPERVISED4,
    np.full(DRAWS, rate, np.float32),
    mask_id=9,
  )
  chances = [0, 1 / 3, 1 / 3, 0, 1 / 3, 0, 0, 0] if rate < 1 else [0] * 7 + [1]
  assert_is_law(is_masked, chances)


def test_nonempty_masks_differ_from_bernoulli_ones_by_a_factor_alone():
  """Within and between blocks, whatever their sizes."""
  rng = np.random.default_rng(0)
  rates = rng.uniform(0.01, 0.2, (5, 40)).astype(np.float32)
  supervised = rng.random((5, 40)) < 0.6
  ids = np.zeros((5, 40), np.int32)
  blocks = np.sort(rng.integers(0, 9, (5, 40)), axis=1)
  draw = jax.jit(
    jax.vmap(
      lambda key: corruption.mask_nonempty(
        key, ids, supervised, rates, mask_id=1, block_ids=blocks
      )[1]
    )
  )
  drawn = np.asarray(draw(jax.random.split(jax.random.key(0), 4000)))
  nonempty = corruption.nonempty_probability(
    rates, supervised, block_ids=blocks
  )
  expected = np.zeros(rates.shape)
  expected[supervised] = rates[supervised] / np.asarray(nonempty)[supervised]
  error = np.sqrt(np.maximum(expected * (1 - expected), 0) / 4000)
  assert np.all(np.abs(drawn.mean(axis=0) - expected) <= 4.5 * error + 1e-6)
  for row in range(5):
    for block in set(blocks[row]):
      members = (blocks[row] == block) & supervised[row]
      some = drawn[:, row, members].any(axis=1)
      assert np.all(some == members.any())
      chance = 1 - np.prod(1 - np.float64(rates[row, members]))
      got = nonempty[row, blocks[row] == block]
      np.testing.assert_allclose(got, chance, rtol=1e-5)


def test_a_count_is_kept_in_each_block():
  rng = np.random.default_rng(1)
  blocks = np.sort(rng.integers(0, 6, (6, 30)), axis=1)
  supervised = rng.random((6, 30)) < 0.7
  counts = np.zeros((6, 30), np.int32)
  for row in range(6):
    for block in set(blocks[row]):
      here = blocks[row] == block
      counts[row, here] = rng.integers(0, supervised[row, here].sum() + 1)
  ids = np.zeros((6, 30), np.uint8)
  noisy, is_masked = jax.jit(
    lambda key: corruption.mask_exact_count(
      key, ids, supervised, counts, mask_id=3, block_ids=blocks
    )
  )(jax.random.key(0))
  is_masked = np.asarray(is_masked)
  assert noisy.dtype == np.uint8 and not np.any(is_masked & ~supervised)
  np.testing.assert_array_equal(noisy, 3 * np.asarray(is_masked))
  for row in range(6):
    for block in set(blocks[row]):
      here = blocks[row] == block
      assert is_masked[row, here].sum() == counts[row, here][0]


def test_masks_take_a_probability_for_each_token():
  rates = np.tile(np.float32([0.0, 0.25, 1.0]), (2, 1000))
  ids = np.zeros(rates.shape, np.int32)
  _, is_masked = corruption.mask_bernoulli(
    jax.random.key(0), ids, ids == 0, rates, mask_id=1
  )
  assert not is_masked[:, ::3].any() and is_masked[:, 2::3].all()
  assert abs(is_masked[:, 1::3].mean() - 0.25) < 0.04


# What cannot be drawn, or has no weight.

TWO = np.array([[True, True, False], [True, True, True]])


def impossible(name, value):
  """A mask of rows 0 and 1 whose row 0 has no right outcome."""
  ids = np.zeros((2, 3), np.int32)
  return {
    "counts": lambda value: corruption.mask_exact_count(
      jax.random.key(0), ids, TWO, value, mask_id=1
    ),
    "mixed": lambda value: corruption.mask_exact_count(
      jax.random.key(0), ids, TWO, value, mask_id=1
    ),
    "nonempty": lambda value: corruption.mask_nonempty(
      jax.random.key(0), ids, TWO, value, mask_id=1
    ),
    "bernoulli": lambda value: corruption.mask_bernoulli(
      jax.random.key(0), ids, TWO, value, mask_id=1
    ),
    "redrawn": lambda value: corruption.uniform_replacement(
      jax.random.key(0), ids, TWO, value, vocabulary_size=5
    ),
  }[name], value


@pytest.mark.parametrize(
  ("name", "value", "message"),
  [
    (
      "counts",
      np.int32([3, 1]),
      "counts must be nonnegative and .*; recei.* 3",
    ),
    ("counts", np.int32([-1, 1]), "counts must be nonnegative and .*-1"),
    ("mixed", np.int32([[1, 2, 1], [1, 1, 1]]), "counts must be constant on"),
    ("nonempty", np.float32([0, 1]), "mask_probability must be positive some"),
    ("nonempty", np.float32([1.5, 1]), r"mask_probability must be within \[0,"),
    ("nonempty", np.float32([np.nan, 1]), "mask_probability must be within"),
    ("bernoulli", np.float32([-0.5, 1]), "mask_probability must be within"),
    ("redrawn", np.float32([2, 1]), r"probability must be within \[0, 1\]"),
  ],
)
def test_what_cannot_be_drawn_is_refused_and_visible_under_trace(
  name, value, message
):
  draw, value = impossible(name, value)
  with pytest.raises(ValueError, match=f"^{message}"):
    draw(value)
  _, touched = jax.jit(draw)(value)
  np.testing.assert_array_equal(touched[0], ~TWO[0])
  assert not np.any(touched[1] & ~TWO[1]) and touched[1].any()
  weights = jax.jit(
    lambda touched: corruption.count_weights(touched, TWO, keeps_empty=False)
  )(touched)
  assert np.isnan(weights[0]).any() and not np.isnan(weights[1]).any()
  batch = do.DiffusionTokenBatch(
    model_inputs=np.zeros((2, 1), np.float32),
    target_ids=np.zeros((2, 3), np.int32),
    loss_weights=np.float32(touched),
    is_supervised=TWO,
  )
  with pytest.raises(ValueError, match="must be 0 where is_supervised is Fal"):
    batch.check_values(1)
  loss = do.weighted_cross_entropy_loss(jnp.zeros((2, 3, 1)), batch)
  assert np.isnan(loss.primary_loss.compute())


@pytest.mark.parametrize(
  ("masked", "keeps_empty", "message"),
  [
    ([[0, 0, 1], [1, 0, 0]], True, "is_masked must be False where is_superv"),
    ([[0, 0, 0], [1, 0, 0]], False, "is_masked must hold a position of each"),
  ],
)
def test_a_mask_of_another_law_has_no_count_weight(
  masked, keeps_empty, message
):
  weigh = lambda masked: corruption.count_weights(  # noqa: E731
    masked, TWO, keeps_empty=keeps_empty
  )
  masked = np.array(masked, bool)
  with pytest.raises(ValueError, match=f"^{message}"):
    weigh(masked)
  weights = jax.jit(weigh)(masked)
  assert np.isnan(weights[0]).any()
  np.testing.assert_array_equal(weights[1], [3 + keeps_empty, 0, 0])


def test_the_law_of_the_counts_must_be_said():
  with pytest.raises(TypeError, match="keeps_empty"):
    corruption.count_weights(TWO, TWO)
  with pytest.raises(TypeError, match=r"^keeps_empty must be a bool"):
    corruption.count_weights(TWO, TWO, keeps_empty=1)


# The bound, exactly: all masks, all weights, exact conditionals.

BLOCKS = {"row": (0, 0, 0), "2 + 1": (0, 0, 1), "1 + 1 + 1": (0, 1, 2)}
blocks_of_the_row = pytest.mark.parametrize(
  "blocks", BLOCKS.values(), ids=BLOCKS
)
ALL_MASKS = np.array(MASKS)


def token_costs(blocks):
  """`-log p(x_i | visible)` of each mask and position.

  Visible are earlier blocks, and what the mask leaves of the token's own.
  """
  blocks = np.array(blocks)
  rows = np.zeros(ALL_MASKS.shape)
  for number, mask in enumerate(ALL_MASKS):
    for i in np.flatnonzero(mask):
      hidden = (mask & (blocks == blocks[i])) | (blocks > blocks[i])
      chances = conditionals(tuple(map(bool, hidden)))
      rows[number, i] = -math.log(chances[i, SEQUENCE[i]])
  return rows


def like_all_masks(blocks):
  return np.tile(np.int32(blocks), (len(MASKS), 1))


def block_sizes(blocks):
  """Each mask's numbers of masked and of all tokens, by block."""
  members = [np.array(blocks) == b for b in sorted(set(blocks))]
  return [(ALL_MASKS[:, m].sum(axis=1), m.sum()) for m in members]


@blocks_of_the_row
@pytest.mark.parametrize("keeps_empty", [True, False])
def test_count_weights_give_the_likelihood_exactly(blocks, keeps_empty):
  chances = np.ones(len(MASKS))
  for k, n in block_sizes(blocks):
    of_size = np.full(len(k), 1 / (n + keeps_empty)) * (keeps_empty | (k > 0))
    chances *= of_size / [math.comb(n, size) for size in k]
  np.testing.assert_allclose(chances.sum(), 1, rtol=1e-12)
  drawn = chances > 0
  weights = corruption.count_weights(
    ALL_MASKS[drawn],
    np.ones_like(ALL_MASKS[drawn]),
    keeps_empty=keeps_empty,
    block_ids=like_all_masks(blocks)[drawn],
  )
  costs = (np.float64(weights) * token_costs(blocks)[drawn]).sum(axis=1)
  bound = np.sum(chances[drawn] * costs)
  np.testing.assert_allclose(bound, negative_log_likelihood(), rtol=1e-6)


@blocks_of_the_row
@pytest.mark.parametrize("name", ["linear", "cosine", "quadratic"])
@pytest.mark.parametrize("nonempty", [False, True])
def test_time_weights_give_the_likelihood_exactly(blocks, name, nonempty):
  """Blocks are independent, so each is integrated over a time of its own."""
  schedule, _, _ = SCHEDULES[name]
  grid = ((np.arange(4000) + 0.5) / 4000).astype(np.float32)
  rates = np.float64(schedule(grid))
  costs, bound = token_costs(blocks), 0.0
  for block in set(blocks):
    here = np.array(blocks) == block
    weights = np.float64(corruption.elbo_weights(grid, schedule))
    certain = np.ones(len(grid))
    if nonempty:
      some = corruption.nonempty_probability(
        schedule(grid), np.tile(here, (len(grid), 1))
      )
      certain = np.float64(some[:, 0])
      weights = weights * certain
    for number, mask in enumerate(ALL_MASKS):
      if mask.any() and not np.any(mask & ~here):
        k = mask.sum()
        chances = rates**k * (1 - rates) ** (here.sum() - k) / certain
        bound += np.mean(weights * chances) * costs[number].sum()
  np.testing.assert_allclose(bound, negative_log_likelihood(), rtol=1e-3)


def test_blocks_of_one_at_time_1_are_the_autoregressive_likelihood():
  ids = np.tile(np.int32(SEQUENCE), (4, 1))
  batch = corruption.masked_diffusion_batch(
    jax.random.key(0),
    ids,
    np.ones(ids.shape, bool),
    mask_id=LETTERS,
    block_size=1,
    min_time=1.0,
  )
  np.testing.assert_array_equal(batch.loss_weights, 1)
  costs = token_costs((0, 1, 2))[-1]
  bound = np.sum(np.float64(batch.loss_weights) * costs, axis=1)
  np.testing.assert_allclose(bound, negative_log_likelihood(), rtol=1e-12)


# The bound of drawn masks, and laws that miss it.

BOUND_ROWS = 4096
IDS3 = np.tile(np.int32(SEQUENCE), (BOUND_ROWS, 1))
ALL3 = np.ones(IDS3.shape, bool)


def drawn_bounds(draw, blocks=(0, 0, 0)):
  """Each row's estimate of the negative log-likelihood, in float64."""
  index = np.asarray(draw.is_masked) @ np.array([4, 2, 1])
  costs = np.where(draw.is_masked, token_costs(blocks)[index], 0)
  return (np.float64(draw.loss_weights) * costs).sum(axis=1)


def assert_is_unbiased(draw, blocks=(0, 0, 0)):
  bounds = drawn_bounds(draw, blocks)
  error = bounds.std() / math.sqrt(len(bounds))
  assert error < 0.05 * negative_log_likelihood()
  assert abs(bounds.mean() - negative_log_likelihood()) < 4.5 * error


def draw_with(masking, blocks=None, **options):
  block_ids = (
    None if blocks is None else np.tile(np.int32(blocks), (BOUND_ROWS, 1))
  )
  return lambda key: masking(
    key, IDS3, ALL3, mask_id=LETTERS, block_ids=block_ids, **options
  )


LAWS = (
  corruption.bernoulli_masking,
  corruption.nonempty_masking,
  corruption.count_weighted_masking,
  corruption.uniform_count_masking,
)


@functools.cache
def rows_at_all_seeds(masking, **options):
  return at_all_seeds(draw_with(masking, **options))


@pytest.mark.parametrize("masking", LAWS)
def test_drawn_masks_estimate_the_likelihood(masking):
  for draw in rows_at_all_seeds(masking):
    assert_is_unbiased(draw)


# A law and a weight, by `t` and `k`, that is another's.
MISMATCHES = {
  "a forced token with 1/t kept": (
    corruption.nonempty_masking,
    lambda t, k: 1 / t,
  ),
  "n/k with the empty kept": (
    corruption.count_weighted_masking,
    lambda t, k: 3 / k,
  ),
  "n/k of times drawn before": (
    corruption.nonempty_masking,
    lambda t, k: 3 / k,
  ),
  "(n+1)/k without the empty": (
    corruption.uniform_count_masking,
    lambda t, k: 4 / k,
  ),
  "1/t on uniform counts": (
    corruption.uniform_count_masking,
    lambda t, k: 1 / np.maximum(t, 1e-3),
  ),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_mask_with_the_weight_of_another_law_does_not(name):
  masking, weight = MISMATCHES[name]
  for draw in rows_at_all_seeds(masking):
    k = np.maximum(draw.is_masked.sum(axis=1), 1)
    weights = draw.is_masked * weight(draw.times, k)[:, None]
    with pytest.raises(AssertionError):
      assert_is_unbiased(draw._replace(loss_weights=weights))


def test_a_clipped_range_does_not():
  for draw in rows_at_all_seeds(corruption.bernoulli_masking, min_time=0.6):
    with pytest.raises(AssertionError):
      assert_is_unbiased(draw)


@pytest.mark.parametrize("masking", LAWS)
def test_drawn_blocks_estimate_the_likelihood(masking):
  blocks = BLOCKS["2 + 1"]
  for draw in at_all_seeds(draw_with(masking, blocks)):
    assert_is_unbiased(draw, blocks)


SPREAD_TOKENS = 16


def variance_of_weights(nonempty):
  """Of `S`, the mean weight of a row of 16 tokens, by `E[S^2 | t]`."""
  times = 1e-3 + (1 - 1e-3) * (np.arange(10**5) + 0.5) / 10**5
  square = 1 + (1 - times) / (SPREAD_TOKENS * times)
  if nonempty:
    square *= 1 - (1 - times) ** SPREAD_TOKENS
  return square.mean() - 1


@pytest.mark.parametrize(
  ("masking", "variance"),
  [
    (corruption.bernoulli_masking, variance_of_weights(nonempty=False)),
    (corruption.nonempty_masking, variance_of_weights(nonempty=True)),
    (corruption.count_weighted_masking, 1 / SPREAD_TOKENS),
    (corruption.uniform_count_masking, 0.0),
  ],
)
def test_the_weights_of_a_constant_loss_spread_as_derived(masking, variance):
  ids = np.zeros((10000, SPREAD_TOKENS), np.int32)
  draw = jax.jit(lambda key: masking(key, ids, ids == 0, mask_id=1))
  rows = np.float64(draw(jax.random.key(0)).loss_weights).mean(axis=1)
  np.testing.assert_allclose(
    rows.std(), math.sqrt(variance), rtol=0.1, atol=1e-6
  )
  assert abs(rows.mean() - 1) <= 4.5 * math.sqrt(variance) / 100 + 1e-6


# Times of blocks.


def assert_are_block_times(times, blocks, low=0.0, high=1.0):
  times, blocks = np.float64(times), np.asarray(blocks)
  assert np.all(times <= high) and np.all(times >= low - 1e-6)
  starts = np.ones(blocks.shape, bool)
  starts[:, 1:] = blocks[:, 1:] != blocks[:, :-1]
  inside = ~starts[:, 1:]
  np.testing.assert_array_equal(times[:, 1:][inside], times[:, :-1][inside])
  unit = (np.sort(times[starts]) - low) / (high - low)
  strata = np.arange(len(unit)) / len(unit)
  assert np.all(unit >= strata - 1e-5)
  assert np.all(unit <= strata + 1 / len(unit) + 1e-5)


BLOCKS7 = np.asarray(
  corruption.block_ids(np.zeros((16, 7), np.int32), block_size=3)
)


def test_a_block_of_the_batch_has_a_stratum():
  np.testing.assert_array_equal(BLOCKS7[3], [0, 0, 0, 3, 3, 3, 6])
  right = lambda key: corruption.block_times(key, BLOCKS7)  # noqa: E731
  clipped = lambda key: corruption.block_times(  # noqa: E731
    key, BLOCKS7, min_time=0.3, max_time=0.8
  )
  for times in at_all_seeds(right):
    assert_are_block_times(times, BLOCKS7, 1e-3)
    with pytest.raises(AssertionError):
      assert_are_block_times(times, BLOCKS7, 0.3, 0.8)
  for times in at_all_seeds(clipped):
    assert_are_block_times(times, BLOCKS7, 0.3, 0.8)
  independent = lambda key: corruption.block_times(  # noqa: E731
    key, BLOCKS7, stratified=False
  )
  by_token = lambda key: jax.random.uniform(key, BLOCKS7.shape)  # noqa: E731
  for times in at_all_seeds(independent) + at_all_seeds(by_token):
    with pytest.raises(AssertionError):
      assert_are_block_times(times, BLOCKS7)


@pytest.mark.parametrize("stratified", [True, False])
def test_each_block_by_itself_is_uniform(stratified):
  keys = jax.random.split(jax.random.key(2), 4000)
  times = jax.vmap(
    lambda key: corruption.block_times(
      key, BLOCKS7[:2], min_time=0.0, stratified=stratified
    )
  )(keys)
  for row, token in ((0, 0), (1, 5), (1, 6)):
    assert distance_to_uniform(times[:, row, token]) < 2 / math.sqrt(4000)
  neighbours = np.corrcoef(times[:, 0, 0], times[:, 0, 3])[0, 1]
  assert abs(neighbours + (1 / 6 if stratified else 0)) < 0.08


def test_a_clipped_range_bounds_times_of_rows():
  times = corruption.stratified_times(
    jax.random.key(0), 64, min_time=0.3, max_time=0.8
  )
  unit = (np.sort(np.float64(times)) - 0.3) / 0.5
  assert np.all(np.floor(unit * 64 - 1e-4) <= np.arange(64))
  assert np.all(unit >= np.arange(64) / 64 - 1e-5) and times.max() <= 0.8


# Complements and replacements.


def assert_covers_each_supervised_token_once(masks):
  halves = np.split(np.asarray(masks), 2)
  covered = np.sum(halves, axis=0, dtype=int)
  np.testing.assert_array_equal(covered, SUPERVISED4)


def complemented(key):
  noisy, is_masked = corruption.mask_bernoulli(
    key, IDS4, SUPERVISED4, np.full(DRAWS, 0.4, np.float32), mask_id=9
  )
  pair = corruption.complementary_masks(IDS4, SUPERVISED4, is_masked, mask_id=9)
  return noisy, is_masked, *pair


def test_a_mask_and_its_complement_cover_each_supervised_token_once():
  for noisy, is_masked, both_noisy, both in at_all_seeds(complemented):
    assert_covers_each_supervised_token_once(both)
    np.testing.assert_array_equal(both_noisy[:DRAWS], noisy)
    np.testing.assert_array_equal(
      both_noisy, np.where(both, 9, np.tile(IDS4, (2, 1)))
    )
    for wrong in (~is_masked, is_masked, SUPERVISED4):
      with pytest.raises(AssertionError):
        assert_covers_each_supervised_token_once(
          np.concatenate([is_masked, wrong])
        )


def test_both_scales_of_complementary_masks_are_right():

  @jax.jit
  def draw(key):
    drawn = draw_with(corruption.count_weighted_masking)(key)
    _, both = corruption.complementary_masks(
      IDS3, ALL3, drawn.is_masked, mask_id=LETTERS
    )
    weights = corruption.count_weights(
      both, jnp.ones_like(both), keeps_empty=True
    )
    return drawn._replace(is_masked=both, loss_weights=weights)

  drawn = draw(jax.random.key(0))
  assert_is_unbiased(drawn)
  both = drawn.is_masked
  ones = do.DiffusionTokenBatch(
    model_inputs=both,
    target_ids=np.tile(IDS3, (2, 1)),
    loss_weights=both,
    is_supervised=np.ones(both.shape, bool),
  )
  logits = jnp.zeros((*both.shape, LETTERS))
  mean = do.weighted_cross_entropy_loss(logits, ones, denominator="masked")
  np.testing.assert_allclose(
    mean.primary_loss.compute(), math.log(LETTERS), rtol=1e-5
  )
  assert float(mean.primary_loss.denominator) == IDS3.size


def test_a_complement_needs_a_mask_of_supervised_tokens():
  with pytest.raises(ValueError, match=r"^is_masked must be False where is_su"):
    corruption.complementary_masks(
      np.zeros((2, 3), np.int32), TWO, ~TWO, mask_id=1
    )


VOCABULARY = 5


def assert_is_uniform_replacement(noisy, rate):
  clean, noisy = IDS4[SUPERVISED4], np.asarray(noisy)
  np.testing.assert_array_equal(noisy[~SUPERVISED4], IDS4[~SUPERVISED4])
  for token in set(clean):
    counts = np.bincount(noisy[SUPERVISED4][clean == token], minlength=5)
    chances = np.full(VOCABULARY, rate / VOCABULARY)
    chances[token] += 1 - rate
    expected = chances * counts.sum()
    surprise = np.sum((counts - expected) ** 2 / expected)
    assert surprise <= 4 + 5 * math.sqrt(8) + 8


def other_token(key, rate):
  """A replacement that is never the token that was there."""
  whether, which = jax.random.split(key)
  step = jax.random.randint(which, IDS4.shape, 1, VOCABULARY)
  is_redrawn = jax.random.uniform(whether, IDS4.shape) < rate
  other = (IDS4 + step) % VOCABULARY
  return jnp.where(is_redrawn & SUPERVISED4, other, IDS4)


def replaced(size):
  rate = np.full(DRAWS, 0.6, np.float32)
  return lambda key: corruption.uniform_replacement(
    key, IDS4, SUPERVISED4, rate, vocabulary_size=size
  )


def test_a_replacement_may_be_the_same_token():
  for noisy, is_redrawn in at_all_seeds(replaced(VOCABULARY)):
    assert noisy.dtype == IDS4.dtype
    assert np.all(is_redrawn | (noisy == IDS4))
    assert abs(is_redrawn[SUPERVISED4].mean() - 0.6) < 0.03
    assert_is_uniform_replacement(noisy, 0.6)
  wrong = [noisy for noisy, _ in at_all_seeds(replaced(VOCABULARY - 1))]
  for noisy in wrong + at_all_seeds(lambda key: other_token(key, 0.6)):
    with pytest.raises(AssertionError):
      assert_is_uniform_replacement(noisy, 0.6)


@pytest.mark.parametrize(
  ("size", "error", "message"),
  [
    (0, ValueError, "vocabulary_size must be positive; received 0"),
    (300, ValueError, "the last id of vocabulary_size must be nonnegative and"),
    (5.0, TypeError, "vocabulary_size must be an integer; received float"),
  ],
)
def test_a_replacement_needs_a_vocabulary_that_its_ids_hold(
  size, error, message
):
  with pytest.raises(error, match=f"^{message}"):
    corruption.uniform_replacement(
      jax.random.key(0),
      np.zeros((2, 3), np.uint8),
      TWO,
      np.ones(2, np.float32),
      vocabulary_size=size,
    )


# Packed and padded rows.


def test_supervision_lies_between_the_prompt_and_the_length():
  got = corruption.supervision_by_length(
    np.int64([4, 2, 0]), length=5, prompt_lengths=np.int32([1, 2, 0])
  )
  expected = np.zeros((3, 5), bool)
  expected[0, 1:4] = True
  np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
  ("lengths", "prompts", "message"),
  [
    ([6, 1], [0, 0], "lengths must be at most the 5 of a row; received 6"),
    ([3, 1], [-1, 0], "prompt_lengths must be nonnegative; received -1"),
    ([3, 1], [4, 0], "lengths must be at least those of the prompts; re.* 3"),
  ],
)
def test_lengths_that_contradict_each_other_supervise_nothing(
  lengths, prompts, message
):
  supervise = lambda lengths, prompts: corruption.supervision_by_length(  # noqa: E731
    lengths, length=5, prompt_lengths=prompts
  )
  with pytest.raises(ValueError, match=f"^{message}"):
    supervise(np.int32(lengths), np.int32(prompts))
  got = jax.jit(supervise)(np.int32(lengths), np.int32(prompts))
  assert not got[0].any() and got[1].sum() == 1


def test_weights_of_sequences_sum_to_their_number():
  rng = np.random.default_rng(3)
  segments = np.sort(rng.integers(0, 5, (6, 20)), axis=1)
  supervised = (rng.random((6, 20)) < 0.5) & (segments > 0)
  weights = np.asarray(corruption.sequence_weights(supervised, segments))
  assert np.all(weights[~supervised] == 0)
  for row in range(6):
    for segment in set(segments[row][supervised[row]]):
      here = supervised[row] & (segments[row] == segment)
      np.testing.assert_allclose(weights[row, here], 1 / here.sum(), rtol=1e-6)
  by_row = corruption.sequence_weights(supervised)
  np.testing.assert_allclose(
    np.asarray(by_row).sum(axis=1), supervised.any(axis=1), rtol=1e-6
  )


def test_blocks_start_anew_with_each_segment():
  segments = np.int32([[1, 1, 1, 1, 1, 2, 2, 0], [3, 3, 3, 3, 0, 0, 0, 0]])
  got = corruption.block_ids(segments, block_size=2)
  np.testing.assert_array_equal(
    got, [[0, 0, 2, 2, 4, 5, 5, 7], [0, 0, 2, 2, 4, 4, 6, 6]]
  )
  with pytest.raises(
    ValueError, match=r"^block_size must be positive; rec.* 0"
  ):
    corruption.block_ids(segments, block_size=0)


@pytest.mark.parametrize(
  ("masking", "block_size"),
  list(zip(LAWS, [None, 2, 2, None], strict=True)),
)
def test_a_packed_batch_has_a_time_for_each_sequence(masking, block_size):
  rng = np.random.default_rng(4)
  segments = np.sort(rng.integers(0, 4, (8, 12)), axis=1)[:, ::-1].copy()
  supervised = segments > 0
  ids = rng.integers(0, 7, (8, 12), dtype=np.int32)
  build = jax.jit(
    lambda key: corruption.masked_diffusion_batch(
      key,
      ids,
      supervised,
      mask_id=7,
      segment_ids=segments,
      block_size=block_size,
      masking=masking,
      model_inputs=lambda noisy, times: {"noisy": noisy, "times": times},
    )
  )
  batch = build(jax.random.key(0))
  batch.check_values(7)
  np.testing.assert_array_equal(batch.segment_ids, segments)
  groups = corruption.block_ids(segments, block_size=block_size or 12)
  low = 0.0 if masking in LAWS[2:] else 1e-3
  assert_are_block_times(batch.model_inputs["times"], groups, low)
  masked = np.asarray(batch.model_inputs["noisy"] == 7)
  assert masked.any() and not np.any(masked & ~supervised)
  weights = np.asarray(batch.loss_weights)
  for row, group in {(r, g) for r in range(8) for g in np.asarray(groups[r])}:
    here = (np.asarray(groups)[row] == group) & supervised[row]
    if masking is corruption.uniform_count_masking:
      np.testing.assert_allclose(
        weights[row, here].sum(), here.sum(), rtol=1e-6
      )
    if masking in (corruption.nonempty_masking,):
      assert masked[row, here].any() == here.any()
  loss = do.weighted_cross_entropy_loss(
    jnp.zeros((8, 12, 7)), batch, denominator="sequences"
  )
  sequences = sum(len(set(row) - {0}) for row in segments)
  assert float(loss.primary_loss.denominator) == sequences


def test_an_argument_that_a_law_does_not_take_is_refused():
  with pytest.raises(TypeError, match="min_time"):
    corruption.masked_diffusion_batch(
      jax.random.key(0),
      np.zeros((1, 3), np.int32),
      np.ones((1, 3), bool),
      mask_id=7,
      masking=corruption.uniform_count_masking,
      min_time=0.1,
    )
  with pytest.raises(TypeError, match=r"^masking must be callable; received"):
    corruption.masked_diffusion_batch(
      jax.random.key(0),
      np.zeros((1, 3), np.int32),
      np.ones((1, 3), bool),
      mask_id=7,
      masking="uniform",
    )


# Narrow, wide and refused numbers.


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int32, np.uint32])
def test_counts_of_any_integer_dtype_are_exact(dtype):
  ids = jnp.zeros((1, 300), jnp.int32)
  _, is_masked = corruption.mask_exact_count(
    jax.random.key(0), ids, ids == 0, jnp.array([40], dtype), mask_id=7
  )
  assert is_masked.sum() == 40


@pytest.mark.parametrize(
  "call",
  [
    lambda ids: corruption.next_token_supervision(ids),
    lambda ids: corruption.sequence_weights(ids > 0, ids),
    lambda ids: corruption.block_ids(ids, block_size=2),
    lambda ids: corruption.block_times(jax.random.key(0), ids),
    lambda ids: corruption.masked_diffusion_batch(
      jax.random.key(0), np.ones(ids.shape, np.int32), ids > 0, mask_id=3,
      segment_ids=ids,
    ),
  ],
)  # fmt: skip
def test_groups_that_int32_cannot_tell_apart_are_refused(call):
  ids = np.array([[2**33 + 1, 2**33 + 1, 2**33 + 2, 2**33 + 2]])
  with pytest.raises(ValueError, match="_ids must fit int32; received 85899"):
    call(ids)


@pytest.mark.parametrize(
  "masking", [corruption.bernoulli_masking, corruption.nonempty_masking]
)
def test_a_traced_schedule_that_is_no_probability_gives_nan(masking):
  """Also in rows that are supervised throughout."""
  ids = jnp.ones((64, 8), jnp.int32)

  @jax.jit
  def weights(key):
    batch = corruption.masked_diffusion_batch(
      key, ids, ids > 0, mask_id=3, masking=masking,
      mask_probability=lambda times: 1.5 * times,
    )  # fmt: skip
    return batch.loss_weights

  rows = np.isnan(weights(jax.random.key(0)))
  assert rows.all(axis=1).any()  # times above 2/3
  np.testing.assert_array_equal(rows.any(axis=1), rows.all(axis=1))


@pytest.mark.parametrize(
  "masking",
  [
    corruption.bernoulli_masking,
    corruption.nonempty_masking,
    corruption.count_weighted_masking,
    corruption.uniform_count_masking,
  ],
)
def test_the_laws_work_in_float64_mode(masking):
  ids = np.arange(8).reshape(2, 4)
  with jax.enable_x64(True):
    batch = corruption.masked_diffusion_batch(
      jax.random.key(0), ids, ids >= 0, mask_id=9, masking=masking
    )
    batch.check_values(10)
