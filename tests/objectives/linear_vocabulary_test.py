"""Losses from hidden states: laws, agreement with float64, edges, refusals."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffusion_objectives as do
from diffusion_objectives.testing import laws
from diffusion_objectives.testing import strategies
from tests import cases_test
from tests import linear_cases
from tests import linear_oracles
from tests.objectives import cross_entropy_test
from tests.objectives import distillation_test

FORMS, OBJECTIVES = linear_cases.FORMS, linear_cases.OBJECTIVES
NAN, INF = np.nan, np.inf

# Laws. With the identity as its kernel a head's logits are the hidden states,
# so the cases and oracles of logits apply; then with a kernel that mixes.


def identity(size):
  return do.OutputHead(kernel=np.eye(size, dtype=np.float32))


@functools.cache
def mixing(size):
  rng = np.random.default_rng(size)
  kernel = rng.standard_normal((size, size)) / np.sqrt(size)
  return do.OutputHead(
    kernel=kernel.astype(np.float32),
    bias=rng.standard_normal(size).astype(np.float32),
    layout=linear_cases.TIED,
    logit_scale=0.7,
    soft_cap=20.0,
  )


def through(head, loss, **options):
  """The loss as a function of hidden states alone."""

  def run(hidden, batch):
    size = hidden.shape[-1]
    heads = {"head": head(size)}
    if isinstance(getattr(batch, "teacher", None), do.HiddenTeacher):
      heads["teacher_head"] = identity(size)
    return loss(hidden, batch=batch, **heads, **options)

  return run


def mixed_oracle(hidden, batch, **terms):
  answer = linear_oracles.evaluate(
    hidden, mixing(hidden.shape[-1]), batch, **terms
  )
  return answer.total, answer.denominator


def hidden_case(regime):
  """A case whose teacher's logits are its hidden states."""
  case = strategies.distillation_case(regime)
  teacher = do.HiddenTeacher(hidden=case.batch.teacher.logits)
  return dataclasses.replace(
    case, batch=dataclasses.replace(case.batch, teacher=teacher)
  )


def of_hidden(oracle, **terms):
  """An oracle of dense teachers for `hidden_case`."""

  def run(logits, batch):
    teacher = do.DenseTeacher(logits=batch.teacher.hidden)
    return oracle(logits, dataclasses.replace(batch, teacher=teacher), **terms)

  return run


SMALL_BLOCKS = dict(token_block=2, vocabulary_block=4)

TestCrossEntropy = laws.suite(
  through(identity, do.linear_weighted_cross_entropy_loss, **SMALL_BLOCKS),
  oracle=cross_entropy_test.oracle,
)
TestCrossEntropyRecomputed = laws.suite(
  through(
    mixing,
    do.linear_weighted_cross_entropy_loss,
    implementation="recompute",
    **SMALL_BLOCKS,
  ),
  oracle=functools.partial(mixed_oracle, hard=1.0),
)
TestForwardKL = laws.suite(
  through(
    identity,
    do.linear_forward_kl_loss,
    temperature=0.5,
    scale_by_temperature_squared=False,
    denominator="masked",
    **SMALL_BLOCKS,
  ),
  oracle=functools.partial(
    distillation_test.kl_oracle, temperature=0.5, scale=False, unit="masked"
  ),
  build=strategies.distillation_case,
  uses_targets=False,
)
TestForwardKLTopK = laws.suite(
  through(identity, do.linear_forward_kl_loss, temperature=2.0, **SMALL_BLOCKS),
  oracle=functools.partial(
    distillation_test.divergence_oracle,
    of=distillation_test.oracles.relative_entropy,
    temperature=2.0,
  ),
  build=functools.partial(strategies.top_k_case, temperature=2.0),
  uses_targets=False,
)
TestForwardKLHidden = laws.suite(
  through(
    identity,
    do.linear_forward_kl_loss,
    temperature=2.0,
    implementation="recompute",
    **SMALL_BLOCKS,
  ),
  oracle=of_hidden(distillation_test.kl_oracle, temperature=2.0),
  build=hidden_case,
  uses_targets=False,
)
TestMix = laws.suite(
  through(
    mixing,
    do.linear_prepared_opd_loss,
    temperature=2.0,
    soft_loss_weight=0.7,
    hard_loss_weight=0.4,
  ),
  oracle=functools.partial(mixed_oracle, soft=0.7, hard=0.4, temperature=2.0),
  build=strategies.distillation_case,
)


# Agreement with the oracle. Forms of the head, block sizes and implementations
# take turns among the objectives.

BLOCKS = [(None, None), (1, None), (3, 5), (64, 64), (None, 1)]
IMPLEMENTATIONS = ["grad_in_forward", "recompute"]


