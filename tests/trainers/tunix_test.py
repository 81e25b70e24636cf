"""The hook on a real PeftTrainer: exact updates and logs, refusals, resume."""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import qwix
from tunix.models.qwen3 import model as qwen3
from tunix.sft import hooks as tunix_hooks
from tunix.sft import peft_trainer

import diffusion_objectives as do
from diffusion_objectives.trainers import tunix
from tests import oracles

VOCABULARY = 11
MASK_ID = VOCABULARY
LENGTH = 5


class Network(nnx.Module):
  """A small scorer that returns a tuple, as Tunix's own classes do."""

  def __init__(self, rngs, dtype=jnp.float32):
    self.embed = nnx.Embed(VOCABULARY + 1, 16, param_dtype=dtype, rngs=rngs)
    self.hidden = nnx.Linear(16, 24, param_dtype=dtype, rngs=rngs)
    self.head = nnx.Linear(24, VOCABULARY, param_dtype=dtype, rngs=rngs)

  def __call__(self, input_tokens):
    return self.head(jnp.tanh(self.hidden(self.embed(input_tokens)))), None


def network(lora=False, dtype=jnp.float32):
  model = Network(nnx.Rngs(0), dtype)
  if not lora:
    return model
  provider = qwix.LoraProvider(module_path=".*hidden|.*head", rank=4, alpha=2.0)
  inputs = {"input_tokens": jnp.zeros((1, LENGTH), jnp.int32)}
  model = qwix.apply_lora_to_model(model, provider, rngs=nnx.Rngs(1), **inputs)
  # A fresh LoRA pair has one side 0; both are given values, so both get
  # gradients.
  state = nnx.state(model, nnx.LoRAParam)
  rng = np.random.default_rng(1)
  filled = jax.tree.map(
    lambda x: jnp.asarray(0.3 * rng.standard_normal(x.shape), x.dtype), state
  )
  nnx.update(model, filled)
  return model


def token_batch(rng, rows=4, scale=1.0, supervised=False):
  """A batch with weights of very unequal, fractional size."""
  shape = (rows, LENGTH)
  weights = scale * rng.random(shape) * (rng.random(shape) < 0.6)
  return do.DiffusionTokenBatch(
    model_inputs={
      "input_tokens": rng.integers(0, VOCABULARY + 1, shape, dtype=np.int32)
    },
    target_ids=rng.integers(0, VOCABULARY, shape, dtype=np.int32),
    loss_weights=weights.astype(np.float32),
    is_supervised=np.ones(shape, bool) if supervised else None,
  )


def distillation_batch(rng, **kwargs):
  student = token_batch(rng, **kwargs)
  logits = rng.standard_normal((*student.target_ids.shape, VOCABULARY))
  return do.DiffusionDistillationBatch(
    student_batch=student,
    teacher=do.DenseTeacher(logits=logits.astype(np.float32)),
  )


def unequal(count, build=distillation_batch, seed=0):
  """Micro-batches whose weights span four decades; the second has none."""
  rng = np.random.default_rng(seed)
  scales = 10.0 ** rng.uniform(-3, 1, count)
  scales[1:2] = 0
  return [build(rng, scale=scale) for scale in scales]


def concatenated(batches):
  return jax.tree.map(lambda *leaves: np.concatenate(leaves), *batches)


def make_trainer(model=None, optimizer=None, steps=None, **config):
  return peft_trainer.PeftTrainer(
    network() if model is None else model,
    optax.sgd(0.1) if optimizer is None else optimizer,
    peft_trainer.TrainingConfig(
      eval_every_n_steps=config.pop("eval_every_n_steps", 1000),
      gradient_accumulation_steps=steps,
      **config,
    ),
  )


def parameters(trainer):
  kind = nnx.LoRAParam if trainer._lora_enabled else nnx.Param
  return jax.tree.map(np.asarray, nnx.state(trainer.model, kind))


def largest_difference(one, other):
  return max(
    float(np.max(np.abs(a.astype(np.float64) - b.astype(np.float64))))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
  )


def history(trainer, name, mode="train"):
  return trainer.metrics_logger.get_metric_history("", name, mode)


