"""Distillation: laws of every divergence and teacher, digits, refusals."""

import dataclasses
import functools
import itertools

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


TestReverseKL = distillation_suite(
  functools.partial(
    do.divergence_loss, divergence=do.divergences.reverse_kl, temperature=2.0
  ),
  oracle=functools.partial(
    divergence_oracle, of=oracles.reverse_kl, temperature=2.0
  ),
  uses_targets=False,
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


# Top-k teachers.


def of_teacher(teacher, weights):
  """A batch of one row whose positions have the weights."""
  ids = np.zeros((1, len(weights)), np.int32)
  return do.DiffusionDistillationBatch(
    student_batch=do.DiffusionTokenBatch(
      model_inputs={"x": ids}, target_ids=ids, loss_weights=weights[None]
    ),
    teacher=teacher,
  )


def top_k(log_p, k, temperature=1.0):
  """The `k` largest of log-probabilities `[positions, V]`, in `V` slots."""
  ids = np.argsort(-log_p, axis=-1)[None].astype(np.int32)
  return do.TopKTeacher(
    token_ids=ids,
    log_probs=np.take_along_axis(log_p[None], ids, -1).astype(np.float32),
    temperature=temperature,
    is_valid=np.broadcast_to(np.arange(ids.shape[-1]) < k, ids.shape),
  )


@functools.partial(jax.jit, static_argnums=2)
def per_token(logits, teacher, divergence):
  """The loss of each position, and its gradient; `logits [positions, V]`."""

  def total(weights, logits):
    return do.divergence_loss(
      logits[None], of_teacher(teacher, weights), divergence=divergence
    ).primary_loss.unreduced_sum

  # A sum's slope in the weights is what they weigh.
  return jax.grad(total, argnums=(0, 1))(jnp.ones(len(logits)), logits)


FORWARD = do.divergences.forward_kl
KINDS = [
  FORWARD,
  do.divergences.reverse_kl,
  do.divergences.jensen_shannon(0.3),
  do.divergences.skew_reverse_kl(0.1),
  do.divergences.total_variation,
]
all_kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda d: d.name)


def logits_of_scale(scale, positions=40, vocabulary=7, seed=0):
  shape = (2, positions, vocabulary)
  return scale * np.random.default_rng(seed).standard_normal(shape)


@all_kinds
def test_a_list_of_all_ids_is_the_dense_teacher(kind):
  for scale in (1.0, 30.0):
    y, z = np.float32(logits_of_scale(scale))
    full = top_k(oracles.log_softmax(y), k=7)
    dense = do.DenseTeacher(logits=y[None])
    for listed, whole in zip(
      per_token(z, full, kind), per_token(z, dense, kind), strict=True
    ):
      np.testing.assert_allclose(listed, whole, rtol=1e-5, atol=1e-5)


@all_kinds
def test_a_longer_list_tells_more_apart(kind):
  """Merging categories never increases a divergence."""
  y, z = np.float32(logits_of_scale(2.0))
  log_p = oracles.log_softmax(y)
  values = [
    np.asarray(per_token(z, top_k(log_p, k=k), kind)[0]) for k in (1, 2, 4, 7)
  ]
  for shorter, longer in itertools.pairwise(values):
    assert np.all(shorter <= longer + 1e-6)
  assert np.any(values[0] < 0.5 * values[-1])


@all_kinds
def test_a_student_equal_to_the_teacher_has_no_divergence(kind):
  """AI-Hypercomputer/maxtext#4056: renormalised on its list, 0.2231."""
  p = np.array([[0.5, 0.3, 0.1, 0.1]])
  value, gradient = per_token(np.float32(np.log(p)), top_k(np.log(p), 2), kind)
  np.testing.assert_allclose(value, 0, atol=3e-7)
  np.testing.assert_allclose(gradient, 0, atol=3e-7 if kind != KINDS[-1] else 1)


def test_the_tail_is_a_category():
  """axolotl#2700: 0.424828 without it, and 0 where both are renormalised."""
  p, q = np.array([[[0.5, 0.3, 0.1, 0.1]], [[0.7, 0.1, 0.1, 0.1]]])
  value, gradient = per_token(
    np.float32(np.log(q)), top_k(np.log(p), 2), FORWARD
  )
  np.testing.assert_allclose(value, 0.161348, rtol=1e-5)
  # The tail's mass 0.2 is spread as the student spreads its own.
  np.testing.assert_allclose(gradient, q - [[0.5, 0.3, 0.1, 0.1]], atol=1e-6)


