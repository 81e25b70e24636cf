"""The hook on real trainers: exact updates and logs, refusals."""

import dataclasses
import functools
import importlib
import importlib.util

import flax
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tunix.sft import hooks as tunix_hooks

import diffusion_objectives as do
from diffusion_objectives.trainers import tunix
from tests import oracles
from tests.trainers.runs import HAS_MULTI_STEPS
from tests.trainers.runs import VOCABULARY
from tests.trainers.runs import concatenated
from tests.trainers.runs import distillation_batch
from tests.trainers.runs import history
from tests.trainers.runs import largest_difference
from tests.trainers.runs import make_trainer
from tests.trainers.runs import network
from tests.trainers.runs import parameters
from tests.trainers.runs import token_batch
from tests.trainers.runs import unequal

pytestmark = pytest.mark.usefixtures("trainer_module")

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


@pytest.mark.parametrize("steps", [None, 3])
def test_a_step_is_traced_once_for_each_executable(steps):
  trainer = make_trainer(steps=steps)
  traces = []

  def logits_fn(model, model_inputs):
    traces.append(type(model_inputs["input_tokens"]))
    return tunix.model_logits(model, model_inputs)

  tunix.configure_diffusion_sft(trainer, logits_fn=logits_fn)
  trainer.train(unequal(9, token_batch))
  # The vocabulary's size by eval_shape comes first. In 0.1.7 a window's last
  # micro-batch has an executable of its own.
  assert len(traces) == 1 + (2 if steps and HAS_MULTI_STEPS else 1)


if HAS_MULTI_STEPS:  # Tunix main itself reads the dtype of every node

  @pytest.mark.parametrize("steps", [None, 2])
  def test_parameters_may_be_frozen_by_the_optimizer(steps):
    """`optax.multi_transform` keeps empty nodes where a part has no state."""

    def labels(params):
      return jax.tree_util.tree_map_with_path(
        lambda path, _: (
          "no" if "embed" in jax.tree_util.keystr(path) else "yes"
        ),
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
        state["embed"]["embedding"][...]
        for state in (start, parameters(trainer))
      )
    )
    if steps:
      pairs = [concatenated(micro[:2]), concatenated(micro[2:])]
      whole = make_trainer(optimizer=optimizer())
      tunix.configure_diffusion_sft(whole)
      whole.train(pairs)
      assert largest_difference(parameters(trainer), parameters(whole)) <= 2e-6


@pytest.mark.parametrize("steps", [None, 3])
def test_single_calls_of_the_step_level_trainer_equal_its_loop(steps):
  """`fwd_bwd` and `update`, of the trainer that has them."""
  data = unequal(6)
  loop, calls = (make_trainer(steps=steps) for _ in range(2))
  for trainer in (loop, calls):
    tunix.configure_prepared_diffusion_opd(trainer, hard_loss_weight=0.5)
  loop.train(data)
  if not hasattr(calls, "fwd_bwd"):
    assert not hasattr(calls, "create_update_step_fn")
    return
  for index, batch in enumerate(data, 1):
    calls.fwd_bwd(batch)
    if index % (steps or 1) == 0:
      calls.update()
  assert calls.train_steps == loop.train_steps
  calls.close()
  assert largest_difference(parameters(loop), parameters(calls)) == 0
  np.testing.assert_array_equal(history(loop, "loss"), history(calls, "loss"))


# Batches of Tunix's own class.


def tunix_batch_class():
  """Main's `DiffusionTokenBatch`, or its fields in a class of one's own."""
  if importlib.util.find_spec("tunix.diffusion"):
    return importlib.import_module("tunix.diffusion").DiffusionTokenBatch

  @flax.struct.dataclass
  class DiffusionTokenBatch:
    model_inputs: dict
    target_ids: jax.Array
    loss_weights: jax.Array

  return DiffusionTokenBatch


def test_tunix_own_batch_is_taken_as_ours():
  ours = unequal(4, token_batch)
  cls = tunix_batch_class()
  theirs = [
    cls(
      model_inputs=b.model_inputs,
      target_ids=b.target_ids,
      loss_weights=b.loss_weights,
    )
    for b in ours
  ]
  results = []
  for data, adapter in ((ours, None), (theirs, None), (theirs, lambda b: b)):
    trainer = make_trainer(steps=2)
    tunix.configure_diffusion_sft(trainer, adapter)
    trainer.train(data)
    results.append(parameters(trainer))
  for other in results[1:]:
    assert largest_difference(results[0], other) == 0
  bad = theirs[0].replace(
    loss_weights=with_value(theirs[0].loss_weights, np.nan)
  )
  with pytest.raises(ValueError, match="finite and nonnegative; received nan"):
    tunix.configure_diffusion_sft(make_trainer()).train([bad])
  with pytest.raises(
    TypeError, match=r"must have the fields .*; received dict"
  ):
    tunix.token_batch({"target_ids": 1})


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


