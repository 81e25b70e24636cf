"""One phase: a network, an objective, and Tunix's trainer around them."""

from collections.abc import Callable
import dataclasses
import os
import pathlib
import shutil
import sys
import time
from typing import Any

from flax import nnx
import grain
import numpy as np
import optax
import orbax.checkpoint as ocp
from tunix.sft import metrics_logger
from tunix.sft import peft_trainer

from diffusion_objectives.demo import run

Measure = Callable[[nnx.Module], dict[str, float]]

CHECKPOINTS_PER_PHASE = 20
MEASUREMENTS_PER_PHASE = 10
SECONDS_BETWEEN_LINES = 10.0


def train(
  phase: str,
  model: nnx.Module,
  configure: Callable[[peft_trainer.PeftTrainer], Any],
  measure: Measure,
  data: grain.MapDataset,
  *,
  learning_rate: float,
  folder: pathlib.Path,
) -> None:
  """Trains a network in place, from where its checkpoints end.

  Args:
    phase: its name, and that of its folder of checkpoints.
    model: the network.
    configure: gives the trainer its objective.
    measure: called every so many steps; its figures are logged.
    data: one batch a step.
    learning_rate: at its peak.
    folder: the run's.
  """
  steps = len(data)
  discard_unlogged(folder, phase)
  recorder = _Recorder(phase, steps, folder, measure)
  trainer = peft_trainer.PeftTrainer(
    model,
    _optimizer(learning_rate, steps),
    peft_trainer.TrainingConfig(
      eval_every_n_steps=steps,  # required; the recorder measures instead
      checkpoint_root_directory=str((folder / phase).absolute()),
      checkpointing_options=ocp.CheckpointManagerOptions(
        save_interval_steps=max(1, steps // CHECKPOINTS_PER_PHASE),
        max_to_keep=2,
        cleanup_tmp_directories=True,
      ),
      metrics_logging_options=metrics_logger.MetricsLoggerOptions(
        log_dir="",
        backend_kwargs={"custom_backend": [lambda: recorder]},
      ),
      metrics_prefix=phase,
    ),
  )
  configure(trainer)
  run.rewind(folder, phase, trainer.train_steps)
  if trainer.train_steps < steps:
    trainer.with_training_hooks(recorder)
    trainer.train(data)
  else:
    trainer.close()
  recorder.measure_once(model, steps)


def batches(
  windows: np.ndarray, *, seed: int, batch_size: int, steps: int
) -> grain.MapDataset:
  """Shuffled windows, each with its index in the order of training."""
  epochs = -(-steps * batch_size // len(windows))
  return (
    grain.MapDataset.source(windows)
    .shuffle(seed)
    .repeat(epochs)
    .slice(slice(steps * batch_size))
    .map_with_index(lambda index, ids: {"ids": ids, "index": index})
    .batch(batch_size)
  )


def discard_unlogged(folder: pathlib.Path, phase: str) -> None:
  """Removes checkpoints that the log does not reach.

  The trainer logs a step after it may have saved it. Continued from such a
  checkpoint, a killed run would miss one row, so it goes back one further.
  """
  discarded = folder / run.DISCARDED
  shutil.rmtree(discarded, ignore_errors=True)
  logged = [
    row["step"]
    for row in run.rows(folder)
    if row["phase"] == phase and row["kind"] == "step"
  ]
  for path in (folder / phase).glob("[0-9]*"):
    if path.name.isdigit() and int(path.name) > max(logged, default=0):
      os.rename(path, discarded)  # at once; removing it takes many steps
      shutil.rmtree(discarded)


def _optimizer(
  learning_rate: float, steps: int
) -> optax.GradientTransformation:
  warmup = max(1, steps // 10)
  schedule = optax.warmup_cosine_decay_schedule(
    0.0, learning_rate, warmup, max(steps, warmup + 1), learning_rate / 50
  )
  return optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01)
  )


@dataclasses.dataclass
class _Recorder:
  """Logs, measures and shows a phase.

  It serves the trainer as training hooks and as the backend of its metrics
  logger, which hands over a step's scalars before `on_train_step_end`.
  """

  phase: str
  steps: int
  folder: pathlib.Path
  measure: Measure
  scalars: dict[str, float] = dataclasses.field(default_factory=dict)
  first: int | None = None
  started: float = 0.0
  shown: float = 0.0

  def measure_once(self, model: nnx.Module, step: int) -> None:
    row = {"phase": self.phase, "kind": "measurement", "step": step}
    if not any(row.items() <= old.items() for old in run.rows(self.folder)):
      run.append(self.folder, row | self.measure(model))

  # The metrics logger's backend.

  def log_scalar(self, event: str, value: Any, **kwargs: Any) -> None:
    del kwargs
    name = event.removeprefix(f"{self.phase}/train/")
    if name != event and name != "perplexity":  # exp of no likelihood
      self.scalars[name] = float(value)

  def close(self) -> None:
    pass

  # The trainer's hooks.

  def on_train_start(self, trainer: peft_trainer.PeftTrainer) -> None:
    pass

  def on_train_step_start(self, trainer: peft_trainer.PeftTrainer) -> None:
    if trainer.train_steps % max(1, self.steps // MEASUREMENTS_PER_PHASE) == 0:
      self.measure_once(trainer.model, trainer.train_steps)

  def on_train_step_end(
    self, trainer: peft_trainer.PeftTrainer, step: int, loss: Any
  ) -> None:
    del trainer, loss
    row = {"phase": self.phase, "kind": "step", "step": step}
    run.append(self.folder, row | self.scalars)
    self.show(step)

  def on_train_end(self, trainer: peft_trainer.PeftTrainer) -> None:
    pass

  def on_eval_step_start(self, trainer: peft_trainer.PeftTrainer) -> None:
    pass

  def on_eval_step_end(
    self, trainer: peft_trainer.PeftTrainer, loss: Any
  ) -> None:
    pass

  def show(self, step: int) -> None:
    """One line that updates on a terminal, a line now and then elsewhere."""
    now = time.monotonic()
    if self.first is None:  # that step was compiled; it says nothing of rates
      self.first, self.started, self.shown = step, now, now
    is_terminal = sys.stdout.isatty()
    is_last = step == self.steps
    interval = 0.2 if is_terminal else SECONDS_BETWEEN_LINES
    if now - self.shown < interval and not is_last:
      return
    self.shown = now
    done, left = step - self.first, self.steps - step
    seconds = now - self.started
    print(
      f"{self.phase:<10} step {step:>5}/{self.steps}"
      f"  loss {self.scalars['loss']:.3f}"
      f"  {done / max(seconds, 1e-9):5.1f} steps/s"
      f"  ETA {seconds * left / max(done, 1):4.0f} s",
      end="\r" if is_terminal and not is_last else "\n",
      flush=True,
    )
