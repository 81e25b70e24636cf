"""States: `[batch, ...]` floating-point arrays by modality."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from diffusion_objectives._core import checks
from diffusion_objectives._core import numerics
from diffusion_objectives.objectives.parallel_decoding import schedule

State = Mapping[str, jax.Array]


def check(flow: schedule.FlowSchedule, name: str, state: Any) -> None:
  """Checks a state: the schedule's modalities, of one batch size."""
  if not isinstance(state, Mapping):
    raise checks.fail(
      TypeError,
      f"{name} must be a mapping from modality to array",
      checks.describe(state),
    )
  if set(state) != set(flow.modalities):
    raise checks.fail(
      ValueError,
      f"{name} must have the modalities of the schedule, {flow.modalities}",
      tuple(state),
    )
  sizes = set()
  for modality, array in state.items():
    label = f"{name}[{modality!r}]"
    check_floating(label, array)
    if not array.shape:
      raise checks.fail(
        ValueError, f"{label} must be batch-major, not scalar", "shape ()"
      )
    sizes.add(array.shape[0])
  if len(sizes) > 1:
    raise checks.fail(
      ValueError, f"{name} must have one batch size", sorted(sizes)
    )


def check_floating(name: str, array: Any) -> None:
  """Checks an array's type and kind of dtype."""
  if not checks.is_array(array) or not jnp.issubdtype(
    array.dtype, jnp.floating
  ):
    raise checks.fail(
      TypeError,
      f"{name} must be a floating-point array",
      checks.describe(array),
    )


def wide(array: Any) -> jax.Array:
  """In at least float32."""
  return numerics.cast(array, numerics.accumulation_dtype(array.dtype))