def combinations():
  for i, objective in enumerate(OBJECTIVES):
    for m in range(3):
      form = list(FORMS)[(3 * i + m) % len(FORMS)]
      blocks = BLOCKS[(m + 2 * i) % len(BLOCKS)]
      yield objective, form, blocks, IMPLEMENTATIONS[(m + i + i // 4) % 2]


COMBINATIONS = list(combinations())


def test_the_combinations_have_every_pair_that_matters():
  for pair in itertools.product(OBJECTIVES, IMPLEMENTATIONS):
    assert any(row[::3] == pair for row in COMBINATIONS), pair
  for pair in itertools.product(FORMS, IMPLEMENTATIONS):
    assert any(row[1::2] == pair for row in COMBINATIONS), pair
  for pair in itertools.product(BLOCKS, IMPLEMENTATIONS):
    assert any(row[2:] == pair for row in COMBINATIONS), pair
  for objective in OBJECTIVES:
    assert len({row[2] for row in COMBINATIONS if row[0] == objective}) == 3


def bound(objective, blocks=(None, None), implementation=None):
  return objective.bind(
    token_block=blocks[0],
    vocabulary_block=blocks[1],
    implementation=implementation,
  )


@pytest.mark.parametrize(
  ("objective", "form", "blocks", "implementation"), COMBINATIONS
)
def test_value_and_gradients_are_the_oracles(
  objective, form, blocks, implementation
):
  objective, form = OBJECTIVES[objective], FORMS[form]
  loss = bound(objective, blocks, implementation)
  for weights, seed in itertools.product(linear_cases.WEIGHTS, range(2)):
    case = linear_cases.draw(objective, form, seed=seed, weights=weights)
    linear_cases.agrees(loss, objective, case)


LARGE_COMBINATIONS = [
  ("cross entropy", "all", (32, 100), "grad_in_forward"),
  ("cross entropy", "low rank", (None, None), "recompute"),
  ("kl dense", "all tied", (None, None), None),
  ("kl hidden", "all", (32, 100), "grad_in_forward"),
  ("kl top-k", "plain", (50, 64), None),
  ("opd hidden", "all tied", (32, 100), "recompute"),
  ("opd top-k", "bias", (None, 32), "grad_in_forward"),
]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
  ("objective", "form", "blocks", "implementation"), LARGE_COMBINATIONS
)
def test_a_larger_case_agrees_in_both_dtypes(
  objective, form, blocks, implementation, dtype
):
  objective = OBJECTIVES[objective]
  loss = bound(objective, blocks, implementation)
  is_narrow = dtype == jnp.bfloat16
  tolerance = linear_cases.BFLOAT16 if is_narrow else linear_cases.FLOAT32
  for seed, weights in enumerate(("ones", "binary")):
    case = linear_cases.draw(
      objective,
      FORMS[form],
      seed=seed,
      weights=weights,
      shape=linear_cases.LARGE,
    )
    case = linear_cases.narrowed(case, dtype)
    linear_cases.agrees(loss, objective, case, tolerance)


@pytest.mark.parametrize("unit", ["weights", "tokens", "masked", "sequences"])
def test_the_denominator_is_of_the_unit(unit):
  objective = OBJECTIVES["opd hidden"]
  case = linear_cases.draw(objective, FORMS["plain"])
  supervised = np.random.default_rng(1).random((2, 7)) < 0.5
  batch = strategies.replace_tokens(
    case.batch,
    is_supervised=supervised | (case.batch.student_batch.loss_weights > 0),
  )
  case = dataclasses.replace(case, batch=batch)
  expected = linear_oracles.evaluate(
    case.hidden,
    case.head,
    batch,
    teacher_head=case.teacher_head,
    unit=unit,
    **objective.terms,
  )
  output = jax.jit(
    functools.partial(linear_cases.output_of, objective.bind(denominator=unit))
  )(
    case.hidden,
    case.head,
    batch,
    case.teacher_head,
  )
  np.testing.assert_allclose(
    output.primary_loss.denominator, expected.denominator, rtol=1e-6
  )


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_oracles_gradients_are_its_differences(objective):
  objective = OBJECTIVES[objective]
  case = linear_cases.draw(objective, FORMS["all"])
  rng = np.random.default_rng(1)
  arguments = jax.tree.map(np.float64, linear_cases.differentiated(case)[:3])
  direction = jax.tree.map(
    lambda x: rng.standard_normal(x.shape) * (x != 0), arguments
  )
  step = 1e-6

  def at(by, only):
    """The sum after a step, of one argument's arrays."""
    hidden, head, weights = jax.tree.map(
      lambda x, u, on: x + by * u * on, arguments, direction, only
    )
    batch = strategies.replace_tokens(case.batch, loss_weights=weights)
    moved = dataclasses.replace(case, hidden=hidden, head=head, batch=batch)
    return objective.expected(moved)

  nowhere = jax.tree.map(lambda x: 0.0, arguments)
  gradients = at(0.0, nowhere).gradients
  leaves, structure = jax.tree.flatten(nowhere)
  names = linear_cases.named(
    jax.tree.unflatten(structure, list(range(len(leaves))))
  )
  slopes = linear_cases.named(direction)
  for name, index in names.items():
    only = jax.tree.unflatten(
      structure, [float(i == index) for i in range(len(leaves))]
    )
    difference = (at(step, only).total - at(-step, only).total) / (2 * step)
    slope = np.vdot(gradients[name], slopes[name])
    np.testing.assert_allclose(slope, difference, rtol=1e-6, err_msg=name)


# Metrics are those of the dense losses.


def dense(objective):
  """The loss of logits that an objective is the linear form of."""
  name = objective.loss.__name__.removeprefix("linear_")
  return functools.partial(getattr(do, name), **objective.options)


@pytest.mark.parametrize(
  "objective", ["cross entropy", "kl hidden", "kl top-k", "opd dense"]
)
def test_metrics_are_those_of_the_loss_of_logits(objective):
  objective = OBJECTIVES[objective]
  case = linear_cases.draw(objective, FORMS["all"], weights="fractional")
  batch = case.batch
  if objective.teacher == "hidden":
    logits = linear_oracles.logits(batch.teacher.hidden, case.teacher_head)
    teacher = do.DenseTeacher(logits=logits.astype(np.float32))
    batch = dataclasses.replace(batch, teacher=teacher)
  logits = linear_oracles.logits(case.hidden, case.head).astype(np.float32)
  expected = jax.jit(dense(objective))(logits, batch)
  actual = jax.jit(
    functools.partial(linear_cases.output_of, bound(objective, (3, 5)))
  )(
    case.hidden,
    case.head,
    case.batch,
    case.teacher_head,
  )
  assert actual.aux_metrics.keys() == expected.aux_metrics.keys()
  for name, metric in expected.aux_metrics.items():
    for field in ("unreduced_sum", "denominator"):
      np.testing.assert_allclose(
        getattr(actual.aux_metrics[name], field),
        getattr(metric, field),
        rtol=1e-5,
        err_msg=name,
      )


@pytest.mark.parametrize("form", FORMS)
def test_a_heads_logits_are_the_oracles(form):
  case = linear_cases.draw(OBJECTIVES["cross entropy"], FORMS[form])
  found = case.head.logits(jnp.asarray(case.hidden))
  expected = linear_oracles.logits(case.hidden, case.head)
  assert found.shape == expected.shape == (2, 7, 23)
  assert found.dtype == jnp.float32
  assert linear_cases.error(found, expected) < 1e-6
  assert (case.head.features, case.head.size) == (6, 23)


# Dtypes.


DTYPES = [
  ("float32", "float32"),
  ("bfloat16", "bfloat16"),
  ("float16", "float16"),
  ("bfloat16", "float32"),
  ("float32", "bfloat16"),
  ("float16", "bfloat16"),
]


@pytest.mark.parametrize(
  ("objective", "dtype", "kernel_dtype"),
  [
    *(("cross entropy", *pair) for pair in DTYPES),
    *(("opd hidden", *pair) for pair in DTYPES[1:4]),
  ],
)
def test_gradients_come_back_in_each_inputs_dtype(
  objective, dtype, kernel_dtype
):
  objective = OBJECTIVES[objective]
  case = linear_cases.narrowed(
    linear_cases.draw(
      objective, FORMS["all"], weights="ones", shape=linear_cases.LARGE
    ),
    jnp.dtype(dtype),
    jnp.dtype(kernel_dtype),
  )
  loss = bound(objective, (32, 100))
  found = linear_cases.compiled(loss)(*linear_cases.differentiated(case))
  (value, output), gradients = found
  assert value.dtype == jnp.float32
  for leaf in jax.tree.leaves(output):
    assert leaf.dtype == jnp.float32
  jax.tree.map(
    lambda g, x: (
      pytest.fail(f"{g.dtype} of {x.dtype}") if g.dtype != x.dtype else None
    ),
    gradients,
    linear_cases.differentiated(case)[:3],
  )
  errors = linear_cases.errors(found, objective.expected(case))
  is_mixed = dtype != kernel_dtype  # products are then of float32
  inputs = {"hidden": dtype}
  for name, size in errors.items():
    own = inputs.get(name, kernel_dtype)
    if name in ("value", "denominator", "weights"):
      bound_of = linear_cases.BFLOAT16.values
    elif own == "float32" and (is_mixed or dtype == "float32"):
      bound_of = 1e-5
    else:
      bound_of = linear_cases.BFLOAT16.gradients
    assert size <= bound_of, name


@pytest.mark.parametrize(
  "objective", ["cross entropy", "kl top-k", "opd hidden"]
)
def test_float64_is_computed_in_float64(objective):
  objective = OBJECTIVES[objective]
  with jax.enable_x64(True):
    case = linear_cases.draw(objective, FORMS["all"])
    case = linear_cases.narrowed(case, jnp.float64)
    weights = strategies.token_part(case.batch).loss_weights
    batch = strategies.replace_tokens(
      case.batch, loss_weights=weights.astype(np.float64)
    )
    case = dataclasses.replace(case, batch=batch)
    tight = linear_cases.Tolerance(1e-12, 1e-12)
    for implementation in IMPLEMENTATIONS[: 1 if objective.teacher else 2]:
      loss = bound(objective, (3, 5), implementation)
      linear_cases.agrees(loss, objective, case, tight)
      (value, _), gradients = linear_cases.compiled(loss)(
        *linear_cases.differentiated(case)
      )
      assert value.dtype == gradients[0].dtype == jnp.float64


# Edges.


def at(array, position, value):
  array = np.array(array)
  array[position] = value
  return array


def step(loss, case):
  """Value, output and gradients by name."""
  (value, output), gradients = linear_cases.compiled(loss)(
    *linear_cases.differentiated(case)
  )
  return value, output, linear_cases.named(gradients)


EDGE_LOSSES = {
  (name, implementation): bound(OBJECTIVES[name], (3, 5), implementation)
  for name, implementation in (
    ("cross entropy", "grad_in_forward"),
    ("cross entropy", "recompute"),
    ("opd hidden", "grad_in_forward"),
    ("opd dense", "recompute"),
    ("kl top-k", "grad_in_forward"),
    ("kl top-k", "recompute"),
  )
}
edges = pytest.mark.parametrize(
  ("name", "implementation"), EDGE_LOSSES, ids=map("-".join, EDGE_LOSSES)
)
# With every part but the soft cap, which makes an excluded logit finite.
EDGE_FORM = linear_cases.Form(
  bias=True, low_rank=True, logit_scale=0.6, padding=3
)


def edge(name, implementation, **options):
  objective = OBJECTIVES[name]
  case = linear_cases.draw(objective, EDGE_FORM, **options)
  return EDGE_LOSSES[name, implementation], objective, case


def active_positions(case):
  weights = strategies.token_part(case.batch).loss_weights
  return [tuple(i) for i in np.argwhere(weights > 0)]


@edges
def test_weight_0_is_inert_bit_for_bit(name, implementation):
  loss, _, case = edge(name, implementation)
  expected = step(loss, case)
  given = strategies.Case(case.hidden, case.batch, 1.0)
  for token_id, value in strategies.POISONS:
    spoiled = strategies.poison_tokens(given, token_id, value)
    actual = step(
      loss,
      dataclasses.replace(case, hidden=spoiled.prediction, batch=spoiled.batch),
    )
    for one, other in zip(
      jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
    ):
      assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), value


