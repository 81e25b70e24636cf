"""What does a distillation step through the Tunix hook take in memory?

Forward KL from a teacher's hidden states and frozen head, at a vocabulary whose
logits do not fit. The dense step, which forms the teacher's logits too, is
compiled and never run: its memory is the compiler's own analysis. Ours is
compiled the same way, and run for real through the hook in a fresh process,
where the compiler is asked about the trainer's own step. At a vocabulary where
both run, the parameters after one step are compared.

  python -m benchmarks.linear_hook --help
"""

import argparse
import dataclasses
import functools
import json
import math

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tunix.sft import peft_trainer

from benchmarks import _linear
import diffusion_objectives as do
from diffusion_objectives.trainers import tunix

INPUT_VOCABULARY = 128
LEARNING_RATE = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
  tokens: int
  features: int
  vocabulary: int


class Network(nnx.Module):
  """A small input vocabulary, one layer, a large output vocabulary."""

  def __init__(self, size: Size, rngs: nnx.Rngs):
    self.embed = nnx.Embed(INPUT_VOCABULARY, size.features, rngs=rngs)
    self.layer = nnx.Linear(size.features, size.features, rngs=rngs)
    self.head = nnx.Param(make_kernel(size, rngs.params()))

  def hidden(self, ids):
    return jnp.tanh(self.layer(self.embed(ids)))


def make_kernel(size, key):
  shape = (size.features, size.vocabulary)
  return size.features**-0.5 * jax.random.normal(key, shape)


def hidden_and_head(model, model_inputs):
  head = do.OutputHead(kernel=model.head[...])
  return model.hidden(model_inputs["ids"]), head


def dense_logits(model, model_inputs):
  hidden, head = hidden_and_head(model, model_inputs)
  return head.logits(hidden)


def make_teacher_head(size):
  return do.OutputHead(kernel=make_kernel(size, jax.random.key(1)))