def test_vocabulary_ids_are_only_names():
  y, z = np.float32(logits_of_scale(1.0))
  order = np.random.default_rng(1).permutation(7)
  teacher = top_k(oracles.log_softmax(y), 3)
  value, gradient = per_token(z, teacher, FORWARD)
  moved = dataclasses.replace(
    teacher, token_ids=np.argsort(order)[teacher.token_ids].astype(np.int32)
  )
  permuted, slope = per_token(z[:, order], moved, FORWARD)
  np.testing.assert_allclose(permuted, value, rtol=1e-5)
  np.testing.assert_allclose(slope, gradient[:, order], atol=1e-6)


def test_the_tail_of_a_confident_student_keeps_its_digits():
  """`log1p(-sum)` of the listed is -inf here, with a NaN gradient."""
  z = np.float32([[30, 29, 0, 0]])
  rows = numerics.list_and_tail(
    jnp.asarray(z), jnp.array([[0, 1]]), jnp.ones((1, 2), bool), 1.0
  )
  log_q = numerics.log_softmax(rows)[0]
  assert float(log_q[0, -1]) == pytest.approx(
    np.log(2) - np.logaddexp(30, 29), rel=1e-6
  )
  teacher = top_k(np.log([[0.6, 0.3, 0.05, 0.05]]), 2)
  value, gradient = per_token(z, teacher, FORWARD)
  expected = (
    0.6 * np.log(0.6)
    + 0.3 * np.log(0.3)
    + 0.1 * np.log(0.1)
    - (np.dot([0.6, 0.3, 0.1], np.float64(log_q[0])))
  )
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  np.testing.assert_allclose(gradient[0, 2:], -0.05, rtol=1e-5)


@all_kinds
def test_exclusions_give_no_nan(kind):
  z = np.float32([0.3, -0.2, 0.1, 0.5])
  listed = np.log([0.5, 0.3, 0.1, 0.1])
  short, all_of_it = at(z, [2, 3], -np.inf), at(listed, [2, 3], -np.inf)
  excluded = [
    (z, listed, 2, (0,)),  # the teacher excludes a listed id
    (at(z, [0], -np.inf), listed, 2, ()),  # the student does
    (at(z, [0], -np.inf), listed, 2, (0,)),  # both do
    (short, listed, 2, ()),  # the student's tail is empty
    (short, all_of_it - np.log(0.8), 4, ()),
  ]
  for student, log_p, k, out in excluded:
    teacher = top_k(log_p[None], k)
    teacher = dataclasses.replace(
      teacher, log_probs=at(teacher.log_probs, (..., list(out)), -np.inf)
    )
    value, gradient = per_token(student[None], teacher, kind)
    assert not np.isnan(value).any() and np.isfinite(gradient).all()
    expected = {
      FORWARD: oracles.relative_entropy,
      do.divergences.reverse_kl: oracles.reverse_kl,
    }.get(kind)
    if expected:
      rows = oracles.categories(teacher, student[None, None])
      np.testing.assert_allclose(value, expected(*rows)[0], rtol=1e-5)
    else:
      assert np.isfinite(value).all()


def at(array, position, value):
  array = np.array(array)
  array[position] = value
  return array


def test_rounding_of_stored_probabilities_is_divided_out():
  p = np.array([[0.6, 0.4, 1e-30]])
  z = np.float32([[0.1, 0.2, -0.3]])
  exact, _ = per_token(z, top_k(np.log(p), 2), FORWARD)
  above, _ = per_token(z, top_k(np.log(1.0008 * p), 2), FORWARD)
  np.testing.assert_allclose(above, exact, rtol=1e-5)


def test_metrics_of_a_top_k_teacher():
  p = np.array([[0.1, 0.3, 0.5, 0.1], [0.1, 0.3, 0.5, 0.1]])
  z = np.float32([[0, 0, 2, 0], [0, 0, 0, 2]])
  batch = of_teacher(top_k(np.log(p), 2), np.ones(2, np.float32))
  metrics = do.forward_kl_loss(z[None], batch).aux_metrics
  assert metrics["distill/top1_agreement"].compute() == 0.5
  entropy = -np.dot([0.5, 0.3, 0.2], np.log([0.5, 0.3, 0.2]))
  np.testing.assert_allclose(
    metrics["distill/teacher_entropy"].compute(), entropy, rtol=1e-6
  )
  q = oracles.softmax(z)
  rows = np.stack([q[:, 1], q[:, 2], q[:, 0] + q[:, 3]], -1)
  np.testing.assert_allclose(
    metrics["distill/student_entropy"].compute(),
    -(rows * np.log(rows)).sum(-1).mean(),
    rtol=1e-6,
  )


