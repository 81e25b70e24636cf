r"""The token losses from hidden states and the output head.

The `[batch, length, vocabulary]` logits of

  z = head(hidden)                                                          (1)

are never formed. The losses are those of the dense functions on (1), with their
batches, denominators and metrics: cross entropy, forward KL, and their mix in
one pass. For `N` tokens, `D` features and `V` ids, forming the gradients in the
forward pass costs the products of the dense form, `6 N D V` operations (`4 N D
V` where the head is frozen, `2 N D_t V` more for a teacher's head), and in
memory one tile of `4 c V` bytes for `c` tokens (two for a teacher's head).
Tokens of weight 0 cost nothing.
"""

import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

from diffusion_objectives import batches
from diffusion_objectives import outputs
from diffusion_objectives._core import checks
from diffusion_objectives._core import numerics
from diffusion_objectives.objectives.linear_vocabulary import blocks
from diffusion_objectives.objectives.linear_vocabulary import derivatives
from diffusion_objectives.objectives.linear_vocabulary import head as heads
from diffusion_objectives.objectives.linear_vocabulary import kernel
from diffusion_objectives.objectives.linear_vocabulary import placement
from diffusion_objectives.objectives.linear_vocabulary import tokens

IMPLEMENTATIONS = ("grad_in_forward", "recompute")


class _Execution(NamedTuple):
  """How and where a loss is computed: names and sizes, or None."""

  implementation: str | None
  token_block: Any
  vocabulary_block: Any
  axes: tuple[Any, Any, Any]


def linear_weighted_cross_entropy_loss(
  hidden: jax.Array,
  head: heads.OutputHead,
  batch: batches.DiffusionTokenBatch,
  *,
  denominator: str | None = None,
  implementation: str | None = None,
  token_block: int | None = None,
  vocabulary_block: int | None = None,
  token_axes: placement.TokenAxes = None,
  feature_axis: str | None = None,
  vocabulary_axis: str | None = None,
) -> outputs.LossOutput:
  """`weighted_cross_entropy_loss` of `head(hidden)`, `sum w l`.

  `l = log sum exp(z) - z[target]` with `z = head(hidden)`, which is formed tile
  by tile. Positions of weight 0 are inert, and skipped.

  Args:
    hidden: `[batch, length, features]` floating-point, aligned with the
      targets.
    head: the output head; gradients reach its kernel, bias and low-rank pair.
    batch: targets and weights.
    denominator: "weights", "tokens", "masked" or "sequences"; None takes
      "tokens" where the batch has `is_supervised`, else "weights".
    implementation: "grad_in_forward" forms the gradients with the value;
      "recompute" forms the logits again in the backward pass, at a third more
      products of a cross entropy, for vocabularies whose tile is too large and
      where the derivative is taken outside a scan; None chooses by the size of
      the tile.
    token_block: tokens in a block; None is the platform's (256 on a CPU).
    vocabulary_block: columns in a block; None is the platform's.
    token_axes: of the mesh, that `[batch, length]` lie over: an axis, a tuple
      of them, or a `PartitionSpec` of both dimensions.
    feature_axis: that the head's features lie over, among the tokens' axes.
    vocabulary_axis: that the head's columns lie over. Without these three, the
      names of the mesh's axes tell.

  Returns:
    The loss in nats per unit of the denominator, in at least float32, and
    `aux_metrics["accuracy"]`, as of `weighted_cross_entropy_loss`.

  Raises:
    TypeError: an argument of another type, or hidden states not floating-point.
    ValueError: hidden states that do not fit the targets or the head, a block
      that is not positive, an unknown implementation, or an unknown or
      unavailable denominator. Under trace, values that
      `batch.check_values(head.size)` refuses give NaN.
    ValueError: reverse mode over reverse mode. (Forward mode alone is
      JAX's own `TypeError`.)

  Example:
    >>> import jax.numpy as jnp
    >>> batch = batches.DiffusionTokenBatch(
    ...     model_inputs={"input_tokens": jnp.array([[9, 1]])},
    ...     target_ids=jnp.array([[0, 1]]), loss_weights=jnp.array([[1., 0.]]))
    >>> head = heads.OutputHead(kernel=jnp.eye(2))
    >>> hidden = jnp.array([[[0.0, 0.0], [jnp.nan, 5.0]]])
    >>> output = linear_weighted_cross_entropy_loss(hidden, head, batch)
    >>> print(f"{output.primary_loss.compute():.4f}")
    0.6931

  Source: arXiv:2406.07524, equation (10), for the loss; gradients formed in the
  forward pass follow Liger Kernel, arXiv:2410.10989, section 3, here with
  weights by token and sums in float32.
  """
  checks.instance("batch", batch, batches.DiffusionTokenBatch)
  scored = _score(
    hidden,
    head,
    batch,
    hard=1.0,
    execution=_Execution(
      implementation,
      token_block,
      vocabulary_block,
      (token_axes, feature_axis, vocabulary_axis),
    ),
  )
  ids = numerics.clean_ids(batch.target_ids, scored.is_active)
  is_correct = scored.values.student_id == ids
  return outputs.LossOutput(
    primary_loss=outputs.WeightedMetric(
      unreduced_sum=scored.total,
      denominator=batches.batch_denominator(
        batch, denominator, scored.total.dtype
      ),
    ),
    aux_metrics=outputs.masked_means(
      "", {"accuracy": is_correct.astype(scored.total.dtype)}, scored.is_active
    ),
  )


