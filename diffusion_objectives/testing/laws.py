"""The laws of the contract, as a pytest suite for any objective.

    TestLaws = laws.suite(my_loss, oracle=my_oracle)

gives one test a law, each tried on many drawn cases (`strategies`). The oracle
is the objective once more, in float64 NumPy, written without the library.
Number of examples and randomness follow the active hypothesis profile.
"""

from collections.abc import Callable
from collections.abc import Iterable
import dataclasses
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np

from diffusion_objectives import outputs
from diffusion_objectives._core import numerics
from diffusion_objectives.testing import strategies

LossFn = Callable[[Any, Any], outputs.LossOutput]
Oracle = Callable[[Any, Any], tuple[float, float]]

# Relative rounding allowed between two float32 evaluations, against the sum of
# absolute terms: some tens of ulps, for sums in another order and for the
# logarithms and exponentials of two implementations.
ROUNDING = 5e-6


@dataclasses.dataclass(eq=False)
class _Subject:
  """An objective under test, compiled once a shape."""

  loss: LossFn
  oracle: Oracle
  poison: Callable[[strategies.Case, int, float], strategies.Case]
  uses_targets: bool
  traces: int = 0

  def __post_init__(self) -> None:
    self.compiled = jax.jit(self.evaluate)
    self.batched = jax.jit(jax.vmap(self._traced))
    self.slopes = jax.jit(self._slopes)
    self.constant = jax.jit(
      jax.grad(self._sum_in_constants, argnums=2, allow_int=True)
    )

  def _traced(self, prediction: Any, batch: Any) -> outputs.LossOutput:
    self.traces += 1
    return self.loss(prediction, batch)

  def evaluate(self, prediction: Any, batch: Any) -> tuple[Any, Any]:
    """The output, and the gradient of its sum in the prediction."""

    def differentiated(prediction):
      output = self._traced(prediction, batch)
      return output.primary_loss.unreduced_sum, output

    gradient, output = jax.grad(differentiated, has_aux=True)(prediction)
    return output, gradient

  def _sum(self, prediction: Any, batch: Any) -> jax.Array:
    return self.loss(prediction, batch).primary_loss.unreduced_sum

  def _slopes(
    self, prediction: Any, batch: Any, direction: Any, step: float
  ) -> tuple[jax.Array, jax.Array]:
    """The sum's slope along a direction: by gradient and by difference."""

    def moved(by):
      return self._sum(
        jax.tree.map(lambda x, u: x + by * u, prediction, direction), batch
      )

    gradient = jax.grad(self._sum)(prediction, batch)
    products = jax.tree.map(jnp.vdot, gradient, direction)
    return (
      jnp.sum(jnp.stack(jax.tree.leaves(products))),
      (moved(step) - moved(-step)) / (2 * step),
    )

  def _sum_in_constants(
    self, prediction: Any, batch: Any, constants: Any
  ) -> jax.Array:
    return self._sum(prediction, dataclasses.replace(batch, **constants))


def _ratio(metric: outputs.WeightedMetric) -> float:
  return float(metric.compute())


def _metrics(output: outputs.LossOutput) -> dict[str, outputs.WeightedMetric]:
  return {"primary_loss": output.primary_loss, **output.aux_metrics}


def _assert_near(
  actual: Any, expected: Any, magnitude: float, what: str
) -> None:
  np.testing.assert_allclose(
    np.asarray(actual, np.float64),
    np.asarray(expected, np.float64),
    rtol=ROUNDING,
    atol=ROUNDING * magnitude,
    err_msg=what,
  )


def _assert_outputs_near(
  actual: outputs.LossOutput, expected: outputs.LossOutput, magnitude: float
) -> None:
  """Sums to rounding, denominators to theirs, of the loss and its metrics."""
  for name, metric in _metrics(expected).items():
    other = _metrics(actual)[name]
    size = max(magnitude, float(abs(metric.unreduced_sum)))
    if name != "primary_loss":  # terms of both signs, of size 1 and more
      size = max(size, float(metric.denominator))
    _assert_near(other.unreduced_sum, metric.unreduced_sum, size, name)
    _assert_near(other.denominator, metric.denominator, 0, name)


def _assert_same_bits(actual: Any, expected: Any, what: str) -> None:
  for one, other in zip(
    jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
  ):
    one, other = np.asarray(one), np.asarray(other)
    assert one.dtype == other.dtype, what
    assert one.tobytes() == other.tobytes(), f"{what}: {one} and {other}"