@all_kinds
def test_a_teacher_of_lower_precision_gives_no_negative_value(kind):
  """ms-swift#10156: -0.000170 with the teacher left in bfloat16."""
  y, z = np.float32(logits_of_scale(1.0))
  z = y + np.float32(0.02) * z
  narrow = jnp.asarray(y[None], jnp.bfloat16)
  wide = do.DenseTeacher(logits=np.asarray(narrow, np.float32))
  value, _ = per_token(z, do.DenseTeacher(logits=narrow), kind)
  expected, _ = per_token(z, wide, kind)
  assert np.all(np.asarray(value) >= 0)
  np.testing.assert_array_equal(value, expected)


# Sampled ids.


def sampled(log_p, ids, temperature=1.0):
  """One position an id, each with the teacher's log-probability of it."""
  teacher = do.SampledTokenTeacher(
    log_probs=np.float32(log_p)[None, ids], temperature=temperature
  )
  return strategies.replace_tokens(
    of_teacher(teacher, np.ones(len(ids), np.float32)),
    target_ids=np.int32([ids]),
  )


def test_the_expected_gradient_is_that_of_the_reverse_kl():
  """verl#2953: k1 as a loss has 0 here, and k3 [-.58, .29, .29]."""
  p, q = np.array([[0.98, 0.01, 0.01], [0.4, 0.3, 0.3]])
  batch = sampled(np.log(p), [0, 1, 2])
  weights = q[None].astype(np.float32)  # the expectation, by enumeration
  batch = strategies.replace_tokens(batch, loss_weights=weights)

  def total(z):
    logits = jnp.broadcast_to(z, (1, 3, 3))
    return do.sampled_reverse_kl_loss(logits, batch).primary_loss.unreduced_sum

  z = jnp.log(q.astype(np.float32))
  np.testing.assert_allclose(
    jax.grad(total)(z), [-1.031, 0.516, 0.516], atol=1e-3
  )
  kl = jax.grad(
    lambda z: numerics.token_divergence(
      do.divergences.reverse_kl, jnp.log(p.astype(np.float32)), z, 1.0
    )
  )(z)
  np.testing.assert_allclose(jax.grad(total)(z), kl, rtol=1e-5)


def test_the_estimates_are_of_the_reverse_kl():
  rng = np.random.default_rng(0)
  y, z = np.float32(rng.standard_normal((2, 3)))
  log_p, log_q = oracles.log_softmax(y), oracles.log_softmax(z)
  logits = np.broadcast_to(z, (1, 3, 3))
  estimates = {"k1": 0.0, "k3": 0.0}
  for token in range(3):
    metrics = do.sampled_reverse_kl_loss(
      logits[:, :1], sampled(log_p, [token])
    ).aux_metrics
    for name in estimates:
      value = metrics[f"distill/reverse_kl_{name}"].compute()
      estimates[name] += np.exp(log_q[token]) * float(value)
  kl = oracles.reverse_kl(log_p, log_q)
  assert estimates == pytest.approx({"k1": kl, "k3": kl}, rel=1e-5)


def test_k3_keeps_its_digits():
  z = np.zeros((1, 1, 2), np.float32)
  batch = sampled(np.log([0.5, 0.5]) - 1e-3, [0])
  metric = do.sampled_reverse_kl_loss(z, batch).aux_metrics
  ratio = np.log(0.5) - float(batch.teacher.log_probs[0, 0])
  np.testing.assert_allclose(
    metric["distill/reverse_kl_k3"].compute(),
    np.exp(-ratio) - 1 + ratio,
    rtol=2e-4,  # of the ratio's own rounding
  )


def test_an_excluded_sample_is_inf_without_a_gradient():
  for log_p, z in (([-np.inf, 0.0], [0.0, 0.0]), ([-1.0, -1.0], [-np.inf, 0])):
    batch = sampled(log_p, [0, 1])

    def total(logits, batch=batch):
      output = do.sampled_reverse_kl_loss(logits, batch)
      return output.primary_loss.unreduced_sum, output

    logits = jnp.broadcast_to(np.float32(z), (1, 2, 2))
    gradient, output = jax.grad(total, has_aux=True)(logits)
    assert output.primary_loss.unreduced_sum == np.inf
    assert np.isfinite(gradient).all() and not gradient[0, 0].any()
    assert not any(np.isnan(x) for x in jax.tree.leaves(output))


