r"""The block kernel under the linear-vocabulary losses.

Tokens are taken in blocks of `c`, the vocabulary in blocks of `v`, so that no
more than one tile `[c, vocabulary]` of logits exists (two where the teacher has
a head), in at least float32. A token with student logits `z`, teacher logits
`y`, target `x` and factor `w` contributes

  value = w (soft D + hard l),   l = log sum exp(z) - z[x]                  (1)
  D     = sum_v p log(p / q),    p = softmax(y / T), q = softmax(z / T)     (2)
  dz    = w (soft (q - p) / T + hard (softmax(z) - onehot(x)))              (3)

A first pass over the vocabulary forms the tile and, from each block's maximum
and sum of exponentials, those of the row. A second pass over the tile forms the
terms of (2), `dz`, and the gradients of `projection`, which are summed over the
blocks of tokens.

`k` listed ids and the tail of all others are `k + 1` categories: with the
gradient `G` of their divergence in `k + 1` logits (see
`numerics.list_and_tail`) and `r = softmax(z / T)` over the ids of the tail,

  dz_v = w soft G_i on the i-th listed id,  w soft G_tail r_v elsewhere     (4)

Tokens that do not count are sorted to the end; no block of them is run.
"""

import dataclasses
import functools
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from diffusion_objectives import divergences
from diffusion_objectives._core import numerics
from diffusion_objectives.objectives.linear_vocabulary import blocks
from diffusion_objectives.objectives.linear_vocabulary import head as heads
from diffusion_objectives.objectives.linear_vocabulary import projection

Gradients = projection.Gradients


@dataclasses.dataclass(frozen=True)
class Form:
  """What is static of a loss and its execution.

  Attributes:
    soft: coefficient of the divergence, `T^2` included; 0 where there is none.
    hard: coefficient of the negative log-likelihood; 0 where there is none.
    temperature: `T`, of the divergence.
    hard_temperature: of the negative log-likelihood.
    token_block, vocabulary_block: `c` and `v`; None is the platform's.
    keeps_tile: whether the second pass reads the first one's logits or forms
      them again.
  """

  soft: float
  hard: float
  temperature: float
  hard_temperature: float
  token_block: int | None
  vocabulary_block: int | None
  keeps_tile: bool


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


