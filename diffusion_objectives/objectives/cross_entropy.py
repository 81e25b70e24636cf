r"""Weighted cross entropy on aligned targets.

With logits `z [b, i, v]`, clean ids `x`, weights `w >= 0`:

  l[b, i] = -log softmax(z[b, i])[x[b, i]]                                  (1)
  loss    = sum_{b, i} w[b, i] l[b, i] / denominator                        (2)
  dloss/dz[b, i] = w[b, i] (softmax(z[b, i]) - onehot(x[b, i])) / denominator

With `w = -alpha'(t) / (1 - alpha(t))` on masked positions and 0 elsewhere,
divided by the supervised tokens, (2) is the masked-diffusion bound on the
negative log-likelihood per token (Sahoo et al. 2024, arXiv:2406.07524, eq. 10;
Shi et al. 2024, arXiv:2406.04329, eq. 4).
"""

import jax

from diffusion_objectives import batches
from diffusion_objectives import outputs
from diffusion_objectives._core import checks
from diffusion_objectives._core import numerics


def weighted_cross_entropy_loss(
  logits: jax.Array,
  batch: batches.DiffusionTokenBatch,
  *,
  denominator: str | None = None,
) -> outputs.LossOutput:
  """Weighted cross entropy, `sum w l`, with `l = -log softmax(z)[target]`.

  Positions of weight 0 are inert: their logits and ids may hold anything.

  Args:
    logits: `[batch, length, vocabulary]` floating-point, aligned with the
      targets. Computed in at least float32.
    batch: targets and weights.
    denominator: what the sum is divided by: "weights" (sum of the loss
      weights), "tokens" (supervised positions), "masked" (positions of positive
      weight) or "sequences" (rows, or segments, with a supervised position).
      None takes "tokens" where the batch has `is_supervised`, else "weights".

  Returns:
    The loss in nats per unit of the denominator. `aux_metrics["accuracy"]`: the
    share of masked positions whose largest logit is the target's.

  Raises:
    TypeError: `batch` is no `DiffusionTokenBatch`, or the logits are not
      floating-point.
    ValueError: logits that do not align with the targets, or an unknown or
      unavailable denominator. Under trace, values that
      `batch.check_values(vocabulary)` refuses give NaN.

  Example:
    >>> import jax.numpy as jnp
    >>> batch = batches.DiffusionTokenBatch(
    ...     model_inputs={"input_tokens": jnp.array([[9, 1]])},
    ...     target_ids=jnp.array([[0, 1]]), loss_weights=jnp.array([[1., 0.]]))
    >>> logits = jnp.array([[[0.0, 0.0], [jnp.nan, 5.0]]])
    >>> output = weighted_cross_entropy_loss(logits, batch)
    >>> print(f"{output.primary_loss.compute():.4f}")
    0.6931

  Source: equation (10) of arXiv:2406.07524 up to the choice of the denominator;
  the sum over `[batch, length]` with additive denominators is Tunix's
  `LossOutput` convention.
  """
  checks.instance("batch", batch, batches.DiffusionTokenBatch)
  batches.check_logits("logits", logits, batch)
  dtype = numerics.accumulation_dtype(logits.dtype)
  total = batches.batch_denominator(batch, denominator, dtype)
  weights, is_active = batches.position_weights(batch, dtype)
  clean = numerics.clean_rows(logits, is_active, dtype)
  ids = numerics.clean_ids(batch.target_ids, is_active)
  losses = numerics.token_negative_log_likelihood(clean, ids)
  is_correct = numerics.first_maximum(clean) == ids
  return outputs.LossOutput(
    primary_loss=outputs.WeightedMetric(
      unreduced_sum=numerics.weighted_sum(losses, weights, is_active),
      denominator=total,
    ),
    aux_metrics={
      "accuracy": outputs.WeightedMetric(
        unreduced_sum=numerics.count(is_correct & is_active, dtype),
        denominator=numerics.count(is_active, dtype),
      )
    },
  )
