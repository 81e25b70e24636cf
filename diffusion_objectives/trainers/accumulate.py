"""Exact gradient accumulation for a training step of your own, in plain JAX.

Terms `j = 1 ... J` of an objective, over micro-batches `k = 1 ... K`, are sums
`N_jk` of examples with denominators `D_jk`; the objective and its gradient are

  L = sum_j c_j N_j / D_j,    N_j = sum_k N_jk,    D_j = sum_k D_jk    (1)
  dL/dparams = sum_k d/dparams (sum_j (c_j / D_j) N_jk)                (2)

where a term with `D_j = 0` is left out. Denominators depend on the batch alone,
so a first pass adds them (nothing else of the loss is left in it once it is
compiled), and the second is one forward and one backward pass a micro-batch for
all terms together. No mean of a micro-batch is ever formed. Any partition of
the rows into micro-batches gives the same result, as (1) is over sums.
"""

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusion_objectives import outputs
from diffusion_objectives._core import checks
from diffusion_objectives._core import numerics

# One term, or several by name.
Outputs = outputs.LossOutput | Mapping[str, outputs.LossOutput]

# The name of the term of a loss that has one.
_ONE_TERM = ""


def split(batch: Any, steps: int) -> Any:
  """Cuts a batch into equal micro-batches: `[batch, ...]` to `[steps, ...]`.

  Row `r` goes to micro-batch `r % steps`. Where devices hold contiguous rows,
  each thus cuts its own into `steps` parts and none travels between devices;
  for that, `batch / steps` must divide over them as well.

  Args:
    batch: pytree of arrays `[batch, ...]`, NumPy's (cut on the host, by views)
      or JAX's.
    steps: the number of micro-batches, which divides `batch`.

  Returns:
    The same tree, of arrays `[steps, batch / steps, ...]`.

  Raises:
    TypeError: `steps` is no integer, or a leaf no array.
    ValueError: `steps` is not positive or does not divide the rows, there is no
      row, or the leaves do not share their first axis.

  Example:
    >>> import numpy as np
    >>> split({"x": np.arange(6)}, 2)["x"].tolist()
    [[0, 2, 4], [1, 3, 5]]
  """
  if isinstance(steps, bool) or not isinstance(steps, int | np.integer):
    raise checks.fail(
      TypeError, "steps must be an integer", checks.describe(steps)
    )
  rows = _first_axis("batch", "batch", batch)
  if steps < 1 or rows % steps:
    raise checks.fail(
      ValueError,
      "steps must be positive and divide the batch",
      f"{steps} and {rows} rows",
    )

  def interleaved(leaf):
    grouped = leaf.reshape(rows // steps, steps, *leaf.shape[1:])
    return grouped.swapaxes(0, 1)

  return jax.tree.map(interleaved, batch)


def value_and_grad(
  loss_fn: Callable[[Any, Any], Outputs],
  *,
  coefficients: Mapping[str, float] | None = None,
) -> Callable[[Any, Any], tuple[Outputs, Any]]:
  """Differentiates a loss over micro-batches as over one big batch.

  The gradient is that of

    sum_j c_j N_j / D_j

  with `N_j` and `D_j` the sums and denominators of term `j` over all
  micro-batches; a term with `D_j = 0` adds exactly 0. It is accumulated in at
  least float32 and cast to each parameter's dtype once. A loss that returns one
  `LossOutput` is one term with `c = 1`.

  Args:
    loss_fn: `(params, micro_batch) -> LossOutput`; or, with `coefficients`, to
      a mapping of the terms' `LossOutput`s by name, each with a denominator of
      its own. It is traced once.
    coefficients: one finite real number a term, static. A term with coefficient
      0 adds nothing, whatever its value. For a schedule scale the term's
      `unreduced_sum`.

  Returns:
    `(params, micro_batches) -> (outputs, gradients)`. `params` is a pytree of
    floating-point arrays; the leaves of `micro_batches` are `[steps, ...]`, by
    `split`, or stacked so already. `outputs` is what the loss returns, sums and
    denominators added over the micro-batches and not divided; `gradients` is
    like `params`.

  Raises:
    TypeError: an argument or a result of the loss of another type, a parameter
      that is not floating-point, or a sum or denominator in less than float32.
    ValueError: no micro-batch, leaves of differing numbers of steps,
      coefficients for other terms than those of the loss, or a denominator that
      has a derivative in the parameters.

  Example:
    >>> import jax.numpy as jnp
    >>> def squared_error(params, batch):
    ...   error = (params["w"] * batch["x"] - batch["y"]) ** 2
    ...   metric = outputs.WeightedMetric(
    ...       unreduced_sum=jnp.sum(batch["weight"] * error),
    ...       denominator=jnp.sum(batch["weight"]))
    ...   return outputs.LossOutput(primary_loss=metric, aux_metrics={})
    >>> batch = {"x": jnp.ones(4), "y": jnp.array([0.0, 1.0, 2.0, 3.0]),
    ...          "weight": jnp.array([1.0, 0.0, 0.0, 3.0])}
    >>> output, gradients = value_and_grad(squared_error)(
    ...     {"w": jnp.float32(0.0)}, split(batch, 2))
    >>> float(output.primary_loss.compute()), float(gradients["w"])
    (6.75, -4.5)
  """
  checks.function("loss_fn", loss_fn)
  differentiated = stateful_value_and_grad(
    lambda params, state, batch: (loss_fn(params, batch), state),
    coefficients=coefficients,
  )

  def accumulated(params: Any, micro_batches: Any) -> tuple[Outputs, Any]:
    merged, _, gradients = differentiated(params, None, micro_batches)
    return merged, gradients

  return accumulated


def stateful_value_and_grad(
  loss_fn: Callable[[Any, Any, Any], tuple[Outputs, Any]],
  *,
  coefficients: Mapping[str, float] | None = None,
) -> Callable[[Any, Any, Any], tuple[Outputs, Any, Any]]:
  """`value_and_grad` for a loss that updates a state, such as batch statistics.

  The state goes from micro-batch to micro-batch and is not differentiated.

  Args:
    loss_fn: `(params, state, micro_batch) -> (outputs, state)`, with outputs as
      in `value_and_grad`. The state keeps its structure, shapes and dtypes.
    coefficients: as in `value_and_grad`.

  Returns:
    `(params, state, micro_batches) -> (outputs, state, gradients)`.

  Raises:
    TypeError, ValueError: as `value_and_grad`; or `ValueError` where the state
      changes its structure, shapes or dtypes.

  Example:
    >>> import jax.numpy as jnp
    >>> def loss(params, seen, batch):
    ...   metric = outputs.WeightedMetric(
    ...       unreduced_sum=jnp.sum(params * batch),
    ...       denominator=jnp.float32(batch.size))
    ...   output = outputs.LossOutput(primary_loss=metric, aux_metrics={})
    ...   return output, seen + batch.size
    >>> _, seen, gradient = stateful_value_and_grad(loss)(
    ...     jnp.float32(0.0), 0, split(jnp.arange(6.0), 3))
    >>> int(seen), float(gradient)
    (6, 2.5)
  """
  checks.function("loss_fn", loss_fn)
  factors = _check_coefficients(coefficients)

  def accumulated(
    params: Any, state: Any, micro_batches: Any
  ) -> tuple[Outputs, Any, Any]:
    _check_params(params)
    _first_axis("micro_batches", "steps", micro_batches)

    @jax.jit  # both passes share its one trace
    def evaluate(params, state, batch):
      result, state = loss_fn(params, state, batch)
      _check_result(result, coefficients)
      return result, state

    def terms(result: Any) -> dict[str, outputs.WeightedMetric]:
      named = {_ONE_TERM: result} if coefficients is None else result
      return {name: named[name].primary_loss for name in factors}

    def denominators(_, batch):
      result, _ = evaluate(params, state, batch)
      return None, {n: term.denominator for n, term in terms(result).items()}

    _, parts = jax.lax.scan(denominators, None, micro_batches)
    scales = {
      name: _scale(factors[name], total)
      for name, total in _total(parts).items()
    }

    def step(carry, batch):
      state, sums = carry

      def objective(params):
        result, new_state = evaluate(params, state, batch)
        value = jnp.zeros((), float)
        for name, term in terms(result).items():
          _constant(term.denominator)
          value += scales[name] * term.unreduced_sum.astype(float)
        return value, (result, new_state)

      gradients, (result, state) = jax.grad(objective, has_aux=True)(params)
      sums = jax.tree.map(lambda s, g: s + g.astype(s.dtype), sums, gradients)
      return (state, sums), result

    zeros = jax.tree.map(_accumulator, params)
    (state, sums), results = jax.lax.scan(step, (state, zeros), micro_batches)
    gradients = jax.tree.map(lambda s, p: s.astype(p.dtype), sums, params)
    return _total(results), state, gradients

  return accumulated


def _total(stacked: Any) -> Any:
  """Sums over the micro-batches."""
  return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), stacked)


