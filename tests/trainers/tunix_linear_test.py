"""Losses without the logits, and frozen arrays, on real trainers."""

import dataclasses
import functools
import json
import math
import re

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import qwix
from tunix.models.gemma3 import model as gemma3
from tunix.models.qwen3 import model as qwen3

import diffusion_objectives as do
from diffusion_objectives.trainers import tunix
from diffusion_objectives.trainers.tunix import hook
from tests.trainers.runs import HAS_MULTI_STEPS
from tests.trainers.runs import history
from tests.trainers.runs import largest_difference
from tests.trainers.runs import make_trainer
from tests.trainers.runs import network
from tests.trainers.runs import parameters

pytestmark = pytest.mark.usefixtures("trainer_module")

IDS = 61
REAL_IDS = 53  # where the vocabulary is padded
LENGTH = 5


# Networks.


def qwen(tied=False, dtype=jnp.float32, ids=IDS):
  config = qwen3.ModelConfig(
    num_layers=1,
    vocab_size=ids,
    embed_dim=16,
    hidden_dim=32,
    num_heads=2,
    head_dim=8,
    num_kv_heads=2,
    rope_theta=10_000,
    norm_eps=1e-6,
    use_tied_embedding=tied,
    dtype=dtype,
  )
  return qwen3.Qwen3(config, rngs=nnx.Rngs(0))


def gemma(dtype=jnp.float32):
  config = gemma3.ModelConfig(
    num_layers=1,
    num_embed=IDS,
    embed_dim=16,
    hidden_dim=32,
    num_heads=2,
    head_dim=8,
    num_kv_heads=1,
    sliding_window_size=4,
    param_dtype=dtype,
  )
  return gemma3.Gemma3(config, rngs=nnx.Rngs(0))


NETWORKS = {
  "Qwen3": qwen,
  "Qwen3, tied": functools.partial(qwen, tied=True),
  "Gemma 3": gemma,
}


def inputs_of(name, tokens):
  rows, length = tokens.shape
  return {
    "last_tokens" if name == "Gemma 3" else "input_tokens": tokens,
    "positions": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
    "cache": None,
    "attention_mask": np.ones((rows, length, length), bool),
  }


def with_lora(model, name, **options):
  """Pairs of rank 4 and scale 3/4, both sides of which have gradients."""
  provider = qwix.LoraProvider(
    module_path=".*q_proj|.*q_einsum|.*down_proj|.*lm_head",
    rank=4,
    alpha=3.0,
    **options,
  )
  example = inputs_of(name, np.zeros((1, LENGTH), np.int32))
  model = qwix.apply_lora_to_model(model, provider, rngs=nnx.Rngs(1), **example)
  rng = np.random.default_rng(1)
  filled = jax.tree.map(
    lambda x: jnp.asarray(0.3 * rng.standard_normal(x.shape), x.dtype),
    nnx.state(model, nnx.LoRAParam),
  )
  nnx.update(model, filled)
  return model


def build(name, lora):
  model = NETWORKS[name]()
  return with_lora(model, name) if lora else model


def token_batch(name, rng, scale, ids=IDS):
  shape = (4, LENGTH)
  weights = scale * rng.random(shape) * (rng.random(shape) < 0.6)
  return do.DiffusionTokenBatch(
    model_inputs=inputs_of(name, rng.integers(0, ids, shape, dtype=np.int32)),
    target_ids=rng.integers(0, ids, shape, dtype=np.int32),
    loss_weights=weights.astype(np.float32),
  )


def unequal(name, count, seed=0, **options):
  rng = np.random.default_rng(seed)
  scales = 10.0 ** rng.uniform(-3, 1, count)
  return [token_batch(name, rng, scale, **options) for scale in scales]


def assert_same_run(linear, dense, tolerance):
  """Parameters, and the losses of training and evaluation."""
  difference = largest_difference(parameters(linear), parameters(dense))
  print(f"parameters: {difference:.1e}")
  assert difference <= tolerance
  for mode in ("train", "eval"):
    assert len(history(dense, "loss", mode))
    np.testing.assert_allclose(
      history(linear, "loss", mode), history(dense, "loss", mode), rtol=2e-6
    )


def assert_nothing_is_sown(model):
  assert not jax.tree.leaves(nnx.state(model, nnx.Intermediate))
  assert not hasattr(model, "all_hidden_states")


# Hidden states and head of Tunix's own networks.


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_head_on_the_hidden_states_gives_the_networks_logits(
  name, lora, dtype
):
  model = NETWORKS[name](dtype=dtype)
  if lora:
    model = with_lora(model, name)
  rng = np.random.default_rng(0)
  inputs = inputs_of(name, rng.integers(0, IDS, (2, LENGTH), dtype=np.int32))
  graph = nnx.graphdef(model)
  hidden, head = tunix.model_hidden_and_head(model, inputs)
  assert nnx.graphdef(model) == graph
  assert_nothing_is_sown(model)
  expected = tunix.model_logits(model, inputs).astype(jnp.float32)
  spread = float(jnp.std(expected))
  tolerance = {jnp.float32: 2e-6, jnp.bfloat16: 2e-2}[dtype] * spread
  assert (head.kernel.dtype, hidden.dtype) == (dtype, dtype)
  assert (head.low_rank is not None) == (lora and name == "Qwen3")
  np.testing.assert_allclose(head.logits(hidden), expected, atol=tolerance)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", NETWORKS)
def test_hidden_states_train_as_logits_do(name, lora):
  micro = unequal(name, 4)
  trained = []
  for options in ({}, {"hidden_fn": tunix.model_hidden_and_head}):
    trainer = make_trainer(build(name, lora), steps=2, eval_every_n_steps=1)
    start = parameters(trainer)
    tunix.configure_diffusion_sft(trainer, **options)
    trainer.train(micro, unequal(name, 2, seed=1))
    assert trainer.train_steps == 2
    assert largest_difference(parameters(trainer), start) > 1e-3
    assert_nothing_is_sown(trainer.model)
    trained.append(trainer)
  assert_same_run(trained[1], trained[0], 2e-6)