def make_batch(size):
  rng = np.random.default_rng(0)
  rows = math.gcd(size.tokens, 8)
  shape = (rows, size.tokens // rows)
  ids = rng.integers(0, min(INPUT_VOCABULARY, size.vocabulary), shape, np.int32)
  hidden = rng.standard_normal((*shape, size.features), np.float32)
  return do.DiffusionDistillationBatch(
    student_batch=do.DiffusionTokenBatch(
      model_inputs={"ids": ids},
      target_ids=ids,
      loss_weights=np.ones(shape, np.float32),
    ),
    teacher=do.HiddenTeacher(hidden=hidden),
  )


def with_dense_teacher(batch, head):
  logits = head.logits(jnp.asarray(batch.teacher.hidden))
  return dataclasses.replace(batch, teacher=do.DenseTeacher(logits=logits))


# The step by itself: what the compiler says of either form.


def compiler_bytes(size, is_linear):
  """Of value, gradients and an SGD update in place; nothing is run."""
  model = nnx.eval_shape(lambda: Network(size, nnx.Rngs(0)))
  structure, state = nnx.split(model)
  teacher_head = jax.eval_shape(functools.partial(make_teacher_head, size))

  def loss(state, batch, head):
    model = nnx.merge(structure, state)
    inputs = batch.student_batch.model_inputs
    if is_linear:
      output = do.linear_prepared_opd_loss(
        *hidden_and_head(model, inputs), batch, teacher_head=head
      )
    else:
      output = do.prepared_opd_loss(
        dense_logits(model, inputs), with_dense_teacher(batch, head)
      )
    return output.primary_loss.compute()

  @functools.partial(jax.jit, donate_argnums=0)
  def step(state, batch, head):
    value, gradients = jax.value_and_grad(loss)(state, batch, head)
    new = jax.tree.map(lambda p, g: p - LEARNING_RATE * g, state, gradients)
    return new, value

  compiled = step.lower(state, make_batch(size), teacher_head).compile()
  return _bytes(compiled.memory_analysis())


def _bytes(memory):
  return {
    "temporary_bytes": memory.temp_size_in_bytes,
    "argument_bytes": memory.argument_size_in_bytes,
  }


# The step through the trainer.


def make_trainer(size, is_linear, teacher_head):
  trainer = peft_trainer.PeftTrainer(
    Network(size, nnx.Rngs(0)),
    optax.sgd(LEARNING_RATE),
    peft_trainer.TrainingConfig(eval_every_n_steps=10**9),
  )
  trainer.is_managed_externally = True  # train() may be called again
  if is_linear:
    return tunix.configure_prepared_diffusion_opd(
      trainer, hidden_fn=hidden_and_head, frozen=teacher_head
    )
  return tunix.configure_prepared_diffusion_opd(
    trainer, student_logits_fn=dense_logits
  )


def train(trainer, batch):
  trainer.train([batch])
  jax.block_until_ready(nnx.state(trainer.model))


def measure_here(size, limit):
  """Growth of this process's peak memory over real steps of the trainer.

  A step that takes more than `limit` bytes by the compiler is not run.
  """
  if compiler_bytes(size, True)["temporary_bytes"] > limit:
    return {"is_run": False}
  teacher_head = make_teacher_head(size)
  trainer = make_trainer(size, True, teacher_head)
  batch = make_batch(size)
  jax.block_until_ready((teacher_head, nnx.state(trainer.model)))
  row = {"is_run": True}
  for name in ("first", "second"):  # the first one compiles
    _linear.reset_peak()
    before = _linear.peak_bytes()
    train(trainer, batch)
    row[f"{name}_step_growth_bytes"] = _linear.peak_bytes() - before
  row["peak_bytes"] = _linear.peak_bytes()
  compiled = jax.devices()[0].client.live_executables()
  memory = [executable.get_compiled_memory_stats() for executable in compiled]
  largest = max(memory, key=lambda stats: stats.temp_size_in_bytes)
  return {**row, **_bytes(largest)}


def largest_differences(size):
  """Between the forms' parameters after one step, and of the step itself."""
  teacher_head = make_teacher_head(size)
  batch = make_batch(size)
  items = {True: batch, False: with_dense_teacher(batch, teacher_head)}
  after = {}
  for is_linear, item in items.items():
    trainer = make_trainer(size, is_linear, teacher_head)
    before = _parameters(trainer)
    train(trainer, item)
    after[is_linear] = _parameters(trainer)

  def largest(one, other):
    pairs = zip(one, other, strict=True)
    return float(max(np.abs(x - y).max() for x, y in pairs))

  return {
    "largest_difference": largest(after[True], after[False]),
    "largest_change": largest(after[False], before),
  }


def _parameters(trainer):
  state = nnx.state(trainer.model, nnx.Param)
  return [np.array(leaf) for leaf in jax.tree.leaves(state)]


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    "--size", type=_linear.triple, default=(4096, 256, 262144), metavar="N,D,V"
  )
  parser.add_argument(
    "--compared-vocabulary", type=int, default=4096, help="where both run"
  )
  parser.add_argument(
    "--limit-gib", type=float, default=6.0, help="what takes more is not run"
  )
  parser.add_argument("--quick", action="store_true", help="tiny sizes")
  parser.add_argument("--json", help="append the rows to this file")
  parser.add_argument("--child", help="a request, for the script's own use")
  arguments = parser.parse_args()
  if arguments.child:
    request = json.loads(arguments.child)
    row = measure_here(Size(**request["size"]), request["limit"])
    print(json.dumps(row))
    return
  tokens, features, vocabulary = arguments.size
  compared = arguments.compared_vocabulary
  if arguments.quick:
    tokens, features, vocabulary, compared = 256, 32, 8192, 512
  size = Size(tokens=tokens, features=features, vocabulary=vocabulary)
  fields = dataclasses.asdict(size)
  _linear.print_hardware()
  # First, while this process is small: a child's peak starts at its parent's.
  limit = _linear.limit_of(arguments)
  run = _linear.in_fresh_process(
    "benchmarks.linear_hook", {"size": fields, "limit": limit}
  )
  if not run["is_run"]:
    _linear.say("our step is not run: it takes more than the limit")
  rows = [
    {"step": "ours, through the hook", **run},
    {"step": "ours, compiled alone", **compiler_bytes(size, True)},
    {"step": "dense, compiled alone", **compiler_bytes(size, False)},
  ]
  rows = [_linear.emit({**fields, **row}, arguments.json) for row in rows]
  small = dataclasses.replace(size, vocabulary=compared)
  difference = _linear.emit(
    {
      "step": "ours against dense, through the hook",
      **dataclasses.asdict(small),
      **largest_differences(small),
    },
    arguments.json,
  )
  _linear.print_table(
    f"One step, N {tokens:,}, D {features:,}, V {vocabulary:,}, float32, MiB",
    [
      "step",
      "temporaries",
      "arguments",
      "growth, first step",
      "growth, second step",
      "peak",
    ],
    [
      [
        row["step"],
        *[
          _linear.mib(row.get(name))
          for name in (
            "temporary_bytes",
            "argument_bytes",
            "first_step_growth_bytes",
            "second_step_growth_bytes",
            "peak_bytes",
          )
        ],
      ]
      for row in rows
    ],
  )
  _linear.print_table(
    "Parameters after one step in both forms",
    ["N", "D", "V", "largest difference", "largest change of the step"],
    [
      [
        *[difference[n] for n in ("tokens", "features", "vocabulary")],
        difference["largest_difference"],
        difference["largest_change"],
      ]
    ],
  )


if __name__ == "__main__":
  main()
