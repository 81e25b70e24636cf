"""The laws have teeth: every planted bug is named, at each of 20 seeds.

And they have no prejudice: correct losses of unusual form pass all of them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffusion_objectives as do
from diffusion_objectives.testing import laws
from diffusion_objectives.testing import strategies
from tests import oracles
from tests.objectives import cross_entropy_test
from tests.objectives import distillation_test

SEEDS = range(20)


def metric(total, denominator):
  return do.WeightedMetric(
    unreduced_sum=total.astype(jnp.float32),
    denominator=denominator.astype(jnp.float32),
  )


def output(total, denominator, **aux_metrics):
  return do.LossOutput(
    primary_loss=metric(total, denominator), aux_metrics=aux_metrics
  )


def by_weights(batch):
  """The batch's default denominator, written out."""
  counted = (
    batch.loss_weights if batch.is_supervised is None else batch.is_supervised
  )
  return jnp.sum(jnp.asarray(counted), dtype=jnp.float32)


def safe(logits, batch):
  """Weights, activity, cleaned logits and ids, and the ids' validity."""
  weights = jnp.asarray(batch.loss_weights)
  active = weights != 0
  z = jnp.where(active[..., None], logits.astype(jnp.float32), 0)
  ids = jnp.where(active, batch.target_ids, 0)
  is_valid = (ids >= 0) & (ids < z.shape[-1])
  return weights, active, z, jnp.where(is_valid, ids, 0), is_valid


def token_losses(z, ids):
  rows = jax.nn.log_softmax(z)
  return -jnp.take_along_axis(rows, ids[..., None], axis=-1)[..., 0]


def total_of(logits, batch, transform=lambda losses: losses):
  weights, active, z, ids, is_valid = safe(logits, batch)
  losses = jnp.where(is_valid, transform(token_losses(z, ids)), jnp.nan)
  return jnp.sum(jnp.where(active, weights * losses, 0))


def correct(logits, batch):
  return output(total_of(logits, batch), by_weights(batch))


# Planted bugs of the cross entropy.


def denominator_by_count(logits, batch):
  return output(total_of(logits, batch), jnp.sum(batch.loss_weights > 0))


def denominator_clamped_to_1(logits, batch):
  return output(total_of(logits, batch), jnp.maximum(by_weights(batch), 1))


def epsilon_added(logits, batch):
  return output(total_of(logits, batch), by_weights(batch) + 1e-8)


def mask_by_multiplication(logits, batch):
  losses = token_losses(logits.astype(jnp.float32), batch.target_ids)
  return output(jnp.sum(losses * batch.loss_weights), by_weights(batch))


def where_only_after(logits, batch):
  weights = jnp.asarray(batch.loss_weights)
  losses = token_losses(logits.astype(jnp.float32), batch.target_ids)
  total = jnp.sum(jnp.where(weights != 0, losses * weights, 0))
  return output(total, by_weights(batch))


def mean_returned_as_sum(logits, batch):
  denominator = by_weights(batch)
  total = total_of(logits, batch)
  mean = jnp.where(denominator == 0, 0, total) / jnp.where(
    denominator == 0, 1, denominator
  )
  return output(mean, denominator)


def bfloat16_accumulation(logits, batch):
  weights, active, z, ids, is_valid = safe(logits, batch)
  losses = jnp.where(is_valid, token_losses(z, ids), jnp.nan)
  terms = jnp.where(active, weights * losses, 0).astype(jnp.bfloat16)
  return output(jnp.sum(terms), by_weights(batch))


def shifted_by_one(logits, batch):
  return correct(jnp.roll(logits, 1, axis=1), batch)


def ids_wrapped(logits, batch):
  weights, active, z, _, _ = safe(logits, batch)
  ids = jnp.where(active, batch.target_ids, 0) % z.shape[-1]
  total = jnp.sum(jnp.where(active, weights * token_losses(z, ids), 0))
  return output(total, by_weights(batch))


def metrics_averaged(logits, batch):
  _, active, z, ids, _ = safe(logits, batch)
  hits = jnp.sum((jnp.argmax(z, axis=-1) == ids) & active)
  accuracy = hits / jnp.maximum(jnp.sum(active), 1)
  return output(
    total_of(logits, batch),
    by_weights(batch),
    accuracy=metric(accuracy, jnp.float32(1)),
  )


# Planted bugs of the divergence.


def kl_total(logits, batch, temperature=2.0, reverse=False, stop=True):
  weights, active, z, _, _ = safe(logits, batch.student_batch)
  y = jnp.where(active[..., None], batch.teacher.logits, 0)
  y = jax.lax.stop_gradient(y) if stop else y
  log_q = jax.nn.log_softmax(z / temperature)
  log_p = jax.nn.log_softmax(y / temperature)
  if reverse:
    log_p, log_q = log_q, log_p
  divergence = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
  total = jnp.sum(jnp.where(active, weights * divergence, 0))
  return temperature**2 * total


