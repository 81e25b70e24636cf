r"""On-policy states: trajectories of the student, one coarse block a step.

Without data the states that heads are trained at are the student's own. A
stream walks from noise over the nodes `v_0 = 0 < ... < v_S = N` of a partition,
one rung a step: at rung `r` the student's heads at node `v_r` are trained, and
the same heads move the state to `v_{r+1}`, without gradient. After the last
rung the stream begins anew. Its condition stays the same for one whole walk.

With `K` micro-batches to an update there are `K` streams, its slots; rows may
form `G` groups with rungs of their own. The first walk of group `g` in slot `s`
begins at rung

  (g K + s) mod S,                                                          (1)

so that one update sees several. Where the student is trained in every `I`-th
step alone, a stream is trained at its rungs `r_0 + j I mod S`, and every rung
of every condition's walk is reached by some stream if and only if

  G K >= gcd(S, I).                                                         (2)

A stream is a pytree, moved by pure functions. What is drawn comes from one key
and the number of the step alone, so a run that goes on from a saved stream goes
on as if it had not stopped.
"""

from collections.abc import Callable
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusion_objectives._core import checks
from diffusion_objectives._core import numerics
from diffusion_objectives._core import pytree
from diffusion_objectives.objectives.parallel_decoding import partitions
from diffusion_objectives.objectives.parallel_decoding import schedule
from diffusion_objectives.objectives.parallel_decoding import states
from diffusion_objectives.objectives.parallel_decoding import trajectory

State = states.State
# `(state, start [batch], conditioning)` to heads of all intervals.
PredictHeads = Callable[[State, jax.Array, Any], State]


@pytree.record
class Stream:
  """Trajectories of one batch, each at a rung of its own.

  Attributes:
    state: `[batch, ...]` floating-point by modality, at the rung's node.
    rung: `[batch]` integers. At rung 0 a row is empty: `refill` begins a walk.
    conditioning: pytree of arrays `[batch, ...]`, or None.

  Raises:
    TypeError: no array where one must be, or another dtype.
    ValueError: another rank, or several batch sizes.

  Example:
    >>> import numpy as np
    >>> stream = Stream(state={"image": np.zeros((2, 4), np.float32)},
    ...                 rung=np.array([0, 3]), conditioning=None)
  """

  state: State
  rung: jax.Array | np.ndarray
  conditioning: Any

  def __post_init__(self) -> None:
    rows = states.check_rows("state", self.state)
    states.check_rows_of_integers("rung", self.rung, rows)
    check_conditioning(self.conditioning, rows)


def check_conditioning(conditioning: Any, rows: Any) -> None:
  """Checks a pytree of arrays `[batch, ...]`, or None."""
  if conditioning is not None:
    checks.batch_major("conditioning", conditioning, batch=rows, of="the state")


def walk_nodes(
  flow: schedule.FlowSchedule,
  block_size_min: int,
  block_size_max: int,
  nodes: Any = None,
) -> tuple[int, ...]:
  """The nodes of a walk: blocks of the smallest size, or nodes of one's own.

  Args:
    flow: the schedule.
    block_size_min: `L_min`; there are `S = N / L_min` blocks.
    block_size_max: `L_max`, what no block may be wider than.
    nodes: as for `partition`.

  Raises:
    TypeError, ValueError: as `block_sizes` and `partition`.

  Example:
    >>> walk_nodes(schedule.FlowSchedule(8, {"image": 1.0}), 2, 4)
    (0, 2, 4, 6, 8)
  """
  low, high = partitions.block_sizes(
    flow.intervals, block_size_min, block_size_max
  )
  return partitions.partition(
    flow.intervals, flow.intervals // low, nodes, largest=high
  )


def first_rungs(
  rows: int, blocks: int, *, slot: int = 0, slots: int = 1, groups: int = 1
) -> np.ndarray:
  """`[rows]` int32, the rungs (1) of a slot's first walk.

  Args:
    rows: of the batch; consecutive ones form a group.
    blocks: `S`.
    slot: `s`, from 0.
    slots: `K`.
    groups: `G`, a divisor of the rows.

  Raises:
    TypeError: another type.
    ValueError: a slot that is none of the slots, or groups that do not divide
      the rows.

  Example:
    >>> first_rungs(4, 8, slot=1, slots=2, groups=2).tolist()
    [1, 1, 3, 3]
  """
  rows, blocks, slots, groups = (
    checks.positive_integer(name, value)
    for name, value in (
      ("rows", rows),
      ("blocks", blocks),
      ("slots", slots),
      ("groups", groups),
    )
  )
  if slot != 0 or isinstance(slot, bool):
    checks.positive_integer("slot", slot)
  if slot >= slots:
    raise checks.fail(ValueError, f"slot must be below {slots}", slot)
  if rows % groups:
    raise checks.fail(
      ValueError, f"groups must divide the {rows} rows of a batch", groups
    )
  group = np.arange(rows) // (rows // groups)
  return ((group * slots + slot) % blocks).astype(np.int32)