@edges
def test_without_weight_all_is_exactly_0(name, implementation):
  loss, _, case = edge(name, implementation, weights="none")
  hidden = np.full_like(case.hidden, NAN)
  for given in (case, dataclasses.replace(case, hidden=hidden)):
    value, output, gradients = step(loss, given)
    assert value == 0 and output.primary_loss.compute() == 0
    for leaf in gradients.values():
      assert not np.asarray(leaf).any()


@edges
@pytest.mark.parametrize("value", [NAN, INF])
def test_an_active_hidden_state_that_is_no_number_is_nan(
  name, implementation, value
):
  loss, _, case = edge(name, implementation)
  hidden = at(case.hidden, (*active_positions(case)[0], 0), value)
  found, *_ = step(loss, dataclasses.replace(case, hidden=hidden))
  assert np.isnan(found)


@edges
def test_a_kernel_with_a_nan_is_nan(name, implementation):
  loss, _, case = edge(name, implementation)
  kernel = at(case.head.kernel, (2, 7), NAN)
  head = dataclasses.replace(case.head, kernel=kernel)
  found, *_ = step(loss, dataclasses.replace(case, head=head))
  assert np.isnan(found)


@edges
@pytest.mark.parametrize("spoil", [1e30, NAN, INF])
def test_padding_columns_may_hold_anything(name, implementation, spoil):
  loss, _, case = edge(name, implementation)
  expected = step(loss, case)
  head = case.head
  a, b = head.low_rank
  spoiled = dataclasses.replace(
    head,
    kernel=at(head.kernel, (slice(None), slice(23, None)), spoil),
    bias=at(head.bias, slice(23, None), spoil),
    low_rank=(a, at(b, (slice(None), slice(23, None)), spoil)),
  )
  actual = step(loss, dataclasses.replace(case, head=spoiled))
  np.testing.assert_array_equal(actual[0], expected[0])
  for key, gradient in actual[2].items():
    np.testing.assert_array_equal(gradient, expected[2][key], err_msg=key)