def linear_forward_kl_loss(
  hidden: jax.Array,
  head: heads.OutputHead,
  batch: batches.DiffusionDistillationBatch,
  *,
  teacher_head: heads.OutputHead | None = None,
  temperature: float = 1.0,
  scale_by_temperature_squared: bool = True,
  denominator: str | None = None,
  implementation: str | None = None,
  token_block: int | None = None,
  vocabulary_block: int | None = None,
  token_axes: placement.TokenAxes = None,
  feature_axis: str | None = None,
  vocabulary_axis: str | None = None,
) -> outputs.LossOutput:
  """`forward_kl_loss` of `head(hidden)`, `T^2 sum w KL(p || q)`.

  The teacher is a constant. Given by hidden states and its head, neither side's
  logits exist, and both are formed in at least float32: logits that were
  rounded to bfloat16 spoil the gradient where teacher and student are near.

  Args:
    hidden: `[batch, length, features]` floating-point, the student's.
    head: the student's output head.
    batch: the student's batch and its teacher: dense, top-k or hidden.
    teacher_head: the head of a `HiddenTeacher`; None with any other.
    temperature: `T > 0`, of both distributions.
    scale_by_temperature_squared: whether the divergence is multiplied by `T^2`.
    denominator: "weights", "tokens", "masked" or "sequences"; None takes
      "tokens" where the batch has `is_supervised`, else "weights".
    implementation: "grad_in_forward" forms the gradients with the value;
      "recompute" forms the logits again in the backward pass, at a third more
      products of a cross entropy, for vocabularies whose tile is too large and
      where the derivative is taken outside a scan; None chooses by the size of
      the tile.
    token_block: tokens in a block; None is the platform's (256 on a CPU).
    vocabulary_block: columns in a block; None is the platform's.
    token_axes: of the mesh, that `[batch, length]` lie over: an axis, a tuple
      of them, or a `PartitionSpec` of both dimensions.
    feature_axis: that the head's features lie over, among the tokens' axes.
    vocabulary_axis: that the head's columns lie over. Without these three, the
      names of the mesh's axes tell.

  Returns:
    The loss in nats per unit of the denominator, in at least float32, and the
    metrics of `divergence_loss`.

  Raises:
    TypeError: an argument of another type, or hidden states not floating-point.
    ValueError: hidden states that do not fit the targets or the head, a teacher
      of another vocabulary or temperature, `teacher_head` without a
      `HiddenTeacher` or the reverse, or as
      `linear_weighted_cross_entropy_loss`. Under trace, values that
      `batch.check_values` refuses give NaN.
    ValueError: reverse mode over reverse mode. (Forward mode alone is
      JAX's own `TypeError`.)

  Example:
    >>> import jax.numpy as jnp
    >>> ids = jnp.array([[0]])
    >>> batch = batches.DiffusionDistillationBatch(
    ...     student_batch=batches.DiffusionTokenBatch(
    ...         model_inputs={"input_tokens": ids}, target_ids=ids,
    ...         loss_weights=jnp.ones((1, 1))),
    ...     teacher=batches.HiddenTeacher(hidden=jnp.array([[[2.0]]])))
    >>> output = linear_forward_kl_loss(
    ...     jnp.array([[[1.0, 0.0, -1.0]]]),
    ...     heads.OutputHead(kernel=jnp.eye(3)), batch, temperature=2.0,
    ...     teacher_head=heads.OutputHead(kernel=jnp.array([[0.0, 1.0, 0.0]])))
    >>> print(f"{output.primary_loss.compute():.4f}")
    0.8198

  Source: arXiv:1503.02531, section 2.
  """
  checks.instance("batch", batch, batches.DiffusionDistillationBatch)
  temperature = checks.temperature(temperature)
  is_scaled = checks.boolean(
    "scale_by_temperature_squared", scale_by_temperature_squared
  )
  scored = _score(
    hidden,
    head,
    batch.student_batch,
    soft=temperature**2 if is_scaled else 1.0,
    temperature=temperature,
    teacher=batch.teacher,
    teacher_head=teacher_head,
    execution=_Execution(
      implementation,
      token_block,
      vocabulary_block,
      (token_axes, feature_axis, vocabulary_axis),
    ),
  )
  return outputs.LossOutput(
    primary_loss=outputs.WeightedMetric(
      unreduced_sum=scored.total,
      denominator=batches.batch_denominator(
        batch.student_batch, denominator, scored.total.dtype
      ),
    ),
    aux_metrics=_described(scored),
  )


