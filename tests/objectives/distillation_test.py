"""Distillation: laws of every divergence and teacher, digits, refusals."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffusion_objectives as do
from diffusion_objectives._core import numerics
from diffusion_objectives.testing import laws
from diffusion_objectives.testing import strategies
from tests import oracles

token_forward_kl = functools.partial(
  numerics.token_divergence, do.divergences.forward_kl
)


def kl_oracle(logits, batch, *, temperature=1.0, scale=True, unit=None):
  student = batch.student_batch
  divergences = oracles.forward_kl(batch.teacher.logits, logits, temperature)
  factor = temperature**2 if scale else 1.0
  return (
    factor * oracles.weighted(divergences, student.loss_weights),
    oracles.denominator(student, unit),
  )


def divergence_oracle(logits, batch, *, of, temperature=1.0, scale=True):
  """Of any divergence `of(log_p, log_q)` and any teacher of categories."""
  student = batch.student_batch
  values = of(*oracles.categories(batch.teacher, logits, temperature))
  return (
    (temperature**2 if scale else 1.0)
    * oracles.weighted(values, student.loss_weights),
    oracles.denominator(student),
  )


def opd_oracle(
  logits,
  batch,
  *,
  temperature,
  soft,
  hard,
  unit=None,
  of=oracles.relative_entropy,
):
  student = batch.student_batch
  total, denominator = 0.0, oracles.denominator(student, unit)
  if soft:
    total += (
      soft * divergence_oracle(logits, batch, of=of, temperature=temperature)[0]
    )
  if hard:
    total += hard * oracles.weighted(
      oracles.nll(logits, student.target_ids), student.loss_weights
    )
  return total, denominator


def sampled_oracle(logits, batch, *, temperature=1.0):
  student = batch.student_batch
  rows = oracles.log_softmax(logits, temperature)
  log_q = np.take_along_axis(rows, student.target_ids[..., None], axis=-1)
  ratio = log_q[..., 0] - np.float64(batch.teacher.log_probs)
  return (
    temperature**2 * oracles.weighted(ratio**2 / 2, student.loss_weights),
    oracles.denominator(student),
  )


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


def divergence_suite(divergence, of, temperature=1.0, **options):
  return laws.suite(
    functools.partial(
      do.divergence_loss, divergence=divergence, temperature=temperature
    ),
    oracle=functools.partial(divergence_oracle, of=of, temperature=temperature),
    uses_targets=False,
    **{"build": strategies.distillation_case} | options,
  )


def jensen_shannon(beta, normalize=False):
  """The divergence and its oracle."""
  return do.divergences.jensen_shannon(beta, normalize), functools.partial(
    oracles.jensen_shannon, beta=beta, normalize=normalize
  )


def off_the_kinks(regime):
  """A case on which total variation has a derivative.

  It has none where `p == q`. Cases are drawn anew until no student logit that
  moves by 1e-4 crosses that, or all are equal (there the gradient is 0).
  """
  while True:
    case = strategies.distillation_case(regime)
    p, q = (
      oracles.softmax(z) for z in (case.batch.teacher.logits, case.prediction)
    )
    if not regime.scale or np.all(np.abs(p - q) > 1e-3 * q * (1 - q)):
      return case
    regime = dataclasses.replace(regime, seed=regime.seed + 1)


TestReverseKL = divergence_suite(
  do.divergences.reverse_kl, oracles.reverse_kl, temperature=2.0
)
TestJensenShannon = divergence_suite(*jensen_shannon(0.5), temperature=2.0)
TestJensenShannonNormalized = divergence_suite(*jensen_shannon(0.1, True))
TestSkewForwardKL = divergence_suite(
  do.divergences.skew_forward_kl(0.1),
  functools.partial(oracles.skew_forward_kl, ratio=0.1),
  temperature=0.5,
)
TestSkewReverseKL = divergence_suite(
  do.divergences.skew_reverse_kl(0.2),
  functools.partial(oracles.skew_reverse_kl, ratio=0.2),
)
TestTotalVariation = divergence_suite(
  do.divergences.total_variation, oracles.total_variation, build=off_the_kinks
)
TestTopK = divergence_suite(
  do.divergences.forward_kl,
  oracles.relative_entropy,
  temperature=2.0,
  build=functools.partial(strategies.top_k_case, temperature=2.0),
)
TestTopKJensenShannon = divergence_suite(
  *jensen_shannon(0.5), build=strategies.top_k_case
)
TestTopKMix = laws.suite(
  functools.partial(
    do.prepared_opd_loss,
    temperature=2.0,
    soft_loss_weight=0.7,
    hard_loss_weight=0.4,
    divergence=jensen_shannon(0.1)[0],
  ),
  oracle=functools.partial(
    opd_oracle, temperature=2.0, soft=0.7, hard=0.4, of=jensen_shannon(0.1)[1]
  ),
  build=functools.partial(strategies.top_k_case, temperature=2.0),
)
TestSampled = laws.suite(
  functools.partial(do.sampled_reverse_kl_loss, temperature=2.0),
  oracle=functools.partial(sampled_oracle, temperature=2.0),
  build=functools.partial(strategies.sampled_case, temperature=2.0),
)


# Digits: against float64, at a vocabulary of 32,000.


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize(
  ("noise", "offset", "value_error", "gradient_error"),
  [
    (1e-5, 0.0, 2e-4, 1e-6),
    (1e-3, 0.0, 2e-6, 1e-6),
    (1e-3, 5.0, 1e-4, 3e-3),  # the offset itself rounds the logits
    (0.1, 0.0, 2e-6, 1e-6),
    (30.0, 0.0, 2e-6, 1e-6),
  ],
)
def test_divergences_keep_their_digits(
  noise, offset, value_error, gradient_error, temperature
):
  rng = np.random.default_rng(0)
  teacher = rng.standard_normal((4, 32_000)).astype(np.float32)
  change = noise * rng.standard_normal(teacher.shape)
  student = (teacher + change).astype(np.float32) + np.float32(offset)
  value, gradient = jax.jit(
    jax.vmap(
      jax.value_and_grad(lambda s, t: token_forward_kl(t, s, temperature))
    )
  )(student, teacher)
  expected = oracles.forward_kl(teacher, student, temperature)
  slope = oracles.softmax(student, temperature) - oracles.softmax(
    teacher, temperature
  )
  np.testing.assert_allclose(value, expected, rtol=value_error)
  difference = np.linalg.norm(gradient - slope / temperature)
  assert difference <= gradient_error * np.linalg.norm(slope / temperature)


def test_equal_distributions_have_value_and_gradient_0():
  rng = np.random.default_rng(0)
  logits = 30 * rng.standard_normal((4, 1000)).astype(np.float32)
  value, gradient = jax.vmap(
    jax.value_and_grad(lambda s: token_forward_kl(s, s, 1.0))
  )(logits)
  assert not np.any(value)
  assert not np.any(gradient)


def test_a_large_temperature_leaves_the_centred_difference():
  """`T^2 KL` has the gradient `(z - mean z - (y - mean y)) / V` as T grows."""
  rng = np.random.default_rng(0)
  z, y = rng.standard_normal((2, 5)).astype(np.float32)
  temperature = 1e4
  gradient = temperature**2 * jax.grad(
    lambda s: token_forward_kl(y, s, temperature)
  )(jnp.asarray(z))
  expected = (z - z.mean() - (y - y.mean())) / 5
  np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-4)


def test_second_and_forward_derivatives_exist():
  rng = np.random.default_rng(0)
  z, y, u = rng.standard_normal((3, 6)).astype(np.float32)

  def loss(s):
    return token_forward_kl(y, s, 2.0)

  q = oracles.softmax(z, 2.0)
  hessian = (np.diag(q) - np.outer(q, q)) / 4
  product = jax.jvp(jax.grad(loss), (z,), (u,))[1]
  np.testing.assert_allclose(product, hessian @ u, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"temperature": 1e-20}, "the square of temperature must be within"),
    ({"temperature": 1e-45}, "temperature must be within float32"),
    ({"temperature": 1e200}, "temperature must be within float32"),
    ({"temperature": 1e20}, "the square of temperature must be within"),
    ({"soft_loss_weight": 1e-60}, "soft_loss_weight must be within float32"),
    ({"hard_loss_weight": 1e300}, "hard_loss_weight must be within float32"),
  ],
)
def test_what_float32_cannot_hold_is_refused(options, message):
  case = strategies.distillation_case(
    strategies.Regime((2, 4, 6), 1.0, "all", 0)
  )
  with pytest.raises(ValueError, match=f"^{message}.*; received"):
    do.prepared_opd_loss(case.prediction, case.batch, **options)


@pytest.mark.parametrize("hard", [0.0, 1.0])
@pytest.mark.parametrize("weight", [-1.0, np.nan, np.inf])
def test_a_refused_weight_is_nan_under_trace(weight, hard):
  case = strategies.distillation_case(
    strategies.Regime((2, 4, 6), 1.0, "all", 0)
  )
  weights = np.array(case.batch.student_batch.loss_weights)
  weights[0, 0] = weight
  for supervised in (True, False):
    batch = strategies.replace_tokens(
      case.batch,
      loss_weights=weights if supervised else np.ones_like(weights),
      is_supervised=np.full(weights.shape, supervised),
    )
    output = jax.jit(
      functools.partial(do.prepared_opd_loss, hard_loss_weight=hard)
    )(case.prediction, batch)
    assert np.isnan(output.primary_loss.compute())