def test_a_padded_vocabulary_is_named_by_a_function_of_ones_own():
  def logits_fn(model, model_inputs):
    return tunix.model_logits(model, model_inputs)[..., :REAL_IDS]

  def hidden_fn(model, model_inputs):
    hidden, head = tunix.model_hidden_and_head(model, model_inputs)
    return hidden, dataclasses.replace(head, vocabulary_size=REAL_IDS)

  name = "Qwen3"
  micro = unequal(name, 4, ids=REAL_IDS)
  trained = {}
  for key, options in {
    "dense": {"logits_fn": logits_fn},
    "linear": {"hidden_fn": hidden_fn},
    "unpadded": {},
  }.items():
    trainer = make_trainer(qwen(), steps=2, eval_every_n_steps=1)
    tunix.configure_diffusion_sft(trainer, **options)
    trainer.train(micro, micro[:1])
    trained[key] = trainer
  assert_same_run(trained["linear"], trained["dense"], 2e-6)
  difference = largest_difference(
    parameters(trained["unpadded"]), parameters(trained["dense"])
  )
  assert difference > 1e-4
  wrong = dataclasses.replace(
    micro[0], target_ids=np.full_like(micro[0].target_ids, REAL_IDS)
  )
  trainer = make_trainer(qwen())
  tunix.configure_diffusion_sft(trainer, hidden_fn=hidden_fn)
  with pytest.raises(
    ValueError, match=f"smaller than vocabulary size {REAL_IDS}"
  ):
    trainer.train([wrong])


def test_a_network_that_is_not_known_is_refused():
  with pytest.raises(
    TypeError, match=r"a hidden_fn.* that returns \(hidden .*; received Network"
  ):
    tunix.model_hidden_and_head(network(), {})
  with pytest.raises(TypeError, match="must be a mapping"):
    tunix.model_hidden_and_head(qwen(), np.zeros(2))


class Halved(qwen3.Qwen3):
  """Other logits of the same head, for either of main's methods."""

  def __call__(self, *args, **kwargs):
    logits, cache = super().__call__(*args, **kwargs)
    return logits / 2, cache


class OfItsOwn(qwen3.Qwen3):
  def compute_final_logits(self, x):
    return self.lm_head(x) / 2


class Plain(qwen3.Qwen3):
  """A subclass that leaves logits alone."""

  def size(self):
    return self.config.vocab_size


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(
  ("changed", "name"),
  [(Halved, "__call__"), (OfItsOwn, "compute_final_logits"), (Plain, None)],
)
def test_a_subclass_with_logits_of_its_own_is_refused(changed, name, lora):
  model = qwen()
  model.__class__ = changed
  if lora:
    model = with_lora(model, "Qwen3")
  inputs = inputs_of("Qwen3", np.zeros((1, LENGTH), np.int32))
  if name is None:
    hidden, head = tunix.model_hidden_and_head(model, inputs)
    expected = tunix.model_logits(model, inputs)
    np.testing.assert_allclose(head.logits(hidden), expected, atol=1e-5)
    return
  with pytest.raises(
    TypeError, match=rf"received {changed.__name__} with a {name} of its own"
  ):
    tunix.model_hidden_and_head(model, inputs)


def test_a_head_of_another_class_is_refused():
  model = qwen()
  inputs = inputs_of("Qwen3", np.zeros((1, LENGTH), np.int32))
  model.lm_head = nnx.Linear(16, IDS, rngs=nnx.Rngs(0))
  with pytest.raises(
    TypeError, match="head must be of Tunix's own class, with w; received Lin"
  ):
    tunix.model_hidden_and_head(model, inputs)


class QtProvider(qwix.QtProvider):
  """qwix 0.1.8 does not know an argument of JAX 0.12.1's products."""

  def dot_general(self, *args, reduction_order=None, **kwargs):
    assert reduction_order is None
    return super().dot_general(*args, **kwargs)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_head_that_is_quantized_in_each_call_is_refused(name):
  """The parameter stays a plain array, and the logits are not its."""
  inputs = inputs_of(name, np.zeros((1, LENGTH), np.int32))

  def quantized(*rules):
    # No first call: JAX would keep its quantized jnp.dot for other networks.
    return qwix.quantize_model(
      NETWORKS[name](),
      QtProvider(list(rules)),
      skip_nnx_init=True,
      **inputs,
    )

  everything = qwix.QtRule(weight_qtype="int8", act_qtype="int8")
  with pytest.raises(
    TypeError, match="head must not be quantized by qwix; received QtRule"
  ):
    tunix.model_hidden_and_head(quantized(everything), inputs)
  but_the_head = qwix.QtRule(module_path="lm_head|embedder")
  model = quantized(but_the_head, everything)
  hidden, head = tunix.model_hidden_and_head(model, inputs)
  expected = tunix.model_logits(model, inputs)
  np.testing.assert_allclose(head.logits(hidden), expected, atol=1e-5)


def test_the_scale_of_a_lora_pair_is_read_or_given():
  inputs = inputs_of("Qwen3", np.zeros((1, LENGTH), np.int32))
  model = with_lora(qwen(), "Qwen3")

  def first_side(model, **options):
    return tunix.model_hidden_and_head(model, inputs, **options)[1].low_rank[0]

  pair = model.lm_head.w_lora_a[...]
  np.testing.assert_array_equal(first_side(model), 0.75 * pair)
  np.testing.assert_array_equal(first_side(model, lora_scale=2.0), 2 * pair)
  with pytest.raises(ValueError, match="lora_scale must be a finite"):
    first_side(model, lora_scale=float("nan"))
  with pytest.raises(ValueError, match="must come with a LoRA pair"):
    tunix.model_hidden_and_head(qwen(), inputs, lora_scale=2.0)
  model.__class__ = qwen3.Qwen3  # as restored without qwix
  with pytest.raises(ValueError, match="rule of qwix's that can be read"):
    first_side(model)


