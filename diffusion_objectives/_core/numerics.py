"""Numerics shared by all losses: the only place with where-tricks.

Three rules hold throughout. Inputs are cleaned before the arithmetic and
results selected after it, never multiplied by a mask (`0 * inf`). Arithmetic
and sums run in at least float32. A value that the batch's value check would
refuse becomes NaN, in the value and in the gradient, never a finite number.
"""

from collections.abc import Callable
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def accumulation_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
  """The dtype in which a loss is computed and summed: at least float32.

  `jnp.promote_types(dtype, jnp.float32)`, also under strict promotion; float32
  for NumPy's float64 where JAX has none.
  """
  return jax.dtypes.canonicalize_dtype(
    jnp.float64 if dtype == jnp.float64 else jnp.float32
  )


def product_dtype(
  x: jax.typing.DTypeLike, y: jax.typing.DTypeLike
) -> jnp.dtype:
  """The dtype of the factors of a product, also under strict promotion."""
  with jax.numpy_dtype_promotion("standard"):
    return jax.dtypes.canonicalize_dtype(jnp.promote_types(x, y))


def cast(array: jax.typing.ArrayLike, dtype: jnp.dtype) -> jax.Array:
  """`array` in `dtype`; NumPy's is cast before JAX narrows it.

  JAX wraps NumPy's 64-bit integers.
  """
  if isinstance(array, np.ndarray):
    with np.errstate(over="ignore"):
      return jnp.asarray(array.astype(dtype))
  return jnp.asarray(array).astype(dtype)


def clean_rows(
  rows: jax.typing.ArrayLike, active: jax.Array, dtype: jnp.dtype
) -> jax.Array:
  """Rows of the last axis in `dtype`, with inactive rows replaced by zeros."""
  return jnp.where(active[..., None], cast(rows, dtype), 0)


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


def first_maximum(rows: jax.Array) -> jax.Array:
  """`argmax` over the last axis, as int32.

  Two reductions to a number: XLA's CPU backend takes many times as long for
  one to a pair. Floats hold the index exactly.
  """
  if rows.shape[-1] > 2**24:
    return jnp.argmax(rows, axis=-1).astype(jnp.int32)
  is_top = rows == jnp.max(rows, axis=-1, keepdims=True)
  index = -jax.lax.broadcasted_iota(jnp.float32, rows.shape, rows.ndim - 1)
  first = -jnp.max(jnp.where(is_top, index, -rows.shape[-1] + 1.0), axis=-1)
  return first.astype(jnp.int32)


def _is_target(logits: jax.Array, ids: jax.Array) -> jax.Array:
  vocabulary = jax.lax.broadcasted_iota(
    ids.dtype, logits.shape, logits.ndim - 1
  )
  return vocabulary == ids[..., None]


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _negative_log_likelihood(
  logits: jax.Array, ids: jax.Array, temperature: float
) -> jax.Array:
  log_probs, _ = log_softmax(logits, temperature)
  return -jnp.sum(jnp.where(_is_target(logits, ids), log_probs, 0), axis=-1)


@_negative_log_likelihood.defjvp
def _negative_log_likelihood_jvp(temperature, primals, tangents):
  logits, ids = primals
  _, probs = log_softmax(logits, temperature)
  gradient = probs - _is_target(logits, ids).astype(probs.dtype)
  return (
    _negative_log_likelihood(logits, ids, temperature),
    jnp.sum(gradient / temperature * tangents[0], axis=-1),
  )


def token_negative_log_likelihood(
  logits: jax.Array, ids: jax.Array, temperature: float = 1.0
) -> jax.Array:
  """`-log softmax(z / T)[id]`; gradient `(softmax(z / T) - onehot) / T`.

  +inf, with that finite gradient, where the id's own logit is -inf. NaN where
  the id lies outside the vocabulary.
  """
  is_valid = (ids >= 0) & (ids < logits.shape[-1])
  return poison(
    _negative_log_likelihood(logits, jnp.where(is_valid, ids, 0), temperature),
    is_valid,
  )