def equals_oracle(subject: _Subject, case: strategies.Case) -> None:
  """The sum and the denominator are those of the float64 oracle."""
  output, _ = subject.compiled(case.prediction, case.batch)
  total, denominator = subject.oracle(case.prediction, case.batch)
  _assert_near(
    output.primary_loss.unreduced_sum, total, case.magnitude, "unreduced_sum"
  )
  _assert_near(output.primary_loss.denominator, denominator, 0, "denominator")


def low_precision_equals_oracle(
  subject: _Subject, case: strategies.Case
) -> None:
  """bfloat16 predictions lose nothing more: arithmetic and sums are float32."""
  narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), case.prediction)
  output, gradient = subject.compiled(narrow, case.batch)
  wide = jax.tree.map(lambda x: np.asarray(x, np.float32), narrow)
  total, denominator = subject.oracle(wide, case.batch)
  metric = output.primary_loss
  assert metric.unreduced_sum.dtype == jnp.float32, "unreduced_sum dtype"
  assert metric.denominator.dtype == jnp.float32, "denominator dtype"
  _assert_near(metric.unreduced_sum, total, case.magnitude, "unreduced_sum")
  _assert_near(metric.denominator, denominator, 0, "denominator")
  for leaf in jax.tree.leaves(gradient):
    assert leaf.dtype == jnp.bfloat16, "gradient dtype"


def returns_scalars(subject: _Subject, case: strategies.Case) -> None:
  """All sums and denominators are scalars of the contract's dtype."""
  output, _ = subject.compiled(case.prediction, case.batch)
  leaf = jax.tree.leaves(case.prediction)[0]
  dtype = numerics.accumulation_dtype(leaf.dtype)
  for name, metric in _metrics(output).items():
    for value in (metric.unreduced_sum, metric.denominator):
      assert value.shape == () and value.dtype == dtype, (name, value)
    assert float(metric.denominator) >= 0, name


def jit_equals_eager(subject: _Subject, case: strategies.Case) -> None:
  """Compiled and eager values agree to 4 ulp (of the sum of terms)."""
  compiled, _ = subject.compiled(case.prediction, case.batch)
  eager = subject.loss(
    *jax.tree.map(jnp.asarray, (case.prediction, case.batch))
  )
  assert sorted(eager.aux_metrics) == sorted(compiled.aux_metrics)
  ulp = float(jnp.finfo(jnp.float32).eps)
  for name, metric in _metrics(eager).items():
    other = _metrics(compiled)[name]
    for one, two in zip(
      jax.tree.leaves(metric), jax.tree.leaves(other), strict=True
    ):
      np.testing.assert_allclose(
        one, two, rtol=4 * ulp, atol=4 * ulp * case.magnitude, err_msg=name
      )


def is_additive(subject: _Subject, case: strategies.Case) -> None:
  """Sums and denominators, metrics too, add up over parts of the batch."""
  full, _ = subject.compiled(case.prediction, case.batch)
  for parts in _splits(case):
    merged = outputs.merge([subject.compiled(*part)[0] for part in parts])
    _assert_outputs_near(merged, full, case.magnitude)


def accumulates_exactly(subject: _Subject, case: strategies.Case) -> None:
  """Summed gradients over summed denominators are the full batch's gradient."""

  def mean(gradients, metrics):
    denominator = sum(float(m.denominator) for m in metrics)
    total = jax.tree.map(
      lambda *leaves: np.concatenate(leaves).astype(np.float64), *gradients
    )
    return jax.tree.map(lambda x: x / (denominator or 1.0), total)

  full, gradient = subject.compiled(case.prediction, case.batch)
  expected = mean([gradient], [full.primary_loss])
  size = case.magnitude / (float(full.primary_loss.denominator) or 1.0)
  for parts in _splits(case):
    results = [subject.compiled(*part) for part in parts]
    actual = mean(
      [gradient for _, gradient in results],
      [output.primary_loss for output, _ in results],
    )
    jax.tree.map(
      lambda a, e: _assert_near(a, e, size, "gradient"), actual, expected
    )
    loss = _ratio(outputs.merge([o for o, _ in results]).primary_loss)
    _assert_near(loss, _ratio(full.primary_loss), size, "loss")


