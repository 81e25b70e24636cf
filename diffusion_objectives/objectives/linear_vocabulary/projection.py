r"""Block by block from hidden states to logits, and the gradients back.

  u = h W + (h a) b + bias,  z = cap tanh(logit_scale u / cap)              (1)
  du = dz logit_scale (1 - (z / cap)^2)                                     (2)
  dh = du W^T,  dW = h^T du,  dbias = sum du                                (3)
  dh += d(ha) a^T,  da = h^T d(ha),  db = (ha)^T du,  d(ha) = du b^T        (4)

(4) is a low-rank pair's, whose product is never formed.
"""

from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from diffusion_objectives._core import numerics
from diffusion_objectives.objectives.linear_vocabulary import blocks
from diffusion_objectives.objectives.linear_vocabulary import head as heads


class Gradients(NamedTuple):
  """By a head's parts and the hidden states: arrays, or whether wanted."""

  hidden: Any = None
  kernel: Any = None
  bias: Any = None
  a: Any = None
  b: Any = None


class Projection(NamedTuple):
  """A block of tokens before a head.

  Attributes:
    head: the head.
    hidden: `[c, features]`, in the dtype of the product with the kernel.
    transposed: `[features, c]`, for use in a loop over columns: a transposition
      that stands beside a product is folded into it, which a CPU is slow at,
      and in 16 bits not always capable of.
    low: `[c, rank]`, `h a`, or None.
    columns: the blocks of the vocabulary.
    platform: how the head is read.
    dtype: of logits and sums.
  """

  head: heads.OutputHead
  hidden: jax.Array
  transposed: jax.Array
  low: Any
  columns: blocks.Columns
  platform: blocks.Platform
  dtype: jnp.dtype


def project(
  head: heads.OutputHead,
  hidden: jax.Array,
  columns: blocks.Columns,
  platform: blocks.Platform,
  dtype: jnp.dtype,
) -> Projection:
  """A block of tokens before a head."""
  hidden = hidden.astype(
    numerics.product_dtype(hidden.dtype, head.kernel.dtype)
  )
  low = None
  if head.low_rank is not None:
    a = jnp.asarray(head.low_rank[0]).astype(dtype)
    low = blocks.dot(hidden.astype(dtype), a, (1, 0), dtype)
  return Projection(head, hidden, hidden.T, low, columns, platform, dtype)


def logits(p: Projection, j: jax.Array) -> jax.Array:
  """(1) on the columns of block `j`."""
  kernel, features = _kernel(p, j)
  u = blocks.dot(p.hidden, kernel, (1, features), p.dtype)
  if p.low is not None:
    u += blocks.dot(p.low, _part(p, p.head.low_rank[1], 1, j), (1, 0), p.dtype)
  if p.head.bias is not None:
    u += _part(p, p.head.bias, 0, j)[None]
  z = u if p.head.logit_scale == 1 else p.head.logit_scale * u
  if p.head.soft_cap is not None:
    z = p.head.soft_cap * jnp.tanh(z / p.head.soft_cap)
  return p.columns.mask(j, z)