OPTIMIZERS = {
  "sgd": (lambda: optax.sgd(0.1), 5e-7),
  "adamw": (lambda: optax.adamw(1e-3), 2e-6),
  "clip, inject(adamw)": (
    lambda: optax.chain(
      optax.clip_by_global_norm(0.05),
      optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
    ),
    2e-6,
  ),
}


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_micro_batches_train_as_one_big_batch(name, lora):
  make, tolerance = OPTIMIZERS[name]
  rows = unequal(
    3 * 42, lambda rng, scale: distillation_batch(rng, rows=1, scale=scale)
  )
  start = parameters(make_trainer(network(lora)))

  def trained(steps):
    size = 42 // (steps or 1)
    micro = [
      concatenated(rows[i : i + size]) for i in range(0, len(rows), size)
    ]
    trainer = make_trainer(network(lora), make(), steps)
    tunix.configure_prepared_diffusion_opd(
      trainer, temperature=2.0, hard_loss_weight=0.5
    )
    trainer.train(micro)
    assert trainer.train_steps == 3
    return trainer

  whole = trained(None)
  assert largest_difference(parameters(whole), start) > 100 * tolerance
  for steps in (2, 3, 7):
    parts = trained(steps)
    difference = largest_difference(parameters(parts), parameters(whole))
    print(f"{name}, lora={lora}, K={steps}: {difference:.1e}")
    assert difference <= tolerance
    for metric in ("loss", "perplexity", "grad_norm", "distill/soft_loss"):
      np.testing.assert_allclose(
        history(parts, metric), history(whole, metric), rtol=2e-6
      )


def test_the_stock_trainer_averages_means():
  """What the hook is for: the same data, a mean of means."""
  micro = unequal(2 * 4, token_batch)

  def mean_loss(model, batch):
    logits, _ = model(**batch.model_inputs)
    return do.weighted_cross_entropy_loss(logits, batch).primary_loss.compute()

  differences = {}
  for name in ("stock", "configured"):
    pair = []
    for data, count in (
      (micro, 4),
      ([concatenated(micro[:4]), concatenated(micro[4:])], None),
    ):
      trainer = make_trainer(steps=count)
      if name == "configured":
        tunix.configure_diffusion_sft(trainer)
      else:
        trainer.with_loss_fn(mean_loss).with_gen_model_input_fn(
          lambda batch: {"batch": batch}
        )
      trainer.train(data)
      pair.append(parameters(trainer))
    differences[name] = largest_difference(*pair)
  assert differences["configured"] <= 5e-7
  assert differences["stock"] > 1e-3


@pytest.mark.parametrize("supervised", [False, True])
def test_logs_are_float64_reductions_of_the_token_losses(supervised):
  steps = 3
  rng = np.random.default_rng(5)
  micro = [
    token_batch(rng, scale=10.0**-i, supervised=supervised)
    for i in range(2 * steps)
  ]
  evaluation = [
    token_batch(rng, rows=rows, scale=10.0**-rows, supervised=supervised)
    for rows in (1, 4, 2)
  ]
  trainer = make_trainer(steps=steps, max_steps=2, eval_every_n_steps=1)
  seen = []

  def adapter(batch):
    """Records the token losses of this batch at the student as it is now."""
    logits, _ = trainer.model(**batch.model_inputs)
    losses = oracles.nll(logits, batch.target_ids)
    active = batch.loss_weights > 0
    hits = (np.argmax(logits, axis=-1) == batch.target_ids) & active
    seen.append(
      (
        oracles.weighted(losses, batch.loss_weights),
        oracles.denominator(batch),
        hits.sum(),
        active.sum(),
      )
    )
    return batch

  tunix.configure_diffusion_sft(trainer, adapter)
  trainer.train(micro, evaluation)
  # Order of the calls: evaluation, then K training batches and evaluation.
  windows = np.split(np.array(seen), np.cumsum([3, 3, 3, 3]))
  for mode, index in (("eval", (0, 2, 4)), ("train", (1, 3))):
    totals = np.array([windows[i].sum(axis=0) for i in index])
    loss = totals[:, 0] / totals[:, 1]
    np.testing.assert_allclose(history(trainer, "loss", mode), loss, rtol=1e-6)
    np.testing.assert_allclose(
      history(trainer, "perplexity", mode), np.exp(loss), rtol=1e-6
    )
    np.testing.assert_allclose(
      history(trainer, "accuracy", mode),
      totals[:, 2] / totals[:, 3],
      rtol=1e-6,
    )


