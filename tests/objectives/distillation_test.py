"""Forward KL and the on-policy mix: laws, closed forms, infinities."""

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
      jax.value_and_grad(
        lambda s, t: numerics.token_forward_kl(t, s, temperature)
      )
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
    jax.value_and_grad(lambda s: numerics.token_forward_kl(s, s, 1.0))
  )(logits)
  assert not np.any(value)
  assert not np.any(gradient)


def test_a_large_temperature_leaves_the_centred_difference():
  """`T^2 KL` has the gradient `(z - mean z - (y - mean y)) / V` as T grows."""
  rng = np.random.default_rng(0)
  z, y = rng.standard_normal((2, 5)).astype(np.float32)
  temperature = 1e4
  gradient = temperature**2 * jax.grad(
    lambda s: numerics.token_forward_kl(y, s, temperature)
  )(jnp.asarray(z))
  expected = (z - z.mean() - (y - y.mean())) / 5
  np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-4)


def test_second_and_forward_derivatives_exist():
  rng = np.random.default_rng(0)
  z, y, u = rng.standard_normal((3, 6)).astype(np.float32)

  def loss(s):
    return numerics.token_forward_kl(y, s, 2.0)

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