def _splits(case: strategies.Case) -> list[list[tuple[Any, Any]]]:
  rows = jax.tree.leaves(case.prediction)[0].shape[0]
  cuts = sorted({1, rows - 1} - {0, rows})
  whole = (case.prediction, case.batch)
  return [
    [
      jax.tree.map(lambda x, part=part: x[part], whole)
      for part in (slice(0, cut), slice(cut, None))
    ]
    for cut in cuts
  ]


def inactive_positions_are_inert(
  subject: _Subject, case: strategies.Case
) -> None:
  """Poison at weight 0 changes no bit of any value or gradient."""
  expected = subject.compiled(case.prediction, case.batch)
  for token_id, value in strategies.POISONS:
    poisoned = subject.poison(case, token_id, value)
    actual = subject.compiled(poisoned.prediction, poisoned.batch)
    _assert_same_bits(actual, expected, f"poison {token_id}, {value}")


def gradients_are_finite(subject: _Subject, case: strategies.Case) -> None:
  """Finite inputs have finite values and gradients."""
  output, gradient = subject.compiled(case.prediction, case.batch)
  for leaf in jax.tree.leaves((output, gradient)):
    assert np.isfinite(np.asarray(leaf, np.float64)).all(), leaf


def empty_batch_is_zero(subject: _Subject, case: strategies.Case) -> None:
  """Without weight the sum, its gradient and the mean are exactly 0."""
  nothing = jax.tree.map(np.zeros_like, strategies.activity(case.batch))
  batch = strategies.replace_activity(case.batch, nothing)
  output, gradient = subject.compiled(case.prediction, batch)
  assert float(output.primary_loss.unreduced_sum) == 0
  assert _ratio(output.primary_loss) == 0
  for leaf in jax.tree.leaves(gradient):
    assert not np.asarray(leaf, np.float64).any(), leaf


def weights_scale_the_sum(subject: _Subject, case: strategies.Case) -> None:
  """Weights times `2**-40`: the sum and its gradient times exactly that, and
  the denominator times exactly that (its unit is the weights), its square, or
  unchanged (its unit is another). A clamp or an epsilon is none of these."""
  factor = np.float32(2.0**-40)
  weights = strategies.activity(case.batch)
  if not isinstance(weights, np.ndarray):  # masks, which are no numbers
    return
  scaled = strategies.replace_activity(case.batch, factor * weights)
  one, gradient = subject.compiled(case.prediction, case.batch)
  two, small = subject.compiled(case.prediction, scaled)
  one, two = one.primary_loss, two.primary_loss
  # Exact but for subnormal products, which the CPU flushes to 0.
  tiny = 4 * float(jnp.finfo(jnp.float32).tiny)
  jax.tree.map(
    lambda a, e: np.testing.assert_allclose(a, factor * e, 0, tiny),
    (two.unreduced_sum, small),
    (one.unreduced_sum, gradient),
  )
  assert float(two.denominator) in [
    float(factor**power * one.denominator) for power in (0, 1, 2)
  ], "denominator"


def active_ids_outside_the_vocabulary_are_nan(
  subject: _Subject, case: strategies.Case
) -> None:
  """Under trace, where an id cannot be refused, it gives NaN."""
  if not subject.uses_targets:
    return
  tokens = strategies.token_part(case.batch)
  if not tokens.loss_weights.any():
    return
  position = tuple(np.argwhere(tokens.loss_weights)[0])
  vocabulary = jax.tree.leaves(case.prediction)[0].shape[-1]
  for value in (-1, -100, vocabulary, vocabulary + 93):
    ids = np.array(tokens.target_ids)
    ids[position] = value
    batch = strategies.replace_tokens(case.batch, target_ids=ids)
    output, _ = subject.compiled(case.prediction, batch)
    assert np.isnan(_ratio(output.primary_loss)), f"id {value}"


def active_nan_is_nan(subject: _Subject, case: strategies.Case) -> None:
  """NaN in the prediction at an active position is not swallowed."""
  weights = strategies.activity(case.batch)
  if not isinstance(weights, np.ndarray):  # the prediction has other axes
    weights = strategies.first_axis_activity(case.batch)
  if not weights.any():
    return
  row = tuple(np.argwhere(weights)[0])

  def spoil(leaf):
    leaf = np.array(leaf)
    leaf[row] = np.nan
    return leaf

  output, _ = subject.compiled(jax.tree.map(spoil, case.prediction), case.batch)
  assert np.isnan(_ratio(output.primary_loss))


