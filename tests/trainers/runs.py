"""Small runs of Tunix's trainers: networks, batches, what came out."""

import importlib
import importlib.util
import pathlib
import types

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix

import diffusion_objectives as do

ROOT = pathlib.Path(__file__).parents[2]

# Modules with a `PeftTrainer` and a `TrainingConfig`.
TRAINERS = ["tunix.sft.peft_trainer"]
if importlib.util.find_spec("tunix.experimental"):
  TRAINERS.append("tunix.experimental.train.peft_trainer_v2")
# 0.1.7 accumulates by `optax.MultiSteps`, Tunix main by a class of its own.
HAS_MULTI_STEPS = not hasattr(
  importlib.import_module(TRAINERS[0]), "GradientAccumulator"
)

# The one under test: see the fixture `trainer_module`.
under_test = types.SimpleNamespace(module=importlib.import_module(TRAINERS[0]))

VOCABULARY = 11
MASK_ID = VOCABULARY
LENGTH = 5


class Network(nnx.Module):
  """A small scorer that returns a tuple, as Tunix's own classes do."""

  def __init__(self, rngs, dtype=jnp.float32):
    self.embed = nnx.Embed(VOCABULARY + 1, 16, param_dtype=dtype, rngs=rngs)
    self.hidden = nnx.Linear(16, 24, param_dtype=dtype, rngs=rngs)
    self.head = nnx.Linear(24, VOCABULARY, param_dtype=dtype, rngs=rngs)

  def __call__(self, input_tokens):
    return self.head(jnp.tanh(self.hidden(self.embed(input_tokens)))), None


def network(lora=False, dtype=jnp.float32):
  model = Network(nnx.Rngs(0), dtype)
  if not lora:
    return model
  provider = qwix.LoraProvider(module_path=".*hidden|.*head", rank=4, alpha=2.0)
  inputs = {"input_tokens": jnp.zeros((1, LENGTH), jnp.int32)}
  model = qwix.apply_lora_to_model(model, provider, rngs=nnx.Rngs(1), **inputs)
  # A fresh LoRA pair has one side 0; both are given values, so both get
  # gradients.
  state = nnx.state(model, nnx.LoRAParam)
  rng = np.random.default_rng(1)
  filled = jax.tree.map(
    lambda x: jnp.asarray(0.3 * rng.standard_normal(x.shape), x.dtype), state
  )
  nnx.update(model, filled)
  return model


def token_batch(rng, rows=4, scale=1.0, supervised=False):
  """A batch with weights of very unequal, fractional size."""
  shape = (rows, LENGTH)
  weights = scale * rng.random(shape) * (rng.random(shape) < 0.6)
  return do.DiffusionTokenBatch(
    model_inputs={
      "input_tokens": rng.integers(0, VOCABULARY + 1, shape, dtype=np.int32)
    },
    target_ids=rng.integers(0, VOCABULARY, shape, dtype=np.int32),
    loss_weights=weights.astype(np.float32),
    is_supervised=np.ones(shape, bool) if supervised else None,
  )


def distillation_batch(rng, **kwargs):
  student = token_batch(rng, **kwargs)
  logits = rng.standard_normal((*student.target_ids.shape, VOCABULARY))
  return do.DiffusionDistillationBatch(
    student_batch=student,
    teacher=do.DenseTeacher(logits=logits.astype(np.float32)),
  )


def unequal(count, build=distillation_batch, seed=0):
  """Micro-batches whose weights span four decades; the second has none."""
  rng = np.random.default_rng(seed)
  scales = 10.0 ** rng.uniform(-3, 1, count)
  scales[1:2] = 0
  return [build(rng, scale=scale) for scale in scales]


def concatenated(batches):
  return jax.tree.map(lambda *leaves: np.concatenate(leaves), *batches)


def make_trainer(model=None, optimizer=None, steps=None, **config):
  module = under_test.module
  return module.PeftTrainer(
    network() if model is None else model,
    optax.sgd(0.1) if optimizer is None else optimizer,
    module.TrainingConfig(
      eval_every_n_steps=config.pop("eval_every_n_steps", 1000),
      gradient_accumulation_steps=steps,
      **config,
    ),
  )


def parameters(trainer):
  kind = nnx.LoRAParam if trainer._lora_enabled else nnx.Param
  return jax.tree.map(np.asarray, nnx.state(trainer.model, kind))


def largest_difference(one, other):
  return max(
    float(np.max(np.abs(a.astype(np.float64) - b.astype(np.float64))))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
  )


def history(trainer, name, mode="train"):
  return trainer.metrics_logger.get_metric_history("", name, mode)
