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