def check_coverage(
  blocks: int, *, slots: int = 1, groups: int = 1, update_interval: int = 1
) -> None:
  """Refuses streams that leave a rung untrained, (2).

  Args:
    blocks: `S`.
    slots: `K`.
    groups: `G`.
    update_interval: `I`, the student is trained in every `I`-th step.

  Raises:
    TypeError: another type.
    ValueError: a rung that no stream is trained at.

  Example:
    >>> check_coverage(8, slots=2, update_interval=2)
  """
  blocks, slots, groups, interval = (
    checks.positive_integer(name, value)
    for name, value in (
      ("blocks", blocks),
      ("slots", slots),
      ("groups", groups),
      ("update_interval", update_interval),
    )
  )
  needed = math.gcd(blocks, interval)
  if groups * slots < needed:
    raise checks.fail(
      ValueError,
      f"slots times groups must be at least {needed}, the greatest common"
      f" divisor of {blocks} blocks and an update interval of {interval}, or"
      " rungs stay untrained",
      f"{slots} and {groups}",
    )


def step_keys(key: jax.Array, step: Any) -> tuple[jax.Array, ...]:
  """The keys of one step, for noise, starts and heads.

  They are those of `fold_in(key, step)`: a resumed run draws what an
  uninterrupted one does.

  Example:
    >>> noise, starts, heads = step_keys(jax.random.key(0), 7)
  """
  return tuple(jax.random.split(jax.random.fold_in(key, step), 3))


def draw_noise(
  key: jax.Array, shapes: Any, dtype: Any = jnp.float32
) -> dict[str, jax.Array]:
  """Standard normal arrays by modality, of shapes `[batch, ...]`.

  Example:
    >>> draw_noise(jax.random.key(0), {"image": (2, 4)})["image"].shape
    (2, 4)
  """
  names = sorted(shapes)
  keys = jax.random.split(key, len(names))
  return {
    name: jax.random.normal(one, tuple(shapes[name]), dtype)
    for name, one in zip(names, keys, strict=True)
  }


def noised(
  flow: schedule.FlowSchedule, data: State, noise: State, index: Any
) -> dict[str, jax.Array]:
  """Data at node `n`, `(1 - sigma(u_n)) x0 + sigma(u_n) noise`.

  Args:
    flow: the schedule.
    data: `[batch, ...]` floating-point by modality.
    noise: of the same shapes.
    index: `[batch]` integers `n`, or one for all.

  Example:
    >>> flow = schedule.FlowSchedule(4, {"image": 1.0}, end=1.0)
    >>> data, noise = ({"image": jnp.full((1, 1), x)} for x in (1.0, 3.0))
    >>> noised(flow, data, noise, 1)["image"].tolist()
    [[2.5]]
  """
  rows = states.integers("index", index, states.check(flow, "data", data))
  states.check(flow, "noise", noise)
  states.check_like("noise", noise, "data", data)
  mixed = {}
  for name, x in data.items():
    dtype = numerics.accumulation_dtype(
      numerics.product_dtype(x.dtype, noise[name].dtype)
    )
    sigmas, rest = (
      states.by_row(
        jnp.asarray(table, dtype).at[rows].get(mode="fill", fill_value=jnp.nan),
        x,
      )
      for table in (flow.sigmas[name], 1 - flow.sigmas[name])
    )
    mixed[name] = rest * numerics.cast(x, dtype) + sigmas * numerics.cast(
      noise[name], dtype
    )
  return mixed


def refill(
  flow: schedule.FlowSchedule,
  stream: Stream | None,
  noise: State,
  conditioning: Any,
) -> Stream:
  """Begins a walk in every row that is empty.

  Such a row takes noise at `sigma(u_0)` and the condition of the batch; the
  others keep theirs, and what the batch has for them is not used.

  Args:
    flow: the schedule.
    stream: the trajectories, or None: all rows are empty.
    noise: `[batch, ...]` standard normal by modality.
    conditioning: pytree of arrays `[batch, ...]`, or None.

  Raises:
    TypeError, ValueError: as `Stream`; or another structure or other shapes
      than the stream's.

  Example:
    >>> flow = schedule.FlowSchedule(4, {"image": 1.0}, end=1.0)
    >>> stream = refill(flow, None, {"image": jnp.ones((2, 1))}, None)
    >>> stream.state["image"].ravel().tolist()
    [1.0, 1.0]
  """
  rows = states.check(flow, "noise", noise)
  check_conditioning(conditioning, rows)
  fresh = {
    name: jnp.asarray(flow.sigmas[name][0], states.wide(x).dtype)
    * states.wide(x)
    for name, x in noise.items()
  }
  if stream is None:
    return Stream(
      state=fresh,
      rung=jnp.zeros(rows, jnp.int32),
      conditioning=jax.tree.map(jnp.asarray, conditioning),
    )
  states.check_like("noise", noise, "the stream's state", stream.state)
  given, kept = map(jax.tree.structure, (conditioning, stream.conditioning))
  if str(given) != str(kept):
    raise checks.fail(
      ValueError,
      f"conditioning must have the stream's structure, {kept}",
      given,
    )
  is_empty = jnp.asarray(stream.rung) == 0

  def chosen(new, old):
    if tuple(new.shape) != tuple(old.shape) or new.dtype != old.dtype:
      raise checks.fail(
        ValueError,
        "what begins a walk must have the stream's shapes and dtypes",
        f"{checks.describe(new)} and {checks.describe(old)}",
      )
    return jnp.where(states.by_row(is_empty, old), new, old)

  return Stream(
    state={name: chosen(fresh[name], x) for name, x in stream.state.items()},
    rung=jnp.asarray(stream.rung),
    conditioning=jax.tree.map(chosen, conditioning, stream.conditioning),
  )


