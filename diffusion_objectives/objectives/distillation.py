r"""Distillation from a teacher's distribution, and its mix with hard targets.

With student logits `z`, teacher logits `y` (constant), temperature `T` and
weights `w >= 0`, at each position

  p = softmax(y / T),    q = softmax(z / T)
  k = KL(p || q) = sum_v p_v (log p_v - log q_v)                            (1)
  dk/dz = (q - p) / T                                                       (2)
  soft = T^2 sum w k            (the factor keeps the gradient's size)      (3)
  hard = sum w (-log softmax(z)[x])          (always at temperature 1)      (4)
  opd  = soft_loss_weight soft + hard_loss_weight hard                      (5)

and each is divided by one denominator of the batch. (1) and (3) follow Hinton
et al. 2015, arXiv:1503.02531, section 2; on-policy means that the batch's
inputs come from the student itself (Agarwal et al. 2024, arXiv:2306.13649),
which no loss can check. Keeping the teacher's entropy in (1) makes the value 0
exactly where the distributions agree.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from diffusion_objectives import batches
from diffusion_objectives import outputs
from diffusion_objectives._core import checks
from diffusion_objectives._core import numerics


def forward_kl_loss(
  logits: jax.Array,
  batch: batches.DiffusionDistillationBatch,
  *,
  temperature: float = 1.0,
  scale_by_temperature_squared: bool = True,
  denominator: str | None = None,
) -> outputs.LossOutput:
  """Forward divergence from the teacher, `T^2 sum w KL(p || q)`.

  The teacher is a constant; targets are neither used nor checked. Positions of
  weight 0 are inert.

  An entry of teacher probability 0 contributes 0, also where the student's
  logit is -inf. Student probability 0 under teacher mass gives +inf with the
  finite gradient `(q - p) / T`.

  Args:
    logits: `[batch, length, vocabulary]` floating-point, the student's.
    batch: the student's batch and its teacher.
    temperature: `T > 0`, of both distributions.
    scale_by_temperature_squared: whether the divergence is multiplied by `T^2`.
    denominator: "weights", "tokens", "masked" or "sequences"; None takes
      "tokens" where the batch has `is_supervised`, else "weights".

  Returns:
    The loss in nats per unit of the denominator. `aux_metrics`, means over
    masked positions: `distill/teacher_entropy` and `distill/student_entropy`
    (nats, at the temperature), `distill/top1_agreement`.

  Raises:
    TypeError: `batch` of another class, logits not floating-point, or a
      hyper-parameter of another type.
    ValueError: logits that do not align with the targets or with the teacher,
      `temperature` not positive, or an unknown or unavailable denominator.
      Under trace, values that `batch.check_values` refuses give NaN.

  Example:
    >>> import jax.numpy as jnp
    >>> ids = jnp.array([[0]])
    >>> batch = batches.DiffusionDistillationBatch(
    ...     student_batch=batches.DiffusionTokenBatch(
    ...         model_inputs={"input_tokens": ids}, target_ids=ids,
    ...         loss_weights=jnp.ones((1, 1))),
    ...     teacher=batches.DenseTeacher(logits=jnp.array([[[0., 2., 0.]]])))
    >>> output = forward_kl_loss(
    ...     jnp.array([[[1.0, 0.0, -1.0]]]), batch, temperature=2.0)
    >>> print(f"{output.primary_loss.compute():.4f}")
    0.8198

  Source: arXiv:1503.02531, section 2.
  """
  temperature = checks.temperature(temperature)
  scale = checks.boolean(
    "scale_by_temperature_squared", scale_by_temperature_squared
  )
  student = _student_batch(logits, batch)
  soft, aux_metrics = _soft_term(logits, batch, temperature)
  dtype = soft.dtype
  return outputs.LossOutput(
    primary_loss=outputs.WeightedMetric(
      unreduced_sum=temperature**2 * soft if scale else soft,
      denominator=batches.batch_denominator(student, denominator, dtype),
    ),
    aux_metrics=aux_metrics,
  )


def prepared_opd_loss(
  logits: jax.Array,
  batch: batches.DiffusionDistillationBatch,
  *,
  temperature: float = 1.0,
  soft_loss_weight: float = 1.0,
  hard_loss_weight: float = 0.0,
  denominator: str | None = None,
) -> outputs.LossOutput:
  """On-policy distillation on a prepared batch: soft and hard term together.

  `soft_loss_weight T^2 sum w KL(p || q) + hard_loss_weight sum w l`, with `l`
  the cross entropy of the untempered student. Prepared means that canvases,
  weights and teacher were made before the step, from rollouts of the student.
  A term with coefficient 0 is not computed: its targets or teacher are neither
  used nor checked.

  Args:
    logits: `[batch, length, vocabulary]` floating-point, the student's.
    batch: the student's batch and its teacher.
    temperature: `T > 0`, of the soft term alone.
    soft_loss_weight: nonnegative coefficient of the soft term.
    hard_loss_weight: nonnegative coefficient of the hard term.
    denominator: "weights", "tokens", "masked" or "sequences"; None takes
      "tokens" where the batch has `is_supervised`, else "weights".

  Returns:
    The loss in nats per unit of the denominator. `aux_metrics`:
    `distill/soft_loss` (after `T^2`) and `distill/hard_loss`, before their
    coefficients, over the loss's denominator, 0 where not computed; and, unless
    `soft_loss_weight` is 0, those of `forward_kl_loss`.

  Raises:
    TypeError: `batch` of another class, logits not floating-point, or a
      hyper-parameter of another type.
    ValueError: logits that do not align with the targets or (soft term) with
      the teacher, `temperature` not positive, a negative coefficient or both 0,
      or an unknown or unavailable denominator. Under trace, values that
      `batch.check_values` refuses give NaN.

  Example:
    >>> import jax.numpy as jnp
    >>> ids = jnp.array([[1]])
    >>> batch = batches.DiffusionDistillationBatch(
    ...     student_batch=batches.DiffusionTokenBatch(
    ...         model_inputs={"input_tokens": ids}, target_ids=ids,
    ...         loss_weights=jnp.ones((1, 1))),
    ...     teacher=batches.DenseTeacher(logits=jnp.array([[[0., 2., 0.]]])))
    >>> output = prepared_opd_loss(
    ...     jnp.array([[[1.0, 0.0, -1.0]]]), batch, temperature=2.0,
    ...     soft_loss_weight=0.5, hard_loss_weight=0.5)
    >>> print(f"{output.primary_loss.compute():.4f}")
    1.1137

  Source: arXiv:1503.02531, section 2 (the two terms and `T^2`);
  arXiv:2306.13649 (on-policy batches). The two coefficients are independent, as
  in Tunix, not a convex pair.
  """
  temperature, soft_loss_weight, hard_loss_weight = check_opd_hyper_parameters(
    temperature, soft_loss_weight, hard_loss_weight
  )
  student = _student_batch(logits, batch)
  dtype = numerics.accumulation_dtype(logits.dtype)
  total = batches.batch_denominator(student, denominator, dtype)
  soft = hard = jnp.zeros((), dtype)
  loss = jnp.zeros((), dtype)
  aux_metrics: dict[str, outputs.WeightedMetric] = {}
  if soft_loss_weight:
    divergence, aux_metrics = _soft_term(logits, batch, temperature)
    soft = temperature**2 * divergence
    loss += soft_loss_weight * soft
  if hard_loss_weight:
    weights, is_active = batches.position_weights(student, dtype)
    hard = numerics.weighted_sum(
      numerics.token_negative_log_likelihood(
        numerics.clean_rows(logits, is_active, dtype),
        numerics.clean_ids(student.target_ids, is_active),
      ),
      weights,
      is_active,
    )
    loss += hard_loss_weight * hard
  for name, term in (("soft", soft), ("hard", hard)):
    aux_metrics[f"distill/{name}_loss"] = outputs.WeightedMetric(
      unreduced_sum=jax.lax.stop_gradient(term), denominator=total
    )
  return outputs.LossOutput(
    primary_loss=outputs.WeightedMetric(unreduced_sum=loss, denominator=total),
    aux_metrics=aux_metrics,
  )


class OPDHyperParameters(NamedTuple):
  """The checked hyper-parameters of `prepared_opd_loss`."""

  temperature: float
  soft_loss_weight: float
  hard_loss_weight: float


def check_opd_hyper_parameters(
  temperature: float, soft_loss_weight: float, hard_loss_weight: float
) -> OPDHyperParameters:
  """Checks and returns the hyper-parameters of `prepared_opd_loss`."""
  checked = OPDHyperParameters(
    checks.temperature(temperature),
    checks.finite_real("soft_loss_weight", soft_loss_weight, nonnegative=True),
    checks.finite_real("hard_loss_weight", hard_loss_weight, nonnegative=True),
  )
  if not (checked.soft_loss_weight or checked.hard_loss_weight):
    raise checks.fail(
      ValueError,
      "at least one of soft_loss_weight and hard_loss_weight must be positive",
      "0 and 0",
    )
  return checked


def _student_batch(
  logits: jax.Array, batch: batches.DiffusionDistillationBatch
) -> batches.DiffusionTokenBatch:
  checks.instance("batch", batch, batches.DiffusionDistillationBatch)
  batches.check_logits("logits", logits, batch.student_batch)
  return batch.student_batch


def _soft_term(
  logits: jax.Array,
  batch: batches.DiffusionDistillationBatch,
  temperature: float,
) -> tuple[jax.Array, dict[str, outputs.WeightedMetric]]:
  """`sum w KL(p || q)`, and the metrics that describe `p` and `q`."""
  if batch.teacher.logits.shape != logits.shape:
    raise checks.fail(
      ValueError,
      "student and teacher logits must have identical shapes",
      f"{tuple(logits.shape)} and {tuple(batch.teacher.logits.shape)}",
    )
  dtype = numerics.accumulation_dtype(logits.dtype)
  weights, is_active = batches.position_weights(batch.student_batch, dtype)
  student = numerics.clean_rows(logits, is_active, dtype)
  teacher = jax.lax.stop_gradient(
    numerics.clean_rows(batch.teacher.logits, is_active, dtype)
  )
  divergences = numerics.token_forward_kl(teacher, student, temperature)
  observed = jax.lax.stop_gradient(student)
  described = {
    "teacher_entropy": numerics.token_entropy(
      *numerics.log_softmax(teacher, temperature)
    ),
    "student_entropy": numerics.token_entropy(
      *numerics.log_softmax(observed, temperature)
    ),
    "top1_agreement": (
      jnp.argmax(teacher, axis=-1) == jnp.argmax(observed, axis=-1)
    ).astype(dtype),
  }
  masked = numerics.count(is_active, dtype)
  return numerics.weighted_sum(divergences, weights, is_active), {
    f"distill/{name}": outputs.WeightedMetric(
      unreduced_sum=numerics.masked_sum(values, is_active),
      denominator=masked,
    )
    for name, values in described.items()
  }
