"""Which tokens are hidden or replaced, and the weights that go with the law.

Every function takes clean ids and the supervised positions and returns noisy
ids and the positions that it touched. What a check refuses and cannot be read
under trace shows in the touched positions: such a row comes back touched where
it is not supervised and nowhere else, which no draw does. `count_weights` are
NaN on it, and so is a loss with a positive weight there.
"""

import jax
import jax.numpy as jnp

from diffusion_objectives._core import checks
from diffusion_objectives._core import numerics
from diffusion_objectives.corruption import _blocks
from diffusion_objectives.corruption import _inputs


def mask_bernoulli(
  key: jax.Array,
  token_ids: jax.Array,
  is_supervised: jax.Array,
  mask_probability: jax.Array,
  *,
  mask_id: int,
) -> tuple[jax.Array, jax.Array]:
  """Hides each supervised token by itself with its own probability.

  Its weight is `elbo_weights`; at `m = t` with `t` uniform on all of `[0, 1]`
  also `count_weights(keeps_empty=True)`.

  Args:
    key: PRNG key.
    token_ids: `[batch, length]` integer, the clean ids.
    is_supervised: `[batch, length]` boolean; only these may be masked.
    mask_probability: `[batch]` or `[batch, length]` floating-point, in
      `[0, 1]`.
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
  ids, supervised = _inputs.tokens(token_ids, is_supervised)
  hidden = _inputs.fitting("mask_id", mask_id, ids.dtype)
  probability, is_bad = _inputs.probabilities(
    "mask_probability", mask_probability, ids
  )
  uniform = jax.random.uniform(key, ids.shape, probability.dtype)
  is_masked = (uniform < probability) & supervised
  return _touched(ids, supervised, is_masked, is_bad, hidden)


def mask_nonempty(
  key: jax.Array,
  token_ids: jax.Array,
  is_supervised: jax.Array,
  mask_probability: jax.Array,
  *,
  mask_id: int,
  block_ids: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """The law of `mask_bernoulli`, given that each block has a masked token.

  Let token `i` be hidden at an exponential time of rate `-log(1 - p_i)`, masked
  if that is before 1. The earliest time of a block is exponential of the summed
  rate `R`, here truncated to `[0, 1]`; which token it is does not depend on
  it; the others wait on, memoryless:

    tau = -log(1 - u (1 - exp(-R))) / R,
    P(masked i) = 1 - (1 - p_i)^(1 - tau) for the others.

  Its weight is `elbo_weights` times `nonempty_probability`. It is not that of
  `count_weights`: the time was drawn before the mask was known not to be empty,
  so the counts are not uniform (`uniform_count_masking` makes them so).

  Args:
    key: PRNG key.
    token_ids: `[batch, length]` integer, the clean ids.
    is_supervised: `[batch, length]` boolean; only these may be masked.
    mask_probability: `[batch]` or `[batch, length]` floating-point, in
      `[0, 1]`.
    mask_id: the id that stands for a hidden token.
    block_ids: `[batch, length]` integer, whose runs are blocks; None for one
      block a row.

  Returns:
    `(noisy_ids, is_masked)` as `mask_bernoulli`. A block without supervised
    tokens stays as it is.

  Raises:
    TypeError: another dtype or type.
    ValueError: another shape, a `mask_id` that the dtype cannot hold, a
      probability outside `[0, 1]`, or a block whose supervised tokens all have
      probability 0 (where they are not traced).

  Example:
    >>> import jax, jax.numpy as jnp
    >>> _, is_masked = mask_nonempty(
    ...     jax.random.key(0), jnp.array([[3, 4, 5]]),
    ...     jnp.ones((1, 3), bool), jnp.array([1e-6]), mask_id=9)
    >>> int(is_masked.sum())
    1

  Source: equation (1) with the empty masks, which cost nothing, left out.
  """
  ids, supervised = _inputs.tokens(token_ids, is_supervised)
  hidden = _inputs.fitting("mask_id", mask_id, ids.dtype)
  probability, is_bad = _inputs.probabilities(
    "mask_probability", mask_probability, ids
  )
  first = first_positions(block_ids, ids)
  rates = _rates(probability, supervised)
  total = _blocks.sums(rates, first)
  cannot = supervised & (total == 0)
  _inputs.refuse(
    probability,
    cannot,
    "mask_probability must be positive somewhere in each block with a"
    " supervised position",
  )
  is_bad |= jnp.any(cannot, axis=1, keepdims=True)
  which, when, others = jax.random.split(key, 3)
  can = rates > 0
  waits = jax.random.exponential(which, ids.shape, rates.dtype)
  waits = jnp.where(can, waits / jnp.where(can, rates, 1), jnp.inf)
  is_earliest = can & (waits == _blocks.minima(waits, first))
  uniform = jax.random.uniform(when, ids.shape, rates.dtype)
  total = jnp.where(total > 0, total, 1)
  tau = -jnp.log1p(_blocks.at_first(uniform, first) * jnp.expm1(-total)) / total
  later = -jnp.expm1(-rates * (1 - tau))
  uniform = jax.random.uniform(others, ids.shape, rates.dtype)
  is_masked = is_earliest | ((uniform < later) & supervised)
  return _touched(ids, supervised, is_masked, is_bad, hidden)


def nonempty_probability(
  mask_probability: jax.Array,
  is_supervised: jax.Array,
  *,
  block_ids: jax.Array | None = None,
) -> jax.Array:
  """`1 - prod (1 - p_i)`: that a block has a masked supervised token.

  As empty masks cost nothing, `E[w c] = P(nonempty) E[w c | nonempty]`: times
  `elbo_weights` it weighs the masks of `mask_nonempty`. That product is at most
  `n m'(t)`, for `n` supervised tokens, where `elbo_weights` have no bound.

  Args:
    mask_probability: `[batch]` or `[batch, length]` floating-point, in
      `[0, 1]`.
    is_supervised: `[batch, length]` boolean.
    block_ids: `[batch, length]` integer, whose runs are blocks; None for one
      block a row.

  Returns:
    `[batch, length]`, constant on each block; NaN in a row with a traced
    probability outside `[0, 1]`.

  Raises:
    TypeError: another dtype or type.
    ValueError: another shape, or a probability outside `[0, 1]` (where it is
      not traced).

  Example:
    >>> import jax.numpy as jnp
    >>> nonempty_probability(jnp.array([0.5]), jnp.ones((1, 2), bool)).tolist()
    [[0.75, 0.75]]
  """
  supervised = _inputs.positions(
    "is_supervised", is_supervised, dtype="boolean"
  )
  probability, is_bad = _inputs.probabilities(
    "mask_probability", mask_probability, supervised
  )
  rates = _rates(probability, supervised)
  total = _blocks.sums(rates, first_positions(block_ids, supervised))
  return jnp.where(is_bad, jnp.nan, -jnp.expm1(-total))


def mask_exact_count(
  key: jax.Array,
  token_ids: jax.Array,
  is_supervised: jax.Array,
  counts: jax.Array,
  *,
  mask_id: int,
  block_ids: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Hides exactly `counts` of the supervised tokens, each subset equally often.

  With counts uniform on `1..n` its weight is `count_weights(keeps_empty=False)`
  (`uniform_count_masking` draws both; spread evenly over `1..n` they estimate a
  likelihood); with other counts it is `1 / (k P(k))`.

  Args:
    key: PRNG key.
    token_ids: `[batch, length]` integer, the clean ids.
    is_supervised: `[batch, length]` boolean; only these may be masked.
    counts: `[batch]` integer, from 0 to the number of supervised tokens; or
      `[batch, length]`, for each block, at each of its tokens.
    mask_id: the id that stands for a hidden token.
    block_ids: `[batch, length]` integer, whose runs are blocks; None for one
      block a row.

  Returns:
    `(noisy_ids, is_masked)` as `mask_bernoulli`.

  Raises:
    TypeError: another dtype or type.
    ValueError: another shape, a `mask_id` that the dtype cannot hold, a count
      that is negative, larger than the number of supervised tokens, or not the
      same throughout a block (where they are not traced).

  Example:
    >>> import jax, jax.numpy as jnp
    >>> _, is_masked = mask_exact_count(
    ...     jax.random.key(0), jnp.zeros((2, 9), int), jnp.ones((2, 9), bool),
    ...     jnp.array([2, 5]), mask_id=7)
    >>> is_masked.sum(axis=1).tolist()
    [2, 5]

  Source: the likelihood estimate of LLaDA, arXiv:2502.09992.
  """
  ids, supervised = _inputs.tokens(token_ids, is_supervised)
  hidden = _inputs.fitting("mask_id", mask_id, ids.dtype)
  axes = _inputs.AXES[: getattr(counts, "ndim", 1)] or ("batch",)
  checks.array("counts", counts, dtype="integer", axes=axes)
  # Signed and wide: a narrow dtype would wrap the counts of a long row.
  wanted = _inputs.per_token("counts", numerics.token_ids(counts), ids)
  first = first_positions(block_ids, ids)
  available = _blocks.counts(supervised, first).astype(wanted.dtype)
  is_bad = (wanted < 0) | (wanted > available)
  _inputs.refuse(
    wanted,
    is_bad,
    "counts must be nonnegative and at most the number of supervised tokens",
  )
  is_mixed = wanted != _blocks.at_first(wanted, first)
  _inputs.refuse(wanted, is_mixed, "counts must be constant on each block")
  # Blocks stay where they are; in each, supervised tokens come first, shuffled.
  order = jnp.lexsort((jax.random.bits(key, ids.shape), ~supervised, first))
  rank = jnp.argsort(order, axis=1).astype(first.dtype) - first
  is_masked = supervised & (rank.astype(wanted.dtype) < wanted)
  is_bad = jnp.any(is_bad | is_mixed, axis=1, keepdims=True)
  return _touched(ids, supervised, is_masked, is_bad, hidden)


