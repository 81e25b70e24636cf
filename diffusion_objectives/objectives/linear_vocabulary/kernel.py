r"""The block kernel under the linear-vocabulary losses.

Tokens are taken in blocks of `c`, the vocabulary in blocks of `v`. A block of
tokens goes over the vocabulary twice. The first pass forms the logits, a tile
`[c, vocabulary]` in at least float32, and the statistics of its rows
(`statistics`). The second goes over the tile and forms the divergence, the
slope in the logits (`terms`), and from it the gradients (`projection`), which
are summed over the blocks of tokens. So no more logits exist than one tile; two
where the teacher has a head of its own.

Tokens that do not count are sorted to the end; no block of them is run.
"""

import functools
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from diffusion_objectives._core import numerics
from diffusion_objectives.objectives.linear_vocabulary import blocks
from diffusion_objectives.objectives.linear_vocabulary import head as heads
from diffusion_objectives.objectives.linear_vocabulary import projection
from diffusion_objectives.objectives.linear_vocabulary import statistics
from diffusion_objectives.objectives.linear_vocabulary import terms
from diffusion_objectives.objectives.linear_vocabulary import tokens

Gradients = projection.Gradients


class Operands(NamedTuple):
  """The factors of the logits, and what each token has.

  Tokens are `[batch, length]`, and within a run of one device one dimension.

  Attributes:
    hidden: `[tokens, features]`.
    head: the student's.
    teacher: `[tokens, vocabulary]` logits, `[tokens, features]` hidden states
      for `teacher_head`, a list, or None.
    teacher_head: the teacher's, or None.
    targets: `[tokens]`, within the vocabulary, or None.
    is_active: `[tokens]`, whether a token counts.
    scales: `[tokens]`, `w`, weights or cotangents; None without gradients.
    statistics: those of an earlier run; None where they are to be formed.
  """

  hidden: jax.Array
  head: heads.OutputHead
  teacher: Any
  teacher_head: Any
  targets: Any
  is_active: jax.Array
  scales: Any = None
  statistics: Any = None


class Result(NamedTuple):
  """Values and statistics by tokens, and gradients."""

  values: Any
  statistics: Any
  gradients: Gradients


def run(form: tokens.Form, wanted: Gradients, operands: Operands) -> Result:
  """Values and statistics by tokens, and the gradients that are wanted.

  On a mesh, each device's of its tokens and columns, and their sums: within the
  map no derivative is taken, so that each sum is written down, once.
  """
  place = form.placement
  if place.mesh is None:
    return _on_device(form, wanted, operands)
  rows: Any = place.rows()
  head = place.of_head(operands.head)
  a, b = head.low_rank or (None, None)
  parts = (rows, head.kernel, head.bias, a, b)
  of_gradients = Gradients(
    *(
      part if is_wanted else None
      for part, is_wanted in zip(parts, wanted, strict=True)
    )
  )
  teacher_head = operands.teacher_head and place.of_head(operands.teacher_head)
  teacher: Any = rows
  if is_dense(operands):
    teacher = place.rows(place.vocabulary)
    padding = operands.head.columns - operands.teacher.shape[-1]
    if place.vocabulary is not None and padding:
      operands = operands._replace(
        teacher=jnp.pad(
          operands.teacher,
          ((0, 0), (0, 0), (0, padding)),
          constant_values=-jnp.inf,
        )
      )

  def whole(head):
    return head and place.whole_features(place.without_padding(head))

  def on_shard(operands):
    operands = operands._replace(
      head=whole(operands.head), teacher_head=whole(operands.teacher_head)
    )
    result = _on_device(form, wanted, operands)
    gradients = result.gradients
    hidden = jax.tree.map(place.total_of_columns, gradients.hidden)
    gradients = jax.tree.map(
      place.total_of_tokens,
      gradients._replace(hidden=None),
      of_gradients._replace(hidden=None),
    )
    return result._replace(gradients=gradients._replace(hidden=hidden))

  return jax.shard_map(
    on_shard,
    mesh=place.mesh,
    in_specs=(
      Operands(rows, head, teacher, teacher_head, rows, rows, rows, rows),
    ),
    out_specs=Result(rows, rows, of_gradients),
    axis_names=place.free,
    check_vma=False,
  )(operands)


def is_dense(operands: Operands) -> bool:
  """Whether the teacher is given by its logits."""
  return not (
    operands.teacher is None
    or operands.teacher_head is not None
    or isinstance(operands.teacher, tokens.Listed)
  )