@pytest.mark.parametrize("spoil", [1e30, NAN, INF])
def test_the_dense_form_reads_no_padding_either(spoil):
  case = linear_cases.draw(OBJECTIVES["cross entropy"], EDGE_FORM)
  hidden, head = jnp.asarray(case.hidden), case.head
  spoiled = dataclasses.replace(
    head,
    kernel=at(head.kernel, (slice(None), slice(23, None)), spoil),
    bias=at(head.bias, slice(23, None), spoil),
  )

  @jax.jit
  def slopes(hidden, head):
    return jax.grad(
      lambda *operands: jnp.sum(jnp.cos(operands[1].logits(operands[0]))),
      argnums=(0, 1),
    )(hidden, head)

  jax.tree.map(
    np.testing.assert_array_equal,
    slopes(hidden, spoiled),
    slopes(hidden, head),
  )


@edges
def test_an_active_id_outside_the_vocabulary_is_nan(name, implementation):
  loss, objective, case = edge(name, implementation)
  tokens = strategies.token_part(case.batch)
  position = active_positions(case)[0]
  uses_targets = bool(objective.terms.get("hard"))
  for bad in (-1, -100, 23, 25, 26, 10**6):  # padding has 23 to 25
    batch = strategies.replace_tokens(
      case.batch, target_ids=at(tokens.target_ids, position, bad)
    )
    value, *_ = step(loss, dataclasses.replace(case, batch=batch))
    assert np.isnan(value) == uses_targets, bad


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_listed_id_outside_the_vocabulary_is_nan(implementation):
  loss, _, case = edge("kl top-k", implementation)
  position = (*active_positions(case)[0], 0)
  for bad in (-1, 23, 25, 26):
    ids = at(case.batch.teacher.token_ids, position, bad)
    teacher = dataclasses.replace(case.batch.teacher, token_ids=ids)
    batch = dataclasses.replace(case.batch, teacher=teacher)
    value, *_ = step(loss, dataclasses.replace(case, batch=batch))
    assert np.isnan(value), bad


@edges
def test_a_refused_weight_is_nan(name, implementation):
  loss, _, case = edge(name, implementation)
  tokens = strategies.token_part(case.batch)
  for bad in (-1.0, NAN, INF):
    batch = strategies.replace_tokens(
      case.batch, loss_weights=at(tokens.loss_weights, (0, 1), bad)
    )
    value, *_ = step(loss, dataclasses.replace(case, batch=batch))
    assert np.isnan(value), bad


