"""What a loss returns: an unreduced sum and its denominator.

A trainer differentiates the sum, adds sums and denominators over
micro-batches and devices, and divides once.
"""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from diffusion_objectives._core import checks
from diffusion_objectives._core import numerics
from diffusion_objectives._core import pytree


@pytree.record
class WeightedMetric:
  """A ratio that has not been divided yet.

  Attributes:
    unreduced_sum: scalar floating-point array, additive over examples.
    denominator: scalar floating-point array, additive over examples, in the
      unit that the loss names. It depends on the batch alone and is neither
      clamped nor given an epsilon.

  Raises:
    TypeError: a field is no array, or not floating-point.
    ValueError: a field is not a scalar.

  Example:
    >>> import jax.numpy as jnp
    >>> metric = WeightedMetric(
    ...     unreduced_sum=jnp.float32(3.0), denominator=jnp.float32(0.5))
    >>> float(metric.compute())
    6.0
  """

  unreduced_sum: jax.Array
  denominator: jax.Array

  def __post_init__(self) -> None:
    for name in ("unreduced_sum", "denominator"):
      checks.array(name, getattr(self, name), dtype="floating-point", axes=())

  def compute(self) -> jax.Array:
    """`unreduced_sum / denominator`; 0 with zero gradient where that is 0."""
    is_empty = self.denominator == 0
    ratio = jnp.where(is_empty, 0, self.unreduced_sum) / jnp.where(
      is_empty, 1, self.denominator
    )
    return jnp.where(is_empty, 0, ratio)


@pytree.record
class LossOutput:
  """A loss and the metrics that describe it, each a sum and a denominator.

  Attributes:
    primary_loss: what is optimised.
    aux_metrics: further metrics by name; not differentiated.

  Raises:
    TypeError: `primary_loss` is no `WeightedMetric`, or `aux_metrics` no
      mapping from strings to `WeightedMetric`.

  Example:
    >>> import jax.numpy as jnp
    >>> def metric(total, count):
    ...   return WeightedMetric(unreduced_sum=jnp.float32(total),
    ...                         denominator=jnp.float32(count))
    >>> output = LossOutput(primary_loss=metric(3.0, 2.0),
    ...                     aux_metrics={"accuracy": metric(1.0, 4.0)})
    >>> float(output.aux_metrics["accuracy"].compute())
    0.25
  """

  primary_loss: WeightedMetric
  aux_metrics: Mapping[str, WeightedMetric]

  def __post_init__(self) -> None:
    checks.instance("primary_loss", self.primary_loss, WeightedMetric)
    checks.mapping("aux_metrics", self.aux_metrics, WeightedMetric)


def merge(outputs: Sequence[LossOutput]) -> LossOutput:
  """Adds the outputs of one loss over several micro-batches.

  Sums and denominators are added, so `merge(...).primary_loss.compute()` is
  the loss of the concatenated batch, not a mean of means.

  Args:
    outputs: at least one output, all with the same metric names.

  Returns:
    The output of all examples together.

  Raises:
    ValueError: no output, or differing metric names.

  Example:
    >>> import jax.numpy as jnp
    >>> def output(total, count):
    ...   metric = WeightedMetric(unreduced_sum=jnp.float32(total),
    ...                           denominator=jnp.float32(count))
    ...   return LossOutput(primary_loss=metric, aux_metrics={})
    >>> merged = merge([output(4.0, 1.0), output(9.0, 9.0)])
    >>> print(f"{merged.primary_loss.compute():.1f}")
    1.3
  """
  outputs = _outputs(outputs)
  if not outputs:
    raise checks.fail(ValueError, "outputs must not be empty", "0 outputs")
  names = sorted(outputs[0].aux_metrics)
  for output in outputs[1:]:
    if sorted(output.aux_metrics) != names:
      raise checks.fail(
        ValueError,
        "outputs must have the same aux_metrics",
        f"{names} and {sorted(output.aux_metrics)}",
      )
  return jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *outputs)


def combine(
  outputs: Sequence[LossOutput], coefficients: Sequence[float]
) -> LossOutput:
  """`sum_i c_i loss_i` for terms that share one denominator.

  The sums are weighted and added; the denominator is the shared one. Terms
  with different denominators are not one ratio, and no single sum and
  denominator of them is exact under accumulation.

  Args:
    outputs: the terms, on the same batch.
    coefficients: one finite real number a term. A term with coefficient 0 adds
      nothing, whatever its value.

  Returns:
    The weighted term, with the metrics of all terms.

  Raises:
    TypeError: a coefficient is no real number.
    ValueError: no term, another number of coefficients, a metric name that two
      terms use, or denominators that are concrete and differ. Under trace the
      result is NaN where they differ.

  Example:
    >>> import jax.numpy as jnp
    >>> def output(total):
    ...   metric = WeightedMetric(unreduced_sum=jnp.float32(total),
    ...                           denominator=jnp.float32(2.0))
    ...   return LossOutput(primary_loss=metric, aux_metrics={})
    >>> float(combine([output(4.0), output(6.0)], [1.0, 0.5])
    ...       .primary_loss.compute())
    3.5
  """
  outputs, coefficients = _outputs(outputs), list(coefficients)
  if not outputs or len(outputs) != len(coefficients):
    raise checks.fail(
      ValueError,
      "outputs and coefficients must have one equal, positive length",
      f"{len(outputs)} and {len(coefficients)}",
    )
  aux_metrics: dict[str, WeightedMetric] = {}
  for output in outputs:
    for name, metric in output.aux_metrics.items():
      if name in aux_metrics:
        raise checks.fail(
          ValueError, "terms must not share a metric name", repr(name)
        )
      aux_metrics[name] = metric
  shared = outputs[0].primary_loss.denominator
  total = jnp.zeros_like(outputs[0].primary_loss.unreduced_sum)
  for output, coefficient in zip(outputs, coefficients, strict=True):
    scale = checks.finite_real("coefficient", coefficient)
    term = output.primary_loss
    is_shared = (term.denominator == shared) | (
      jnp.isnan(term.denominator) & jnp.isnan(shared)
    )
    if checks.is_concrete(is_shared) and not is_shared:
      raise checks.fail(
        ValueError,
        "terms must share one denominator (give them one unit, or"
        " accumulate each term by itself and add the ratios)",
        f"{shared} and {term.denominator}",
      )
    if scale:
      total = total + scale * term.unreduced_sum
    total = jnp.where(is_shared, total, jnp.nan)
  return LossOutput(
    primary_loss=WeightedMetric(unreduced_sum=total, denominator=shared),
    aux_metrics=aux_metrics,
  )


def masked_means(
  prefix: str, values: Mapping[str, jax.Array], is_active: jax.Array
) -> dict[str, WeightedMetric]:
  """Metrics that describe predictions: unweighted means over active positions.

  Args:
    prefix: of the metrics' names.
    values: by name, arrays of the shape of `is_active`.
    is_active: which positions count; the others may hold anything.
  """
  return {
    prefix + name: WeightedMetric(
      unreduced_sum=numerics.masked_sum(value, is_active),
      denominator=numerics.count(is_active, value.dtype),
    )
    for name, value in values.items()
  }


def _outputs(outputs: Sequence[LossOutput]) -> list[LossOutput]:
  if not isinstance(outputs, Iterable):
    raise checks.fail(
      TypeError,
      "outputs must be a sequence of LossOutput",
      checks.describe(outputs),
    )
  outputs = list(outputs)
  for index, output in enumerate(outputs):
    checks.instance(f"outputs[{index}]", output, LossOutput)
  return outputs
