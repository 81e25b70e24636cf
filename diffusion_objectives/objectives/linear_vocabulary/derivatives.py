r"""The two ways in which the block kernel is differentiated.

The gradients of a weighted sum can be formed together with it: the cotangent of
a scalar is a factor, multiplied in at the end. Nothing is computed twice, and
what is not differentiated is not formed. Of values by token the cotangents are
known in the backward pass alone, which forms the logits again.

Both are compiled by themselves: an eager call compiles once, and in an eager
`shard_map` JAX cannot yet tell what a custom rule is differentiated in.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.extend
from jax.interpreters import ad
from jax.interpreters import batching
from jax.interpreters import mlir
import jax.numpy as jnp

from diffusion_objectives._core import checks
from diffusion_objectives._core import numerics
from diffusion_objectives.objectives.linear_vocabulary import kernel
from diffusion_objectives.objectives.linear_vocabulary import terms
from diffusion_objectives.objectives.linear_vocabulary import tokens

Factors = kernel.Gradients  # hidden states and the head's parts; None if absent

NOTHING = kernel.Gradients(False, False, False, False, False)


def _run(
  form: tokens.Form,
  wanted: kernel.Gradients,
  factors: Factors,
  operands: kernel.Operands,
) -> kernel.Result:
  low_rank = None if factors.a is None else (factors.a, factors.b)
  head = dataclasses.replace(
    operands.head, kernel=factors.kernel, bias=factors.bias, low_rank=low_rank
  )
  return kernel.run(
    form, wanted, operands._replace(hidden=factors.hidden, head=head)
  )


def _loss(form: tokens.Form, values: terms.Values) -> jax.Array:
  """`soft D + hard l`."""
  parts = []
  if form.soft:
    parts.append(form.soft * values.soft)
  if form.hard:
    parts.append(form.hard * values.hard)
  return sum(parts[1:], parts[0])


def _wanted(factors: Factors) -> kernel.Gradients:
  """Which of a forward rule's arguments are differentiated."""
  return kernel.Gradients(
    *(factor is not None and factor.perturbed for factor in factors)
  )


# Under `jit`, JAX keeps one tree of residuals for all traces of a forward rule,
# whatever they differentiate. So trees do not depend on that: shapes tell.
_EMPTY = (0,)


def _dtypes(factors: Any) -> Any:
  """Empty arrays of the factors' dtypes: residuals are arrays."""
  return jax.tree.map(lambda factor: jnp.zeros(_EMPTY, factor.dtype), factors)


def _present(array: jax.Array | None, dtype: Any) -> jax.Array:
  """The array, or an empty one in the place of None."""
  return jnp.zeros(_EMPTY, dtype) if array is None else array


def _cotangents(
  gradients: kernel.Gradients, cotangent: Any, dtypes: Any
) -> Factors:
  """Gradients times a cotangent, each in its factor's dtype."""
  return kernel.Gradients(
    *(
      None
      if gradient is None or gradient.shape == _EMPTY
      else (cotangent * gradient).astype(like.dtype)
      for gradient, like in zip(gradients, dtypes, strict=True)
    )
  )


# Gradients in the forward pass.


@functools.partial(jax.jit, static_argnums=0)
def weighted_sum(
  form: tokens.Form,
  factors: Factors,
  weights: jax.Array,
  operands: kernel.Operands,
) -> tuple[jax.Array, terms.Values]:
  """`sum w (soft D + hard l)`, and values by token, not differentiated."""
  return _weighted_sum(form, factors, weights, operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weighted_sum(form, factors, weights, operands):
  values = _run(form, NOTHING, factors, operands).values
  return _sum(form, values, weights, operands), values


def _sum(form, values, weights, operands):
  return numerics.weighted_sum(_loss(form, values), weights, operands.is_active)


def _weighted_sum_forward(form, factors, weights, operands):
  wanted, weighted = _wanted(factors), weights.perturbed
  factors, weights, operands = (
    jax.custom_derivatives.custom_vjp_primal_tree_values(
      (factors, weights, operands)
    )
  )
  values, _, gradients = _run(
    form, wanted, factors, operands._replace(scales=weights)
  )
  by_token = _loss(form, values) if weighted else None
  formed = (gradients, by_token)
  formed = jax.tree.map(
    lambda array: _present(array, weights.dtype),
    formed,
    is_leaf=lambda array: array is None,
  )
  residuals = (_once(formed), _dtypes((factors, weights)))
  return (_sum(form, values, weights, operands), values), residuals


def _weighted_sum_backward(form, residuals, cotangents):
  cotangent = cotangents[0]
  if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
    return None, None, None
  (gradients, by_token), (dtypes, of_weights) = residuals
  of_factors = _cotangents(gradients, cotangent, dtypes)
  if by_token.shape == _EMPTY:
    return of_factors, None, None
  return of_factors, (cotangent * by_token).astype(of_weights.dtype), None


_weighted_sum.defvjp(
  _weighted_sum_forward, _weighted_sum_backward, symbolic_zeros=True
)


# Gradients in the backward pass.


@functools.partial(jax.jit, static_argnums=0)
def by_token(
  form: tokens.Form, factors: Factors, operands: kernel.Operands
) -> tuple[jax.Array, terms.Values]:
  """`soft D + hard l` by token, and values, not differentiated."""
  return _by_token(form, factors, operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_token(form, factors, operands):
  values = _run(form, NOTHING, factors, operands).values
  return _loss(form, values), values


def _by_token_forward(form, factors, operands):
  wanted = _wanted(factors)
  factors, operands = jax.custom_derivatives.custom_vjp_primal_tree_values(
    (factors, operands)
  )
  values, statistics, _ = _run(form, NOTHING, factors, operands)
  return (_loss(form, values), values), (
    tuple(jnp.zeros((int(is_wanted),)) for is_wanted in wanted),
    factors,
    operands._replace(statistics=statistics),
  )


def _by_token_backward(form, residuals, cotangents):
  cotangent = cotangents[0]
  if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
    return None, None
  flags, factors, operands = residuals
  wanted = kernel.Gradients(*(flag.shape != _EMPTY for flag in flags))
  gradients = _run(
    form, wanted, factors, operands._replace(scales=cotangent)
  ).gradients
  one = jnp.ones_like(cotangent, shape=())
  return _cotangents(_once(gradients), one, factors), None


_by_token.defvjp(_by_token_forward, _by_token_backward, symbolic_zeros=True)


# Second derivatives.


@jax.custom_jvp
def _once(gradients: Any) -> Any:
  """Gradients that are differentiated in forward mode alone.

  The loops run as long as there are tokens that count, so that JAX cannot
  reverse them.
  """
  return gradients


@_once.defjvp
def _once_jvp(primals, tangents):
  return primals[0], jax.tree.map(_TANGENT.bind, tangents[0])


def _refuse(*_):
  raise checks.fail(
    ValueError,
    "a gradient of a linear-vocabulary loss must be differentiated in forward"
    " mode (jax.jvp, jax.jacfwd) or taken from the dense loss",
    "reverse mode over reverse mode",
  )


# The identity, but for its transpose.
_TANGENT = jax.extend.core.Primitive("tangent_of_a_gradient")
_TANGENT.def_impl(lambda tangent: tangent)
_TANGENT.def_abstract_eval(lambda tangent: tangent)
ad.deflinear(_TANGENT, _refuse)
batching.primitive_batchers[_TANGENT] = lambda arguments, axes: (
  _TANGENT.bind(*arguments),
  axes[0],
)
mlir.register_lowering(_TANGENT, lambda context, tangent: [tangent])