def _scale(factor: float, denominator: jax.Array) -> jax.Array:
  """`factor / denominator` in JAX's widest dtype; 0 over 0."""
  wide = denominator.astype(float)
  return outputs.WeightedMetric(
    unreduced_sum=jnp.full_like(wide, factor), denominator=wide
  ).compute()


def _accumulator(parameter: jax.Array) -> jax.Array:
  """Zeros in at least float32, on a mesh laid out as the parameter.

  They are formed from the parameter because the partitioner follows its layout
  through operations; it replicates plain zeros, and the sums with them.
  """
  zero = jnp.zeros((), numerics.accumulation_dtype(parameter.dtype))
  return jnp.where(jnp.isfinite(parameter), zero, zero)


@jax.custom_jvp
def _constant(denominator: jax.Array) -> jax.Array:
  """A denominator; refused where it has a derivative in the parameters."""
  return denominator


@_constant.defjvp
def _refuse(primals, tangents):  # called for a derivative that is not 0
  raise checks.fail(
    ValueError,
    "a denominator must not depend on params (jax.lax.stop_gradient makes it a"
    " constant)",
    "one with a derivative in params",
  )


# Checks, at trace time.


def _check_coefficients(
  coefficients: Mapping[str, float] | None,
) -> dict[str, float]:
  """The coefficients that are not 0: 0 times a term is nothing."""
  if coefficients is None:
    return {_ONE_TERM: 1.0}
  if not isinstance(coefficients, Mapping):
    raise checks.fail(
      TypeError,
      "coefficients must be a mapping from the terms' names",
      checks.describe(coefficients),
    )
  if not coefficients:
    raise checks.fail(
      ValueError, "coefficients must name at least one term", "none"
    )
  factors = {
    name: checks.finite_real(f"coefficients[{name!r}]", value)
    for name, value in coefficients.items()
  }
  return {name: factor for name, factor in factors.items() if factor}


