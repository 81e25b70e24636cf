"""Float64 NumPy oracles, written apart from the package's numerics."""

import numpy as np


def log_softmax(logits, temperature=1.0):
  scaled = np.asarray(logits, np.float64) / temperature
  shifted = scaled - scaled.max(axis=-1, keepdims=True)
  return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def softmax(logits, temperature=1.0):
  return np.exp(log_softmax(logits, temperature))


def nll(logits, ids):
  rows = log_softmax(logits)
  return -np.take_along_axis(rows, np.asarray(ids)[..., None], axis=-1)[..., 0]


def forward_kl(teacher, student, temperature=1.0):
  log_p, log_q = (
    log_softmax(teacher, temperature),
    log_softmax(student, temperature),
  )
  p = np.exp(log_p)
  with np.errstate(invalid="ignore"):
    terms = np.where(p > 0, p * (log_p - log_q), 0.0)
  return terms.sum(axis=-1)


# Divergences, of log-probabilities over the last axis.


def relative_entropy(log_x, log_y):
  """`sum x (log x - log y)`, with 0 where `x` is 0."""
  x = np.exp(log_x)
  with np.errstate(invalid="ignore"):
    return np.where(x > 0, x * (log_x - log_y), 0.0).sum(axis=-1)


def log_mixture(log_x, log_y, share):
  """`log((1 - share) x + share y)`."""
  return np.logaddexp(np.log1p(-share) + log_x, np.log(share) + log_y)


def reverse_kl(log_p, log_q):
  return relative_entropy(log_q, log_p)


def jensen_shannon(log_p, log_q, beta, normalize=False):
  log_m = log_mixture(log_p, log_q, 1 - beta)
  value = beta * relative_entropy(log_p, log_m)
  value += (1 - beta) * relative_entropy(log_q, log_m)
  return value / (beta * (1 - beta)) if normalize else value


def skew_forward_kl(log_p, log_q, ratio):
  return relative_entropy(log_p, log_mixture(log_p, log_q, 1 - ratio))


def skew_reverse_kl(log_p, log_q, ratio):
  return relative_entropy(log_q, log_mixture(log_p, log_q, ratio))


def total_variation(log_p, log_q):
  return np.abs(np.exp(log_p) - np.exp(log_q)).sum(axis=-1) / 2


def _log(x):
  with np.errstate(divide="ignore"):
    return np.log(x)


def categories(teacher, logits, temperature=1.0):
  """Log-probabilities of teacher and student on the teacher's categories."""
  log_q = log_softmax(logits, temperature)
  if hasattr(teacher, "logits"):
    return log_softmax(teacher.logits, temperature), log_q
  ids, log_p = teacher.token_ids, np.asarray(teacher.log_probs, np.float64)
  vocabulary = np.shape(logits)[-1]
  is_valid = np.ones(ids.shape, bool)
  if teacher.is_valid is not None:
    is_valid = np.asarray(teacher.is_valid)
  p = np.exp(np.where(is_valid, log_p, -np.inf))
  listed = (ids[..., None] == np.arange(vocabulary)) & is_valid[..., None]
  q = (listed * np.exp(log_q)[..., None, :]).sum(axis=-1)
  rest = np.where(listed.any(axis=-2), 0.0, np.exp(log_q))
  tail = np.maximum(1 - p.sum(axis=-1, keepdims=True), 0)
  tail = np.where(is_valid.sum(axis=-1, keepdims=True) == vocabulary, 0, tail)
  p = np.concatenate([p, tail], axis=-1)
  q = np.concatenate([q, rest.sum(axis=-1, keepdims=True)], axis=-1)
  return _log(p / p.sum(axis=-1, keepdims=True)), _log(q)


def weighted(values, weights):
  """`sum w v`, reading no value of weight 0."""
  weights = np.asarray(weights, np.float64)
  pairs = zip(weights.flat, values.flat, strict=True)
  return float(sum(w * v for w, v in pairs if w))


def denominator(batch, unit=None):
  if unit is None:
    unit = "weights" if batch.is_supervised is None else "tokens"
  if unit == "weights":
    return float(np.asarray(batch.loss_weights, np.float64).sum())
  if unit == "masked":
    return float((np.asarray(batch.loss_weights) > 0).sum())
  supervised = np.asarray(batch.is_supervised)
  if unit == "tokens":
    return float(supervised.sum())
  segments = supervised if batch.segment_ids is None else batch.segment_ids
  return float(
    len({(b, int(segments[b, i])) for b, i in np.argwhere(supervised)})
  )