def test_training_hooks_see_the_exact_losses():
  """The stock trainer gives `on_eval_step_end` the sum of batch means."""
  seen = {"train": [], "eval": []}

  class Hooks(tunix_hooks.TrainingHooks):
    def on_train_start(self, train_ctx):
      pass

    def on_train_end(self, train_ctx):
      pass

    def on_train_step_start(self, train_ctx):
      pass

    def on_eval_step_start(self, train_ctx):
      pass

    def on_train_step_end(self, train_ctx, train_step, train_loss):
      seen["train"].append(train_loss)

    def on_eval_step_end(self, train_ctx, eval_loss):
      seen["eval"].append(eval_loss)

  trainer = make_trainer(steps=2, eval_every_n_steps=1)
  hooks = Hooks()
  trainer.with_training_hooks(hooks)
  tunix.configure_diffusion_sft(trainer)
  trainer.train(unequal(4, token_batch), unequal(3, token_batch, seed=1))
  assert trainer.training_hooks is hooks
  for mode in ("train", "eval"):
    np.testing.assert_array_equal(seen[mode], history(trainer, "loss", mode))


@pytest.mark.parametrize("steps", [None, 2])
def test_a_window_without_weight_gives_a_zero_gradient(steps):
  rng = np.random.default_rng(0)
  empty = [token_batch(rng, scale=0.0) for _ in range(steps or 1)]
  poisoned = [
    dataclasses.replace(b, target_ids=np.full_like(b.target_ids, -100))
    for b in empty
  ]
  trainer = make_trainer(optimizer=optax.adam(0.1), steps=steps)
  tunix.configure_diffusion_sft(trainer)
  start = parameters(trainer)
  trainer.train(poisoned)
  assert trainer.train_steps == 1
  assert largest_difference(parameters(trainer), start) == 0
  assert history(trainer, "loss").tolist() == [0.0]
  assert history(trainer, "grad_norm").tolist() == [0.0]


def test_a_window_far_below_total_weight_1_is_not_clamped():
  micro = [
    dataclasses.replace(b, loss_weights=b.loss_weights * np.float32(1e-6))
    for b in unequal(4, token_batch)
  ]
  results = []
  for scale in (1.0, 2.0**20):
    trainer = make_trainer(steps=4)
    tunix.configure_diffusion_sft(trainer)
    trainer.train(
      [
        dataclasses.replace(b, loss_weights=b.loss_weights * np.float32(scale))
        for b in micro
      ]
    )
    results.append(parameters(trainer))
  assert largest_difference(*results) <= 5e-7


@pytest.mark.parametrize("steps", [None, 3])
def test_dtypes_of_parameters_and_optimizer_state_survive(steps):
  optimizer = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2),
  )
  trainer = make_trainer(network(dtype=jnp.bfloat16), optimizer, steps)
  tunix.configure_diffusion_sft(trainer)

  def dtypes():
    state = nnx.state((trainer.model, trainer.optimizer))
    return jax.tree.map(lambda x: (x.dtype, x.shape), state)

  before = dtypes()
  trainer.train(unequal(6, token_batch))
  assert dtypes() == before


@pytest.mark.parametrize(("steps", "executables"), [(None, 1), (3, 2)])
def test_a_step_is_compiled_once_and_its_update_once(steps, executables):
  trainer = make_trainer(steps=steps)
  traces = []

  def logits_fn(model, model_inputs):
    traces.append(type(model_inputs["input_tokens"]))
    return tunix.model_logits(model, model_inputs)

  tunix.configure_diffusion_sft(trainer, logits_fn=logits_fn)
  trainer.train(unequal(9, token_batch))
  # The vocabulary's size by eval_shape comes first.
  assert len(traces) == 1 + executables


