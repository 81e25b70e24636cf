"""The three trainers, and how each is made to divide sums by sums.

* `multi_steps`, google-tunix 0.1.7: `optax.MultiSteps` averages gradients of
  micro-batch means. The step is replaced: its state's `acc_grads` holds the sum
  of gradients, and the wrapped optimizer runs once a window.
* `accumulator`, `PeftTrainer` of Tunix main: its `GradientAccumulator` divides
  the sum of gradients by the sum of denominators, exactly. It is used as it is.
  Where a window is one micro-batch the trainer passes it by, with a scale that
  is rounded to the parameters' dtype; there the step is replaced.
* `two_executables`, main's `PeftTrainerV2`: its accumulator divides by at least
  1. The division is done before it, and its denominator set to 1.

They are told apart by what they have, not by a version.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import inspect
from typing import Any

from flax import nnx
import jax
from jax.interpreters import pxla
import jax.numpy as jnp
import optax

from diffusion_objectives import outputs
from diffusion_objectives._core import checks
from diffusion_objectives._core import numerics
from diffusion_objectives._core import pytree

# Under this name a step hands its whole `LossOutput` on, for the log.
OUTPUT = "diffusion_objective/output"

_COMMON = (
  "model",
  "optimizer",
  "config",
  "iter_steps",
  "train_steps",
  "training_hooks",
  "checkpoint_manager",
  "loss_fn",
  "eval_loss_fn",
  "gen_model_input_fn",
  "with_loss_fn",
  "with_gen_model_input_fn",
  "train",
  "custom_checkpoint_metadata",
  "create_train_step_fn",
  "create_eval_step_fn",
  "_iter_steps",
  "_restored_custom_metadata",
  "_prepare_inputs",
  "_post_process_train_step",
  "_post_process_eval_step",
  "_write_metrics",
  "_run_eval",
  "_buffered_train_metrics",
  "_buffered_eval_metrics",
)

# Of the method that compiles the steps.
_COMPILE_PARAMETERS = ("skip_jit", "cache_nnx_graph")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
  """How one trainer accumulates, and what it must have for a hook to serve it.

  Attributes:
    name: for messages and documentation.
    mark: the attribute that no earlier generation has; None is the first.
    attributes: what the hook reads, calls or sets, beside `signatures`.
    signatures: methods and their parameters, which the hook relies on.
    check_optimizer: `(optimizer, gradient_accumulation_steps)`, refuses an
      optimizer that accumulates by itself.
    step_loss: `(trainer, hook) -> loss_fn` for `with_loss_fn`.
    as_step_input: `(trainer, hook, batch)`, what the compiled step takes.
    step_factories: `(trainer, hook) -> {attribute: factory}`, set on the
      instance.
    start_window: `(trainer, hook)`, empties the accumulator.
    compile_steps: the method that compiles the steps and returns them.
    kept_steps: compiled steps that the trainer reads from attributes.
    donated: `(trainer, accumulation_steps)`, the attributes whose arrays a
      compiled step may overwrite.
    replaced: methods that are not called; they must be Tunix's own.
  """

  name: str
  mark: str | None
  attributes: tuple[str, ...]
  signatures: Mapping[str, tuple[str, ...]]
  check_optimizer: Callable[[Any, int | None], None]
  step_loss: Callable[[Any, Any], Callable[..., Any]]
  as_step_input: Callable[[Any, Any, Any], Any]
  step_factories: Callable[[Any, Any], Mapping[str, Callable[[], Any]]]
  start_window: Callable[[Any, Any], None]
  compile_steps: str
  kept_steps: tuple[str, ...]
  donated: Callable[[Any, int], tuple[str, ...]]
  replaced: tuple[str, ...]


def of(trainer: Any) -> Generation:
  """The trainer's generation; refuses what is none.

  Raises:
    ValueError: a needed attribute is missing, or a method takes other
      parameters than those that the hook knows.
  """
  generation = next(
    g for g in GENERATIONS if g.mark is None or hasattr(trainer, g.mark)
  )
  for name in (*generation.attributes, *generation.signatures):
    if not hasattr(trainer, name):
      raise checks.fail(
        ValueError,
        f"trainer must be a Tunix PeftTrainer with attribute {name!r}",
        f"{type(trainer).__name__} without it",
      )
  for name, expected in generation.signatures.items():
    received = tuple(inspect.signature(getattr(trainer, name)).parameters)
    if received != expected:
      raise checks.fail(
        ValueError,
        f"trainer.{name} must take ({', '.join(expected)}), as in"
        f" {generation.name}",
        f"({', '.join(received)})",
      )
  for name in generation.replaced:
    owner = next(c for c in type(trainer).__mro__ if name in vars(c))
    if owner.__module__.split(".")[0] != "tunix":
      raise checks.fail(
        ValueError,
        f"trainer.{name} must be Tunix's own, as a hook replaces it",
        f"that of {owner.__name__}",
      )
  return generation


# google-tunix 0.1.7


class AccumulatedDenominator(nnx.Variable):
  """The denominators of the current window's micro-batches, summed.

  It rides on the optimizer through the compiled step. It is no `OptState`, so
  a checkpoint does not hold it.
  """


@pytree.record
class MicroBatch:
  """A batch and whether it ends its window, known to the compiler.

  So there are two compiled steps, one that adds gradients and one that updates,
  and neither carries the other's cost.
  """

  batch: Any
  is_last: bool = dataclasses.field(metadata={"static": True})


def _check_multi_steps(optimizer: Any, steps: int | None) -> None:
  is_windowed = isinstance(optimizer.tx, optax.MultiSteps)
  nested = _count_accumulators(optimizer.opt_state)
  if nested != int(steps is not None) or is_windowed != (steps is not None):
    raise checks.fail(
      ValueError,
      "the optimizer must accumulate by gradient_accumulation_steps alone,"
      " through the trainer's own optax.MultiSteps",
      f"gradient_accumulation_steps={steps} and {nested} optax.MultiSteps",
    )


def _count_accumulators(opt_state: Any) -> int:
  def is_accumulator(node):
    return isinstance(node, optax.MultiStepsState)

  found, pending = 0, [opt_state]
  while pending:
    node = pending.pop()
    if is_accumulator(node):
      found += 1
      pending.append(node.inner_opt_state)
    else:
      pending.extend(
        leaf
        for leaf in jax.tree.leaves(node, is_leaf=is_accumulator)
        if is_accumulator(leaf)
      )
  return found


def _mean_and_output(trainer, hook):
  def step_loss(model, batch, frozen):
    output = hook.output(model, batch, frozen)
    return output.primary_loss.compute(), {OUTPUT: output}

  return step_loss


def _micro_batch(trainer, hook, batch):
  ends = (trainer.iter_steps + 1) % hook.accumulation_steps == 0
  return MicroBatch(batch=batch, is_last=ends)


def _multi_steps_factories(trainer, hook):
  def train_step(model, optimizer, inputs):
    micro = inputs.inputs
    output, gradients = _differentiate(
      trainer, hook, model, micro.batch, inputs.frozen
    )
    denominator = output.primary_loss.denominator
    norm = _add(model, optimizer, gradients, denominator, micro.is_last)
    return output.primary_loss.compute(), {OUTPUT: output}, norm

  def eval_step(model, inputs):
    return trainer.eval_loss_fn(model, inputs.inputs.batch, inputs.frozen)

  def create_train_step():
    _place_denominator(trainer.optimizer)
    return train_step

  return {
    "create_train_step_fn": create_train_step,
    "create_eval_step_fn": lambda: eval_step,
  }


def _differentiate(
  trainer: Any, hook: Any, model: nnx.Module, batch: Any, frozen: Any
) -> tuple[outputs.LossOutput, nnx.State]:
  """The output and the gradient of its sum."""

  def sum_and_output(model, batch, frozen):
    output = hook.output(model, batch, frozen)
    return output.primary_loss.unreduced_sum, output

  differentiable = (
    nnx.DiffState(0, nnx.LoRAParam) if trainer._lora_enabled else 0
  )
  (_, output), gradients = nnx.value_and_grad(
    sum_and_output, argnums=differentiable, has_aux=True
  )(model, batch, frozen)
  return output, gradients


def _add(
  model: nnx.Module,
  optimizer: Any,
  gradients: nnx.State,
  denominator: jax.Array,
  is_last: bool,
) -> jax.Array:
  """Adds a micro-batch to its window; on the last one, updates the model.

  The window lives in the trainer's own `optax.MultiStepsState`, whose tree is
  what checkpoints hold: `acc_grads` is the plain sum of gradients. The wrapped
  optimizer runs on the last micro-batch alone.

  Returns:
    The norm of the gradient that the optimizer received, 0 before the last
    micro-batch.
  """
  window = optimizer.opt_state
  gradients = _arrays(gradients)
  sums, total = gradients, denominator
  if hasattr(optimizer, "accumulated_denominator"):
    total += optimizer.accumulated_denominator[...]
    sums = jax.tree.map(
      lambda acc, gradient: acc + gradient.astype(acc.dtype),
      _arrays(window.acc_grads),
      gradients,
    )
    kept = _zeros((sums, total)) if is_last else (sums, total)
    _assign(window.acc_grads, kept[0])
    optimizer.accumulated_denominator[...] = kept[1]
    if not is_last:
      optimizer.step[...] += 1
      window.mini_step[...] += 1
      return jnp.zeros_like(total)
    _assign(window.mini_step, _zeros(_arrays(window.mini_step)))
  mean = jax.tree.map(
    lambda leaf, gradient: _divide(leaf, total).astype(gradient.dtype),
    sums,
    gradients,
  )
  if not isinstance(optimizer.tx, optax.MultiSteps):
    return _update(model, optimizer, optimizer.tx, window, mean)
  window.gradient_step[...] += 1
  return _update(
    model, optimizer, optimizer.tx.inner_opt, window.inner_opt_state, mean
  )


def _update(
  model: nnx.Module, optimizer: Any, transform: Any, variables: Any, mean: Any
) -> jax.Array:
  """Moves the parameters by a transformation and its state's variables.

  Returns:
    The norm of the gradient.
  """
  optimizer.step[...] += 1
  params_state = nnx.state(model, optimizer.wrt)
  params, state = _arrays(params_state), _arrays(variables)
  updates, new_state = transform.update(mean, state, params)
  _assign(variables, jax.tree.map(_like, new_state, state))
  new_params = optax.apply_updates(params, updates)
  structure = jax.tree.structure(params_state)
  nnx.update(model, jax.tree.unflatten(structure, jax.tree.leaves(new_params)))
  return optax.tree.norm(
    jax.tree.map(lambda x: x.astype(numerics.accumulation_dtype(x.dtype)), mean)
  )


def _start_multi_steps(trainer, hook):
  """Starts a window; one restored from within a window starts anew.

  The stock trainer goes on with the restored mini-step and yet takes the whole
  window's data again, so that it fires early for ever after.
  """
  optimizer = trainer.optimizer
  if not isinstance(optimizer.tx, optax.MultiSteps):
    return
  window = optimizer.opt_state
  optimizer.step[...] -= window.mini_step[...].astype(optimizer.step.dtype)
  for tree in (window.mini_step, window.acc_grads):
    _assign(tree, _zeros(_arrays(tree)))
  if hook.accumulation_steps > 1:
    optimizer.accumulated_denominator = AccumulatedDenominator(
      jnp.zeros((), float)  # float32, unless JAX is asked for more
    )


def _place_denominator(optimizer: nnx.Optimizer) -> None:
  """Replicates the running denominator, as the step returns it: one compile."""
  mesh = pxla.thread_resources.env.physical_mesh
  total = getattr(optimizer, "accumulated_denominator", None)
  if total is not None and not mesh.empty:
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    total[...] = jax.device_put(total[...], sharding)


MULTI_STEPS = Generation(
  name="google-tunix 0.1.7",
  mark=None,
  attributes=(*_COMMON, "_lora_enabled"),
  signatures={
    "_train_step": ("model", "optimizer", "inputs"),
    "jit_train_and_eval_step": _COMPILE_PARAMETERS,
  },
  check_optimizer=_check_multi_steps,
  step_loss=_mean_and_output,
  as_step_input=_micro_batch,
  step_factories=_multi_steps_factories,
  start_window=_start_multi_steps,
  compile_steps="jit_train_and_eval_step",
  kept_steps=(),
  donated=lambda trainer, steps: ("optimizer",),
  replaced=(
    "_train_step",
    "_eval_step",
    "create_train_step_fn",
    "create_eval_step_fn",
  ),
)


# Tunix main


def _check_no_multi_steps(optimizer: Any, steps: int | None) -> None:
  nested = _count_accumulators(optimizer.opt_state)
  if nested:
    raise checks.fail(
      ValueError,
      "the optimizer must accumulate by gradient_accumulation_steps alone,"
      " through the trainer's own accumulator",
      f"gradient_accumulation_steps={steps} and {nested} optax.MultiSteps",
    )


def _tunix_output(trainer, hook):
  """The objective as Tunix's own `LossOutput`, known there as unreduced."""
  from tunix.sft import utils  # 0.1.7 has no such class

  def step_loss(model, batch, frozen):
    output = hook.output(model, batch, frozen)
    primary = output.primary_loss
    return utils.LossOutput(
      utils.WeightedMetric(
        primary.unreduced_sum, primary.denominator.astype(jnp.float32)
      ),
      {OUTPUT: output},
    )

  return step_loss


