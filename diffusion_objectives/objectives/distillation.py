r"""Distillation from a teacher's distribution, and its mix with hard targets.

With student logits `z`, a constant teacher, temperature `T` and weights
`w >= 0`, at each position

  q = softmax(z / T),  p = softmax(y / T) of a dense teacher's logits y
  D = D(p, q), any of `divergences`; forward KL: sum_v p_v log(p_v / q_v)   (1)
  dD/dz = (q - p) / T for the forward KL                                    (2)
  soft = T^2 sum w D            (the factor keeps the gradient's size)      (3)
  hard = sum w (-log softmax(z)[x])          (always at temperature 1)      (4)
  opd  = soft_loss_weight soft + hard_loss_weight hard                      (5)

and each is divided by one denominator of the batch. (1) and (3) follow Hinton
et al. 2015, arXiv:1503.02531, section 2; on-policy means that the batch's
inputs come from the student itself (Agarwal et al. 2024, arXiv:2306.13649),
which no loss can check. Keeping the teacher's entropy in (1) makes the value 0
exactly where the distributions agree.

A top-k teacher gives `log p` on `k` listed ids. The divergence is taken on
`k + 1` categories, the ids and the tail of all others together:

  p_tail = 1 - sum_listed p,    q_tail = sum_others q                       (6)
  q_tail = softmax's share of the logit T log sum_others exp(z_v / T)       (7)

so that (1) to (3) hold with `k + 1` logits in place of the vocabulary's. As
merging categories never increases a divergence, the value is at most the dense
one; it grows with `k` and equals it where all ids are listed.

A sampled id `x ~ q` and the teacher's `log p(x)` give the reverse KL in
expectation, with `D = log q(x) - log p(x)`:

  k1 = D,    k2 = D^2 / 2,    k3 = exp(-D) - 1 + D                          (8)
  E k1 = E k3 = KL(q || p)                                                  (9)
  E dk2/dz = E[D dlog q(x)/dz] = dKL(q || p)/dz                            (10)
  E dk1/dz = 0,    E dk3/dz = dKL(p || q)/dz                               (11)

(10) is the score function's gradient, as `E dlog q(x)/dz = 0`: of the three
only k2 is a loss for the reverse KL, although its value is not the KL.
"""

from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

from diffusion_objectives import batches
from diffusion_objectives import divergences
from diffusion_objectives import outputs
from diffusion_objectives._core import checks
from diffusion_objectives._core import numerics


def divergence_loss(
  logits: jax.Array,
  batch: batches.DiffusionDistillationBatch,
  *,
  divergence: divergences.Divergence,
  temperature: float = 1.0,
  scale_by_temperature_squared: bool = True,
  denominator: str | None = None,
) -> outputs.LossOutput:
  """A divergence from the teacher, `T^2 sum w D(p, q)`.

  The teacher, dense or top-k, is a constant; targets are neither used nor
  checked. Positions of weight 0 are inert. What a divergence is at
  probabilities of 0 is said in `divergences`.

  Args:
    logits: `[batch, length, vocabulary]` floating-point, the student's.
    batch: the student's batch and its teacher.
    divergence: one of `divergences`, or your own.
    temperature: `T > 0`, of both distributions.
    scale_by_temperature_squared: whether the divergence is multiplied by `T^2`.
    denominator: "weights", "tokens", "masked" or "sequences"; None takes
      "tokens" where the batch has `is_supervised`, else "weights".

  Returns:
    The loss in nats (of total variation: in probability) per unit of the
    denominator. `aux_metrics`, means over masked positions:
    `distill/teacher_entropy` and `distill/student_entropy` (nats, at the
    temperature; with a top-k teacher those of the `k + 1` categories),
    `distill/top1_agreement` (the student's largest logit is the teacher's most
    probable id).

  Raises:
    TypeError: `batch`, its teacher or `divergence` of another class, logits not
      floating-point, or a hyper-parameter of another type.
    ValueError: logits that do not align with the targets or with the teacher, a
      teacher at another temperature, `temperature` not positive, a divergence
      that `T^2` does not fit, or an unknown or unavailable denominator. Under
      trace, values that `batch.check_values` refuses give NaN.

  Example:
    >>> import jax.numpy as jnp
    >>> ids = jnp.array([[0]])
    >>> batch = batches.DiffusionDistillationBatch(
    ...     student_batch=batches.DiffusionTokenBatch(
    ...         model_inputs={"input_tokens": ids}, target_ids=ids,
    ...         loss_weights=jnp.ones((1, 1))),
    ...     teacher=batches.TopKTeacher(
    ...         token_ids=jnp.array([[[0, 1]]]), temperature=1.0,
    ...         log_probs=jnp.log(jnp.array([[[0.5, 0.3]]]))))
    >>> student = jnp.log(jnp.array([[[0.7, 0.1, 0.1, 0.1]]]))
    >>> output = divergence_loss(
    ...     student, batch, divergence=divergences.forward_kl)
    >>> print(f"{output.primary_loss.compute():.4f}")
    0.1613

  Source: arXiv:1503.02531, section 2, for the temperature; `divergences` for
  the rest. The tail of a top-k teacher follows none of the released codes that
  renormalise on the list or cut the sum: those are blind to the mass outside,
  or negative.
  """
  temperature = checks.temperature(temperature)
  scale = _soft_scale(divergence, temperature, scale_by_temperature_squared)
  student = _student_batch(logits, batch)
  soft, aux_metrics = _soft_term(logits, batch, divergence, temperature)
  return outputs.LossOutput(
    primary_loss=outputs.WeightedMetric(
      unreduced_sum=scale * soft,
      denominator=batches.batch_denominator(student, denominator, soft.dtype),
    ),
    aux_metrics=aux_metrics,
  )


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
    The loss in nats per unit of the denominator, and the metrics of
    `divergence_loss`.

  Raises:
    TypeError, ValueError: as `divergence_loss`.

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
  return divergence_loss(
    logits,
    batch,
    divergence=divergences.forward_kl,
    temperature=temperature,
    scale_by_temperature_squared=scale_by_temperature_squared,
    denominator=denominator,
  )