@pytest.mark.parametrize("steps", [None, 2])
def test_parameters_may_be_frozen_by_the_optimizer(steps):
  """`optax.multi_transform` keeps empty nodes where a part has no state."""

  def labels(params):
    return jax.tree_util.tree_map_with_path(
      lambda path, _: "no" if "embed" in jax.tree_util.keystr(path) else "yes",
      params,
    )

  def optimizer():
    return optax.multi_transform(
      {"yes": optax.adam(1e-2), "no": optax.set_to_zero()}, labels
    )

  micro = unequal(4, token_batch)
  trainer = make_trainer(optimizer=optimizer(), steps=steps)
  tunix.configure_diffusion_sft(trainer)
  start = parameters(trainer)
  trainer.train(micro)
  assert largest_difference(parameters(trainer), start) > 1e-3
  np.testing.assert_array_equal(
    *(
      state["embed"]["embedding"][...] for state in (start, parameters(trainer))
    )
  )
  if steps:
    pairs = [concatenated(micro[:2]), concatenated(micro[2:])]
    whole = make_trainer(optimizer=optimizer())
    tunix.configure_diffusion_sft(whole)
    whole.train(pairs)
    assert largest_difference(parameters(trainer), parameters(whole)) <= 2e-6


# Refusals.


def spoiled(**changes):
  def spoil(batch):
    return dataclasses.replace(
      batch,
      student_batch=dataclasses.replace(batch.student_batch, **changes),
    )

  return spoil


def with_value(array, value):
  array = np.array(array)
  array.flat[0] = value
  return array


def bad_batches():
  good = distillation_batch(np.random.default_rng(3))
  student = good.student_batch
  ones = np.ones_like(student.loss_weights)
  student = dataclasses.replace(student, loss_weights=ones)
  good = dataclasses.replace(good, student_batch=student)

  def tokens(**changes):
    return dataclasses.replace(
      good, student_batch=dataclasses.replace(student, **changes)
    )

  def teacher(value, row=False):
    logits = np.array(good.teacher.logits)
    logits[0, 0, slice(None) if row else 2] = value
    return dataclasses.replace(good, teacher=do.DenseTeacher(logits=logits))

  narrow = do.DenseTeacher(logits=good.teacher.logits[..., :-1])
  return {
    "negative weight": tokens(loss_weights=with_value(ones, -1.0)),
    "NaN weight": tokens(loss_weights=with_value(ones, np.nan)),
    "infinite weight": tokens(loss_weights=with_value(ones, np.inf)),
    "id -1": tokens(target_ids=with_value(student.target_ids, -1)),
    "id V": tokens(target_ids=with_value(student.target_ids, VOCABULARY)),
    "teacher NaN": teacher(np.nan),
    "teacher +inf": teacher(np.inf),
    "teacher all -inf": teacher(-np.inf, row=True),
    "teacher's vocabulary": dataclasses.replace(good, teacher=narrow),
    "unsupervised weight": tokens(is_supervised=np.zeros(ones.shape, bool)),
    "another class": student,
  }


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", bad_batches())
def test_a_bad_value_is_refused_before_anything_changes(
  name, mode, on_device, tmp_path
):
  bad = bad_batches()[name]
  if on_device:
    bad = jax.tree.map(jnp.asarray, bad)
  good = distillation_batch(np.random.default_rng(4))
  trainer = make_trainer(
    steps=2, checkpoint_root_directory=str(tmp_path / "run")
  )
  tunix.configure_prepared_diffusion_opd(trainer, hard_loss_weight=1.0)
  start = parameters(trainer)
  files = sorted(tmp_path.rglob("*"))
  data = {"train": ([good, bad], None), "eval": ([good], [good, bad])}[mode]
  with pytest.raises((TypeError, ValueError), match="; received "):
    trainer.train(*data)
  assert trainer.train_steps == 0
  assert largest_difference(parameters(trainer), start) == 0
  assert sorted(tmp_path.rglob("*")) == files
  if mode == "eval":
    assert trainer._buffered_eval_metrics is None


