"""A run's folder: its settings, its log, and what may be in it.

A run can be killed at any moment and continued by the same command. So files
other than the log are written whole or not at all, and the log is cut back to
the step that a phase continues from.
"""

import dataclasses
import json
import os
import pathlib
from typing import Any

Row = dict[str, Any]

PHASES = ("teacher", "supervised", "distilled")  # each a folder of checkpoints
SETTINGS = "settings.json"
LOG = "log.jsonl"
RESULTS = "results.json"
CURVES = "curves.png"
SAMPLES = "samples.txt"
DISCARDED = "discarded"  # see training.discard_unlogged
_FILES = (SETTINGS, LOG, RESULTS, CURVES, SAMPLES)


@dataclasses.dataclass(frozen=True)
class Size:
  """What a network's number of parameters follows from."""

  layers: int
  width: int
  heads: int = 4

  @property
  def learning_rate(self) -> float:
    """A peak that suits the width."""
    return min(1e-2, 0.4 / self.width)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """All that a run's figures follow from."""

  seed: int
  teacher: Size
  student: Size
  teacher_steps: int
  student_steps: int
  batch_size: int
  denoising_steps: int  # of a canvas
  held_out_windows: int
  draws: int  # of hidden positions, for the final figures
  text: str  # digest of the text


def open_folder(folder: pathlib.Path, settings: Settings) -> None:
  """Starts a run in a folder, or finds that it holds this very run.

  Raises:
    ValueError: the path is no folder, or holds another run or foreign files.
      Nothing is changed then.
  """
  wanted = dataclasses.asdict(settings)
  names = _names(folder)
  known = {*PHASES, DISCARDED, *_FILES, *map(_temporary_name, _FILES)}
  if foreign := sorted(names - known):
    raise _refusal(f"{folder} with {foreign[0]!r}")
  if SETTINGS in names:
    found = _read_settings(folder)
    for name in sorted(wanted.keys() | found.keys()):
      if wanted.get(name) != found.get(name):
        raise _refusal(
          f"{folder} of a run with {name}={found.get(name)!r}, not"
          f" {wanted.get(name)!r}"
        )
  elif names - {_temporary_name(SETTINGS)}:
    raise _refusal(f"{folder} with {min(names)!r} and without {SETTINGS!r}")
  else:
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / SETTINGS, json.dumps(wanted, indent=2) + "\n")


def write(path: pathlib.Path, content: str | bytes) -> None:
  """Writes a file whole or not at all."""
  if isinstance(content, str):
    content = content.encode()
  temporary = path.with_name(_temporary_name(path.name))
  temporary.write_bytes(content)
  os.replace(temporary, path)


def append(folder: pathlib.Path, row: Row) -> None:
  """Adds a row to the log."""
  with (folder / LOG).open("a") as log:
    log.write(json.dumps(row) + "\n")


def rows(folder: pathlib.Path) -> list[Row]:
  """The log's rows; a last one that was cut off by a kill is not one."""
  path = folder / LOG
  lines = path.read_text().splitlines(keepends=True) if path.exists() else []
  return [json.loads(line) for line in lines if line.endswith("\n")]


def rewind(folder: pathlib.Path, phase: str, step: int) -> None:
  """Drops what a phase logged beyond a step, and a row that was cut off."""
  kept = [
    row for row in rows(folder) if row["phase"] != phase or row["step"] <= step
  ]
  write(folder / LOG, "".join(json.dumps(row) + "\n" for row in kept))


def _names(folder: pathlib.Path) -> set[str]:
  if not folder.exists():
    return set()
  if not folder.is_dir():
    raise _refusal(f"the file {folder}")
  return {path.name for path in folder.iterdir()}


def _read_settings(folder: pathlib.Path) -> Row:
  try:
    return dict(json.loads((folder / SETTINGS).read_text()))
  except (ValueError, TypeError) as error:
    raise _refusal(f"{folder} with another {SETTINGS!r}") from error


def _temporary_name(name: str) -> str:
  return f".{name}.partial"


def _refusal(received: str) -> ValueError:
  return ValueError(
    "output must be a folder that is new, empty or of a run with the same"
    f" settings; received {received}"
  )