class Operands(NamedTuple):
  """The factors of the logits, and what each token has.

  Attributes:
    hidden: `[tokens, features]`.
    head: the student's.
    teacher: `[tokens, vocabulary]` logits, `[tokens, features]` hidden states
      for `teacher_head`, a list, or None.
    teacher_head: the teacher's, or None.
    targets: `[tokens]`, within the vocabulary, or None.
    is_active: `[tokens]`, whether a token counts.
    factors: `[tokens]`, `w`; None without gradients.
    statistics: those of an earlier run; None where they are to be formed.
  """

  hidden: jax.Array
  head: heads.OutputHead
  teacher: Any
  teacher_head: heads.OutputHead | None
  targets: jax.Array | None
  is_active: jax.Array
  factors: jax.Array | None = None
  statistics: Any = None


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
    rest: of the ids that are not listed, at the temperature.
    hard_total: the student's at the temperature of the negative log-likelihood,
      where `student` is at another.
    target: the target's logit.
    listed: `[tokens, k]`, the listed ids' logits.
  """

  student: Rows
  teacher: Rows | None
  rest: Rows | None
  hard_total: jax.Array | None
  target: jax.Array | None
  listed: jax.Array | None


class Values(NamedTuple):
  """What a loss says of each token; None where it has no such term."""

  soft: jax.Array | None
  hard: jax.Array | None
  teacher_entropy: jax.Array | None
  student_entropy: jax.Array | None
  teacher_id: jax.Array | None
  student_id: jax.Array


class Result(NamedTuple):
  """Values (None where the statistics were given), statistics, gradients."""

  values: Values | None
  statistics: Statistics
  gradients: Gradients


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(form: Form, wanted: Gradients, operands: Operands) -> Result:
  """Values and statistics by tokens, and the gradients that are wanted."""

  def on(platform):
    return functools.partial(_run, form, wanted, platform)

  return lax.platform_dependent(
    operands, cpu=on(blocks.CPU), default=on(blocks.ACCELERATOR)
  )


def sum_dtype(hidden: Any, head: heads.OutputHead) -> jnp.dtype:
  """The dtype of logits, values and sums."""
  return numerics.accumulation_dtype(
    jnp.promote_types(hidden.dtype, head.kernel.dtype)
  )


def _run(
  form: Form,
  wanted: Gradients,
  platform: blocks.Platform,
  operands: Operands,
) -> Result:
  """All blocks of tokens that hold one that counts."""
  head = operands.head
  tokens = operands.hidden.shape[0]
  size = min(form.token_block or platform.token_block, tokens)
  if form.token_block is None:  # blocks of nearly one size
    size = blocks.count(tokens, blocks.count(tokens, size))
  order = jnp.argsort(~operands.is_active, stable=True).astype(jnp.int32)
  used = jnp.sum(operands.is_active, dtype=jnp.int32)
  a, b = head.low_rank or (None, None)
  dtype = sum_dtype(operands.hidden, head)
  is_turned = projection.is_turned(
    head,
    jnp.promote_types(operands.hidden.dtype, head.kernel.dtype),
    platform,
  )
  sums = Gradients(
    *(
      jnp.zeros(array.shape, dtype) if is_wanted else None
      for array, is_wanted in zip(
        (operands.hidden, head.kernel, head.bias, a, b), wanted, strict=True
      )
    )
  )._replace(hidden=None)
  if wanted.kernel and is_turned:
    sums = sums._replace(kernel=sums.kernel.T)

  def visit(i, sums):
    slots = i * size + jnp.arange(size, dtype=jnp.int32)
    is_used = slots < used
    rows = order[jnp.minimum(slots, tokens - 1)]
    by_tokens, sums = _block(
      form, wanted, platform, operands, rows, is_used, sums
    )
    return jnp.where(is_used, rows, tokens), by_tokens, sums

  def step(i, carry):
    places, by_tokens, sums = visit(i, carry[1])

    def put(whole, part):
      return whole.at[places].set(part, mode="drop")

    return jax.tree.map(put, carry[0], by_tokens), sums

  _, shapes, _ = jax.eval_shape(visit, jnp.int32(0), sums)
  start = jax.tree.map(
    lambda part: jnp.zeros((tokens, *part.shape[1:]), part.dtype), shapes
  )
  (values, statistics, hidden), sums = lax.fori_loop(
    0, blocks.count(used, size), step, (start, sums)
  )
  if wanted.kernel and is_turned:
    sums = sums._replace(kernel=sums.kernel.T)
  return Result(values, statistics, sums._replace(hidden=hidden))


class Block(NamedTuple):
  """One block of tokens, and how its logits are formed.

  Attributes:
    form: what is static.
    columns: the blocks of the vocabulary.
    student: the hidden states before the head.
    teacher: a function from the index of a block of columns to the teacher's
      logits, or None.
    targets: `[c]` or None.
    listed: the teacher's list, or None.
    factors: `[c]`, or None.
  """

  form: Form
  columns: blocks.Columns
  student: projection.Projection
  teacher: Any
  has_teacher_product: bool
  targets: jax.Array | None
  listed: Listed | None
  factors: jax.Array | None


def _block(
  form: Form,
  wanted: Gradients,
  platform: blocks.Platform,
  operands: Operands,
  rows: jax.Array,
  is_used: jax.Array,
  sums: Gradients,
) -> tuple[Any, Gradients]:
  """Both passes over one block of tokens.

  Args:
    rows: `[c]`, which tokens.
    is_used: `[c]`, False where a slot of the last block is left over.
    sums: the head's gradients, of earlier blocks.

  Returns:
    Values, statistics and the gradient in the hidden states by the block's
    tokens, and the sums with this block's added.
  """
  head, teacher_head = operands.head, operands.teacher_head
  dtype = sum_dtype(operands.hidden, head)
  size = min(form.vocabulary_block or platform.vocabulary_block, head.size)
  columns = blocks.Columns(head.size, size)

  def clean(part, filler=0):
    mask = is_used.reshape(-1, *[1] * (part.ndim - 1))
    return jnp.where(mask, part, jnp.full_like(part, filler))

  def take(array, filler=0):
    return clean(blocks.read(platform, blocks.rows, array, rows), filler)

  def before(head, hidden):
    return projection.project(head, take(hidden), columns, platform, dtype)

  def teacher_logits(j):
    part = blocks.read(
      platform,
      blocks.window(columns.block),
      operands.teacher,
      rows,
      columns.start(j),
    )
    return columns.mask(j, clean(part).astype(dtype))

  listed, teacher = None, None
  if isinstance(operands.teacher, Listed):
    listed = jax.tree.map(take, operands.teacher)
  elif teacher_head is not None:
    teacher = functools.partial(
      projection.logits, before(teacher_head, operands.teacher)
    )
  elif operands.teacher is not None:
    teacher = teacher_logits
  block = Block(
    form,
    columns,
    before(head, operands.hidden),
    teacher,
    teacher_head is not None,
    *jax.tree.map(take, (operands.targets,)),
    listed,
    *jax.tree.map(take, (operands.factors,)),
  )
  if operands.statistics is not None:
    # A total of 0 would be divided by, and infinity times the factor 0 is NaN.
    statistics = jax.tree.map(
      functools.partial(take, filler=1), operands.statistics
    )
    _, slopes = _row_values(block, statistics)
    _, hidden, sums = _second_pass(
      block, wanted, statistics, slopes, (None, None), sums
    )
    return (None, statistics, hidden), sums
  statistics, tile = _first_pass(block)
  values, slopes = _row_values(block, statistics)
  terms, hidden, sums = _second_pass(
    block, wanted, statistics, slopes, tile, sums
  )
  return (values._replace(**terms), statistics, hidden), sums


def _logits(
  block: Block, j: jax.Array, kept: tuple[Any, Any] = (None, None)
) -> tuple[jax.Array, jax.Array | None]:
  """The student's and the teacher's on one block of columns, unless kept."""
  z, y = kept
  if z is None:
    z = projection.logits(block.student, j)
  if y is None and block.teacher is not None:
    y = block.teacher(j)
  return z, y


# The first pass.


def _first_pass(block: Block) -> tuple[Statistics, Any]:
  """Statistics of the rows, and the tile of logits, where it is kept."""
  form, columns = block.form, block.columns
  temperature = (
    form.hard_temperature if block.teacher is None else form.temperature
  )
  dtype = block.student.dtype
  tokens = block.student.hidden.shape[0]
  watched = _watched(block, tokens)

  def visit(picked, j):
    z, y = _logits(block, j)
    student = _rows(columns, j, z, temperature)
    part = Statistics(
      student=student,
      teacher=None if y is None else _rows(columns, j, y, temperature),
      rest=None,
      hard_total=None,
      target=None,
      listed=None,
    )
    if form.hard and temperature != form.hard_temperature:
      total = _total(z, student.top, form.hard_temperature)
      part = part._replace(hard_total=total)
    if block.listed is not None:
      rest = jnp.where(_is_listed(block, j, z.shape), -jnp.inf, z)
      rest = _rows(columns, j, rest, form.temperature)
      part = part._replace(rest=rest)
    local = columns.local(j, watched)
    found = jnp.take_along_axis(
      z, jnp.minimum(local, columns.block - 1), axis=1
    )
    picked = jnp.where(local < columns.block, found, picked)
    return picked, (part, _kept(block, z, y))

  picked, (parts, tile) = lax.scan(
    visit, jnp.zeros(watched.shape, dtype), jnp.arange(columns.count)
  )
  joined = Statistics(
    student=_join(parts.student, temperature),
    teacher=parts.teacher and _join(parts.teacher, temperature),
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
  return joined, tile


def _kept(block: Block, z: jax.Array, y: jax.Array | None) -> Any:
  """What the tile holds: what a product has formed."""
  if not block.form.keeps_tile:
    return None, None
  return z, y if block.has_teacher_product else None


def _watched(block: Block, tokens: int) -> jax.Array:
  """`[c, ...]` ids whose logits are kept: the target, then the list."""
  parts = [jnp.zeros((tokens, 0), jnp.int32)]
  if block.targets is not None:
    parts.append(block.targets[:, None])
  if block.listed is not None:
    parts.append(block.listed.ids)
  return jnp.concatenate(parts, axis=1)


def _finite(top: jax.Array) -> jax.Array:
  """By what a row is shifted: its maximum, 0 where all of it is -inf."""
  return jnp.where(top == -jnp.inf, 0, top)


def _total(z: jax.Array, top: jax.Array, temperature: float) -> jax.Array:
  return jnp.sum(
    jnp.exp((z - _finite(top)[:, None]) * (1 / temperature)), axis=1
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
  shares = jnp.exp((parts.top - _finite(top)[None]) / temperature)
  best = jnp.argmax(parts.top, axis=0)[None]
  return Rows(
    top,
    jnp.take_along_axis(parts.top_id, best, axis=0)[0],
    jnp.sum(parts.total * shares, axis=0),
  )


def _is_listed(block: Block, j: jax.Array, shape: tuple[int, ...]):
  return _scatter(block, j, jnp.zeros(shape, bool), block.listed.is_listed)


def _scatter(
  block: Block, j: jax.Array, columns: jax.Array, listed: jax.Array
) -> jax.Array:
  """Columns of block `j`, with those of the listed ids replaced."""
  local = block.columns.local(j, block.listed.ids)
  local = jnp.where(block.listed.is_listed, local, block.columns.block)
  rows = lax.broadcasted_iota(jnp.int32, local.shape, 0)
  return columns.at[rows, local].set(listed, mode="drop")


# Between the passes.


def _row_values(
  block: Block, statistics: Statistics
) -> tuple[Values, jax.Array | None]:
  """What the statistics alone say, and of a list the gradient `G` in (4)."""
  form, student = block.form, statistics.student
  hard = soft = slopes = None
  teacher_entropy = student_entropy = None
  if form.hard:
    gap = (student.top - statistics.target) / form.hard_temperature
    hard = jnp.log(_hard_total(statistics)) + gap
  if block.listed is not None:
    categories = _categories(block, statistics)

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
    teacher_id=statistics.teacher and statistics.teacher.top_id,
    student_id=student.top_id,
  )
  return values, slopes


def _hard_total(statistics: Statistics) -> jax.Array:
  total = statistics.hard_total
  return statistics.student.total if total is None else total


def _categories(block: Block, statistics: Statistics) -> jax.Array:
  """The student's logits of the listed ids and of their tail."""
  rest = statistics.rest
  total = jnp.where(rest.total == 0, 1, rest.total)
  tail = _finite(rest.top) + block.form.temperature * jnp.log(total)
  return jnp.concatenate(
    [
      jnp.where(block.listed.is_listed, statistics.listed, -jnp.inf),
      jnp.where(rest.total == 0, -jnp.inf, tail)[:, None],
    ],
    axis=1,
  )


