"""The laws of the loss, and its closed-form values."""

import functools

import numpy as np

import diffusion_objectives as do
from diffusion_objectives.testing import laws
from diffusion_objectives.testing import strategies


def row_means(heads, batch):
  """`[batch]` means over valid elements by modality, in float64."""
  means = {}
  for name, array in heads.items():
    means[name] = np.zeros(len(array))
    for row in range(len(array)):
      valid = np.asarray(batch.valid[name][row])
      if not valid.any():
        continue
      offset = 0 if batch.head_offset is None else batch.head_offset[row]
      head = np.float64(array[row, batch.index[row] - offset])
      gap = head[valid] - np.float64(batch.target[name][row])[valid]
      means[name][row] = (gap**2).sum() / valid.sum()
  return means


def oracle(heads, batch, weights=(1.0, 1.0)):
  means = row_means(heads, batch)
  total = weights[0] * means["video"].sum() + weights[1] * means["audio"].sum()
  is_counted = [
    any(np.any(mask[row]) for mask in batch.valid.values())
    for row in range(len(batch.index))
  ]
  return total, float(sum(is_counted))


def modality_oracle(name):
  def sum_and_count(heads, batch):
    counts = batch.valid[name].reshape(len(batch.index), -1).sum(axis=1)
    return (row_means(heads, batch)[name] * counts).sum(), float(counts.sum())

  return sum_and_count


def modality_loss(heads, batch, *, name):
  return do.pdd_modality_losses(heads, batch)[name]


SUITE = {
  "build": strategies.parallel_decoding_case,
  "poison": strategies.poison_elements,
  "uses_targets": False,
}

TestLaws = laws.suite(do.pdd_head_loss, oracle=oracle, **SUITE)
TestWeightedLaws = laws.suite(
  functools.partial(
    do.pdd_head_loss, modality_weights={"video": 0.5, "audio": 2.0}
  ),
  oracle=functools.partial(oracle, weights=(0.5, 2.0)),
  **SUITE,
)
TestVideoLaws = laws.suite(
  functools.partial(modality_loss, name="video"),
  oracle=modality_oracle("video"),
  **SUITE,
)