def test_a_term_of_coefficient_0_is_neither_used_nor_checked():
  bad = bad_batches()
  for names, options in (
    (("id -1", "id V"), {"hard_loss_weight": 0.0}),
    (
      ("teacher NaN", "teacher's vocabulary"),
      {"soft_loss_weight": 0.0, "hard_loss_weight": 1.0},
    ),
  ):
    for name in names:
      trainer = make_trainer()
      tunix.configure_prepared_diffusion_opd(trainer, **options)
      trainer.train([bad[name]])
      assert np.isfinite(history(trainer, "loss")).all()


def test_a_teacher_that_lists_all_ids_trains_as_a_dense_one():
  dense = distillation_batch(np.random.default_rng(0))
  log_probs = np.asarray(jax.nn.log_softmax(dense.teacher.logits))
  ids = np.arange(log_probs.shape[-1], dtype=np.int32)
  teacher = do.TopKTeacher(
    token_ids=np.tile(ids, (*log_probs.shape[:2], 1)),
    log_probs=log_probs,
    temperature=1.0,
  )
  trained = []
  for batch in (dense, dataclasses.replace(dense, teacher=teacher)):
    trainer = make_trainer()
    tunix.configure_prepared_diffusion_opd(
      trainer, divergence=do.divergences.jensen_shannon()
    )
    trainer.train([batch])
    trained.append(parameters(trainer))
  assert largest_difference(*trained) < 1e-6


def test_without_value_checks_a_bad_value_is_nan_not_a_number():
  trainer = make_trainer()
  tunix.configure_prepared_diffusion_opd(trainer, check_values=False)
  trainer.train([bad_batches()["negative weight"]])
  assert np.isnan(history(trainer, "loss")).all()


def test_the_unit_of_the_first_batch_is_kept():
  rng = np.random.default_rng(0)
  trainer = make_trainer()
  tunix.configure_diffusion_sft(trainer)
  with pytest.raises(ValueError, match=r"'tokens'; received one of unit"):
    trainer.train([token_batch(rng, supervised=True), token_batch(rng)])
  assert trainer.train_steps == 1
  trainer = make_trainer()
  tunix.configure_diffusion_sft(trainer, denominator="tokens")
  with pytest.raises(ValueError, match="is_supervised; received"):
    trainer.train([token_batch(rng)])


@pytest.mark.parametrize(
  ("options", "error", "message"),
  [
    ({"temperature": 0.0}, ValueError, "temperature must be positive"),
    ({"temperature": True}, TypeError, "finite real scalar"),
    ({"temperature": float("nan")}, ValueError, "finite real scalar"),
    ({"soft_loss_weight": -1.0}, ValueError, "must be nonnegative"),
    ({"soft_loss_weight": 0.0}, ValueError, "at least one"),
    ({"denominator": "mean"}, ValueError, "denominator must be"),
    ({"check_values": 1}, TypeError, "check_values must be a bool"),
    ({"batch_adapter": 3}, TypeError, "batch_adapter must be callable"),
    ({"student_logits_fn": 3}, TypeError, "logits_fn must be callable"),
    ({"divergence": "kl"}, TypeError, "divergence must be a Divergence"),
    (
      {"divergence": do.divergences.total_variation, "temperature": 2.0},
      ValueError,
      "must be of second order",
    ),
  ],
)
def test_hyper_parameters_are_checked_at_configuration(options, error, message):
  trainer = make_trainer()
  before = dict(vars(trainer))
  with pytest.raises(error, match=f"{message}.*; received "):
    tunix.configure_prepared_diffusion_opd(trainer, **options)
  assert dict(vars(trainer)) == before


def test_a_trainer_without_an_attribute_is_refused_by_its_name():
  class Other:
    pass

  with pytest.raises(ValueError, match="attribute 'model'; received Other"):
    tunix.configure_diffusion_sft(Other())
  trainer = make_trainer()
  for name in tunix.TRAINER_ATTRIBUTES:
    shim = Other()
    for kept in tunix.TRAINER_ATTRIBUTES:
      if kept != name:
        setattr(shim, kept, getattr(trainer, kept))
    with pytest.raises(ValueError, match=f"attribute {name!r}; received"):
      tunix.configure_diffusion_sft(shim)