def test_dropout_before_the_head_is_refused():
  model = with_lora(qwen(), "Qwen3")
  inputs = inputs_of("Qwen3", np.zeros((1, LENGTH), np.int32))
  provider = qwix.LoraProvider(
    module_path=".*lm_head", rank=4, alpha=3.0, dropout=0.5
  )
  model = qwix.apply_lora_to_model(
    model, provider, rngs=nnx.Rngs(2), skip_nnx_init=True, **inputs
  )
  with pytest.raises(ValueError, match=r"no dropout; received dropout=0\.5"):
    tunix.hidden._head(model, None)


if HAS_MULTI_STEPS:  # main hands hidden states out without sowing them

  def test_states_that_were_sown_before_are_refused():
    model = qwen()
    inputs = inputs_of("Qwen3", np.zeros((1, LENGTH), np.int32))
    model(**inputs, output_hidden_states=True)
    with pytest.raises(ValueError, match="no sown all_hidden_states"):
      tunix.model_hidden_and_head(model, inputs)
    nnx.pop(model, nnx.Intermediate)
    tunix.model_hidden_and_head(model, inputs)


# Teachers. A network of hidden states and a head with a bias.


def small_hidden(model, model_inputs):
  hidden = jnp.tanh(model.hidden(model.embed(**model_inputs)))
  head = do.OutputHead(kernel=model.head.kernel[...], bias=model.head.bias[...])
  return hidden, head


def padded_hidden(model, model_inputs):
  """With one more column, so that they divide over four devices."""
  hidden, head = small_hidden(model, model_inputs)
  padded = do.OutputHead(
    kernel=jnp.pad(head.kernel, ((0, 0), (0, 1))),
    bias=jnp.pad(head.bias, (0, 1)),
    vocabulary_size=head.size,
  )
  return hidden, padded


def embed_inputs(batch):
  tokens = batch.model_inputs["input_tokens"]
  return dataclasses.replace(batch, model_inputs={"inputs": tokens})


def teacher_network(seed=7):
  """Another network of the student's kind."""
  model = network()
  rng = np.random.default_rng(seed)
  moved = jax.tree.map(
    lambda x: x + jnp.asarray(0.5 * rng.standard_normal(x.shape), x.dtype),
    nnx.state(model),
  )
  nnx.update(model, moved)
  return model


SMALL_IDS = network().head.out_features


def small_batches(count, seed=0):
  return [
    embed_inputs(batch)
    for batch in unequal("Qwen3", count, seed, ids=SMALL_IDS)
  ]


def small_logits(model, model_inputs):
  hidden, head = small_hidden(model, model_inputs)
  return head.logits(hidden)


def top_k(logits):
  temperature = OPD["temperature"]
  log_probs, ids = jax.lax.top_k(jax.nn.log_softmax(logits / temperature), 3)
  return do.TopKTeacher(
    token_ids=np.asarray(ids),
    log_probs=np.asarray(log_probs),
    temperature=temperature,
  )


def distillation(batch, teacher, kind):
  hidden, head = small_hidden(teacher, batch.model_inputs)
  views = {
    "dense": lambda: do.DenseTeacher(logits=np.asarray(head.logits(hidden))),
    "hidden": lambda: do.HiddenTeacher(hidden=np.asarray(hidden)),
    "top-k": lambda: top_k(head.logits(hidden)),
  }
  views["dense teacher"] = views["dense"]
  return do.DiffusionDistillationBatch(
    student_batch=batch, teacher=views[kind]()
  )


OPD = {"temperature": 2.0, "hard_loss_weight": 0.5}


def small_trainer(**config):
  return make_trainer(steps=2, eval_every_n_steps=1, **config)


def trained_on_teacher(
  kind, trainer, teacher, hidden_fn=small_hidden, **changes
):
  """Two updates and their evaluations, with the teacher in one of its forms."""
  micro, evaluation = small_batches(4), small_batches(2, seed=1)
  configure = functools.partial(
    tunix.configure_prepared_diffusion_opd, trainer, **{**OPD, **changes}
  )
  if kind == "module":
    configure(hidden_fn=hidden_fn, frozen=teacher)
    trainer.train(micro, evaluation)
    return trainer
  if kind == "dense":
    configure(student_logits_fn=small_logits)
  elif kind == "dense teacher":
    configure(hidden_fn=hidden_fn)
  else:
    _, head = hidden_fn(teacher, micro[0].model_inputs)
    configure(hidden_fn=hidden_fn, frozen=head)
  trainer.train(
    [distillation(b, teacher, kind) for b in micro],
    [distillation(b, teacher, kind) for b in evaluation],
  )
  return trainer


@pytest.mark.parametrize("kind", ["dense teacher", "hidden", "module"])
def test_a_frozen_teacher_trains_as_its_logits_do(kind):
  teacher = teacher_network()
  runs = [
    trained_on_teacher(form, small_trainer(), teacher)
    for form in ("dense", kind)
  ]
  assert_same_run(runs[1], runs[0], 2e-6)
  others = trained_on_teacher("dense", small_trainer(), teacher_network(8))
  assert largest_difference(parameters(others), parameters(runs[0])) > 1e-3


