"""A configured objective on a trainer: what all generations have in common.

`install` sets the attributes that docs/trainers.md lists, on the trainer's
instance and on its checkpoint manager's. How a window is accumulated differs
from one generation of the trainer to the next: see `generations`.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

from flax import nnx
import jax
from jax.interpreters import pxla
import numpy as np

from diffusion_objectives import outputs
from diffusion_objectives._core import checks
from diffusion_objectives.trainers.tunix import generations
from diffusion_objectives.trainers.tunix import identity
from diffusion_objectives.trainers.tunix import preparation

LossFn = Callable[[nnx.Module, Any], outputs.LossOutput]

# Names under which the trainer logs series of its own.
RESERVED_METRICS = ("loss", "perplexity", "learning_rate", "grad_norm")

# The series under which a step's `LossOutput` travels to the log.
_OUTPUT = generations.OUTPUT


@dataclasses.dataclass(eq=False)
class Hook:
  """One configured objective and the state of its trainer's run.

  Attributes:
    loss_fn: the objective.
    batch_adapter: from an item to a batch.
    check_values: whether to call `batch.check_values()`.
    identity: what checkpoints say of the objective.
    generation: how the trainer accumulates.
    accumulation_steps: micro-batches in a window.
    is_training: whether the trainer is inside `train()`.
    is_evaluating: whether it is inside an evaluation.
    has_trained: whether a training step was taken.
    evaluated: the losses of the current evaluation's batches.
  """

  loss_fn: LossFn
  batch_adapter: preparation.BatchAdapter
  check_values: bool
  identity: identity.Identity
  generation: generations.Generation
  accumulation_steps: int
  is_training: bool = False
  is_evaluating: bool = False
  has_trained: bool = False
  evaluated: list[outputs.WeightedMetric] = dataclasses.field(
    default_factory=list
  )

  def output(self, model: nnx.Module, batch: Any) -> outputs.LossOutput:
    """The objective's checked output."""
    output = self.loss_fn(model, batch)
    checks.instance("the loss_fn's result", output, outputs.LossOutput)
    for name in RESERVED_METRICS:
      if name in output.aux_metrics:
        raise checks.fail(
          ValueError,
          f"aux_metrics must not use the trainer's names {RESERVED_METRICS}",
          repr(name),
        )
    return output


def check_trainer(
  trainer: Any,
) -> tuple[generations.Generation, int, Hook | None]:
  """Refuses a trainer that no hook can serve.

  Returns:
    Its generation, its window, and the hook that a new one replaces.
  """
  generation = generations.of(trainer)
  previous = vars(trainer).get("_diffusion_objective")
  if previous is not None and previous.is_training:
    raise checks.fail(
      ValueError,
      "an objective must be configured outside train()",
      "a trainer inside train()",
    )
  steps = trainer.config.gradient_accumulation_steps
  generation.check_optimizer(trainer.optimizer, steps)
  steps = steps or 1
  if trainer.iter_steps % steps:
    raise checks.fail(
      ValueError,
      "an objective must be configured at the edge of an accumulation"
      f" window, iter_steps a multiple of {steps}",
      f"iter_steps={trainer.iter_steps}",
    )
  return generation, steps, previous


def resume(
  trainer: Any,
  previous: Hook | None,
  ours: identity.Identity,
  allow_missing_identity: bool,
) -> None:
  """Holds a restored trainer to its checkpoint's objective.

  A trainer that has trained under a hook since it was built may change its
  objective: what it goes on from is no checkpoint.
  """
  has_trained_here = previous is not None and previous.has_trained
  if trainer.train_steps == 0 or has_trained_here:
    return
  metadata = trainer._restored_custom_metadata or {}
  ours.resume(
    metadata.get(identity.IDENTITY_KEY),
    allow_missing_identity=allow_missing_identity,
  )


