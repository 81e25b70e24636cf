"""How the losses from hidden states run: regions, platforms, memory, digits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import diffusion_objectives as do
from diffusion_objectives.objectives.linear_vocabulary import blocks
from tests import linear_cases
from tests import oracles

both = pytest.mark.parametrize(
  "implementation", ["grad_in_forward", "recompute"]
)


def token_batch(ids, weights=None):
  ids = np.asarray(ids, np.int32)
  weights = np.ones(ids.shape, np.float32) if weights is None else weights
  return do.DiffusionTokenBatch(
    model_inputs={"input_tokens": ids}, target_ids=ids, loss_weights=weights
  )


def cross_entropy(hidden, kernel, batch, **how):
  return do.linear_weighted_cross_entropy_loss(
    hidden, do.OutputHead(kernel=kernel), batch, **how
  ).primary_loss.unreduced_sum


def dense(hidden, kernel, batch):
  return do.weighted_cross_entropy_loss(
    do.OutputHead(kernel=kernel).logits(hidden), batch
  ).primary_loss.unreduced_sum


def draw(*shape, seed=0):
  rng = np.random.default_rng(seed)
  return rng.standard_normal(shape).astype(np.float32)


# Manual regions.


@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize("name", linear_cases.OBJECTIVES)
def test_a_manual_region_gives_local_sums(name, is_inside):
  """Rows over devices, the head on each: as of one device, added up."""
  objective = linear_cases.OBJECTIVES[name]
  case = linear_cases.draw(
    objective, linear_cases.FORMS["all"], shape=(4, 3, 6, 23)
  )
  loss = objective.bind(token_block=2, vocabulary_block=5)
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
  hidden, head, weights, batch, teacher_head = linear_cases.on_device(case)

  def total(hidden, head, weights, batch):
    return linear_cases.total(loss, hidden, head, weights, batch, teacher_head)[
      0
    ]

  def gradient(total):
    return jax.grad(total, argnums=(0, 1))

  def added(*arguments):
    return jax.lax.psum(total(*arguments), "data")

  rows, everywhere = P("data"), P()
  specs = (rows, everywhere, rows, rows)
  if is_inside:
    mapped = jax.shard_map(
      gradient(total), mesh=mesh, in_specs=specs, out_specs=(rows, everywhere)
    )
  else:
    mapped = gradient(
      jax.shard_map(added, mesh=mesh, in_specs=specs, out_specs=everywhere)
    )
  found = jax.jit(mapped)(hidden, head, weights, batch)
  expected = jax.jit(gradient(total))(hidden, head, weights, batch)
  jax.tree.map(
    lambda a, e: np.testing.assert_allclose(a, e, 1e-5, 1e-5), found, expected
  )


# Platforms.


@pytest.mark.parametrize(
  ("platform", "blocks_of", "others"),
  [
    ("tpu", blocks.ACCELERATOR, blocks.CPU),
    ("cuda", blocks.ACCELERATOR, blocks.CPU),
    ("cpu", blocks.CPU, blocks.ACCELERATOR),
  ],
)
def test_an_exported_program_has_its_platforms_blocks(
  platform, blocks_of, others
):
  tokens, ids = 2048, 20_000
  batch = token_batch(np.zeros((1, tokens)))
  exported = jax.export.export(
    jax.jit(jax.grad(functools.partial(cross_entropy, batch=batch))),
    platforms=[platform],
  )(
    jax.ShapeDtypeStruct((1, tokens, 16), jnp.float32),
    jax.ShapeDtypeStruct((16, ids), jnp.float32),
  )
  text = exported.mlir_module()

  def tile(sizes):
    return f"{sizes.token_block}x{sizes.vocabulary_block}xf32"

  assert tile(blocks_of) in text
  assert tile(others) not in text


def test_a_symbolic_batch_exports():
  batch, length = jax.export.symbolic_shape("batch, length")
  shape = jax.ShapeDtypeStruct

  def loss(hidden, kernel, ids):
    weights = jnp.ones(ids.shape)
    tokens = do.DiffusionTokenBatch(
      model_inputs={"input_tokens": ids}, target_ids=ids, loss_weights=weights
    )
    return cross_entropy(hidden, kernel, tokens)

  exported = jax.export.export(jax.jit(loss))(
    shape((batch, length, 4), jnp.float32),
    shape((4, 9), jnp.float32),
    shape((batch, length), jnp.int32),
  )
  hidden, kernel = draw(2, 5, 4), draw(4, 9, seed=1)
  ids = np.arange(10, dtype=np.int32).reshape(2, 5) % 9
  np.testing.assert_allclose(
    exported.call(hidden, kernel, ids),
    dense(hidden, kernel, token_batch(ids)),
    rtol=1e-5,
  )


# Blocks.


@both
@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_an_empty_batch_is_0(shape, implementation):
  batch = token_batch(np.zeros(shape))
  value, (of_hidden, of_kernel) = jax.value_and_grad(cross_entropy, (0, 1))(
    jnp.zeros((*shape, 4)),
    jnp.ones((4, 5)),
    batch,
    implementation=implementation,
  )
  assert value == 0 and not of_kernel.any() and of_hidden.shape == (*shape, 4)


@both
def test_a_left_over_slot_of_a_block_adds_nothing(implementation):
  """-inf in the kernel excludes an id; times a filler's 0 it would be NaN."""
  hidden, kernel = np.abs(draw(1, 5, 4)), draw(4, 9, seed=1)
  kernel[:, 3] = -np.inf
  batch = token_batch(np.zeros((1, 5)))
  _, of_kernel = jax.grad(cross_entropy, (0, 1))(
    hidden, kernel, batch, implementation=implementation, token_block=3
  )
  of_logits = oracles.softmax((hidden @ kernel)[0]) - np.eye(9)[:1]
  np.testing.assert_allclose(
    of_kernel, hidden[0].T @ np.asarray(of_logits, np.float32), 1e-4, 1e-5
  )


