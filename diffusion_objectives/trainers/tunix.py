"""One call that gives a Tunix `PeftTrainer` an exactly weighted objective.

Released Tunix (0.1.7) averages: the gradient over micro-batches by
`optax.MultiSteps`, the logged loss over micro-batches, the evaluation loss over
batches. Each is a mean of means, wrong as soon as the denominators differ. It
also calls its input function inside the compiled step, where no value can be
checked. A configured trainer instead

* adapts and checks every batch before the compiled step;
* updates by the sum of gradients over the sum of denominators, for any number
  of micro-batches; a window of denominator 0 gives the optimizer a zero
  gradient;
* logs sums over sums, in float64 on the host.

Only attributes of the trainer's instance (and one of its optimizer) are set;
nothing is patched or forked, and checkpoints keep the trainer's own tree.
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
import numpy as np
import optax

from diffusion_objectives import batches
from diffusion_objectives import divergences
from diffusion_objectives import outputs
from diffusion_objectives._core import checks
from diffusion_objectives._core import numerics
from diffusion_objectives._core import pytree
from diffusion_objectives.objectives import cross_entropy
from diffusion_objectives.objectives import distillation

LossFn = Callable[[nnx.Module, Any], outputs.LossOutput]
LogitsFn = Callable[[nnx.Module, Any], jax.Array]
BatchAdapter = Callable[[Any], Any]

# Names under which the trainer logs series of its own.
RESERVED_METRICS = ("loss", "perplexity", "learning_rate", "grad_norm")

# What a configured trainer is read through or has set on its instance; one row
# each in docs/trainers.md.
TRAINER_ATTRIBUTES = (
  "model",
  "optimizer",
  "config",
  "iter_steps",
  "training_hooks",
  "metrics_logger",
  "metrics_prefix",
  "loss_fn",
  "eval_loss_fn",
  "gen_model_input_fn",
  "with_loss_fn",
  "with_gen_model_input_fn",
  "train",
  "create_train_step_fn",
  "create_eval_step_fn",
  "_lora_enabled",
  "_train_step",
  "_prepare_inputs",
  "_post_process_train_step",
  "_post_process_eval_step",
  "_run_eval",
  "_buffered_train_metrics",
  "_buffered_eval_metrics",
)


class AccumulatedDenominator(nnx.Variable):
  """The denominators of the current window's micro-batches, summed.

  It rides on the optimizer through the compiled step. It is no `OptState`, so
  a checkpoint does not hold it.
  """


def model_logits(model: nnx.Module, model_inputs: Any) -> jax.Array:
  """The default scorer: `model(**model_inputs)`, the first of a tuple.

  Tunix's own classes return `(logits, cache)`.

  Args:
    model: the network.
    model_inputs: a mapping of keyword arguments.

  Returns:
    `[batch, length, vocabulary]` logits.

  Raises:
    TypeError: `model_inputs` is no mapping.

  Example:
    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> table = nnx.Embed(8, 8, rngs=nnx.Rngs(0))
    >>> model_logits(table, {"inputs": jnp.array([[1, 2]])}).shape
    (1, 2, 8)
  """
  if not isinstance(model_inputs, Mapping):
    raise checks.fail(
      TypeError,
      "model_inputs must be a mapping of the model's keyword arguments",
      checks.describe(model_inputs),
    )
  result = model(**model_inputs)
  return result[0] if isinstance(result, tuple) else result


def configure_objective(
  trainer: Any,
  loss_fn: LossFn,
  *,
  batch_adapter: BatchAdapter | None = None,
  check_values: bool = True,
) -> Any:
  """Makes a Tunix `PeftTrainer` train on an objective, exactly weighted.

  With `LossOutput`s `o_1 ... o_K` of a window's micro-batches, the optimizer
  receives `sum_k grad(o_k.sum) / sum_k o_k.denominator` (0 where that
  denominator is 0), and each logged value is such a ratio. The denominator must
  depend on the batch alone.

  A second call replaces the first objective.

  Args:
    trainer: a `tunix.sft.peft_trainer.PeftTrainer` of google-tunix 0.1.7, with
      full parameters or LoRA.
    loss_fn: `(model, batch) -> LossOutput`, traced.
    batch_adapter: from an item of the data set to the batch, called before the
      compiled step, in training and in evaluation, and not for items that a
      resumed run skips. None takes the items as batches.
    check_values: whether to call `batch.check_values()`, where the batch has
      that method, before each step.

  Returns:
    The same trainer.

  Raises:
    TypeError: an argument of another type.
    ValueError: a trainer that lacks a needed attribute or accumulates in
      another way, or that is inside `train()` or inside an accumulation window.

  Example:
    >>> import jax.numpy as jnp, numpy as np, optax
    >>> from flax import nnx
    >>> from tunix.sft import peft_trainer
    >>> trainer = peft_trainer.PeftTrainer(
    ...     nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1),
    ...     peft_trainer.TrainingConfig(eval_every_n_steps=1, max_steps=1))
    >>> def squared_error(model, batch):
    ...   error = (model(batch["x"]) - batch["y"]) ** 2
    ...   return outputs.LossOutput(
    ...       primary_loss=outputs.WeightedMetric(
    ...           unreduced_sum=error.sum(),
    ...           denominator=jnp.float32(error.size)),
    ...       aux_metrics={})
    >>> _ = configure_objective(trainer, squared_error)
    >>> trainer.train([{"x": np.ones((4, 2), np.float32),
    ...                 "y": np.ones((4, 1), np.float32)}])
    >>> trainer.train_steps
    1
  """
  for name, value in (("loss_fn", loss_fn), ("batch_adapter", batch_adapter)):
    if not callable(value) and (value is not None or name == "loss_fn"):
      raise checks.fail(
        TypeError, f"{name} must be callable", checks.describe(value)
      )
  checks.boolean("check_values", check_values)
  steps = _check_trainer(trainer)
  _install(
    trainer,
    _Hook(
      loss_fn=loss_fn,
      batch_adapter=batch_adapter or (lambda item: item),
      check_values=check_values,
      accumulation_steps=steps,
    ),
  )
  return trainer


def configure_diffusion_sft(
  trainer: Any,
  batch_adapter: BatchAdapter | None = None,
  logits_fn: LogitsFn | None = None,
  *,
  denominator: str | None = None,
  check_values: bool = True,
) -> Any:
  """Trains a `PeftTrainer` on `weighted_cross_entropy_loss`.

  Args:
    trainer: as for `configure_objective`.
    batch_adapter: from an item of the data set to a `DiffusionTokenBatch`; None
      takes the items as such.
    logits_fn: `(model, model_inputs) -> [batch, length, vocabulary]` logits,
      aligned with the targets; None is `model_logits`.
    denominator: the loss's unit. None takes that of the first batch: "tokens"
      where it has `is_supervised`, else "weights".
    check_values: whether to check each batch's values before the step.

  Returns:
    The same trainer.

  Raises:
    TypeError, ValueError: as `configure_objective`; or an unknown denominator.
    During `train()`: a batch of another class, with values that
      `DiffusionTokenBatch.check_values` refuses, or of another unit than the
      first; parameters are then as before that batch.

  Example:
    >>> import jax, numpy as np, optax
    >>> from flax import nnx
    >>> from tunix.sft import peft_trainer
    >>> import diffusion_objectives as do
    >>> trainer = peft_trainer.PeftTrainer(
    ...     nnx.Embed(8, 8, rngs=nnx.Rngs(0)), optax.adam(1e-2),
    ...     peft_trainer.TrainingConfig(eval_every_n_steps=1, max_steps=1))
    >>> batch = do.corruption.masked_diffusion_batch(
    ...     jax.random.key(0), np.array([[1, 2, 3]]), np.ones((1, 3), bool),
    ...     mask_id=7, model_inputs=lambda noisy_ids, times: {
    ...         "inputs": noisy_ids})
    >>> _ = configure_diffusion_sft(trainer)
    >>> trainer.train([batch])
    >>> trainer.train_steps
    1
  """
  batches.check_unit(denominator)
  prepare = _Preparation(
    kind=batches.DiffusionTokenBatch,
    trainer=trainer,
    batch_adapter=batch_adapter,
    logits_fn=logits_fn or model_logits,
    denominator=denominator,
    check_values=checks.boolean("check_values", check_values),
  )

  def loss_fn(model, batch):
    return cross_entropy.weighted_cross_entropy_loss(
      prepare.logits_fn(model, batch.model_inputs),
      batch,
      denominator=denominator,
    )

  return configure_objective(
    trainer, loss_fn, batch_adapter=prepare, check_values=False
  )


def configure_prepared_diffusion_opd(
  trainer: Any,
  batch_adapter: BatchAdapter | None = None,
  student_logits_fn: LogitsFn | None = None,
  *,
  temperature: float = 1.0,
  soft_loss_weight: float = 1.0,
  hard_loss_weight: float = 0.0,
  divergence: divergences.Divergence = divergences.forward_kl,
  denominator: str | None = None,
  check_values: bool = True,
) -> Any:
  """Trains a `PeftTrainer` on `prepared_opd_loss`: on-policy distillation.

  The adapter is the place for rollouts and for the teacher: it runs before the
  compiled step with the student as it is then, and is not called for items that
  a resumed run skips.

  Args:
    trainer: as for `configure_objective`; its model is the student.
    batch_adapter: from an item of the data set to a
      `DiffusionDistillationBatch`; None takes the items as such.
    student_logits_fn: `(model, model_inputs) -> [batch, length, vocabulary]`
      logits, aligned with the targets; None is `model_logits`.
    temperature: of the soft term.
    soft_loss_weight: coefficient of `T^2 D(teacher, student)`.
    hard_loss_weight: coefficient of the cross entropy with the targets.
    divergence: `D`, one of `divergences` or your own.
    denominator: the loss's unit. None takes that of the first batch: "tokens"
      where it has `is_supervised`, else "weights".
    check_values: whether to check each batch's values before the step: targets
      where `hard_loss_weight` is positive, the teacher where `soft_loss_weight`
      is.

  Returns:
    The same trainer.

  Raises:
    TypeError, ValueError: as `configure_objective`; or a hyper-parameter that
      `prepared_opd_loss` refuses. During `train()`: a batch of another class,
      with values that `DiffusionDistillationBatch.check_values` refuses, or of
      another unit than the first; parameters are then as before that batch.

  Example:
    >>> import jax, numpy as np, optax
    >>> from flax import nnx
    >>> from tunix.sft import peft_trainer
    >>> import diffusion_objectives as do
    >>> teacher = nnx.Embed(8, 8, rngs=nnx.Rngs(1))
    >>> trainer = peft_trainer.PeftTrainer(
    ...     nnx.Embed(8, 8, rngs=nnx.Rngs(0)), optax.adam(1e-2),
    ...     peft_trainer.TrainingConfig(eval_every_n_steps=1, max_steps=1))
    >>> def scored(canvas):  # [batch, length] ids, 7 where still masked
    ...   return do.DiffusionDistillationBatch(
    ...       student_batch=do.DiffusionTokenBatch(
    ...           model_inputs={"inputs": canvas}, target_ids=canvas,
    ...           loss_weights=canvas == 7),
    ...       teacher=do.DenseTeacher(logits=teacher(canvas)))
    >>> _ = configure_prepared_diffusion_opd(trainer, scored)
    >>> trainer.train([np.array([[1, 7, 3, 7]])])
    >>> trainer.train_steps
    1
  """
  batches.check_unit(denominator)
  hyper_parameters = distillation.check_opd_hyper_parameters(
    temperature, soft_loss_weight, hard_loss_weight, divergence
  )
  prepare = _Preparation(
    kind=batches.DiffusionDistillationBatch,
    trainer=trainer,
    batch_adapter=batch_adapter,
    logits_fn=student_logits_fn or model_logits,
    denominator=denominator,
    check_values=checks.boolean("check_values", check_values),
    value_options={
      "check_targets": hyper_parameters.hard_loss_weight > 0,
      "check_teacher": hyper_parameters.soft_loss_weight > 0,
    },
  )

  def loss_fn(model, batch):
    return distillation.prepared_opd_loss(
      prepare.logits_fn(model, batch.student_batch.model_inputs),
      batch,
      **hyper_parameters._asdict(),
      denominator=denominator,
    )

  return configure_objective(
    trainer, loss_fn, batch_adapter=prepare, check_values=False
  )


@dataclasses.dataclass
class _Preparation:
  """From an item of the data set to a checked token batch."""

  kind: type
  trainer: Any
  batch_adapter: BatchAdapter | None
  logits_fn: LogitsFn
  denominator: str | None
  check_values: bool
  value_options: Mapping[str, bool] = dataclasses.field(default_factory=dict)
  unit: str | None = None
  vocabulary_size: int | None = None

  def __post_init__(self) -> None:
    for name in ("batch_adapter", "logits_fn"):
      value = getattr(self, name)
      if value is not None and not callable(value):
        raise checks.fail(
          TypeError, f"{name} must be callable", checks.describe(value)
        )

  def __call__(self, item: Any) -> Any:
    batch = self.batch_adapter(item) if self.batch_adapter else item
    source = (
      "the batch_adapter's result"
      if self.batch_adapter
      else "an item of the data set (there is no batch_adapter)"
    )
    checks.instance(source, batch, self.kind)
    tokens = (
      batch if self.kind is batches.DiffusionTokenBatch else batch.student_batch
    )
    unit = batches.denominator_unit(tokens, self.denominator)
    if self.unit not in (None, unit):
      raise checks.fail(
        ValueError,
        "every batch must have the denominator unit of the first,"
        f" {self.unit!r}",
        f"one of unit {unit!r}",
      )
    if self.vocabulary_size is None:
      logits = nnx.eval_shape(
        self.logits_fn, self.trainer.model, tokens.model_inputs
      )
      batches.check_logits("logits", logits, tokens)
      self.vocabulary_size = logits.shape[-1]
    if self.check_values:
      batch.check_values(self.vocabulary_size, **self.value_options)
    self.unit = unit  # fixed by the first batch that passed
    return batch


@pytree.record
class _MicroBatch:
  """A batch and whether it ends its window, known to the compiler.

  So there are two compiled steps, one that adds gradients and one that updates,
  and neither carries the other's cost.
  """

  batch: Any
  is_last: bool = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(eq=False)
class _Hook:
  """One configured objective, and whether its trainer is inside `train()`."""

  loss_fn: LossFn
  batch_adapter: BatchAdapter
  check_values: bool
  accumulation_steps: int
  is_training: bool = False

  def loss_and_output(
    self, model: nnx.Module, batch: Any
  ) -> tuple[jax.Array, outputs.LossOutput]:
    """The sum to differentiate, and all of the output."""
    output = self.loss_fn(model, batch)
    checks.instance("the loss_fn's result", output, outputs.LossOutput)
    for name in RESERVED_METRICS:
      if name in output.aux_metrics:
        raise checks.fail(
          ValueError,
          f"aux_metrics must not use the trainer's names {RESERVED_METRICS}",
          repr(name),
        )
    return output.primary_loss.unreduced_sum, output


def _check_trainer(trainer: Any) -> int:
  """Refuses a trainer that the hook cannot serve; returns its window."""
  for name in TRAINER_ATTRIBUTES:
    if not hasattr(trainer, name):
      raise checks.fail(
        ValueError,
        f"trainer must be a Tunix PeftTrainer with attribute {name!r}",
        f"{type(trainer).__name__} without it",
      )
  parameters = list(inspect.signature(trainer._train_step).parameters)
  if parameters != ["model", "optimizer", "inputs"]:
    raise checks.fail(
      ValueError,
      "trainer._train_step must take (model, optimizer, inputs), as in"
      " google-tunix 0.1.7",
      f"({', '.join(parameters)})",
    )
  hook = vars(trainer).get("_diffusion_objective")
  if hook is not None and hook.is_training:
    raise checks.fail(
      ValueError,
      "an objective must be configured outside train()",
      "a trainer inside train()",
    )
  steps = trainer.config.gradient_accumulation_steps
  is_windowed = isinstance(trainer.optimizer.tx, optax.MultiSteps)
  nested = _count_accumulators(trainer.optimizer.opt_state)
  if nested != int(steps is not None) or is_windowed != (steps is not None):
    raise checks.fail(
      ValueError,
      "the optimizer must accumulate by gradient_accumulation_steps alone,"
      " through the trainer's own optax.MultiSteps",
      f"gradient_accumulation_steps={steps} and {nested} optax.MultiSteps",
    )
  steps = steps or 1
  if trainer.iter_steps % steps:
    raise checks.fail(
      ValueError,
      "an objective must be configured at the edge of an accumulation"
      f" window, iter_steps a multiple of {steps}",
      f"iter_steps={trainer.iter_steps}",
    )
  return steps


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


def _install(trainer: Any, hook: _Hook) -> None:
  """Sets the attributes that docs/trainers.md lists, on the instance."""
  cls = type(trainer)

  def scalar_loss(model, batch):
    _, output = hook.loss_and_output(model, batch)
    return output.primary_loss.compute(), output

  def unchanged(batch):
    return batch

  def check_ours():
    for name, ours in (
      ("loss_fn", scalar_loss),
      ("eval_loss_fn", scalar_loss),
      ("gen_model_input_fn", unchanged),
      ("_prepare_inputs", prepare_inputs),
    ):
      if getattr(trainer, name) is not ours:
        raise checks.fail(
          ValueError,
          f"trainer.{name} must be the configured objective's (configure"
          " again instead of setting it)",
          repr(getattr(trainer, name)),
        )

  def prepare_inputs(item):
    batch = hook.batch_adapter(cls._prepare_inputs(trainer, item))
    if hook.check_values and hasattr(batch, "check_values"):
      batch.check_values()
    _check_divides(batch, trainer.config.data_sharding_axis)
    ends = (trainer.iter_steps + 1) % hook.accumulation_steps == 0
    return _MicroBatch(batch=batch, is_last=ends)

  def train_step(model, optimizer, inputs):
    differentiable = (
      nnx.DiffState(0, nnx.LoRAParam) if trainer._lora_enabled else 0
    )
    (_, output), gradients = nnx.value_and_grad(
      hook.loss_and_output, argnums=differentiable, has_aux=True
    )(model, inputs.batch)
    norm = _step(
      model,
      optimizer,
      gradients,
      output.primary_loss.denominator,
      inputs.is_last,
    )
    return output.primary_loss.compute(), output, norm

  def eval_step(model, inputs):
    return scalar_loss(model, inputs.batch)

  def create_train_step():
    check_ours()
    _place_denominator(trainer.optimizer)
    return train_step

  def create_eval_step():
    check_ours()
    return eval_step

  def post_process_train_step(output):
    buffer = trainer._buffered_train_metrics
    _buffer(buffer, output)
    # The last micro-batch's norm is that of the applied gradient.
    del buffer.additional_metrics["grad_norm"][0][:-1]
    cls._post_process_train_step(trainer, output)

  def post_process_eval_step(output):
    _buffer(trainer._buffered_eval_metrics, output)
    cls._post_process_eval_step(trainer, output)

  def run_eval(eval_ds, eval_step_fn):
    hooks = trainer.training_hooks
    if hooks is not None:
      trainer.training_hooks = _EvalHooks(hooks, trainer)
    try:
      cls._run_eval(trainer, eval_ds, eval_step_fn)
    finally:
      trainer.training_hooks = hooks
      trainer._buffered_eval_metrics = None  # also after a refused batch

  def train(*args, **kwargs):
    hook.is_training = True
    try:
      return cls.train(trainer, *args, **kwargs)
    finally:
      hook.is_training = False

  _reset_window(trainer.optimizer, hook.accumulation_steps)
  trainer.with_loss_fn(scalar_loss, has_aux=True)
  trainer.with_gen_model_input_fn(unchanged)
  trainer._prepare_inputs = prepare_inputs
  trainer.create_train_step_fn = create_train_step
  trainer.create_eval_step_fn = create_eval_step
  trainer._post_process_train_step = post_process_train_step
  trainer._post_process_eval_step = post_process_eval_step
  trainer._run_eval = run_eval
  trainer.train = train
  trainer._diffusion_objective = hook


# The update.


def _step(
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
  optimizer.step[...] += 1
  is_multi = isinstance(optimizer.tx, optax.MultiSteps)
  window = optimizer.opt_state
  gradients = _arrays(gradients)
  sums, total = gradients, denominator.astype(jnp.float32)
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
      window.mini_step[...] += 1
      return jnp.zeros_like(total)
    _assign(window.mini_step, _zeros(_arrays(window.mini_step)))
  if is_multi:
    window.gradient_step[...] += 1

  mean = jax.tree.map(
    lambda leaf, gradient: _divide(leaf, total).astype(gradient.dtype),
    sums,
    gradients,
  )
  variables = window.inner_opt_state if is_multi else window
  transform = optimizer.tx.inner_opt if is_multi else optimizer.tx
  params_state = nnx.state(model, optimizer.wrt)
  params, state = _arrays(params_state), _arrays(variables)
  updates, new_state = transform.update(mean, state, params)
  _assign(variables, jax.tree.map(_like, new_state, state))
  new_params = optax.apply_updates(params, updates)
  structure = jax.tree.structure(params_state)
  nnx.update(model, jax.tree.unflatten(structure, jax.tree.leaves(new_params)))
  return optax.tree.norm(mean)


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


def _reset_window(optimizer: Any, accumulation_steps: int) -> None:
  """Starts a window; one restored from within a window starts anew."""
  if not isinstance(optimizer.tx, optax.MultiSteps):
    return
  window = optimizer.opt_state
  for tree in (window.mini_step, window.acc_grads):
    _assign(tree, _zeros(_arrays(tree)))
  if accumulation_steps > 1:
    optimizer.accumulated_denominator = AccumulatedDenominator(
      jnp.zeros((), jnp.float32)
    )


def _place_denominator(optimizer: nnx.Optimizer) -> None:
  """Replicates the running denominator, as the step returns it: one compile."""
  mesh = pxla.thread_resources.env.physical_mesh
  total = getattr(optimizer, "accumulated_denominator", None)
  if total is not None and not mesh.empty:
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    total[...] = jax.device_put(total[...], sharding)


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


class _LazyRatio:
  """A list of metrics that NumPy reads as their ratio, once it is logged.

  The trainer buffers device values and reads them a step later; so must this.
  """

  def __init__(self):
    self.metrics = []

  def __array__(self, dtype=None, copy=None):
    del copy
    return np.asarray(_ratio(self.metrics), dtype)


def _buffer(buffer: Any, output: outputs.LossOutput) -> None:
  """Replaces the micro-batch means in a trainer's buffer by one ratio."""
  if not isinstance(buffer.losses[0], _LazyRatio):
    buffer.losses[0] = _LazyRatio()
  del buffer.losses[1:]
  buffer.losses[0].metrics.append(output.primary_loss)
  for name, metric in output.aux_metrics.items():
    buffer.additional_metrics.setdefault(name, ([], _ratio))[0].append(metric)


class _EvalHooks:
  """The user's training hooks, given the exact evaluation loss.

  The trainer passes the sum of the batches' means to `on_eval_step_end`.
  """

  def __init__(self, hooks, trainer):
    self._hooks = hooks
    self._trainer = trainer

  def __getattr__(self, name):
    return getattr(self._hooks, name)

  def on_eval_step_end(self, train_ctx, eval_loss):
    del eval_loss  # a sum of means
    exact = self._trainer.metrics_logger.get_metric_history(
      self._trainer.metrics_prefix, "loss", "eval"
    )[-1]
    self._hooks.on_eval_step_end(train_ctx, exact)
