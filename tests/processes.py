"""Short training runs that one process takes, or several joined together.

  python -m tests.processes NAME FOLDER ADDRESS COUNT INDEX

is process `INDEX` of `COUNT`, which meet at an address; each has two devices.
It runs `RUNS[NAME]` on each of `MESHES` and leaves what it trained in the
folder. `joined` starts them and reads that; `alone` runs the same on one device
of the calling process.
"""

import functools
import importlib
import os
import pathlib
import socket
import subprocess
import sys

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

import diffusion_objectives as do

ROOT = pathlib.Path(__file__).parents[1]
COUNT = 2
DEVICES = 2  # of each process
STEPS = 10

ROWS, LENGTH, WIDTH, IDS = 8, 6, 16, 24
BLOCKS = dict(token_block=4, vocabulary_block=8)

# By name: sizes of `fsdp` and `tp`, and whether `tp` is over the processes.
# Where it is, both have the same rows.
MESHES = {
  "fsdp over processes": (2, 2, False),
  "tp over processes": (2, 2, True),
  "fsdp alone": (4, 1, False),
}


def mesh_of(name):
  """A mesh of all devices, or of the first alone."""
  if name is None:
    grid = np.array(jax.devices()[:1]).reshape(1, 1)
  else:
    rows, columns, is_crossed = MESHES[name]
    grid = np.array(jax.devices()).reshape(rows, columns)
    grid = grid.T if is_crossed else grid
  return jax.sharding.Mesh(grid, ("fsdp", "tp"))


def own_rows(mesh, batch):
  """The rows of a batch that this process's devices have."""
  places = NamedSharding(mesh, P("fsdp")).addressable_devices_indices_map(
    (ROWS,)
  )
  own = np.zeros(ROWS, bool)
  for (place,) in places.values():
    own[place] = True
  return jax.tree.map(lambda x: x[own], batch)


