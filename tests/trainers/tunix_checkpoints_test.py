"""Checkpoints: the objective's identity, and runs that were stopped."""

import re
import signal
import subprocess
import sys
import textwrap

from flax import nnx
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import diffusion_objectives as do
from diffusion_objectives.trainers import tunix
from tests.trainers import runs
from tests.trainers.runs import HAS_MULTI_STEPS
from tests.trainers.runs import distillation_batch
from tests.trainers.runs import largest_difference
from tests.trainers.runs import make_trainer
from tests.trainers.runs import parameters
from tests.trainers.runs import token_batch
from tests.trainers.runs import unequal

pytestmark = pytest.mark.usefixtures("trainer_module")


def every_step():
  return ocp.CheckpointManagerOptions(
    save_interval_steps=1, enable_async_checkpointing=False
  )


def only_the_last():
  """No periodic save: what Tunix's default comes to on a short run."""
  return ocp.CheckpointManagerOptions(should_save_fn=lambda step, last: False)


@pytest.fixture(autouse=True)
def without_the_warning_about_options(caplog):
  caplog.set_level("ERROR", logger="absl")


def checkpointed(path, steps=2, options=every_step, **config):
  return make_trainer(
    optimizer=optax.adamw(1e-2),
    steps=steps,
    checkpoint_root_directory=str(path),
    checkpointing_options=options(),
    **config,
  )


def state_of(trainer):
  state = nnx.state(trainer.optimizer, nnx.optimizer.OptState)
  return parameters(trainer), jax.tree.map(np.asarray, state)


def assert_same_bits(one, other):
  jax.tree.map(np.testing.assert_array_equal, one, other)


# Stopped and resumed.


class Killed(BaseException):
  """Nothing that a trainer would catch."""


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(
  "killed_at", [6, 7, 8], ids=["edge", "inside", "before the update"]
)
def test_a_killed_run_resumed_equals_one_never_stopped(
  killed_at, lora, tmp_path
):
  """Windows of 3; the eleventh micro-batch leaves a window open at the end."""
  data = unequal(11, distillation_batch)

  def run(path, until=None):
    seen = []

    def adapter(batch):
      if len(seen) == until:
        raise Killed
      seen.append(batch)
      return batch

    trainer = make_trainer(
      runs.network(lora),
      optax.adamw(1e-2),
      steps=3,
      checkpoint_root_directory=str(path),
      checkpointing_options=every_step(),
    )
    tunix.configure_prepared_diffusion_opd(
      trainer, adapter, temperature=2.0, hard_loss_weight=0.5
    )
    start = trainer.iter_steps
    try:
      trainer.train(data)
    except Killed:
      trainer.checkpoint_manager.close()
    return trainer, start, len(seen)

  straight, _, _ = run(tmp_path / "straight")
  killed, _, _ = run(tmp_path / "killed", until=killed_at)
  assert (killed.train_steps, straight.train_steps) == (2, 3)
  resumed, start, adapted = run(tmp_path / "killed")
  assert start == 3 * killed.train_steps
  assert adapted == len(data) - start  # what a resumed run skips is not adapted
  assert_same_bits(state_of(resumed), state_of(straight))


@pytest.mark.parametrize("stop", [4, 5], ids=["edge", "inside"])
def test_a_run_that_ran_out_of_data_goes_on_as_if_it_had_not(stop, tmp_path):
  """The last save is forced, maybe within a window; 0.1.7 saves a mini-step."""
  data = unequal(8, token_batch)
  results = []
  for name, stops in (("straight", [8]), ("stopped", [stop, 8])):
    for count in stops:
      trainer = checkpointed(tmp_path / name, options=only_the_last)
      if HAS_MULTI_STEPS and name == "stopped" and count == 8:
        window = trainer.optimizer.opt_state
        assert int(window.mini_step[...]) == stop % 2
      tunix.configure_diffusion_sft(trainer)
      trainer.train(data[:count])
    results.append(state_of(trainer))
  assert_same_bits(*results)