def _as_it_is(trainer, hook, batch):
  return batch


def _own_factories(trainer, *names):
  """The class's own factories, for the check that precedes them."""
  return {name: getattr(type(trainer), name).__get__(trainer) for name in names}


def _accumulator_factories(trainer, hook):
  def train_step(model, optimizer, grad_accumulator, inputs, is_update_step):
    output, gradients = _differentiate(
      trainer, hook, model, inputs.inputs, inputs.frozen
    )
    denominator = output.primary_loss.denominator
    norm = _add(model, optimizer, gradients, denominator, is_last=True)
    return output.primary_loss.compute(), {OUTPUT: output}, norm

  factories = _own_factories(
    trainer, "create_train_step_fn", "create_eval_step_fn"
  )
  if _is_single(
    trainer, hook.accumulation_steps
  ):  # the trainer's own step would pass its accumulator by
    factories["create_train_step_fn"] = lambda: train_step
  return factories


def _is_single(trainer, steps):
  """Whether a window is one micro-batch."""
  return steps == 1 and trainer.config.max_seq_token_per_tpu is None


def _start_accumulator(trainer, hook):
  trainer.grad_accumulator.reset()


ACCUMULATOR = Generation(
  name="Tunix main",
  mark="grad_accumulator",
  attributes=(*_COMMON, "_lora_enabled", "grad_accumulator"),
  signatures={
    "_train_step": (
      "model",
      "optimizer",
      "grad_accumulator",
      "inputs",
      "is_update_step",
    ),
    "jit_train_and_eval_step": _COMPILE_PARAMETERS,
  },
  check_optimizer=_check_no_multi_steps,
  step_loss=_tunix_output,
  as_step_input=_as_it_is,
  step_factories=_accumulator_factories,
  start_window=_start_accumulator,
  compile_steps="jit_train_and_eval_step",
  kept_steps=(),
  donated=lambda trainer, steps: ("optimizer", "grad_accumulator"),
  replaced=("_train_step", "create_train_step_fn"),
)


