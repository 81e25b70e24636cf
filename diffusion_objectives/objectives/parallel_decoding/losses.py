r"""The loss: one head of each row against the teacher's direction.

With `q_k` the supervised head of a row, `P` its target (`teacher`), `V_m` the
valid elements of modality `m` in the row and `lambda_m` a weight,

  l_m = 1 / |V_m| sum_{i in V_m} (q_{k,i} - P_i)^2,                         (1)
  loss = sum_rows sum_m lambda_m l_m / |{rows with a valid element}|.       (2)

A modality's number of elements does not weight it, and a row's number does not
weight the row: (2) is one ratio, exact under any accumulation. A modality that
is absent from a row adds 0 to it.

The other reduction, all elements of a modality alike, is a ratio of its own for
each modality: `pdd_modality_losses`.
"""

from collections.abc import Mapping
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diffusion_objectives import outputs
from diffusion_objectives._core import checks
from diffusion_objectives._core import numerics
from diffusion_objectives._core import pytree
from diffusion_objectives.objectives.parallel_decoding import schedule
from diffusion_objectives.objectives.parallel_decoding import states
from diffusion_objectives.objectives.parallel_decoding import teacher
from diffusion_objectives.objectives.parallel_decoding import trajectory

State = states.State


@pytree.record
class ParallelDecodingBatch:
  """What heads are held against: `supervise` makes it.

  Attributes:
    start: `[batch]` integers `n`, the interval at whose node the heads were
      predicted.
    index: `[batch]` integers `k >= n`, the supervised head.
    state: `[batch, ...]` floating-point by modality, the state at node `k`. It
      is only described.
    target: of the same modalities and shapes, the teacher's direction.
    valid: of the same shapes, boolean, the elements that belong to the sample;
      the others may hold anything. None is all.
    head_offset: `[batch]` integers, the interval of the first head at hand, or
      None: heads are those of all intervals.

  Raises:
    TypeError: no array where one must be, or another dtype.
    ValueError: another rank or shape, or other modalities.

  Example:
    >>> import numpy as np
    >>> batch = ParallelDecodingBatch(
    ...     start=np.array([0]), index=np.array([2]),
    ...     state={"image": np.zeros((1, 8, 8, 3), np.float32)},
    ...     target={"image": np.ones((1, 8, 8, 3), np.float32)})
    >>> batch.check_values(intervals=4)
  """

  start: jax.Array | np.ndarray
  index: jax.Array | np.ndarray
  state: State
  target: State
  valid: Mapping[str, jax.Array | np.ndarray] | None = None
  head_offset: jax.Array | np.ndarray | None = None

  def __post_init__(self) -> None:
    rows = states.check_rows("target", self.target)
    states.check_rows("state", self.state)
    states.check_like("state", self.state, "target", self.target)
    if self.valid is not None:
      check_valid(self.valid, "target", self.target)
    for name in ("start", "index", "head_offset"):
      value = getattr(self, name)
      if value is not None:
        states.check_rows_of_integers(name, value, rows)

  def check_values(self, intervals: int | None = None) -> None:
    """Refuses values that the loss cannot be right on; they are read.

    Args:
      intervals: `N`; None leaves the upper end open.

    Raises:
      ValueError: in a row with a valid element an index below its start, or
        either outside of the grid; or a target that is not finite where valid.
    """
    last = np.inf if intervals is None else intervals - 1
    is_active = _is_active(self, np)
    start, index = np.asarray(self.start), np.asarray(self.index)
    is_wrong = (start < 0) | (index < start) | (index > last)
    if (is_active & is_wrong).any():
      raise checks.fail(
        ValueError,
        "start and index must satisfy 0 <= start <= index"
        + ("" if intervals is None else f" < {intervals}"),
        f"{start.tolist()} and {index.tolist()}",
      )
    for name, target in self.target.items():
      is_finite = np.isfinite(np.asarray(target, np.float32))
      if self.valid is not None:
        is_finite |= ~np.asarray(self.valid[name])
      if not is_finite.all():
        raise checks.fail(
          ValueError,
          f"target[{name!r}] must be finite where valid",
          f"{int((~is_finite).sum())} elements that are not",
        )


