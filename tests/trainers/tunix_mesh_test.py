"""The hook on meshes, and on a network of Tunix's own."""

import dataclasses

from flax import nnx
import jax
import numpy as np
import optax
import pytest
from tunix.models.qwen3 import model as qwen3

from diffusion_objectives.trainers import tunix
from tests.trainers.runs import LENGTH
from tests.trainers.runs import VOCABULARY
from tests.trainers.runs import distillation_batch
from tests.trainers.runs import history
from tests.trainers.runs import largest_difference
from tests.trainers.runs import make_trainer
from tests.trainers.runs import network
from tests.trainers.runs import parameters
from tests.trainers.runs import token_batch
from tests.trainers.runs import unequal

pytestmark = pytest.mark.usefixtures("trainer_module")

# Meshes and Tunix's own networks.


def test_the_hook_is_exact_on_a_mesh():
  data = unequal(4, distillation_batch)
  single = make_trainer(optimizer=optax.adamw(1e-3), steps=2)
  tunix.configure_prepared_diffusion_opd(single)
  single.train(data)
  mesh = jax.make_mesh(
    (2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  with mesh:
    model = network()
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    nnx.update(model, jax.device_put(nnx.state(model), replicated))
    sharded = make_trainer(model, optax.adamw(1e-3), steps=2)
    tunix.configure_prepared_diffusion_opd(sharded)
    sharded.train(data)
  assert largest_difference(parameters(sharded), parameters(single)) <= 2e-6
  np.testing.assert_allclose(
    history(sharded, "loss"), history(single, "loss"), rtol=1e-6
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