def _exp_minus_tangent(d: jax.Array) -> jax.Array:
  """`exp(d) - 1 - d` for `|d| <= 1`, to full relative accuracy.

  The Taylor series from its quadratic term on: `expm1(d) - d` would cancel.
  The first term left out is below half an ulp of the first.
  """
  terms = 10 if d.dtype == jnp.float32 else 19
  tail: list[Any] = [1 / math.factorial(n) for n in range(2, terms + 2)]
  power = d
  while len(tail) > 1:  # in pairs: a chain of sums would wait for each
    pairs = itertools.zip_longest(tail[::2], tail[1::2], fillvalue=0)
    tail = [x + power * y for x, y in pairs]
    power *= power
  return d * d * tail[0]


def difference(p: jax.Array, q: jax.Array, d: jax.Array) -> jax.Array:
  """`q - p`, as `p (exp(d) - 1)` where that keeps more digits."""
  return kl_terms_and_difference(p, q, d)[1]


def product(x: jax.Array, y: jax.Array) -> jax.Array:
  """`x y`, and 0 where `x` is 0, whatever `y` is.

  The inner choice keeps the derivative finite; the outer one changes nothing
  but that XLA's CPU backend sums a choice faster than a product.
  """
  is_zero = x == 0
  return jnp.where(is_zero, 0, x * jnp.where(is_zero, 0, y))


def kl_terms(x: jax.Array, y: jax.Array, e: jax.Array) -> jax.Array:
  """`x log(x / y) - x + y`, from `e = log y - log x`; nonnegative.

  `x (exp(e) - 1 - e)`, so that small ones keep their digits; a large `e` is
  summed as `y - x - x e`, which does not overflow. `y` where `x` is 0, +inf
  where `y` alone is (`e = -inf`).
  """
  return kl_terms_and_difference(x, y, e)[0]


def kl_terms_and_difference(
  p: jax.Array, q: jax.Array, d: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """`kl_terms(p, q, d)` and `difference(p, q, d)`, from one series."""
  is_small = (jnp.abs(d) < 1) & (p != 0)
  near = jnp.where(is_small, d, 0)
  series = _exp_minus_tangent(near)
  gap = q - p
  return (
    jnp.where(is_small, p * series, gap - product(p, d)),
    jnp.where(is_small, p * (near + series), gap),
  )


def log_mixture(d: jax.Array, share: float) -> jax.Array:
  """`log((1 - share) + share exp(d))` for `0 < share < 1` and any `d`.

  With `d = log y - log x` it is `log((1 - share) x + share y) - log x`. It
  keeps its digits where it is small and does not overflow.
  """
  is_up = d > 80  # exp(d) is still finite in float32
  is_down = (d < -1) & (share > 0.5)  # log1p would cancel
  near = jnp.where(is_up | is_down, 0, d)
  up, down = jnp.where(is_up, d, 0), jnp.where(is_down, d, 0)
  return jnp.where(
    is_up,
    up + jnp.log(share + (1 - share) * jnp.exp(-up)),
    jnp.where(
      is_down,
      jnp.log((1 - share) + share * jnp.exp(down)),
      jnp.log1p(share * jnp.expm1(near)),
    ),
  )


def _pair(
  teacher: jax.Array, student: jax.Array, temperature: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """`p`, `q` and `d = log q - log p`, from rows of logits.

  `d` is -inf where the student's logit alone is, +inf where the teacher's alone
  is, and 0 where both are.
  """
  log_p, p = log_softmax(teacher, temperature)
  log_q, q = log_softmax(student, temperature)
  is_out = (teacher == -jnp.inf) & (student == -jnp.inf)
  t, s = jnp.where(is_out, 0, teacher), jnp.where(is_out, 0, student)
  top_t = jnp.max(teacher, axis=-1, keepdims=True)
  top_s = jnp.max(student, axis=-1, keepdims=True)
  # The differences of near rows are exact; those of far ones lose less when
  # each row is shifted first.
  offset = top_s - top_t
  gap = jnp.where(
    jnp.abs(offset) < 8, (s - t) - offset, (s - top_s) - (t - top_t)
  )
  # A row's largest log-probability is minus the log-sum of its shifted row.
  log_sums = jnp.max(log_q, axis=-1, keepdims=True) - jnp.max(
    log_p, axis=-1, keepdims=True
  )
  d = jnp.where(is_out, 0, gap / temperature + log_sums)
  # What rounding is common to a row's d shows in sum (q - p), which is 0.
  common = jnp.sum(difference(p, q, d), axis=-1, keepdims=True)
  return p, q, jnp.where(is_out, 0, d - common)


Pointwise = Callable[
  [jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]
]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 3))
def token_divergence(
  pointwise: Pointwise,
  teacher: jax.Array,
  student: jax.Array,
  temperature: float,
) -> jax.Array:
  """`sum_v g(p_v, q_v)` over the last axis; a constant in the teacher.

  `p = softmax(teacher / T)`, `q = softmax(student / T)`. `pointwise` maps
  `(p, q, d)`, with `d = log q - log p`, to the terms `g` and to
  `h = q dg/dq`; the gradient in the student's logits is `(h - q sum h) / T`,
  also where the value is +inf.
  """
  terms, _ = pointwise(*_pair(teacher, student, temperature))
  return jnp.sum(terms, axis=-1)


