"""Corruption: schedules, times, masks, and the bound they add up to."""

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
    (dict(min_time=1), ValueError, "min_time must be smaller than 1"),
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
      "mask_probability must have shape [batch]; received (3,) for token_ids"
      " (2, 3)",
    ),
    (
      dict(mask_probability=np.ones((2, 3), np.float32)),
      ValueError,
      "mask_probability must have shape [batch]; received (2, 3) for token_ids"
      " (2, 3)",
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
