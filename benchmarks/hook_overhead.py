"""What does the Tunix hook cost a micro-step, against the stock trainer?

Both trainers run the same network, data and optimizer through the real
`PeftTrainer.train`, in alternating rounds of one process; the stock trainer's
loss is the same weighted cross entropy as a mean. Medians over rounds.

  python -m benchmarks.hook_overhead --help
"""

import argparse
import json
import platform
import time

from flax import nnx
import jax
import numpy as np
import optax
from tunix.models.qwen3 import model as qwen3
from tunix.sft import peft_trainer

import diffusion_objectives as do
from diffusion_objectives.trainers import tunix

VOCABULARY = 260
ROUND = 8  # micro-steps between two switches of the trainer


def make_batch(rng, rows, length):
  ids = rng.integers(0, VOCABULARY, (rows, length), dtype=np.int32)
  positions = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
  return do.DiffusionTokenBatch(
    model_inputs={
      "input_tokens": ids,
      "positions": positions,
      "cache": None,
      "attention_mask": np.ones((rows, length, length), bool),
    },
    target_ids=ids,
    loss_weights=rng.random((rows, length), np.float32),
  )


def mean_loss(model, batch):
  logits = tunix.model_logits(model, batch.model_inputs)
  return do.weighted_cross_entropy_loss(logits, batch).primary_loss.compute()


def make_trainer(is_configured, steps, width):
  config = qwen3.ModelConfig(
    num_layers=2,
    vocab_size=VOCABULARY,
    embed_dim=width,
    hidden_dim=4 * width,
    num_heads=4,
    head_dim=width // 4,
    num_kv_heads=4,
    rope_theta=10_000,
    norm_eps=1e-6,
  )
  trainer = peft_trainer.PeftTrainer(
    qwen3.Qwen3(config, rngs=nnx.Rngs(0)),
    optax.adamw(1e-4),
    peft_trainer.TrainingConfig(
      eval_every_n_steps=10**9, gradient_accumulation_steps=steps
    ),
  )
  trainer.is_managed_externally = True  # train() may be called again
  if is_configured:
    return tunix.configure_diffusion_sft(trainer)
  return trainer.with_loss_fn(mean_loss).with_gen_model_input_fn(
    lambda batch: {"batch": batch}
  )


def measure(steps, rounds, width, rows, length):
  rng = np.random.default_rng(0)
  data = [make_batch(rng, rows, length) for _ in range(ROUND)]
  trainers = {
    name: make_trainer(name == "configured", steps, width)
    for name in ("stock", "configured")
  }
  times = {name: [] for name in trainers}
  for index in range(rounds + 2):
    order = list(trainers.items())
    for name, trainer in order if index % 2 else order[::-1]:
      start = time.perf_counter()
      trainer.train(data)
      jax.block_until_ready(nnx.state(trainer.model))
      if index >= 2:  # the first rounds compile
        times[name].append((time.perf_counter() - start) / ROUND)
  ratios = np.array(times["configured"]) / np.array(times["stock"])
  size = sum(
    x.size
    for x in jax.tree.leaves(nnx.state(trainers["stock"].model, nnx.Param))
  )
  return {
    "gradient_accumulation_steps": steps,
    "parameters": size,
    "micro_steps": rounds * ROUND,
    "stock_ms": 1e3 * float(np.median(times["stock"])),
    "configured_ms": 1e3 * float(np.median(times["configured"])),
    "median_ratio": float(np.median(ratios)),
    "quartiles": [float(q) for q in np.quantile(ratios, (0.25, 0.75))],
  }


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--rounds", type=int, default=25, help="of 8 micro-steps")
  parser.add_argument("--width", type=int, default=320)
  parser.add_argument("--rows", type=int, default=4)
  parser.add_argument("--length", type=int, default=32)
  parser.add_argument("--json", help="append the rows to this file")
  arguments = parser.parse_args()
  print(f"jax {jax.__version__}, {platform.machine()}, {jax.devices()[0]}")
  print("steps  stock ms  configured ms  ratio  (quartiles)")
  mesh = jax.make_mesh(
    (1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  with mesh:
    for steps in (None, 2, 4):
      row = measure(
        steps,
        arguments.rounds,
        arguments.width,
        arguments.rows,
        arguments.length,
      )
      low, high = row["quartiles"]
      print(
        f"{steps!s:>5}  {row['stock_ms']:8.1f}  {row['configured_ms']:13.1f}"
        f"  {row['median_ratio']:5.3f}  ({low:.3f} to {high:.3f})"
      )
      if arguments.json:
        with open(arguments.json, "a") as file:
          file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
  main()