def _on_device(
  form: tokens.Form, wanted: Gradients, operands: Operands
) -> Result:
  """All of one device's tokens, on its columns."""
  shape = operands.is_active.shape

  def on(platform):
    return functools.partial(_run, form, wanted, platform)

  no_heads: Any = {"head": None, "teacher_head": None}
  flat = jax.tree.map(_flat, operands._replace(**no_heads))
  result = lax.platform_dependent(
    flat._replace(head=operands.head, teacher_head=operands.teacher_head),
    cpu=on(blocks.CPU),
    default=on(blocks.ACCELERATOR),
  )
  values, statistics, hidden = jax.tree.map(
    functools.partial(_like, shape),
    (result.values, result.statistics, result.gradients.hidden),
  )
  return Result(values, statistics, result.gradients._replace(hidden=hidden))


def _flat(array: jax.Array) -> jax.Array:
  """`[batch, length, ...]` as `[tokens, ...]`; of an empty batch one token."""
  rows = array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])
  return rows if rows.shape[0] else jnp.zeros((1, *rows.shape[1:]), rows.dtype)


def _like(shape: tuple[int, ...], rows: jax.Array) -> jax.Array:
  """`[tokens, ...]` as `[batch, length, ...]`."""
  count = shape[0] * shape[1]
  return rows[:count].reshape(*shape, *rows.shape[1:])


def sum_dtype(hidden: Any, head: heads.OutputHead) -> jnp.dtype:
  """The dtype of logits, values and sums."""
  return numerics.accumulation_dtype(
    numerics.product_dtype(hidden.dtype, head.kernel.dtype)
  )


def _run(
  form: tokens.Form,
  wanted: Gradients,
  platform: blocks.Platform,
  operands: Operands,
) -> Result:
  """All blocks of tokens that hold one that counts."""
  head = operands.head
  count = operands.hidden.shape[0]
  tiles = 1 if operands.teacher_head is None else 2
  columns = _columns(form, platform, head)
  size = form.token_block or platform.tokens(columns.size, tiles)
  if isinstance(count, int):  # not symbolic
    size = min(size, count)
    if form.token_block is None:  # blocks of nearly one size
      size = blocks.number(count, blocks.number(count, size))
  zero = blocks.varying_zero(operands)
  shared = form.placement.shared(zero)
  order = jnp.argsort(~operands.is_active, stable=True).astype(jnp.int32)
  used = jnp.sum(operands.is_active, dtype=jnp.int32)
  is_turned = projection.is_turned(
    head,
    numerics.product_dtype(operands.hidden.dtype, head.kernel.dtype),
    platform,
  )
  kept = blocks.start(
    zero,
    (
      _no_sums(wanted, operands, is_turned),
      _no_logits(form, wanted, operands, columns, size),
    ),
  )

  def visit(i, kept):
    slots = i * size + jnp.arange(size, dtype=jnp.int32)
    is_used = slots < used
    # Slots that are left over repeat the last token, with scale 0.
    rows = order[jnp.minimum(slots, used - 1)]
    by_tokens, kept = _block(
      form, wanted, platform, operands, columns, zero, rows, is_used, kept
    )
    return jnp.where(is_used, rows, count), by_tokens, kept

  def step(i, carry):
    results, kept = carry
    places, by_tokens, kept = visit(i, kept)

    def put(whole, part):
      return whole.at[places].set(part, mode="drop")

    return jax.tree.map(put, results, by_tokens), kept

  _, shapes, _ = jax.eval_shape(visit, jnp.int32(0), kept)
  results = jax.tree.map(
    lambda part: jnp.zeros((count, *part.shape[1:]), part.dtype), shapes
  )
  by_tokens = (
    *blocks.start(shared, results[:2]),
    blocks.start(zero, results[2]),
  )
  (values, statistics, hidden), (sums, _) = lax.fori_loop(
    0, blocks.number(used, size), step, (by_tokens, kept)
  )
  if wanted.kernel and is_turned:
    sums = sums._replace(kernel=sums.kernel.T)
  return Result(values, statistics, sums._replace(hidden=hidden))


def _columns(
  form: tokens.Form, platform: blocks.Platform, head: heads.OutputHead
) -> blocks.Columns:
  """A device's columns: those of ids, or a shard with padding among them."""
  place = form.placement
  is_split = place.vocabulary is not None
  size = head.columns if is_split else head.size
  width = min(form.vocabulary_block or platform.vocabulary_block, size)
  end = head.vocabulary_size
  is_padded = is_split and end is not None and end < size * place.shards
  return blocks.Columns(
    size, width, place.first(size), end if is_padded else None
  )


