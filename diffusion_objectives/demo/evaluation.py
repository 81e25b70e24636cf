"""What is measured, on held-out windows and with the library's own losses.

All networks see the same hidden positions, so their figures are paired. A
figure is a sum over a denominator, added over draws and divided once.
"""

from collections.abc import Callable

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

import diffusion_objectives as do
from diffusion_objectives.demo import canvases
from diffusion_objectives.demo import network

SEED = 20_000  # the same for all runs, whatever seed they train with


def held_out_nll(
  model: nnx.Module, windows: np.ndarray, *, draws: int
) -> float:
  """The diffusion bound on the negative log-likelihood, in nats per byte."""
  return _average(lambda draw: _nll(model, windows, draw), draws)


def held_out_kl(
  student: nnx.Module, teacher: nnx.Module, windows: np.ndarray, *, draws: int
) -> float:
  """KL(teacher || student) per hidden byte of held-out text, in nats."""
  return _average(lambda draw: _kl(student, teacher, windows, draw), draws)


def own_kl(
  student: nnx.Module,
  teacher: nnx.Module,
  windows: np.ndarray,
  *,
  draws: int,
  denoising_steps: int,
) -> float:
  """KL(teacher || student) per hidden byte of canvases the student filled.

  The canvases start from held-out windows, as `canvases.roll_out` does it.
  """
  return _average(
    lambda draw: _own_kl(
      student, teacher, windows, draw, denoising_steps=denoising_steps
    ),
    draws,
  )


def _average(
  measure: Callable[[jax.Array], do.LossOutput], draws: int
) -> float:
  outputs = [measure(jnp.int32(draw)) for draw in range(draws)]
  return float(do.merge(outputs).primary_loss.compute())


@nnx.jit
def _nll(model, windows, draw) -> do.LossOutput:
  batch = _hidden(windows, draw)
  return do.weighted_cross_entropy_loss(
    network.logits(model, batch.model_inputs), batch
  )


@nnx.jit
def _kl(student, teacher, windows, draw) -> do.LossOutput:
  canvas = _hidden(windows, draw).model_inputs["input_tokens"]
  return _divergence(student, teacher, canvas)


@nnx.jit(static_argnames="denoising_steps")
def _own_kl(
  student, teacher, windows, draw, *, denoising_steps
) -> do.LossOutput:
  canvas = canvases.roll_out(
    network.scorer(student),
    windows,
    jnp.arange(len(windows)) + draw * len(windows),
    seed=SEED,
    denoising_steps=denoising_steps,
  )
  return _divergence(student, teacher, canvas)


def _hidden(windows: jax.Array, draw: jax.Array) -> do.DiffusionTokenBatch:
  key = jax.random.fold_in(jax.random.key(SEED), draw)
  return canvases.bound_batch(key, windows)


def _divergence(student, teacher, canvas) -> do.LossOutput:
  batch = canvases.scored(network.scorer(teacher), canvas, canvas)
  return do.forward_kl_loss(
    network.logits(student, batch.student_batch.model_inputs),
    batch,
    denominator="masked",
  )
