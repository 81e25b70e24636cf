"""Schedules, times and the bound's weights."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from diffusion_objectives._core import checks
from diffusion_objectives.corruption import _blocks
from diffusion_objectives.corruption import _inputs

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
  times = _inputs.floating("times", times)
  probability, slope = jax.jvp(
    mask_probability, (times,), (jnp.ones_like(times),)
  )
  return slope / probability


def stratified_times(
  key: jax.Array,
  batch_size: int,
  *,
  min_time: float = 1e-3,
  max_time: float = 1.0,
) -> jax.Array:
  """One time a row; each of `batch_size` equal strata holds one.

  `t = min_time + (max_time - min_time) (j + u) / batch_size` with
  `u ~ U[0, 1)` and the stratum `j` of each row by a random permutation. Each
  row by itself is uniform on `[min_time, max_time]`; the batch covers that
  range evenly.

  Args:
    key: PRNG key.
    batch_size: number of rows.
    min_time: the least time. It bounds the weight `1 / t`, at the cost of a
      relative bias of the bound of about `m(min_time)`, the share of masks left
      out: 1e-3 for the linear schedule, 3 % for `t^0.5`.
    max_time: the largest time, `0 <= min_time <= max_time <= 1`. A range
      narrower than `[0, 1]` by more than that floor is another objective, not
      the bound (block diffusion trains so for less noise of the gradient):
      evaluate on the full range.

  Returns:
    `[batch_size]` float32.

  Raises:
    TypeError: `batch_size` is no integer, or a time no real number.
    ValueError: out of range.

  Example:
    >>> import jax
    >>> times = stratified_times(jax.random.key(0), 4)
    >>> sorted((times * 4).astype(int).tolist())
    [0, 1, 2, 3]

  Source: the low-discrepancy sampler of arXiv:2107.00630, appendix I.1, in its
  stratified form; clipped ranges: arXiv:2503.09573.
  """
  batch_size = _inputs.integer("batch_size", batch_size)
  low, high = _time_range(min_time, max_time)
  stratum_key, uniform_key = jax.random.split(key)
  strata = jax.random.permutation(stratum_key, batch_size)
  uniform = jax.random.uniform(uniform_key, (batch_size,), jnp.float32)
  unit = (strata.astype(jnp.float32) + uniform) / batch_size
  return _within(unit, low, high)


def block_times(
  key: jax.Array,
  block_ids: jax.Array,
  *,
  min_time: float = 1e-3,
  max_time: float = 1.0,
  stratified: bool = True,
) -> jax.Array:
  """One time a block, at each of its tokens.

  Each block by itself is uniform on `[min_time, max_time]`. Stratified, the
  blocks of the batch, `N` in all, hold one time in each of `N` equal strata,
  by a random permutation; else they are independent. Prompts and padding count
  as blocks: give what is not supervised one id if it should take few strata.

  Args:
    key: PRNG key.
    block_ids: `[batch, length]` integer; a run of equal ids in a row is a
      block. `block_ids` of this package makes them, and `segment_ids` are such.
    min_time: the least time.
    max_time: the largest time, as for `stratified_times`.
    stratified: whether the times share out the range.

  Returns:
    `[batch, length]` float32, constant on each block.

  Raises:
    TypeError: another dtype or type.
    ValueError: another shape, or a time out of range.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> times = block_times(jax.random.key(0), jnp.array([[0, 0, 1, 1]]))
    >>> sorted((times[0] * 2).astype(int).tolist())
    [0, 0, 1, 1]

  Source: arXiv:2503.09573, stratified over batch and blocks as in
  its code.
  """
  ids = _inputs.group_ids("block_ids", block_ids)
  low, high = _time_range(min_time, max_time)
  checks.boolean("stratified", stratified)
  stratum_key, uniform_key = jax.random.split(key)
  unit = jax.random.uniform(uniform_key, ids.shape, jnp.float32)
  if stratified:
    # The blocks in a random order: each takes the next stratum.
    is_first = _blocks.is_first(ids)
    order = jax.random.permutation(stratum_key, ids.size)
    places = jnp.cumsum(is_first.ravel()[order].astype(jnp.int32)) - 1
    strata = jnp.zeros_like(places).at[order].set(places).reshape(ids.shape)
    unit = (strata.astype(jnp.float32) + unit) / jnp.sum(
      is_first, dtype=jnp.int32
    ).astype(jnp.float32)
  return _within(
    _blocks.at_first(unit, _blocks.first_positions(ids)), low, high
  )


def _time_range(min_time: Any, max_time: Any) -> tuple[float, float]:
  low = checks.finite_real("min_time", min_time, nonnegative=True)
  high = checks.finite_real("max_time", max_time)
  if high > 1:
    raise checks.fail(ValueError, "max_time must be at most 1", max_time)
  if low > high:
    raise checks.fail(
      ValueError,
      "min_time must be at most max_time",
      f"{min_time} and {max_time}",
    )
  return low, high


def _within(unit: jax.Array, low: float, high: float) -> jax.Array:
  return high - (high - low) * (1 - unit)  # never above `high` by rounding
