"""Bugs planted in the hook are seen by its checks, at every seed."""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffusion_objectives as do
from diffusion_objectives.trainers import tunix
from diffusion_objectives.trainers.tunix import generations
from diffusion_objectives.trainers.tunix import identity
from tests.trainers.runs import concatenated
from tests.trainers.runs import largest_difference
from tests.trainers.runs import make_trainer
from tests.trainers.runs import parameters
from tests.trainers.runs import token_batch
from tests.trainers.runs import unequal

SEEDS = range(20)
TOLERANCE = 5e-7  # of the exactness tests


def exact(model, batch):
  logits, _ = model(**batch.model_inputs)
  return do.weighted_cross_entropy_loss(logits, batch)


def with_primary(change):
  def loss(model, batch):
    output = exact(model, batch)
    primary = change(output.primary_loss, batch)
    return dataclasses.replace(output, primary_loss=primary)

  return loss


@with_primary
def mean_of_means(primary, batch):
  mean = primary.compute()
  return do.WeightedMetric(unreduced_sum=mean, denominator=jnp.ones_like(mean))


@with_primary
def clamped_to_1(primary, batch):
  return dataclasses.replace(
    primary, denominator=jnp.maximum(primary.denominator, 1)
  )


@with_primary
def bfloat16_sums(primary, batch):
  return jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), primary)


def never_emptied(monkeypatch):
  monkeypatch.setattr(generations, "_zeros", lambda tree: tree)


def one_early(monkeypatch):
  def micro_batch(trainer, hook, batch):
    ends = (trainer.iter_steps + 2) % hook.accumulation_steps == 0
    return generations.MicroBatch(batch=batch, is_last=ends)

  early = dataclasses.replace(
    generations.MULTI_STEPS, as_step_input=micro_batch
  )
  others = [g for g in generations.GENERATIONS if g.mark is not None]
  monkeypatch.setattr(generations, "GENERATIONS", (*others, early))


def divided_by_at_least_1(monkeypatch):
  monkeypatch.setattr(
    generations,
    "_divide",
    lambda total, denominator: total / jnp.maximum(denominator, 1),
  )


def scaled(batches, factor):
  return [
    dataclasses.replace(b, loss_weights=b.loss_weights * np.float32(factor))
    for b in batches
  ]


def differences(loss_fn):
  """At each seed, the largest between three runs that should be one.

  Two windows of 3 micro-batches; each window as one batch; the same windows
  with weights 2^20 times smaller.
  """
  trainers = []
  for steps in (None, 3):
    trainer = make_trainer(steps=steps)
    trainer.is_managed_externally = True
    tunix.configure_objective(trainer, loss_fn)
    trainers.append(trainer)
  whole, parts = trainers
  start = jax.tree.map(np.array, nnx.state(whole.model))
  found = []
  for seed in SEEDS:
    micro = unequal(6, token_batch, seed)
    ends = []
    for trainer, data in (
      (whole, [concatenated(micro[:3]), concatenated(micro[3:])]),
      (parts, micro),
      (parts, scaled(micro, 2.0**-20)),
    ):
      nnx.update(trainer.model, jax.tree.map(jnp.array, start))
      trainer.train(data)
      ends.append(parameters(trainer))
    found.append(max(largest_difference(ends[0], end) for end in ends[1:]))
  return found


@pytest.mark.usefixtures("trainer_module")
def test_windows_of_micro_batches_agree_at_every_seed():
  assert max(differences(exact)) <= TOLERANCE


@pytest.mark.usefixtures("trainer_module")
@pytest.mark.parametrize("bug", [mean_of_means, clamped_to_1, bfloat16_sums])
def test_a_planted_reduction_is_seen_at_every_seed(bug):
  assert min(differences(bug)) > TOLERANCE


PLANTED = {
  "google-tunix 0.1.7": [never_emptied, one_early, divided_by_at_least_1],
  "Tunix main": [],
  "Tunix main's PeftTrainerV2": [divided_by_at_least_1],
}


@pytest.mark.usefixtures("trainer_module")
def test_a_planted_bug_of_the_hook_is_seen_at_every_seed():
  name = generations.of(make_trainer()).name
  for bug in PLANTED[name]:
    with pytest.MonkeyPatch.context() as monkeypatch:
      bug(monkeypatch)
      assert min(differences(exact)) > TOLERANCE, bug.__name__


# The identity.


def random_identity(rng):
  return identity.Identity(
    name=str(rng.choice(["opd", "sft"])),
    objective_version=int(rng.integers(1, 3)),
    hyper_parameters={k: float(rng.random()) for k in "abc"},
    denominator=str(rng.choice(["weights", "tokens", "masked"])),
    metadata={k: [int(rng.integers(9))] for k in "xy"},
  )


def changed(ours, rng):
  """One field of the identity changed, and which."""
  field = str(rng.choice([f.name for f in dataclasses.fields(ours)[:-1]]))
  value = getattr(ours, field)
  other = {
    "name": lambda: value + "!",
    "objective_version": lambda: value + 1,
    "denominator": lambda: "sequences",
    "hyper_parameters": lambda: {
      **value,
      "b": np.nextafter(value["b"], 2).item(),
    },
    "metadata": lambda: {**value, "y": [-1]},
  }[field]()
  return field, dataclasses.replace(ours, **{field: other})


def is_refused(saved, ours):
  try:
    ours.resume(saved.record(), allow_missing_identity=False)
  except ValueError:
    return True
  return False


def test_one_changed_field_is_refused_at_every_seed():
  for seed in SEEDS:
    rng = np.random.default_rng(seed)
    saved = random_identity(rng)
    assert not is_refused(saved, dataclasses.replace(saved))
    assert is_refused(saved, changed(saved, rng)[1])


@pytest.mark.parametrize(
  "forgotten", ["hyper_parameters.b", "metadata.y", "denominator", "name"]
)
def test_a_forgotten_field_is_seen(forgotten, monkeypatch):
  fields = identity._fields
  monkeypatch.setattr(
    identity,
    "_fields",
    lambda record: (
      {k: v for k, v in fields(record).items() if k != forgotten}
      | ({"denominator": None} if forgotten == "denominator" else {})
    ),
  )
  missed = set()
  for seed in SEEDS:
    rng = np.random.default_rng(seed)
    saved = random_identity(rng)
    field, other = changed(saved, rng)
    if not is_refused(saved, other):
      missed.add(field)
  assert missed == {forgotten.split(".")[0]}
