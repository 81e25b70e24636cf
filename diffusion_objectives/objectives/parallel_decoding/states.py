"""States: `[batch, ...]` floating-point arrays by modality."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from diffusion_objectives._core import checks
from diffusion_objectives._core import numerics
from diffusion_objectives.objectives.parallel_decoding import schedule

State = Mapping[str, jax.Array]


def check(flow: schedule.FlowSchedule, name: str, state: Any) -> int:
  """Checks a state of the schedule's modalities; returns its batch size."""
  rows = check_rows(name, state)
  if set(state) != set(flow.modalities):
    raise checks.fail(
      ValueError,
      f"{name} must have the modalities of the schedule, {flow.modalities}",
      tuple(state),
    )
  return rows


def check_rows(name: str, state: Any) -> Any:
  """Checks floating-point arrays of one batch size, which it returns."""
  if not isinstance(state, Mapping) or jax.tree_util.all_leaves([state]):
    raise checks.fail(
      TypeError,
      f"{name} must be a mapping from modality to array, such as a dict",
      checks.describe(state),
    )
  if not state:
    raise checks.fail(ValueError, f"{name} must have a modality", "none")
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
      ValueError, f"{name} must have one batch size", sorted(sizes, key=str)
    )
  return sizes.pop()


def check_like(name: str, state: Any, other_name: str, other: State) -> None:
  """Checks arrays of any dtype: the modalities and shapes of another state."""
  if not isinstance(state, Mapping):
    raise checks.fail(
      TypeError,
      f"{name} must be a mapping from modality to array, such as a dict",
      checks.describe(state),
    )
  if set(state) != set(other):
    raise checks.fail(
      ValueError,
      f"{name} must have the modalities of {other_name}, {tuple(other)}",
      tuple(state),
    )
  for modality, array in state.items():
    label = f"{name}[{modality!r}]"
    if not checks.is_array(array):
      raise checks.fail(
        TypeError, f"{label} must be an array", checks.describe(array)
      )
    shape, wanted = tuple(array.shape), tuple(other[modality].shape)
    if shape != wanted:
      raise checks.fail(
        ValueError,
        f"{label} must match {other_name}[{modality!r}] shape",
        f"{shape} and {wanted}",
      )


def check_heads(name: str, heads: Any, other_name: str, other: State) -> int:
  """Checks heads against a state's shapes; returns how many are at hand."""
  check_rows(name, heads)
  if set(heads) != set(other):
    raise checks.fail(
      ValueError,
      f"{name} must have the modalities of {other_name}, {tuple(other)}",
      tuple(heads),
    )
  counts = set()
  for modality, array in heads.items():
    wanted = tuple(other[modality].shape)
    if len(array.shape) < 2 or array.shape[:1] + array.shape[2:] != wanted:
      raise checks.fail(
        ValueError,
        f"{name}[{modality!r}] must have the shape of {other_name}, with an"
        " axis of heads after the batch",
        f"{tuple(array.shape)} for {wanted}",
      )
    counts.add(array.shape[1])
  if len(counts) > 1:
    raise checks.fail(
      ValueError,
      f"{name} must be as many for each modality",
      sorted(counts, key=str),
    )
  return counts.pop()


def check_rows_of_integers(name: str, value: Any, rows: Any) -> None:
  """Checks `[batch]` integers."""
  checks.array(name, value, dtype="integer", axes=("batch",))
  if value.shape[0] != rows:
    raise checks.fail(
      ValueError,
      f"{name} must share the batch axis",
      f"{value.shape[0]} and {rows}",
    )


def integers(name: str, value: Any, rows: int) -> jax.Array:
  """`[batch]` int32 of an integer for all rows, or of each row's own."""
  if isinstance(value, int) and not isinstance(value, bool):
    return jnp.full(rows, value, jnp.int32)
  check_rows_of_integers(name, value, rows)
  return numerics.cast(value, jnp.dtype(jnp.int32))


def by_row(values: jax.Array, like: Any) -> jax.Array:
  """`[batch]` values with the axes that they need beside a state."""
  return values.reshape(-1, *(1,) * (len(like.shape) - 1))


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
