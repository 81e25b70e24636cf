r"""How a state moves by the directions of the heads.

Over a block of intervals, with increments `w_j` of each modality (`schedule`),

  x' = x + sum_j w_j q_j                                                    (1)
     = x + (sum_j w_j) v,  v = sum_j a_j q_j,  a_j = w_j / sum_j w_j.       (2)

(1) takes all heads and blocks of each row's own. (2) takes their weighted mean,
which an output layer that is linear gives at once, as the weighted mean of its
heads' parameters: a few-step sampler never forms a head.

States are mappings from modality to `[batch, ...]`, heads to `[batch, heads,
...]`. Increments are formed in float64 on the host and cast once; sums run in
at least float32, which is the dtype of what comes back.
"""

from collections.abc import Callable
from collections.abc import Mapping
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusion_objectives._core import checks
from diffusion_objectives._core import numerics
from diffusion_objectives.objectives.parallel_decoding import schedule
from diffusion_objectives.objectives.parallel_decoding import states

State = states.State


def advance_block(
  flow: schedule.FlowSchedule,
  state: State,
  heads: State,
  start: Any,
  end: Any,
  *,
  head_offset: Any = 0,
) -> dict[str, jax.Array]:
  """The state after each row's own block, (1).

  Heads outside of a row's block may hold anything. A row whose block is empty
  keeps its state.

  Args:
    flow: the schedule.
    state: `[batch, ...]` floating-point, by modality.
    heads: `[batch, heads, ...]` floating-point, by modality.
    start: `[batch]` integers, or one for all.
    end: `[batch]` integers, or one for all, exclusive.
    head_offset: the interval of the first head at hand, an integer or
      `[batch]` of them.

  Returns:
    States in at least float32. Under trace, a row whose block is not covered by
    the heads at hand, or ends before it starts, is NaN.

  Raises:
    TypeError: another type or dtype.
    ValueError: other modalities or shapes, or a block as above.

  Example:
    >>> flow = schedule.FlowSchedule(4, {"image": 1.0}, end=1.0)
    >>> state = {"image": jnp.ones((2, 1))}
    >>> heads = {"image": jnp.array([[[1.0], [2.0], [3.0], [4.0]]] * 2)}
    >>> moved = advance_block(flow, state, heads, jnp.array([0, 2]), 3)
    >>> moved["image"].ravel().tolist()
    [-0.5, 0.25]

  Source: arXiv:2607.26004, algorithm 3.
  """
  rows = states.check(flow, "state", state)
  count = states.check_heads("heads", heads, "state", state)
  offset, start, end = (
    states.integers(name, value, rows)
    for name, value in (
      ("head_offset", head_offset),
      ("start", start),
      ("end", end),
    )
  )
  is_on_grid = (offset >= 0) & (offset + count <= flow.intervals)
  if checks.is_concrete(is_on_grid) and not np.all(is_on_grid):
    raise checks.fail(
      ValueError,
      f"heads must lie within the {flow.intervals} intervals",
      f"{count} from {np.asarray(offset).tolist()}",
    )
  is_covered = (offset <= start) & (start <= end) & (end <= offset + count)
  if checks.is_concrete(is_covered) and not np.all(is_covered):
    raise checks.fail(
      ValueError,
      "blocks must lie within the heads at hand, and end no earlier than they"
      " start",
      f"start {np.asarray(start).tolist()} and end {np.asarray(end).tolist()}"
      f" of {count} heads from {np.asarray(offset).tolist()}",
    )
  intervals = offset[:, None] + jnp.arange(count, dtype=jnp.int32)[None, :]
  is_within = (intervals >= start[:, None]) & (intervals < end[:, None])

  def move(name):
    x, directions = state[name], heads[name]
    dtype = numerics.accumulation_dtype(
      numerics.product_dtype(x.dtype, directions.dtype)
    )
    axes = (rows, count, *(1,) * (len(x.shape) - 1))
    widths = jnp.asarray(flow.increments[name], dtype)
    steps = widths.at[intervals].get(mode="clip").reshape(axes)
    change = jnp.sum(
      jnp.where(is_within.reshape(axes), steps * directions.astype(dtype), 0),
      axis=1,
    )
    moved = x.astype(dtype) + change
    return numerics.poison(moved, states.by_row(is_on_grid & is_covered, x))

  return {name: move(name) for name in flow.modalities}