KILLED_RUN = """
  import os, signal, sys
  sys.path.insert(0, {root!r})
  from tests import conftest
  import jax
  jax.config.update("jax_numpy_rank_promotion", "allow")
  jax.config.update("jax_numpy_dtype_promotion", "standard")
  import importlib
  from tests.trainers import runs, tunix_checkpoints_test as here
  from diffusion_objectives.trainers import tunix
  runs.under_test.module = importlib.import_module({module!r})
  count = 0
  def adapter(batch):
    global count
    if count == 5:
      os.kill(os.getpid(), signal.SIGKILL)
    count += 1
    return batch
  trainer = here.checkpointed({path!r})
  tunix.configure_diffusion_sft(trainer, adapter)
  trainer.train(runs.unequal(8, runs.token_batch))
"""


def test_a_run_whose_process_is_killed_resumes(tmp_path, trainer_module):
  script = textwrap.dedent(KILLED_RUN).format(
    root=str(runs.ROOT),
    module=trainer_module.__name__,
    path=str(tmp_path / "killed"),
  )
  result = subprocess.run(
    [sys.executable, "-W", "ignore", "-c", script],
    capture_output=True,
    text=True,
    check=False,
  )
  assert result.returncode == -signal.SIGKILL, result.stderr
  results = []
  for name in ("killed", "straight"):
    trainer = checkpointed(tmp_path / name)
    assert trainer.train_steps == (2 if name == "killed" else 0)
    tunix.configure_diffusion_sft(trainer)
    trainer.train(unequal(8, token_batch))
    results.append(state_of(trainer))
  assert_same_bits(*results)


# The identity.


def saved_identity(path, steps=2):
  trainer = checkpointed(path, steps)
  return trainer._restored_custom_metadata.get(tunix.IDENTITY_KEY)


@pytest.mark.parametrize("options", [every_step, only_the_last])
def test_periodic_and_final_saves_carry_the_identity(options, tmp_path):
  trainer = checkpointed(tmp_path, options=options)
  tunix.configure_prepared_diffusion_opd(
    trainer,
    temperature=2.0,
    hard_loss_weight=0.5,
    metadata={"tokenizer": "characters", "sizes": (1, 2)},
  )
  trainer.train(unequal(4, distillation_batch))
  record = saved_identity(tmp_path)
  hyper_parameters = record.pop("hyper_parameters")
  assert record == {
    "name": "prepared_opd_loss",
    "objective_version": 1,
    "denominator": "weights",  # that of the batches: it was left open
    "metadata": {"tokenizer": "characters", "sizes": [1, 2]},
    "library_version": do.__version__,
  }
  assert {
    "temperature": 2.0,
    "soft_loss_weight": 1.0,
    "hard_loss_weight": 0.5,
  }.items() <= hyper_parameters.items()


def test_a_trainers_own_metadata_is_kept_in_every_save(
  tmp_path, trainer_module, monkeypatch
):
  monkeypatch.setattr(
    trainer_module.PeftTrainer,
    "custom_checkpoint_metadata",
    lambda self: {"global_step": self.train_steps},
  )
  for options in (every_step, only_the_last):
    path = tmp_path / options.__name__
    trainer = checkpointed(path, options=options)
    tunix.configure_diffusion_sft(trainer)
    trainer.train(unequal(4, token_batch))
    restored = checkpointed(path)._restored_custom_metadata
    assert restored["global_step"] == 2
    assert tunix.IDENTITY_KEY in restored
  trainer.checkpoint_manager = checkpointed(tmp_path / "by hand")
  trainer = trainer.checkpoint_manager
  tunix.configure_diffusion_sft(trainer)
  trainer.checkpoint_manager.save(
    7, trainer.model, trainer.optimizer, False, True, {"mine": 1}
  )
  trainer.checkpoint_manager.close()
  restored = checkpointed(tmp_path / "by hand")._restored_custom_metadata
  assert set(restored) == {"mine", tunix.IDENTITY_KEY}


SAVED = {
  "temperature": 2.0,
  "hard_loss_weight": 0.5,
  "denominator": "weights",
  "metadata": {"tokenizer": "characters"},
}


@pytest.fixture
def saved_run(tmp_path):
  trainer = checkpointed(tmp_path, options=only_the_last)
  tunix.configure_prepared_diffusion_opd(trainer, **SAVED)
  trainer.train(unequal(2, distillation_batch))
  return tmp_path


