"""Bugs planted in the sums over a mesh are found, each at 20 seeds."""

import dataclasses

import jax
from jax.sharding import PartitionSpec as P
import pytest

import diffusion_objectives as do
from diffusion_objectives.objectives.linear_vocabulary import placement
from diffusion_objectives.objectives.linear_vocabulary import statistics
from tests import linear_cases
from tests.linear_mesh_test import ALL
from tests.linear_mesh_test import BLOCKS
from tests.linear_mesh_test import OBJECTIVES
from tests.linear_mesh_test import draw
from tests.linear_mesh_test import mesh_of

ON = {"data": 2, "tp": 4}


def is_kernel(spec):
  return "tp" in tuple(spec)


def not_reduced(monkeypatch):
  right = placement.Placement.total_of_tokens
  monkeypatch.setattr(
    placement.Placement,
    "total_of_tokens",
    lambda self, gradient, spec: (
      gradient if is_kernel(spec) else right(self, gradient, spec)
    ),
  )


def reduced_twice(monkeypatch):
  right = placement.Placement.total_of_tokens

  def twice(self, gradient, spec):
    total = right(self, gradient, spec)
    return jax.lax.psum(total, "data") if is_kernel(spec) else total

  monkeypatch.setattr(placement.Placement, "total_of_tokens", twice)


def not_added_over_columns(monkeypatch):
  monkeypatch.setattr(
    placement.Placement, "total_of_columns", lambda self, gradient: gradient
  )


def local_maximum(monkeypatch):
  right = statistics.shards
  monkeypatch.setattr(
    statistics, "shards", lambda axis: right(axis)._replace(max=lambda x: x)
  )


def padding_counted(monkeypatch):
  right = statistics.blocks.Columns.mask
  monkeypatch.setattr(
    statistics.blocks.Columns,
    "mask",
    lambda self, j, logits: right(self._replace(end=None), j, logits),
  )


PART = {"kernel", "bias", "b"}
EVERYTHING = {"value", "weights", "hidden", "a", *PART}
BUGS = {
  "head gradient not reduced over data": (not_reduced, PART),
  "head gradient reduced twice": (reduced_twice, PART),
  "hidden gradient not reduced over columns": (
    not_added_over_columns,
    {"hidden"},
  ),
  "maximum taken locally": (local_maximum, EVERYTHING),
  "padded shard counted": (padding_counted, EVERYTHING),
}


def found_at_seeds(loss, form=ALL):
  objective = OBJECTIVES["cross entropy"]
  jax.clear_caches()  # programs of the right functions, then of the wrong ones
  with jax.set_mesh(mesh_of(ON)):
    for seed in range(20):
      case = draw(objective, form, seed=seed, weights="ones")
      yield linear_cases.disagreements(loss, objective, case)
  jax.clear_caches()


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found_at_every_seed(bug, monkeypatch):
  plant, wrong = BUGS[bug]
  plant(monkeypatch)
  loss = OBJECTIVES["cross entropy"].bind(**BLOCKS)
  for found in found_at_seeds(loss):
    assert found.keys() == wrong


def test_a_local_denominator_is_found_at_every_seed():
  """In a manual region the sum is reduced, and the denominator is not."""

  def loss(hidden, head, batch):
    def local(hidden, batch):
      output = do.linear_weighted_cross_entropy_loss(
        hidden, head, batch, **BLOCKS
      )
      total = jax.lax.psum(output.primary_loss.unreduced_sum, "data")
      metric = dataclasses.replace(output.primary_loss, unreduced_sum=total)
      return do.LossOutput(primary_loss=metric, aux_metrics={})

    return jax.shard_map(
      local,
      in_specs=(P("data"), P("data")),
      out_specs=P(),
      axis_names={"data"},
      check_vma=False,
    )(hidden, batch)

  for found in found_at_seeds(loss):
    assert "denominator" in found


def test_without_a_bug_nothing_is_found():
  assert not any(found_at_seeds(OBJECTIVES["cross entropy"].bind(**BLOCKS)))
