"""One block of tokens: what a loss takes of them, and how logits are formed."""

import dataclasses
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from diffusion_objectives.objectives.linear_vocabulary import blocks
from diffusion_objectives.objectives.linear_vocabulary import placement
from diffusion_objectives.objectives.linear_vocabulary import projection


@dataclasses.dataclass(frozen=True)
class Form:
  """What is static of a loss and its execution.

  Attributes:
    soft: coefficient of the divergence, `T^2` included; 0 where there is none.
    hard: coefficient of the negative log-likelihood; 0 where there is none.
    temperature: `T`, of the divergence.
    hard_temperature: of the negative log-likelihood.
    token_block, vocabulary_block: `c` and `v`; None is the platform's.
    keeps_tile: whether the second pass reads the first one's logits, or forms
      them again.
    placement: where tokens and vocabulary lie.
  """

  soft: float
  hard: float
  temperature: float
  hard_temperature: float
  token_block: int | None
  vocabulary_block: int | None
  keeps_tile: bool
  placement: placement.Placement


class Listed(NamedTuple):
  """A teacher's list, by tokens.

  Attributes:
    ids: `[tokens, k]`, within the vocabulary.
    is_listed: `[tokens, k]`, whether the slot counts.
    logits: `[tokens, k + 1]`, `T log p` of the ids and of the tail.
  """

  ids: jax.Array
  is_listed: jax.Array
  logits: jax.Array


class Block(NamedTuple):
  """One block of tokens, and how its logits are formed.

  Attributes:
    form: what is static.
    columns: the blocks of the vocabulary.
    zero: see `blocks.varying_zero`.
    student: the hidden states before the head.
    teacher: from the index of a block of columns to the teacher's logits; None
      where the teacher is none or a list.
    is_valued: whether the divergence's terms are wanted, not its slope alone.
    targets: `[c]` or None.
    listed: the teacher's list, or None.
    scales: `[c]`, or None.
  """

  form: Form
  columns: blocks.Columns
  zero: jax.Array
  student: projection.Projection
  teacher: Any
  is_valued: bool
  targets: Any
  listed: Any
  scales: Any


# Logits of the student and of the teacher, `[blocks of columns, c, v]` each;
# None where the second pass forms them again.
Tile = tuple[jax.Array | None, jax.Array | None]


def logits(
  block: Block, j: jax.Array, tile: Tile = (None, None)
) -> tuple[jax.Array, jax.Array | None]:
  """The student's and the teacher's on block `j` of columns, unless kept."""
  z, y = (
    None if kept is None else lax.dynamic_index_in_dim(kept, j, 0, False)
    for kept in tile
  )
  if z is None:
    z = projection.logits(block.student, j)
  if y is None and block.teacher is not None:
    y = block.teacher(j)
  return z, y


def keep(tile: Tile, j: jax.Array, sides: tuple[Any, Any]) -> Tile:
  """The tile with the two sides' logits on block `j` of columns."""
  z, y = (
    None if kept is None else lax.dynamic_update_index_in_dim(kept, side, j, 0)
    for kept, side in zip(tile, sides, strict=True)
  )
  return z, y


def listed_columns(
  block: Block, j: jax.Array, columns: jax.Array, listed: jax.Array
) -> jax.Array:
  """Columns of block `j`, with those of the listed ids replaced."""
  local = block.columns.local(j, block.listed.ids)
  local = jnp.where(block.listed.is_listed, local, block.columns.block)
  rows = jax.lax.broadcasted_iota(jnp.int32, local.shape, 0)
  return columns.at[rows, local].set(listed, mode="drop")