def linear_prepared_opd_loss(
  hidden: jax.Array,
  head: heads.OutputHead,
  batch: batches.DiffusionDistillationBatch,
  *,
  teacher_head: heads.OutputHead | None = None,
  temperature: float = 1.0,
  soft_loss_weight: float = 1.0,
  hard_loss_weight: float = 0.0,
  denominator: str | None = None,
  implementation: str | None = None,
  token_block: int | None = None,
  vocabulary_block: int | None = None,
  token_axes: placement.TokenAxes = None,
  feature_axis: str | None = None,
  vocabulary_axis: str | None = None,
) -> outputs.LossOutput:
  """`prepared_opd_loss` of `head(hidden)`: soft and hard term in one pass.

  `soft_loss_weight T^2 sum w KL(p || q) + hard_loss_weight sum w l`, with `l`
  the cross entropy of the untempered student. A term with coefficient 0 is not
  computed: its targets or teacher are neither used nor checked.

  Args:
    hidden: `[batch, length, features]` floating-point, the student's.
    head: the student's output head.
    batch: the student's batch and its teacher: dense, top-k or hidden.
    teacher_head: the head of a `HiddenTeacher`; None with any other.
    temperature: `T > 0`, of the soft term alone.
    soft_loss_weight: nonnegative coefficient of the soft term.
    hard_loss_weight: nonnegative coefficient of the hard term.
    denominator: "weights", "tokens", "masked" or "sequences"; None takes
      "tokens" where the batch has `is_supervised`, else "weights".
    implementation: "grad_in_forward" forms the gradients with the value;
      "recompute" forms the logits again in the backward pass, at a third more
      products of a cross entropy, for vocabularies whose tile is too large and
      where the derivative is taken outside a scan; None chooses by the size of
      the tile.
    token_block: tokens in a block; None is the platform's (256 on a CPU).
    vocabulary_block: columns in a block; None is the platform's.
    token_axes: of the mesh, that `[batch, length]` lie over: an axis, a tuple
      of them, or a `PartitionSpec` of both dimensions.
    feature_axis: that the head's features lie over, among the tokens' axes.
    vocabulary_axis: that the head's columns lie over. Without these three, the
      names of the mesh's axes tell.

  Returns:
    The loss in nats per unit of the denominator, in at least float32, and the
    metrics of `prepared_opd_loss`.

  Raises:
    TypeError, ValueError: as `linear_forward_kl_loss`; or a negative
      coefficient, both 0, or a `soft_loss_weight T^2` outside float32.
    ValueError: reverse mode over reverse mode. (Forward mode alone is
      JAX's own `TypeError`.)

  Example:
    >>> import jax.numpy as jnp
    >>> ids = jnp.array([[1]])
    >>> batch = batches.DiffusionDistillationBatch(
    ...     student_batch=batches.DiffusionTokenBatch(
    ...         model_inputs={"input_tokens": ids}, target_ids=ids,
    ...         loss_weights=jnp.ones((1, 1))),
    ...     teacher=batches.DenseTeacher(logits=jnp.array([[[0., 2., 0.]]])))
    >>> output = linear_prepared_opd_loss(
    ...     jnp.array([[[1.0, 0.0, -1.0]]]),
    ...     heads.OutputHead(kernel=jnp.eye(3)), batch, temperature=2.0,
    ...     soft_loss_weight=0.5, hard_loss_weight=0.5)
    >>> print(f"{output.primary_loss.compute():.4f}")
    1.1137

  Source: arXiv:1503.02531, section 2; the divergence is the forward KL alone,
  as its slope `q - p` needs no further pass over the vocabulary.
  """
  checks.instance("batch", batch, batches.DiffusionDistillationBatch)
  temperature = checks.temperature(temperature)
  soft_loss_weight, hard_loss_weight = checks.coefficients(
    soft_loss_weight=soft_loss_weight, hard_loss_weight=hard_loss_weight
  )
  scored = _score(
    hidden,
    head,
    batch.student_batch,
    soft=checks.normal(
      "soft_loss_weight * temperature**2", soft_loss_weight * temperature**2
    ),
    hard=hard_loss_weight,
    temperature=temperature,
    teacher=batch.teacher if soft_loss_weight else None,
    teacher_head=teacher_head if soft_loss_weight else None,
    execution=_Execution(
      implementation,
      token_block,
      vocabulary_block,
      (token_axes, feature_axis, vocabulary_axis),
    ),
  )
  total = batches.batch_denominator(
    batch.student_batch, denominator, scored.total.dtype
  )
  terms = {
    "soft": _term(scored, scored.values.soft, temperature**2),
    "hard": _term(scored, scored.values.hard, 1.0),
  }
  return outputs.LossOutput(
    primary_loss=outputs.WeightedMetric(
      unreduced_sum=scored.total, denominator=total
    ),
    aux_metrics={
      **(_described(scored) if soft_loss_weight else {}),
      **{
        f"distill/{name}_loss": outputs.WeightedMetric(
          unreduced_sum=term, denominator=total
        )
        for name, term in terms.items()
      },
    },
  )