# The second pass.


def _second_pass(
  block: Block,
  wanted: Gradients,
  statistics: Statistics,
  slopes: jax.Array | None,
  tile: Any,
  sums: Gradients,
) -> tuple[dict[str, jax.Array], jax.Array | None, Gradients]:
  """Terms of (2), and gradients.

  Returns:
    Values by name, where the divergence is formed from terms; the gradient in
    the hidden states; the sums with this block's added.
  """
  student = block.student
  dtype, tokens = student.dtype, student.hidden.shape[0]
  if block.teacher is None and not any(wanted):
    return {}, None, sums
  terms = ()
  if block.teacher is not None:
    terms = tuple(jnp.zeros((tokens,), dtype) for _ in range(3))
  start = projection.start(student, wanted, sums)

  def visit(carry, at):
    terms, sums = carry
    j, kept = at
    z, y = _logits(block, j, kept)
    more, dz = _terms(block, statistics, slopes, j, z, y, any(wanted))
    terms = tuple(a + b for a, b in zip(terms, more, strict=True))
    if any(wanted):
      sums = projection.pull_back(student, j, z, dz, sums)
    return (terms, sums), None

  (terms, sums_), _ = lax.scan(
    visit, (terms, start), (jnp.arange(block.columns.count), tile)
  )
  hidden, sums = projection.close(student, wanted, sums_, sums)
  if not terms:
    return {}, hidden, sums
  soft, teacher_term, student_term = terms
  return (
    {
      "soft": soft,
      "teacher_entropy": jnp.log(statistics.teacher.total) - teacher_term,
      "student_entropy": jnp.log(statistics.student.total) - student_term,
    },
    hidden,
    sums,
  )