def advance(
  flow: schedule.FlowSchedule,
  stream: Stream,
  heads: State,
  nodes: tuple[int, ...],
  *,
  head_offset: Any = 0,
) -> Stream:
  """The stream one rung further, by the heads at its nodes. No gradient passes.

  A row at the last rung becomes empty.

  Args:
    flow: the schedule.
    stream: the trajectories.
    heads: `[batch, heads, ...]` by modality, predicted at their nodes.
    nodes: of `walk_nodes`.
    head_offset: as for `advance_block`.

  Raises:
    TypeError, ValueError: as `advance_block`. Under trace, a rung that is none
      of the walk gives NaN.

  Example:
    >>> flow = schedule.FlowSchedule(4, {"image": 1.0}, end=1.0)
    >>> stream = refill(flow, None, {"image": jnp.ones((1, 1))}, None)
    >>> stream = advance(
    ...     flow, stream, {"image": jnp.ones((1, 4, 1))}, (0, 2, 4))
    >>> stream.state["image"].tolist(), stream.rung.tolist()
    ([[0.5]], [1])
  """
  start, end = block_of(nodes, stream.rung)
  state = trajectory.advance_block(
    flow,
    jax.lax.stop_gradient(dict(stream.state)),
    jax.lax.stop_gradient(dict(heads)),
    start,
    end,
    head_offset=head_offset,
  )
  rung = jnp.asarray(stream.rung) + 1
  return Stream(
    state=state,
    rung=jnp.where(rung == len(nodes) - 1, 0, rung),
    conditioning=stream.conditioning,
  )


def block_of(nodes: tuple[int, ...], rung: Any) -> tuple[jax.Array, jax.Array]:
  """`[batch]` start and end of each row's block, -1 where a rung has none.

  Example:
    >>> start, end = block_of((0, 2, 4), np.array([0, 1]))
    >>> start.tolist(), end.tolist()
    ([0, 2], [2, 4])
  """
  table = jnp.asarray(nodes, jnp.int32)
  rung = jnp.asarray(rung)
  is_of_walk = (rung >= 0) & (rung < len(nodes) - 1)
  index = jnp.where(is_of_walk, rung, 0)
  start, end = table[index], table[index + 1]
  return jnp.where(is_of_walk, start, -1), jnp.where(is_of_walk, end, -1)


def walk_to(
  flow: schedule.FlowSchedule,
  stream: Stream,
  predict_heads: PredictHeads,
  nodes: tuple[int, ...],
  rungs: Any,
) -> Stream:
  """Walks a stream that has just begun to the rungs of its first walk.

  All rows walk together, as long as one has to; a row keeps the state of its
  own rung. It costs a student forward a rung, once.

  Args:
    flow: the schedule.
    stream: trajectories at rung 0.
    predict_heads: `(state, start [batch], conditioning)` to heads of all
      intervals.
    nodes: of `walk_nodes`.
    rungs: `[batch]` integers, of `first_rungs`.

  Raises:
    TypeError, ValueError: as `advance_block`.

  Example:
    >>> flow = schedule.FlowSchedule(4, {"image": 1.0}, end=1.0)
    >>> stream = refill(flow, None, {"image": jnp.ones((2, 1))}, None)
    >>> one = lambda state, start, conditioning: {"image": jnp.ones((2, 4, 1))}
    >>> nodes = walk_nodes(flow, 1, 2)
    >>> stream = walk_to(flow, stream, one, nodes, np.array([0, 3]))
    >>> stream.state["image"].ravel().tolist(), stream.rung.tolist()
    ([1.0, 0.25], [0, 3])
  """
  rows = len(next(iter(stream.state.values())))
  last = states.integers("rungs", rungs, rows)

  def step(rung, state):
    start, end = block_of(nodes, jnp.full(rows, rung, jnp.int32))
    heads = predict_heads(state, start, stream.conditioning)
    return trajectory.advance_block(
      flow, state, heads, start, jnp.where(rung < last, end, start)
    )

  state = jax.lax.stop_gradient(dict(stream.state))
  state = {name: states.wide(x) for name, x in state.items()}
  return Stream(
    state=jax.lax.stop_gradient(
      jax.lax.fori_loop(0, jnp.max(last), step, state)
    ),
    rung=last,
    conditioning=stream.conditioning,
  )