@token_divergence.defjvp
def _token_divergence_jvp(pointwise, temperature, primals, tangents):
  teacher, student = primals
  p, q, d = _pair(teacher, student, temperature)
  terms, h = pointwise(p, q, d)
  slope = (h - q * jnp.sum(h, axis=-1, keepdims=True)) / temperature
  return jnp.sum(terms, axis=-1), jnp.sum(slope * tangents[1], axis=-1)


def list_and_tail(
  logits: jax.Array, ids: jax.Array, is_listed: jax.Array, temperature: float
) -> jax.Array:
  """Logits `[..., k + 1]` of listed ids and of all other ids together.

  The last one is `T log sum exp(z / T)` over the ids that are not listed, so
  that `softmax(. / T)` of the result has their total probability; -inf, with
  gradient 0, where there are none. A slot that lists nothing is -inf.

  Args:
    logits: `[..., vocabulary]`.
    ids: `[..., k]`, each within the vocabulary.
    is_listed: `[..., k]`, whether the slot counts.
    temperature: `T`.
  """
  # take_along_axis and a scatter that is batched over the leading axes are
  # partitioned along a sharded vocabulary without gathering it.
  listed = jnp.where(
    is_listed, jnp.take_along_axis(logits, ids, axis=-1), -jnp.inf
  )

  def exclude(ids):
    return jnp.zeros(logits.shape[-1:], bool).at[ids].set(True, mode="drop")

  for _ in ids.shape[:-1]:
    exclude = jax.vmap(exclude)
  is_excluded = exclude(jnp.where(is_listed, ids, logits.shape[-1]))
  rest = jnp.where(is_excluded, -jnp.inf, logits)
  top = jnp.max(rest, axis=-1, keepdims=True)
  top = jax.lax.stop_gradient(jnp.where(top == -jnp.inf, 0, top))
  total = jnp.sum(jnp.exp((rest - top) / temperature), axis=-1, keepdims=True)
  tail = top + temperature * jnp.log(jnp.where(total == 0, 1, total))
  return jnp.concatenate(
    [listed, jnp.where(total == 0, -jnp.inf, tail)], axis=-1
  )


def token_entropy(log_probs: jax.Array, probs: jax.Array) -> jax.Array:
  """`-sum p log p` over the last axis, in nats; `0 log 0 = 0`."""
  return -jnp.sum(probs * jnp.where(probs == 0, 0, log_probs), axis=-1)
