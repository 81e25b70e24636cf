"""The first pass over the vocabulary: statistics of rows of logits.

Each block of columns has a maximum and a sum of exponentials. From all blocks'

  top = max_j top_j,  total = sum_j total_j exp((top_j - top) / T)

so that `log sum exp(z / T) = top / T + log(total)`.
"""

from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from diffusion_objectives._core import numerics
from diffusion_objectives.objectives.linear_vocabulary import blocks
from diffusion_objectives.objectives.linear_vocabulary import tokens


class Rows(NamedTuple):
  """Of rows of logits: the maximum, its first id, `sum exp((z - top) / T)`."""

  top: jax.Array
  top_id: jax.Array
  total: jax.Array


class Statistics(NamedTuple):
  """What the first pass leaves of each token; None where there is no use of it.

  Attributes:
    student: at the temperature of the divergence from a teacher's logits, else
      at that of the negative log-likelihood.
    teacher: of a teacher's logits, at the temperature.
    excess: the student's total over the teacher's, less 1, to full relative
      accuracy where the rows are near.
    rest: of the ids that are not listed, at the temperature.
    hard_total: the student's at the temperature of the negative log-likelihood,
      where `student` is at another.
    target: the target's logit.
    listed: `[tokens, k]`, the listed ids' logits.
  """

  student: Rows
  teacher: Any
  excess: Any
  rest: Any
  hard_total: Any
  target: Any
  listed: Any


def measure(
  block: tokens.Block, tile: tokens.Tile
) -> tuple[Statistics, tokens.Tile]:
  """Statistics of the rows, and the tile with their logits.

  The tile is overwritten, as new ones would be filled with zeros first.
  """
  form, columns = block.form, block.columns
  temperature = (
    form.hard_temperature if block.teacher is None else form.temperature
  )
  dtype = block.student.dtype
  watched = _watched(block)

  def visit(carry, j):
    picked, tile = carry
    z, y = tokens.logits(block, j)
    student = _rows(columns, j, z, temperature)
    part = Statistics(
      student=student,
      teacher=None if y is None else _rows(columns, j, y, temperature),
      excess=None,
      rest=None,
      hard_total=None,
      target=None,
      listed=None,
    )
    if y is not None:
      excess = _excess(z, y, student, part.teacher, temperature)
      part = part._replace(excess=excess)
    if form.hard and temperature != form.hard_temperature:
      total = _total(z, student.top, form.hard_temperature)
      part = part._replace(hard_total=total)
    if block.listed is not None:
      rest = tokens.listed_columns(
        block, j, z, jnp.full_like(block.listed.logits[:, :-1], -jnp.inf)
      )
      part = part._replace(rest=_rows(columns, j, rest, form.temperature))
    local = columns.local(j, watched)
    found = jnp.take_along_axis(
      z, jnp.minimum(local, columns.block - 1), axis=1
    )
    picked = jnp.where(local < columns.block, found, picked)
    return (picked, tokens.keep(tile, j, (z, y))), part

  picked = blocks.start(block.zero, jnp.zeros(watched.shape, dtype))
  (picked, tile), parts = lax.scan(visit, (picked, tile), columns.indices())
  joined = Statistics(
    student=_join(parts.student, temperature),
    teacher=parts.teacher and _join(parts.teacher, temperature),
    excess=None,
    rest=parts.rest and _join(parts.rest, form.temperature),
    hard_total=None,
    target=None if block.targets is None else picked[:, 0],
    listed=None
    if block.listed is None
    else picked[:, picked.shape[1] - block.listed.ids.shape[1] :],
  )
  if parts.hard_total is not None:
    whole = _join(
      parts.student._replace(total=parts.hard_total), form.hard_temperature
    )
    joined = joined._replace(hard_total=whole.total)
  if parts.excess is not None:
    excess = _join_excess(parts, joined, temperature)
    joined = joined._replace(excess=excess)
  return joined, tile


def _excess(
  z: jax.Array, y: jax.Array, student: Rows, teacher: Rows, temperature: float
) -> jax.Array:
  """`sum exp(v) - exp(u)` of one block's columns, small where rows are near.

  `u` and `v` are the teacher's and the student's logits less the block's
  maximum, over `T`.
  """
  u = (y - finite(teacher.top)[:, None]) * (1 / temperature)
  v = (z - finite(student.top)[:, None]) * (1 / temperature)
  offset = (finite(student.top) - finite(teacher.top))[:, None]
  d = ((z - y) - offset) * (1 / temperature)
  return jnp.sum(numerics.difference(jnp.exp(u), jnp.exp(v), d), axis=1)


def _join_excess(
  parts: Statistics, joined: Statistics, temperature: float
) -> jax.Array:
  """Of a row, from the excess `e_j` and the teacher's total `t_j` of blocks.

  With `a_j` and `b_j` the student's and the teacher's maximum of a block less
  the row's, over `T`, it is the sum of `e_j exp(a_j)` and
  `t_j exp(b_j) (exp(a_j - b_j) - 1)`, over the row's total. Where the rows are
  near, `a_j - b_j` is small.
  """
  student, teacher = parts.student, parts.teacher
  student_top, teacher_top = joined.student.top, joined.teacher.top
  a = (student.top - finite(student_top)[None]) / temperature
  b = (teacher.top - finite(teacher_top)[None]) / temperature
  gap = (student.top - teacher.top) - (student_top - teacher_top)[None]
  apart = jnp.expm1(gap / temperature)
  terms = jnp.where(teacher.total == 0, 0, teacher.total * jnp.exp(b) * apart)
  terms += parts.excess * jnp.exp(a)
  return jnp.sum(terms, axis=0) / joined.teacher.total


def _watched(block: tokens.Block) -> jax.Array:
  """`[c, ...]` ids whose logits are kept: the target, then the list."""
  parts = [jnp.zeros((block.student.hidden.shape[0], 0), jnp.int32)]
  if block.targets is not None:
    parts.append(block.targets[:, None])
  if block.listed is not None:
    parts.append(block.listed.ids)
  return jnp.concatenate(parts, axis=1)


def finite(top: jax.Array) -> jax.Array:
  """By what a row is shifted: its maximum, 0 where all of it is -inf."""
  return jnp.where(top == -jnp.inf, 0, top)


def _total(z: jax.Array, top: jax.Array, temperature: float) -> jax.Array:
  return jnp.sum(
    jnp.exp((z - finite(top)[:, None]) * (1 / temperature)), axis=1
  )


def _rows(
  columns: blocks.Columns, j: jax.Array, z: jax.Array, temperature: float
) -> Rows:
  """Of one block's columns."""
  top = jnp.max(z, axis=1)
  top_id = columns.start(j) + numerics.first_maximum(z)
  return Rows(top, top_id, _total(z, top, temperature))


def _join(parts: Rows, temperature: float) -> Rows:
  """Of a row, from those of its blocks, which lie along the first axis."""
  top = jnp.max(parts.top, axis=0)
  shares = jnp.exp((parts.top - finite(top)[None]) / temperature)
  best = jnp.argmax(parts.top, axis=0)[None]
  return Rows(
    top,
    jnp.take_along_axis(parts.top_id, best, axis=0)[0],
    jnp.sum(parts.total * shares, axis=0),
  )