@edges
def test_an_excluded_id_has_probability_0(name, implementation):
  """A bias of -inf: on an id that is no one's target, and on one's."""
  loss, objective, case = edge(name, implementation, weights="ones")
  tokens = strategies.token_part(case.batch)
  free = min({*range(23)} - {*tokens.target_ids.flat})
  for excluded in (free, int(tokens.target_ids[0, 0])):
    head = dataclasses.replace(
      case.head, bias=at(case.head.bias, excluded, -INF)
    )
    given = dataclasses.replace(case, head=head)
    value, _, gradients = step(loss, given)
    answer = objective.expected(given)
    if objective.teacher is None:
      assert np.isinf(answer.total) == (excluded != free)
    np.testing.assert_allclose(value, answer.total, rtol=1e-5)
    for key, gradient in gradients.items():
      if key != "weights":
        assert np.isfinite(np.asarray(gradient)).all(), key
        size = linear_cases.error(gradient, answer.gradients[key])
        assert size <= 1e-5, key
    np.testing.assert_allclose(
      gradients["weights"], answer.gradients["weights"], rtol=1e-4
    )


def test_a_teacher_may_exclude_ids():
  loss, objective, case = edge("opd dense", "recompute", weights="ones")
  y = case.batch.teacher.logits

  def of(logits, head=case.head):
    teacher = do.DenseTeacher(logits=np.float32(logits))
    batch = dataclasses.replace(case.batch, teacher=teacher)
    return dataclasses.replace(case, batch=batch, head=head)

  excluded = at(y, (..., slice(3, 9)), -INF)
  linear_cases.agrees(loss, objective, of(excluded))
  # Where both exclude an id it contributes nothing.
  tokens = case.batch.student_batch.target_ids
  both = min({*range(23)} - {*tokens.flat})
  excluded[..., both] = -INF
  head = dataclasses.replace(case.head, bias=at(case.head.bias, both, -INF))
  linear_cases.agrees(loss, objective, of(excluded, head))
  for bad in (-INF, INF, NAN):
    value, *_ = step(loss, of(at(y, (0, 0), bad)))
    assert np.isnan(value), bad


@edges
def test_one_position(name, implementation):
  loss, objective, case = edge(
    name, implementation, shape=(1, 1, 6, 23), weights="ones"
  )
  linear_cases.agrees(loss, objective, case)


@pytest.mark.parametrize(
  ("name", "implementation"), [key for key in EDGE_LOSSES if "kl" not in key[0]]
)
def test_a_vocabulary_of_one_id_has_no_loss(name, implementation):
  objective = OBJECTIVES[name]
  form = linear_cases.Form(bias=True, padding=2)
  case = linear_cases.draw(objective, form, shape=(2, 3, 4, 1), weights="ones")
  value, _, gradients = step(EDGE_LOSSES[name, implementation], case)
  assert value == 0
  for leaf in gradients.values():
    assert not np.asarray(leaf).any()


@edges
def test_huge_logits_stay_finite(name, implementation):
  loss, objective, case = edge(name, implementation, weights="ones")
  case = dataclasses.replace(case, hidden=np.float32(1e4) * case.hidden)
  value, _, gradients = step(loss, case)
  answer = objective.expected(case)
  assert answer.total > 1e4
  np.testing.assert_allclose(value, answer.total, rtol=1e-5)
  for key, leaf in gradients.items():
    assert np.isfinite(np.asarray(leaf)).all(), key


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
  "name", ["cross entropy", "kl hidden", "opd hidden", "kl top-k"]
)
def test_no_array_of_tokens_by_ids_is_formed(name, implementation):
  """Traced where tokens times ids are 2**34: no index, and no such array."""
  rows, length, features, size = 16, 4096, 8, 262_144
  objective = OBJECTIVES[name]

  def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)

  ids = array(rows, length, dtype=jnp.int32)
  batch = do.DiffusionTokenBatch(
    model_inputs=ids,
    target_ids=ids,
    loss_weights=array(rows, length, dtype=jnp.float32),
  )
  head = do.OutputHead(kernel=array(features, size))
  teacher_head = None
  if objective.teacher == "hidden":
    teacher = do.HiddenTeacher(hidden=array(rows, length, features))
    teacher_head = head
  elif objective.teacher:
    teacher = do.TopKTeacher(
      token_ids=array(rows, length, 4, dtype=jnp.int32),
      log_probs=array(rows, length, 4, dtype=jnp.float32),
      temperature=objective.temperature,
    )
  if objective.teacher:
    batch = do.DiffusionDistillationBatch(student_batch=batch, teacher=teacher)
  case = linear_cases.Case(
    array(rows, length, features), head, batch, teacher_head
  )
  traced = jax.make_jaxpr(
    linear_cases.compiled(bound(objective, implementation=implementation))
  )(*linear_cases.differentiated(case))
  found = list(cases_test.equations(traced.jaxpr))
  assert len(found) > 20
  for equation in found:
    for variable in (*equation.invars, *equation.outvars):
      shape = getattr(variable.aval, "shape", ())
      assert max((0, *shape)) <= size
      assert np.prod(shape, dtype=np.int64) < rows * length * size / 8


# Log-probabilities of the targets.