@pytest.mark.parametrize(
  ("changes", "fields"),
  [
    ({"temperature": 1.0}, ["hyper_parameters.temperature: 2.0 .* 1.0"]),
    ({"soft_loss_weight": 0.9}, ["hyper_parameters.soft_loss_weight: 1.0"]),
    ({"hard_loss_weight": 0.0}, ["hyper_parameters.hard_loss_weight: 0.5"]),
    ({"denominator": "masked"}, ['denominator: "weights" .* "masked"']),
    ({"metadata": {}}, ['metadata.tokenizer: "characters" .* nothing']),
    ({"metadata": {"a": 1, **SAVED["metadata"]}}, ["metadata.a: nothing"]),
    (
      {"temperature": 1.0, "hard_loss_weight": 0.0, "denominator": "masked"},
      ["denominator: ", "hard_loss_weight: ", "temperature: "],
    ),
  ],
)
def test_another_objective_is_refused_by_every_differing_field(
  changes, fields, saved_run
):
  trainer = checkpointed(saved_run)
  before = dict(vars(trainer))
  with pytest.raises(
    ValueError, match="must keep its checkpoint's objective; received"
  ) as error:
    tunix.configure_prepared_diffusion_opd(trainer, **{**SAVED, **changes})
  for field in fields:
    assert re.search(field, str(error.value))
  assert str(error.value).count("in the checkpoint") == len(fields)
  assert dict(vars(trainer)) == before
  tunix.configure_prepared_diffusion_opd(trainer, **SAVED)


def test_another_loss_or_version_is_refused(tmp_path):
  def my_loss(model, batch):
    logits = tunix.model_logits(model, batch.model_inputs)
    return do.weighted_cross_entropy_loss(logits, batch)

  mine = {"objective_version": 3, "hyper_parameters": {"gamma": 0.5}}
  trainer = checkpointed(tmp_path)
  tunix.configure_objective(trainer, my_loss, **mine)
  trainer.train(unequal(2, token_batch))
  assert saved_identity(tmp_path)["name"] == "my_loss"
  trainer = checkpointed(tmp_path)
  for call, field in (
    (lambda: tunix.configure_diffusion_sft(trainer), 'name: "my_loss"'),
    (
      lambda: tunix.configure_objective(
        trainer, my_loss, **{**mine, "objective_version": 4}
      ),
      "objective_version: 3 .* 4",
    ),
    (
      lambda: tunix.configure_objective(
        trainer, my_loss, **{**mine, "hyper_parameters": {}}
      ),
      "hyper_parameters.gamma: 0.5 .* nothing",
    ),
  ):
    with pytest.raises(ValueError, match=field):
      call()
  tunix.configure_objective(trainer, my_loss, **mine)


def test_the_librarys_version_is_recorded_and_not_compared(
  saved_run, monkeypatch
):
  monkeypatch.setattr(do, "__version__", "99.0")
  trainer = checkpointed(saved_run)
  tunix.configure_prepared_diffusion_opd(trainer, **SAVED)
  trainer.train(unequal(4, distillation_batch))
  assert saved_identity(saved_run)["library_version"] == "99.0"


def test_an_open_unit_is_compared_at_the_first_batch(tmp_path):
  rng = np.random.default_rng(0)
  supervised = [token_batch(rng, supervised=True) for _ in range(4)]
  trainer = checkpointed(tmp_path)
  tunix.configure_diffusion_sft(trainer)
  trainer.train(supervised[:2])
  assert saved_identity(tmp_path)["denominator"] == "tokens"
  trainer = checkpointed(tmp_path)
  tunix.configure_diffusion_sft(trainer)  # open again: nothing to compare
  start = parameters(trainer)
  with pytest.raises(ValueError, match=r'denominator: "tokens" .* "weights"'):
    trainer.train(unequal(4, token_batch))
  assert trainer.train_steps == 1
  assert largest_difference(parameters(trainer), start) == 0
  with pytest.raises(ValueError, match=r'"tokens" .* "weights"'):
    tunix.configure_diffusion_sft(trainer, denominator="weights")
  tunix.configure_diffusion_sft(trainer)
  trainer.train(supervised)
  assert trainer.train_steps == 2