def correct_kl(logits, batch):
  return output(kl_total(logits, batch), by_weights(batch.student_batch))


def temperature_squared_twice(logits, batch):
  return output(4 * kl_total(logits, batch), by_weights(batch.student_batch))


def gradient_into_the_teacher(logits, batch):
  total = kl_total(logits, batch, stop=False)
  return output(total, by_weights(batch.student_batch))


def kl_reversed(logits, batch):
  total = kl_total(logits, batch, reverse=True)
  return output(total, by_weights(batch.student_batch))


# Planted bugs of the other divergences, each in an otherwise right form.


def divergence_total(logits, batch, terms, teacher=None, temperature=1.0):
  """`T^2 sum w sum_v terms(log_p, log_q)`, with a log-softmax of each row."""
  weights, active, z, _, _ = safe(logits, batch.student_batch)
  if teacher is None:
    teacher = jax.nn.log_softmax(
      jnp.where(active[..., None], batch.teacher.logits, 0) / temperature
    )
  values = jnp.sum(
    terms(jax.lax.stop_gradient(teacher), jax.nn.log_softmax(z / temperature)),
    axis=-1,
  )
  total = jnp.sum(jnp.where(active, weights * values, 0))
  return output(temperature**2 * total, by_weights(batch.student_batch))


def relative_entropy(log_x, log_y):
  return jnp.exp(log_x) * (log_x - log_y)


def log_mixture(log_x, log_y, share):
  return jnp.logaddexp(log_x + np.log1p(-share), log_y + np.log(share))


def reverse_kl_written_forward(logits, batch):
  return divergence_total(logits, batch, relative_entropy)


def js_terms(log_p, log_q, beta, log_m):
  return beta * relative_entropy(log_p, log_m) + (1 - beta) * relative_entropy(
    log_q, log_m
  )


def mixture_of_log_probabilities(logits, batch):
  def terms(log_p, log_q):
    return js_terms(log_p, log_q, 0.1, 0.1 * log_p + 0.9 * log_q)

  return divergence_total(logits, batch, terms)


def beta_swapped(logits, batch):
  def terms(log_p, log_q):
    return js_terms(log_p, log_q, 0.1, log_mixture(log_p, log_q, 0.1))

  return divergence_total(logits, batch, terms)


def skew_on_the_wrong_side(logits, batch):
  def terms(log_p, log_q):
    return relative_entropy(log_p, log_mixture(log_p, log_q, 0.1))

  return divergence_total(logits, batch, terms)


def total_variation_without_the_half(logits, batch):
  def terms(log_p, log_q):
    return jnp.abs(jnp.exp(log_p) - jnp.exp(log_q))

  return divergence_total(logits, batch, terms)


# Planted bugs of top-k teachers.


def listed(logits, batch, temperature=2.0, stop=True):
  """Weights, activity, and log-probabilities of both sides on the list."""
  weights, active, z, _, _ = safe(logits, batch.student_batch)
  is_listed = jnp.broadcast_to(active[..., None], batch.teacher.token_ids.shape)
  if batch.teacher.is_valid is not None:
    is_listed &= batch.teacher.is_valid
  ids = jnp.where(is_listed, batch.teacher.token_ids, 0)
  log_p = jnp.where(is_listed, batch.teacher.log_probs, 0)
  log_p = jax.lax.stop_gradient(log_p) if stop else log_p
  log_q = jnp.take_along_axis(jax.nn.log_softmax(z / temperature), ids, axis=-1)
  return weights, active, is_listed, log_p, log_q


def list_total(batch, weights, active, values, temperature=2.0):
  total = jnp.sum(jnp.where(active, weights * values, 0))
  return output(temperature**2 * total, by_weights(batch.student_batch))


def tail_terms(is_listed, log_p, log_q):
  """Of the tail, from 1 minus the listed mass on both sides."""
  p, q = (
    jnp.sum(jnp.where(is_listed, jnp.exp(row), 0), axis=-1)
    for row in (log_p, log_q)
  )
  has_tail = p < 1 - 1e-6
  p = jnp.where(has_tail, p, 0.5)
  return jnp.where(has_tail, (1 - p) * (jnp.log1p(-p) - jnp.log1p(-q)), 0)


def list_terms(is_listed, log_p, log_q):
  return jnp.sum(
    jnp.where(is_listed, relative_entropy(log_p, log_q), 0), axis=-1
  )


