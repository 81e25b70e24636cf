"""Forward KL and the on-policy mix: laws, closed forms, infinities."""

import functools

import diffusion_objectives as do
from diffusion_objectives.testing import laws
from diffusion_objectives.testing import strategies
from tests import oracles


def kl_oracle(logits, batch, *, temperature=1.0, scale=True, unit=None):
  student = batch.student_batch
  divergences = oracles.forward_kl(batch.teacher.logits, logits, temperature)
  factor = temperature**2 if scale else 1.0
  return (
    factor * oracles.weighted(divergences, student.loss_weights),
    oracles.denominator(student, unit),
  )


def opd_oracle(logits, batch, *, temperature, soft, hard, unit=None):
  student = batch.student_batch
  total, denominator = 0.0, oracles.denominator(student, unit)
  if soft:
    total += soft * kl_oracle(logits, batch, temperature=temperature)[0]
  if hard:
    total += hard * oracles.weighted(
      oracles.nll(logits, student.target_ids), student.loss_weights
    )
  return total, denominator


distillation_suite = functools.partial(
  laws.suite, build=strategies.distillation_case
)

TestForwardKL = distillation_suite(
  functools.partial(do.forward_kl_loss, temperature=2.0),
  oracle=functools.partial(kl_oracle, temperature=2.0),
  uses_targets=False,
)
TestForwardKLUnscaled = distillation_suite(
  functools.partial(
    do.forward_kl_loss,
    temperature=0.5,
    scale_by_temperature_squared=False,
    denominator="masked",
  ),
  oracle=functools.partial(
    kl_oracle, temperature=0.5, scale=False, unit="masked"
  ),
  uses_targets=False,
)
TestMix = distillation_suite(
  functools.partial(
    do.prepared_opd_loss,
    temperature=2.0,
    soft_loss_weight=0.7,
    hard_loss_weight=0.4,
  ),
  oracle=functools.partial(opd_oracle, temperature=2.0, soft=0.7, hard=0.4),
)
TestSoftOnly = distillation_suite(
  do.prepared_opd_loss,
  oracle=functools.partial(opd_oracle, temperature=1.0, soft=1.0, hard=0.0),
  uses_targets=False,
)
TestHardOnly = distillation_suite(
  functools.partial(
    do.prepared_opd_loss, soft_loss_weight=0.0, hard_loss_weight=1.0
  ),
  oracle=functools.partial(opd_oracle, temperature=1.0, soft=0.0, hard=1.0),
)