def _terms(
  block: Block,
  statistics: Statistics,
  slopes: jax.Array | None,
  j: jax.Array,
  z: jax.Array,
  y: jax.Array | None,
  is_differentiated: bool,
) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
  """Of one block of columns: sums of terms by token, and `dz`."""
  form, student = block.form, statistics.student
  terms, parts = (), []
  if y is not None:
    p, q, d, u, v = _pair(statistics, z, y, form.temperature)
    divergence, slope = divergences.forward_kl(p, q, d)
    summed = (divergence, numerics.product(p, u), numerics.product(q, v))
    terms = tuple(jnp.sum(term, axis=1) for term in summed)
    parts.append(form.soft / form.temperature * slope)
  if not is_differentiated:
    return terms, None
  if block.listed is not None:
    rest = statistics.rest
    tail = jnp.exp((z - _finite(rest.top)[:, None]) * (1 / form.temperature))
    scale = slopes[:, -1] / jnp.where(rest.total == 0, 1, rest.total)
    parts.append(_scatter(block, j, scale[:, None] * tail, slopes[:, :-1]))
  if form.hard:
    factor = form.hard / form.hard_temperature
    shares = jnp.exp((z - student.top[:, None]) * (1 / form.hard_temperature))
    shares *= (factor / _hard_total(statistics))[:, None]
    local = block.columns.local(j, block.targets)
    index = lax.broadcasted_iota(jnp.int32, z.shape, 1)
    is_target = index == local[:, None]
    parts.append(jnp.where(is_target, shares - factor, shares))
  dz = sum(parts[1:], parts[0])
  return terms, block.factors[:, None] * dz


def _pair(statistics, z, y, temperature):
  """`p`, `q`, `d = log q - log p`, and `u`, `v`: logits less their maximum.

  As `numerics.token_divergence` forms them, from the statistics of the rows.
  """
  teacher, student = statistics.teacher, statistics.student
  u = (y - _finite(teacher.top)[:, None]) * (1 / temperature)
  v = (z - _finite(student.top)[:, None]) * (1 / temperature)
  p = jnp.exp(u) * (1 / teacher.total)[:, None]
  q = jnp.exp(v) * (1 / student.total)[:, None]
  # Differences of near rows are exact; those of far ones lose less when each
  # row is shifted first.
  offset = student.top - teacher.top
  is_near = jnp.abs(offset) < 8
  of_z = jnp.where(is_near, 0, student.top)[:, None]
  of_y = jnp.where(is_near, 0, teacher.top)[:, None]
  gap = (z - of_z) - (y - of_y) - jnp.where(is_near, offset, 0)[:, None]
  log_totals = jnp.log(student.total / teacher.total)
  d = gap * (1 / temperature) - log_totals[:, None]
  is_out = (y == -jnp.inf) & (z == -jnp.inf)
  return p, q, jnp.where(is_out, 0, d), u, v