def test_another_signature_of_the_step_is_refused():
  trainer = make_trainer()
  trainer._train_step = lambda model, optimizer, grad_accumulator, inputs: None
  with pytest.raises(ValueError, match="_train_step must take"):
    tunix.configure_diffusion_sft(trainer)


@pytest.mark.parametrize("steps", [None, 2])
def test_an_optimizer_that_accumulates_by_itself_is_refused(steps):
  inner = optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()
  trainer = make_trainer(optimizer=optax.chain(inner), steps=steps)
  with pytest.raises(ValueError, match="MultiSteps; received"):
    tunix.configure_diffusion_sft(trainer)


def test_a_second_configuration_replaces_the_first():
  data = unequal(2, distillation_batch)
  results = []
  for configure_first in (False, True):
    trainer = make_trainer(steps=2)
    if configure_first:
      tunix.configure_diffusion_sft(trainer, lambda batch: batch.student_batch)
      tunix.configure_prepared_diffusion_opd(trainer, temperature=5.0)
    tunix.configure_prepared_diffusion_opd(trainer)
    trainer.train(data)
    results.append(parameters(trainer))
  assert largest_difference(*results) == 0


def test_configuring_inside_train_is_refused():
  trainer = make_trainer()

  def adapter(batch):
    tunix.configure_diffusion_sft(trainer)
    return batch

  tunix.configure_diffusion_sft(trainer, adapter)
  with pytest.raises(ValueError, match=r"outside train\(\); received"):
    trainer.train(unequal(1, token_batch))
  tunix.configure_diffusion_sft(trainer)  # train() has ended


def test_configuring_inside_a_window_is_refused():
  trainer = make_trainer(steps=3)
  trainer.is_managed_externally = True
  tunix.configure_diffusion_sft(trainer)
  trainer.train(unequal(4, token_batch))
  with pytest.raises(ValueError, match="received iter_steps=4"):
    tunix.configure_diffusion_sft(trainer)
  trainer.train(unequal(2, token_batch))
  tunix.configure_diffusion_sft(trainer)


@pytest.mark.parametrize(
  "name", ["loss_fn", "eval_loss_fn", "gen_model_input_fn", "_prepare_inputs"]
)
def test_a_later_replacement_is_not_ignored(name):
  trainer = make_trainer()
  tunix.configure_diffusion_sft(trainer)
  setattr(trainer, name, lambda *arguments: 0.0)
  with pytest.raises(ValueError, match=rf"trainer\.{name} must be"):
    trainer.train(unequal(1, token_batch))


@pytest.mark.parametrize("name", tunix.RESERVED_METRICS)
def test_the_trainers_own_metric_names_are_refused(name):
  def loss_fn(model, batch):
    output = do.weighted_cross_entropy_loss(
      tunix.model_logits(model, batch.model_inputs), batch
    )
    return dataclasses.replace(output, aux_metrics={name: output.primary_loss})

  trainer = make_trainer()
  tunix.configure_objective(trainer, loss_fn)
  with pytest.raises(ValueError, match="aux_metrics must not use"):
    trainer.train(unequal(1, token_batch))


def test_a_loss_that_returns_a_number_is_refused():
  trainer = make_trainer()
  tunix.configure_objective(trainer, lambda model, batch: jnp.float32(1))
  with pytest.raises(TypeError, match="must be a LossOutput; received"):
    trainer.train(unequal(1, token_batch))


def test_only_instances_are_touched():
  def snapshot():
    return {
      cls: dict(vars(cls))
      for cls in (peft_trainer.PeftTrainer, nnx.Optimizer, optax.MultiSteps)
    }

  before = snapshot()
  trainer, other = make_trainer(steps=2), make_trainer(steps=2)
  untouched = dict(vars(other))
  tunix.configure_diffusion_sft(trainer)
  trainer.train(unequal(2, token_batch))
  assert snapshot() == before
  assert dict(vars(other)) == untouched


# Checkpoints.