def advance_fused(
  flow: schedule.FlowSchedule,
  state: State,
  velocity: State,
  start: int,
  end: int,
) -> dict[str, jax.Array]:
  """The state after one block by the mean direction of its heads, (2).

  Args:
    flow: the schedule.
    state: `[batch, ...]` floating-point, by modality.
    velocity: of the same shapes, the heads' mean with `block_weights`.
    start: the first interval.
    end: that after the last.

  Returns:
    States in at least float32.

  Raises:
    TypeError, ValueError: as `advance_block`; or an empty block.

  Example:
    >>> flow = schedule.FlowSchedule(4, {"image": 1.0}, end=1.0)
    >>> state = {"image": jnp.ones((1, 1))}
    >>> moved = advance_fused(flow, state, {"image": jnp.ones((1, 1))}, 1, 3)
    >>> moved["image"].tolist()
    [[0.5]]
  """
  states.check(flow, "state", state)
  states.check(flow, "velocity", velocity)
  first, last = block(flow, start, end)
  nodes = flow.nodes
  widths = flow.increment(nodes[first], nodes[last])

  def move(name):
    if velocity[name].shape != state[name].shape:
      raise checks.fail(
        ValueError,
        f"velocity[{name!r}] must match state shape",
        f"{velocity[name].shape} and {state[name].shape}",
      )
    dtype = numerics.accumulation_dtype(
      numerics.product_dtype(state[name].dtype, velocity[name].dtype)
    )
    change = jnp.asarray(widths[name], dtype) * velocity[name].astype(dtype)
    return state[name].astype(dtype) + change

  return {name: move(name) for name in flow.modalities}


def block_weights(
  flow: schedule.FlowSchedule, start: int, end: int
) -> dict[str, np.ndarray]:
  """`a_j` of (2), `[end - start]` by modality: float64, positive, of sum 1.

  Example:
    >>> flow = schedule.FlowSchedule(4, {"image": 1.0}, end=1.0)
    >>> block_weights(flow, 1, 3)["image"].tolist()
    [0.5, 0.5]
  """
  first, last = block(flow, start, end)
  return {
    name: widths[first:last] / widths[first:last].sum()
    for name, widths in flow.increments.items()
  }


def fuse_head_parameters(
  flow: schedule.FlowSchedule,
  modality: str,
  parameters: Any,
  start: int,
  end: int,
  *,
  axis: int = -2,
) -> Any:
  """The parameters of a linear output layer that gives `v` of (2).

  Args:
    flow: the schedule.
    modality: whose layer it is.
    parameters: a pytree of arrays with `N` heads along an axis, such as a
      kernel `[features, heads, channels]` and a bias `[heads, channels]`.
    start: the first interval.
    end: that after the last.
    axis: the heads'.

  Returns:
    The pytree without that axis, in the dtypes of the parameters; the mean is
    formed in at least float32.

  Raises:
    TypeError, ValueError: as `advance_block`; or no such axis of `N` heads.

  Example:
    >>> flow = schedule.FlowSchedule(2, {"image": 1.0}, end=1.0)
    >>> kernel = jnp.arange(6.0).reshape(1, 2, 3)
    >>> fuse_head_parameters(flow, "image", kernel, 0, 2).tolist()
    [[1.5, 2.5, 3.5]]

  Source: arXiv:2607.26004, algorithm 2.
  """
  if modality not in flow.modalities:
    raise checks.fail(
      ValueError, f"modality must be one of {flow.modalities}", repr(modality)
    )
  weights = block_weights(flow, start, end)[modality]

  def fuse(path, array):
    label = f"parameters{jax.tree_util.keystr(path)}"
    states.check_floating(label, array)
    if not -array.ndim <= axis < array.ndim or (
      array.shape[axis] != flow.intervals
    ):
      raise checks.fail(
        ValueError,
        f"{label} must have {flow.intervals} heads along axis {axis}",
        tuple(array.shape),
      )
    dtype = numerics.accumulation_dtype(array.dtype)
    part = jax.lax.slice_in_dim(array, start, end, axis=axis % array.ndim)
    mean = jnp.tensordot(
      jnp.asarray(weights, dtype),
      part.astype(dtype),
      axes=(0, axis % array.ndim),
      precision="highest",
    )
    return mean.astype(array.dtype)

  return jax.tree_util.tree_map_with_path(fuse, parameters)


def sample(
  flow: schedule.FlowSchedule,
  velocity: Callable[[State, int, int], State],
  noise: State,
  nodes: tuple[int, ...],
) -> dict[str, jax.Array]:
  """Few-step sampling: one call a block of a partition, from noise to data.

  Args:
    flow: the schedule.
    velocity: `(state, start, end)` to `v` of (2), the student's one forward at
      the base time `flow.nodes[start]`.
    noise: `[batch, ...]` standard normal, by modality.
    nodes: of `partitions.partition`.

  Returns:
    The state at base time 0.

  Example:
    >>> flow = schedule.FlowSchedule(4, {"image": 1.0}, end=1.0)
    >>> towards = lambda state, start, end: {"image": state["image"] - 3.0}
    >>> sample(flow, towards, {"image": jnp.ones((1, 1))}, (0, 4))["image"]
    Array([[3.]], dtype=float32)
  """
  states.check(flow, "noise", noise)
  if nodes[0] != 0 or nodes[-1] != flow.intervals:
    raise checks.fail(
      ValueError, f"nodes must rise from 0 to {flow.intervals}", nodes
    )
  state: State = {
    name: flow.sigmas[name][0].astype(np.float32) * noise[name]
    for name in flow.modalities
  }
  for start, end in itertools.pairwise(nodes):
    state = advance_fused(flow, state, velocity(state, start, end), start, end)
  return dict(state)


