"""What a checkpoint says of the objective that trained it.

A run that is resumed under another objective goes on without an error and is
wrong from there on. So every save carries the objective's identity, under one
key of the checkpoint's metadata, and a trainer that was restored from it can
only be configured with the same.
"""

from collections.abc import Mapping
import dataclasses
import json
import math
from typing import Any

import diffusion_objectives
from diffusion_objectives._core import checks

IDENTITY_KEY = "diffusion_objective"

_ABSENT = "nothing"


@dataclasses.dataclass
class Identity:
  """An objective's identity, and that of the checkpoint it must agree with.

  Attributes:
    name: of the objective.
    objective_version: a number that changes where the same hyper-parameters
      come to mean another loss.
    hyper_parameters: by name, JSON values.
    denominator: the unit; None is open until the first batch, or means that the
      objective has no named unit.
    metadata: the caller's own, JSON values, compared like the rest.
    restored: the record of the checkpoint that the run goes on from.
  """

  name: str
  objective_version: int
  hyper_parameters: Mapping[str, Any]
  denominator: str | None
  metadata: Mapping[str, Any]
  restored: Mapping[str, Any] | None = None

  def __post_init__(self) -> None:
    if not isinstance(self.name, str) or not self.name:
      raise checks.fail(
        TypeError, "name must be a non-empty string", repr(self.name)
      )
    version = self.objective_version
    if isinstance(version, bool) or not isinstance(version, int):
      raise checks.fail(
        TypeError,
        "objective_version must be an integer",
        checks.describe(version),
      )
    for field in ("hyper_parameters", "metadata"):
      value = getattr(self, field)
      if not isinstance(value, Mapping):
        raise checks.fail(
          TypeError, f"{field} must be a mapping", checks.describe(value)
        )
      setattr(self, field, _canonical(field, value))

  def record(self) -> dict[str, Any]:
    """The JSON value that checkpoints hold."""
    return {
      "name": self.name,
      "objective_version": self.objective_version,
      "hyper_parameters": self.hyper_parameters,
      "denominator": self.denominator,
      "metadata": self.metadata,
      "library_version": diffusion_objectives.__version__,
    }

  def resume(
    self, saved: Mapping[str, Any] | None, *, allow_missing_identity: bool
  ) -> None:
    """Goes on from a checkpoint with this record, if it is this objective's.

    Raises:
      ValueError: no record and `allow_missing_identity` is False, or a record
        that differs.
    """
    if saved is None and not allow_missing_identity:
      raise checks.fail(
        ValueError,
        "a trainer that has taken steps must say which objective took them"
        " (allow_missing_identity=True goes on without)",
        "steps from a checkpoint without identity, or taken before the trainer"
        " was configured",
      )
    self.restored = saved
    self._compare()

  def fix_denominator(self, unit: str) -> None:
    """Takes the unit of the first batch, if it is the checkpoint's.

    Raises:
      ValueError: the checkpoint names another.
    """
    self.denominator, opened = unit, self.denominator
    try:
      self._compare()
    except ValueError:
      self.denominator = opened
      raise

  def _compare(self) -> None:
    if self.restored is None:
      return
    saved, now = _fields(self.restored), _fields(self.record())
    for fields in (saved, now):
      if fields["denominator"] is None:  # open: compared once it is known
        saved.pop("denominator", None)
        now.pop("denominator", None)
        break
    differing = [
      f"{name}: {_shown(saved, name)} in the checkpoint and"
      f" {_shown(now, name)} configured"
      for name in sorted({*saved, *now})
      if _shown(saved, name) != _shown(now, name)
    ]
    if differing:
      raise checks.fail(
        ValueError,
        "a resumed run must keep its checkpoint's objective",
        "; ".join(differing),
      )


def _fields(record: Mapping[str, Any]) -> dict[str, Any]:
  """A record's compared fields by dotted name."""
  fields = {
    name: record.get(name)
    for name in ("name", "objective_version", "denominator")
  }
  for group in ("hyper_parameters", "metadata"):
    for name, value in (record.get(group) or {}).items():
      fields[f"{group}.{name}"] = value
  return fields


def _shown(fields: Mapping[str, Any], name: str) -> str:
  return json.dumps(fields[name], sort_keys=True) if name in fields else _ABSENT


def _canonical(name: str, value: Any) -> Any:
  """A JSON value as it is read back: tuples as lists, mappings as dicts."""
  if isinstance(value, Mapping):
    for key in value:
      if not isinstance(key, str):
        raise checks.fail(
          TypeError, f"{name} must have string keys", checks.describe(key)
        )
    return {k: _canonical(f"{name}[{k!r}]", v) for k, v in value.items()}
  if isinstance(value, list | tuple):
    return [_canonical(f"{name}[{i}]", v) for i, v in enumerate(value)]
  # Exact classes: a NumPy scalar is a float and yet no JSON number.
  if value is None or type(value) in (bool, int, str):
    return value
  if type(value) is float and math.isfinite(value):
    return value
  raise checks.fail(
    TypeError,
    f"{name} must be a JSON value: a string, a bool, an int, a finite float,"
    " None, or a list or dict of them",
    f"{value!r} of type {type(value).__name__}",
  )
