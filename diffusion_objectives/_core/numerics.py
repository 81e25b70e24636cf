"""Numerics shared by all losses: the only place with where-tricks.

Three rules hold throughout. Inputs are cleaned before the arithmetic and
results selected after it, never multiplied by a mask (`0 * inf`). Arithmetic
and sums run in at least float32. A value that the batch's value check would
refuse becomes NaN, in the value and in the gradient, never a finite number.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np


def accumulation_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
  """The dtype in which a loss is computed and summed: at least float32.

  `jnp.promote_types(dtype, jnp.float32)`, also under strict promotion.
  """
  return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def clean_rows(
  rows: jax.typing.ArrayLike, active: jax.Array, dtype: jnp.dtype
) -> jax.Array:
  """Rows of the last axis in `dtype`, with inactive rows replaced by zeros."""
  return jnp.where(active[..., None], jnp.asarray(rows).astype(dtype), 0)


def poison(values: jax.Array, is_valid: jax.Array) -> jax.Array:
  """`values` where valid, else NaN with a NaN derivative."""
  nan = jnp.array(jnp.nan, values.dtype)
  return values * jnp.where(is_valid, jnp.ones_like(nan), nan)


def masked_sum(values: jax.Array, active: jax.Array) -> jax.Array:
  """The sum over active positions; the others may hold anything."""
  return jnp.sum(jnp.where(active, values, 0))


def weighted_sum(
  values: jax.Array, weights: jax.Array, active: jax.Array
) -> jax.Array:
  """`sum w v` over active positions, formed from cleaned values."""
  return jnp.sum(weights * jnp.where(active, values, 0))


def count(is_counted: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """The number of true elements: an integer sum, cast once."""
  return jnp.sum(is_counted, dtype=jnp.int32).astype(dtype)


def token_ids(ids: jax.typing.ArrayLike) -> jax.Array:
  """Signed ids whose out-of-range values stay out of range.

  NumPy's 64-bit integers would wrap when JAX narrows them, and a wrapped id
  can look valid, so they are saturated on the host. An unsigned id too large
  for its signed type becomes negative.
  """
  if isinstance(ids, np.ndarray):
    bounds = np.iinfo(np.int32)
    ids = np.clip(ids.astype(np.int64), bounds.min, bounds.max).astype(np.int32)
  ids = jnp.asarray(ids)
  return ids.astype(jnp.int64 if ids.dtype.itemsize == 8 else jnp.int32)


def clean_ids(ids: jax.typing.ArrayLike, active: jax.Array) -> jax.Array:
  """Signed ids, with inactive ones replaced by 0."""
  return jnp.where(active, token_ids(ids), 0)


def log_softmax(
  logits: jax.Array, temperature: float = 1.0
) -> tuple[jax.Array, jax.Array]:
  """`log softmax(z / T)` over the last axis, and its exponential.

  The maximum is subtracted before the division, so that a small temperature
  does not overflow. A row with NaN, with +inf or without a finite logit is NaN.
  """
  shifted = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
  log_probs = shifted - jnp.log(
    jnp.sum(jnp.exp(shifted), axis=-1, keepdims=True)
  )
  return log_probs, jnp.exp(log_probs)


def _is_target(logits: jax.Array, ids: jax.Array) -> jax.Array:
  vocabulary = jax.lax.broadcasted_iota(
    ids.dtype, logits.shape, logits.ndim - 1
  )
  return vocabulary == ids[..., None]


@jax.custom_jvp
def _negative_log_likelihood(logits: jax.Array, ids: jax.Array) -> jax.Array:
  log_probs, _ = log_softmax(logits)
  return -jnp.sum(jnp.where(_is_target(logits, ids), log_probs, 0), axis=-1)


@_negative_log_likelihood.defjvp
def _negative_log_likelihood_jvp(primals, tangents):
  logits, ids = primals
  _, probs = log_softmax(logits)
  gradient = probs - _is_target(logits, ids).astype(probs.dtype)
  return (
    _negative_log_likelihood(logits, ids),
    jnp.sum(gradient * tangents[0], axis=-1),
  )


def token_negative_log_likelihood(
  logits: jax.Array, ids: jax.Array
) -> jax.Array:
  """`-log softmax(z)[id]` over the last axis; gradient `softmax(z) - onehot`.

  +inf, with that finite gradient, where the id's own logit is -inf. NaN where
  the id lies outside the vocabulary.
  """
  is_valid = (ids >= 0) & (ids < logits.shape[-1])
  return poison(
    _negative_log_likelihood(logits, jnp.where(is_valid, ids, 0)), is_valid
  )


def _exp_minus_tangent(d: jax.Array) -> jax.Array:
  """`exp(d) - 1 - d` for `|d| <= 1`, to full relative accuracy.

  The Taylor series from its quadratic term on: `expm1(d) - d` would cancel.
  The last term kept is below half an ulp of the first.
  """
  terms = 10 if d.dtype == jnp.float32 else 19
  tail = jnp.ones_like(d)
  for n in range(terms + 1, 2, -1):
    tail = 1 + tail * (d / n)
  return d * d / 2 * tail


def _difference(p: jax.Array, q: jax.Array, d: jax.Array) -> jax.Array:
  """`q - p`, as `p (exp(d) - 1)` where that keeps more digits."""
  is_small = (jnp.abs(d) < 1) & (p != 0)
  return jnp.where(is_small, p * jnp.expm1(jnp.where(is_small, d, 0)), q - p)


def _forward_kl_parts(
  teacher: jax.Array, student: jax.Array, temperature: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """`p`, `q` and `d = log q - log p` (0 where `p == 0`)."""
  log_p, p = log_softmax(teacher, temperature)
  log_q, q = log_softmax(student, temperature)
  t, s = jnp.where(p == 0, 0, teacher), jnp.where(p == 0, 0, student)
  top_t = jnp.max(teacher, axis=-1, keepdims=True)
  top_s = jnp.max(student, axis=-1, keepdims=True)
  # The differences of near rows are exact; those of far ones lose less when
  # each row is shifted first.
  offset = top_s - top_t
  difference = jnp.where(
    jnp.abs(offset) < 8, (s - t) - offset, (s - top_s) - (t - top_t)
  )
  # A row's largest log-probability is minus the log-sum of its shifted row.
  log_sums = jnp.max(log_q, axis=-1, keepdims=True) - jnp.max(
    log_p, axis=-1, keepdims=True
  )
  d = jnp.where(p == 0, 0, difference / temperature + log_sums)
  # What rounding is common to a row's d shows in sum (q - p), which is 0.
  common = jnp.sum(_difference(p, q, d), axis=-1, keepdims=True)
  return p, q, jnp.where(p == 0, 0, d - common)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def token_forward_kl(
  teacher: jax.Array, student: jax.Array, temperature: float
) -> jax.Array:
  """`KL(p || q)` over the last axis; a constant in the teacher.

  `p = softmax(teacher / T)`, `q = softmax(student / T)`. As `p` and `q` both
  sum to 1,

    sum p (log p - log q) = sum p (exp(d) - 1 - d),    d = log q - log p,

  with every term nonnegative: small divergences keep their digits. An entry
  with `p == 0` contributes `q` to the right-hand side, whatever its logits; a
  large `d` is summed as `q - p - p d`, which does not overflow. The gradient in
  the student's logits is `(q - p) / T`, also where the value is +inf.
  """
  p, q, d = _forward_kl_parts(teacher, student, temperature)
  is_small = jnp.abs(d) < 1
  series = p * _exp_minus_tangent(jnp.where(is_small, d, 0))
  plain = (q - p) - p * d
  terms = jnp.where(p == 0, q, jnp.where(is_small, series, plain))
  return jnp.sum(terms, axis=-1)


@token_forward_kl.defjvp
def _token_forward_kl_jvp(temperature, primals, tangents):
  teacher, student = primals
  p, q, d = _forward_kl_parts(teacher, student, temperature)
  gradient = _difference(p, q, d) / temperature
  return (
    token_forward_kl(teacher, student, temperature),
    jnp.sum(gradient * tangents[1], axis=-1),
  )


def token_entropy(log_probs: jax.Array, probs: jax.Array) -> jax.Array:
  """`-sum p log p` over the last axis, in nats; `0 log 0 = 0`."""
  return -jnp.sum(probs * jnp.where(probs == 0, 0, log_probs), axis=-1)