@functools.cache
def token_log_probs(**options):
  def pulled_back(hidden, head, batch, cotangents):
    values, pull = jax.vjp(
      lambda h, d: do.linear_token_log_probs(h, d, batch, **options),
      hidden,
      head,
    )
    return values, pull(cotangents)

  return jax.jit(pulled_back)


@pytest.mark.parametrize("form", ["all", "all tied", "plain"])
@pytest.mark.parametrize(
  "options",
  [
    dict(),
    dict(temperature=2.0, token_block=3, vocabulary_block=5),
    dict(temperature=0.5, token_block=64, vocabulary_block=1),
  ],
  ids=str,
)
def test_token_log_probs_pull_any_cotangent_back(form, options):
  for seed, weights in enumerate(linear_cases.WEIGHTS):
    case = linear_cases.draw(
      OBJECTIVES["cross entropy"], FORMS[form], seed=seed, weights=weights
    )
    rng = np.random.default_rng(seed)
    cotangents = rng.standard_normal((2, 7)).astype(np.float32)
    arguments = (jnp.asarray(case.hidden), case.head, case.batch, cotangents)
    values, (hidden, head) = token_log_probs(**options)(*arguments)
    expected, gradients = linear_oracles.token_log_probs(
      case.hidden,
      case.head,
      case.batch,
      cotangents,
      temperature=options.get("temperature", 1.0),
    )
    assert values.shape == (2, 7) and values.dtype == jnp.float32
    assert linear_cases.error(values, expected) <= 3e-6
    assert not np.asarray(values)[case.batch.loss_weights == 0].any()
    found = linear_cases.named((hidden, head, None))
    for name, gradient in gradients.items():
      assert linear_cases.error(found[name], gradient) <= 3e-6, name


def test_token_log_probs_skip_weight_0_and_show_bad_ids():
  case = linear_cases.draw(
    OBJECTIVES["cross entropy"], EDGE_FORM, weights="binary"
  )
  run = token_log_probs(token_block=3, vocabulary_block=5)
  cotangents = np.ones((2, 7), np.float32)
  arguments = (case.head, case.batch, cotangents)
  expected = run(jnp.asarray(case.hidden), *arguments)
  is_off = case.batch.loss_weights == 0
  assert is_off.any() and not is_off.all()
  for value in (NAN, INF):
    hidden = np.where(is_off[..., None], np.float32(value), case.hidden)
    ids = np.where(is_off, -100, case.batch.target_ids)
    batch = dataclasses.replace(case.batch, target_ids=ids)
    actual = run(hidden, case.head, batch, cotangents)
    for one, other in zip(
      jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
    ):
      np.testing.assert_array_equal(one, other)
  position = active_positions(case)[0]
  for bad in (-1, 23, 25, 26):
    ids = at(case.batch.target_ids, position, bad)
    batch = dataclasses.replace(case.batch, target_ids=ids)
    values, _ = run(case.hidden, case.head, batch, cotangents)
    np.testing.assert_array_equal(
      np.isnan(values), at(np.zeros((2, 7), bool), position, True)
    )


# What is refused.

FEATURES, SIZE = 6, 23


def zeros(*shape, dtype=np.float32):
  return np.zeros(shape, dtype)


def head_of(features=FEATURES, size=SIZE, **changes):
  return do.OutputHead(**{"kernel": zeros(features, size), **changes})


FIELDS = [
  (
    dict(kernel=[[0.0]]),
    TypeError,
    "kernel must be a JAX/NumPy array or ShapeDtypeStruct; received list",
  ),
  (
    dict(kernel=zeros(6)),
    ValueError,
    "kernel must have shape [features, vocabulary]; received float32[6]",
  ),
  (
    dict(kernel=zeros(6, 23, 1), layout=linear_cases.TIED),
    ValueError,
    "kernel must have shape [vocabulary, features]; received float32[6, 23, 1]",
  ),
  (
    dict(kernel=zeros(6, 23, dtype=np.int32)),
    TypeError,
    "kernel must have floating-point dtype; received int32",
  ),
  (
    dict(kernel=zeros(0, 23)),
    ValueError,
    "kernel must not be empty; received float32[0, 23]",
  ),
  (
    dict(kernel=zeros(6, 0)),
    ValueError,
    "kernel must not be empty; received float32[6, 0]",
  ),
  (
    dict(layout="transposed"),
    ValueError,
    "layout must be one of ('features_vocabulary', 'vocabulary_features');"
    " received 'transposed'",
  ),
  (
    dict(bias=zeros(6)),
    ValueError,
    "bias must have the kernel's vocabulary, (23,); received float32[6]",
  ),
  (
    dict(bias=zeros(23), layout=linear_cases.TIED),
    ValueError,
    "bias must have the kernel's vocabulary, (6,); received float32[23]",
  ),
  (
    dict(bias=zeros(1, 23)),
    ValueError,
    "bias must have shape [vocabulary]; received float32[1, 23]",
  ),
  (
    dict(bias=zeros(23, dtype=np.int8)),
    TypeError,
    "bias must have floating-point dtype; received int8",
  ),
  (
    dict(low_rank=zeros(6, 2)),
    TypeError,
    "low_rank must be a pair (a, b); received float32[6, 2]",
  ),
  (
    dict(low_rank=(zeros(6, 2),)),
    TypeError,
    "low_rank must be a pair (a, b); received tuple",
  ),
  (
    dict(low_rank=(zeros(6, 2), zeros(3, 23))),
    ValueError,
    "low_rank must be of shapes (6, rank) and (rank, 23); received (6, 2) and"
    " (3, 23)",
  ),
  (
    dict(low_rank=(zeros(23, 2), zeros(2, 6))),
    ValueError,
    "low_rank must be of shapes (6, rank) and (rank, 23); received (23, 2) and"
    " (2, 6)",
  ),
  (
    dict(low_rank=(zeros(6), zeros(2, 23))),
    ValueError,
    "low_rank[0] must have shape [features, rank]; received float32[6]",
  ),
  (
    dict(low_rank=(zeros(6, 2), zeros(2, 23, dtype=np.int32))),
    TypeError,
    "low_rank[1] must have floating-point dtype; received int32",
  ),
  (
    dict(logit_scale=0.0),
    ValueError,
    "logit_scale must not be 0; received 0",
  ),
  (
    dict(logit_scale=INF),
    ValueError,
    "logit_scale must be a finite real scalar; received inf",
  ),
  (
    dict(logit_scale=zeros()),
    TypeError,
    "logit_scale must be a finite real scalar; received float32[]",
  ),
  (
    dict(soft_cap=0.0),
    ValueError,
    "soft_cap must be positive; received 0.0",
  ),
  (
    dict(soft_cap=True),
    TypeError,
    "soft_cap must be a finite real scalar; received bool",
  ),
  (
    dict(vocabulary_size=0),
    ValueError,
    "vocabulary_size must be positive; received 0",
  ),
  (
    dict(vocabulary_size=24),
    ValueError,
    "vocabulary_size must be at most 23; received 24",
  ),
  (
    dict(vocabulary_size=True),
    TypeError,
    "vocabulary_size must be an int; received bool",
  ),
  (
    dict(vocabulary_size=20.0),
    TypeError,
    "vocabulary_size must be an int; received float",
  ),
]


