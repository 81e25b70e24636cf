"""Blocks of tokens and of columns: their sizes, and how they are read."""

from collections.abc import Callable
import functools
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp


class Platform(NamedTuple):
  """What differs from one platform to another.

  Attributes:
    token_block: the most tokens in a block.
    vocabulary_block: how many columns a block has.
    tile_bytes: the most that the float32 tiles of logits should take, as long
      as a block has `FEWEST_TOKENS`.
    is_cpu: whether XLA's CPU backend is worked around.
  """

  token_block: int
  vocabulary_block: int
  tile_bytes: int
  is_cpu: bool

  def tokens(self, vocabulary: int, tiles: int) -> int:
    """How many tokens a block has: a power of 2."""
    size = self.token_block
    while size > FEWEST_TOKENS and 4 * size * vocabulary * tiles > (
      self.tile_bytes
    ):
      size //= 2
    return size


# Products of fewer rows are too thin.
FEWEST_TOKENS = 128

# On a CPU a product of 256 rows runs at full speed, and 1,024 of their columns
# stay in the cache. An accelerator needs more rows for each byte of the head.
CPU = Platform(256, 1024, 2**28, True)
ACCELERATOR = Platform(1024, 8192, 2**30, False)


def number(total: Any, block: int) -> Any:
  """How many blocks cover `total`."""
  return -(-total // block)


class Columns(NamedTuple):
  """A device's columns of the vocabulary in blocks of one size.

  Where the size does not divide, the last block ends with the columns and
  begins within the block before: nothing is padded, and the columns that were
  seen before are masked. So are those that stand for no id.

  Attributes:
    size: the number of columns.
    block: the number of columns in a block, at most `size`.
    first: the id of the first column; 0 where one device has all.
    end: the id that the first padding column would have, or None where no
      column is padding.
  """

  size: int
  block: int
  first: Any
  end: int | None

  @property
  def is_one(self) -> bool:
    """Whether one block has all: its loop is no loop."""
    return self.block == self.size

  def indices(self) -> jax.Array:
    """Of the blocks."""
    return jnp.arange(number(self.size, self.block), dtype=jnp.int32)

  def start(self, j: jax.Array) -> jax.Array:
    """The first column of block `j`."""
    return jnp.minimum(j * self.block, self.size - self.block)

  def mask(self, j: jax.Array, logits: jax.Array) -> jax.Array:
    """-inf on padding, and on columns that an earlier block had."""
    column = self.start(j) + lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    if self.size % self.block:
      logits = jnp.where(column >= j * self.block, logits, -jnp.inf)
    if self.end is not None:
      logits = jnp.where(self.first + column < self.end, logits, -jnp.inf)
    return logits

  def local(self, j: jax.Array, ids: jax.Array) -> jax.Array:
    """Where ids lie in block `j`; `block` where they do not."""
    column = ids - self.first
    first, end = j * self.block, jnp.minimum((j + 1) * self.block, self.size)
    is_here = (column >= first) & (column < end)
    return jnp.where(is_here, column - self.start(j), self.block)


# Reading parts of arrays.


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def read(
  platform: Platform,
  part: Callable[..., jax.Array],
  array: jax.Array,
  *where: jax.Array,
) -> jax.Array:
  """`part(array, *where)`, which is linear in the array."""
  is_narrow = array.dtype.itemsize == 2 and jnp.issubdtype(
    array.dtype, jnp.floating
  )
  if not (platform.is_cpu and is_narrow):
    return part(array, *where)
  # The CPU backend would widen the whole array to read a part of it, but not
  # integers. Outside the loop the reinterpretation would be a copy: a barrier
  # that depends on the loop's index keeps it inside.
  array, where = lax.optimization_barrier((array, where))
  integers = lax.bitcast_convert_type(array, jnp.uint16)
  return lax.bitcast_convert_type(part(integers, *where), array.dtype)


@read.defjvp
def _read_jvp(platform, part, primals, tangents):
  array, *where = primals
  return (
    read(platform, part, array, *where),
    part(tangents[0], *where),
  )


def rows(array: jax.Array, indices: jax.Array) -> jax.Array:
  """`array[indices]`."""
  return array.at[indices].get(mode="promise_in_bounds")


def slice_of(axis: int, size: int) -> Callable[..., jax.Array]:
  """A reader of `size` entries of an axis from a start."""

  def part(array, start):
    return lax.dynamic_slice_in_dim(array, start, size, axis)

  return part


def window(size: int) -> Callable[..., jax.Array]:
  """A reader of `size` columns of some rows."""

  def part(array, indices, start):
    starts = jnp.stack(
      [indices, jnp.broadcast_to(start, indices.shape)], axis=1
    )
    return lax.gather(
      array,
      starts,
      lax.GatherDimensionNumbers(
        offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0, 1)
      ),
      (1, size),
      mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )

  return part


def _is_manual() -> bool:
  """Whether some axis of a mesh is mapped over here."""
  return bool(jax.sharding.get_abstract_mesh().manual_axes)


def varying_zero(operands: Any) -> jax.Array:
  """0, which varies over every axis that an operand varies over.

  In a manual region (`jax.shard_map`) the start of a loop must not be known as
  one value on all devices where its end is not: this is added to it.
  """
  zero = jnp.zeros((), jnp.int32)
  if not _is_manual():
    return zero
  for leaf in jax.tree.leaves(operands):
    if 0 in leaf.shape:
      continue
    corner = leaf[(0,) * leaf.ndim]
    zero += jnp.where(corner == corner, 0, 0)
  return zero


def as_varying(zero: jax.Array, array: jax.Array) -> jax.Array:
  """The array, varying as `zero` does; outside of a manual region itself.

  A custom derivative has to return cotangents that vary as its arguments do;
  that of this addition is summed over the axes that the array does not vary on.
  """
  if 0 in array.shape or not _is_manual():
    return array
  corner = array[(0,) * array.ndim]
  if jax.typeof(corner + zero.astype(array.dtype)) == jax.typeof(corner):
    return array
  return array + zero.astype(array.dtype)


def start(zero: jax.Array, carry: Any) -> Any:
  """A loop's start, with `varying_zero` added to it."""
  return jax.tree.map(lambda x: x + zero.astype(x.dtype), carry)


def dot(
  x: jax.Array, y: jax.Array, axes: tuple[int, int], dtype: jnp.dtype
) -> jax.Array:
  """The product of two matrices over one axis of each, summed in `dtype`."""
  dimensions = (((axes[0],), (axes[1],)), ((), ()))
  return lax.dot_general(x, y, dimensions, preferred_element_type=dtype)