def test_a_checkpoint_without_identity_is_refused_unless_allowed(tmp_path):
  def mean_loss(model, batch):
    logits, _ = model(**batch.model_inputs)
    return do.weighted_cross_entropy_loss(logits, batch).primary_loss.compute()

  stock = checkpointed(tmp_path)
  stock.with_loss_fn(mean_loss).with_gen_model_input_fn(
    lambda batch: {"batch": batch}
  )
  stock.train(unequal(2, token_batch))
  assert saved_identity(tmp_path) is None
  trainer = checkpointed(tmp_path)
  with pytest.raises(
    ValueError, match=r"which objective took them.*; received"
  ):
    tunix.configure_diffusion_sft(trainer)
  with pytest.raises(TypeError, match="allow_missing_identity must be a bool"):
    tunix.configure_diffusion_sft(trainer, allow_missing_identity=1)
  tunix.configure_diffusion_sft(trainer, allow_missing_identity=True)
  trainer.train(unequal(4, token_batch))
  assert saved_identity(tmp_path)["name"] == "weighted_cross_entropy_loss"
  # Allowing a missing one allows no other.
  trainer = checkpointed(tmp_path)
  with pytest.raises(ValueError, match="denominator: "):
    tunix.configure_diffusion_sft(
      trainer, denominator="masked", allow_missing_identity=True
    )


def test_a_trainer_may_change_its_objective_after_training_here(saved_run):
  trainer = checkpointed(saved_run)
  tunix.configure_prepared_diffusion_opd(trainer, **SAVED)
  with pytest.raises(ValueError, match=r"temperature: 2\.0"):
    tunix.configure_prepared_diffusion_opd(
      trainer, **SAVED | {"temperature": 1}
    )
  trainer.is_managed_externally = True
  trainer.train(unequal(4, distillation_batch))
  tunix.configure_prepared_diffusion_opd(trainer, **SAVED | {"temperature": 1})
  tunix.configure_prepared_diffusion_opd(trainer, **SAVED | {"temperature": 3})
  tunix.configure_prepared_diffusion_opd(trainer, **SAVED | {"temperature": 1})
  trainer.train(unequal(4, distillation_batch))
  trainer.close()
  record = saved_identity(saved_run)
  assert record["hyper_parameters"]["temperature"] == 1.0


@pytest.mark.parametrize(
  ("metadata", "message"),
  [
    ({"x": np.float32(1)}, r"metadata\['x'\] must be a JSON value"),
    ({"x": {"y": [1, np.ones(2)]}}, r"metadata\['x'\]\['y'\]\[1\] must be"),
    ({"x": float("nan")}, "must be a JSON value.*; received nan"),
    ({1: 2}, "metadata must have string keys; received int"),
    ("text", "metadata must be a mapping; received str"),
  ],
)
def test_metadata_must_be_json(metadata, message):
  trainer = make_trainer()
  before = dict(vars(trainer))
  with pytest.raises(TypeError, match=message):
    tunix.configure_diffusion_sft(trainer, metadata=metadata)
  assert dict(vars(trainer)) == before


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"name": ""}, "name must be a non-empty string"),
    ({"objective_version": 1.5}, "objective_version must be an integer"),
    ({"objective_version": True}, "objective_version must be an integer"),
    ({"hyper_parameters": {"f": print}}, r"hyper_parameters\['f'\] must be"),
  ],
)
def test_an_identity_is_checked_at_configuration(options, message):
  with pytest.raises(TypeError, match=f"{message}.*; received"):
    tunix.configure_objective(
      make_trainer(), lambda model, batch: None, **{"name": "mine", **options}
    )


def test_a_checkpoints_arrays_have_the_stock_trainers_tree(tmp_path):
  """A configured run resumes without the hook, and a stock run with it."""
  data = unequal(4, token_batch)
  trainer = checkpointed(tmp_path)
  tunix.configure_diffusion_sft(trainer)
  trainer.train(data)
  stock = checkpointed(tmp_path)
  assert stock.train_steps == 2
  assert largest_difference(parameters(stock), parameters(trainer)) == 0
  again = checkpointed(tmp_path)
  tunix.configure_diffusion_sft(again)
  again.train(data + data)
  assert again.train_steps == 4