def traces_once(subject: _Subject, case: strategies.Case) -> None:
  """New values of the same shapes do not retrace."""
  subject.compiled(case.prediction, case.batch)
  before = subject.traces
  subject.compiled(
    jax.tree.map(lambda x: x + 1, case.prediction),
    jax.tree.map(np.copy, case.batch),
  )
  assert subject.traces == before, "retraced"


def transforms_as_a_pytree(subject: _Subject, case: strategies.Case) -> None:
  """`eval_shape` agrees, sentinels pass through, `vmap` maps over batches."""
  output, _ = subject.compiled(case.prediction, case.batch)
  shapes = jax.eval_shape(subject.loss, case.prediction, case.batch)
  for value, shape in zip(
    jax.tree.leaves(output), jax.tree.leaves(shapes), strict=True
  ):
    assert value.shape == shape.shape and value.dtype == shape.dtype
  for tree in (output, case.batch):
    leaves, structure = jax.tree.flatten(tree)
    for sentinel in (object(), None, True, "leaf"):
      jax.tree.unflatten(structure, [sentinel] * len(leaves))
  pair = jax.tree.map(
    lambda x: np.stack([x, x[::-1]]), (case.prediction, case.batch)
  )
  mapped = subject.batched(*pair)
  for index, reverse in enumerate((1, -1)):
    single, _ = subject.compiled(
      *jax.tree.map(lambda x, r=reverse: x[::r], (case.prediction, case.batch))
    )
    output = jax.tree.map(lambda x, i=index: x[i], mapped)
    _assert_outputs_near(output, single, case.magnitude)


def sharded_equals_unsharded(subject: _Subject, case: strategies.Case) -> None:
  """Rows over as many of the process's devices as divide the batch."""
  rows = jax.tree.leaves(case.prediction)[0].shape[0]
  devices = jax.devices()
  count = max(n for n in range(1, len(devices) + 1) if rows % n == 0)
  mesh = jax.sharding.Mesh(np.array(devices[:count]), ("data",))
  sharding = jax.sharding.NamedSharding(
    mesh, jax.sharding.PartitionSpec("data")
  )
  placed = jax.device_put((case.prediction, case.batch), sharding)
  with jax.set_mesh(mesh):
    actual, sharded = subject.compiled(*placed)
  expected, gradient = subject.compiled(case.prediction, case.batch)
  _assert_outputs_near(actual, expected, case.magnitude)
  jax.tree.map(
    lambda a, e: _assert_near(a, e, case.magnitude, "gradient"),
    sharded,
    gradient,
  )


def teacher_is_constant(subject: _Subject, case: strategies.Case) -> None:
  """No gradient reaches a batch's teacher, or targets made by one."""
  constants = strategies.constants(case.batch)
  if not constants:
    return
  gradient = subject.constant(case.prediction, case.batch, constants)
  for leaf in jax.tree.leaves(gradient):
    # Integers have no gradient: JAX gives them a dtype without values.
    is_number = leaf.dtype != jax.dtypes.float0
    assert not (is_number and np.asarray(leaf).any()), leaf


def denominator_is_constant(subject: _Subject, case: strategies.Case) -> None:
  """The denominator depends on the batch alone, not on the prediction."""
  one, _ = subject.compiled(case.prediction, case.batch)
  two, _ = subject.compiled(
    jax.tree.map(lambda x: -x[..., ::-1], case.prediction), case.batch
  )
  _assert_same_bits(
    two.primary_loss.denominator, one.primary_loss.denominator, "denominator"
  )


def gradient_is_the_derivative(
  subject: _Subject, case: strategies.Case
) -> None:
  """In float64, the gradient along a direction is the central difference.

  An objective that computes in float32 whatever it is given is held to what
  float32 allows. Reverse mode alone: a trainer needs no other.
  """
  rng = np.random.default_rng(0)
  with jax.enable_x64(True):
    wide = jax.tree.map(lambda x: x.astype(np.float64), case.prediction)
    direction = jax.tree.map(lambda x: rng.standard_normal(x.shape), wide)
    size = case.magnitude or 1.0
    # Whether an objective computes in float64 shows in its values alone.
    for step, tolerance in ((1e-5, 1e-6), (2e-2, 5e-3)):
      slope, difference = subject.slopes(wide, case.batch, direction, step)
      if np.allclose(slope, difference, tolerance, tolerance * size):
        return
  np.testing.assert_allclose(slope, difference, tolerance, tolerance * size)