def checkpointed(path, steps=2, **config):
  return make_trainer(
    optimizer=optax.adamw(1e-2),
    steps=steps,
    checkpoint_root_directory=str(path),
    **config,
  )


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
  data = unequal(8, token_batch)
  results = []
  for stops in ([8], [4, 8]):
    seen = []
    for stop in stops:
      trainer = checkpointed(tmp_path / str(len(stops)))
      tunix.configure_diffusion_sft(
        trainer, lambda batch, seen=seen: seen.append(batch) or batch
      )
      trainer.train(data[:stop])
    assert len(seen) == 8  # none adapted twice, none left out
    state = nnx.state(trainer.optimizer, nnx.optimizer.OptState)
    results.append((parameters(trainer), jax.tree.map(np.asarray, state)))
  jax.tree.map(np.testing.assert_array_equal, *results)


def test_a_mini_step_restored_from_within_a_window_is_reset(tmp_path):
  data = unequal(8, token_batch)
  rarely = ocp.CheckpointManagerOptions(should_save_fn=lambda step, last: False)
  trainer = checkpointed(tmp_path, checkpointing_options=rarely)
  tunix.configure_diffusion_sft(trainer)
  trainer.train(data[:3])  # a forced last save, one batch into a window
  trainer = checkpointed(tmp_path)
  assert int(trainer.optimizer.opt_state.mini_step[...]) == 1
  tunix.configure_diffusion_sft(trainer)
  assert int(trainer.optimizer.opt_state.mini_step[...]) == 0
  sums = jax.tree.leaves(trainer.optimizer.opt_state.acc_grads)
  assert not any(np.asarray(leaf).any() for leaf in sums)
  trainer.train(data)
  straight = checkpointed(tmp_path / "straight")
  tunix.configure_diffusion_sft(straight)
  straight.train(data)
  assert largest_difference(parameters(trainer), parameters(straight)) == 0


def test_checkpoints_have_the_stock_trainers_tree(tmp_path):
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


# Meshes and Tunix's own networks.


def test_the_hook_is_exact_on_a_mesh():
  data = unequal(4, distillation_batch)
  single = make_trainer(optimizer=optax.adamw(1e-3), steps=2)
  tunix.configure_prepared_diffusion_opd(single)
  single.train(data)
  mesh = jax.make_mesh(
    (2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  with mesh:
    model = network()
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    nnx.update(model, jax.device_put(nnx.state(model), replicated))
    sharded = make_trainer(model, optax.adamw(1e-3), steps=2)
    tunix.configure_prepared_diffusion_opd(sharded)
    sharded.train(data)
  assert largest_difference(parameters(sharded), parameters(single)) <= 2e-6
  np.testing.assert_allclose(
    history(sharded, "loss"), history(single, "loss"), rtol=1e-6
  )


def test_a_batch_that_does_not_divide_over_the_mesh_is_refused():
  rng = np.random.default_rng(0)
  mesh = jax.make_mesh(
    (2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  with mesh:
    trainer = make_trainer()
    tunix.configure_diffusion_sft(trainer)
    with pytest.raises(
      ValueError, match=r"must divide over the mesh axes .*; received"
    ):
      trainer.train([token_batch(rng, rows=3)])


def test_tunix_qwen3_is_scored_by_default():
  mesh = jax.make_mesh(
    (1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  config = qwen3.ModelConfig(
    num_layers=1,
    vocab_size=VOCABULARY + 1,
    embed_dim=16,
    hidden_dim=32,
    num_heads=2,
    head_dim=8,
    num_kv_heads=2,
    rope_theta=10_000,
    norm_eps=1e-6,
  )
  rng = np.random.default_rng(0)

  def adapter(batch):
    rows = batch.target_ids.shape[0]
    inputs = {
      **batch.model_inputs,
      "positions": np.tile(np.arange(LENGTH, dtype=np.int32), (rows, 1)),
      "cache": None,
      "attention_mask": np.ones((rows, LENGTH, LENGTH), bool),
    }
    return dataclasses.replace(batch, model_inputs=inputs)

  with mesh:
    trainer = make_trainer(
      qwen3.Qwen3(config, rngs=nnx.Rngs(0)), optax.adam(1e-2), steps=2
    )
    tunix.configure_diffusion_sft(trainer, adapter)
    trainer.train([token_batch(rng)] * 20)
  losses = history(trainer, "loss")
  assert losses[-1] < 0.8 * losses[0]