def test_a_refused_batch_may_be_left_out_and_the_run_goes_on():
  """The window goes on where it was, with the good batches alone."""
  good = unequal(6)
  bad = bad_batches()["NaN weight"]
  results = []
  for data in ([good], [[*good[:4], bad], good]):
    trainer = make_trainer(steps=3)
    tunix.configure_prepared_diffusion_opd(trainer)
    for items in data[:-1]:
      with pytest.raises(ValueError, match="finite and nonnegative; received"):
        trainer.train(items)
      assert (trainer.train_steps, trainer.iter_steps) == (1, 4)
    trainer.train(data[-1])
    results.append(parameters(trainer))
  assert largest_difference(*results) == 0


def top_k_batch(batch, temperature=1.0):
  shape = (*batch.student_batch.target_ids.shape, 2)
  return dataclasses.replace(
    batch,
    teacher=do.TopKTeacher(
      token_ids=np.broadcast_to(np.arange(2, dtype=np.int32), shape),
      log_probs=np.full(shape, np.log(0.4), np.float32),
      temperature=temperature,
    ),
  )


def test_a_batch_refused_in_the_step_may_be_left_out_too():
  """What no value check sees: here a teacher at another temperature."""
  good = unequal(6)
  results = []
  for bad in ([], [top_k_batch(good[0], temperature=2.0)]):
    trainer = make_trainer(optimizer=optax.adam(1e-2), steps=2)
    tunix.configure_prepared_diffusion_opd(trainer)
    if bad:
      with pytest.raises(ValueError, match="temperature"):
        trainer.train([good[0], *bad])
      assert (trainer.train_steps, trainer.iter_steps) == (0, 1)
      with pytest.raises(ValueError, match="at the edge of an accumulation"):
        tunix.configure_prepared_diffusion_opd(trainer)
    trainer.train(good)
    results.append(parameters(trainer))
  assert largest_difference(*results) == 0


def test_teachers_of_two_kinds_share_a_window():
  dense = unequal(4)
  batches = [b if i % 2 else top_k_batch(b) for i, b in enumerate(dense)]
  trainer = make_trainer(steps=2)
  tunix.configure_prepared_diffusion_opd(
    trainer, divergence=do.divergences.jensen_shannon(0.3)
  )
  trainer.train(batches)
  assert trainer.train_steps == 2
  assert np.isfinite(history(trainer, "loss")).all()


def test_a_refused_evaluation_is_not_logged():
  trainer = make_trainer(eval_every_n_steps=1)
  tunix.configure_prepared_diffusion_opd(trainer)
  bad = bad_batches()["NaN weight"]
  with pytest.raises(ValueError, match="finite and nonnegative"):
    trainer.train(unequal(1), [unequal(1)[0], bad])
  assert not trainer.metrics_logger.metric_exists("", "loss", "eval")


def test_an_evaluation_of_ones_own_does_not_move_the_count():
  """The step-level trainer evaluates by public calls, within a hook too."""
  bad = bad_batches()["NaN weight"].student_batch

  class Hooks:
    def on_train_step_start(self, trainer):
      if hasattr(trainer, "eval_context"):
        with trainer.eval_context(), pytest.raises(ValueError, match="finite"):
          trainer.eval_step(bad)

    def __getattr__(self, name):
      return lambda *arguments: None

  trainer = make_trainer(steps=2)
  tunix.configure_diffusion_sft(trainer)
  trainer.with_training_hooks(Hooks())
  trainer.train(unequal(4, token_batch))
  assert (trainer.train_steps, trainer.iter_steps) == (2, 4)


def test_hooks_keep_what_they_write_during_an_evaluation():
  class Hooks:
    count = 0

    def on_eval_step_end(self, trainer, loss):
      trainer.training_hooks.count += 1

    def __getattr__(self, name):
      return lambda *arguments: None

  trainer = make_trainer(eval_every_n_steps=1)
  tunix.configure_diffusion_sft(trainer)
  hooks = Hooks()
  trainer.with_training_hooks(hooks)
  trainer.train(unequal(2, token_batch), unequal(1, token_batch))
  assert hooks.count == 3


def test_metrics_that_come_and_go_are_refused_before_the_update():
  def loss_fn(model, batch):
    output = do.weighted_cross_entropy_loss(
      tunix.model_logits(model, batch.model_inputs), batch
    )
    extra = (
      {"extra": output.primary_loss} if batch.is_supervised is None else {}
    )
    return dataclasses.replace(
      output, aux_metrics={**output.aux_metrics, **extra}
    )

  rng = np.random.default_rng(0)
  for kinds in ((False, True), (True, False)):
    trainer = make_trainer(steps=2)
    tunix.configure_objective(trainer, loss_fn)
    start = parameters(trainer)
    with pytest.raises(
      ValueError, match=r"aux_metrics of the first.*; received"
    ):
      trainer.train([token_batch(rng, supervised=kind) for kind in kinds])
    assert largest_difference(parameters(trainer), start) == 0


