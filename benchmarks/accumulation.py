"""What does an accumulated step cost, in time and in memory?

The same rows make one optimizer step as one big batch, accumulated over
micro-batches, and through `optax.MultiSteps` (whose mean of means is another
gradient), in alternating rounds of one process. Medians over rounds; memory is
what the compiled step needs beside its arguments and results.

  python -m benchmarks.accumulation --help
"""

import argparse
import functools
import json
import platform
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import diffusion_objectives as do
from diffusion_objectives.trainers import accumulate

VOCABULARY = 260
LAYERS = 4


def make_params(width):
  keys = jax.random.split(jax.random.key(0), LAYERS + 2)
  shapes = [(VOCABULARY, width), *[(width, width)] * LAYERS]
  shapes.append((width, VOCABULARY))
  return [
    jax.random.normal(key, shape) / np.sqrt(shape[0])
    for key, shape in zip(keys, shapes, strict=True)
  ]


def make_batch(rows, length):
  rng = np.random.default_rng(0)
  ids = rng.integers(0, VOCABULARY, (rows, length), dtype=np.int32)
  return do.DiffusionTokenBatch(
    model_inputs=ids,
    target_ids=ids,
    loss_weights=rng.random((rows, length), np.float32),
  )


def loss(params, batch):
  embed, *hidden, head = params
  x = embed[batch.model_inputs]
  for layer in hidden:
    x = x + jnp.tanh(x @ layer)
  return do.weighted_cross_entropy_loss(x @ head, batch)


def mean_gradients(params, batch):
  return jax.grad(lambda p: loss(p, batch).primary_loss.compute())(params)


def make_step(gradients_of, optimizer):
  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, state, batch):
    gradients = gradients_of(params, batch)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  return step


def measure(steps, rounds, width, rows, length):
  batch = make_batch(steps * rows, length)
  micro_batches = accumulate.split(batch, steps)
  parts = [
    jax.tree.map(lambda leaf, k=k: leaf[k], micro_batches) for k in range(steps)
  ]
  adamw = optax.adamw(1e-4)
  multi = optax.MultiSteps(adamw, steps)

  def accumulated(params, micro_batches):
    return accumulate.value_and_grad(loss)(params, micro_batches)[1]

  runs = {  # the compiled step, its optimizer, its arguments in turn
    "big": (make_step(mean_gradients, adamw), adamw, [batch]),
    "accumulated": (make_step(accumulated, adamw), adamw, [micro_batches]),
    "multi": (make_step(mean_gradients, multi), multi, parts),
  }
  compiled, carried, temporary = {}, {}, {}
  for name, (step, optimizer, arguments) in runs.items():
    params = make_params(width)
    carried[name] = (params, optimizer.init(params))
    compiled[name] = step.lower(*carried[name], arguments[0]).compile()
    memory = compiled[name].memory_analysis()
    temporary[name] = memory.temp_size_in_bytes
  times = {name: [] for name in runs}
  for index in range(rounds + 2):
    order = list(runs)
    for name in order if index % 2 else order[::-1]:
      start = time.perf_counter()
      for argument in runs[name][2]:
        carried[name] = compiled[name](*carried[name], argument)
      jax.block_until_ready(carried[name])
      if index >= 2:  # the first rounds warm up
        times[name].append(time.perf_counter() - start)
  seconds = {name: np.array(values) for name, values in times.items()}
  return {
    "steps": steps,
    "parameters": sum(p.size for p in make_params(width)),
    "ms": {n: 1e3 * float(np.median(s)) for n, s in seconds.items()},
    "accumulated_to": {
      name: [
        float(q)
        for q in np.quantile(
          seconds["accumulated"] / seconds[name], (0.5, 0.25, 0.75)
        )
      ]
      for name in ("big", "multi")
    },
    "temporary_mib": {n: size / 2**20 for n, size in temporary.items()},
  }


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--rounds", type=int, default=25)
  parser.add_argument("--width", type=int, default=512)
  parser.add_argument("--rows", type=int, default=8, help="of a micro-batch")
  parser.add_argument("--length", type=int, default=64)
  parser.add_argument("--json", help="append the rows to this file")
  arguments = parser.parse_args()
  print(f"jax {jax.__version__}, {platform.machine()}, {jax.devices()[0]}")
  print("steps     big  accumulated   multi, ms;  to big, to multi;  MiB")
  for steps in (1, 2, 4, 8):
    row = measure(
      steps,
      arguments.rounds,
      arguments.width,
      arguments.rows,
      arguments.length,
    )
    ms, ratio, mib = row["ms"], row["accumulated_to"], row["temporary_mib"]
    print(
      f"{steps:5}  {ms['big']:6.1f}  {ms['accumulated']:11.1f}"
      f"  {ms['multi']:6.1f}     "
      + " ".join(
        "{:.2f} ({:.2f} to {:.2f})".format(*ratio[name]) for name in ratio
      )
      + "  "
      + " ".join(f"{name} {size:.1f}" for name, size in mib.items())
    )
    if arguments.json:
      with open(arguments.json, "a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
  main()