@pytest.mark.parametrize("kinds", [["dense"], ["top-k"], ["hidden", "dense"]])
def test_a_frozen_head_is_used_for_hidden_teachers_alone(kinds):
  """Batches of other teachers train as without it, also among those of it."""
  teacher = teacher_network()
  micro, evaluation = small_batches(4), small_batches(2, seed=1)
  _, head = small_hidden(teacher, micro[0].model_inputs)

  def batches(items, of):
    return [
      distillation(item, teacher, of[index % len(of)])
      for index, item in enumerate(items)
    ]

  runs = []
  for is_given in (False, True):
    trainer = small_trainer()
    tunix.configure_prepared_diffusion_opd(
      trainer,
      hidden_fn=small_hidden,
      frozen=head if is_given else None,
      **OPD,
    )
    of = kinds if is_given else [k.replace("hidden", "dense") for k in kinds]
    trainer.train(batches(micro, of), batches(evaluation, of))
    assert trainer.train_steps == 2
    runs.append(trainer)
  assert_same_run(runs[1], runs[0], 2e-6)


@pytest.mark.parametrize("form", ["logits", "hidden states"])
def test_a_teacher_of_no_weight_is_neither_used_nor_checked(form):
  """Its head is missing, and its features are no head's."""
  teacher = teacher_network()
  micro = small_batches(4)
  items = [distillation(batch, teacher, "hidden") for batch in micro]
  trainer, supervised = small_trainer(), small_trainer()
  scorer = (
    {"student_logits_fn": small_logits}
    if form == "logits"
    else {"hidden_fn": small_hidden}
  )
  tunix.configure_prepared_diffusion_opd(
    trainer, soft_loss_weight=0.0, hard_loss_weight=1.0, **scorer
  )
  tunix.configure_diffusion_sft(supervised, logits_fn=small_logits)
  trainer.train(items, items[:1])
  supervised.train(micro, micro[:1])
  assert_same_run(trainer, supervised, 2e-6)


def test_preparation_keeps_no_array_of_a_frozen_head():
  head = small_hidden(network(), small_batches(1)[0].model_inputs)[1]
  trainer = small_trainer()
  tunix.configure_prepared_diffusion_opd(
    trainer, hidden_fn=small_hidden, frozen=head
  )
  kept = trainer._diffusion_objective.batch_adapter.teacher
  assert (kept.size, kept.features) == (head.size, head.features)
  assert {type(leaf) for leaf in jax.tree.leaves(kept)} == {
    jax.ShapeDtypeStruct
  }


def test_a_whole_network_of_tunix_teaches_its_own_lora():
  """The teacher is the student's base, whose arrays it may share."""
  name = "Qwen3"
  micro = unequal(name, 4)
  trained = []
  for form in ("dense", "linear"):
    base = qwen()
    student = with_lora(base, name)
    if hasattr(make_trainer(qwen()), "create_update_step_fn"):
      base = jax.tree.map(jnp.copy, base)
    trainer = make_trainer(student, steps=2, eval_every_n_steps=1)
    if form == "linear":
      tunix.configure_prepared_diffusion_opd(
        trainer, hidden_fn=tunix.model_hidden_and_head, frozen=base
      )
    else:

      def scored(batch, base=base):
        logits = tunix.model_logits(base, batch.model_inputs)
        return do.DiffusionDistillationBatch(
          student_batch=batch, teacher=do.DenseTeacher(logits=logits)
        )

      tunix.configure_prepared_diffusion_opd(trainer, scored)
    start = parameters(trainer)
    trainer.train(micro, unequal(name, 2, seed=1))
    assert largest_difference(parameters(trainer), start) > 1e-4
    for model in (trainer.model, base):
      assert_nothing_is_sown(model)
    trained.append(trainer)
  assert_same_run(trained[1], trained[0], 2e-6)


@pytest.mark.parametrize("steps", [None, 2])
def test_frozen_arrays_are_never_changed(steps):
  teacher = teacher_network()
  before = jax.tree.map(np.array, nnx.state(teacher))
  held = jax.tree.leaves(nnx.state(teacher))
  trainer = make_trainer(
    optimizer=optax.adamw(1e-2), steps=steps, eval_every_n_steps=1
  )
  trained_on_teacher("module", trainer, teacher)
  assert not any(array.is_deleted() for array in held)
  after = jax.tree.leaves(nnx.state(teacher))
  assert all(a is b for a, b in zip(after, held, strict=True))
  jax.tree.map(np.testing.assert_array_equal, before, nnx.state(teacher))


def test_a_loss_of_ones_own_receives_a_module():
  teacher = teacher_network()
  seen = []

  def loss_fn(model, batch, frozen):
    seen.append(type(frozen))
    return do.prepared_opd_loss(
      small_logits(model, batch.model_inputs),
      do.DiffusionDistillationBatch(
        student_batch=batch,
        teacher=do.DenseTeacher(
          logits=small_logits(frozen, batch.model_inputs)
        ),
      ),
      **OPD,
    )

  trainer = small_trainer()
  tunix.configure_objective(trainer, loss_fn, frozen=teacher)
  trainer.train(small_batches(4), small_batches(2, seed=1))
  assert set(seen) == {type(teacher)}
  dense = trained_on_teacher("dense", small_trainer(), teacher)
  assert_same_run(trainer, dense, 2e-6)


def test_a_loss_of_ones_own_receives_a_pytree_that_holds_a_module():
  teacher = teacher_network()
  head = do.OutputHead(kernel=np.ones((4, 7), np.float32), vocabulary_size=5)

  def loss_fn(model, batch, frozen):
    assert type(frozen["teacher"]) is type(teacher)
    assert frozen["heads"][0].size == 5
    logits = small_logits(model, batch.model_inputs)
    return do.weighted_cross_entropy_loss(
      logits * frozen["scale"]
      + small_logits(frozen["teacher"], batch.model_inputs),
      batch,
    )

  trainer = make_trainer()
  tunix.configure_objective(
    trainer,
    loss_fn,
    frozen={
      "teacher": teacher,
      "heads": [head],
      "scale": np.float32(0.5) * np.ones(1, np.float32),
    },
  )
  trainer.train(small_batches(1))
  assert trainer.train_steps == 1