def check_valid(valid: Any, other_name: str, other: State) -> None:
  """Checks masks against a state: its modalities and shapes, boolean."""
  states.check_like("valid", valid, other_name, other)
  for name, mask in valid.items():
    if not jnp.issubdtype(mask.dtype, jnp.bool_):
      raise checks.fail(
        TypeError, f"valid[{name!r}] must have boolean dtype", mask.dtype
      )


def supervise(
  flow: schedule.FlowSchedule,
  predict: teacher.Predict,
  heads: State,
  state: State,
  start: Any,
  index: jax.Array,
  *,
  solver: str = "euler",
  stage_clock: str | None = None,
  valid: Mapping[str, jax.Array] | None = None,
  head_offset: jax.Array | None = None,
) -> ParallelDecodingBatch:
  """The batch of one forward: state advanced by the heads, teacher's target.

  No gradient passes: neither through the advance nor through the teacher.

  Args:
    flow: the schedule.
    predict: the teacher, `(state, base times [batch])` to directions.
    heads: `[batch, heads, ...]` by modality, the student's at `start`.
    state: `[batch, ...]` by modality, at node `start`.
    start: `[batch]` integers `n`, or one for all.
    index: `[batch]` integers `k`, the supervised head.
    solver: of `teacher_target`.
    stage_clock: of `teacher_target`.
    valid: of the batch.
    head_offset: of the batch.

  Raises:
    TypeError, ValueError: as `advance_block`, `teacher_target` and
      `ParallelDecodingBatch`.

  Example:
    >>> flow = schedule.FlowSchedule(4, {"image": 1.0}, end=1.0)
    >>> heads = {"image": jnp.array([[[1.0], [2.0], [3.0], [4.0]]])}
    >>> batch = supervise(
    ...     flow, lambda state, time: state, heads,
    ...     {"image": jnp.ones((1, 1))}, 0, jnp.array([2]))
    >>> batch.target["image"].tolist()
    [[0.25]]

  Source: arXiv:2607.26004, algorithm 3.
  """
  constant = jax.lax.stop_gradient(dict(heads))
  moved = trajectory.advance_block(
    flow,
    jax.lax.stop_gradient(dict(state)),
    constant,
    start,
    index,
    head_offset=0 if head_offset is None else head_offset,
  )
  rows = index.shape[0]
  return ParallelDecodingBatch(
    start=states.integers("start", start, rows),
    index=index,
    state=moved,
    target=teacher.teacher_target(
      predict, flow, moved, index, solver=solver, stage_clock=stage_clock
    ),
    valid=valid,
    head_offset=head_offset,
  )


