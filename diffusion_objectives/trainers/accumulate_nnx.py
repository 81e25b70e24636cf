"""`accumulate.value_and_grad` for a `flax.nnx.Module`, which is not split by
hand."""

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

from flax import nnx
import jax

from diffusion_objectives._core import checks
from diffusion_objectives.trainers import accumulate


def value_and_grad(
  loss_fn: Callable[[nnx.Module, Any], accumulate.Outputs],
  *,
  coefficients: Mapping[str, float] | None = None,
  wrt: Any = nnx.Param,
) -> Callable[[nnx.Module, Any], tuple[accumulate.Outputs, nnx.State]]:
  """Differentiates a module's loss over micro-batches as over one big batch.

  The gradient is that of `accumulate.value_and_grad`. What else the module
  holds (batch statistics, counts of random streams) goes from micro-batch to
  micro-batch and is updated on the module, as by `nnx.value_and_grad`. What is
  differentiated changes by the optimizer alone: an assignment to it in the loss
  is dropped.

  Args:
    loss_fn: `(model, micro_batch) -> LossOutput`, or to a mapping of them.
    coefficients: as in `accumulate.value_and_grad`.
    wrt: the `nnx` filter of the variables to differentiate, such as `nnx.Param`
      or `nnx.LoRAParam`.

  Returns:
    `(model, micro_batches) -> (outputs, gradients)`, with gradients as an
    `nnx.Optimizer` of the same `wrt` takes them.

  Raises:
    TypeError, ValueError: as `accumulate.value_and_grad`; or `TypeError` for a
      model that is no module, `ValueError` where `wrt` selects nothing or the
      loss adds variables to the model or removes them.

  Example:
    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> import diffusion_objectives as do
    >>> def loss(model, batch):
    ...   metric = do.WeightedMetric(
    ...       unreduced_sum=jnp.sum(model(batch)),
    ...       denominator=jnp.float32(len(batch)))
    ...   return do.LossOutput(primary_loss=metric, aux_metrics={})
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> output, gradients = value_and_grad(loss)(
    ...     model, accumulate.split(jnp.ones((6, 2)), 3))
    >>> gradients["kernel"][...].tolist()
    [[1.0], [1.0]]
  """
  checks.function("loss_fn", loss_fn)

  def accumulated(
    model: nnx.Module, micro_batches: Any
  ) -> tuple[accumulate.Outputs, nnx.State]:
    checks.instance("model", model, nnx.Module)
    graph, params, *others = nnx.split(model, wrt, ...)
    if not params:
      raise checks.fail(
        ValueError, "wrt must select variables of the model", repr(wrt)
      )

    def stateful(params, others, batch):
      before: Any = jax.tree.structure(others)  # merging shares its variables
      model = nnx.merge(graph, params, *others)
      result = loss_fn(model, batch)
      new_graph, _, *new_others = nnx.split(model, wrt, ...)
      if new_graph != graph or jax.tree.structure(new_others) != before:
        raise checks.fail(
          ValueError,
          "the loss_fn must leave the model's structure as it is (and take with"
          " nnx.pop what is sown)",
          "a model of another structure",
        )
      return result, new_others

    result, others, gradients = accumulate.stateful_value_and_grad(
      stateful, coefficients=coefficients
    )(params, others, micro_batches)
    nnx.update(model, *others)
    return result, gradients

  return accumulated