def test_supervised_training_takes_a_frozen_head():
  """The head is no part of the network: `hidden_fn` is handed it."""
  student = network()
  head = do.OutputHead(
    kernel=student.head.kernel[...], bias=student.head.bias[...]
  )

  def hidden_fn(model, model_inputs, frozen):
    return small_hidden(model, model_inputs)[0], frozen

  def logits_fn(model, model_inputs, frozen):
    return frozen.logits(small_hidden(model, model_inputs)[0])

  trained = []
  for options in ({"hidden_fn": hidden_fn}, {"logits_fn": logits_fn}):
    trainer = small_trainer()
    frozen = jax.tree.map(jnp.copy, head)
    tunix.configure_diffusion_sft(trainer, frozen=frozen, **options)
    start = parameters(trainer)
    trainer.train(small_batches(4), small_batches(2, seed=1))
    end = parameters(trainer)
    assert largest_difference(end["hidden"], start["hidden"]) > 1e-3
    assert largest_difference(end["head"], start["head"]) == 0
    trained.append(trainer)
  assert_same_run(*trained, 2e-6)


# Arguments of the compiled step.


def compiled_texts(trainer, item):
  """The optimized programs of the steps that take a batch."""
  name = trainer._diffusion_objective.generation.compile_steps
  steps = list(getattr(trainer, name)())
  is_split = hasattr(trainer, "create_update_step_fn")
  if is_split:
    forward, _, evaluation = steps  # the update takes no batch
    fused = trainer._jitted_train_step_fn
    steps = [forward, evaluation, *([fused] if fused else [])]
  prepared = trainer._prepare_inputs(item)
  for index, step in enumerate(steps):
    arguments = {"inputs": step._supplied(prepared)}
    if index == 0 and is_split:
      arguments["grad_accumulator"] = trainer.grad_accumulator
    elif index == 0 and hasattr(trainer, "grad_accumulator"):
      arguments["is_update_step"] = jnp.array(True)
    lowered = step.func.lower(*step.step.args, **arguments)
    yield lowered.compile().as_text()


def constant_shapes(text):
  """Shapes of constants that are no single repeated number."""
  return {
    tuple(map(int, shape.split(",")))
    for shape in re.findall(r"= \w+\[([\d,]+)\]\S* constant\(", text)
  }


def baked(self, model, batch, arrays):
  """A planted bug: the loss closes over the teacher."""
  return self.loss_fn(model, batch, self.frozen.rebuild(self.frozen.arrays))


def opd_trainer(teacher):
  trainer = small_trainer()
  tunix.configure_prepared_diffusion_opd(
    trainer, hidden_fn=small_hidden, frozen=teacher, **OPD
  )
  return trainer


@pytest.mark.parametrize("is_planted", [False, True])
def test_frozen_arrays_are_no_constants(is_planted, monkeypatch):
  if is_planted:
    monkeypatch.setattr(hook.Hook, "output", baked)
  teacher = teacher_network()
  shapes = {x.shape for x in jax.tree.leaves(nnx.state(teacher))}
  for text in compiled_texts(opd_trainer(teacher), small_batches(1)[0]):
    assert bool(shapes & constant_shapes(text)) == is_planted


@pytest.mark.parametrize("is_planted", [False, True])
def test_other_values_need_no_other_compiled_step(is_planted, monkeypatch):
  output = baked if is_planted else hook.Hook.output
  traces = []

  def counted(*arguments):
    traces.append(None)
    return output(*arguments)

  monkeypatch.setattr(hook.Hook, "output", counted)
  trainer = opd_trainer(teacher_network())
  trainer.is_managed_externally = True
  micro = small_batches(2)
  start = jax.tree.map(np.array, nnx.state(trainer.model))
  ends, traced = [], []
  frozen = trainer._diffusion_objective.frozen
  for seed in (7, 8):
    nnx.update(trainer.model, jax.tree.map(jnp.array, start))
    frozen.arrays = tuple(jax.tree.leaves(nnx.state(teacher_network(seed))))
    trainer.train(micro, micro[:1])
    ends.append(parameters(trainer))
    traced.append(len(traces))
  assert traced[0] == traced[1] > 0
  assert (largest_difference(*ends) == 0) == is_planted


def test_a_second_configuration_replaces_what_is_frozen():
  trainer = small_trainer()
  trainer.is_managed_externally = True
  start = jax.tree.map(np.array, nnx.state(trainer.model))
  for seed in (7, 8):
    nnx.update(trainer.model, jax.tree.map(jnp.array, start))
    trained_on_teacher("module", trainer, teacher_network(seed))
  fresh = trained_on_teacher("module", small_trainer(), teacher_network(8))
  assert largest_difference(parameters(trainer), parameters(fresh)) == 0
  # And without any.
  nnx.update(trainer.model, jax.tree.map(jnp.array, start))
  trained_on_teacher("dense", trainer, teacher_network(8))
  difference = largest_difference(parameters(trainer), parameters(fresh))
  assert difference <= 2e-6


def stored_names(folder):
  """The names of all arrays in all saves below a folder."""
  return {
    f"{path.parent.relative_to(folder)}: {name}"
    for path in folder.rglob("_METADATA")
    for name in json.loads(path.read_text())["tree_metadata"]
  }


def test_a_checkpoint_holds_nothing_that_is_frozen(tmp_path):
  teacher = teacher_network()
  for kind in ("module", "dense"):
    trainer = small_trainer(checkpoint_root_directory=str(tmp_path / kind))
    trained_on_teacher(kind, trainer, teacher)
  names = stored_names(tmp_path / "module")
  assert len(names) > 5
  assert names == stored_names(tmp_path / "dense")


