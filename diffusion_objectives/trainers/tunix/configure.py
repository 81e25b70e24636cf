"""The calls that configure a trainer."""

from collections.abc import Mapping
from typing import Any

from flax import nnx
import jax

from diffusion_objectives import batches
from diffusion_objectives import divergences
from diffusion_objectives._core import checks
from diffusion_objectives.objectives import cross_entropy
from diffusion_objectives.objectives import distillation
from diffusion_objectives.objectives import linear_vocabulary
from diffusion_objectives.trainers.tunix import frozen_arrays
from diffusion_objectives.trainers.tunix import hook
from diffusion_objectives.trainers.tunix import identity
from diffusion_objectives.trainers.tunix import preparation


def configure_objective(
  trainer: Any,
  loss_fn: hook.LossFn,
  *,
  batch_adapter: preparation.BatchAdapter | None = None,
  frozen: Any = None,
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
    loss_fn: `(model, batch) -> LossOutput`, traced; `(model, batch, frozen)`
      where `frozen` is given.
    batch_adapter: from an item of the data set to the batch, called before the
      compiled step, in training and in evaluation, and not for items that a
      resumed run skips. None takes the items as batches.
    frozen: a pytree of arrays, such as an `OutputHead`, or an `nnx.Module` in
      evaluation mode, taken as it is now. Its arrays are arguments of the
      compiled step: no constants, not trained, not donated, not saved, and laid
      out as they are. On the mesh of `with mesh:`, what does not lie on its
      devices, in its order, is replicated once.
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
    TypeError: an argument of another type, or a function of other parameters.
    ValueError: frozen arrays that the trainer donates (the optimizer's, in main
      the accumulator's, and in main's experimental trainer the model's where a
      window has more than one micro-batch); a trainer that lacks a needed
      attribute or accumulates in another way, that is inside `train()` or
      inside an accumulation window, or that was restored from a checkpoint of
      another objective (each differing field is named) or of none.

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
  parameters = ("model", "batch", *_given(frozen))
  preparation.check_takes("loss_fn", loss_fn, *parameters)
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
    frozen=_frozen(frozen),
    check_values=check_values,
    allow_missing_identity=allow_missing_identity,
  )


