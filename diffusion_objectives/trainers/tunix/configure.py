"""The calls that configure a trainer."""

from collections.abc import Mapping
from typing import Any

from diffusion_objectives import batches
from diffusion_objectives import divergences
from diffusion_objectives._core import checks
from diffusion_objectives.objectives import cross_entropy
from diffusion_objectives.objectives import distillation
from diffusion_objectives.trainers.tunix import hook
from diffusion_objectives.trainers.tunix import identity
from diffusion_objectives.trainers.tunix import preparation


def configure_objective(
  trainer: Any,
  loss_fn: hook.LossFn,
  *,
  batch_adapter: preparation.BatchAdapter | None = None,
  check_values: bool = True,
  name: str | None = None,
  objective_version: int = 1,
  hyper_parameters: Mapping[str, Any] | None = None,
  metadata: Mapping[str, Any] | None = None,
  allow_missing_identity: bool = False,
) -> Any:
  """Makes a Tunix `PeftTrainer` train on an objective, exactly weighted.

  With `LossOutput`s `o_1 ... o_K` of a window's micro-batches, the optimizer
  receives `sum_k grad(o_k.sum) / sum_k o_k.denominator` (0 where that
  denominator is 0), and each logged value is such a ratio. The denominator must
  depend on the batch alone.

  Every checkpoint carries the objective's identity: the name, the version, the
  hyper-parameters, the denominator's unit and the metadata given here. A
  trainer that was restored from a checkpoint can only be configured with the
  same. A second call replaces the first objective.

  Args:
    trainer: a `PeftTrainer` of google-tunix 0.1.7 or of Tunix main, or main's
      experimental `PeftTrainerV2`, with full parameters or LoRA.
    loss_fn: `(model, batch) -> LossOutput`, traced.
    batch_adapter: from an item of the data set to the batch, called before the
      compiled step, in training and in evaluation, and not for items that a
      resumed run skips. None takes the items as batches.
    check_values: whether to call `batch.check_values()`, where the batch has
      that method, before each step.
    name: of the objective; None takes the function's, which a lambda or a
      partial function lacks.
    objective_version: to be raised where the same hyper-parameters come to mean
      another loss.
    hyper_parameters: those bound in `loss_fn`, by name, JSON values.
    metadata: anything else that a resumed run must not change (a tokenizer, a
      teacher's name), by name, JSON values.
    allow_missing_identity: whether to go on from a checkpoint that names no
      objective.

  Returns:
    The same trainer.

  Raises:
    TypeError: an argument of another type.
    ValueError: a trainer that lacks a needed attribute or accumulates in
      another way, that is inside `train()` or inside an accumulation window, or
      that was restored from a checkpoint of another objective (each differing
      field is named) or of none.

  Example:
    >>> import jax.numpy as jnp, numpy as np, optax
    >>> from flax import nnx
    >>> from tunix.sft import peft_trainer
    >>> import diffusion_objectives as do
    >>> trainer = peft_trainer.PeftTrainer(
    ...     nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1),
    ...     peft_trainer.TrainingConfig(eval_every_n_steps=1, max_steps=1))
    >>> def squared_error(model, batch):
    ...   error = (model(batch["x"]) - batch["y"]) ** 2
    ...   return do.LossOutput(
    ...       primary_loss=do.WeightedMetric(
    ...           unreduced_sum=error.sum(),
    ...           denominator=jnp.float32(error.size)),
    ...       aux_metrics={})
    >>> _ = configure_objective(trainer, squared_error)
    >>> trainer.train([{"x": np.ones((4, 2), np.float32),
    ...                 "y": np.ones((4, 1), np.float32)}])
    >>> trainer.train_steps
    1
  """
  checks.boolean("check_values", check_values)
  checks.function("loss_fn", loss_fn)
  if batch_adapter is not None:
    checks.function("batch_adapter", batch_adapter)
  if name is None:
    name = getattr(loss_fn, "__name__", "")
    if not name.isidentifier():
      raise checks.fail(
        ValueError,
        "name must be given where the loss_fn has none of its own",
        f"{loss_fn!r}",
      )
  return _configure(
    trainer,
    loss_fn,
    batch_adapter or (lambda item: item),
    identity.Identity(
      name=name,
      objective_version=objective_version,
      hyper_parameters=hyper_parameters or {},
      denominator=None,
      metadata=metadata or {},
    ),
    check_values=check_values,
    allow_missing_identity=allow_missing_identity,
  )