def test_a_step_of_a_subclass_is_refused_where_it_would_not_run():
  cls = type(make_trainer())

  class Subclass(cls):
    def _train_step(self, *arguments):
      raise AssertionError

  trainer = make_trainer()
  trainer.__class__ = Subclass
  with pytest.raises(ValueError, match=r"_train_step must .*; received"):
    tunix.configure_diffusion_sft(trainer)


def test_an_attribute_set_before_is_refused():
  trainer = make_trainer()
  trainer._prepare_inputs = lambda item: item
  with pytest.raises(ValueError, match="_prepare_inputs must be its class's"):
    tunix.configure_diffusion_sft(trainer)


def test_functions_without_a_name_of_their_own_need_one():
  def loss_fn(model, batch, temperature):
    return None

  for nameless in (
    lambda model, batch: None,
    functools.partial(loss_fn, temperature=2.0),
  ):
    with pytest.raises(ValueError, match="name must be given"):
      tunix.configure_objective(make_trainer(), nameless)
    tunix.configure_objective(make_trainer(), nameless, name="mine")


def test_an_open_window_of_single_calls_is_seen():
  trainer = make_trainer(steps=2)
  tunix.configure_diffusion_sft(trainer)
  if not hasattr(trainer, "fwd_bwd"):
    trainer.is_managed_externally = True
    trainer.train(unequal(1, token_batch))
  else:
    trainer.fwd_bwd(unequal(1, token_batch)[0])
  with pytest.raises(ValueError, match="a window that is open"):
    tunix.configure_diffusion_sft(trainer)


@pytest.mark.parametrize("steps", [None, 2])
def test_float64_parameters_are_updated_in_float64(steps):
  """Within a window optax sums in float32, and main counts so."""
  pairs = [unequal(2, token_batch, seed) for seed in (0, 1)]

  def mean(model, batch):
    logits, _ = model(**batch.model_inputs)
    return do.weighted_cross_entropy_loss(logits, batch).primary_loss.compute()

  with jax.enable_x64(True):
    model = network(dtype=jnp.float64)
    for pair in pairs:
      gradient = nnx.grad(mean)(model, concatenated(pair))
      moved = jax.tree.map(
        lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), gradient
      )
      nnx.update(model, moved)
    trainer = make_trainer(network(dtype=jnp.float64), steps=steps)
    tunix.configure_diffusion_sft(trainer)
    trainer.train([*pairs[0], *pairs[1]] if steps else map(concatenated, pairs))
    expected = jax.tree.map(np.asarray, nnx.state(model, nnx.Param))
    difference = largest_difference(parameters(trainer), expected)
  is_wide = steps is None and not hasattr(trainer, "create_update_step_fn")
  assert difference <= (1e-14 if is_wide else 1e-7)


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
  trainer = tunix.configure_diffusion_sft(make_trainer())
  generation = trainer._diffusion_objective.generation
  names = {*generation.attributes, *generation.signatures, generation.mark}
  names.discard(None)
  for name in sorted(names):
    shim = Other()
    for kept in names - {name}:
      setattr(shim, kept, getattr(trainer, kept))
    # Without its mark it is taken for an earlier trainer, which it is not.
    message = "must " if name == generation.mark else f"{name!r}; received"
    with pytest.raises(ValueError, match=message):
      tunix.configure_diffusion_sft(shim)


def test_another_signature_of_the_step_is_refused():
  trainer = make_trainer()
  trainer._train_step = lambda model, optimizer, something: None
  with pytest.raises(ValueError, match="_train_step must take"):
    tunix.configure_diffusion_sft(trainer)


@pytest.mark.parametrize("steps", [None, 2])
def test_an_optimizer_that_accumulates_by_itself_is_refused(steps):
  inner = optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()
  trainer = make_trainer(optimizer=optax.chain(inner), steps=steps)
  with pytest.raises(ValueError, match=r"and \d optax\.MultiSteps"):
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
  with pytest.raises(ValueError, match="open at iter_steps=4"):
    tunix.configure_diffusion_sft(trainer)
  trainer.train(unequal(2, token_batch))
  tunix.configure_diffusion_sft(trainer)


@pytest.mark.parametrize(
  "name",
  [
    "loss_fn",
    "eval_loss_fn",
    "gen_model_input_fn",
    "_prepare_inputs",
    "_post_process_train_step",
    "_write_metrics",
    "checkpoint_manager",
  ],
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
  tunix.configure_objective(
    trainer, lambda model, batch: jnp.float32(1), name="one"
  )
  with pytest.raises(TypeError, match="must be a LossOutput; received"):
    trainer.train(unequal(1, token_batch))


def test_only_instances_are_touched():
  def snapshot():
    return {
      cls: dict(vars(cls))
      for cls in (type(trainer), nnx.Optimizer, optax.MultiSteps)
    }

  trainer, other = make_trainer(steps=2), make_trainer(steps=2)
  before = snapshot()
  untouched = dict(vars(other))
  tunix.configure_diffusion_sft(trainer)
  trainer.train(unequal(2, token_batch))
  assert snapshot() == before
  assert dict(vars(other)) == untouched
