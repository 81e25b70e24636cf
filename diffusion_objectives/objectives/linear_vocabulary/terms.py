r"""What a loss says of a token, and its slope in the logits.

With student logits `z`, teacher logits `y` and target `x`,

  l  = log sum exp(z / S) - z[x] / S               of the target            (1)
  D  = sum_v p log(p / q),    p = softmax(y / T),  q = softmax(z / T)       (2)
  dz = w (soft (q - p) / T + hard (softmax(z / S) - onehot(x)) / S)         (3)

`k` listed ids and the tail of all others are `k + 1` categories: with the
gradient `G` of their divergence in `k + 1` logits (see
`numerics.list_and_tail`) and `r = softmax(z / T)` over the ids of the tail,

  dz_v = w soft G_i on the i-th listed id,  w soft G_tail r_v on the others (4)
"""

from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from diffusion_objectives import divergences
from diffusion_objectives._core import numerics
from diffusion_objectives.objectives.linear_vocabulary import statistics
from diffusion_objectives.objectives.linear_vocabulary import tokens


class Values(NamedTuple):
  """What a loss says of each token; None where it has no such term."""

  soft: Any
  hard: Any
  teacher_entropy: Any
  student_entropy: Any
  teacher_id: Any
  student_id: jax.Array


def of_rows(
  block: tokens.Block, stats: statistics.Statistics
) -> tuple[Values, jax.Array | None]:
  """What the statistics alone say, and of a list the gradient `G` in (4)."""
  form, student = block.form, stats.student
  hard = soft = slopes = None
  teacher_entropy = student_entropy = None
  if form.hard:
    gap = (student.top - stats.target) / form.hard_temperature
    hard = jnp.log(_hard_total(stats)) + gap
  if block.listed is not None:
    categories = _categories(block, stats)

    def divergence(categories):
      return numerics.token_divergence(
        divergences.forward_kl,
        block.listed.logits,
        categories,
        form.temperature,
      )

    soft, pull_back = jax.vjp(divergence, categories)
    (slopes,) = pull_back(jnp.full_like(soft, form.soft))
    teacher_entropy, student_entropy = (
      numerics.token_entropy(*numerics.log_softmax(side, form.temperature))
      for side in (block.listed.logits, categories)
    )
  values = Values(
    soft=soft,
    hard=hard,
    teacher_entropy=teacher_entropy,
    student_entropy=student_entropy,
    teacher_id=stats.teacher and stats.teacher.top_id,
    student_id=student.top_id,
  )
  return values, slopes


def _hard_total(stats: statistics.Statistics) -> jax.Array:
  total = stats.hard_total
  return stats.student.total if total is None else total


def _categories(block: tokens.Block, stats: statistics.Statistics) -> jax.Array:
  """The student's logits of the listed ids and of their tail."""
  rest = stats.rest
  total = jnp.where(rest.total == 0, 1, rest.total)
  tail = statistics.finite(rest.top) + block.form.temperature * jnp.log(total)
  return jnp.concatenate(
    [
      jnp.where(block.listed.is_listed, stats.listed, -jnp.inf),
      jnp.where(rest.total == 0, -jnp.inf, tail)[:, None],
    ],
    axis=1,
  )


def start(block: tokens.Block) -> tuple[jax.Array, ...]:
  """Of no columns yet: `D`, `sum p u`, `sum q v`; none without logits `y`."""
  if block.teacher is None or not block.is_valued:
    return ()
  shape = block.student.hidden.shape[:1]
  return tuple(jnp.zeros(shape, block.student.dtype) for _ in range(3))


def named(
  sums: tuple[jax.Array, ...], stats: statistics.Statistics
) -> dict[str, jax.Array]:
  """The values that sums over all columns make, by name."""
  if not sums:
    return {}
  divergence, teacher, student = sums
  return {
    "soft": divergence,
    "teacher_entropy": jnp.log(stats.teacher.total) - teacher,
    "student_entropy": jnp.log(stats.student.total) - student,
  }


def of_columns(
  block: tokens.Block,
  stats: statistics.Statistics,
  slopes: Any,
  j: jax.Array,
  z: jax.Array,
  y: jax.Array | None,
  is_differentiated: bool,
) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
  """Of one block of columns: sums of terms by token, and `dz`."""
  form, student = block.form, stats.student
  sums: tuple[jax.Array, ...] = ()
  parts = []
  if y is not None:
    p, q, d, u, v = _pair(stats, z, y, form.temperature)
    divergence, slope = divergences.forward_kl(p, q, d)
    if block.is_valued:
      summed = (divergence, numerics.product(p, u), numerics.product(q, v))
      sums = tuple(jnp.sum(term, axis=1) for term in summed)
    parts.append(form.soft / form.temperature * slope)
  if not is_differentiated:
    return sums, None
  if block.listed is not None:
    rest = stats.rest
    tail = jnp.exp(
      (z - statistics.finite(rest.top)[:, None]) * (1 / form.temperature)
    )
    scale = slopes[:, -1] / jnp.where(rest.total == 0, 1, rest.total)
    parts.append(
      tokens.listed_columns(block, j, scale[:, None] * tail, slopes[:, :-1])
    )
  if form.hard:
    factor = form.hard / form.hard_temperature
    shares = jnp.exp((z - student.top[:, None]) * (1 / form.hard_temperature))
    shares *= (factor / _hard_total(stats))[:, None]
    local = block.columns.local(j, block.targets)
    index = lax.broadcasted_iota(jnp.int32, z.shape, 1)
    is_target = index == local[:, None]
    parts.append(jnp.where(is_target, shares - factor, shares))
  dz = sum(parts[1:], parts[0])
  return sums, block.scales[:, None] * dz


def _pair(
  stats: statistics.Statistics, z: jax.Array, y: jax.Array, temperature: float
) -> tuple[jax.Array, ...]:
  """`p`, `q`, `d = log q - log p`, and `u`, `v`: logits less their maximum.

  The ratio of the sums is 1 + `excess`, which keeps its digits where the rows
  are near.
  """
  teacher, student = stats.teacher, stats.student
  u = (y - statistics.finite(teacher.top)[:, None]) * (1 / temperature)
  v = (z - statistics.finite(student.top)[:, None]) * (1 / temperature)
  p = jnp.exp(u) * (1 / teacher.total)[:, None]
  q = jnp.exp(v) * (1 / student.total)[:, None]
  # Differences of near rows are exact; those of far ones lose less when each
  # row is shifted first.
  offset = student.top - teacher.top
  is_near = jnp.abs(offset) < 8
  of_z = jnp.where(is_near, 0, student.top)[:, None]
  of_y = jnp.where(is_near, 0, teacher.top)[:, None]
  gap = (z - of_z) - (y - of_y) - jnp.where(is_near, offset, 0)[:, None]
  excess = stats.excess / teacher.total
  is_close = jnp.abs(excess) < 0.5
  log_totals = jnp.where(
    is_close,
    jnp.log1p(jnp.where(is_close, excess, 0)),
    jnp.log(student.total / teacher.total),
  )
  d = gap * (1 / temperature) - log_totals[:, None]
  is_out = (y == -jnp.inf) & (z == -jnp.inf)
  return p, q, jnp.where(is_out, 0, d), u, v