def linear_token_log_probs(
  hidden: jax.Array,
  head: heads.OutputHead,
  batch: batches.DiffusionTokenBatch,
  *,
  temperature: float = 1.0,
  token_block: int | None = None,
  vocabulary_block: int | None = None,
  token_axes: placement.TokenAxes = None,
  feature_axis: str | None = None,
  vocabulary_axis: str | None = None,
) -> jax.Array:
  """`[batch, length]` log-probabilities of targets, `log softmax(z / T)[x]`.

  For losses of one's own, of policy ratios say: a cotangent may differ from
  token to token, so that the backward pass forms the logits again.

  Args:
    hidden: `[batch, length, features]` floating-point.
    head: the output head; gradients reach its kernel, bias and low-rank pair.
    batch: targets and weights.
    temperature: `T > 0`.
    token_block: tokens in a block; None is the platform's (256 on a CPU).
    vocabulary_block: columns in a block; None is the platform's.
    token_axes: of the mesh, that `[batch, length]` lie over: an axis, a tuple
      of them, or a `PartitionSpec` of both dimensions.
    feature_axis: that the head's features lie over, among the tokens' axes.
    vocabulary_axis: that the head's columns lie over. Without these three, the
      names of the mesh's axes tell.

  Returns:
    Nats, in at least float32; 0 at positions of weight 0, which are inert. Of
    the weights only which are 0 matters: bad ones do not give NaN here, but in
    a sum with those of `batches.position_weights`.

  Raises:
    TypeError, ValueError: as `linear_weighted_cross_entropy_loss`.
    ValueError: reverse mode over reverse mode. (Forward mode alone is
      JAX's own `TypeError`.)

  Example:
    >>> import jax.numpy as jnp
    >>> batch = batches.DiffusionTokenBatch(
    ...     model_inputs={"input_tokens": jnp.array([[9, 1]])},
    ...     target_ids=jnp.array([[0, 1]]), loss_weights=jnp.array([[1., 0.]]))
    >>> head = heads.OutputHead(kernel=jnp.eye(2))
    >>> print(linear_token_log_probs(jnp.zeros((1, 2, 2)), head, batch))
    [[-0.6931472  0.       ]]

  Source: the online softmax over blocks of the vocabulary is that of Cut
  Cross-Entropy, arXiv:2411.09009, without its skipping of small probabilities.
  """
  checks.instance("batch", batch, batches.DiffusionTokenBatch)
  scored = _score(
    hidden,
    head,
    batch,
    hard=-1.0,
    hard_temperature=checks.temperature(temperature),
    execution=_Execution(
      "recompute",
      token_block,
      vocabulary_block,
      (token_axes, feature_axis, vocabulary_axis),
    ),
  )
  return jnp.where(scored.is_active, scored.by_token, 0)