def install(trainer: Any, hook: Hook) -> None:
  """Sets the attributes that docs/trainers.md lists."""
  cls = type(trainer)
  generation = hook.generation
  step_loss = generation.step_loss(trainer, hook)

  def as_arguments(batch):
    return {"batch": batch}

  def check_ours():
    for name, ours in (
      ("loss_fn", step_loss),
      ("eval_loss_fn", step_loss),
      ("gen_model_input_fn", as_arguments),
      ("_prepare_inputs", prepare_inputs),
    ):
      if getattr(trainer, name) is not ours:
        raise checks.fail(
          ValueError,
          f"trainer.{name} must be the configured objective's (configure"
          " again instead of setting it)",
          repr(getattr(trainer, name)),
        )

  def prepare(item):
    batch = hook.batch_adapter(cls._prepare_inputs(trainer, item))
    if hook.check_values and hasattr(batch, "check_values"):
      batch.check_values()
    _check_divides(batch, trainer.config.data_sharding_axis)
    return generation.as_step_input(trainer, hook, batch)

  def prepare_inputs(item):
    try:
      return prepare(item)
    except BaseException:
      is_step = hook.is_training and not hook.is_evaluating
      if is_step and generation.counts_before_preparing:
        trainer._iter_steps -= 1  # nothing came of this micro-batch
      raise

  def post_process_train_step(aux):
    hook.has_trained = True
    _keep(trainer._buffered_train_metrics, aux[_OUTPUT])
    cls._post_process_train_step(trainer, aux[_OUTPUT])

  def post_process_eval_step(aux):
    hook.evaluated.append(aux[_OUTPUT].primary_loss)
    _keep(trainer._buffered_eval_metrics, aux[_OUTPUT])
    cls._post_process_eval_step(trainer, aux[_OUTPUT])

  def write_metrics(buffer):
    _reduce(buffer)
    cls._write_metrics(trainer, buffer)

  def run_eval(*args):
    hooks = trainer.training_hooks
    hook.evaluated.clear()
    hook.is_evaluating = True
    if hooks is not None:
      trainer.training_hooks = _EvalHooks(hooks, hook)
    try:
      cls._run_eval(trainer, *args)
    finally:
      trainer.training_hooks = hooks
      hook.is_evaluating = False
      trainer._buffered_eval_metrics = None  # also after a refused batch

  def train(*args, **kwargs):
    hook.is_training = True
    try:
      return cls.train(trainer, *args, **kwargs)
    finally:
      hook.is_training = False

  manager = trainer.checkpoint_manager

  def save(*args, custom_metadata=None, **kwargs):
    # The trainer's last save passes no metadata, not even its own.
    if custom_metadata is None:
      custom_metadata = trainer.custom_checkpoint_metadata()
    return type(manager).save(
      manager,
      *args,
      custom_metadata={
        **custom_metadata,
        identity.IDENTITY_KEY: hook.identity.record(),
      },
      **kwargs,
    )

  trainer.with_loss_fn(step_loss, has_aux=True)
  trainer.with_gen_model_input_fn(as_arguments)
  trainer._prepare_inputs = prepare_inputs
  trainer._post_process_train_step = post_process_train_step
  trainer._post_process_eval_step = post_process_eval_step
  trainer._write_metrics = write_metrics
  trainer._run_eval = run_eval
  trainer.train = train
  manager.save = save
  for name, create in generation.step_factories(trainer, hook).items():

    def checked(create=create):
      check_ours()
      return create()

    setattr(trainer, name, checked)
  generation.start_window(trainer, hook)
  trainer._diffusion_objective = hook


# Batches and logs.


def _check_divides(batch: Any, axes: tuple[Any, ...]) -> None:
  """Refuses a batch that Tunix would replicate instead of sharding."""
  mesh = pxla.thread_resources.env.physical_mesh
  if mesh.empty:
    return
  for axis, entry in enumerate(axes):
    names = entry if isinstance(entry, tuple) else (entry,)
    names = tuple(name for name in names if name is not None)
    if not set(names) <= set(mesh.shape):
      raise checks.fail(
        ValueError,
        f"data_sharding_axis must name axes of the mesh {tuple(mesh.shape)}",
        repr(names),
      )
    size = int(np.prod([mesh.shape[name] for name in names]))
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
      if np.ndim(leaf) >= len(axes) and leaf.shape[axis] % size:
        raise checks.fail(
          ValueError,
          f"axis {axis} of the batch must divide over the mesh axes {names} of"
          f" total size {size}",
          f"batch{jax.tree_util.keystr(path)} of shape {leaf.shape}",
        )


def _ratio(metrics: list[outputs.WeightedMetric]) -> np.float64:
  """Sum over sum, in float64; 0 where the denominators add up to 0."""
  total = np.sum([np.float64(m.unreduced_sum) for m in metrics])
  denominator = np.sum([np.float64(m.denominator) for m in metrics])
  return np.float64(0) if denominator == 0 else total / denominator


def _keep(buffer: Any, output: outputs.LossOutput) -> None:
  """Keeps a step's output in the trainer's buffer, still on the device."""
  kept = buffer.additional_metrics.setdefault(_OUTPUT, ([], None))[0]
  if not kept or kept[-1] is not output:  # main's first trainer put it there
    kept.append(output)


def _reduce(buffer: Any) -> None:
  """Replaces the means in a trainer's buffer by ratios, once it is logged.

  The trainer logs a step while the next one runs, so reading the device here
  costs no wait.
  """
  series = buffer.additional_metrics
  kept, _ = series.pop(_OUTPUT, ([], None))
  if not kept:
    return
  buffer.losses[:] = [_ratio([output.primary_loss for output in kept])]
  for name in kept[0].aux_metrics:
    values = [output.aux_metrics[name] for output in kept]
    series[name] = ([_ratio(values)], np.mean)
  if "grad_norm" in series:
    # The last micro-batch's norm is that of the applied gradient.
    del series["grad_norm"][0][:-1]


class _EvalHooks:
  """The user's training hooks, given the exact evaluation loss.

  The trainer passes the sum of the batches' means to `on_eval_step_end`.
  """

  def __init__(self, hooks, hook):
    self._hooks = hooks
    self._hook = hook

  def __getattr__(self, name):
    return getattr(self._hooks, name)

  def on_eval_step_end(self, train_ctx, eval_loss):
    del eval_loss  # a sum of means
    self._hooks.on_eval_step_end(train_ctx, _ratio(self._hook.evaluated))