def list_without_its_tail(logits, batch):
  weights, active, *rows = listed(logits, batch)
  return list_total(batch, weights, active, list_terms(*rows))


def list_renormalised(logits, batch):
  weights, active, is_listed, log_p, log_q = listed(logits, batch)
  rows = [
    row
    - jax.nn.logsumexp(
      jnp.where(is_listed | ~active[..., None], row, -jnp.inf),
      axis=-1,
      keepdims=True,
    )
    for row in (log_p, log_q)
  ]
  return list_total(batch, weights, active, list_terms(is_listed, *rows))


def tail_of_one_minus_the_list(logits, batch):
  weights, active, *rows = listed(logits, batch)
  values = list_terms(*rows) + tail_terms(*rows)
  return list_total(batch, weights, active, values)


def temperature_ignored_for_the_list(logits, batch):
  teacher = dataclasses.replace(batch.teacher, temperature=1.0)
  found = do.forward_kl_loss(
    logits, dataclasses.replace(batch, teacher=teacher)
  ).primary_loss
  return output(4 * found.unreduced_sum, found.denominator)


def gradient_into_the_list(logits, batch):
  weights, active, *rows = listed(logits, batch, stop=False)
  exact = do.forward_kl_loss(logits, batch, temperature=2.0).primary_loss
  leak = list_terms(rows[0], rows[1], jax.lax.stop_gradient(rows[2]))
  leak = leak - jax.lax.stop_gradient(leak)  # 0, but for its gradient
  total = jnp.sum(jnp.where(active, weights * leak, 0))
  return output(exact.unreduced_sum + total, exact.denominator)


def k3_as_the_loss(logits, batch):
  weights, active, z, ids, is_valid = safe(logits, batch.student_batch)
  log_p = jnp.where(active, batch.teacher.log_probs, 0)
  ratio = -token_losses(z / 2, ids) - jax.lax.stop_gradient(log_p)
  values = jnp.where(is_valid, jnp.expm1(-ratio) + ratio, jnp.nan)
  return list_total(batch, weights, active, values)


CROSS_ENTROPY = dict(oracle=cross_entropy_test.oracle)
DIVERGENCE = dict(
  oracle=functools.partial(distillation_test.kl_oracle, temperature=2.0),
  build=strategies.distillation_case,
  uses_targets=False,
)


def of_divergence(of, **options):
  return (
    dict(
      oracle=functools.partial(distillation_test.divergence_oracle, of=of),
      build=strategies.distillation_case,
      uses_targets=False,
    )
    | options
  )


JENSEN_SHANNON = of_divergence(
  functools.partial(oracles.jensen_shannon, beta=0.1)
)
TOP_K = dict(
  oracle=functools.partial(
    distillation_test.divergence_oracle,
    of=oracles.relative_entropy,
    temperature=2.0,
  ),
  build=functools.partial(strategies.top_k_case, temperature=2.0),
  uses_targets=False,
)
SAMPLED = dict(
  oracle=functools.partial(distillation_test.sampled_oracle, temperature=2.0),
  build=functools.partial(strategies.sampled_case, temperature=2.0),
)

BUGS = [
  (denominator_by_count, CROSS_ENTROPY, {"equals_oracle"}),
  (
    denominator_clamped_to_1,
    CROSS_ENTROPY,
    {"equals_oracle", "is_additive", "weights_scale_the_sum"},
  ),
  (epsilon_added, CROSS_ENTROPY, {"equals_oracle", "weights_scale_the_sum"}),
  (mask_by_multiplication, CROSS_ENTROPY, {"inactive_positions_are_inert"}),
  (where_only_after, CROSS_ENTROPY, {"inactive_positions_are_inert"}),
  (mean_returned_as_sum, CROSS_ENTROPY, {"equals_oracle"}),
  (bfloat16_accumulation, CROSS_ENTROPY, {"equals_oracle"}),
  (shifted_by_one, CROSS_ENTROPY, {"equals_oracle"}),
  (ids_wrapped, CROSS_ENTROPY, {"active_ids_outside_the_vocabulary_are_nan"}),
  (metrics_averaged, CROSS_ENTROPY, {"is_additive"}),
  (temperature_squared_twice, DIVERGENCE, {"equals_oracle"}),
  (gradient_into_the_teacher, DIVERGENCE, {"teacher_is_constant"}),
  (kl_reversed, DIVERGENCE, {"equals_oracle"}),
  (
    reverse_kl_written_forward,
    of_divergence(oracles.reverse_kl),
    {"equals_oracle"},
  ),
  (mixture_of_log_probabilities, JENSEN_SHANNON, {"equals_oracle"}),
  (beta_swapped, JENSEN_SHANNON, {"equals_oracle"}),
  (
    skew_on_the_wrong_side,
    of_divergence(functools.partial(oracles.skew_forward_kl, ratio=0.1)),
    {"equals_oracle"},
  ),
  (
    total_variation_without_the_half,
    of_divergence(
      oracles.total_variation, build=distillation_test.off_the_kinks
    ),
    {"equals_oracle"},
  ),
  (list_without_its_tail, TOP_K, {"equals_oracle"}),
  (list_renormalised, TOP_K, {"equals_oracle"}),
  (
    tail_of_one_minus_the_list,
    TOP_K,
    {"equals_oracle", "gradients_are_finite"},
  ),
  (temperature_ignored_for_the_list, TOP_K, {"equals_oracle"}),
  (gradient_into_the_list, TOP_K, {"teacher_is_constant"}),
  (k3_as_the_loss, SAMPLED, {"equals_oracle"}),
]


