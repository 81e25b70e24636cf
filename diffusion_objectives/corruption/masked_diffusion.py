r"""Laws of time, mask and weight for the bound, and batches of them.

A masking law draws a time and a mask for each block and gives the weight that
belongs to them, so that the two cannot be mixed up. All four estimate the bound
without bias (the first two with that of `min_time`):

| law | size `k` of a mask of `n` | weight |
|---|---|---|
| `bernoulli_masking` | Bernoulli, `m(t)` | `m'(t) / m(t)` |
| `nonempty_masking` | the same, `k >= 1` | `m'(t) / m(t) (1 - (1 - m(t))^n)` |
| `count_weighted_masking` | Bernoulli, `t ~ U[0, 1]` | `(n + 1) / k` |
| `uniform_count_masking` | uniform on `1..n` | `n / k` |
"""

from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

from diffusion_objectives import batches
from diffusion_objectives._core import checks
from diffusion_objectives.corruption import _blocks
from diffusion_objectives.corruption import _inputs
from diffusion_objectives.corruption import masks
from diffusion_objectives.corruption import packing
from diffusion_objectives.corruption import schedules


class MaskedTokens(NamedTuple):
  """What a masking law draws.

  Attributes:
    noisy_ids: `[batch, length]`, the clean ids with the mask's id where masked.
    is_masked: `[batch, length]` boolean.
    loss_weights: `[batch, length]`, 0 where not masked.
    times: `[batch]`; or `[batch, length]`, constant on each block.
  """

  noisy_ids: jax.Array
  is_masked: jax.Array
  loss_weights: jax.Array
  times: jax.Array


def bernoulli_masking(
  key: jax.Array,
  token_ids: jax.Array,
  is_supervised: jax.Array,
  *,
  mask_id: int,
  block_ids: jax.Array | None = None,
  mask_probability: schedules.MaskProbability = (
    schedules.linear_mask_probability
  ),
  min_time: float = 1e-3,
  max_time: float = 1.0,
) -> MaskedTokens:
  """Bernoulli masks at stratified times; weight `m'(t) / m(t)`.

  Args:
    key: PRNG key.
    token_ids: `[batch, length]` integer, the clean ids.
    is_supervised: `[batch, length]` boolean; only these may be masked.
    mask_id: the id that stands for a hidden token.
    block_ids: `[batch, length]` integer, whose runs share a time; None for one
      time a row.
    mask_probability: the schedule `m`.
    min_time: the least time.
    max_time: the largest time; a clipped range is not the bound.

  Returns:
    `MaskedTokens`.

  Raises:
    TypeError: another dtype or type.
    ValueError: another shape, or an argument out of range.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> ids = jnp.array([[1, 2, 3]])
    >>> draw = bernoulli_masking(jax.random.key(0), ids, ids > 0, mask_id=7,
    ...                          min_time=1.0)
    >>> draw.loss_weights.tolist()
    [[1.0, 1.0, 1.0]]

  Source: arXiv:2406.07524, eq. 10 and section 3.5.
  """
  ids, supervised, times, chances, mask_key = _draw(
    key,
    token_ids,
    is_supervised,
    block_ids,
    mask_probability,
    min_time,
    max_time,
  )
  noisy_ids, is_masked = masks.mask_bernoulli(
    mask_key, ids, supervised, chances, mask_id=mask_id
  )
  weights = schedules.elbo_weights(times, mask_probability)
  return _weighed(noisy_ids, is_masked, weights, times, _is_invalid(chances))


def nonempty_masking(
  key: jax.Array,
  token_ids: jax.Array,
  is_supervised: jax.Array,
  *,
  mask_id: int,
  block_ids: jax.Array | None = None,
  mask_probability: schedules.MaskProbability = (
    schedules.linear_mask_probability
  ),
  min_time: float = 1e-3,
  max_time: float = 1.0,
) -> MaskedTokens:
  """Bernoulli masks with a masked token in each block, at stratified times.

  The weight is `m'(t) / m(t)` times the probability that a plain draw masks a
  token, at most `n m'(t)`. Forcing a token and keeping `1 / t` counts each
  block `(n + 1) / n` times: a quarter too much for blocks of 4.

  Args:
    key: PRNG key.
    token_ids: `[batch, length]` integer, the clean ids.
    is_supervised: `[batch, length]` boolean; only these may be masked.
    mask_id: the id that stands for a hidden token.
    block_ids: `[batch, length]` integer, whose runs share a time; None for one
      time a row.
    mask_probability: the schedule `m`.
    min_time: the least time.
    max_time: the largest time; a clipped range is not the bound.

  Returns:
    `MaskedTokens`.

  Raises:
    TypeError: another dtype or type.
    ValueError: another shape, or an argument out of range.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> ids = jnp.array([[1, 2, 3]])
    >>> draw = nonempty_masking(jax.random.key(0), ids, ids > 0, mask_id=7)
    >>> int(draw.is_masked.sum()) >= 1
    True

  Source: `mask_nonempty` and `nonempty_probability`.
  """
  ids, supervised, times, chances, mask_key = _draw(
    key,
    token_ids,
    is_supervised,
    block_ids,
    mask_probability,
    min_time,
    max_time,
  )
  noisy_ids, is_masked = masks.mask_nonempty(
    mask_key, ids, supervised, chances, mask_id=mask_id, block_ids=block_ids
  )
  weights = schedules.elbo_weights(times, mask_probability)
  nonempty = masks.nonempty_probability(
    chances, supervised, block_ids=block_ids
  )
  weights = _inputs.per_token("times", weights, ids) * nonempty
  is_invalid = supervised & ~(nonempty > 0)  # no law, or one without a mask
  return _weighed(noisy_ids, is_masked, weights, times, is_invalid)


