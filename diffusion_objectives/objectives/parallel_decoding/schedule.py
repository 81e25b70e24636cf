r"""The fine grid of base times, and each modality's noise levels on it.

Base times are shared by all modalities, `u_j = M (1 - j / N)` from `u_0 = M` to
`u_N = 0`. A modality of shift `c` has there the noise level

  sigma(u) = c F u / D(u),  D(u) = F + (c - 1) u                            (1)

with a fixed point `sigma(F) = F`. A state is `(1 - sigma) x0 + sigma noise`; it
moves over an interval by its increment times a direction `noise - x0`. From (1)

  sigma(b) - sigma(a) = c F^2 (b - a) / (D(a) D(b)),                        (2)

which no subtraction of noise levels reaches: of 256 intervals at shift 12 the
smallest would lose four digits in float32.

The fixed point is `M`, so that all modalities begin at `M`; or 1, where noise
levels beyond `M` are cut to it. A base time that is cut is that of `M`,

  u* = M / (c - (c - 1) M),                                                 (3)

so that (1) and (2) hold with `min(u, u*)`.

All of it is float64 on the host, to be cast once where it is used; of a JAX
array of times, such as a network is called with, it is of the array's dtype.
"""

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusion_objectives._core import checks

FIXED_POINTS = ("end", "one")
END = 0.999


@dataclasses.dataclass(frozen=True, init=False)
class FlowSchedule:
  """The fine grid, and noise levels by modality. It is static and hashable.

  Attributes:
    intervals: `N`, at least 2, as many as the student has heads.
    shifts: `(modality, c)` pairs.
    end: `M`, the first base time.
    fixed_point: "end", or "one" for a single modality.

  Example:
    >>> flow = FlowSchedule(4, {"video": 12.0, "audio": 3.0})
    >>> flow.sigmas["audio"].round(4).tolist()
    [0.999, 0.8991, 0.7492, 0.4995, 0.0]
  """

  intervals: int
  shifts: tuple[tuple[str, float], ...]
  end: float
  fixed_point: str

  def __init__(
    self,
    intervals: int,
    shifts: Mapping[str, float],
    *,
    end: float = END,
    fixed_point: str = "end",
  ):
    """Checks and keeps what defines the schedule.

    Args:
      intervals: `N`.
      shifts: `c > 0` by modality.
      end: `0 < M <= 1`.
      fixed_point: "end" is FastVideo's, "one" Model-Optimizer's.

    Raises:
      TypeError: another type.
      ValueError: fewer than two intervals, no modality, a shift that is not
        positive, `M` outside `(0, 1]`, an unknown fixed point, "one" with
        several modalities, or an interval of no length.
    """
    count = checks.positive_integer("intervals", intervals)
    if count < 2:
      raise checks.fail(ValueError, "intervals must be at least 2", intervals)
    if not isinstance(shifts, Mapping):
      raise checks.fail(
        TypeError,
        "shifts must be a mapping from modality to shift",
        checks.describe(shifts),
      )
    if not shifts:
      raise checks.fail(ValueError, "shifts must name a modality", "none")
    for name in shifts:
      if not isinstance(name, str):
        raise checks.fail(
          TypeError, "shifts must have string keys", checks.describe(name)
        )
    pairs = tuple(
      (name, checks.finite_real(f"shifts[{name!r}]", shift, positive=True))
      for name, shift in shifts.items()
    )
    last = checks.finite_real("end", end, positive=True)
    if last > 1:
      raise checks.fail(ValueError, "end must be at most 1", end)
    if fixed_point not in FIXED_POINTS:
      raise checks.fail(
        ValueError,
        f"fixed_point must be one of {FIXED_POINTS}",
        repr(fixed_point),
      )
    if fixed_point == "one" and len(pairs) > 1:
      raise checks.fail(
        ValueError,
        'fixed_point="one" must come with one modality, as modalities would'
        " begin at noise levels of their own",
        tuple(shifts),
      )
    for name, value in (
      ("intervals", count),
      ("shifts", pairs),
      ("end", last),
      ("fixed_point", fixed_point),
    ):
      object.__setattr__(self, name, value)
    for name, widths in self.increments.items():
      if not (np.isfinite(widths) & (widths < 0)).all():
        raise checks.fail(
          ValueError,
          f"increments of {name!r} must be finite and negative",
          widths,
        )

  @property
  def modalities(self) -> tuple[str, ...]:
    """Their names."""
    return tuple(name for name, _ in self.shifts)

  @functools.cached_property
  def nodes(self) -> np.ndarray:
    """`[N + 1]` base times, falling from `M` to 0."""
    steps = np.arange(self.intervals + 1)
    return self.end * (self.intervals - steps) / self.intervals

  @functools.cached_property
  def sigmas(self) -> dict[str, np.ndarray]:
    """`[N + 1]` noise levels at the nodes, by modality."""
    return self.sigma(self.nodes)

  @functools.cached_property
  def increments(self) -> dict[str, np.ndarray]:
    """`[N]` changes of the noise level, negative, by modality."""
    start, end = self.nodes[:-1], self.nodes[1:]
    width = -self.end / self.intervals
    return {
      name: self._change(
        shift,
        start,
        end,
        np.where(
          start > self._latest(shift), self._width(shift, start, end), width
        ),
      )
      for name, shift in self.shifts
    }

  def sigma(self, times: Any) -> dict[str, Any]:
    """Noise levels at base times, (1), by modality."""
    return {
      name: shift
      * self._fixed
      * self._cut(shift, times)
      / self._scale(shift, times)
      for name, shift in self.shifts
    }

  def increment(self, start: Any, end: Any) -> dict[str, Any]:
    """Changes of noise levels between base times, (2), by modality."""
    return {
      name: self._change(shift, start, end, self._width(shift, start, end))
      for name, shift in self.shifts
    }

  def slope(self, times: Any) -> dict[str, Any]:
    """`d sigma / du = c F^2 / D(u)^2` at base times, 0 where they are cut."""
    return {
      name: _numpy_of(times).where(
        times > self._latest(shift),
        0.0,
        shift * self._fixed**2 / self._scale(shift, times) ** 2,
      )
      for name, shift in self.shifts
    }

  def base_time(self, modality: str, sigma: Any) -> Any:
    """The base time of a modality's noise level, the inverse of (1)."""
    shift = dict(self.shifts)[modality]
    return sigma * self._fixed / (shift * self._fixed - (shift - 1) * sigma)

  @property
  def _fixed(self) -> float:
    return self.end if self.fixed_point == "end" else 1.0

  def _latest(self, shift: float) -> float:
    """The base time (3); `M` itself where that is the fixed point."""
    if self._fixed == self.end:
      return self.end
    return self.end / (shift - (shift - 1) * self.end)

  def _cut(self, shift: float, times: Any) -> Any:
    return _numpy_of(times).minimum(times, self._latest(shift))

  def _scale(self, shift: float, times: Any) -> Any:
    return self._fixed + (shift - 1) * self._cut(shift, times)

  def _width(self, shift: float, start: Any, end: Any) -> Any:
    return self._cut(shift, end) - self._cut(shift, start)

  def _change(self, shift: float, start: Any, end: Any, width: Any) -> Any:
    """(2), with `b - a` as it is known best."""
    scales = self._scale(shift, start) * self._scale(shift, end)
    return shift * self._fixed**2 * width / scales


def _numpy_of(times: Any) -> Any:
  """The library that an array is of."""
  return jnp if isinstance(times, jax.Array) else np
