"""Losses on a sharded vocabulary: the same numbers, and little is sent.

A compiled step must not gather `[batch, length, vocabulary]`: what a collective
returns is bounded by a few numbers a token, and a top-k teacher's `k`.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffusion_objectives as do

P = jax.sharding.PartitionSpec
BATCH, LENGTH, VOCABULARY, K = 8, 3, 64, 3

# Numbers a token in one collective: k listed logits, or one partial result of
# an argmax from each shard of the vocabulary.
LARGEST = 8

MESHES = {
  "data": (8, 1),
  "tensor": (1, 8),
  "data x tensor": (2, 4),
  "more data x tensor": (4, 2),
}

DIVERGENCES = [
  do.divergences.forward_kl,
  do.divergences.reverse_kl,
  do.divergences.jensen_shannon(0.3),
  do.divergences.skew_forward_kl(),
  do.divergences.skew_reverse_kl(),
  do.divergences.total_variation,
]


def losses():
  """Every loss by name: the teacher that it takes, and the loss."""
  yield (
    "cross entropy",
    "dense",
    lambda z, b: do.weighted_cross_entropy_loss(z, b.student_batch),
  )
  yield "sampled", "sampled", do.sampled_reverse_kl_loss
  for teacher in ("dense", "top-k"):
    for divergence in DIVERGENCES:
      loss = functools.partial(do.divergence_loss, divergence=divergence)
      yield f"{divergence.name}, {teacher}", teacher, loss
    loss = functools.partial(do.prepared_opd_loss, hard_loss_weight=0.5)
    yield f"mix, {teacher}", teacher, loss


def inputs():
  """Student logits, and a batch for each teacher."""
  rng = np.random.default_rng(0)
  z, y = rng.standard_normal((2, BATCH, LENGTH, VOCABULARY), np.float32)
  log_p = y - np.log(np.exp(y).sum(axis=-1, keepdims=True))
  targets = rng.integers(0, VOCABULARY, (BATCH, LENGTH), np.int32)
  listed = np.argsort(-y, axis=-1)[..., :K].astype(np.int32)
  student = do.DiffusionTokenBatch(
    model_inputs={"x": targets},
    target_ids=targets,
    loss_weights=rng.random((BATCH, LENGTH), np.float32),
    is_supervised=np.ones((BATCH, LENGTH), bool),
  )
  teachers = {
    "dense": do.DenseTeacher(logits=y),
    "top-k": do.TopKTeacher(
      token_ids=listed,
      log_probs=np.take_along_axis(log_p, listed, axis=-1),
      temperature=1.0,
    ),
    "sampled": do.SampledTokenTeacher(
      log_probs=np.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0],
      temperature=1.0,
    ),
  }
  return z, {
    name: do.DiffusionDistillationBatch(student_batch=student, teacher=teacher)
    for name, teacher in teachers.items()
  }


def step(logits, batches):
  """Outputs and gradients of all losses."""

  def one(loss, batch):
    def differentiated(z):
      output = loss(z, batch)
      return output.primary_loss.unreduced_sum, output

    return jax.grad(differentiated, has_aux=True)(logits)

  return {name: one(loss, batches[teacher]) for name, teacher, loss in losses()}


def shardings(mesh, tree):
  """Rows over `data`, the vocabulary over `tensor`."""

  def place(x):
    is_wide = x.ndim == 3 and x.shape[-1] == VOCABULARY
    spec = P("data", None, "tensor") if is_wide else P("data")
    return jax.sharding.NamedSharding(mesh, spec)

  return jax.tree.map(place, tree)


def mesh_of(shape):
  return jax.make_mesh(
    shape, ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )


COLLECTIVE = re.compile(
  r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute"
  r"|reduce-scatter|ragged-all-to-all|collective-broadcast)(?:-start)?\("
)
SHAPE = re.compile(r"\b[a-z]+[0-9]*\w*\[([0-9,]*)\]")


def collectives(compiled):
  """`(elements, kind)` of each array that a device receives in a collective."""
  for result, kind in COLLECTIVE.findall(compiled.as_text()):
    for shape in SHAPE.findall(result):
      yield math.prod(int(n) for n in shape.split(",") if n), kind


@functools.cache
def unsharded():
  return jax.jit(step)(*inputs())


@pytest.mark.parametrize("shape", MESHES.values(), ids=MESHES)
def test_a_sharded_step_is_the_same_and_gathers_no_vocabulary(shape):
  mesh, given = mesh_of(shape), inputs()
  compiled = (
    jax.jit(step, in_shardings=shardings(mesh, given)).lower(*given).compile()
  )
  actual = compiled(*jax.device_put(given, shardings(mesh, given)))
  apart = 0.0
  for name, expected in unsharded().items():
    for a, e in zip(
      jax.tree.leaves(actual[name]), jax.tree.leaves(expected), strict=True
    ):
      np.testing.assert_allclose(a, e, rtol=2e-6, atol=5e-6, err_msg=name)
      apart = max(apart, float(np.max(np.abs(np.asarray(a) - e))))
  tokens = BATCH * LENGTH // shape[0]
  largest, kind = max(collectives(compiled), default=(0, "none"))
  print(f"{shape}: {apart:.1e} apart; {kind} of {largest / tokens:.1f} a token")
  assert largest <= LARGEST * tokens, kind


def test_a_gathered_vocabulary_is_seen():
  mesh = mesh_of((2, 4))
  logits, batches = inputs()

  def gathered(z, batch):
    z = jax.lax.with_sharding_constraint(
      z, jax.sharding.NamedSharding(mesh, P("data"))
    )
    return do.forward_kl_loss(z, batch).primary_loss.unreduced_sum

  given = logits, batches["top-k"]
  compiled = (
    jax.jit(gathered, in_shardings=shardings(mesh, given))
    .lower(*given)
    .compile()
  )
  tokens = BATCH * LENGTH // 2
  assert max(collectives(compiled)) == (VOCABULARY * tokens, "all-gather")


def test_a_scatter_over_the_whole_batch_is_seen():
  """Of ids that index batch and length too, the partitioner gathers all."""
  mesh = mesh_of((2, 4))
  logits, batches = inputs()
  given = logits, batches["top-k"].teacher.token_ids

  def excluded(z, ids):
    rows, columns, _ = jnp.indices(ids.shape, sparse=True)
    return jnp.sum(z.at[rows, columns, ids].set(0))

  compiled = (
    jax.jit(excluded, in_shardings=shardings(mesh, given))
    .lower(*given)
    .compile()
  )
  largest, kind = max(collectives(compiled))
  assert kind == "all-gather" and largest > LARGEST * BATCH * LENGTH // 2