# Tunix main, experimental


def _two_executables_factories(trainer, hook):
  cls = type(trainer)

  def update_step(model, optimizer, grad_accumulator):
    # The accumulator would divide by no less than 1.
    total = grad_accumulator.denom[...]
    for leaf in jax.tree.leaves(grad_accumulator.grads, is_leaf=_is_variable):
      value = leaf.get_value()
      leaf.set_value(_divide(value, total).astype(value.dtype))
    grad_accumulator.denom.set_value(jnp.ones_like(total))
    return cls._update_step(trainer, model, optimizer, grad_accumulator)

  def train_step(model, optimizer, grad_accumulator, inputs):
    loss, aux = trainer._fwd_bwd_step(model, grad_accumulator, inputs)
    return loss, aux, update_step(model, optimizer, grad_accumulator)

  return {
    **_own_factories(trainer, "create_fwd_bwd_step_fn", "create_eval_step_fn"),
    "create_update_step_fn": lambda: update_step,
    "create_train_step_fn": lambda: train_step,
  }


def _donated_by_two_executables(trainer, steps):
  donated = ("optimizer", "grad_accumulator")
  if _is_single(trainer, steps):  # the two are one executable
    return donated
  return ("model", *donated)


TWO_EXECUTABLES = Generation(
  name="Tunix main's PeftTrainerV2",
  mark="create_update_step_fn",
  attributes=(
    *_COMMON,
    "grad_accumulator",
    "create_fwd_bwd_step_fn",
    "_jitted_train_step_fn",
  ),
  signatures={
    "_fwd_bwd_step": ("model", "grad_accumulator", "inputs"),
    "_update_step": ("model", "optimizer", "grad_accumulator"),
    "_train_step": ("model", "optimizer", "grad_accumulator", "inputs"),
    "jit_fwd_bwd_update_and_eval_step": _COMPILE_PARAMETERS,
  },
  check_optimizer=_check_no_multi_steps,
  step_loss=_tunix_output,
  as_step_input=_as_it_is,
  step_factories=_two_executables_factories,
  start_window=_start_accumulator,
  compile_steps="jit_fwd_bwd_update_and_eval_step",
  kept_steps=("_jitted_train_step_fn",),
  donated=_donated_by_two_executables,
  replaced=("_train_step", "create_train_step_fn", "create_update_step_fn"),
)