def test_a_large_temperature_leaves_a_gradient_for_samples():
  """`T^2 dk2/dz` of one id tends to `(D T) (onehot - 1/V)`."""
  y, z = np.float32(logits_of_scale(1.0, positions=1, vocabulary=5))[:, 0]
  temperature = 1e3
  log_p = oracles.log_softmax(y, temperature)
  batch = sampled(log_p, [2], temperature)
  gradient = jax.grad(
    lambda z: (
      do.sampled_reverse_kl_loss(
        z[None, None], batch, temperature=temperature
      ).primary_loss.unreduced_sum
    )
  )(z)
  gap = (z - z.mean() - (y - y.mean()))[2]
  expected = gap * (np.arange(5) == 2) - gap / 5
  np.testing.assert_allclose(gradient, expected, rtol=1e-2, atol=1e-3)


# What is refused.


def refusal_case(kind):
  regime = strategies.Regime((2, 4, 6), 1.0, "all", 0)
  return {
    "dense": strategies.distillation_case,
    "top-k": strategies.top_k_case,
    "sampled": strategies.sampled_case,
  }[kind](regime)


TOTAL_VARIATION = do.divergences.total_variation


@pytest.mark.parametrize(
  ("loss", "kind", "options", "error", "message"),
  [
    (
      do.forward_kl_loss,
      "sampled",
      {},
      TypeError,
      "teacher must be a DenseTeacher or TopKTeacher; received"
      " SampledTokenTeacher",
    ),
    (
      do.prepared_opd_loss,
      "sampled",
      {},
      TypeError,
      "teacher must be a DenseTeacher or TopKTeacher; received"
      " SampledTokenTeacher",
    ),
    (
      do.sampled_reverse_kl_loss,
      "top-k",
      {},
      TypeError,
      "teacher must be a SampledTokenTeacher; received TopKTeacher",
    ),
    (
      do.forward_kl_loss,
      "top-k",
      {"temperature": 2.0},
      ValueError,
      "temperature must be that of the teacher's log_probs; received 2.0 and"
      " a teacher at 1.0",
    ),
    (
      do.sampled_reverse_kl_loss,
      "sampled",
      {"temperature": 0.5},
      ValueError,
      "temperature must be that of the teacher's log_probs; received 0.5 and"
      " a teacher at 1.0",
    ),
    (
      do.divergence_loss,
      "dense",
      {"divergence": TOTAL_VARIATION, "temperature": 2.0},
      ValueError,
      "a divergence that is scaled by T^2 must be of second order where the"
      " distributions are near, or at temperature 1 (divergence_loss has"
      " scale_by_temperature_squared=False); received total_variation at"
      " temperature 2.0",
    ),
    (
      do.prepared_opd_loss,
      "dense",
      {"divergence": TOTAL_VARIATION, "temperature": 2.0},
      ValueError,
      "a divergence that is scaled by T^2 must be of second order where the"
      " distributions are near, or at temperature 1 (divergence_loss has"
      " scale_by_temperature_squared=False); received total_variation at"
      " temperature 2.0",
    ),
    (
      do.divergence_loss,
      "dense",
      {"divergence": "forward_kl"},
      TypeError,
      "divergence must be a Divergence; received str",
    ),
  ],
)
def test_what_does_not_fit_is_refused(loss, kind, options, error, message):
  case = refusal_case(kind)
  with pytest.raises(error) as raised:
    loss(case.prediction, case.batch, **options)
  assert str(raised.value) == message


def test_total_variation_has_a_temperature_without_its_square():
  case = refusal_case("dense")
  output = do.divergence_loss(
    case.prediction,
    case.batch,
    divergence=TOTAL_VARIATION,
    temperature=2.0,
    scale_by_temperature_squared=False,
  )
  expected = divergence_oracle(
    case.prediction,
    case.batch,
    of=lambda *_: oracles.total_variation(
      *oracles.categories(case.batch.teacher, case.prediction, 2.0)
    ),
  )
  np.testing.assert_allclose(
    output.primary_loss.unreduced_sum, expected[0], rtol=1e-5
  )


def test_a_teacher_that_is_not_used_is_not_asked():
  case = refusal_case("sampled")
  output = do.prepared_opd_loss(
    case.prediction,
    case.batch,
    temperature=2.0,
    soft_loss_weight=0.0,
    hard_loss_weight=1.0,
  )
  assert np.isfinite(output.primary_loss.compute())