@pytest.mark.parametrize("order", [("dense", "module"), ("hidden", "dense")])
def test_a_run_goes_on_in_the_other_form(order, tmp_path):
  """It is one loss, and one identity."""
  teacher = teacher_network()
  for updates, kind in enumerate(order, 1):
    trainer = small_trainer(
      checkpoint_root_directory=str(tmp_path), max_steps=updates
    )
    assert trainer.train_steps == updates - 1
    trained_on_teacher(kind, trainer, teacher)
    assert trainer.train_steps == updates
  straight = trained_on_teacher(order[0], small_trainer(), teacher)
  difference = largest_difference(parameters(trainer), parameters(straight))
  assert difference <= 2e-6


def test_a_donated_frozen_array_would_be_seen(monkeypatch):
  """Planted: the trainer's steps donate what they are handed."""
  own = nnx.jit

  def donating(function, donate_argnames=()):
    return own(function, donate_argnames=(*donate_argnames, "inputs"))

  monkeypatch.setattr(nnx, "jit", donating)
  with pytest.raises(Exception, match=r"donate|delete"):
    test_frozen_arrays_are_never_changed(None)


def test_arrays_that_the_trainer_donates_are_refused():
  trainer = make_trainer(optimizer=optax.adam(0.1))
  moments = nnx.state(trainer.optimizer, nnx.optimizer.OptState)
  with pytest.raises(ValueError, match=r"trainer\.optimizer, .*; received"):
    tunix.configure_objective(
      trainer, lambda *_: None, name="x", frozen=jax.tree.leaves(moments)
    )
  is_donated = hasattr(trainer, "create_update_step_fn")
  shared = nnx.clone(trainer.model)
  # A window of one micro-batch donates no model.
  trainer = make_trainer(trainer.model, eval_every_n_steps=1)
  opd_trainer_of(trainer, shared)
  trainer.train(small_batches(2), small_batches(1))
  held = jax.tree.leaves(nnx.state(shared))
  assert not any(array.is_deleted() for array in held)
  trainer = small_trainer(model=nnx.clone(shared))
  if is_donated:
    with pytest.raises(ValueError, match=r"trainer\.model, .*; received"):
      opd_trainer_of(trainer, shared)
    shared = jax.tree.map(jnp.copy, shared)
  opd_trainer_of(trainer, shared)
  trainer.train(small_batches(4), small_batches(1))
  assert trainer.train_steps == 2


if not HAS_MULTI_STEPS:  # main has an accumulator of its own

  def test_arrays_of_the_accumulator_are_refused():
    trainer = make_trainer(steps=2)
    sums = jax.tree.leaves(nnx.state(trainer.grad_accumulator))
    with pytest.raises(ValueError, match=r"trainer\.grad_accumulator, .*; rec"):
      tunix.configure_objective(trainer, lambda *_: None, name="x", frozen=sums)


def test_arrays_that_came_to_be_shared_are_refused_at_the_next_step():
  trainer = make_trainer(optimizer=optax.adam(0.1), steps=2)
  frozen = nnx.state(trainer.optimizer, nnx.optimizer.OptState)
  frozen = jax.tree.map(jnp.copy, frozen)

  def loss_fn(model, batch, _):
    return do.weighted_cross_entropy_loss(
      small_logits(model, batch.model_inputs), batch
    )

  tunix.configure_objective(trainer, loss_fn, frozen=frozen)
  nnx.update(trainer.optimizer, frozen)
  with pytest.raises(ValueError, match=r"trainer\.optimizer, .*; received"):
    trainer.train(small_batches(2))
  assert trainer.train_steps == 0


def opd_trainer_of(trainer, teacher):
  tunix.configure_prepared_diffusion_opd(
    trainer, hidden_fn=small_hidden, frozen=teacher, **OPD
  )


# Meshes.


