"""Blocks: the runs of equal ids of each row.

A block is known by the position of its first token, so any integers serve as
ids, and a row of `length` tokens has at most `length` blocks, whatever is
traced.
"""

import jax
import jax.numpy as jnp


def is_first(ids: jax.Array) -> jax.Array:
  """Where a block begins, `[batch, length]` boolean."""
  differs = ids[:, 1:] != ids[:, :-1]
  return jnp.concatenate([jnp.ones_like(ids[:, :1], bool), differs], axis=1)


def first_positions(ids: jax.Array) -> jax.Array:
  """The position at which each token's block begins, `[batch, length]`."""
  at = jax.lax.broadcasted_iota(jnp.int32, ids.shape, 1)
  return jax.lax.cummax(jnp.where(is_first(ids), at, 0), axis=1)


def at_first(values: jax.Array, first: jax.Array) -> jax.Array:
  """The value at the first position of each token's block."""
  return jnp.take_along_axis(values, first, axis=1)


def sums(values: jax.Array, first: jax.Array) -> jax.Array:
  """The sum over each token's block, `[batch, length]`."""
  return _reduced(jax.ops.segment_sum, values, first)


def minima(values: jax.Array, first: jax.Array) -> jax.Array:
  """The least value of each token's block, `[batch, length]`."""
  return _reduced(jax.ops.segment_min, values, first)


def counts(is_counted: jax.Array, first: jax.Array) -> jax.Array:
  """The number of true positions of each token's block, int32."""
  return sums(is_counted.astype(jnp.int32), first)


def _reduced(reduce, values, first):
  length = values.shape[1]
  by_row = jax.vmap(lambda row, block: reduce(row, block, num_segments=length))
  return at_first(by_row(values, first), first)