def prepared_opd_loss(
  logits: jax.Array,
  batch: batches.DiffusionDistillationBatch,
  *,
  temperature: float = 1.0,
  soft_loss_weight: float = 1.0,
  hard_loss_weight: float = 0.0,
  divergence: divergences.Divergence = divergences.forward_kl,
  denominator: str | None = None,
) -> outputs.LossOutput:
  """On-policy distillation on a prepared batch: soft and hard term together.

  `soft_loss_weight T^2 sum w D(p, q) + hard_loss_weight sum w l`, with `l`
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
    divergence: of the soft term, one of `divergences` or your own.
    denominator: "weights", "tokens", "masked" or "sequences"; None takes
      "tokens" where the batch has `is_supervised`, else "weights".

  Returns:
    The loss in nats per unit of the denominator. `aux_metrics`:
    `distill/soft_loss` (after `T^2`) and `distill/hard_loss`, before their
    coefficients, over the loss's denominator, 0 where not computed; and, unless
    `soft_loss_weight` is 0, those of `divergence_loss`.

  Raises:
    TypeError: `batch` of another class, logits not floating-point, or a
      hyper-parameter of another type; in the soft term a teacher of another
      class.
    ValueError: logits that do not align with the targets or (soft term) with
      the teacher, a teacher at another temperature, `temperature` not positive,
      a divergence that `T^2` does not fit, a negative coefficient or both 0,
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
  temperature, soft_loss_weight, hard_loss_weight, divergence = (
    check_opd_hyper_parameters(
      temperature, soft_loss_weight, hard_loss_weight, divergence
    )
  )
  student = _student_batch(logits, batch)
  dtype = numerics.accumulation_dtype(logits.dtype)
  total = batches.batch_denominator(student, denominator, dtype)
  soft = hard = jnp.zeros((), dtype)
  loss = jnp.zeros((), dtype)
  aux_metrics: dict[str, outputs.WeightedMetric] = {}
  if soft_loss_weight:
    soft, aux_metrics = _soft_term(logits, batch, divergence, temperature)
    soft = temperature**2 * soft
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


def sampled_reverse_kl_loss(
  logits: jax.Array,
  batch: batches.DiffusionDistillationBatch,
  *,
  temperature: float = 1.0,
  scale_by_temperature_squared: bool = True,
  denominator: str | None = None,
) -> outputs.LossOutput:
  """Reverse KL from one sampled id a position, `T^2 sum w D^2 / 2`.

  `D = log q(x) - log p(x)` at the sampled ids `x`, the batch's `target_ids`,
  with `q = softmax(z / T)` and the teacher's `log p(x)`, a constant. For ids
  drawn from `q` at this temperature the expected gradient is that of
  `T^2 sum w KL(q || p)`. The value is not the KL: `D` and `exp(-D) - 1 + D`
  estimate that, and their expected gradients are others (0, and the forward
  KL's), so these are metrics.

  Positions of weight 0 are inert. Teacher probability 0 gives the value +inf
  and no gradient.

  Args:
    logits: `[batch, length, vocabulary]` floating-point, the student's, at the
      inputs from which the ids were drawn.
    batch: the student's batch, its targets sampled, and a
      `SampledTokenTeacher`.
    temperature: `T > 0`, of both distributions and of the sampling.
    scale_by_temperature_squared: whether the loss is multiplied by `T^2`, as a
      divergence is: `D` and `dlog q/dz` each fall as `1/T`.
    denominator: "weights", "tokens", "masked" or "sequences"; None takes
      "tokens" where the batch has `is_supervised`, else "weights".

  Returns:
    The loss in squared nats per unit of the denominator. `aux_metrics`, means
    over masked positions in nats, without weights and without `T^2`:
    `distill/reverse_kl_k1` and `distill/reverse_kl_k3`, two unbiased estimates
    of `KL(q || p)`; the latter is never negative.

  Raises:
    TypeError: `batch` or its teacher of another class, logits not
      floating-point, or a hyper-parameter of another type.
    ValueError: logits that do not align with the targets, a teacher at another
      temperature, `temperature` not positive, or an unknown or unavailable
      denominator. Under trace, values that `batch.check_values(vocabulary)`
      refuses give NaN.

  Example:
    >>> import jax.numpy as jnp
    >>> ids = jnp.array([[1]])
    >>> batch = batches.DiffusionDistillationBatch(
    ...     student_batch=batches.DiffusionTokenBatch(
    ...         model_inputs={"input_tokens": ids}, target_ids=ids,
    ...         loss_weights=jnp.ones((1, 1))),
    ...     teacher=batches.SampledTokenTeacher(
    ...         log_probs=jnp.log(jnp.array([[0.25]])), temperature=1.0))
    >>> output = sampled_reverse_kl_loss(jnp.zeros((1, 1, 2)), batch)
    >>> print(f"{output.aux_metrics['distill/reverse_kl_k1'].compute():.4f}")
    0.6931

  Source: (8) are the estimators of J. Schulman, "Approximating KL divergence"
  (2020), on the ratio `p(x) / q(x)`; which of them is a loss is (10) and (11),
  as in arXiv:2506.09477.
  """
  temperature = checks.temperature(temperature)
  scale = checks.boolean(
    "scale_by_temperature_squared", scale_by_temperature_squared
  )
  student = _student_batch(logits, batch)
  teacher = checks.instance(
    "teacher", batch.teacher, batches.SampledTokenTeacher
  )
  batches.check_teacher_temperature(teacher, temperature)
  dtype = numerics.accumulation_dtype(logits.dtype)
  weights, is_active = batches.position_weights(student, dtype)
  log_q = -numerics.token_negative_log_likelihood(
    numerics.clean_rows(logits, is_active, dtype),
    numerics.clean_ids(student.target_ids, is_active),
    temperature,
  )
  log_p = jax.lax.stop_gradient(
    jnp.where(is_active, jnp.asarray(teacher.log_probs).astype(dtype), 0)
  )
  is_usable = batches.is_usable_teacher(teacher, weights, logits.shape[-1])
  ratio = numerics.poison(log_q - log_p, is_usable)
  # An id that either side excludes has no slope.
  is_out = (log_p == -jnp.inf) | (log_q == -jnp.inf)
  squares = jnp.where(is_out, jnp.inf, jnp.where(is_out, 0, ratio) ** 2 / 2)
  observed = jnp.where(is_out, jnp.inf, jax.lax.stop_gradient(ratio))
  estimates = {
    "k1": observed,
    "k3": numerics.kl_terms(
      jnp.ones_like(observed), jnp.exp(-observed), -observed
    ),
  }
  total = numerics.weighted_sum(squares, weights, is_active)
  return outputs.LossOutput(
    primary_loss=outputs.WeightedMetric(
      unreduced_sum=temperature**2 * total if scale else total,
      denominator=batches.batch_denominator(student, denominator, dtype),
    ),
    aux_metrics=outputs.masked_means(
      "distill/reverse_kl_", estimates, is_active
    ),
  )


class OPDHyperParameters(NamedTuple):
  """The checked hyper-parameters of `prepared_opd_loss`."""

  temperature: float
  soft_loss_weight: float
  hard_loss_weight: float
  divergence: divergences.Divergence


def check_opd_hyper_parameters(
  temperature: float,
  soft_loss_weight: float,
  hard_loss_weight: float,
  divergence: divergences.Divergence,
) -> OPDHyperParameters:
  """Checks and returns the hyper-parameters of `prepared_opd_loss`."""
  soft, hard = checks.coefficients(
    soft_loss_weight=soft_loss_weight, hard_loss_weight=hard_loss_weight
  )
  checked = OPDHyperParameters(
    checks.temperature(temperature), soft, hard, divergence
  )
  _soft_scale(divergence, checked.temperature, checked.soft_loss_weight > 0)
  return checked


def _soft_scale(
  divergence: divergences.Divergence, temperature: float, is_scaled: bool
) -> float:
  """The factor of the soft term: `T^2`, where it is wanted and fits, or 1."""
  checks.instance("divergence", divergence, divergences.Divergence)
  if not checks.boolean("scale_by_temperature_squared", is_scaled):
    return 1.0
  if temperature != 1 and not divergence.is_second_order:
    raise checks.fail(
      ValueError,
      "a divergence that is scaled by T^2 must be of second order where the"
      " distributions are near, or at temperature 1 (divergence_loss has"
      " scale_by_temperature_squared=False)",
      f"{divergence.name} at temperature {temperature}",
    )
  return temperature**2


def _student_batch(
  logits: jax.Array, batch: batches.DiffusionDistillationBatch
) -> batches.DiffusionTokenBatch:
  checks.instance("batch", batch, batches.DiffusionDistillationBatch)
  batches.check_logits("logits", logits, batch.student_batch)
  return batch.student_batch


class _Categories(NamedTuple):
  """Teacher and student on the same categories.

  Attributes:
    teacher, student: `[batch, length, categories]` logits at the temperature.
    is_agreed: `[batch, length]`, whether their most probable ids are one.
    is_usable: `[batch, length]`, False where the teacher is no distribution
      without a NaN in its logits to show it.
  """

  teacher: jax.Array
  student: jax.Array
  is_agreed: jax.Array
  is_usable: jax.Array


def _dense_categories(
  teacher: batches.DenseTeacher, student: jax.Array, is_active: jax.Array
) -> _Categories:
  """The whole vocabulary."""
  if teacher.logits.shape != student.shape:
    raise checks.fail(
      ValueError,
      "student and teacher logits must have identical shapes",
      f"{tuple(student.shape)} and {tuple(teacher.logits.shape)}",
    )
  logits = numerics.clean_rows(teacher.logits, is_active, student.dtype)
  return _Categories(
    teacher=logits,
    student=student,
    is_agreed=numerics.first_maximum(logits) == numerics.first_maximum(student),
    is_usable=jnp.ones_like(is_active),
  )


def _top_k_categories(
  teacher: batches.TopKTeacher,
  student: jax.Array,
  is_active: jax.Array,
  weights: jax.Array,
  temperature: float,
) -> _Categories:
  """The listed ids, and the tail of all others together."""
  listed = batches.listed_categories(
    teacher, is_active, temperature, student.dtype, student.shape[-1]
  )
  return _Categories(
    teacher=listed.logits,
    student=numerics.list_and_tail(
      student, listed.ids, listed.is_listed, temperature
    ),
    is_agreed=listed.best_id == numerics.first_maximum(student),
    is_usable=batches.is_usable_teacher(teacher, weights, student.shape[-1]),
  )


def _soft_term(
  logits: jax.Array,
  batch: batches.DiffusionDistillationBatch,
  divergence: divergences.Divergence,
  temperature: float,
) -> tuple[jax.Array, dict[str, outputs.WeightedMetric]]:
  """`sum w D(p, q)`, and the metrics that describe `p` and `q`."""
  dtype = numerics.accumulation_dtype(logits.dtype)
  weights, is_active = batches.position_weights(batch.student_batch, dtype)
  clean = numerics.clean_rows(logits, is_active, dtype)
  given: Any = checks.instance(
    "teacher", batch.teacher, batches.DenseTeacher, batches.TopKTeacher
  )
  found = (
    _dense_categories(given, clean, is_active)
    if isinstance(given, batches.DenseTeacher)
    else _top_k_categories(given, clean, is_active, weights, temperature)
  )
  teacher, student = jax.lax.stop_gradient(found.teacher), found.student
  values = numerics.poison(
    numerics.token_divergence(divergence, teacher, student, temperature),
    found.is_usable,
  )
  observed = jax.lax.stop_gradient(student)
  described = {
    "teacher_entropy": numerics.token_entropy(
      *numerics.log_softmax(teacher, temperature)
    ),
    "student_entropy": numerics.token_entropy(
      *numerics.log_softmax(observed, temperature)
    ),
    "top1_agreement": found.is_agreed.astype(dtype),
  }
  return (
    numerics.weighted_sum(values, weights, is_active),
    outputs.masked_means("distill/", described, is_active),
  )