def test_memory_is_flat_in_the_tokens():
  """Of a block of tokens and one of columns, whatever the number of tokens."""
  ids, features, block = 4096, 16, 64

  def temporary(tokens, implementation):
    batch = token_batch(np.zeros((1, tokens)))
    compiled = (
      jax.jit(
        jax.grad(
          functools.partial(
            cross_entropy,
            batch=batch,
            implementation=implementation,
            token_block=block,
            vocabulary_block=512,
          ),
          argnums=(0, 1),
        )
      )
      .lower(
        jax.ShapeDtypeStruct((1, tokens, features), jnp.float32),
        jax.ShapeDtypeStruct((features, ids), jnp.float32),
      )
      .compile()
    )
    return compiled.memory_analysis().temp_size_in_bytes

  tile = 4 * block * ids
  for implementation, most in (
    ("grad_in_forward", 2 * tile),
    ("recompute", tile),
  ):
    few, many = (temporary(n, implementation) for n in (256, 1024))
    # What grows is a few numbers and the hidden states' gradient by token.
    assert many - few < 768 * 4 * (2 * features + 16), implementation
    assert few < most, implementation


def test_a_blocks_tile_is_bounded():
  assert blocks.CPU.tokens(262_144, 1) == 256
  assert blocks.CPU.tokens(262_144, 2) == 128
  assert blocks.CPU.tokens(2**30, 1) == blocks.FEWEST_TOKENS
  assert blocks.ACCELERATOR.tokens(131_072, 1) == 1024
  assert blocks.ACCELERATOR.tokens(262_144, 2) == 512


@pytest.mark.parametrize("block", [np.int64(3), 10**9])
def test_a_block_may_be_any_integer(block):
  hidden, kernel = draw(1, 5, 4), draw(4, 9, seed=1)
  batch = token_batch(np.zeros((1, 5)))
  np.testing.assert_allclose(
    cross_entropy(
      hidden, kernel, batch, token_block=block, vocabulary_block=block
    ),
    dense(hidden, kernel, batch),
    rtol=1e-5,
  )


def test_an_eager_call_compiles_once():
  hidden, kernel = draw(1, 5, 4), draw(4, 9, seed=1)
  batch = token_batch(np.zeros((1, 5)))
  jax.grad(cross_entropy)(hidden, kernel, batch)
  events = []

  def listen(name, *_, **__):
    events.append(name)

  jax.monitoring.register_event_duration_secs_listener(listen)
  jax.grad(cross_entropy)(hidden + 1, kernel, batch)
  jax.monitoring.unregister_event_duration_listener(listen)
  assert not [name for name in events if "backend_compile" in name]