def configure_diffusion_sft(
  trainer: Any,
  batch_adapter: preparation.BatchAdapter | None = None,
  logits_fn: preparation.LogitsFn | None = None,
  *,
  hidden_fn: preparation.HiddenFn | None = None,
  frozen: Any = None,
  denominator: str | None = None,
  check_values: bool = True,
  metadata: Mapping[str, Any] | None = None,
  allow_missing_identity: bool = False,
) -> Any:
  """Trains a `PeftTrainer` on `weighted_cross_entropy_loss`.

  With `hidden_fn` it is `linear_weighted_cross_entropy_loss`: the same loss,
  without the logits in memory, and the same objective to a checkpoint.

  Args:
    trainer: as for `configure_objective`.
    batch_adapter: from an item of the data set to a `DiffusionTokenBatch`, ours
      or Tunix main's own; None takes the items as such.
    logits_fn: `(model, model_inputs) -> [batch, length, vocabulary]` logits,
      aligned with the targets; None is `model_logits`.
    hidden_fn: `(model, model_inputs) -> (hidden, OutputHead)` instead, with
      `[batch, length, features]` hidden states aligned with the targets, such
      as `model_hidden_and_head`.
    frozen: as for `configure_objective`, a third argument of `logits_fn` or
      `hidden_fn`: a head that is not trained.
    denominator: the loss's unit. None takes that of the first batch: "tokens"
      where it has `is_supervised`, else "weights".
    check_values: whether to check each batch's values before the step.
    metadata: as for `configure_objective`.
    allow_missing_identity: as for `configure_objective`.

  Returns:
    The same trainer.

  Raises:
    TypeError, ValueError: as `configure_objective`; or an unknown denominator,
      both functions, or `frozen` without one that takes it.
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
  scorer = preparation.scorer_of(
    logits_fn,
    hidden_fn,
    parameters=("model", "model_inputs", *_given(frozen)),
  )
  if frozen is not None and logits_fn is None and hidden_fn is None:
    raise checks.fail(
      ValueError,
      "frozen must come with a logits_fn or hidden_fn that takes it",
      "neither",
    )
  kept = _frozen(frozen)
  prepare = preparation.Preparation(
    kind=batches.DiffusionTokenBatch,
    trainer=trainer,
    batch_adapter=batch_adapter,
    scorer=scorer,
    denominator=denominator,
    check_values=checks.boolean("check_values", check_values),
    identity=ours,
    frozen=kept,
  )

  def loss_fn(model, batch, *given):
    if isinstance(scorer, preparation.LogitsScorer):
      return cross_entropy.weighted_cross_entropy_loss(
        scorer(model, batch.model_inputs, *given),
        batch,
        denominator=denominator,
      )
    return linear_vocabulary.linear_weighted_cross_entropy_loss(
      *scorer(model, batch.model_inputs, *given),
      batch,
      denominator=denominator,
    )

  return _configure(
    trainer,
    loss_fn,
    prepare,
    ours,
    frozen=kept,
    allow_missing_identity=allow_missing_identity,
  )


def configure_prepared_diffusion_opd(
  trainer: Any,
  batch_adapter: preparation.BatchAdapter | None = None,
  student_logits_fn: preparation.LogitsFn | None = None,
  *,
  hidden_fn: preparation.HiddenFn | None = None,
  frozen: linear_vocabulary.OutputHead | nnx.Module | None = None,
  teacher_hidden_fn: preparation.HiddenFn | None = None,
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
  a resumed run skips. A frozen teacher can be scored inside the step instead.

  With `hidden_fn` the loss is `linear_prepared_opd_loss`: the same loss,
  without student's or teacher's logits in memory, and the same objective to a
  checkpoint. Its divergence is the forward KL.

  Args:
    trainer: as for `configure_objective`; its model is the student.
    batch_adapter: from an item of the data set to a
      `DiffusionDistillationBatch`, to a `DiffusionTokenBatch` (ours or Tunix
      main's own) where `frozen` is a module; None takes the items as such.
    student_logits_fn: `(model, model_inputs) -> [batch, length, vocabulary]`
      logits, aligned with the targets; None is `model_logits`.
    hidden_fn: `(model, model_inputs) -> (hidden, OutputHead)` instead, with
      `[batch, length, features]` hidden states aligned with the targets, such
      as `model_hidden_and_head`.
    frozen: with `hidden_fn`, an `OutputHead`, that of the batches'
      `HiddenTeacher`s, not used for other teachers; or an `nnx.Module`, the
      teacher, which the compiled step scores on the student's inputs. Held as
      by `configure_objective`.
    teacher_hidden_fn: `(frozen, model_inputs) -> (hidden, OutputHead)` of a
      module; None is `hidden_fn`.
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
      `prepared_opd_loss` refuses; `hidden_fn` with logits or with another
      divergence; `frozen` without `hidden_fn`, or of another class. During
      `train()`: a batch of another class, with values that
      `DiffusionDistillationBatch.check_values` refuses, a `HiddenTeacher`
      without its head, a teacher of another vocabulary, or of another unit than
      the first or than the checkpoint's; parameters are then as before that
      batch.

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
  scorer = preparation.scorer_of(
    student_logits_fn, hidden_fn, logits_name="student_logits_fn"
  )
  if hidden_fn is not None and divergence != divergences.forward_kl:
    raise checks.fail(
      ValueError,
      "divergence must be forward_kl where hidden_fn is given",
      divergence.name,
    )
  teacher = _teacher(frozen, scorer, teacher_hidden_fn)
  kept = _frozen(frozen)
  is_scored_here = isinstance(teacher, preparation.HiddenScorer)
  uses_teacher = hyper_parameters.soft_loss_weight > 0
  value_options = {"check_targets": hyper_parameters.hard_loss_weight > 0}
  if not is_scored_here:
    value_options["check_teacher"] = uses_teacher
  prepare = preparation.Preparation(
    kind=batches.DiffusionTokenBatch
    if is_scored_here
    else batches.DiffusionDistillationBatch,
    trainer=trainer,
    batch_adapter=batch_adapter,
    scorer=scorer,
    denominator=denominator,
    check_values=checks.boolean("check_values", check_values),
    identity=ours,
    value_options=value_options,
    frozen=kept,
    teacher=teacher,
    uses_teacher=uses_teacher,
  )

  def loss_fn(model, batch, *given):
    teacher_head = None
    if isinstance(teacher, preparation.HiddenScorer):
      (network,) = given
      hidden, teacher_head = jax.lax.stop_gradient(
        teacher(network, batch.model_inputs)
      )
      batch = batches.DiffusionDistillationBatch(
        student_batch=batch, teacher=batches.HiddenTeacher(hidden=hidden)
      )
    elif given and isinstance(batch.teacher, batches.HiddenTeacher):
      (teacher_head,) = given
    model_inputs = batch.student_batch.model_inputs
    options = {**hyper_parameters._asdict(), "denominator": denominator}
    if isinstance(scorer, preparation.LogitsScorer):
      return distillation.prepared_opd_loss(
        scorer(model, model_inputs), batch, **options
      )
    del options["divergence"]
    return linear_vocabulary.linear_prepared_opd_loss(
      *scorer(model, model_inputs),
      batch,
      teacher_head=teacher_head,
      **options,
    )

  return _configure(
    trainer,
    loss_fn,
    prepare,
    ours,
    frozen=kept,
    allow_missing_identity=allow_missing_identity,
  )


def _frozen(value: Any) -> frozen_arrays.Frozen | None:
  return None if value is None else frozen_arrays.Frozen.of(value)


def _given(frozen: Any) -> tuple[str, ...]:
  """The parameter by which a function takes what is frozen."""
  return () if frozen is None else ("frozen",)


def _teacher(
  frozen: Any,
  scorer: preparation.Scorer,
  teacher_hidden_fn: preparation.HiddenFn | None,
) -> preparation.HiddenScorer | linear_vocabulary.OutputHead | None:
  """How a frozen module is scored, or a frozen head's shapes."""
  if teacher_hidden_fn is not None:
    preparation.check_takes(
      "teacher_hidden_fn", teacher_hidden_fn, "frozen", "model_inputs"
    )
    if not isinstance(frozen, nnx.Module):
      raise checks.fail(
        ValueError,
        "teacher_hidden_fn must come with frozen=, an nnx.Module",
        checks.describe(frozen),
      )
  if frozen is None:
    return None
  is_head = isinstance(frozen, linear_vocabulary.OutputHead)
  if not is_head and not isinstance(frozen, nnx.Module):
    raise checks.fail(
      TypeError,
      "frozen must be an OutputHead or an nnx.Module",
      checks.describe(frozen),
    )
  if isinstance(scorer, preparation.LogitsScorer):
    raise checks.fail(
      ValueError,
      "frozen must come with a hidden_fn, by which its teacher is compared",
      "none",
    )
  if is_head:
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), frozen
    )
  return preparation.HiddenScorer(
    function=teacher_hidden_fn or scorer.function, name="teacher_hidden_fn"
  )


def _configure(
  trainer: Any,
  loss_fn: hook.LossFn,
  batch_adapter: preparation.BatchAdapter,
  ours: identity.Identity,
  *,
  frozen: frozen_arrays.Frozen | None,
  allow_missing_identity: bool,
  check_values: bool = False,
) -> Any:
  """Everything is checked before anything is set."""
  checks.boolean("allow_missing_identity", allow_missing_identity)
  generation, steps, previous = hook.check_trainer(trainer)
  if frozen is not None:
    hook.check_unshared(trainer, generation, steps, frozen)
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
      frozen=frozen,
      has_trained=previous is not None and previous.has_trained,
    ),
  )
  return trainer