def pull_back(
  p: Projection, j: jax.Array, z: jax.Array, dz: Any, sums: Gradients
) -> Gradients:
  """Adds (2) to (4) of block `j`; of the low-rank pair's `a`, d(ha)."""
  scale, cap = p.head.logit_scale, p.head.soft_cap
  du = dz if scale == 1 else scale * dz
  if cap is not None:
    du *= 1 - jnp.where(z == -jnp.inf, 0, z / cap) ** 2
  # A slope can be smaller than float16 knows, and a weight larger.
  dtype = p.dtype if p.hidden.dtype == jnp.float16 else p.hidden.dtype
  narrow = du.astype(dtype)
  start = p.columns.start(j)

  def add(total, part, axis):
    size = p.columns.block
    old = lax.dynamic_slice_in_dim(total, start, size, axis)
    return lax.dynamic_update_slice_in_dim(total, old + part, start, axis)

  kernel, features = _kernel(p, j)
  if sums.hidden is not None:
    part = blocks.dot(narrow, kernel.astype(dtype), (1, 1 - features), p.dtype)
    sums = sums._replace(hidden=sums.hidden + part)
  if sums.kernel is not None:
    axis = 1 - features
    if is_turned(p.head, p.hidden.dtype, p.platform):
      axis = 1
    if axis == 0:
      part = blocks.dot(narrow, p.hidden.astype(dtype), (0, 0), p.dtype)
    elif p.columns.is_one:
      part = blocks.dot(p.hidden.astype(dtype), narrow, (0, 0), p.dtype)
    else:
      part = blocks.dot(p.transposed.astype(dtype), narrow, (1, 0), p.dtype)
    sums = sums._replace(kernel=add(sums.kernel, part, axis))
  if sums.bias is not None:
    sums = sums._replace(bias=add(sums.bias, jnp.sum(du, axis=0), 0))
  if sums.a is not None:
    b = _part(p, p.head.low_rank[1], 1, j)
    sums = sums._replace(a=sums.a + blocks.dot(du, b, (1, 1), p.dtype))
  if sums.b is not None:
    part = blocks.dot(p.low, du, (0, 0), p.dtype)
    sums = sums._replace(b=add(sums.b, part, 1))
  return sums


def is_turned(
  head: heads.OutputHead, dtype: jnp.dtype, platform: blocks.Platform
) -> bool:
  """Whether a tied kernel's gradient is summed as `[features, vocabulary]`.

  On a CPU the product that gives its transpose is twice as slow in 16 bits. It
  is turned once, at the end, together with its rounding to the kernel's dtype.
  """
  is_tied = head.layout != heads.LAYOUTS[0]
  return is_tied and platform.is_cpu and jnp.dtype(dtype).itemsize == 2


def start(p: Projection, wanted: Gradients, sums: Gradients) -> Gradients:
  """What the blocks of columns add to: `hidden` and `a` of these tokens."""
  tokens = p.hidden.shape[0]
  has_low = p.low is not None and (wanted.hidden or wanted.a)
  return sums._replace(
    hidden=jnp.zeros(p.hidden.shape, p.dtype) if wanted.hidden else None,
    a=jnp.zeros((tokens, p.low.shape[1]), p.dtype) if has_low else None,
  )


def close(
  p: Projection, wanted: Gradients, added: Gradients, sums: Gradients
) -> tuple[jax.Array | None, Gradients]:
  """The gradient in the hidden states, and the head's with (4) of `a`."""
  hidden, low = added.hidden, added.a
  if low is not None and wanted.hidden:
    a = jnp.asarray(p.head.low_rank[0]).astype(p.dtype)
    hidden += blocks.dot(low, a, (1, 1), p.dtype)
  a = sums.a
  if wanted.a:
    a += blocks.dot(p.hidden.astype(p.dtype), low, (0, 0), p.dtype)
  return hidden, added._replace(hidden=None, a=a)


def _part(p: Projection, array: Any, axis: int, j: jax.Array) -> jax.Array:
  """A block's columns of a bias or of `b`, in the dtype of the sums."""
  part = blocks.slice_of(axis, p.columns.block)
  array = jnp.asarray(array)
  return blocks.read(p.platform, part, array, p.columns.start(j)).astype(
    p.dtype
  )


def _kernel(p: Projection, j: jax.Array) -> tuple[jax.Array, int]:
  """A block's columns of the kernel, and its axis of features."""
  features = int(p.head.layout != heads.LAYOUTS[0])
  part = blocks.slice_of(1 - features, p.columns.block)
  kernel = blocks.read(
    p.platform, part, jnp.asarray(p.head.kernel), p.columns.start(j)
  )
  return kernel.astype(p.hidden.dtype), features
