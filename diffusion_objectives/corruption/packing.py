"""Supervision, blocks and weights of packed and padded rows.

Several sequences packed into one row are told apart by `segment_ids`
`[batch, length]`: 0 is padding, a sequence's positions share a positive id that
no other sequence of the row has. What is supervised follows from positions and
segments, never from the value of a token: where the id of padding is also the
id that ends a sequence, a mask by value would hide the end.
"""

from typing import Any

import jax
import jax.numpy as jnp

from diffusion_objectives._core import checks
from diffusion_objectives.corruption import _blocks
from diffusion_objectives.corruption import _inputs


def supervision_by_length(
  lengths: jax.Array, *, length: int, prompt_lengths: jax.Array | None = None
) -> jax.Array:
  """True from the end of a row's prompt to the end of its tokens.

  Args:
    lengths: `[batch]` integer, tokens of each row, prompt included.
    length: positions of a row, padding included.
    prompt_lengths: `[batch]` integer, tokens of each row's prompt; None for 0.

  Returns:
    `[batch, length]` boolean. A row whose lengths are traced and contradict
    each other has no supervised position.

  Raises:
    TypeError: another dtype or type.
    ValueError: another shape, or lengths that do not satisfy
      `0 <= prompt_lengths <= lengths <= length` (where they are not traced).

  Example:
    >>> import jax.numpy as jnp
    >>> supervision_by_length(
    ...     jnp.array([3]), length=5, prompt_lengths=jnp.array([1])).tolist()
    [[False, True, True, False, False]]
  """
  length = _inputs.integer("length", length)
  checks.array("lengths", lengths, dtype="integer", axes=("batch",))
  ends = _inputs.saturated(lengths)[:, None]
  starts = jnp.zeros_like(ends)
  if prompt_lengths is not None:
    checks.array(
      "prompt_lengths", prompt_lengths, dtype="integer", axes=("batch",)
    )
    checks.same_shape(
      "prompt_lengths", prompt_lengths, "lengths", lengths, axes=1
    )
    starts = _inputs.saturated(prompt_lengths)[:, None]
  _inputs.refuse(
    ends, ends > length, f"lengths must be at most the {length} of a row"
  )
  _inputs.refuse(starts, starts < 0, "prompt_lengths must be nonnegative")
  _inputs.refuse(
    ends, ends < starts, "lengths must be at least those of the prompts"
  )
  is_valid = (starts >= 0) & (starts <= ends) & (ends <= length)
  at = jnp.arange(length, dtype=jnp.int32)[None, :]
  return is_valid & (starts <= at) & (at < ends)


def next_token_supervision(segment_ids: jax.Array) -> jax.Array:
  """True where the position before, of the same sequence, predicts the token.

  For logits aligned by `shift_right`: the first token of a sequence has no
  prediction, as the position before it belongs to another.

  Args:
    segment_ids: `[batch, length]` integer, 0 for padding.

  Returns:
    `[batch, length]` boolean.

  Raises:
    TypeError: another dtype or type.
    ValueError: another shape.

  Example:
    >>> import jax.numpy as jnp
    >>> next_token_supervision(jnp.array([[1, 1, 2, 2, 0, 0]])).tolist()
    [[False, True, False, True, False, False]]
  """
  ids = _inputs.group_ids("segment_ids", segment_ids)
  return (ids > 0) & ~_blocks.is_first(ids)


def sequence_weights(
  is_supervised: jax.Array, segment_ids: jax.Array | None = None
) -> jax.Array:
  """`1 / n` at the `n` supervised positions of each sequence, 0 elsewhere.

  Multiplied into a batch's weights and divided by "sequences", a loss is the
  mean over sequences of their means over tokens, exact under accumulation.

  Args:
    is_supervised: `[batch, length]` boolean.
    segment_ids: `[batch, length]` integer, 0 for padding; None where each row
      is one sequence. The batch must carry them too.

  Returns:
    `[batch, length]` float32.

  Raises:
    TypeError: another dtype or type.
    ValueError: another shape.

  Example:
    >>> import jax.numpy as jnp
    >>> sequence_weights(
    ...     jnp.ones((1, 3), bool), jnp.array([[1, 1, 2]])).tolist()
    [[0.5, 0.5, 1.0]]
  """
  supervised = _inputs.positions(
    "is_supervised", is_supervised, dtype="boolean"
  )
  if segment_ids is None:
    segments = jnp.ones_like(supervised, jnp.int32)
  else:
    segments = _inputs.group_ids("segment_ids", segment_ids)
    checks.same_shape(
      "segment_ids", segments, "is_supervised", supervised, axes=2
    )
  # How often each id occurs, by its two ends in the sorted row.
  kept = jnp.where(supervised, segments, 0)
  ordered = jnp.sort(kept, axis=1)
  ends = (
    jax.vmap(lambda row, ids, side=side: jnp.searchsorted(row, ids, side=side))(
      ordered, kept
    )
    for side in ("right", "left")
  )
  right, left = ends
  occurrences = (right - left).astype(jnp.float32)
  return jnp.where(supervised, 1 / occurrences, 0)


def block_ids(segment_ids: Any, *, block_size: int) -> jax.Array:
  """Blocks of `block_size` positions that start anew with each segment.

  The last block of a segment may be shorter.

  Args:
    segment_ids: `[batch, length]` integer; a constant for rows of one sequence.
    block_size: positions of a block.

  Returns:
    `[batch, length]` int32, the position at which each token's block begins:
    `block_ids` of this package's other functions.

  Raises:
    TypeError: another dtype or type.
    ValueError: another shape, or `block_size` not positive.

  Example:
    >>> import jax.numpy as jnp
    >>> block_ids(jnp.array([[1, 1, 1, 2, 2]]), block_size=2).tolist()
    [[0, 0, 2, 3, 3]]
  """
  ids = _inputs.group_ids("segment_ids", segment_ids)
  size = _inputs.integer("block_size", block_size, least=1)
  first = _blocks.first_positions(ids)
  at = jax.lax.broadcasted_iota(jnp.int32, ids.shape, 1)
  return first + (at - first) // size * size