@pytest.mark.parametrize(
  ("changes", "error", "message"), FIELDS, ids=[row[2] for row in FIELDS]
)
def test_a_head_refuses_a_field_that_does_not_fit(changes, error, message):
  def traced(arrays):
    head_of(**{**changes, **arrays})
    return 0

  arrays = {
    name: value
    for name, value in changes.items()
    if isinstance(value, np.ndarray | tuple)
    and all(getattr(x, "ndim", 0) for x in jax.tree.leaves(value))
  }
  abstract = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays
  )
  for build in (
    lambda: head_of(**changes),
    lambda: jax.eval_shape(traced, arrays),
    lambda: head_of(**{**changes, **abstract}),
  ):
    with pytest.raises(error) as raised:
      build()
    assert type(raised.value) is error and str(raised.value) == message


def tokens_of(shape=(2, 7)):
  return do.DiffusionTokenBatch(
    model_inputs=zeros(*shape),
    target_ids=zeros(*shape, dtype=np.int32),
    loss_weights=np.ones(shape, np.float32),
  )


def taught(teacher):
  return do.DiffusionDistillationBatch(
    student_batch=tokens_of(), teacher=teacher
  )


DENSE = do.DenseTeacher(logits=zeros(2, 7, SIZE))
HIDDEN = do.HiddenTeacher(hidden=zeros(2, 7, 4))
TOP_K = do.TopKTeacher(
  token_ids=zeros(2, 7, 1, dtype=np.int32),
  log_probs=zeros(2, 7, 1),
  temperature=1.0,
)
SAMPLED = do.SampledTokenTeacher(log_probs=zeros(2, 7), temperature=1.0)
TEACHER_HEAD = head_of(features=4)

