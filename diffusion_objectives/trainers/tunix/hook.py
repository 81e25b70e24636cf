"""A configured objective on a trainer: what all generations have in common.

`install` sets the attributes that docs/trainers.md lists, on the trainer's
instance and on its checkpoint manager's. How a window is accumulated differs
from one generation of the trainer to the next: see `generations`.
"""

from collections.abc import Callable
import dataclasses
import functools
import inspect
from typing import Any

from flax import nnx
import jax
from jax.interpreters import pxla
import numpy as np

from diffusion_objectives import outputs
from diffusion_objectives._core import checks
from diffusion_objectives.trainers.tunix import frozen_arrays
from diffusion_objectives.trainers.tunix import generations
from diffusion_objectives.trainers.tunix import identity
from diffusion_objectives.trainers.tunix import preparation

# `(model, batch)`, and what is frozen, where something is.
LossFn = Callable[..., outputs.LossOutput]

# Names under which the trainer logs series of its own.
RESERVED_METRICS = ("loss", "perplexity", "learning_rate", "grad_norm")

# What `install` sets on the trainer, beside the steps' factories.
_INSTALLED = (
  "_prepare_inputs",
  "_post_process_train_step",
  "_post_process_eval_step",
  "_write_metrics",
  "_run_eval",
  "train",
)

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
    frozen: what the loss function takes beside model and batch.
    has_trained: whether a training step was taken, by this hook or by one that
      it replaced.
    is_training: whether the trainer is inside `train()`.
    taken: micro-batches taken, as the trainer counts them in `iter_steps`.
    open_window: the update that the last micro-batch belongs to; the window is
      open until `train_steps` is past it.
    metric_names: of the objective's output, the same for all batches.
    evaluated: the losses of the current evaluation's batches.
    installed: what was set on the trainer and must stay, by name.
  """

  loss_fn: LossFn
  batch_adapter: preparation.BatchAdapter
  check_values: bool
  identity: identity.Identity
  generation: generations.Generation
  accumulation_steps: int
  frozen: frozen_arrays.Frozen | None = None
  has_trained: bool = False
  is_training: bool = False
  taken: int = 0
  open_window: int | None = None
  metric_names: list[str] | None = None
  evaluated: list[outputs.WeightedMetric] = dataclasses.field(
    default_factory=list
  )
  installed: dict[str, Any] = dataclasses.field(default_factory=dict)

  def output(
    self, model: nnx.Module, batch: Any, arrays: tuple[Any, ...]
  ) -> outputs.LossOutput:
    """The objective's checked output, with the frozen arrays of a step."""
    given = (self.frozen.rebuild(arrays),) if self.frozen else ()
    output = self.loss_fn(model, batch, *given)
    checks.instance("the loss_fn's result", output, outputs.LossOutput)
    for name in RESERVED_METRICS:
      if name in output.aux_metrics:
        raise checks.fail(
          ValueError,
          f"aux_metrics must not use the trainer's names {RESERVED_METRICS}",
          repr(name),
        )
    names = sorted(output.aux_metrics)
    if self.metric_names not in (None, names):
      raise checks.fail(
        ValueError,
        "every batch must give the aux_metrics of the first,"
        f" {self.metric_names}",
        names,
      )
    self.metric_names = names
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
  if previous is None:
    for name in (*_INSTALLED, generation.compile_steps):
      if name in vars(trainer):
        raise checks.fail(
          ValueError,
          f"trainer.{name} must be its class's (override it in a subclass, or"
          " give the hook a batch_adapter)",
          "one set on the instance",
        )
  elif previous.is_training:
    raise checks.fail(
      ValueError,
      "an objective must be configured outside train()",
      "a trainer inside train()",
    )
  steps = trainer.config.gradient_accumulation_steps
  generation.check_optimizer(trainer.optimizer, steps)
  steps = steps or 1
  is_open = previous is not None and previous.open_window == trainer.train_steps
  if trainer.iter_steps % steps or is_open:
    raise checks.fail(
      ValueError,
      "an objective must be configured at the edge of an accumulation"
      f" window of {steps}",
      f"a window that is open at iter_steps={trainer.iter_steps}",
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


def check_unshared(
  trainer: Any,
  generation: generations.Generation,
  steps: int,
  frozen: frozen_arrays.Frozen,
) -> None:
  """Refuses frozen arrays that the trainer donates to its compiled steps."""
  for name in generation.donated(trainer, steps):
    frozen.check_unshared(name, getattr(trainer, name))


def install(trainer: Any, hook: Hook) -> None:
  """Sets the attributes that docs/trainers.md lists."""
  cls = type(trainer)
  generation = hook.generation
  step_loss = generation.step_loss(trainer, hook)

  def as_arguments(supplied):
    return {"batch": supplied.inputs, "frozen": supplied.frozen}

  def check_ours():
    current = {name: getattr(trainer, name) for name in hook.installed}
    current["checkpoint_manager"] = trainer.checkpoint_manager
    current["checkpoint_manager.save"] = getattr(
      trainer.checkpoint_manager, "save", None
    )
    expected = {
      **hook.installed,
      "checkpoint_manager": manager,
      "checkpoint_manager.save": save,
    }
    for name, ours in expected.items():
      if current[name] is not ours:
        raise checks.fail(
          ValueError,
          f"trainer.{name} must be the configured objective's (configure"
          " again instead of setting it)",
          repr(current[name]),
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
      # An evaluation that ends here is no evaluation.
      trainer._buffered_eval_metrics = None
      raise

  def post_process_train_step(aux):
    hook.has_trained = True
    hook.taken += 1
    hook.open_window = trainer.train_steps
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
    if hooks is not None:
      trainer.training_hooks = _EvalHooks(hooks, hook)
    try:
      cls._run_eval(trainer, *args)
    finally:
      trainer.training_hooks = hooks
      trainer._buffered_eval_metrics = None  # also after a refused batch

  def train(*args, **kwargs):
    check_ours()
    hook.is_training = True
    hook.taken = trainer.iter_steps
    try:
      return cls.train(trainer, *args, **kwargs)
    except BaseException:
      # Main counts a micro-batch before it is prepared, or before its step.
      trainer._iter_steps = hook.taken
      raise
    finally:
      hook.is_training = False

  own_compile_steps = getattr(cls, generation.compile_steps).__get__(trainer)

  @functools.wraps(own_compile_steps)
  def compile_steps(*args, **kwargs):
    if hook.frozen:
      hook.frozen.place()
      check_unshared(trainer, generation, hook.accumulation_steps, hook.frozen)
    steps = own_compile_steps(*args, **kwargs)
    for name in generation.kept_steps:
      setattr(trainer, name, supplied(getattr(trainer, name)))
    return tuple(map(supplied, steps))

  def supplied(step):
    if step is None or isinstance(step, frozen_arrays.SuppliedStep):
      return step
    return frozen_arrays.SuppliedStep(step, hook.frozen)

  manager = trainer.checkpoint_manager
  class_save = type(manager).save.__get__(manager)

  def save(*args, **kwargs):
    arguments = inspect.signature(class_save).bind(*args, **kwargs).arguments
    metadata = arguments.get("custom_metadata")
    if metadata is None:  # the trainer's last save passes not even its own
      metadata = trainer.custom_checkpoint_metadata()
    arguments["custom_metadata"] = {
      **metadata,
      identity.IDENTITY_KEY: hook.identity.record(),
    }
    return class_save(**arguments)

  def checked(create):
    def create_checked():
      check_ours()
      return create()

    return create_checked

  trainer.with_loss_fn(step_loss, has_aux=True)
  trainer.with_gen_model_input_fn(as_arguments)
  functions = (
    prepare_inputs,
    post_process_train_step,
    post_process_eval_step,
    write_metrics,
    run_eval,
    train,
  )
  factories = generation.step_factories(trainer, hook)
  hook.installed = {
    **dict(zip(_INSTALLED, functions, strict=True)),
    generation.compile_steps: compile_steps,
    **{name: checked(create) for name, create in factories.items()},
  }
  for name, function in hook.installed.items():
    setattr(trainer, name, function)
  del hook.installed["train"]  # may be wrapped: what it does is done inside
  hook.installed |= {
    "loss_fn": step_loss,
    "eval_loss_fn": step_loss,
    "gen_model_input_fn": as_arguments,
  }
  manager.save = save
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
    vars(self).update(_hooks=hooks, _hook=hook)

  def __getattr__(self, name):
    return getattr(self._hooks, name)

  def __setattr__(self, name, value):
    setattr(self._hooks, name, value)

  def on_eval_step_end(self, train_ctx, eval_loss):
    del eval_loss  # a sum of means
    self._hooks.on_eval_step_end(train_ctx, _ratio(self._hook.evaluated))