def count_weighted_masking(
  key: jax.Array,
  token_ids: jax.Array,
  is_supervised: jax.Array,
  *,
  mask_id: int,
  block_ids: jax.Array | None = None,
) -> MaskedTokens:
  """Bernoulli masks at `m = t` on all of `[0, 1]`; weight `(n + 1) / k`.

  The masks of `bernoulli_masking` with the weight's mean given their number,
  `E[1 / t | k]`: the same expectation, less noise, no least time.

  Args:
    key: PRNG key.
    token_ids: `[batch, length]` integer, the clean ids.
    is_supervised: `[batch, length]` boolean; only these may be masked.
    mask_id: the id that stands for a hidden token.
    block_ids: `[batch, length]` integer, whose runs share a time; None for one
      time a row.

  Returns:
    `MaskedTokens`.

  Raises:
    TypeError: another dtype or type.
    ValueError: another shape.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> ids = jnp.array([[1, 2, 3]])
    >>> draw = count_weighted_masking(
    ...     jax.random.key(0), ids, ids > 0, mask_id=7)
    >>> float(draw.loss_weights.sum())  # n + 1, or 0
    4.0

  Source: equation (3) of `corruption`.
  """
  ids, supervised, times, chances, mask_key = _draw(
    key,
    token_ids,
    is_supervised,
    block_ids,
    schedules.linear_mask_probability,
    0.0,
    1.0,
  )
  noisy_ids, is_masked = masks.mask_bernoulli(
    mask_key, ids, supervised, chances, mask_id=mask_id
  )
  weights = masks.count_weights(
    is_masked, supervised, keeps_empty=True, block_ids=block_ids
  )
  return MaskedTokens(noisy_ids, is_masked, weights, times)


def uniform_count_masking(
  key: jax.Array,
  token_ids: jax.Array,
  is_supervised: jax.Array,
  *,
  mask_id: int,
  block_ids: jax.Array | None = None,
) -> MaskedTokens:
  """Masks whose size is uniform on `1..n`, stratified; weight `n / k`.

  `k = 1 + floor(n t)` at stratified times on `[0, 1]`: the law of Bernoulli
  masks at `m = t` where empty draws of time and mask are drawn again. The
  weights of a block sum to `n`, so "weights" and "tokens" are one unit.

  Args:
    key: PRNG key.
    token_ids: `[batch, length]` integer, the clean ids.
    is_supervised: `[batch, length]` boolean; only these may be masked.
    mask_id: the id that stands for a hidden token.
    block_ids: `[batch, length]` integer, whose runs share a time; None for one
      time a row.

  Returns:
    `MaskedTokens`.

  Raises:
    TypeError: another dtype or type.
    ValueError: another shape.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> ids = jnp.array([[1, 2, 3]])
    >>> draw = uniform_count_masking(
    ...     jax.random.key(0), ids, ids > 0, mask_id=7)
    >>> round(float(draw.loss_weights.sum()), 5)
    3.0

  Source: equation (3) of `corruption`.
  """
  ids, supervised, times, chances, mask_key = _draw(
    key,
    token_ids,
    is_supervised,
    block_ids,
    schedules.linear_mask_probability,
    0.0,
    1.0,
  )
  first = masks.first_positions(block_ids, ids)
  n = _blocks.counts(supervised, first)
  size = 1 + jnp.floor(
    n.astype(jnp.float32) * _inputs.per_token("times", chances, ids)
  ).astype(jnp.int32)
  noisy_ids, is_masked = masks.mask_exact_count(
    mask_key,
    ids,
    supervised,
    jnp.minimum(size, n),  # t = 1; n = 0
    mask_id=mask_id,
    block_ids=block_ids,
  )
  weights = masks.count_weights(
    is_masked, supervised, keeps_empty=False, block_ids=block_ids
  )
  return MaskedTokens(noisy_ids, is_masked, weights, times)


