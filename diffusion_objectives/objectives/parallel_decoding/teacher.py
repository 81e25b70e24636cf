r"""The direction that a head is to have: the teacher's mean over its interval.

A teacher predicts directions `p` at a state and a base time, and its flow is
`dx = p d sigma` in each modality, all modalities together. Over interval `k`
from a state `x`, with the interval's increment `w`, a head's target is

  P = (X(u_{k+1}) - x) / w = 1 / w  integral p d sigma.                     (1)

With `p_1 = p(x, u_k)` the solvers are

  euler              p_1
  midpoint           p_2 = p(x + h p_1, u')
  midpoint_corrected (1 - t) p_1 + t p_2,  t = w / (2 h)
  heun               (p_1 + p_2) / 2,      u' = u_{k+1}, h = w
  rk4                the classic rule on base times, of `p d sigma / d u`

with `h` the increment from `u_k` to a stage at `u'`. The midpoint lies halfway
in base time (`stage_clock="base"`, which all modalities share), or halfway in
the noise level ("sigma"), where they have one shift. In base time `t` differs
from 1, and the correction makes the rule exact for directions that are linear
in the noise level. All but rk4 are exact on straight paths.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusion_objectives._core import checks
from diffusion_objectives._core import numerics
from diffusion_objectives.objectives.parallel_decoding import schedule
from diffusion_objectives.objectives.parallel_decoding import states

State = states.State
Predict = Callable[[State, jax.Array], State]

SOLVERS = ("euler", "midpoint", "midpoint_corrected", "heun", "rk4")
STAGE_CLOCKS = ("base", "sigma")


def guided(
  conditional: Predict, unconditional: Predict | None, scale: float
) -> Predict:
  """Classifier-free guidance, `p_unc + g (p_cond - p_unc)`, at every stage.

  At scale 1 it is the conditional prediction, and no other is called.

  Args:
    conditional: `(state, base time)` to directions.
    unconditional: the same without the condition; None only at scale 1.
    scale: `g > 0`.

  Raises:
    TypeError: another type.
    ValueError: a scale that is not positive, or no unconditional prediction.

  Example:
    >>> one = lambda state, time: {"x": jnp.ones(1)}
    >>> none = lambda state, time: {"x": jnp.zeros(1)}
    >>> guided(one, none, 3.0)({}, jnp.zeros(1))["x"].tolist()
    [3.0]

  Source: arXiv:2207.12598, with `g = 1 + w`.
  """
  checks.function("conditional", conditional)
  weight = checks.finite_real("scale", scale, positive=True)
  if weight == 1:
    return conditional
  if unconditional is None:
    raise checks.fail(
      ValueError, "unconditional must be given unless scale is 1", f"{scale}"
    )
  checks.function("unconditional", unconditional)

  def predict(state, time):
    with_, without = conditional(state, time), unconditional(state, time)
    return jax.tree.map(
      lambda c, u: states.wide(u) + weight * (states.wide(c) - states.wide(u)),
      dict(with_),
      dict(without),
    )

  return predict


def teacher_target(
  predict: Predict,
  flow: schedule.FlowSchedule,
  state: State,
  index: Any,
  *,
  solver: str = "euler",
  stage_clock: str | None = None,
) -> dict[str, jax.Array]:
  """The mean direction (1) of each row's interval. No gradient passes.

  Args:
    predict: `(state, base times [batch])` to directions of the state's shapes.
    flow: the schedule.
    state: `[batch, ...]` floating-point, by modality, at the interval's start.
    index: `[batch]` integers, the interval.
    solver: one of `SOLVERS`, with 1, 2, 2, 2 and 4 predictions.
    stage_clock: of the midpoint, "base" or "sigma"; None is "sigma" where all
      modalities have one shift, else "base".

  Returns:
    Targets in at least float32. Under trace, an index beyond the intervals
    gives NaN.

  Raises:
    TypeError: another type or dtype.
    ValueError: an unknown solver or clock, "sigma" with several shifts, other
      modalities or shapes, or an index beyond the intervals.

  Example:
    >>> flow = schedule.FlowSchedule(4, {"image": 3.0})
    >>> straight = lambda state, time: {"image": jnp.full((1, 1), 2.0)}
    >>> teacher_target(straight, flow, {"image": jnp.ones((1, 1))},
    ...                jnp.array([2]), solver="heun")["image"].tolist()
    [[2.0]]

  Source: arXiv:2607.26004, algorithm 1, for one modality; the stage of several
  is this library's, as no public code shows it.
  """
  checks.function("predict", predict)
  if solver not in SOLVERS:
    raise checks.fail(
      ValueError, f"solver must be one of {SOLVERS}", repr(solver)
    )
  clock = _clock(flow, stage_clock)
  states.check_rows_of_integers(
    "index", index, states.check(flow, "state", state)
  )
  is_within = (index >= 0) & (index < flow.intervals)
  if checks.is_concrete(is_within) and not np.all(is_within):
    raise checks.fail(
      ValueError,
      f"index must be at least 0 and below {flow.intervals}",
      np.asarray(index).tolist(),
    )
  rows = jnp.where(is_within, index, 0)
  start = {name: states.wide(array) for name, array in state.items()}
  widest = max((x.dtype for x in start.values()), key=lambda d: d.itemsize)
  begin, end = flow.nodes[:-1], flow.nodes[1:]
  middle = (begin + end) / 2 if clock == "base" else _middle_of_sigma(flow)

  def at(times, moved):
    given = predict(moved, jnp.asarray(times, widest)[rows])
    states.check_rows("what predict returns", given)
    states.check_like("what predict returns", given, "state", start)
    return {name: states.wide(given[name]) for name in start}

  def along(steps, directions):
    return {
      name: x + _row(steps[name], rows, x) * directions[name]
      for name, x in start.items()
    }

  def mean(weights):
    """Of `(table of weights by modality, directions)`."""
    return {
      name: sum(_row(w[name], rows, x) * p[name] for w, p in weights)
      for name, x in start.items()
    }

  whole = flow.increments
  first = at(begin, start)
  if solver == "euler":
    target = first
  elif solver == "heun":
    half = {name: np.full(flow.intervals, 0.5) for name in start}
    target = mean([(half, first), (half, at(end, along(whole, first)))])
  elif solver == "rk4":
    target = _rk4(flow, at, along, mean, first)
  else:
    steps = flow.increment(begin, middle)
    target = at(middle, along(steps, first))
    if solver == "midpoint_corrected":
      share = {name: whole[name] / (2 * steps[name]) for name in start}
      rest = {name: 1 - share[name] for name in start}
      target = mean([(rest, first), (share, target)])
  return {
    name: jax.lax.stop_gradient(numerics.poison(x, states.by_row(is_within, x)))
    for name, x in target.items()
  }


def _rk4(flow, at, along, mean, first):
  """Of `p d sigma / du` over base times, divided by the increment."""
  begin, end = flow.nodes[:-1], flow.nodes[1:]
  width, middle = end - begin, (begin + end) / 2
  slopes = [flow.slope(times) for times in (begin, middle, end)]

  def steps(slope, share):
    return {name: share * width * slope[name] for name in slope}

  second = at(middle, along(steps(slopes[0], 0.5), first))
  third = at(middle, along(steps(slopes[1], 0.5), second))
  fourth = at(end, along(steps(slopes[1], 1.0), third))
  shares = [
    {name: share[name] / flow.increments[name] for name in share}
    for share in (
      steps(slopes[0], 1 / 6),
      steps(slopes[1], 1 / 3),
      steps(slopes[1], 1 / 3),
      steps(slopes[2], 1 / 6),
    )
  ]
  return mean(list(zip(shares, (first, second, third, fourth), strict=True)))


def _clock(flow: schedule.FlowSchedule, clock: str | None) -> str:
  is_shared = len({shift for _, shift in flow.shifts}) == 1
  if clock is None:
    return "sigma" if is_shared else "base"
  if clock not in STAGE_CLOCKS:
    raise checks.fail(
      ValueError,
      f"stage_clock must be None or one of {STAGE_CLOCKS}",
      repr(clock),
    )
  if clock == "sigma" and not is_shared:
    raise checks.fail(
      ValueError,
      'stage_clock="sigma" must come with one shift for all modalities',
      dict(flow.shifts),
    )
  return clock


def _middle_of_sigma(flow: schedule.FlowSchedule) -> np.ndarray:
  """`[N]` base times halfway in the noise level."""
  name = flow.modalities[0]
  sigmas = flow.sigmas[name]
  return flow.base_time(name, (sigmas[:-1] + sigmas[1:]) / 2)


def _row(table: np.ndarray, rows: jax.Array, like: jax.Array) -> jax.Array:
  """`[batch]` entries of a float64 table, cast once, shaped as a state."""
  return states.by_row(jnp.asarray(table, like.dtype)[rows], like)