def pdd_head_loss(
  heads: State,
  batch: ParallelDecodingBatch,
  *,
  modality_weights: Mapping[str, float] | None = None,
) -> outputs.LossOutput:
  """Parallel decoding distillation: the sum of (1) over rows and modalities.

  Only the supervised head of each row has a gradient. Heads that are not
  supervised, and elements that are not valid, may hold anything; a row without
  a valid element is inert.

  Args:
    heads: `[batch, heads, ...]` floating-point by modality, those of all
      intervals, or from the batch's `head_offset` on.
    batch: the supervised head of each row, and its target.
    modality_weights: nonnegative `lambda` by modality, 1 where not named; at
      least one is positive. A modality of weight 0 is not computed.

  Returns:
    The loss per row that has a valid element of any modality. `aux_metrics`,
    means over the rows that have one of the modality: `pdd/<modality>_loss`,
    (1); `pdd/<modality>_head_square`, `_target_square` and `_state_square`,
    mean squares over valid elements. Over the rows that have one of any:
    `pdd/head_distance`, `k - n`; `pdd/finite_heads`, whether all heads at hand
    are finite where valid.

  Raises:
    TypeError: `batch` of another class, heads that are not floating-point, or a
      weight that is no real number.
    ValueError: other modalities or shapes, or weights that are negative, all 0
      or of no modality. Under trace, a supervised head that is not at hand
      gives NaN.

  Example:
    >>> batch = ParallelDecodingBatch(
    ...     start=jnp.array([0]), index=jnp.array([1]),
    ...     state={"image": jnp.zeros((1, 2))},
    ...     target={"image": jnp.array([[1.0, 2.0]])})
    >>> heads = {"image": jnp.array([[[9.0, 9.0], [1.0, 4.0]]])}
    >>> float(pdd_head_loss(heads, batch).primary_loss.compute())
    2.0

  Source: arXiv:2607.26004, algorithm 3. The sum over modalities is FastVideo's;
  the paper averages two, which is `modality_weights` of 1/2.
  """
  weights = check_modality_weights(_check(heads, batch), modality_weights)
  dtype = _dtype(heads)
  rows = _is_active(batch)
  total = jnp.zeros((), dtype)
  aux_metrics: dict[str, outputs.WeightedMetric] = {}
  for name, weight in weights.items():
    terms = _terms(heads, batch, name, dtype)
    loss = terms.mean((terms.head - terms.target) ** 2)
    if weight:
      total = total + weight * numerics.masked_sum(loss, terms.has_any)
    described = {
      "loss": loss,
      "head_square": terms.mean(terms.head**2),
      "target_square": terms.mean(terms.target**2),
      "state_square": terms.mean(terms.state**2),
    }
    aux_metrics |= outputs.masked_means(
      f"pdd/{name}_", jax.lax.stop_gradient(described), terms.has_any
    )
  distance = numerics.cast(batch.index, jnp.dtype(jnp.int32)) - numerics.cast(
    batch.start, jnp.dtype(jnp.int32)
  )
  aux_metrics |= outputs.masked_means(
    "pdd/",
    {
      "head_distance": distance.astype(dtype),
      "finite_heads": _are_finite(heads, batch).astype(dtype),
    },
    rows,
  )
  return outputs.LossOutput(
    primary_loss=outputs.WeightedMetric(
      unreduced_sum=total, denominator=numerics.count(rows, dtype)
    ),
    aux_metrics=aux_metrics,
  )


def pdd_modality_losses(
  heads: State, batch: ParallelDecodingBatch
) -> dict[str, outputs.LossOutput]:
  """One loss a modality, over all its valid elements alike.

  `sum (q_k - P)^2` over the valid elements of all rows, and their number. Two
  modalities are two ratios, which no sum and denominator of them both is exact
  for: accumulate each by itself, then add.

  Args:
    heads: as for `pdd_head_loss`.
    batch: as for `pdd_head_loss`.

  Returns:
    By modality, the loss per valid element, without further metrics.

  Raises:
    TypeError, ValueError: as `pdd_head_loss`.

  Example:
    >>> batch = ParallelDecodingBatch(
    ...     start=jnp.array([0]), index=jnp.array([1]),
    ...     state={"image": jnp.zeros((1, 2))},
    ...     target={"image": jnp.array([[1.0, 2.0]])})
    >>> heads = {"image": jnp.array([[[9.0, 9.0], [1.0, 4.0]]])}
    >>> output = pdd_modality_losses(heads, batch)["image"]
    >>> float(output.primary_loss.denominator)
    2.0
  """
  _check(heads, batch)
  dtype = _dtype(heads)
  given = {}
  for name in batch.target:
    terms = _terms(heads, batch, name, dtype)
    given[name] = outputs.LossOutput(
      primary_loss=outputs.WeightedMetric(
        unreduced_sum=jnp.sum((terms.head - terms.target) ** 2),
        denominator=numerics.count(terms.valid, dtype),
      ),
      aux_metrics={},
    )
  return given


def check_modality_weights(
  modalities: tuple[str, ...], weights: Mapping[str, float] | None
) -> dict[str, float]:
  """`lambda` of all modalities, 1 where not named."""
  if weights is None:
    return dict.fromkeys(modalities, 1.0)
  if not isinstance(weights, Mapping):
    raise checks.fail(
      TypeError,
      "modality_weights must be a mapping from modality to weight",
      checks.describe(weights),
    )
  if not set(weights) <= set(modalities):
    raise checks.fail(
      ValueError,
      f"modality_weights must name modalities of {modalities}",
      tuple(weights),
    )
  given = {
    name: checks.finite_real(
      f"modality_weights[{name!r}]", weights.get(name, 1.0), nonnegative=True
    )
    for name in modalities
  }
  if not any(given.values()):
    raise checks.fail(
      ValueError, "at least one of modality_weights must be positive", given
    )
  return given