def configure_diffusion_sft(
  trainer: Any,
  batch_adapter: preparation.BatchAdapter | None = None,
  logits_fn: preparation.LogitsFn | None = None,
  *,
  denominator: str | None = None,
  check_values: bool = True,
  metadata: Mapping[str, Any] | None = None,
  allow_missing_identity: bool = False,
) -> Any:
  """Trains a `PeftTrainer` on `weighted_cross_entropy_loss`.

  Args:
    trainer: as for `configure_objective`.
    batch_adapter: from an item of the data set to a `DiffusionTokenBatch`, ours
      or Tunix main's own; None takes the items as such.
    logits_fn: `(model, model_inputs) -> [batch, length, vocabulary]` logits,
      aligned with the targets; None is `model_logits`.
    denominator: the loss's unit. None takes that of the first batch: "tokens"
      where it has `is_supervised`, else "weights".
    check_values: whether to check each batch's values before the step.
    metadata: as for `configure_objective`.
    allow_missing_identity: as for `configure_objective`.

  Returns:
    The same trainer.

  Raises:
    TypeError, ValueError: as `configure_objective`; or an unknown denominator.
    During `train()`: a batch of another class, with values that
      `DiffusionTokenBatch.check_values` refuses, or of another unit than the
      first or than the checkpoint's; parameters are then as before that batch.

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
  ours = identity.Identity(
    name="weighted_cross_entropy_loss",
    objective_version=1,
    hyper_parameters={},
    denominator=denominator,
    metadata=metadata or {},
  )
  prepare = preparation.Preparation(
    kind=batches.DiffusionTokenBatch,
    trainer=trainer,
    batch_adapter=batch_adapter,
    logits_fn=logits_fn or preparation.model_logits,
    denominator=denominator,
    check_values=checks.boolean("check_values", check_values),
    identity=ours,
  )

  def loss_fn(model, batch):
    return cross_entropy.weighted_cross_entropy_loss(
      prepare.logits_fn(model, batch.model_inputs),
      batch,
      denominator=denominator,
    )

  return _configure(
    trainer,
    loss_fn,
    prepare,
    ours,
    allow_missing_identity=allow_missing_identity,
  )


def configure_prepared_diffusion_opd(
  trainer: Any,
  batch_adapter: preparation.BatchAdapter | None = None,
  student_logits_fn: preparation.LogitsFn | None = None,
  *,
  temperature: float = 1.0,
  soft_loss_weight: float = 1.0,
  hard_loss_weight: float = 0.0,
  divergence: divergences.Divergence = divergences.forward_kl,
  denominator: str | None = None,
  check_values: bool = True,
  metadata: Mapping[str, Any] | None = None,
  allow_missing_identity: bool = False,
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
    metadata: as for `configure_objective`.
    allow_missing_identity: as for `configure_objective`.

  Returns:
    The same trainer.

  Raises:
    TypeError, ValueError: as `configure_objective`; or a hyper-parameter that
      `prepared_opd_loss` refuses. During `train()`: a batch of another class,
      with values that `DiffusionDistillationBatch.check_values` refuses, or of
      another unit than the first or than the checkpoint's; parameters are then
      as before that batch.

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
  ours = identity.Identity(
    name="prepared_opd_loss",
    objective_version=1,
    hyper_parameters={
      **hyper_parameters._asdict(),
      "divergence": divergence.name,
      **{
        f"divergence.{name}": value
        for name, value in divergence.hyper_parameters
      },
    },
    denominator=denominator,
    metadata=metadata or {},
  )
  prepare = preparation.Preparation(
    kind=batches.DiffusionDistillationBatch,
    trainer=trainer,
    batch_adapter=batch_adapter,
    logits_fn=student_logits_fn or preparation.model_logits,
    denominator=denominator,
    check_values=checks.boolean("check_values", check_values),
    identity=ours,
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

  return _configure(
    trainer,
    loss_fn,
    prepare,
    ours,
    allow_missing_identity=allow_missing_identity,
  )


def _configure(
  trainer: Any,
  loss_fn: hook.LossFn,
  batch_adapter: preparation.BatchAdapter,
  ours: identity.Identity,
  *,
  allow_missing_identity: bool,
  check_values: bool = False,
) -> Any:
  """Everything is checked before anything is set."""
  checks.boolean("allow_missing_identity", allow_missing_identity)
  generation, steps, previous = hook.check_trainer(trainer)
  hook.resume(trainer, previous, ours, allow_missing_identity)
  hook.install(
    trainer,
    hook.Hook(
      loss_fn=loss_fn,
      batch_adapter=batch_adapter,
      check_values=check_values,
      identity=ours,
      generation=generation,
      accumulation_steps=steps,
      has_trained=previous is not None and previous.has_trained,
    ),
  )
  return trainer