@pytest.mark.parametrize(
  ("bug", "subject", "names"), BUGS, ids=[bug.__name__ for bug, _, _ in BUGS]
)
def test_a_planted_bug_is_named_at_every_seed(bug, subject, names):
  found = laws.violations(bug, seeds=SEEDS, **subject)
  caught = [next(iter(broken), "none") for broken in found]
  counts = {name: caught.count(name) for name in sorted(set(caught))}
  print(f"{bug.__name__}: {counts}")
  assert set(caught) <= names


# Correct losses of unusual form.


def hand_written_log_softmax(logits, batch):
  weights, active, z, ids, is_valid = safe(logits, batch)
  top = jax.lax.stop_gradient(z.max(axis=-1))
  log_sum = top + jnp.log(jnp.exp(z - top[..., None]).sum(axis=-1))
  onehot = jax.nn.one_hot(ids, z.shape[-1], dtype=z.dtype)
  losses = log_sum - jnp.sum(z * onehot, axis=-1)
  losses = losses * jnp.where(is_valid, jnp.float32(1), jnp.float32(jnp.nan))
  return output(
    jnp.sum(jnp.where(active, weights * losses, 0)), by_weights(batch)
  )


@jax.custom_vjp
def nll_with_custom_derivative(z, ids):
  return token_losses(z, ids)


def _nll_forward(z, ids):
  return token_losses(z, ids), (z, ids)


def _nll_backward(saved, cotangent):
  z, ids = saved
  onehot = jax.nn.one_hot(ids, z.shape[-1], dtype=z.dtype)
  gradient = cotangent[..., None] * (jax.nn.softmax(z) - onehot)
  return gradient, np.zeros(ids.shape, jax.dtypes.float0)


nll_with_custom_derivative.defvjp(_nll_forward, _nll_backward)


def custom_derivative(logits, batch):
  weights, active, z, ids, is_valid = safe(logits, batch)
  losses = nll_with_custom_derivative(z, ids)
  losses = jnp.where(is_valid, losses, jnp.nan)
  return output(
    jnp.sum(jnp.where(active, weights * losses, 0)), by_weights(batch)
  )


def chunked_sum(logits, batch):
  weights, active, z, ids, is_valid = safe(logits, batch)

  def add(total, column):
    w, a, row, i, v = column
    losses = jnp.where(v, token_losses(row, i), jnp.nan)
    return total + jnp.sum(jnp.where(a, w * losses, 0)), None

  columns = jax.tree.map(
    lambda x: jnp.moveaxis(x, 1, 0), (weights, active, z, ids, is_valid)
  )
  total, _ = jax.lax.scan(add, jnp.float32(0), columns)
  return output(total, by_weights(batch))


def divided_by_rows(logits, batch):
  rows = jnp.sum(jnp.ones_like(batch.loss_weights[:, 0]))
  return output(total_of(logits, batch), rows)


def divided_by_rows_oracle(logits, batch):
  total, _ = cross_entropy_test.oracle(logits, batch)
  return total, float(len(batch.target_ids))


UNUSUAL = [
  (correct, CROSS_ENTROPY),
  (hand_written_log_softmax, CROSS_ENTROPY),
  (custom_derivative, CROSS_ENTROPY),
  (chunked_sum, CROSS_ENTROPY),
  (divided_by_rows, dict(oracle=divided_by_rows_oracle)),
  (correct_kl, DIVERGENCE),
]


@pytest.mark.parametrize(
  ("loss", "subject"), UNUSUAL, ids=[loss.__name__ for loss, _ in UNUSUAL]
)
def test_a_correct_loss_of_unusual_form_passes(loss, subject):
  assert laws.violations(loss, seeds=(0,), **subject) == [{}]
