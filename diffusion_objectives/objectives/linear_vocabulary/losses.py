"""Stand-in losses: through dense logits."""

import dataclasses

import jax
import jax.numpy as jnp

from diffusion_objectives import batches
from diffusion_objectives._core import checks
from diffusion_objectives._core import numerics
from diffusion_objectives.objectives import cross_entropy
from diffusion_objectives.objectives import distillation


def linear_weighted_cross_entropy_loss(
  hidden,
  head,
  batch,
  *,
  denominator=None,
  implementation=None,
  token_block=None,
  vocabulary_block=None,
):
  return cross_entropy.weighted_cross_entropy_loss(
    head.logits(hidden), batch, denominator=denominator
  )


def _dense(batch, teacher_head):
  if isinstance(batch.teacher, batches.HiddenTeacher):
    teacher = batches.DenseTeacher(
      logits=jax.lax.stop_gradient(
        teacher_head.logits(jnp.asarray(batch.teacher.hidden))
      )
    )
    return dataclasses.replace(batch, teacher=teacher)
  return batch


def linear_forward_kl_loss(
  hidden,
  head,
  batch,
  *,
  teacher_head=None,
  temperature=1.0,
  scale_by_temperature_squared=True,
  denominator=None,
  implementation=None,
  token_block=None,
  vocabulary_block=None,
):
  return distillation.forward_kl_loss(
    head.logits(hidden),
    _dense(batch, teacher_head),
    temperature=temperature,
    scale_by_temperature_squared=scale_by_temperature_squared,
    denominator=denominator,
  )


def linear_prepared_opd_loss(
  hidden,
  head,
  batch,
  *,
  teacher_head=None,
  temperature=1.0,
  soft_loss_weight=1.0,
  hard_loss_weight=0.0,
  denominator=None,
  implementation=None,
  token_block=None,
  vocabulary_block=None,
):
  return distillation.prepared_opd_loss(
    head.logits(hidden),
    _dense(batch, teacher_head),
    temperature=temperature,
    soft_loss_weight=soft_loss_weight,
    hard_loss_weight=hard_loss_weight,
    denominator=denominator,
  )


def linear_token_log_probs(
  hidden,
  head,
  batch,
  *,
  temperature=1.0,
  token_block=None,
  vocabulary_block=None,
):
  """`[batch, length]` log-probabilities of the targets, 0 at weight 0."""
  logits = head.logits(hidden)
  dtype = logits.dtype
  _, is_active = batches.position_weights(batch, dtype)
  return jnp.where(
    is_active,
    -numerics.token_negative_log_likelihood(
      numerics.clean_rows(logits, is_active, dtype),
      numerics.clean_ids(batch.target_ids, is_active),
      checks.temperature(temperature),
    ),
    0,
  )
