"""Trains a teacher and two equal students on text, and compares them.

  python -m diffusion_objectives.demo --output runs/demo

1. A masked-diffusion teacher is trained on rows of Python's own character
   tables (`text`), with the bound on their likelihood as loss.
2. Two equal, smaller students (same initial weights, same windows in the same
   order, same number of steps) follow. The supervised one learns from the
   text: hidden bytes, hard targets. The distilled one learns from the teacher:
   canvases that it filled itself, the teacher's distribution as target.
3. Held-out text and canvases of each student's own tell how far each is from
   the text and from the teacher.

Equal steps are not equal time: a step of the distilled student also samples
its canvases and calls the teacher.
"""

import argparse
from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import json
import logging
import pathlib
import warnings

from diffusion_objectives.demo import report
from diffusion_objectives.demo import run
from diffusion_objectives.demo import text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
  """How much one run computes; figures hold on 2 CPU cores."""

  teacher: run.Size
  student: run.Size
  steps: int  # of each student; the teacher takes three times as many
  batch_size: int
  held_out_windows: int
  draws: int
  time: str


SCALES = {
  "quick": Scale(
    teacher=run.Size(layers=1, width=48),
    student=run.Size(layers=1, width=16),
    steps=60,
    batch_size=16,
    held_out_windows=64,
    draws=2,
    time="under a minute, proves no more than that it runs",
  ),
  "small": Scale(
    teacher=run.Size(layers=3, width=96),
    student=run.Size(layers=2, width=48),
    steps=600,
    batch_size=32,
    held_out_windows=399,
    draws=8,
    time="ten minutes",
  ),
}


def main(arguments: Sequence[str] | None = None) -> None:
  parser = _parser()
  options = parser.parse_args(arguments)
  scale = SCALES["quick" if options.quick else options.size]
  steps = options.steps or scale.steps
  corpus = text.load()
  settings = run.Settings(
    seed=options.seed,
    teacher=scale.teacher,
    student=scale.student,
    teacher_steps=3 * steps,
    student_steps=steps,
    batch_size=scale.batch_size,
    denoising_steps=4,
    held_out_windows=scale.held_out_windows,
    draws=scale.draws,
    text=corpus.digest,
  )
  try:
    run.open_folder(options.output, settings)
  except ValueError as error:
    parser.error(str(error))
  if not (options.output / run.RESULTS).exists():
    # Imported here: neither --help nor a finished run waits for Tunix.
    from diffusion_objectives.demo import experiment

    _silence()
    experiment.compute(settings, corpus, options.output)
  results = json.loads((options.output / run.RESULTS).read_text())
  print(report.table(results["figures"]))
  print(f"samples, curves and log: {options.output}")


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m diffusion_objectives.demo",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument(
    "--output",
    type=pathlib.Path,
    default=pathlib.Path("diffusion_objectives_demo"),
    help="folder of the run; an interrupted run is continued (%(default)s)",
  )
  parser.add_argument(
    "--size",
    choices=SCALES,
    default="small",
    help="on 2 CPU cores "
    + "; ".join(f"{name}: {scale.time}" for name, scale in SCALES.items())
    + " (%(default)s)",
  )
  parser.add_argument(
    "--quick", action="store_true", help="the same as --size quick"
  )
  parser.add_argument(
    "--steps",
    type=_at_least(1),
    help="updates of each student; the teacher takes three times as many",
  )
  parser.add_argument(
    "--seed",
    type=_at_least(0),
    default=0,
    help="of weights, data and draws (%(default)s)",
  )
  return parser


def _at_least(minimum: int) -> Callable[[str], int]:
  def integer(value: str) -> int:
    number = int(value)
    if number < minimum:
      raise argparse.ArgumentTypeError(
        f"must be at least {minimum}; received {value}"
      )
    return number

  return integer


def _silence() -> None:
  """Keeps libraries' notes on their own work out of the progress lines."""
  logging.getLogger().setLevel(logging.ERROR)
  for name in ("absl", "jax", "orbax", "grain"):
    logging.getLogger(name).setLevel(logging.ERROR)
  warnings.filterwarnings("ignore", module="orbax")


if __name__ == "__main__":
  main()