def count_weights(
  is_masked: jax.Array,
  is_supervised: jax.Array,
  *,
  keeps_empty: bool,
  block_ids: jax.Array | None = None,
) -> jax.Array:
  """`(n + 1) / k`, or `n / k`, on the `k` masked of `n` supervised tokens.

  They have the mean of `1 / t` and not its tail, if the masks' law is the right
  one:

  * `keeps_empty=True`, `(n + 1) / k = E[1 / t | k]`: `mask_bernoulli` at
    `m = t`, with `t` uniform on all of `[0, 1]`, empty masks kept at weight 0;
  * `keeps_empty=False`, `n / k`: counts uniform on `1..n`, as of
    `uniform_count_masking`, or as left by drawing time and mask both anew
    until a token is masked. An empty block is refused: with empty masks kept,
    `n / k` loses `1 / (n + 1)` of the bound.

  Args:
    is_masked: `[batch, length]` boolean.
    is_supervised: `[batch, length]` boolean.
    keeps_empty: whether the masks' law has empty masks.
    block_ids: `[batch, length]` integer, whose runs are blocks; None for one
      block a row.

  Returns:
    `[batch, length]` float32, 0 where not masked. Under trace, what would be
    refused is NaN.

  Raises:
    TypeError: another dtype or type.
    ValueError: another shape, a masked position that is not supervised, or with
      `keeps_empty=False` a block with supervised and without masked positions.

  Example:
    >>> import jax.numpy as jnp
    >>> count_weights(jnp.array([[True, False, True]]), jnp.ones((1, 3), bool),
    ...               keeps_empty=True).tolist()
    [[2.0, 0.0, 2.0]]

  Source: equation (3) of `corruption`.
  """
  checks.boolean("keeps_empty", keeps_empty)
  supervised = _inputs.positions(
    "is_supervised", is_supervised, dtype="boolean"
  )
  masked = _inputs.positions("is_masked", is_masked, dtype="boolean")
  checks.same_shape("is_masked", masked, "is_supervised", supervised, axes=2)
  first = first_positions(block_ids, supervised)
  is_outside = masked & ~supervised
  _inputs.refuse(
    masked, is_outside, "is_masked must be False where is_supervised is False"
  )
  n, k = _blocks.counts(supervised, first), _blocks.counts(masked, first)
  is_bad = is_outside
  if not keeps_empty:
    is_empty = supervised & (k == 0)
    _inputs.refuse(
      masked,
      is_empty,
      "is_masked must hold a position of each block with a supervised one,"
      " unless keeps_empty",
    )
    is_bad |= is_empty
  weights = (n + int(keeps_empty)).astype(jnp.float32) / jnp.maximum(
    k, 1
  ).astype(jnp.float32)
  return jnp.where(is_bad, jnp.nan, jnp.where(masked, weights, 0))