def _no_sums(
  wanted: Gradients, operands: Operands, is_turned: bool
) -> Gradients:
  """Zeros, to which the blocks of tokens add the head's gradients."""
  head = operands.head
  a, b = head.low_rank or (None, None)
  parts: Any = (head.kernel, head.bias, a, b)
  dtype = sum_dtype(operands.hidden, head)
  sums = Gradients(
    None,
    *(
      jnp.zeros(array.shape, dtype) if is_wanted else None
      for array, is_wanted in zip(parts, wanted[1:], strict=True)
    ),
  )
  if wanted.kernel and is_turned:
    sums = sums._replace(kernel=sums.kernel.T)
  return sums


def _no_logits(
  form: tokens.Form,
  wanted: Gradients,
  operands: Operands,
  columns: blocks.Columns,
  size: int,
) -> tokens.Tile:
  """Zeros, which every block of `size` tokens overwrites with its logits."""
  has_teacher = form.soft and not isinstance(operands.teacher, tokens.Listed)
  if not (form.keeps_tile and (any(wanted) or has_teacher)):
    return None, None
  zeros = jnp.zeros(
    (blocks.number(columns.size, columns.block), size, columns.block),
    sum_dtype(operands.hidden, operands.head),
  )
  return zeros, None if operands.teacher_head is None else zeros


def _block(
  form: tokens.Form,
  wanted: Gradients,
  platform: blocks.Platform,
  operands: Operands,
  columns: blocks.Columns,
  zero: jax.Array,
  rows: jax.Array,
  is_used: jax.Array,
  kept: tuple[Gradients, tokens.Tile],
) -> tuple[Any, tuple[Gradients, tokens.Tile]]:
  """Both passes over one block of tokens.

  Args:
    columns: the blocks of the vocabulary.
    zero: see `blocks.varying_zero`.
    rows: `[c]`, which tokens.
    is_used: `[c]`, False where a slot of the last block is left over.
    kept: the head's gradients, of earlier blocks, and a tile to write to.

  Returns:
    Values, statistics and the gradient in the hidden states by the block's
    tokens; the sums with this block's added, and the tile.
  """
  sums, tile = kept
  head, teacher_head = operands.head, operands.teacher_head
  dtype = sum_dtype(operands.hidden, head)

  def take(array):
    return blocks.read(platform, blocks.rows, array, rows)

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
    return columns.mask(j, part.astype(dtype))

  listed: Any = None
  teacher: Any = None
  if isinstance(operands.teacher, tokens.Listed):
    listed = jax.tree.map(take, operands.teacher)
  elif teacher_head is not None:
    teacher = functools.partial(
      projection.logits, before(teacher_head, operands.teacher)
    )
  elif operands.teacher is not None:
    teacher = teacher_logits
  block = tokens.Block(
    form=form,
    columns=columns,
    zero=zero,
    student=before(head, operands.hidden),
    teacher=teacher,
    is_valued=operands.statistics is None,
    targets=jax.tree.map(take, operands.targets),
    listed=listed,
    scales=jax.tree.map(
      lambda scales: jnp.where(is_used, take(scales), 0), operands.scales
    ),
  )
  stats = jax.tree.map(take, operands.statistics)
  if stats is None:
    stats, tile = statistics.measure(block, tile)
  values, slopes = terms.of_rows(block, stats)
  sums_of_terms, hidden, sums = _second_pass(
    block, wanted, stats, slopes, tile, sums
  )
  by_tokens = (values._replace(**sums_of_terms), stats, hidden)
  return by_tokens, (sums, tile)


def _second_pass(
  block: tokens.Block,
  wanted: Gradients,
  stats: statistics.Statistics,
  slopes: Any,
  tile: tokens.Tile,
  sums: Gradients,
) -> tuple[dict[str, jax.Array], jax.Array | None, Gradients]:
  """The divergence's terms, and gradients (`terms`, `projection`).

  Returns:
    Values by name, where the divergence is formed from terms; the gradient in
    the hidden states; the sums with this block's added.
  """
  student = block.student
  if block.teacher is None and not any(wanted):
    return {}, None, sums
  start = projection.start(student, wanted, sums)

  def visit(carry, j):
    found, added = carry
    z, y = tokens.logits(block, j, tile)
    more, dz = terms.of_columns(block, stats, slopes, j, z, y, any(wanted))
    if any(wanted):
      added = projection.pull_back(student, j, z, dz, added)
    return (jax.tree.map(jnp.add, found, more), added), None

  carry = blocks.start(block.zero, (terms.start(block), start))
  (found, added), _ = lax.scan(visit, carry, block.columns.indices())
  axis = block.form.placement.vocabulary
  if axis is not None:
    found = jax.tree.map(statistics.shards(axis).sum, found)
  hidden, sums = projection.close(student, wanted, added, sums)
  return terms.named(found, stats), hidden, sums