def masked_diffusion_batch(
  key: jax.Array,
  token_ids: jax.Array,
  is_supervised: jax.Array,
  *,
  mask_id: int,
  model_inputs: Callable[[jax.Array, jax.Array], Any] = (
    lambda noisy_ids, times: {"input_tokens": noisy_ids}
  ),
  segment_ids: jax.Array | None = None,
  block_size: int | None = None,
  masking: Callable[..., MaskedTokens] = bernoulli_masking,
  **law: Any,
) -> batches.DiffusionTokenBatch:
  """From clean ids to a batch of the masked-diffusion bound, in one call.

  By default times are stratified over the rows, masks are Bernoulli, masked
  positions weigh `m'(t) / m(t)` and the others 0. `is_supervised` is filled in,
  so that a loss divides by the supervised tokens and its mean is the bound in
  nats per token.

  Args:
    key: PRNG key.
    token_ids: `[batch, length]` integer, the clean ids.
    is_supervised: `[batch, length]` boolean: answer tokens, never prompt or
      padding.
    mask_id: the id that stands for a hidden token.
    model_inputs: `(noisy_ids [batch, length], times) -> pytree`, what the
      network is called with. Times are `[batch]`, or `[batch, length]` where
      there are segments or blocks.
    segment_ids: `[batch, length]` integer, 0 for padding: the sequences of
      packed rows, each with a time of its own. None where each row is one.
    block_size: positions of a block, each with a time of its own; blocks start
      anew with each segment. None for no blocks.
    masking: the law of time, mask and weight: `bernoulli_masking`,
      `nonempty_masking`, `count_weighted_masking`, `uniform_count_masking`, or
      your own.
    **law: the law's own arguments: `mask_probability`, `min_time` and
      `max_time` of the first two.

  Returns:
    A `DiffusionTokenBatch` whose targets are `token_ids`.

  Raises:
    TypeError: another dtype or type, or an argument that the law does not take.
    ValueError: another shape, or an argument out of range.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> ids = jnp.array([[1, 2, 3], [4, 5, 6]])
    >>> batch = masked_diffusion_batch(
    ...     jax.random.key(0), ids, jnp.ones(ids.shape, bool), mask_id=7)
    >>> batch.check_values(vocabulary_size=8)

  Source: arXiv:2406.07524, eq. 10 and section 3.5.
  """
  for name, value in (("model_inputs", model_inputs), ("masking", masking)):
    checks.function(name, value)
  ids, supervised = _inputs.tokens(token_ids, is_supervised)
  segments = segment_ids
  if segment_ids is not None:
    segments = _inputs.group_ids("segment_ids", segment_ids, like=ids)
  blocks = segments
  if block_size is not None:
    blocks = packing.block_ids(
      jnp.zeros_like(ids) if segments is None else segments,
      block_size=block_size,
    )
  draw = masking(key, ids, supervised, mask_id=mask_id, block_ids=blocks, **law)
  return batches.DiffusionTokenBatch(
    model_inputs=model_inputs(draw.noisy_ids, draw.times),
    target_ids=ids,
    loss_weights=draw.loss_weights,
    is_supervised=supervised,
    segment_ids=segments,
  )


def _draw(
  key, token_ids, is_supervised, block_ids, mask_probability, min_time, max_time
):
  """Checked tokens, times, the schedule at them, and a key for the masks."""
  checks.function("mask_probability", mask_probability)
  ids, supervised = _inputs.tokens(token_ids, is_supervised)
  time_key, mask_key = jax.random.split(key)
  if block_ids is None:
    times = schedules.stratified_times(
      time_key, ids.shape[0], min_time=min_time, max_time=max_time
    )
  else:
    blocks = _inputs.group_ids("block_ids", block_ids, like=ids)
    times = schedules.block_times(
      time_key, blocks, min_time=min_time, max_time=max_time
    )
  return ids, supervised, times, mask_probability(times), mask_key


def _is_invalid(chances):
  return ~((chances >= 0) & (chances <= 1))


def _weighed(noisy_ids, is_masked, weights, times, is_invalid):
  """Weights of masked tokens; NaN where traced probabilities are refused."""
  weights = _inputs.per_token("times", weights, noisy_ids)
  is_invalid = _inputs.per_token("times", is_invalid, noisy_ids)
  weights = jnp.where(is_masked, weights, 0)
  return MaskedTokens(
    noisy_ids, is_masked, jnp.where(is_invalid, jnp.nan, weights), times
  )