def complementary_masks(
  token_ids: jax.Array,
  is_supervised: jax.Array,
  is_masked: jax.Array,
  *,
  mask_id: int,
) -> tuple[jax.Array, jax.Array]:
  """Masks and their complements: each supervised token is covered once.

  Rows `batch..2 batch` hide the supervised tokens that rows `0..batch` show.
  Two scales are right, and differ:

  * weight 1 on masked tokens over "masked": the pair's sum over its `n` tokens;
  * the weights of the bound over "tokens": `2 n` of them, as each half is a
    bound by itself. If a mask was drawn at `m = t`, `t` uniform, its complement
    was at `1 - t`, with the weight `1 / (1 - t)`; with
    `count_weights(keeps_empty=True)` of both halves no time is needed.

  Args:
    token_ids: `[batch, length]` integer, the clean ids.
    is_supervised: `[batch, length]` boolean.
    is_masked: `[batch, length]` boolean, within the supervised positions.
    mask_id: the id that stands for a hidden token.

  Returns:
    `(noisy_ids, is_masked)`, both `[2 batch, length]`.

  Raises:
    TypeError: another dtype or type.
    ValueError: another shape, a `mask_id` that the dtype cannot hold, or a
      masked position that is not supervised (where it is not traced).

  Example:
    >>> import jax.numpy as jnp
    >>> noisy, _ = complementary_masks(
    ...     jnp.array([[3, 4, 5]]), jnp.array([[False, True, True]]),
    ...     jnp.array([[False, True, False]]), mask_id=9)
    >>> noisy.tolist()
    [[3, 9, 5], [3, 4, 9]]

  Source: the paired masks of DiffuCoder, arXiv:2506.20639.
  """
  ids, supervised = _inputs.tokens(token_ids, is_supervised)
  hidden = _inputs.fitting("mask_id", mask_id, ids.dtype)
  masked = _inputs.positions("is_masked", is_masked, dtype="boolean", like=ids)
  is_outside = masked & ~supervised
  _inputs.refuse(
    masked, is_outside, "is_masked must be False where is_supervised is False"
  )
  both = jnp.concatenate([masked, supervised & ~masked])
  return jnp.where(both, hidden, jnp.concatenate([ids, ids])), both