# The latest first: each has the marks of those after it.
GENERATIONS = (TWO_EXECUTABLES, ACCUMULATOR, MULTI_STEPS)


# Trees of variables.


def _like(new: jax.Array, old: jax.Array) -> jax.Array:
  """`new` in the dtype of `old`: a transformation may promote its state."""
  return new if new.dtype == old.dtype else new.astype(old.dtype)


def _divide(total: jax.Array, denominator: jax.Array) -> jax.Array:
  """`total / denominator` in at least float32; 0 where the latter is 0."""
  wide = total.astype(numerics.accumulation_dtype(total.dtype))
  denominator = denominator.astype(wide.dtype)
  is_empty = denominator == 0
  return jnp.where(is_empty, 0, wide / jnp.where(is_empty, 1, denominator))


def _is_variable(node: Any) -> bool:
  return isinstance(node, nnx.Variable)


def _arrays(tree: Any) -> Any:
  """The values of a tree of variables.

  A value need not be an array: `optax.masked` leaves an empty node where a
  parameter has no state.
  """
  return jax.tree.map(lambda v: v.get_value(), tree, is_leaf=_is_variable)


def _zeros(tree: Any) -> Any:
  return jax.tree.map(jnp.zeros_like, tree)


def _assign(variables: Any, values: Any) -> None:
  """Writes values into a tree of variables of the same structure."""
  jax.tree.map(
    lambda variable, value: variable.set_value(value),
    variables,
    values,
    is_leaf=_is_variable,
  )
