"""The first pass over the vocabulary: statistics of rows of logits.

Each block of columns has a maximum and a sum of exponentials. From all blocks'

  top = max_j top_j,  total = sum_j total_j exp((top_j - top) / T)

so that `log sum exp(z / T) = top / T + log(total)`. In the same way the blocks
of one device are joined, and the devices that share the vocabulary.
"""

from collections.abc import Callable
import functools
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
    excess: the student's total less the teacher's, to full relative accuracy
      where the rows are near.
    rest: of the ids that are not listed, at the temperature.
    hard_total: the student's at the temperature of the negative log-likelihood,
      where `student` is at another.
    target: the target's logit.
    listed: `[tokens, k]`, the listed ids' logits; 0 on columns elsewhere, as is
      `target`.
  """

  student: Rows
  teacher: Any
  excess: Any
  rest: Any
  hard_total: Any
  target: Any
  listed: Any


class Over(NamedTuple):
  """How numbers of several parts of the vocabulary are joined."""

  max: Callable[[jax.Array], jax.Array]
  min: Callable[[jax.Array], jax.Array]
  sum: Callable[[jax.Array], jax.Array]


# Of blocks, which lie along the first axis.
BLOCKS = Over(
  *(
    functools.partial(reduce, axis=0, keepdims=True)
    for reduce in (jnp.max, jnp.min, jnp.sum)
  )
)


def shards(axis: str) -> Over:
  """Of the devices along an axis of a mesh."""
  return Over(
    *(
      functools.partial(f, axis_name=axis)
      for f in (_largest, lax.pmin, lax.psum)
    )
  )


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _largest(array: jax.Array, axis_name: str) -> jax.Array:
  """`lax.pmax`, which JAX does not differentiate."""
  return lax.pmax(array, axis_name)


@_largest.defjvp
def _largest_jvp(axis_name, primals, tangents):
  """The tangent where the maximum is; of several, their mean."""
  (array,), (tangent,) = primals, tangents
  top = _largest(array, axis_name=axis_name)
  is_top = array == top
  share = jnp.where(is_top, tangent, 0)
  number = lax.psum(is_top.astype(array.dtype), axis_name)
  return top, lax.psum(share, axis_name) / number


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
  whole = _join(parts, form, temperature, BLOCKS)
  whole = jax.tree.map(lambda joined: joined[0], whole)._replace(
    target=None if block.targets is None else picked[:, 0],
    listed=None
    if block.listed is None
    else picked[:, picked.shape[1] - block.listed.ids.shape[1] :],
  )
  axis = form.placement.vocabulary
  if axis is not None:
    over = shards(axis)
    picked = jax.tree.map(over.sum, (whole.target, whole.listed))
    whole = _join(whole, form, temperature, over)
    whole = whole._replace(target=picked[0], listed=picked[1])
  return whole, tile


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
  top_id = columns.first + columns.start(j) + numerics.first_maximum(z)
  return Rows(top, top_id, _total(z, top, temperature))


def _join(
  parts: Statistics, form: tokens.Form, temperature: float, over: Over
) -> Statistics:
  """Of whole rows, from those of parts, but for the logits of ids."""
  student = _join_rows(parts.student, temperature, over)
  teacher = parts.teacher and _join_rows(parts.teacher, temperature, over)
  excess = hard_total = None
  if parts.excess is not None:
    excess = _join_excess(parts, student, teacher, temperature, over)
  if parts.hard_total is not None:
    hard_total = _join_rows(
      parts.student._replace(total=parts.hard_total),
      form.hard_temperature,
      over,
    ).total
  return Statistics(
    student=student,
    teacher=teacher,
    excess=excess,
    rest=parts.rest and _join_rows(parts.rest, form.temperature, over),
    hard_total=hard_total,
    target=None,
    listed=None,
  )


def _join_rows(parts: Rows, temperature: float, over: Over) -> Rows:
  top = over.max(parts.top)
  ids = jnp.where(parts.top == top, parts.top_id, jnp.iinfo(jnp.int32).max)
  shares = jnp.exp((parts.top - finite(top)) / temperature)
  return Rows(top, over.min(ids), over.sum(parts.total * shares))


def _join_excess(
  parts: Statistics,
  student: Rows,
  teacher: Rows,
  temperature: float,
  over: Over,
) -> jax.Array:
  """Of rows, from the excess `e_j` and the teacher's total `t_j` of parts.

  With `a_j` and `b_j` the student's and the teacher's maximum of a part less
  the row's, over `T`, it is the sum of `e_j exp(a_j)` and
  `t_j exp(b_j) (exp(a_j - b_j) - 1)`. Where the rows are near, `a_j - b_j` is
  small.
  """
  a = (parts.student.top - finite(student.top)) / temperature
  b = (parts.teacher.top - finite(teacher.top)) / temperature
  gap = (parts.student.top - parts.teacher.top) - (student.top - teacher.top)
  apart = jnp.expm1(gap / temperature)
  total = parts.teacher.total
  terms = jnp.where(total == 0, 0, total * jnp.exp(b) * apart)
  return over.sum(terms + parts.excess * jnp.exp(a))
