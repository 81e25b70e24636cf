"""The order of the phases, and what each of them is."""

from collections.abc import Callable
import dataclasses
import json
import pathlib

from flax import nnx
import numpy as np
from tunix.sft import peft_trainer

from diffusion_objectives.demo import canvases
from diffusion_objectives.demo import evaluation
from diffusion_objectives.demo import network
from diffusion_objectives.demo import report
from diffusion_objectives.demo import run
from diffusion_objectives.demo import text
from diffusion_objectives.demo import training
from diffusion_objectives.trainers import tunix as hooks

SAMPLES_OF_EACH = 6

Configure = Callable[[peft_trainer.PeftTrainer], object]


@dataclasses.dataclass(frozen=True, eq=False)
class Experiment:
  """What all phases of a run share."""

  settings: run.Settings
  windows: np.ndarray  # for training
  held_out: np.ndarray
  folder: pathlib.Path

  @property
  def teacher_seed(self) -> int:
    """Of the teacher's weights, its data and their hidden bytes."""
    return 2 * self.settings.seed

  @property
  def student_seed(self) -> int:
    """The same for both students, so that their objectives alone differ."""
    return 2 * self.settings.seed + 1


def compute(
  settings: run.Settings, corpus: text.Text, folder: pathlib.Path
) -> None:
  """Trains the teacher, then both students; writes what the run shows."""
  windows = text.windows(corpus.training, stride=1)
  held_out = text.windows(corpus.held_out, stride=text.LENGTH)
  chosen = np.linspace(0, len(held_out) - 1, settings.held_out_windows)
  experiment = Experiment(
    settings, windows, held_out[chosen.astype(int)], folder
  )
  print(
    f"text: {sum(map(len, corpus.training)):,} bytes for training,"
    f" {experiment.held_out.size:,} held out"
  )

  teacher = _train_teacher(experiment)
  students = {
    "student, untrained": _new_student(experiment),
    "student, supervised": _train_student(
      experiment, "supervised", teacher, _supervise(experiment)
    ),
    "student, distilled": _train_student(
      experiment, "distilled", teacher, _distill(experiment, teacher)
    ),
  }

  counted = text.markov_nll(corpus.training, experiment.held_out)
  figures = {name: {"held_out_nll": nll} for name, nll in counted.items()}
  figures["teacher"] = _nll(experiment, teacher, draws=settings.draws)
  for name, student in students.items():
    figures[name] = _nll_and_kl(
      experiment, student, teacher, draws=settings.draws
    )
  _write(experiment, figures, {"teacher": teacher} | students)


def _train_teacher(experiment: Experiment) -> nnx.Module:
  """Phase 1: the text, by the bound on its likelihood."""
  settings = experiment.settings
  teacher = network.build(settings.teacher, seed=experiment.teacher_seed)
  print(f"teacher: {network.count_parameters(teacher):,} parameters")
  adapter = canvases.data_adapter(
    canvases.bound_batch, seed=experiment.teacher_seed
  )
  training.train(
    "teacher",
    teacher,
    lambda trainer: hooks.configure_diffusion_sft(
      trainer, adapter, network.logits
    ),
    lambda model: _nll(experiment, model, draws=1),
    training.batches(
      experiment.windows,
      seed=experiment.teacher_seed,
      batch_size=settings.batch_size,
      steps=settings.teacher_steps,
    ),
    learning_rate=settings.teacher.learning_rate,
    folder=experiment.folder,
  )
  return teacher


def _new_student(experiment: Experiment) -> nnx.Module:
  return network.build(
    experiment.settings.student, seed=experiment.student_seed
  )


def _train_student(
  experiment: Experiment,
  phase: str,
  teacher: nnx.Module,
  configure: Configure,
) -> nnx.Module:
  """Phases 2 and 3."""
  settings = experiment.settings
  student = _new_student(experiment)
  print(f"{phase} student: {network.count_parameters(student):,} parameters")
  training.train(
    phase,
    student,
    configure,
    lambda model: _nll_and_kl(experiment, model, teacher, draws=1),
    training.batches(
      experiment.windows,
      seed=experiment.student_seed,
      batch_size=settings.batch_size,
      steps=settings.student_steps,
    ),
    learning_rate=settings.student.learning_rate,
    folder=experiment.folder,
  )
  return student


def _supervise(experiment: Experiment) -> Configure:
  """Phase 2: hidden bytes of the text, hard targets."""
  adapter = canvases.data_adapter(
    canvases.equal_batch, seed=experiment.student_seed
  )
  return lambda trainer: hooks.configure_diffusion_sft(
    trainer, adapter, network.logits, denominator="masked"
  )


def _distill(experiment: Experiment, teacher: nnx.Module) -> Configure:
  """Phase 3: canvases of the student's own, the teacher as soft target."""
  return lambda trainer: hooks.configure_prepared_diffusion_opd(
    trainer,
    canvases.distillation_adapter(
      trainer.model,
      teacher,
      seed=experiment.student_seed,
      denoising_steps=experiment.settings.denoising_steps,
    ),
    network.logits,
    denominator="masked",
  )


def _nll(
  experiment: Experiment, model: nnx.Module, *, draws: int
) -> dict[str, float]:
  return {
    "held_out_nll": evaluation.held_out_nll(
      model, experiment.held_out, draws=draws
    )
  }


def _nll_and_kl(
  experiment: Experiment,
  student: nnx.Module,
  teacher: nnx.Module,
  *,
  draws: int,
) -> dict[str, float]:
  return _nll(experiment, student, draws=draws) | {
    "held_out_kl": evaluation.held_out_kl(
      student, teacher, experiment.held_out, draws=draws
    ),
    "own_kl": evaluation.own_kl(
      student,
      teacher,
      experiment.held_out,
      draws=draws,
      denoising_steps=experiment.settings.denoising_steps,
    ),
  }


def _write(
  experiment: Experiment,
  figures: report.Figures,
  networks: dict[str, nnx.Module],
) -> None:
  """Prints samples, and writes all that a finished run has."""
  folder = experiment.folder
  samples = {
    name: [
      text.printable(ids)
      for ids in np.asarray(
        canvases.sample(
          model,
          count=SAMPLES_OF_EACH,
          seed=experiment.student_seed,
          steps=text.LENGTH,
        )
      )
    ]
    for name, model in networks.items()
  }
  page = report.samples(samples)
  print(page)
  run.rewind(folder, "results", -1)
  for name, values in figures.items():
    row = {"phase": "results", "kind": "figures", "step": 0, "network": name}
    run.append(folder, row | values)
  run.write(folder / run.SAMPLES, page)
  run.write(folder / run.CURVES, report.curves(run.rows(folder), figures))
  # Last: a run that has it is finished.
  run.write(
    folder / run.RESULTS, json.dumps({"figures": figures}, indent=2) + "\n"
  )