class _Scored(NamedTuple):
  """What the kernel says of a batch, `[batch, length]` but for the total."""

  total: jax.Array
  by_token: Any
  values: Any
  weights: jax.Array
  is_active: jax.Array
  is_agreed: Any


def _score(
  hidden: jax.Array,
  head: heads.OutputHead,
  batch: batches.DiffusionTokenBatch,
  *,
  execution: _Execution,
  soft: float = 0.0,
  hard: float = 0.0,
  temperature: float = 1.0,
  hard_temperature: float = 1.0,
  teacher: Any = None,
  teacher_head: heads.OutputHead | None = None,
) -> _Scored:
  """`sum w (soft D + hard l)`, its parts by token, and metrics' values."""
  checks.instance("head", head, heads.OutputHead)
  batches.check_hidden("hidden", hidden, batch)
  heads.check_features("hidden", hidden, head)
  if teacher_head is not None:
    checks.instance("teacher_head", teacher_head, heads.OutputHead)
  place = placement.of(execution.axes, hidden, head, teacher_head)
  size = place.size(head)
  implementation = _implementation(execution, size // place.shards)
  dtype = kernel.sum_dtype(hidden, head)
  shape = tuple(hidden.shape[:2])
  weights, is_active = batches.position_weights(batch, dtype)
  is_valid = jnp.ones(shape, bool)
  targets = None
  if hard:
    targets = numerics.clean_ids(batch.target_ids, is_active)
    is_within = (targets >= 0) & (targets < size)
    targets = jnp.where(is_within, targets, 0).astype(jnp.int32)
    is_valid &= is_within
  given, best_id = None, None
  if soft:
    given, best_id, is_usable = _teacher(
      teacher, teacher_head, head, size, is_active, weights, temperature, dtype
    )
    is_valid &= is_usable
  sizes = {
    name: None if size is None else checks.positive_integer(name, size)
    for name, size in (
      ("token_block", execution.token_block),
      ("vocabulary_block", execution.vocabulary_block),
    )
  }
  form = tokens.Form(
    soft=soft,
    hard=hard,
    temperature=temperature,
    hard_temperature=hard_temperature,
    **sizes,
    keeps_tile=implementation == "grad_in_forward",
    placement=place,
  )
  a, b = head.low_rank or (None, None)
  factors = jax.tree.map(
    jnp.asarray, kernel.Gradients(hidden, head.kernel, head.bias, a, b)
  )
  operands = kernel.Operands(
    hidden=factors.hidden,
    head=head,
    teacher=given,
    teacher_head=teacher_head,
    targets=targets,
    is_active=placement.alone(is_active) if place.mesh is None else is_active,
  )
  operands = jax.lax.stop_gradient(operands)
  zero = blocks.varying_zero(operands)
  factors = jax.tree.map(functools.partial(blocks.as_varying, zero), factors)
  weights = blocks.as_varying(place.shared(zero), weights)
  valid_weights = numerics.poison(weights, is_valid)
  by_token = None
  if implementation == "grad_in_forward":
    total, values = derivatives.weighted_sum(
      form, factors, valid_weights, operands
    )
  else:
    by_token, values = derivatives.by_token(form, factors, operands)
    by_token = numerics.poison(by_token, is_valid)
    total = numerics.weighted_sum(by_token, valid_weights, is_active)
  values = jax.lax.stop_gradient(values)
  if best_id is None:
    best_id = values.teacher_id
  return _Scored(
    total=total,
    by_token=by_token,
    values=values,
    weights=valid_weights,
    is_active=is_active,
    is_agreed=None if best_id is None else best_id == values.student_id,
  )


def _implementation(execution: _Execution, size: int) -> str:
  """The named one, or that of the size of a tile."""
  if execution.implementation is None:
    is_large = 4 * blocks.FEWEST_TOKENS * size > blocks.CPU.tile_bytes
    return IMPLEMENTATIONS[is_large]
  if execution.implementation not in IMPLEMENTATIONS:
    raise checks.fail(
      ValueError,
      f"implementation must be None or one of {IMPLEMENTATIONS}",
      repr(execution.implementation),
    )
  return execution.implementation


def _teacher(
  teacher: Any,
  teacher_head: Any,
  head: heads.OutputHead,
  size: int,
  is_active: jax.Array,
  weights: jax.Array,
  temperature: float,
  dtype: jnp.dtype,
) -> tuple[Any, jax.Array | None, jax.Array]:
  """What the kernel takes, a list's best id, and where it is usable."""
  checks.instance(
    "teacher",
    teacher,
    batches.DenseTeacher,
    batches.TopKTeacher,
    batches.HiddenTeacher,
  )
  has_head = isinstance(teacher, batches.HiddenTeacher)
  if has_head != (teacher_head is not None):
    raise checks.fail(
      ValueError,
      "teacher_head must be given with a HiddenTeacher, and with no other",
      f"a {type(teacher).__name__}"
      f" {'without' if teacher_head is None else 'with'} a teacher_head",
    )
  if isinstance(teacher, batches.TopKTeacher):
    listed = batches.listed_categories(
      teacher, is_active, temperature, dtype, size
    )
    is_within = (listed.ids >= 0) & (listed.ids < size)
    is_usable = batches.is_usable_teacher(teacher, weights, size)
    ids = jnp.where(is_within, listed.ids, 0).astype(jnp.int32)
    given = tokens.Listed(ids, listed.is_listed & is_within, listed.logits)
    return given, listed.best_id, is_usable
  is_usable = jnp.ones_like(is_active)
  if has_head:
    heads.check_features("teacher hidden", teacher.hidden, teacher_head)
    ids, given = teacher_head.size, teacher.hidden
  else:
    ids, given = teacher.logits.shape[-1], teacher.logits
  if ids != head.size:
    raise checks.fail(
      ValueError,
      "teacher and student must have one vocabulary",
      f"teacher {ids} and student {head.size}",
    )
  return jnp.asarray(given), None, is_usable


def _described(scored: _Scored) -> dict[str, outputs.WeightedMetric]:
  values = scored.values
  return outputs.masked_means(
    "distill/",
    {
      "teacher_entropy": values.teacher_entropy,
      "student_entropy": values.student_entropy,
      "top1_agreement": scored.is_agreed.astype(scored.total.dtype),
    },
    scored.is_active,
  )


def _term(scored: _Scored, values: jax.Array | None, scale: float) -> jax.Array:
  """One term's weighted sum, for a metric."""
  if values is None:
    return jnp.zeros_like(scored.total)
  return scale * jax.lax.stop_gradient(
    numerics.weighted_sum(values, scored.weights, scored.is_active)
  )