def test_frozen_arrays_keep_their_place_on_a_mesh():
  mesh = jax.make_mesh(
    (2, 4), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  teacher = teacher_network()
  single = trained_on_teacher("module", small_trainer(), teacher)
  spec = jax.sharding.PartitionSpec("tp", None)
  sharding = jax.sharding.NamedSharding(mesh, spec)
  with mesh:
    kernel = teacher.head.kernel
    kernel.set_value(jax.device_put(kernel[...], sharding))
    student = network()
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    state = nnx.state(student)
    nnx.update(student, jax.device_put(state, everywhere))
    trainer = small_trainer(model=student)
    given = []
    own = tunix.frozen_arrays.SuppliedStep._supplied

    def watched(step, inputs):
      supplied = own(step, inputs)
      given.append(supplied.frozen)
      return supplied

    with pytest.MonkeyPatch.context() as monkeypatch:
      monkeypatch.setattr(
        tunix.frozen_arrays.SuppliedStep, "_supplied", watched
      )
      trained_on_teacher("module", trainer, teacher, padded_hidden)
  assert len(given) == 4 + 3 * 2
  for arrays in given[1:]:  # placed once: the same objects in each step
    assert all(a is b for a, b in zip(arrays, given[0], strict=True))
  assert any(array is kernel[...] for array in given[0])
  assert all(
    array.sharding.device_set == set(mesh.devices.flat) for array in given[0]
  )
  assert_same_run(trainer, single, 2e-6)


def test_frozen_arrays_in_another_order_of_the_devices_are_replaced():
  devices = np.array(jax.devices()).reshape(2, 4)
  types = (jax.sharding.AxisType.Auto,) * 2
  mesh, reverse = (
    jax.sharding.Mesh(d, ("fsdp", "tp"), axis_types=types)
    for d in (devices, devices[::-1, ::-1])
  )
  teacher = teacher_network()
  single = trained_on_teacher("module", small_trainer(), teacher)
  spec = jax.sharding.PartitionSpec()
  state = nnx.state(teacher)
  nnx.update(
    teacher, jax.device_put(state, jax.sharding.NamedSharding(reverse, spec))
  )
  with mesh:
    student = network()
    state = nnx.state(student)
    nnx.update(
      student, jax.device_put(state, jax.sharding.NamedSharding(mesh, spec))
    )
    trainer = small_trainer(model=student)
    trained_on_teacher("module", trainer, teacher, padded_hidden)
  assert_same_run(trainer, single, 2e-6)


# Refusals.


def refused(kind, message, configure, **options):
  trainer = make_trainer()
  before = dict(vars(trainer))
  if "received" not in message:
    message = f"{message}.*; received"
  with pytest.raises(kind, match=message):
    configure(trainer, **options)
  assert dict(vars(trainer)) == before


@pytest.mark.parametrize(
  ("configure", "options", "kind", "message"),
  [
    (
      tunix.configure_diffusion_sft,
      {"logits_fn": small_logits, "hidden_fn": small_hidden},
      ValueError,
      "at most one of logits_fn and hidden_fn",
    ),
    (
      tunix.configure_prepared_diffusion_opd,
      {"student_logits_fn": small_logits, "hidden_fn": small_hidden},
      ValueError,
      "at most one of student_logits_fn and hidden_fn",
    ),
    (
      tunix.configure_diffusion_sft,
      {"hidden_fn": 3},
      TypeError,
      "hidden_fn must be callable",
    ),
    (
      tunix.configure_prepared_diffusion_opd,
      {"hidden_fn": small_hidden, "divergence": do.divergences.reverse_kl},
      ValueError,
      "divergence must be forward_kl",
    ),
    (
      tunix.configure_prepared_diffusion_opd,
      {"frozen": teacher_network()},
      ValueError,
      "frozen must come with a hidden_fn",
    ),
    (
      tunix.configure_prepared_diffusion_opd,
      {"hidden_fn": small_hidden, "frozen": {"head": np.ones(2)}},
      TypeError,
      "frozen must be an OutputHead or an nnx.Module",
    ),
    (
      tunix.configure_prepared_diffusion_opd,
      {"hidden_fn": small_hidden, "teacher_hidden_fn": small_hidden},
      ValueError,
      "teacher_hidden_fn must come with frozen=, an nnx.Module",
    ),
    (
      tunix.configure_diffusion_sft,
      {"frozen": np.ones(2)},
      ValueError,
      "frozen must come with a logits_fn or hidden_fn",
    ),
    (
      tunix.configure_objective,
      {"loss_fn": lambda *_: None, "name": "x", "frozen": {"a": 1.0}},
      TypeError,
      "frozen must be an nnx.Module or a pytree of arrays",
    ),
    (
      tunix.configure_objective,
      {"loss_fn": lambda model, batch: None, "name": "x", "frozen": np.ones(2)},
      TypeError,
      r"loss_fn must take \(model, batch, frozen\); received \(model, batch\)",
    ),
    (
      tunix.configure_objective,
      {"loss_fn": lambda model, batch, frozen: None, "name": "x"},
      TypeError,
      r"loss_fn must take \(model, batch\)",
    ),
    (
      tunix.configure_diffusion_sft,
      {"hidden_fn": small_hidden, "frozen": np.ones(2)},
      TypeError,
      r"hidden_fn must take \(model, model_inputs, frozen\)",
    ),
    (
      tunix.configure_diffusion_sft,
      {"logits_fn": lambda model: None},
      TypeError,
      r"logits_fn must take \(model, model_inputs\)",
    ),
    (
      tunix.configure_prepared_diffusion_opd,
      {"student_logits_fn": lambda model: None},
      TypeError,
      r"student_logits_fn must take \(model, model_inputs\)",
    ),
    (
      tunix.configure_prepared_diffusion_opd,
      {
        "hidden_fn": small_hidden,
        "frozen": teacher_network(),
        "teacher_hidden_fn": lambda frozen: None,
      },
      TypeError,
      r"teacher_hidden_fn must take \(frozen, model_inputs\)",
    ),
  ],
)
def test_what_does_not_fit_is_refused_at_configuration(
  configure, options, kind, message
):
  refused(kind, message, configure, **options)


def deleted():
  array = jnp.ones(2)
  array.delete()
  return array


@pytest.mark.parametrize(
  ("frozen", "received"),
  [
    ("teacher", "str in it"),
    (0.5, "float in it"),
    ({"a": np.ones(2), "scale": 0.5}, "float in it"),
    ({"a": np.ones(2), "name": "x"}, "str in it"),
    ([np.ones(2), jnp.tanh], ".* in it"),
    ({"a": np.array(["x"])}, r"<U1\[1\] in it"),
    ({"a": np.array([None, 1], object)}, r"object\[2\] in it"),
    ({"a": np.ma.masked_array([1.0], [True])}, "MaskedArray in it"),
    ([jax.ShapeDtypeStruct((2,), np.float32)], r"float32\[2\] in it"),
    ({"a": deleted()}, r"float32\[2\] that was deleted"),
    (nnx.Param(deleted()), r"float32\[2\] that was deleted"),
    ({}, "none"),
  ],
)
def test_what_is_no_array_is_refused_as_frozen(frozen, received):
  refused(
    TypeError,
    f"frozen must be an nnx.Module or a pytree of arrays; received {received}$",
    tunix.configure_objective,
    loss_fn=lambda model, batch, frozen: None,
    name="x",
    frozen=frozen,
  )


@pytest.mark.parametrize(
  "frozen",
  [
    np.float32(1),
    (jnp.ones(2, jnp.bfloat16), None),
    {"key": jax.random.key(0), "is_kept": np.ones(2, bool)},
    nnx.Rngs(0),
    nnx.state(network()),
    nnx.split(network()),
  ],
  ids=["scalar", "tuple", "key", "rngs", "state", "split"],
)
def test_every_kind_of_array_can_be_frozen(frozen):
  def loss_fn(model, batch, given):
    assert jax.tree.structure(given) == jax.tree.structure(frozen)
    return do.weighted_cross_entropy_loss(
      small_logits(model, batch.model_inputs), batch
    )

  trainer = make_trainer()
  tunix.configure_objective(trainer, loss_fn, frozen=frozen)
  trainer.train(small_batches(1))
  assert trainer.train_steps == 1


def test_the_compiling_method_must_stay_the_configured_one():
  trainer = make_trainer()
  name = tunix.GENERATIONS[-1].compile_steps
  if not hasattr(trainer, name):
    name = tunix.GENERATIONS[0].compile_steps
  own = getattr(trainer, name)
  other = functools.wraps(own)(lambda *a, **k: own(*a, **k))
  setattr(trainer, name, other)
  with pytest.raises(ValueError, match=rf"{name} must be its class's"):
    tunix.configure_diffusion_sft(trainer)
  delattr(trainer, name)
  tunix.configure_diffusion_sft(trainer)
  for later in (other, lambda *a: 0.0):
    setattr(trainer, name, later)
    with pytest.raises(ValueError, match=rf"trainer\.{name} must be the conf"):
      trainer.train(small_batches(1))


def bad_runs():
  teacher = teacher_network()
  tokens = small_batches(1)[0]
  hidden = distillation(tokens, teacher, "hidden")
  _, head = small_hidden(teacher, tokens.model_inputs)
  narrow = dataclasses.replace(head, vocabulary_size=head.size - 1)
  cut = do.HiddenTeacher(hidden=hidden.teacher.hidden[..., :-1])
  linear = {"hidden_fn": small_hidden}
  short = jnp.zeros((2, 3, 24))

  def narrow_hidden(model, model_inputs):
    hidden, head = small_hidden(model, model_inputs)
    return hidden, dataclasses.replace(head, vocabulary_size=head.size - 1)

  return {
    "no head": (linear, hidden, ValueError, "come with its head"),
    "no head, dense": ({}, hidden, ValueError, "come with its head"),
    "another vocabulary": (
      {**linear, "frozen": narrow},
      hidden,
      ValueError,
      "one vocabulary; received teacher 10 and student 11",
    ),
    "another vocabulary of a module": (
      {**linear, "frozen": teacher, "teacher_hidden_fn": narrow_hidden},
      tokens,
      ValueError,
      "one vocabulary; received teacher 10 and student 11",
    ),
    "other features": (
      {**linear, "frozen": head},
      dataclasses.replace(hidden, teacher=cut),
      ValueError,
      "teacher hidden must have the features",
    ),
    "a teacher twice": (
      {**linear, "frozen": teacher},
      hidden,
      TypeError,
      "must be a DiffusionTokenBatch",
    ),
    "no teacher": (linear, tokens, TypeError, "DiffusionDistillationBatch"),
    "logits": (
      {"hidden_fn": small_logits, "frozen": head},
      hidden,
      TypeError,
      r"hidden_fn's result must be \(hidden",
    ),
    "another result": (
      {"hidden_fn": lambda *_: (short, 3), "frozen": head},
      hidden,
      TypeError,
      r"hidden_fn's result must be .* received \(float32\[2, 3, 24\], int\)",
    ),
    "another shape": (
      {"hidden_fn": lambda *_: (short, head), "frozen": head},
      hidden,
      ValueError,
      "hidden must align with target_ids",
    ),
    "another width": (
      {"hidden_fn": lambda *_: (short[..., 1:], head), "frozen": head},
      hidden,
      ValueError,
      "must have the features of its head, 24",
    ),
    "of a teacher": (
      {
        "hidden_fn": small_hidden,
        "frozen": teacher,
        "teacher_hidden_fn": small_logits,
      },
      tokens,
      TypeError,
      r"teacher_hidden_fn's result must be \(hidden",
    ),
  }


@pytest.mark.parametrize("name", bad_runs())
def test_what_does_not_fit_is_refused_before_the_step(name):
  options, item, kind, message = bad_runs()[name]
  trainer = make_trainer()
  tunix.configure_prepared_diffusion_opd(trainer, **options)
  start = parameters(trainer)
  with pytest.raises(kind, match=message):
    trainer.train([item])
  assert trainer.train_steps == 0
  assert largest_difference(parameters(trainer), start) == 0


# Memory. Nothing in a program is as large as all logits.


def largest_array(text):
  """The number of entries of the largest array in a program's text."""
  shapes = re.findall(r"\b(?:f|bf|s|u)\d+\[([\d,]+)\]", text)
  return max(math.prod(map(int, shape.split(","))) for shape in shapes)


def without_vocabulary(model, batch):
  """Of the hidden states alone: what else the network does is dropped."""
  hidden, _ = tunix.model_hidden_and_head(model, batch.model_inputs)
  return do.LossOutput(
    primary_loss=do.WeightedMetric(
      unreduced_sum=jnp.sum(hidden**2), denominator=jnp.float32(hidden.size)
    ),
    aux_metrics={},
  )


@pytest.mark.parametrize(
  "form",
  [
    "dense",
    "hidden states alone",
    "linear",
  ],
)
def test_no_array_has_the_size_of_the_logits(form):
  ids, shape = 40_009, (8, 64)
  rng = np.random.default_rng(0)
  batch = do.DiffusionTokenBatch(
    model_inputs=inputs_of(
      "Qwen3", rng.integers(0, ids, shape, dtype=np.int32)
    ),
    target_ids=rng.integers(0, ids, shape, dtype=np.int32),
    loss_weights=np.ones(shape, np.float32),
  )
  trainer = make_trainer(qwen(ids=ids))
  if form == "hidden states alone":
    tunix.configure_objective(trainer, without_vocabulary)
  else:
    linear = {"hidden_fn": tunix.model_hidden_and_head}
    tunix.configure_diffusion_sft(trainer, **linear if form == "linear" else {})
  logits = math.prod(shape) * ids
  for text in compiled_texts(trainer, batch):
    largest = largest_array(text)
    assert largest >= logits if form == "dense" else largest < logits