# Digits.


@pytest.mark.parametrize("temperature", [1.0, 2.0, 100.0, 1e4])
@pytest.mark.parametrize("gap", [1.0, 1e-2, 1e-4])
@pytest.mark.parametrize("block", [64, 16, 9])
def test_a_gradient_keeps_its_digits_at_every_gap(block, gap, temperature):
  """Logits that are exact: an identity head. Flat where teachers are near."""
  student = draw(1, 32, 64)
  teacher = (student + gap * draw(1, 32, 64, seed=1)).astype(np.float32)
  batch = do.DiffusionDistillationBatch(
    student_batch=token_batch(np.zeros((1, 32))),
    teacher=do.DenseTeacher(logits=teacher),
  )

  def loss(student):
    return do.linear_forward_kl_loss(
      student,
      do.OutputHead(kernel=np.eye(64, dtype=np.float32)),
      batch,
      temperature=temperature,
      vocabulary_block=block,
    ).primary_loss.unreduced_sum

  gradient = np.asarray(jax.grad(loss)(student), np.float64)
  expected = temperature * (
    oracles.softmax(student, temperature)
    - oracles.softmax(teacher, temperature)
  )
  assert linear_cases.error(gradient, expected) < 1e-6


def test_a_teacher_that_excludes_a_whole_block_is_no_near_one():
  """The ratio of the sums is then made by the columns that it lacks."""
  student, teacher = draw(1, 4, 12), draw(1, 4, 12, seed=1)
  teacher[..., :6] = student[..., :6]
  teacher[..., 6:] = -np.inf
  batch = do.DiffusionDistillationBatch(
    student_batch=token_batch(np.zeros((1, 4))),
    teacher=do.DenseTeacher(logits=teacher),
  )

  def loss(student):
    return do.linear_forward_kl_loss(
      student,
      do.OutputHead(kernel=np.eye(12, dtype=np.float32)),
      batch,
      vocabulary_block=3,
    ).primary_loss.unreduced_sum

  value, gradient = jax.value_and_grad(loss)(student)
  np.testing.assert_allclose(
    value, oracles.forward_kl(teacher, student).sum(), rtol=1e-6
  )
  np.testing.assert_allclose(
    gradient, oracles.softmax(student) - oracles.softmax(teacher), atol=1e-6
  )


@both
@pytest.mark.parametrize(
  ("weight", "scale"), [(1e5, 1e-6), (1.0, 1 / 4096), (1.0, 1e-6)]
)
def test_a_float16_slope_neither_overflows_nor_vanishes(
  implementation, weight, scale
):
  hidden, kernel = draw(1, 64, 8), draw(8, 500, seed=1) / 4
  hidden, kernel = hidden.astype(np.float16), kernel.astype(np.float16)
  batch = token_batch(np.arange(64)[None], np.full((1, 64), weight, np.float32))

  def scaled(f):
    return jax.grad(lambda *a: scale * f(*a, batch), argnums=(0, 1))

  found = scaled(
    functools.partial(cross_entropy, implementation=implementation)
  )(hidden, kernel)
  wide = scaled(dense)(hidden.astype(np.float32), kernel.astype(np.float32))
  # What float16 itself does to the result, and half a unit of its smallest.
  for a, e in zip(found, wide, strict=True):
    np.testing.assert_allclose(a, e, rtol=2e-3, atol=3e-8)


@both
def test_a_refused_target_gives_its_weight_a_nan_gradient(implementation):
  hidden, kernel = draw(1, 5, 4), draw(4, 9, seed=1)
  ids = np.array([[0, 1, 9, 3, -1]])

  def loss(weights):
    batch = dataclasses.replace(token_batch(ids), loss_weights=weights)
    return cross_entropy(hidden, kernel, batch, implementation=implementation)

  gradient = jax.grad(loss)(jnp.ones((1, 5)))
  np.testing.assert_array_equal(np.isnan(gradient[0]), [0, 0, 1, 0, 1])
