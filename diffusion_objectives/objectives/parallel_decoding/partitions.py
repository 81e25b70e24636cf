r"""Blocks of intervals, and the laws that block and head are drawn from.

A block is a range `[start, end)` of fine intervals, and few-step sampling takes
one after the other: a partition, `n + 1` nodes from 0 to `N`. Balanced, node
`i` is `floor(i N / n)`: blocks differ by one interval at most.

In training a block starts at a multiple of the smallest size, and the head that
is supervised lies within the largest from there:

  start = L_min U{0, ..., N / L_min - 1},  k ~ U{start, ..., end - 1},      (1)
  end = min(start + L_max, N, segment end)

Given the start the head is uniform; over all starts it is not, and late heads,
which more starts reach, are drawn more often.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusion_objectives._core import checks


def partition(
  intervals: int,
  blocks: int,
  nodes: Mapping[int, Any] | None = None,
  *,
  largest: int | None = None,
) -> tuple[int, ...]:
  """The nodes of a partition: those that are given for it, else balanced ones.

  Args:
    intervals: `N`.
    blocks: `n`, the number of calls.
    nodes: by number of blocks, `n + 1` integers of one's own.
    largest: what no block may be wider than, or None.

  Returns:
    `n + 1` integers from 0 to `N`.

  Raises:
    TypeError: numbers of another type.
    ValueError: more blocks than intervals, nodes that do not rise from 0 to
      `N`, or a block that is too wide.

  Example:
    >>> partition(32, 6)
    (0, 5, 10, 16, 21, 26, 32)
    >>> partition(32, 2, {2: [0, 24, 32]})
    (0, 24, 32)
  """
  total = checks.positive_integer("intervals", intervals)
  if total < 2:
    raise checks.fail(ValueError, "intervals must be at least 2", intervals)
  count = checks.positive_integer("blocks", blocks)
  if count > total:
    raise checks.fail(
      ValueError, f"blocks must be at most the {total} intervals", blocks
    )
  chosen = tuple(i * total // count for i in range(count + 1))
  if nodes is not None:
    if not isinstance(nodes, Mapping):
      raise checks.fail(
        TypeError,
        "nodes must be a mapping from the number of blocks to its nodes",
        checks.describe(nodes),
      )
    if count in nodes:
      chosen = _explicit(nodes[count], total, count)
  if largest is not None:
    limit = checks.positive_integer("largest", largest)
    widest = max(np.diff(chosen))
    if widest > limit:
      raise checks.fail(
        ValueError,
        f"no block of {count} may have more than {limit} intervals",
        f"one of {widest}",
      )
  return chosen


def _explicit(nodes: Any, intervals: int, blocks: int) -> tuple[int, ...]:
  array = None if isinstance(nodes, str) else np.asarray(nodes)
  if array is None or not np.issubdtype(array.dtype, np.integer):
    raise checks.fail(
      TypeError,
      "nodes must be integers",
      repr(nodes) if array is None else array.dtype,
    )
  if array.shape != (blocks + 1,):
    raise checks.fail(
      ValueError,
      f"nodes must have shape {(blocks + 1,)} for {blocks} blocks",
      array.shape,
    )
  ends = (int(array[0]), int(array[-1]))
  if ends != (0, intervals) or (np.diff(array) <= 0).any():
    raise checks.fail(
      ValueError,
      f"nodes must rise from 0 to {intervals}",
      array.tolist(),
    )
  return tuple(array.tolist())


def block_sizes(intervals: int, smallest: Any, largest: Any) -> tuple[int, int]:
  """Checks `L_min` and `L_max`.

  Raises:
    TypeError: not integers.
    ValueError: not positive, `L_min` beyond `L_max` or no divisor of `N` (the
      last heads would never be trained), or `L_max` beyond `N`.

  Example:
    >>> block_sizes(32, 4, 8)
    (4, 8)
  """
  low = checks.positive_integer("block_size_min", smallest)
  high = checks.positive_integer("block_size_max", largest)
  if low > high:
    raise checks.fail(
      ValueError,
      "block_size_min must be at most block_size_max",
      f"{low} and {high}",
    )
  if high > intervals:
    raise checks.fail(
      ValueError,
      f"block_size_max must be at most the {intervals} intervals",
      high,
    )
  if intervals % low:
    raise checks.fail(
      ValueError, f"block_size_min must divide the {intervals} intervals", low
    )
  return low, high


def sample_starts(
  key: jax.Array, rows: int, *, intervals: int, block_size_min: int
) -> jax.Array:
  """`[rows]` starts of blocks, (1), each row's own.

  Example:
    >>> starts = sample_starts(
    ...     jax.random.key(0), 100, intervals=32, block_size_min=8)
    >>> sorted(set(starts.tolist()))
    [0, 8, 16, 24]
  """
  low, _ = block_sizes(intervals, block_size_min, intervals)
  return low * jax.random.randint(key, (rows,), 0, intervals // low)


def sample_heads(
  key: jax.Array,
  starts: jax.Array,
  *,
  intervals: int,
  block_size_max: int,
  segment_end: Any = None,
) -> jax.Array:
  """`[rows]` heads that are supervised, (1), each row's own.

  Args:
    key: a PRNG key.
    starts: `[rows]` integers.
    intervals: `N`.
    block_size_max: `L_max`.
    segment_end: an integer or `[rows]` of them, exclusive, or None.

  Example:
    >>> starts = jnp.full(100, 28)
    >>> heads = sample_heads(
    ...     jax.random.key(0), starts, intervals=32, block_size_max=12)
    >>> sorted(set(heads.tolist()))
    [28, 29, 30, 31]
  """
  checks.array("starts", starts, dtype="integer", axes=("rows",))
  _, high = block_sizes(intervals, 1, block_size_max)
  ends = jnp.minimum(starts + high, intervals)
  if segment_end is not None:
    ends = jnp.minimum(ends, segment_end)
  return jax.random.randint(key, starts.shape, starts, ends)
