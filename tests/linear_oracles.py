"""Float64 NumPy oracle of the losses from hidden states, and its gradients.

The gradients are closed forms, of the unreduced sum. With `u` what the layer
gives before its scale and cap, and `l` a position's loss,

  g = w dl/dz dz/du,  dh = g W^T + (g b^T) a^T,  dW = h^T g,
  dbias = sum g,  da = h^T (g b^T),  db = (h a)^T g,  dw = l.

Records are read by their fields: nothing of the package is imported.
"""

import dataclasses
import types

import numpy as np

from tests import oracles


@dataclasses.dataclass(frozen=True)
class Answer:
  """What a loss must give.

  Attributes:
    total, denominator: of the loss.
    gradients: of the total, by name: hidden, kernel, bias, a, b, weights.
  """

  total: float
  denominator: float
  gradients: dict[str, np.ndarray]


def wide(array):
  return np.asarray(array).astype(np.float64)


def kernel_of(head):
  """`[features, columns]` of either layout."""
  kernel = wide(head.kernel)
  return kernel.T if head.layout == "vocabulary_features" else kernel


def logits_and_slopes(hidden, head):
  """`z [..., ids]`, and `dz/du` of each."""
  u = wide(hidden) @ kernel_of(head)
  if head.low_rank is not None:
    a, b = (wide(x) for x in head.low_rank)
    u = u + wide(hidden) @ a @ b
  if head.bias is not None:
    u = u + wide(head.bias)
  z, slope = head.logit_scale * u, np.full(u.shape, float(head.logit_scale))
  if head.soft_cap is not None:
    slope /= np.cosh(np.clip(z / head.soft_cap, -300, 300)) ** 2
    z = head.soft_cap * np.tanh(z / head.soft_cap)
  size = head.vocabulary_size or z.shape[-1]
  return z[..., :size], slope[..., :size]


def logits(hidden, head):
  return logits_and_slopes(hidden, head)[0]


def hard_term(z, ids, temperature=1.0):
  """`-log softmax(z / T)[id]` of rows, and its gradient in `z`."""
  log_q = oracles.log_softmax(z, temperature)
  is_target = ids[:, None] == np.arange(z.shape[-1])
  assert is_target.any(axis=-1).all(), "an id outside the vocabulary"
  return -log_q[is_target], (np.exp(log_q) - is_target) / temperature


def soft_term(teacher, z, temperature):
  """`KL(p, q)` of rows on the teacher's categories, and its gradient in `z`.

  That is `(q_v - p_v) / T` for an id that is a category of its own, and
  `(q_v - p_tail q_v / q_tail) / T` for one of the tail.
  """
  log_p, _ = oracles.categories(teacher, z, temperature)
  rows = oracles.log_softmax(z, temperature)
  p, q = np.exp(log_p), np.exp(rows)
  if hasattr(teacher, "logits"):
    return oracles.relative_entropy(log_p, rows), (q - p) / temperature
  is_listed = teacher.token_ids[..., None] == np.arange(z.shape[-1])
  if teacher.is_valid is not None:
    is_listed &= teacher.is_valid[..., None]
  is_tail = ~is_listed.any(axis=-2)
  # In logarithms: a probability below the smallest number has one.
  members = np.concatenate([is_listed, is_tail[..., None, :]], axis=-2)
  log_q = np.logaddexp.reduce(
    np.where(members, rows[..., None, :], -np.inf), axis=-1
  )
  log_tail = np.where(np.isfinite(log_q), log_q, 0)[..., -1:]
  own = np.where(
    is_tail,
    p[..., -1:] * np.exp(np.where(is_tail, rows - log_tail, 0)),
    (is_listed * p[..., :-1, None]).sum(axis=-2),
  )
  return oracles.relative_entropy(log_p, log_q), (q - own) / temperature


def teacher_rows(teacher, teacher_head, is_active):
  """The active rows of a teacher, hidden states as logits."""
  if teacher_head is not None:
    return types.SimpleNamespace(
      logits=logits(np.asarray(teacher.hidden)[is_active], teacher_head)
    )
  names = ("logits", "token_ids", "log_probs", "is_valid")
  found = {name: getattr(teacher, name, None) for name in names}
  return types.SimpleNamespace(
    **{
      name: None if value is None else np.asarray(value)[is_active]
      for name, value in found.items()
      if value is not None or name == "is_valid"
    }
  )


def pulled_back(hidden, head, is_active, slopes):
  """The parameters' gradients, from those in the active rows' logits."""
  rows, kernel = wide(hidden)[is_active], kernel_of(head)
  _, slope = logits_and_slopes(rows, head)
  # The slope is 0 where the logit does not move, whatever the gradient is.
  g = np.zeros((len(rows), kernel.shape[-1]))
  g[:, : slope.shape[-1]] = slopes * slope
  d_rows, d_kernel = g @ kernel.T, rows.T @ g
  gradients = {}
  if head.low_rank is not None:
    a, b = (wide(x) for x in head.low_rank)
    d_rows += (g @ b.T) @ a.T
    gradients |= {"a": rows.T @ (g @ b.T), "b": (rows @ a).T @ g}
  if head.bias is not None:
    gradients["bias"] = g.sum(axis=0)
  if head.layout == "vocabulary_features":
    d_kernel = d_kernel.T
  d_hidden = np.zeros(np.shape(hidden))
  d_hidden[is_active] = d_rows
  return {"hidden": d_hidden, "kernel": d_kernel, **gradients}


def evaluate(
  hidden,
  head,
  batch,
  *,
  soft=0.0,
  hard=0.0,
  temperature=1.0,
  scale=True,
  teacher_head=None,
  unit=None,
):
  """`sum w (soft T^2 KL(p, q) + hard l)`; positions of weight 0 are not read.

  `batch` has a teacher where `soft` is not 0; `scale` is whether `T^2` is in.
  """
  tokens = getattr(batch, "student_batch", batch)
  weights = wide(tokens.loss_weights)
  is_active = weights != 0
  z = logits(np.asarray(hidden)[is_active], head)
  values, slopes = np.zeros(len(z)), np.zeros_like(z)
  if hard:
    value, slope = hard_term(z, np.asarray(tokens.target_ids)[is_active])
    values, slopes = values + hard * value, slopes + hard * slope
  if soft:
    rows = teacher_rows(batch.teacher, teacher_head, is_active)
    value, slope = soft_term(rows, z, temperature)
    factor = soft * (temperature**2 if scale else 1.0)
    values, slopes = values + factor * value, slopes + factor * slope
  w = weights[is_active]
  d_weights = np.zeros_like(weights)
  d_weights[is_active] = values
  gradients = pulled_back(hidden, head, is_active, w[:, None] * slopes)
  return Answer(
    total=float((w * values).sum()),
    denominator=oracles.denominator(tokens, unit),
    gradients={**gradients, "weights": d_weights},
  )


def token_log_probs(hidden, head, batch, cotangents, *, temperature=1.0):
  """Log-probabilities of targets, and gradients of `sum cotangents values`."""
  is_active = np.asarray(batch.loss_weights) != 0
  z = logits(np.asarray(hidden)[is_active], head)
  values = np.zeros(is_active.shape)
  losses, slopes = hard_term(
    z, np.asarray(batch.target_ids)[is_active], temperature
  )
  values[is_active] = -losses
  slopes = -wide(cotangents)[is_active][:, None] * slopes
  return values, pulled_back(hidden, head, is_active, slopes)