def token_batch(seed):
  """Both halves have weights of their own size; at times one has none."""
  rng = np.random.default_rng(seed)
  shape = (ROWS, LENGTH)
  weights = rng.random(shape) * (rng.random(shape) < 0.4)
  weights[: ROWS // 2] *= 0.01
  if seed % 4 == 1:
    weights[ROWS // 2 :] = 0
  if seed % 4 == 3:
    weights[: ROWS // 2] = 0
  return do.DiffusionTokenBatch(
    model_inputs={"input_tokens": rng.integers(0, IDS, shape, dtype=np.int32)},
    target_ids=rng.integers(0, IDS, shape, dtype=np.int32),
    loss_weights=weights.astype(np.float32),
  )


def normal(seed, *shape):
  rng = np.random.default_rng(seed)
  return rng.standard_normal(shape).astype(np.float32)


def with_teacher(batch, seed):
  """The batch with a teacher's hidden states."""
  return do.DiffusionDistillationBatch(
    student_batch=batch,
    teacher=do.HiddenTeacher(hidden=normal(seed, ROWS, LENGTH, WIDTH)),
  )


# A step of one's own.


def plain(objective, mesh):
  """Ten steps of plain JAX; parameters and losses by name."""
  rows = NamedSharding(mesh, P("fsdp"))
  kernel = NamedSharding(mesh, P("fsdp", "tp"))
  columns = NamedSharding(mesh, P("tp"))
  params = {
    "embed": jax.device_put(normal(1, IDS, WIDTH), rows),
    "head": jax.device_put(0.5 * normal(2, WIDTH, IDS), kernel),
    "bias": jax.device_put(0.1 * normal(3, IDS), columns),
  }
  teacher_head = do.OutputHead(
    kernel=jax.device_put(normal(4, WIDTH, IDS), kernel)
  )
  is_distilled = objective == "distillation"
  optimizer = optax.adamw(1e-3) if is_distilled else optax.sgd(0.1)

  def loss(params, batch, teacher_head):
    tokens = batch.student_batch if is_distilled else batch
    hidden = jax.numpy.tanh(
      params["embed"][tokens.model_inputs["input_tokens"]]
    )
    head = do.OutputHead(kernel=params["head"], bias=params["bias"])
    if is_distilled:
      output = do.linear_prepared_opd_loss(
        hidden,
        head,
        batch,
        teacher_head=teacher_head,
        temperature=2.0,
        hard_loss_weight=0.5,
        **BLOCKS,
      )
    else:
      output = do.linear_weighted_cross_entropy_loss(
        hidden, head, batch, **BLOCKS
      )
    return output.primary_loss.compute()

  @jax.jit
  def step(params, state, batch, teacher_head):
    value, gradients = jax.value_and_grad(loss)(params, batch, teacher_head)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, value

  def on_all(batch):
    return jax.tree.map(
      functools.partial(jax.make_array_from_process_local_data, rows),
      own_rows(mesh, batch),
    )

  losses = []
  with jax.set_mesh(mesh):
    state = jax.jit(optimizer.init)(params)
    for index in range(STEPS):
      batch = token_batch(index)
      if is_distilled:
        batch = with_teacher(batch, 100 + index)
      params, state, value = step(params, state, on_all(batch), teacher_head)
      losses.append(float(value))
  return {**whole(params), "loss": np.array(losses)}


# A Tunix trainer.


def hooked(objective, mesh, module):
  """Ten steps of a Tunix trainer; parameters and logged values by name."""
  from flax import nnx

  from diffusion_objectives.trainers import tunix
  from tests.trainers import runs

  class Network(nnx.Module):
    def __init__(self, seed):
      def init(seed, *shape):
        return lambda *_: jax.numpy.asarray(0.5 * normal(seed, *shape))

      rngs = nnx.Rngs(0)
      self.embed = nnx.Embed(
        IDS, WIDTH, embedding_init=init(seed, IDS, WIDTH), rngs=rngs
      )
      self.head = nnx.Linear(
        WIDTH, IDS, kernel_init=init(seed + 1, WIDTH, IDS), rngs=rngs
      )

  def hidden_fn(model, model_inputs):
    hidden = jax.numpy.tanh(model.embed(model_inputs["input_tokens"]))
    return hidden, do.OutputHead(
      kernel=model.head.kernel[...], bias=model.head.bias[...]
    )

  def network(seed):
    def place(array):
      spec = P("fsdp", "tp") if array.ndim == 2 else P()
      return jax.device_put(array, NamedSharding(mesh, spec))

    model = Network(seed)
    nnx.update(model, jax.tree.map(place, nnx.state(model)))
    return model

  window = {"teacher module": 2, "teacher head": None}[objective]
  micro = [token_batch(index) for index in range(STEPS * (window or 1))]
  if objective == "teacher head":
    micro = [with_teacher(b, 100 + i) for i, b in enumerate(micro)]
    # As each process has it: on one device of its own.
    frozen = do.OutputHead(kernel=jax.numpy.asarray(normal(4, WIDTH, IDS)))
  runs.under_test.module = importlib.import_module(module)
  with mesh:
    if objective == "teacher module":
      frozen = network(4)
    trainer = runs.make_trainer(
      network(1), optax.adamw(1e-3), steps=window, max_steps=STEPS
    )
    tunix.configure_prepared_diffusion_opd(
      trainer,
      functools.partial(own_rows, mesh),
      hidden_fn=hidden_fn,
      frozen=frozen,
      temperature=2.0,
      hard_loss_weight=0.5,
    )
    trainer.train(micro, micro[:3])
    assert trainer.train_steps == STEPS
  params = nnx.to_pure_dict(nnx.state(trainer.model, nnx.Param))
  return {
    **whole(params),
    **{
      f"{name} of {mode}": runs.history(trainer, name, mode)
      for mode in ("train", "eval")
      for name in ("loss", "distill/soft_loss")
    },
    "grad_norm": runs.history(trainer, "grad_norm"),
  }


RUNS = {
  "plain": (plain, ("cross entropy", "distillation")),
  "hooked": (hooked, ("teacher module", "teacher head")),
}


def whole(tree):
  """By name, arrays of which this process may have parts alone."""
  from jax.experimental import multihost_utils

  def fetch(array):
    if array.is_fully_addressable:
      return np.asarray(array)
    return multihost_utils.process_allgather(array, tiled=True)

  return {
    jax.tree_util.keystr(path): np.asarray(fetch(leaf))
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


# Starting them.


def alone(name, **options):
  """By objective, what one device of this process trains."""
  run, objectives = RUNS[name]
  mesh = mesh_of(None)
  return {key: run(key, mesh, **options) for key in objectives}


def joined(name, folder, *options, timeout=480):
  """By mesh, objective and process, what several processes train."""
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    address = f"localhost:{probe.getsockname()[1]}"
  environment = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
    "PYTHONPATH": os.pathsep.join(
      [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    ),
  }
  logs = [pathlib.Path(folder, f"{index}.log") for index in range(COUNT)]
  started = []
  try:
    for index, log in enumerate(logs):
      arguments = [name, folder, address, COUNT, index, *options]
      with log.open("w") as output:
        started.append(
          subprocess.Popen(
            [sys.executable, "-m", "tests.processes", *map(str, arguments)],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
          )
        )
    try:
      codes = [process.wait(timeout) for process in started]
    except subprocess.TimeoutExpired:
      codes = [process.poll() for process in started]
  finally:
    for process in started:
      process.kill()
      process.wait()
  said = "".join(
    f"\nprocess {index}, exit status {code}:\n{log.read_text()[-6000:]}"
    for index, (code, log) in enumerate(zip(codes, logs, strict=True))
  )
  assert codes == [0] * COUNT, said
  return {
    (mesh, objective, index): dict(
      np.load(pathlib.Path(folder, file_name(mesh, objective, index)))
    )
    for mesh in MESHES
    for objective in RUNS[name][1]
    for index in range(COUNT)
  }


def assert_same(case, found, expected, *, names=("loss", "grad_norm")):
  """Parameters to rounding, and what is logged."""
  assert found.keys() == expected.keys()
  logged = {key for key in found if key.startswith(names)}
  difference = max(
    float(np.max(np.abs(found[key] - expected[key])))
    for key in found.keys() - logged
  )
  print(f"{case}: {difference:.1e}")
  assert difference <= 2e-6, case
  for key in logged:
    np.testing.assert_allclose(
      found[key], expected[key], rtol=2e-6, err_msg=f"{case}, {key}"
    )


def file_name(mesh, objective, index):
  return f"{mesh}, {objective}, {index}.npz"


def main(name, folder, address, count, index, *options):
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.distributed.initialize(address, int(count), int(index))
  assert jax.device_count() == COUNT * DEVICES
  run, objectives = RUNS[name]
  for mesh in MESHES:
    for objective in objectives:
      found = run(objective, mesh_of(mesh), *options)
      path = pathlib.Path(folder, file_name(mesh, objective, index))
      np.savez(path, **found)


if __name__ == "__main__":
  main(*sys.argv[1:])
