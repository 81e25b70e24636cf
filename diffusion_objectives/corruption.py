r"""Masking processes and their weights, with explicit keys.

A masking process hides each supervised token at time `t` with probability
`m(t) = 1 - alpha(t)`, data at `t = 0`. The masked-diffusion bound is

  E_t E_mask [ sum_{masked i} w(t) (-log p(x_i | noisy)) ],
  w(t) = -alpha'(t) / (1 - alpha(t)) = m'(t) / m(t)                         (1)

(Sahoo et al. 2024, arXiv:2406.07524, eq. 10; Shi et al. 2024, arXiv:2406.04329,
eq. 4). Divided by the supervised tokens it bounds the negative log-likelihood
per token, in nats. Every schedule with `m(0) = 0` and `m(1) = 1` has the same
expectation.

All draws are per row, so the batch's rows are independent given their keys.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusion_objectives import batches
from diffusion_objectives._core import checks
from diffusion_objectives._core import numerics

MaskProbability = Callable[[jax.Array], jax.Array]


def linear_mask_probability(times: jax.Array) -> jax.Array:
  """`m(t) = t`; the weight is `1 / t`.

  Example:
    >>> import jax.numpy as jnp
    >>> elbo_weights(jnp.array([0.25])).tolist()
    [4.0]

  Source: LLaDA (arXiv:2502.09992) and the linear schedule of arXiv:2406.04329.
  """
  return times


def cosine_mask_probability(times: jax.Array) -> jax.Array:
  """`m(t) = sin(pi t / 2)`, `alpha = 1 - cos(pi (1 - t) / 2)`.

  Example:
    >>> import jax.numpy as jnp
    >>> round(float(cosine_mask_probability(jnp.array(1 / 3))), 4)
    0.5

  Source: arXiv:2406.04329, table 1.
  """
  return jnp.sin(jnp.pi / 2 * times)


def polynomial_mask_probability(exponent: float) -> MaskProbability:
  """`m(t) = t^r`; the weight is `r / t`.

  Args:
    exponent: `r > 0`.

  Raises:
    TypeError: not a real number.
    ValueError: not positive.

  Example:
    >>> import jax.numpy as jnp
    >>> schedule = polynomial_mask_probability(2.0)
    >>> elbo_weights(jnp.array([0.5]), schedule).tolist()
    [4.0]

  Source: arXiv:2406.04329, table 1.
  """
  power = checks.finite_real("exponent", exponent, positive=True)
  return lambda times: times**power


def elbo_weights(
  times: jax.Array,
  mask_probability: MaskProbability = linear_mask_probability,
) -> jax.Array:
  """The weight of a masked token, `-alpha'(t) / (1 - alpha(t)) = m'(t) / m(t)`.

  Args:
    times: floating-point, any shape, in `(0, 1]`.
    mask_probability: the schedule `m`, elementwise and differentiable.

  Returns:
    Weights of the shape and dtype of `times`.

  Raises:
    TypeError: `times` is not floating-point.

  Example:
    >>> import jax.numpy as jnp
    >>> elbo_weights(jnp.array([0.5, 1.0])).tolist()
    [2.0, 1.0]

  Source: arXiv:2406.07524, eq. 10.
  """
  times = _floating("times", times)
  probability, slope = jax.jvp(
    mask_probability, (times,), (jnp.ones_like(times),)
  )
  return slope / probability


def stratified_times(
  key: jax.Array, batch_size: int, *, min_time: float = 1e-3
) -> jax.Array:
  """One time a row; each of `batch_size` equal strata holds one.

  `t = min_time + (1 - min_time) (j + u) / batch_size` with `u ~ U[0, 1)` and
  the stratum `j` of each row by a random permutation. Each row by itself is
  uniform on `[min_time, 1]`; the batch covers that range evenly.

  Args:
    key: PRNG key.
    batch_size: number of rows.
    min_time: the least time, in `[0, 1)`. It bounds the weight `1 / t`, at the
      cost of a bias of the bound smaller than `min_time`, relatively.

  Returns:
    `[batch_size]` float32.

  Raises:
    TypeError: `batch_size` is no integer, or `min_time` no real number.
    ValueError: out of range.

  Example:
    >>> import jax
    >>> times = stratified_times(jax.random.key(0), 4)
    >>> sorted((times * 4).astype(int).tolist())
    [0, 1, 2, 3]

  Source: the low-discrepancy sampler of arXiv:2107.00630, appendix I.1, in its
  stratified form.
  """
  if isinstance(batch_size, bool) or not isinstance(
    batch_size, int | np.integer
  ):
    raise checks.fail(
      TypeError, "batch_size must be an integer", checks.describe(batch_size)
    )
  if batch_size < 0:
    raise checks.fail(ValueError, "batch_size must be nonnegative", batch_size)
  low = _min_time(min_time)
  stratum_key, uniform_key = jax.random.split(key)
  batch_size = int(batch_size)
  strata = jax.random.permutation(stratum_key, batch_size)
  uniform = jax.random.uniform(uniform_key, (batch_size,), jnp.float32)
  unit = (strata.astype(jnp.float32) + uniform) / batch_size
  return 1 - (1 - low) * (1 - unit)  # never above 1 by rounding


def mask_bernoulli(
  key: jax.Array,
  token_ids: jax.Array,
  is_supervised: jax.Array,
  mask_probability: jax.Array,
  *,
  mask_id: int,
) -> tuple[jax.Array, jax.Array]:
  """Hides each supervised token by itself with its row's probability.

  Args:
    key: PRNG key.
    token_ids: `[batch, length]` integer, the clean ids.
    is_supervised: `[batch, length]` boolean; only these may be masked.
    mask_probability: `[batch]` floating-point, in `[0, 1]`.
    mask_id: the id that stands for a hidden token, within the dtype of
      `token_ids`.

  Returns:
    `(noisy_ids, is_masked)`: `[batch, length]`, the ids with `mask_id` where
    masked, in the dtype of `token_ids`; and `[batch, length]` boolean.

  Raises:
    TypeError: another dtype or type.
    ValueError: another shape, a `mask_id` that the dtype cannot hold, or a
      probability outside `[0, 1]` (where it is not traced).

  Example:
    >>> import jax, jax.numpy as jnp
    >>> noisy, is_masked = mask_bernoulli(
    ...     jax.random.key(0), jnp.array([[3, 4, 5]]),
    ...     jnp.array([[False, True, True]]), jnp.array([1.0]), mask_id=9)
    >>> noisy.tolist()
    [[3, 9, 9]]

  Source: the absorbing process of arXiv:2107.03006 in its masked form.
  """
  ids, supervised, mask_id = _check_tokens(token_ids, is_supervised, mask_id)
  probability = _floating("mask_probability", mask_probability)
  if probability.shape != ids.shape[:1]:
    raise checks.fail(
      ValueError,
      "mask_probability must have shape [batch]",
      f"{probability.shape} for token_ids {ids.shape}",
    )
  # At least float32: a coarser uniform would mask at another rate.
  dtype = numerics.accumulation_dtype(probability.dtype)
  probability = probability.astype(dtype)
  if checks.is_concrete(probability):
    is_bad = ~((probability >= 0) & (probability <= 1))
    if is_bad.any():
      raise checks.fail(
        ValueError,
        "mask_probability must be within [0, 1]",
        probability[jnp.argmax(is_bad)],
      )
  uniform = jax.random.uniform(key, ids.shape, dtype)
  is_masked = (uniform < probability[:, None]) & supervised
  return jnp.where(is_masked, jnp.array(mask_id, ids.dtype), ids), is_masked


def masked_diffusion_batch(
  key: jax.Array,
  token_ids: jax.Array,
  is_supervised: jax.Array,
  *,
  mask_id: int,
  model_inputs: Callable[[jax.Array, jax.Array], Any] = (
    lambda noisy_ids, times: {"input_tokens": noisy_ids}
  ),
  mask_probability: MaskProbability = linear_mask_probability,
  min_time: float = 1e-3,
) -> batches.DiffusionTokenBatch:
  """From clean ids to a batch of the masked-diffusion bound, in one call.

  Times are stratified over the rows, masks are Bernoulli, masked positions
  weigh `m'(t) / m(t)` and the others 0. `is_supervised` is filled in, so that a
  loss divides by the supervised tokens and its mean is the bound in nats per
  token.

  Args:
    key: PRNG key.
    token_ids: `[batch, length]` integer, the clean ids.
    is_supervised: `[batch, length]` boolean: answer tokens, never prompt or
      padding.
    mask_id: the id that stands for a hidden token.
    model_inputs: `(noisy_ids [batch, length], times [batch]) -> pytree`, what
      the network is called with.
    mask_probability: the schedule `m`.
    min_time: the least time, in `[0, 1)`.

  Returns:
    A `DiffusionTokenBatch` whose targets are `token_ids`.

  Raises:
    TypeError: another dtype or type.
    ValueError: another shape, or an argument out of range.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> ids = jnp.array([[1, 2, 3], [4, 5, 6]])
    >>> batch = masked_diffusion_batch(
    ...     jax.random.key(0), ids, jnp.ones(ids.shape, bool), mask_id=7)
    >>> batch.check_values(vocabulary_size=8)

  Source: arXiv:2406.07524, eq. 10 and section 3.5.
  """
  for name, value in (
    ("model_inputs", model_inputs),
    ("mask_probability", mask_probability),
  ):
    if not callable(value):
      raise checks.fail(
        TypeError, f"{name} must be callable", checks.describe(value)
      )
  ids, supervised, mask_id = _check_tokens(token_ids, is_supervised, mask_id)
  time_key, mask_key = jax.random.split(key)
  times = stratified_times(time_key, ids.shape[0], min_time=min_time)
  noisy_ids, is_masked = mask_bernoulli(
    mask_key, ids, supervised, mask_probability(times), mask_id=mask_id
  )
  weights = elbo_weights(times, mask_probability)
  return batches.DiffusionTokenBatch(
    model_inputs=model_inputs(noisy_ids, times),
    target_ids=ids,
    loss_weights=jnp.where(is_masked, weights[:, None], 0),
    is_supervised=supervised,
  )


def _floating(name: str, values: Any) -> jax.Array:
  if not checks.is_array(values):
    raise checks.fail(
      TypeError,
      f"{name} must be a JAX/NumPy array",
      checks.describe(values),
    )
  if not jnp.issubdtype(values.dtype, jnp.floating):
    raise checks.fail(
      TypeError, f"{name} must have floating-point dtype", values.dtype
    )
  return jnp.asarray(values)


def _min_time(value: Any) -> float:
  low = checks.finite_real("min_time", value, nonnegative=True)
  if low >= 1:
    raise checks.fail(ValueError, "min_time must be smaller than 1", value)
  return low


def _check_tokens(
  token_ids: Any, is_supervised: Any, mask_id: Any
) -> tuple[jax.Array, jax.Array, int]:
  axes = ("batch", "length")
  checks.array("token_ids", token_ids, dtype="integer", axes=axes)
  checks.array("is_supervised", is_supervised, dtype="boolean", axes=axes)
  checks.same_shape(
    "is_supervised", is_supervised, "token_ids", token_ids, axes=2
  )
  if isinstance(mask_id, bool) or not isinstance(mask_id, int | np.integer):
    raise checks.fail(
      TypeError, "mask_id must be an integer", checks.describe(mask_id)
    )
  ids = _saturated(token_ids)
  bounds = jnp.iinfo(ids.dtype)
  if not max(0, bounds.min) <= mask_id <= bounds.max:
    raise checks.fail(
      ValueError,
      f"mask_id must be nonnegative and fit {ids.dtype}",
      mask_id,
    )
  return ids, jnp.asarray(is_supervised), int(mask_id)


def _saturated(ids: jax.Array | np.ndarray) -> jax.Array:
  """`ids` as JAX's array; what it narrows is saturated, never wrapped."""
  if isinstance(ids, np.ndarray):
    dtype = jnp.asarray(ids[:0]).dtype
    if dtype != ids.dtype:
      bounds = np.iinfo(dtype)
      ids = np.clip(ids, bounds.min, bounds.max).astype(dtype)
  return jnp.asarray(ids)
