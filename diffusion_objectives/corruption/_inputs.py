"""Checks of arguments, in the library's one message form."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusion_objectives._core import checks
from diffusion_objectives._core import numerics

AXES = ("batch", "length")


def floating(name: str, values: Any) -> jax.Array:
  """`values` as JAX's array, of a floating-point dtype."""
  if not checks.is_array(values):
    raise checks.fail(
      TypeError, f"{name} must be a JAX/NumPy array", checks.describe(values)
    )
  if not jnp.issubdtype(values.dtype, jnp.floating):
    raise checks.fail(
      TypeError, f"{name} must have floating-point dtype", values.dtype
    )
  return jnp.asarray(values)


def integer(name: str, value: Any, *, least: int = 0) -> int:
  """A Python or NumPy integer, `least` or larger."""
  if isinstance(value, bool) or not isinstance(value, int | np.integer):
    raise checks.fail(
      TypeError, f"{name} must be an integer", checks.describe(value)
    )
  if value < least:
    must = {0: "nonnegative", 1: "positive"}[least]
    raise checks.fail(ValueError, f"{name} must be {must}", value)
  return int(value)


def positions(
  name: str, values: Any, *, dtype: str, like: jax.Array | None = None
) -> jax.Array:
  """`[batch, length]` of a kind of dtype, of the shape of `like`."""
  checks.array(name, values, dtype=dtype, axes=AXES)
  if like is not None:
    checks.same_shape(name, values, "token_ids", like, axes=2)
  return saturated(values) if dtype == "integer" else jnp.asarray(values)


def group_ids(
  name: str, values: Any, *, like: jax.Array | None = None
) -> jax.Array:
  """Ids `[batch, length]` that are compared with one another.

  NumPy's ids that JAX narrows must fit: saturated, two could become one.
  """
  narrow = positions(name, values, dtype="integer", like=like)
  if isinstance(values, np.ndarray):
    bounds = jnp.iinfo(narrow.dtype)
    is_bad = (values < bounds.min) | (values > bounds.max)
    refuse(values, is_bad, f"{name} must fit {narrow.dtype}")
  return narrow


def tokens(token_ids: Any, is_supervised: Any) -> tuple[jax.Array, jax.Array]:
  """Clean ids and the positions that a process may touch."""
  ids = positions("token_ids", token_ids, dtype="integer")
  return ids, positions(
    "is_supervised", is_supervised, dtype="boolean", like=ids
  )


def fitting(name: str, value: Any, dtype: jnp.dtype) -> jax.Array:
  """A nonnegative integer that `dtype` holds, in that dtype."""
  if isinstance(value, bool) or not isinstance(value, int | np.integer):
    raise checks.fail(
      TypeError, f"{name} must be an integer", checks.describe(value)
    )
  if not 0 <= value <= jnp.iinfo(dtype).max:
    raise checks.fail(
      ValueError, f"{name} must be nonnegative and fit {dtype}", value
    )
  return jnp.array(value, dtype)


def per_token(name: str, values: jax.Array, ids: jax.Array) -> jax.Array:
  """`[batch]` or `[batch, length]` values, as `[batch, length]`."""
  if values.shape == ids.shape:
    return values
  if values.shape != ids.shape[:1]:
    raise checks.fail(
      ValueError,
      f"{name} must have shape [batch] or [batch, length]",
      f"{values.shape} for [batch, length] = {ids.shape}",
    )
  return jnp.broadcast_to(values[:, None], ids.shape)


def probabilities(
  name: str, values: Any, ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Probabilities `[batch, length]`, and the rows `[batch, 1]` to refuse."""
  given = floating(name, values)
  # At least float32: a coarser uniform would mask at another rate.
  given = given.astype(numerics.accumulation_dtype(given.dtype))
  is_bad = ~((given >= 0) & (given <= 1))
  refuse(given, is_bad, f"{name} must be within [0, 1]")
  is_bad = per_token(name, is_bad, ids)
  return per_token(name, given, ids), jnp.any(is_bad, axis=1, keepdims=True)


def refuse(
  received: jax.Array | np.ndarray, is_bad: jax.Array | np.ndarray, must: str
) -> None:
  """Raises where bad values can be read; under trace they cannot."""
  if checks.is_concrete(is_bad) and is_bad.any():
    first = np.argwhere(np.asarray(is_bad))[0]
    value = np.asarray(received)[tuple(first)]
    raise checks.fail(ValueError, must, value)


def saturated(ids: jax.Array | np.ndarray) -> jax.Array:
  """`ids` as JAX's array; what it narrows is saturated, never wrapped."""
  if isinstance(ids, np.ndarray):
    dtype = jnp.asarray(ids[:0]).dtype
    if dtype != ids.dtype:
      bounds = np.iinfo(dtype)
      ids = np.clip(ids, bounds.min, bounds.max).astype(dtype)
  return jnp.asarray(ids)