# Arguments that do not fit, and what the message says; of every loss.
OF_ALL = [
  (dict(hidden=zeros(2, 7, 5)), ValueError, "features"),
  (dict(hidden=zeros(7, 6)), ValueError, r"hidden must have shape \[batch"),
  (dict(hidden=zeros(2, 7, 6, dtype=np.int32)), TypeError, "hidden must have"),
  (dict(hidden=[[[0.0] * 6]]), TypeError, "hidden must be"),
  (dict(hidden=zeros(2, 8, 6)), ValueError, "hidden must align with target_"),
  (dict(hidden=zeros(14, 1, 6)), ValueError, "hidden must align with target_"),
  (dict(head=zeros(6, 23)), TypeError, "head must be an? OutputHead"),
  (dict(head=None), TypeError, "head must be an? OutputHead"),
  (dict(batch={}), TypeError, "batch must be a Diffusion"),
  *(
    ({name: value}, error, f"{name} must be")
    for name in ("token_block", "vocabulary_block")
    for value, error in (
      (0, ValueError),
      (-1, ValueError),
      (True, TypeError),
      (1.5, TypeError),
      ("8", TypeError),
    )
  ),
]
OF_LOSSES = [
  (dict(implementation="fast"), ValueError, "implementation must be"),
  (dict(implementation=1), (TypeError, ValueError), "implementation must be"),
  (dict(denominator="mean"), ValueError, "denominator must be"),
]
OF_TEACHERS = [
  (dict(batch=tokens_of()), TypeError, "batch must be a DiffusionDist"),
  (
    dict(batch=taught(do.DenseTeacher(logits=zeros(2, 7, 22)))),
    ValueError,
    r"teacher.*(22|vocabular|shape)",
  ),
  (
    dict(head=head_of(vocabulary_size=20), batch=taught(DENSE)),
    ValueError,
    r"teacher.*(20|vocabular|shape)",
  ),
  (dict(batch=taught(HIDDEN)), (TypeError, ValueError), "teacher_head must"),
  (
    dict(batch=taught(HIDDEN), teacher_head=zeros(4, SIZE)),
    TypeError,
    "teacher_head must be an? OutputHead",
  ),
  (
    dict(batch=taught(HIDDEN), teacher_head=head_of(features=5)),
    ValueError,
    "features",
  ),
  (
    dict(batch=taught(HIDDEN), teacher_head=head_of(features=4, size=22)),
    ValueError,
    r"(teacher.*vocabular|vocabular.*teacher)",
  ),
  (
    dict(batch=taught(DENSE), teacher_head=TEACHER_HEAD),
    (TypeError, ValueError),
    "teacher_head must",
  ),
  (
    dict(batch=taught(TOP_K), teacher_head=TEACHER_HEAD),
    (TypeError, ValueError),
    "teacher_head must",
  ),
  (dict(batch=taught(SAMPLED)), TypeError, "teacher must be a"),
  (
    dict(batch=taught(TOP_K), temperature=2.0),
    ValueError,
    "temperature must be that of the teacher's log_probs",
  ),
  (dict(temperature=0.0), ValueError, "temperature must be positive"),
  (dict(temperature=True), TypeError, "temperature must be a finite"),
]
OF_KL = [
  (
    dict(scale_by_temperature_squared=1),
    TypeError,
    "scale_by_temperature_squared must be a bool",
  ),
]
OF_MIX = [
  (
    dict(soft_loss_weight=0.0),
    ValueError,
    "at least one of soft_loss_weight and hard_loss_weight must be positive",
  ),
  (dict(soft_loss_weight=-1.0), ValueError, "soft_loss_weight must be nonneg"),
  (dict(hard_loss_weight="1"), TypeError, "hard_loss_weight must be a finite"),
]
REFUSED = [
  *(
    (loss, *row)
    for loss, batch, rows in (
      (
        do.linear_weighted_cross_entropy_loss,
        tokens_of(),
        [
          *OF_ALL,
          *OF_LOSSES,
          (dict(batch=taught(DENSE)), TypeError, "batch must be a Diffusion"),
        ],
      ),
      (
        do.linear_forward_kl_loss,
        taught(DENSE),
        [*OF_ALL, *OF_LOSSES, *OF_TEACHERS, *OF_KL],
      ),
      (
        do.linear_prepared_opd_loss,
        taught(DENSE),
        [*OF_ALL, *OF_LOSSES, *OF_TEACHERS, *OF_MIX],
      ),
      (
        do.linear_token_log_probs,
        tokens_of(),
        [
          *OF_ALL,
          (dict(temperature=-1.0), ValueError, "temperature must be positive"),
        ],
      ),
    )
    for row in [({"batch": batch, **r[0]}, *r[1:]) for r in rows]
  )
]


@pytest.mark.parametrize("is_traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize(
  ("loss", "changes", "error", "message"),
  REFUSED,
  ids=[
    f"{loss.__name__}-{message}-{i}"
    for i, (loss, _, _, message) in enumerate(REFUSED)
  ],
)
def test_an_argument_that_does_not_fit_is_refused(
  loss, changes, error, message, is_traced
):
  arguments = {"hidden": zeros(2, 7, FEATURES), "head": head_of(), **changes}
  is_array = {
    name: jax.tree.leaves(value)
    and all(isinstance(x, np.ndarray) for x in jax.tree.leaves(value))
    for name, value in arguments.items()
  }

  def run(traced):
    return loss(
      **{k: v for k, v in arguments.items() if not is_array[k]}, **traced
    )

  traced = {k: v for k, v in arguments.items() if is_array[k]}
  with pytest.raises(error, match=rf"{message}.*; received") as raised:
    jax.eval_shape(run, traced) if is_traced else run(traced)
  assert re.search(" must ", str(raised.value))


@pytest.mark.parametrize(
  "loss",
  [
    do.forward_kl_loss,
    do.prepared_opd_loss,
    do.sampled_reverse_kl_loss,
    functools.partial(do.divergence_loss, divergence=do.divergences.reverse_kl),
  ],
)
def test_a_loss_of_logits_refuses_a_teachers_hidden_states(loss):
  message = r"^teacher must be a .*; received HiddenTeacher$"
  with pytest.raises(TypeError, match=message):
    loss(zeros(2, 7, SIZE), taught(HIDDEN))


@pytest.mark.parametrize(
  "loss", [do.linear_forward_kl_loss, do.linear_prepared_opd_loss]
)
def test_a_teacher_or_targets_that_are_not_used_are_not_asked(loss):
  case = linear_cases.draw(OBJECTIVES["kl hidden"], FORMS["plain"])
  batch = strategies.replace_tokens(
    case.batch, target_ids=np.full((2, 7), -1, np.int32)
  )
  output = loss(case.hidden, case.head, batch, teacher_head=case.teacher_head)
  assert np.isfinite(output.primary_loss.compute())
  if loss is do.linear_prepared_opd_loss:
    output = loss(
      case.hidden,
      case.head,
      dataclasses.replace(case.batch, teacher=SAMPLED),
      temperature=2.0,
      soft_loss_weight=0.0,
      hard_loss_weight=1.0,
    )
    assert np.isfinite(output.primary_loss.compute())
