"""From windows of text to what a network is trained on.

Every draw follows from a seed and from the indices of examples, so a run
that was killed and continued sees the same canvases.
"""

from collections.abc import Callable
import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

import diffusion_objectives as do
from diffusion_objectives import corruption
from diffusion_objectives.demo import network
from diffusion_objectives.demo import text

Item = dict[str, np.ndarray]  # "ids" [batch, length] and "index" [batch]


def bound_batch(key: jax.Array, ids: jax.Array) -> do.DiffusionTokenBatch:
  """Hides bytes; the loss is the bound, in nats per byte (weights 1/t)."""
  return corruption.masked_diffusion_batch(
    key, ids, jnp.ones(ids.shape, bool), mask_id=text.MASK_ID
  )


def equal_batch(key: jax.Array, ids: jax.Array) -> do.DiffusionTokenBatch:
  """The same, but every hidden byte weighs 1.

  Both students are trained with equal weights (denominator "masked"), so that
  they differ in what they learn from alone.
  """
  batch = bound_batch(key, ids)
  return dataclasses.replace(
    batch, loss_weights=(batch.loss_weights > 0).astype(jnp.float32)
  )


def data_adapter(
  make_batch: Callable[[jax.Array, jax.Array], do.DiffusionTokenBatch],
  *,
  seed: int,
) -> Callable[[Item], do.DiffusionTokenBatch]:
  """The batch adapter of training on the data."""

  @jax.jit
  def prepare(ids, index):
    key = jax.random.fold_in(jax.random.key(seed), index[0])
    return make_batch(key, ids)

  return lambda item: prepare(item["ids"], item["index"])


def distillation_adapter(
  student: nnx.Module, teacher: nnx.Module, *, seed: int, denoising_steps: int
) -> Callable[[Item], do.DiffusionDistillationBatch]:
  """The batch adapter of on-policy distillation.

  It runs before each step, so the student that fills a canvas is the student
  that the step then trains.
  """
  student_graph = nnx.graphdef(student)
  teacher_graph, teacher_state = nnx.split(teacher)

  # Split by hand: a module that passes through nnx.jit comes back as a copy.
  @jax.jit
  def prepare(student_state, teacher_state, ids, index):
    canvas = roll_out(
      network.scorer(nnx.merge(student_graph, student_state)),
      ids,
      index,
      seed=seed,
      denoising_steps=denoising_steps,
    )
    teacher = network.scorer(nnx.merge(teacher_graph, teacher_state))
    return scored(teacher, canvas, ids)

  return lambda item: prepare(
    nnx.state(student), teacher_state, item["ids"], item["index"]
  )


def scored(
  teacher: Callable[[jax.Array], jax.Array], canvas: jax.Array, ids: jax.Array
) -> do.DiffusionDistillationBatch:
  """A canvas with the teacher's view of the bytes that are still hidden."""
  return do.DiffusionDistillationBatch(
    student_batch=do.DiffusionTokenBatch(
      model_inputs={"input_tokens": canvas},
      target_ids=ids,
      loss_weights=(canvas == text.MASK_ID).astype(jnp.float32),
      is_supervised=jnp.ones(ids.shape, bool),
    ),
    teacher=do.DenseTeacher(logits=teacher(canvas)),
  )


def roll_out(
  student: Callable[[jax.Array], jax.Array],
  ids: jax.Array,
  index: jax.Array,
  *,
  seed: int,
  denoising_steps: int,
) -> jax.Array:
  """Canvases on the way of the student's own sampling.

  Sampling stops at a time `t`, uniform on [0, 1] and stratified over successive
  indices, so that a share `t` of the bytes is still hidden. It starts at
  `s = t + (1 - t) u^2`, `u` uniform, from a window of which a share `s` is
  hidden. So of a canvas's bytes `1 - s` come from the text, `s - t` from the
  student, and `t` are to be scored. The square favours short rollouts: canvases
  range from plain text with hidden bytes, as held-out text is, to ones that
  are the student's alone.

  Args:
    student: `[batch, length]` ids to `[batch, length, vocabulary]` logits.
    ids: `[batch, length]` the windows.
    index: `[batch]` integer, the examples' numbers.
    seed: of all draws.
    denoising_steps: calls of the student.

  Returns:
    `[batch, length]` ids, `text.MASK_ID` where still hidden.
  """
  strata = ids.shape[0]
  keys = _keys(seed, index)

  def draw(key, stratum):
    stop_key, start_key, order_key = jax.random.split(key, 3)
    stop = (jnp.float32(stratum) + jax.random.uniform(stop_key)) / strata
    start = stop + (1 - stop) * jax.random.uniform(start_key) ** 2
    return start, stop, jax.random.uniform(order_key, ids.shape[1:])

  start, stop, order = jax.vmap(draw)(keys, index % strata)
  canvas = jnp.where(order < start[:, None], text.MASK_ID, ids)
  return denoise(student, canvas, order, start, stop, keys, denoising_steps)


def denoise(
  student: Callable[[jax.Array], jax.Array],
  canvas: jax.Array,
  order: jax.Array,
  start: jax.Array,
  stop: jax.Array,
  keys: jax.Array,
  steps: int,
) -> jax.Array:
  """Ancestral sampling from time `start` to time `stop`, in equal steps.

  Each step draws the bytes whose place in the order, uniform on [0, 1), lies
  between the step's two times. What is not hidden never changes.
  """

  def step(number, canvas):
    time = start + (stop - start) * jnp.float32(number + 1) / steps
    logits = student(canvas)[..., : text.MASK_ID]
    sampled = jax.vmap(
      lambda key, row: jax.random.categorical(
        jax.random.fold_in(key, number), row
      )
    )(keys, logits)
    is_drawn = (canvas == text.MASK_ID) & (order >= time[:, None])
    return jnp.where(is_drawn, sampled.astype(canvas.dtype), canvas)

  return jax.lax.fori_loop(0, steps, step, canvas)


@nnx.jit(static_argnames=("count", "seed", "steps"))
def sample(
  model: nnx.Module, *, count: int, seed: int, steps: int
) -> jax.Array:
  """`[count, length]` ids that a network draws from nothing but masks."""
  keys = _keys(seed, jnp.arange(count))
  order = jax.vmap(lambda key: jax.random.uniform(key, (text.LENGTH,)))(keys)
  return denoise(
    network.scorer(model),
    jnp.full((count, text.LENGTH), text.MASK_ID, jnp.int32),
    order,
    jnp.ones(count),
    jnp.zeros(count),
    keys,
    steps,
  )


def _keys(seed: int, index: jax.Array) -> jax.Array:
  key = jax.random.key(seed)
  return jax.vmap(lambda number: jax.random.fold_in(key, number))(index)