def data_from_head(
  flow: schedule.FlowSchedule, state: State, head: State, index: Any
) -> dict[str, jax.Array]:
  """A preview of the data from one direction, `x - sigma(u_k) q_k`.

  Args:
    flow: the schedule.
    state: `[batch, ...]` floating-point, by modality, at node `k`.
    head: of the same shapes, the direction there.
    index: `[batch]` integers `k`, or one for all.

  Example:
    >>> flow = schedule.FlowSchedule(4, {"image": 1.0}, end=1.0)
    >>> one = {"image": jnp.ones((1, 1))}
    >>> data_from_head(flow, one, one, 2)["image"].tolist()
    [[0.5]]
  """
  states.check(flow, "state", state)
  states.check(flow, "head", head)
  rows = states.integers("index", index, len(next(iter(state.values()))))
  minus = {name: -sigmas for name, sigmas in flow.sigmas.items()}
  return _moved(minus, state, head, rows)


def data_from_points(
  flow: schedule.FlowSchedule,
  state: State,
  next_state: State,
  start: Any,
  end: Any,
) -> dict[str, jax.Array]:
  """A preview of the data from two states: the chord through both, at noise 0.

  `x - sigma(u_start) (x' - x) / (sigma(u_end) - sigma(u_start))`; a block that
  ends at node `N` gives `x'`.

  Args:
    flow: the schedule.
    state: `[batch, ...]` floating-point, by modality, at node `start`.
    next_state: of the same shapes, at node `end`.
    start: the first interval.
    end: that after the last.

  Example:
    >>> flow = schedule.FlowSchedule(4, {"image": 1.0}, end=1.0)
    >>> one, two = ({"image": jnp.full((1, 1), x)} for x in (1.0, 2.0))
    >>> data_from_points(flow, one, two, 0, 2)["image"].tolist()
    [[3.0]]
  """
  states.check(flow, "state", state)
  states.check(flow, "next_state", next_state)
  first, last = block(flow, start, end)
  widths = flow.increment(flow.nodes[first], flow.nodes[last])
  chords = {
    name: np.asarray([-flow.sigmas[name][first] / widths[name]])
    for name in flow.modalities
  }
  apart = {
    name: states.wide(next_state[name]) - states.wide(state[name])
    for name in flow.modalities
  }
  rows = jnp.zeros(next(iter(state.values())).shape[0], jnp.int32)
  return _moved(chords, state, apart, rows)


def _moved(
  tables: Mapping[str, np.ndarray], state: State, change: State, rows: Any
) -> dict[str, jax.Array]:
  """The state and each row's entry of a table times a change."""
  moved = {}
  beyond = np.iinfo(np.int32).max
  rows = jnp.where(rows < 0, beyond, rows)  # JAX would wrap it
  for name, x in state.items():
    y = change[name]
    if y.shape != x.shape:
      raise checks.fail(
        ValueError,
        f"arrays of {name!r} must have one shape",
        f"{x.shape} and {y.shape}",
      )
    dtype = numerics.accumulation_dtype(
      numerics.product_dtype(x.dtype, y.dtype)
    )
    entries = (
      jnp.asarray(tables[name], dtype)
      .at[rows]
      .get(mode="fill", fill_value=jnp.nan)
    )
    moved[name] = x.astype(dtype) + states.by_row(entries, x) * y.astype(dtype)
  return moved


def base_times(
  flow: schedule.FlowSchedule, index: jax.Array, dtype: Any = jnp.float32
) -> jax.Array:
  """`[batch]` base times of nodes, what a network is called with.

  A node beyond the grid is NaN.

  Example:
    >>> flow = schedule.FlowSchedule(4, {"image": 1.0}, end=1.0)
    >>> base_times(flow, jnp.array([0, 1])).tolist()
    [1.0, 0.75]
  """
  index = jnp.where(index < 0, flow.intervals + 1, index)  # JAX would wrap it
  return (
    jnp.asarray(flow.nodes, dtype)
    .at[index]
    .get(mode="fill", fill_value=jnp.nan)
  )


def window_offset(
  flow: schedule.FlowSchedule, start: jax.Array, heads: int
) -> jax.Array:
  """Where a window of heads begins that covers those from `start` on.

  It is `start`, or as much before it as the grid's end needs.

  Example:
    >>> flow = schedule.FlowSchedule(8, {"image": 1.0})
    >>> window_offset(flow, jnp.array([0, 6]), 4).tolist()
    [0, 4]
  """
  return jnp.minimum(start, flow.intervals - heads)


def block(flow: schedule.FlowSchedule, start: Any, end: Any) -> tuple[int, int]:
  """Checks a static block, `0 <= start < end <= N`."""
  if start != 0 or isinstance(start, bool):
    checks.positive_integer("start", start)
  first, last = int(start), checks.positive_integer("end", end)
  if not first < last <= flow.intervals:
    raise checks.fail(
      ValueError,
      f"start and end must rise within 0 to {flow.intervals}",
      f"{first} and {last}",
    )
  return first, last