class _Terms(NamedTuple):
  """One modality, with 0 where it is not valid.

  Attributes:
    head, target, state: `[batch, ...]` in the loss's dtype.
    valid: `[batch, ...]`.
    counts: `[batch]`, valid elements of each row.
    has_any: `[batch]`.
  """

  head: jax.Array
  target: jax.Array
  state: jax.Array
  valid: jax.Array
  counts: jax.Array
  has_any: jax.Array

  def mean(self, values: jax.Array) -> jax.Array:
    """`[batch]` means over valid elements; 0 where a row has none."""
    totals = jnp.sum(values, axis=tuple(range(1, values.ndim)))
    return totals / jnp.where(self.has_any, self.counts, 1)


def _terms(
  heads: State, batch: ParallelDecodingBatch, name: str, dtype: jnp.dtype
) -> _Terms:
  """The supervised heads of a modality beside their targets."""
  target = batch.target[name]
  valid = (
    jnp.ones(target.shape, bool)
    if batch.valid is None
    else jnp.asarray(batch.valid[name])
  )
  axes = tuple(range(1, valid.ndim))
  counts = jnp.sum(valid, axis=axes, dtype=jnp.int32)
  count = heads[name].shape[1]
  index = numerics.cast(batch.index, jnp.dtype(jnp.int32))
  if batch.head_offset is not None:
    index = index - numerics.cast(batch.head_offset, jnp.dtype(jnp.int32))
  is_at_hand = (index >= 0) & (index < count)
  picked = jnp.take_along_axis(
    heads[name],
    jnp.where(is_at_hand, index, 0).reshape(-1, *(1,) * valid.ndim),
    axis=1,
  )[:, 0]

  def clean(array):
    return jnp.where(valid, numerics.cast(array, dtype), 0)

  has_any = counts > 0
  is_usable = states.by_row(is_at_hand | ~has_any, target)
  return _Terms(
    head=numerics.poison(clean(picked), is_usable),
    target=jax.lax.stop_gradient(clean(target)),
    state=jax.lax.stop_gradient(clean(batch.state[name])),
    valid=valid,
    counts=counts.astype(dtype),
    has_any=has_any,
  )


def _are_finite(heads: State, batch: ParallelDecodingBatch) -> jax.Array:
  """`[batch]`, whether all heads are finite where valid."""
  found = []
  for name, array in heads.items():
    is_fine = jnp.isfinite(array)
    if batch.valid is not None:
      is_fine |= ~jnp.asarray(batch.valid[name])[:, None]
    found.append(jnp.all(is_fine, axis=tuple(range(1, is_fine.ndim))))
  return jnp.all(jnp.stack(found), axis=0)


def _is_active(batch: ParallelDecodingBatch, xp: Any = jnp) -> Any:
  """`[batch]`, whether a row has a valid element of any modality."""
  if batch.valid is None:
    has_any = any(0 not in x.shape[1:] for x in batch.target.values())
    return xp.full(batch.index.shape, has_any)
  found = [
    xp.any(xp.asarray(mask), axis=tuple(range(1, mask.ndim)))
    for mask in batch.valid.values()
  ]
  return xp.any(xp.stack(found), axis=0)


def _check(heads: State, batch: ParallelDecodingBatch) -> tuple[str, ...]:
  """Checks heads against a batch and returns the modalities."""
  checks.instance("batch", batch, ParallelDecodingBatch)
  states.check_heads("heads", heads, "target", batch.target)
  return tuple(batch.target)


def _dtype(heads: State) -> jnp.dtype:
  """The loss's: the widest of the modalities'."""
  dtypes = (numerics.accumulation_dtype(x.dtype) for x in heads.values())
  return max(dtypes, key=lambda dtype: dtype.itemsize)