def _check_result(
  result: Any, coefficients: Mapping[str, float] | None
) -> None:
  """Checks what a loss returned."""
  what = "the loss_fn's result"
  if coefficients is None:
    if not isinstance(result, outputs.LossOutput):
      raise checks.fail(
        TypeError,
        f"{what} must be a LossOutput (or, with coefficients, a mapping of"
        " them)",
        checks.describe(result),
      )
  else:
    checks.mapping(what, result, outputs.LossOutput)
    if sorted(result) != sorted(coefficients):
      raise checks.fail(
        ValueError,
        "coefficients must name the terms that the loss_fn returns",
        f"{sorted(coefficients)} for {sorted(result)}",
      )
  for path, leaf in jax.tree_util.tree_leaves_with_path(result):
    if jnp.finfo(leaf.dtype).bits < 32:
      raise checks.fail(
        TypeError,
        f"{what}{jax.tree_util.keystr(path)} must be at least float32",
        leaf.dtype,
      )


def _check_params(params: Any) -> None:
  """Checks that every parameter can be differentiated."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    if not checks.is_array(leaf) or not jnp.issubdtype(
      leaf.dtype, jnp.floating
    ):
      raise checks.fail(
        TypeError,
        f"params{jax.tree_util.keystr(path)} must be a floating-point array"
        " (the loss_fn may close over others)",
        checks.describe(leaf),
      )


def _first_axis(name: str, axis: str, tree: Any) -> int:
  """The length, at least 1, of the first axis that all leaves share."""
  lengths: dict[int, str] = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    label = name + jax.tree_util.keystr(path)
    if not checks.is_array(leaf):
      raise checks.fail(
        TypeError, f"{label} must be a JAX/NumPy array", checks.describe(leaf)
      )
    if not leaf.shape:
      raise checks.fail(
        ValueError, f"{label} must have shape [{axis}, ...]", "shape ()"
      )
    lengths.setdefault(leaf.shape[0], label)
  if len(lengths) != 1 or 0 in lengths:
    raise checks.fail(
      ValueError,
      f"{name} must hold arrays of one positive first axis, {axis}",
      " and ".join(f"{n} ({label})" for n, label in lengths.items())
      or "no array",
    )
  return next(iter(lengths))
