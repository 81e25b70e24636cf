"""The hook on meshes, and on a network of Tunix's own."""

import dataclasses
import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tunix.models.qwen3 import model as qwen3

import diffusion_objectives as do
from diffusion_objectives.trainers import tunix
from tests.trainers.runs import LENGTH
from tests.trainers.runs import VOCABULARY
from tests.trainers.runs import distillation_batch
from tests.trainers.runs import history
from tests.trainers.runs import largest_difference
from tests.trainers.runs import make_trainer
from tests.trainers.runs import parameters
from tests.trainers.runs import token_batch
from tests.trainers.runs import under_test
from tests.trainers.runs import unequal

pytestmark = pytest.mark.usefixtures("trainer_module")

# Meshes and Tunix's own networks.


IDS = 24
WIDTH = 16


class ShardedNetwork(nnx.Module):
  """Every matrix over `fsdp` and `tp`; the logits' vocabulary over `tp`."""

  def __init__(self, rngs, rows, columns):
    init = nnx.with_partitioning(
      nnx.initializers.lecun_normal(), (rows, columns)
    )
    self.embed = nnx.Embed(IDS, WIDTH, embedding_init=init, rngs=rngs)
    self.hidden = nnx.Linear(WIDTH, 32, kernel_init=init, rngs=rngs)
    self.head = nnx.Linear(32, WIDTH, kernel_init=init, rngs=rngs)

  def before_head(self, input_tokens):
    return jnp.tanh(self.hidden(self.embed(input_tokens)))

  def __call__(self, input_tokens):
    return self.head(self.before_head(input_tokens))


def hidden_and_head(model, model_inputs):
  head = do.OutputHead(kernel=model.head.kernel[...], bias=model.head.bias[...])
  return model.before_head(**model_inputs), head


def sharded_network(mesh, rows, columns, seed=0):
  model = ShardedNetwork(nnx.Rngs(seed), rows, columns)
  state = nnx.state(model)
  nnx.update(model, jax.device_put(state, nnx.get_named_sharding(state, mesh)))
  return model


def mesh_batch(rng, scale):
  batch = distillation_batch(rng, rows=8, scale=scale)
  teacher = rng.standard_normal((*batch.student_batch.target_ids.shape, WIDTH))
  return dataclasses.replace(
    batch, teacher=do.DenseTeacher(logits=teacher.astype(np.float32))
  )


def trained_on(via, shape, names, data, rows=None, columns=None):
  mesh = jax.make_mesh(
    shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names)
  )
  with mesh:
    trainer = make_trainer(
      sharded_network(mesh, rows, columns),
      optax.adamw(1e-3),
      steps=2,
      data_sharding_axis=names[:1],
    )
    options = {}
    if via != "logits":
      options["hidden_fn"] = hidden_and_head
    if via == "hidden states of both":
      options["frozen"] = sharded_network(mesh, rows, columns, seed=1)
      data = [batch.student_batch for batch in data]
    tunix.configure_prepared_diffusion_opd(
      trainer, temperature=2.0, hard_loss_weight=0.5, **options
    )
    trainer.train(data)
  return trainer


@functools.cache
def trained_on_one(via, module):
  """By one device, once for each trainer, the module that is under test."""
  return trained_on(via, (1,), ("data",), unequal(6, mesh_batch))


@pytest.mark.parametrize(
  ("shape", "names", "rows", "columns"),
  [
    ((8,), ("data",), None, None),
    ((8,), ("fsdp",), "fsdp", None),
    ((1, 8), ("fsdp", "tp"), None, "tp"),
    ((4, 2), ("fsdp", "tp"), "fsdp", "tp"),
    ((2, 4), ("fsdp", "tp"), "fsdp", "tp"),
  ],
  ids=["data", "fsdp", "tensor", "fsdp 4 x tensor 2", "fsdp 2 x tensor 4"],
)
@pytest.mark.parametrize(
  "via", ["logits", "hidden states", "hidden states of both"]
)
def test_the_hook_is_exact_on_a_mesh(via, shape, names, rows, columns):
  single = trained_on_one(via, under_test.module)
  sharded = trained_on(via, shape, names, unequal(6, mesh_batch), rows, columns)
  head = sharded.model.head.kernel[...].sharding.spec
  assert head == jax.sharding.PartitionSpec(rows, columns) or not (
    rows or columns
  )
  difference = largest_difference(parameters(sharded), parameters(single))
  print(f"{names} {shape}: {difference:.1e}")
  assert difference <= 2e-6
  for metric in ("loss", "distill/soft_loss", "grad_norm"):
    np.testing.assert_allclose(
      history(sharded, metric), history(single, metric), rtol=2e-6
    )


def test_a_batch_that_does_not_divide_over_the_mesh_is_refused():
  rng = np.random.default_rng(0)
  mesh = jax.make_mesh(
    (2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  with mesh:
    trainer = make_trainer()
    tunix.configure_diffusion_sft(trainer)
    with pytest.raises(
      ValueError, match=r"must divide over the mesh axes .*; received"
    ):
      trainer.train([token_batch(rng, rows=3)])


def test_tunix_qwen3_is_scored_by_default():
  mesh = jax.make_mesh(
    (1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  config = qwen3.ModelConfig(
    num_layers=1,
    vocab_size=VOCABULARY + 1,
    embed_dim=16,
    hidden_dim=32,
    num_heads=2,
    head_dim=8,
    num_kv_heads=2,
    rope_theta=10_000,
    norm_eps=1e-6,
  )
  rng = np.random.default_rng(0)

  def adapter(batch):
    rows = batch.target_ids.shape[0]
    inputs = {
      **batch.model_inputs,
      "positions": np.tile(np.arange(LENGTH, dtype=np.int32), (rows, 1)),
      "cache": None,
      "attention_mask": np.ones((rows, LENGTH, LENGTH), bool),
    }
    return dataclasses.replace(batch, model_inputs=inputs)

  with mesh:
    trainer = make_trainer(
      qwen3.Qwen3(config, rngs=nnx.Rngs(0)), optax.adam(1e-2), steps=2
    )
    tunix.configure_diffusion_sft(trainer, adapter)
    trainer.train([token_batch(rng)] * 20)
  losses = history(trainer, "loss")
  assert losses[-1] < 0.8 * losses[0]