def uniform_replacement(
  key: jax.Array,
  token_ids: jax.Array,
  is_supervised: jax.Array,
  probability: jax.Array,
  *,
  vocabulary_size: int,
) -> tuple[jax.Array, jax.Array]:
  """Draws each supervised token anew, with its probability, from all tokens.

  A token drawn anew may be the one it was: it then stays with probability
  `1 - p + p / K` and becomes each other one with `p / K`.

  Args:
    key: PRNG key.
    token_ids: `[batch, length]` integer, the clean ids.
    is_supervised: `[batch, length]` boolean; only these may be replaced.
    probability: `[batch]` or `[batch, length]` floating-point, in `[0, 1]`.
    vocabulary_size: `K`, the number of tokens drawn from.

  Returns:
    `(noisy_ids, is_redrawn)`: `[batch, length]` in the dtype of `token_ids`;
    and `[batch, length]` boolean, true also where the same token was drawn.
    Under trace, what would be refused shows in `is_redrawn` alone.

  Raises:
    TypeError: another dtype or type.
    ValueError: another shape, a vocabulary that is empty or that the dtype
      cannot hold, or a probability outside `[0, 1]` (where it is not traced).

  Example:
    >>> import jax, jax.numpy as jnp
    >>> noisy, is_redrawn = uniform_replacement(
    ...     jax.random.key(0), jnp.array([[3, 4, 5]]),
    ...     jnp.array([[False, True, True]]), jnp.array([1.0]),
    ...     vocabulary_size=8)
    >>> is_redrawn.tolist()
    [[False, True, True]]

  Source: the uniform process of arXiv:2107.03006, as used by UDLM
  (arXiv:2412.10193).
  """
  ids, supervised = _inputs.tokens(token_ids, is_supervised)
  size = _inputs.integer("vocabulary_size", vocabulary_size, least=1)
  _inputs.fitting("the last id of vocabulary_size", size - 1, ids.dtype)
  chances, is_bad = _inputs.probabilities("probability", probability, ids)
  whether, which = jax.random.split(key)
  uniform = jax.random.uniform(whether, ids.shape, chances.dtype)
  is_redrawn = (uniform < chances) & supervised
  drawn = jax.random.randint(which, ids.shape, 0, size, jnp.int32)
  return _touched(ids, supervised, is_redrawn, is_bad, drawn.astype(ids.dtype))


def first_positions(block_ids: jax.Array | None, like: jax.Array) -> jax.Array:
  """Where each token's block begins; without ids a row is one block."""
  if block_ids is None:
    return jnp.zeros(like.shape, jnp.int32)
  return _blocks.first_positions(
    _inputs.group_ids("block_ids", block_ids, like=like)
  )


def _rates(probability: jax.Array, supervised: jax.Array) -> jax.Array:
  """`-log(1 - p)` of supervised tokens, and 0."""
  return -jnp.log1p(-jnp.where(supervised, probability, 0))


def _touched(ids, supervised, is_touched, is_bad, values):
  """Noisy ids and touched positions; a bad row is touched where it must not."""
  is_touched = jnp.where(is_bad, ~supervised, is_touched)
  return jnp.where(is_touched, values, ids), is_touched