Law = Callable[[_Subject, strategies.Case], None]

# In the order in which `violations` tries them.
LAWS: tuple[Law, ...] = (
  equals_oracle,
  returns_scalars,
  low_precision_equals_oracle,
  inactive_positions_are_inert,
  active_ids_outside_the_vocabulary_are_nan,
  active_nan_is_nan,
  is_additive,
  accumulates_exactly,
  weights_scale_the_sum,
  empty_batch_is_zero,
  gradients_are_finite,
  teacher_is_constant,
  denominator_is_constant,
  jit_equals_eager,
  traces_once,
  transforms_as_a_pytree,
  sharded_equals_unsharded,
  gradient_is_the_derivative,
)


def suite(
  loss: LossFn,
  *,
  oracle: Oracle,
  build: Callable[[strategies.Regime], strategies.Case] = (
    strategies.token_case
  ),
  poison: Callable[[strategies.Case, int, float], strategies.Case] = (
    strategies.poison_tokens
  ),
  uses_targets: bool = True,
) -> type:
  """A pytest class with one test a law.

  Args:
    loss: `(prediction, batch) -> LossOutput`, hyper-parameters bound.
    oracle: `(prediction, batch) -> (sum, denominator)` in float64 NumPy.
    build: from a `strategies.Regime` to a `strategies.Case`;
      `strategies.token_case`, `distillation_case`, `top_k_case`,
      `sampled_case` or `parallel_decoding_case`, or your own with one of their
      kinds of batch.
    poison: fills what must be inert with an id and a value.
    uses_targets: whether the loss reads `target_ids`; if so, an active id
      outside the vocabulary must give NaN.

  Returns:
    A class to be bound to a name that pytest collects.

  Example:
    >>> import numpy as np
    >>> import diffusion_objectives as do
    >>> def oracle(logits, batch):
    ...   z = np.asarray(logits, np.float64)
    ...   z = z - np.log(np.exp(z - z.max(-1, keepdims=True)).sum(
    ...       -1, keepdims=True)) - z.max(-1, keepdims=True)
    ...   nll = -np.take_along_axis(z, batch.target_ids[..., None], -1)[..., 0]
    ...   counted = (batch.loss_weights if batch.is_supervised is None
    ...              else batch.is_supervised)
    ...   weights = np.asarray(batch.loss_weights, np.float64)
    ...   return (weights * nll).sum(), counted.sum(dtype=np.float64)
    >>> TestLaws = suite(do.weighted_cross_entropy_loss, oracle=oracle)
    >>> hasattr(TestLaws, "test_equals_oracle")
    True
  """
  subject = _Subject(loss, oracle, poison, uses_targets)
  tests = {}
  for law in LAWS:
    tests[f"test_{law.__name__}"] = staticmethod(_given(law, subject, build))
  return type("Laws", (), tests)


def violations(
  loss: LossFn,
  *,
  oracle: Oracle,
  build: Callable[[strategies.Regime], strategies.Case] = (
    strategies.token_case
  ),
  poison: Callable[[strategies.Case, int, float], strategies.Case] = (
    strategies.poison_tokens
  ),
  uses_targets: bool = True,
  seeds: Iterable[int] = (0,),
  max_examples: int = 25,
) -> list[dict[str, Exception]]:
  """The laws that an objective breaks, by name, at fixed seeds.

  For showing that the laws have teeth: plant a bug, see which law names it.

  Args:
    loss, oracle, build, poison, uses_targets: as for `suite`.
    seeds: of the drawn cases; the objective is compiled once for all.
    max_examples: of each law at each seed.

  Returns:
    For each seed the first law broken, in the order of `LAWS`, and its failure;
    empty where every law holds.
  """
  subject = _Subject(loss, oracle, poison, uses_targets)
  found = []
  for seed in seeds:
    broken: dict[str, Exception] = {}
    for law in LAWS:
      test = _given(
        law,
        subject,
        build,
        max_examples=max_examples,
        database=None,
        phases=[hypothesis.Phase.generate],
      )
      try:
        hypothesis.seed(seed)(test)()
      except Exception as error:  # a law may fail in any way
        broken[law.__name__] = error
        break
    found.append(broken)
  return found


def _given(law, subject, build, **settings):
  @hypothesis.settings(deadline=None, **settings)
  @hypothesis.given(regime=strategies.regimes())
  def test(regime):
    law(subject, build(regime))

  test.__doc__ = law.__doc__
  return test
