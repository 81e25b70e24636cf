"""What the benchmarks of the linear-vocabulary losses share.

Sizes and their arrays, the losses in each form, the matrix products under them
in each layout, clocks, and rows. Every form maps
`(hidden, kernel, batch, teacher_kernel)` to a mean loss and its metrics.
"""

import argparse
from collections.abc import Callable
from collections.abc import Iterable
import contextlib
import dataclasses
import datetime
import functools
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import resource
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import diffusion_objectives as do

KINDS = ("ce", "kl_dense", "kl_hidden", "kl_top_k", "opd")
DTYPES = ("float32", "bfloat16")
HAS_TEACHER_HEAD = ("kl_hidden", "opd")
TOP_K = 64
HARD = 0.5  # the hard term's coefficient in "opd"
BLOCK = 256  # tokens in a block of the floor
SIZE_NAMES = ["kind", "dtype", "N", "D", "V"]
SIZE_FIELDS = ("kind", "dtype", "tokens", "features", "vocabulary")
WARM_UP = 2  # rounds that are not counted
PAUSE = 0.2  # seconds before a run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
  """One measurement's loss and sizes."""

  kind: str
  tokens: int
  features: int
  vocabulary: int
  dtype: str

  @property
  def is_low(self) -> bool:
    return jnp.dtype(self.dtype).itemsize < 4

  def fields(self) -> dict[str, Any]:
    return dataclasses.asdict(self)


# Arrays.


def make_arrays(size: Size, seed: int = 0):
  """`(hidden, kernel, batch, teacher_kernel)`, all weights 1.

  Traceable, so that `jax.eval_shape` gives the shapes without the memory.
  """
  rows = math.gcd(size.tokens, 8)
  length = size.tokens // rows
  keys = jax.random.split(jax.random.key(seed), 6)

  def normal(key, shape, scale=1.0):
    return (scale * jax.random.normal(key, shape)).astype(size.dtype)

  def make_kernel(key):
    shape = (size.features, size.vocabulary)
    return normal(key, shape, size.features**-0.5)

  ids = jax.random.randint(keys[0], (rows, length), 0, size.vocabulary)
  batch = do.DiffusionTokenBatch(
    model_inputs=ids,
    target_ids=ids,
    loss_weights=jnp.ones((rows, length), jnp.float32),
  )
  hidden = normal(keys[1], (rows, length, size.features))
  kernel = make_kernel(keys[2])
  if size.kind == "ce":
    return hidden, kernel, batch, None
  teacher_kernel = None
  if size.kind in HAS_TEACHER_HEAD:
    teacher = do.HiddenTeacher(
      hidden=normal(keys[3], (rows, length, size.features))
    )
    teacher_kernel = make_kernel(keys[4])
  elif size.kind == "kl_dense":
    teacher = do.DenseTeacher(
      logits=normal(keys[3], (rows, length, size.vocabulary))
    )
  else:
    k = min(TOP_K, size.vocabulary)
    start = jax.random.randint(keys[3], (rows, length, 1), 0, size.vocabulary)
    step = size.vocabulary // k
    listed = jax.random.normal(keys[4], (rows, length, k + 1))
    teacher = do.TopKTeacher(
      token_ids=(start + step * jnp.arange(k)) % size.vocabulary,
      log_probs=jax.nn.log_softmax(listed)[..., :k],  # the last is the tail
      temperature=1.0,
    )
  distillation = do.DiffusionDistillationBatch(
    student_batch=batch, teacher=teacher
  )
  return hidden, kernel, distillation, teacher_kernel


def shapes(size: Size):
  return jax.eval_shape(functools.partial(make_arrays, size))


def arrays(size: Size, seed: int = 0):
  return jax.block_until_ready(
    jax.jit(make_arrays, static_argnums=(0, 1))(size, seed)
  )


# Losses.


def _computed(output):
  metrics = {name: m.compute() for name, m in output.aux_metrics.items()}
  return output.primary_loss.compute(), metrics


def ours(size: Size, **options) -> Callable:
  """The linear loss; `options` are its block sizes and implementation."""

  def loss(hidden, kernel, batch, teacher_kernel):
    head = do.OutputHead(kernel=kernel)
    if size.kind == "ce":
      return _computed(
        do.linear_weighted_cross_entropy_loss(hidden, head, batch, **options)
      )
    given = dict(options)
    if teacher_kernel is not None:
      given["teacher_head"] = do.OutputHead(kernel=teacher_kernel)
    if size.kind == "opd":
      return _computed(
        do.linear_prepared_opd_loss(
          hidden, head, batch, hard_loss_weight=HARD, **given
        )
      )
    return _computed(do.linear_forward_kl_loss(hidden, head, batch, **given))

  return loss


def _with_dense_teacher(batch, teacher_kernel):
  if teacher_kernel is None:
    return batch
  logits = do.OutputHead(kernel=teacher_kernel).logits(batch.teacher.hidden)
  return dataclasses.replace(batch, teacher=do.DenseTeacher(logits=logits))


def dense(size: Size) -> Callable:
  """The library's loss on the whole logits."""

  def loss(hidden, kernel, batch, teacher_kernel):
    logits = do.OutputHead(kernel=kernel).logits(hidden)
    if size.kind == "ce":
      return _computed(do.weighted_cross_entropy_loss(logits, batch))
    batch = _with_dense_teacher(batch, teacher_kernel)
    if size.kind == "opd":
      return _computed(
        do.prepared_opd_loss(logits, batch, hard_loss_weight=HARD)
      )
    return _computed(do.forward_kl_loss(logits, batch))

  return loss


def _product(hidden, kernel):
  return jnp.matmul(hidden, kernel, preferred_element_type=jnp.float32)


def _teacher_logits(batch, teacher_kernel):
  if teacher_kernel is None:
    return batch.teacher.logits.astype(jnp.float32)
  return _product(batch.teacher.hidden, teacher_kernel)


def plain(size: Size) -> Callable:
  """Log-softmax by hand: a mean, without weights, checks or metrics."""

  def cross_entropy(log_q, ids):
    return -jnp.mean(jnp.take_along_axis(log_q, ids[..., None], axis=-1))

  def loss(hidden, kernel, batch, teacher_kernel):
    log_q = jax.nn.log_softmax(_product(hidden, kernel))
    if size.kind == "ce":
      return cross_entropy(log_q, batch.target_ids), {}
    if size.kind == "kl_top_k":
      log_p = batch.teacher.log_probs
      listed = jnp.take_along_axis(log_q, batch.teacher.token_ids, axis=-1)
      p_tail = 1 - jnp.sum(jnp.exp(log_p), axis=-1)
      q_tail = 1 - jnp.sum(jnp.exp(listed), axis=-1)
      kl = jnp.sum(jnp.exp(log_p) * (log_p - listed), axis=-1)
      return jnp.mean(kl + p_tail * jnp.log(p_tail / q_tail)), {}
    log_p = jax.nn.log_softmax(_teacher_logits(batch, teacher_kernel))
    kl = jnp.mean(jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1))
    if size.kind == "opd":
      kl += HARD * cross_entropy(log_q, batch.student_batch.target_ids)
    return kl, {}

  return loss


def with_optax(size: Size) -> Callable | None:
  """Optax's losses as a mean; it has none for a top-k teacher."""
  if size.kind == "kl_top_k":
    return None

  def cross_entropy(logits, ids):
    return jnp.mean(
      optax.losses.softmax_cross_entropy_with_integer_labels(logits, ids)
    )

  def loss(hidden, kernel, batch, teacher_kernel):
    logits = _product(hidden, kernel)
    if size.kind == "ce":
      return cross_entropy(logits, batch.target_ids), {}
    kl = jnp.mean(
      optax.losses.kl_divergence_with_log_targets(
        jax.nn.log_softmax(logits),
        jax.nn.log_softmax(_teacher_logits(batch, teacher_kernel)),
      )
    )
    if size.kind == "opd":
      kl += HARD * cross_entropy(logits, batch.student_batch.target_ids)
    return kl, {}

  return loss


@functools.cache
def _tokamax():
  """The function and an implementation's name, or why there is none."""
  try:
    from absl import flags
    import tokamax
  except ImportError as error:
    return None, f"tokamax is left out: {error}"
  flags.FLAGS.mark_as_parsed()  # they would be read from this script's
  version = importlib.metadata.version("tokamax")
  function = tokamax.linear_softmax_cross_entropy_loss
  for name in ("chunked_xla", "xla"):
    try:
      jax.eval_shape(
        functools.partial(function, implementation=name),
        jax.ShapeDtypeStruct((1024, 128), jnp.float32),
        jax.ShapeDtypeStruct((1024,), jnp.int32),
        jax.ShapeDtypeStruct((128, 2048), jnp.float32),
      )
    except ValueError:  # a name that this version does not know
      continue
    return (function, name), f"tokamax {version}, implementation {name!r}"
  return None, f"tokamax {version} is left out: it has no XLA implementation"


def with_tokamax(size: Size) -> Callable | None:
  """Tokamax's linear cross entropy as a mean; it has no other loss."""
  if size.kind != "ce" or size.vocabulary % 2048:
    return None
  found, why = _tokamax()
  if found is None:
    say(why)
    return None
  function, name = found
  say(why)

  def loss(hidden, kernel, batch, teacher_kernel):
    value = function(
      hidden.reshape(-1, hidden.shape[-1]),
      batch.target_ids.ravel(),
      kernel,
      reduction="mean",
      implementation=name,
    )
    return value, {}

  return loss


FORMS = {
  "ours": ours,
  "dense": dense,
  "plain": plain,
  "optax": with_optax,
  "tokamax": with_tokamax,
}


def with_gradients(loss: Callable) -> Callable:
  return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)


def compile_for(function: Callable, *operands):
  return jax.jit(function).lower(*operands).compile()


def compile_at(function: Callable, size: Size):
  """Compiled without an array being made."""
  return compile_for(function, *shapes(size))


def held_bytes(compiled) -> int:
  """What a run takes beside its arguments: temporaries and results."""
  memory = compiled.memory_analysis()
  return memory.temp_size_in_bytes + memory.output_size_in_bytes


# Memory of a process.


def reset_peak() -> None:
  """Lowers the process's peak to what is resident now, where it can be."""
  with contextlib.suppress(OSError):
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
  """The largest resident memory since the start or `reset_peak`."""
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak if sys.platform == "darwin" else 1024 * peak


def in_fresh_process(module: str, request: dict[str, Any]) -> dict[str, Any]:
  """What `python -m module --child request` prints last."""
  done = subprocess.run(
    [sys.executable, "-m", module, "--child", json.dumps(request)],
    stdout=subprocess.PIPE,
    text=True,
    check=True,
  )
  return json.loads(done.stdout.splitlines()[-1])


# The floor: the matrix products alone.


def _contract(left, right, axes):
  """Over one axis of each; sums in float32."""
  dimensions = (((axes[0],), (axes[1],)), ((), ()))
  return jax.lax.dot_general(
    left, right, dimensions, preferred_element_type=jnp.float32
  )


def _plain_product(left, right, axes, flips):
  return _contract(left, right, axes)


def _swapped(left, right, axes, flips):
  """The transposed result."""
  return _contract(right, left, axes[::-1])


def _materialised(left, right, axes, flips):
  """One operand is transposed in memory first, within the time."""
  operands, axes = [left, right], list(axes)
  operands[flips] = jax.lax.optimization_barrier(operands[flips].T)
  axes[flips] = 1 - axes[flips]
  return _contract(*operands, axes)


LAYOUTS = {
  "plain": _plain_product,
  "swapped": _swapped,
  "materialised": _materialised,
}


@dataclasses.dataclass(frozen=True)
class Product:
  """One product of the loss or of its gradient.

  Attributes:
    axes: that are summed, of the left and of the right operand.
    flips: the operand that may be stored the other way.
    over: what the tokens are in blocks: "rows" of the left operand, whose
      results are kept for each block ("rows kept") or not, or what is summed.
  """

  axes: tuple[int, int]
  flips: int
  over: str


PRODUCTS = {
  "logits": Product((1, 0), 1, "rows"),  # hidden kernel
  "dx": Product((1, 1), 1, "rows kept"),  # slope kernel^T
  "dw": Product((0, 0), 0, "sum"),  # hidden^T slope
}


def _in_blocks(product: Product, contract: Callable, count: int) -> Callable:
  """The product over `count` blocks of tokens, one after the other.

  A tile of logits, or of slopes, is used up before the next one: logits are
  overwritten, slopes are read from one tile again and again. Each block depends
  on the one before, or the compiler would do the work once.
  """

  def run(left, right):
    is_slope_left = product.over == "rows kept"
    # The rows of a block, whichever way they are stored.
    axis = 1 - product.axes[0] if product.over == "rows" else product.axes[0]

    def rows(i):
      return jax.lax.dynamic_slice_in_dim(left, i * BLOCK, BLOCK, axis)

    if is_slope_left:

      def body(i, carry):
        slopes, out = carry
        part = contract(slopes, right)
        return slopes.at[0, 0].set(part[0, 0].astype(slopes.dtype)), (
          jax.lax.dynamic_update_index_in_dim(out, part, i, 0)
        )

      part = jax.eval_shape(contract, left, right)
      out = jnp.zeros((count, *part.shape), part.dtype)
      return jax.lax.fori_loop(0, count, body, (left, out))[1]

    part = jax.eval_shape(lambda: contract(rows(0), right))
    keeps = product.over == "sum"

    def body(i, carry):
      part = contract(rows(i), right)
      return carry + part if keeps else part

    return jax.lax.fori_loop(0, count, body, jnp.zeros(part.shape, part.dtype))

  return run


def product_forms(name: str, size: Size, limit: int):
  """Every form of one product, compiled, with its operands.

  Whole and in blocks of tokens, each in several layouts; below float32 also on
  operands that are converted to it first. Whole ones are left out where the
  logits take more than a quarter of `limit` bytes: several are held at a time.
  """
  product = PRODUCTS[name]
  keys = jax.random.split(jax.random.key(0), 3)

  def normal(key, *shape):
    return jax.random.normal(key, shape).astype(size.dtype)

  hidden = normal(keys[0], size.tokens, size.features)
  kernel = normal(keys[1], size.features, size.vocabulary)
  makes_whole = 4 * size.tokens * size.vocabulary <= limit // 4
  if not makes_whole:
    say(f"the floor is in blocks alone at {size.tokens} x {size.vocabulary}")
  count, rest = divmod(size.tokens, BLOCK)
  for is_whole in (True, False):
    if not (makes_whole if is_whole else count and not rest):
      continue
    rows = size.tokens if is_whole else BLOCK
    if name == "logits":
      operands = [hidden, kernel]
    else:
      slopes = normal(keys[2], rows, size.vocabulary)
      operands = [slopes, kernel] if name == "dx" else [hidden, slopes]
    flipped = list(operands)
    flipped[product.flips] = jnp.asarray(flipped[product.flips].T, copy=True)
    flipped_axes = list(product.axes)
    flipped_axes[product.flips] = 1 - flipped_axes[product.flips]
    for layout in (*LAYOUTS, "transposed"):
      stored = flipped if layout == "transposed" else operands
      axes = tuple(flipped_axes) if layout == "transposed" else product.axes
      function = LAYOUTS.get(layout, _plain_product)
      for converts in (False, True)[: 1 + size.is_low]:

        def contract(
          left, right, function=function, axes=axes, converts=converts
        ):
          if converts:
            left, right = (x.astype(jnp.float32) for x in (left, right))
          return function(left, right, axes, product.flips)

        run = contract
        if not is_whole:
          in_place = dataclasses.replace(product, axes=axes)
          run = _in_blocks(in_place, contract, count)
        label = f"{'whole' if is_whole else 'blocks'}, {layout}"
        if converts:
          label += ", in float32"
        yield label, functools.partial(compile_for(run, *stored), *stored)


@functools.lru_cache(maxsize=1)  # one trial for all losses of a size
def _candidates(size: Size, limit: int, keep: int = 2):
  """The fastest forms of each product, from one short trial of all."""
  found = {}
  for name in PRODUCTS:
    forms = dict(product_forms(name, size, limit))
    if not forms:
      raise ValueError(
        f"tokens must be a multiple of {BLOCK}, or whole logits within the"
        f" limit; received {size}"
      )
    seconds = in_rounds(forms, 2, warm_up=1)
    best = sorted(forms, key=lambda label: seconds[label][:, 0].min())[:keep]
    for label in best:
      found[name, label] = forms[label]
  return found


def floor_candidates(size: Size, limit: int):
  """The fastest forms of each product, whatever the loss."""
  return _candidates(dataclasses.replace(size, kind="ce"), limit)


def products_of(size: Size, has_gradients: bool = True) -> dict[str, int]:
  """How often each product occurs."""
  counts = {"logits": 1 + (size.kind in HAS_TEACHER_HEAD)}
  return counts | {"dx": 1, "dw": 1} if has_gradients else counts


# Clocks.


def in_rounds(
  runs: dict[Any, Callable[[], Any]], count: int, warm_up: int = WARM_UP
) -> dict[Any, np.ndarray]:
  """`[count, 2]` seconds of each run, of the process's CPU and of the wall.

  Rounds go through the runs forwards and backwards in turn.
  """
  seconds: dict[Any, list] = {name: [] for name in runs}
  for index in range(warm_up + count):
    order = list(runs)
    for name in order if index % 2 else order[::-1]:
      time.sleep(PAUSE)
      wall, cpu = time.perf_counter(), time.process_time()
      jax.block_until_ready(runs[name]())
      cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
      if index >= warm_up:
        seconds[name].append((cpu, wall))
  return {name: np.array(pairs) for name, pairs in seconds.items()}


def _spread(values: list[float]) -> float | None:
  if not values:
    return None
  return (max(values) - min(values)) / abs(max(values))


def _quartiles(ratios: np.ndarray) -> list[float]:
  return [float(q) for q in np.quantile(ratios, (0.5, 0.25, 0.75))]


def measure(
  size: Size,
  *,
  forms: tuple[str, ...],
  values: tuple[str, ...] = (),
  rounds: int,
  limit: int,
  has_floor: bool = True,
  options: dict[str, Any] | None = None,
) -> dict[str, Any]:
  """Times of the forms, with gradients, of values alone, and of the floor.

  Args:
    size: what is measured.
    forms: names of `FORMS` to run with gradients.
    values: names of `FORMS` to run without.
    rounds: that count.
    limit: bytes; a form that takes more beside its arguments is not run.
    has_floor: whether the products are measured too.
    options: of our loss.

  Returns:
    `cpu_s` (medians) and `wall_s` (minima) by name, `to` (ours over each,
    median and quartiles of the rounds' ratios), `floor` where measured, and by
    how much the forms' losses differ, relatively.
  """
  operands = arrays(size)
  runs, left_out = {}, {}
  for name in (*forms, *(f"{name} value" for name in values)):
    form, _, is_value = name.partition(" ")
    given = (options or {}) if form == "ours" else {}
    loss = FORMS[form](size, **given)
    if loss is None:
      continue
    compiled = compile_at(loss if is_value else with_gradients(loss), size)
    held = held_bytes(compiled)
    if held > limit:
      left_out[name] = held
      say(
        f"{name} of {size.kind} is not run at {size.tokens} x"
        f" {size.vocabulary}: it takes {held / 2**20:,.0f} MiB"
      )
      continue
    runs[name] = functools.partial(compiled, *operands)
  losses = [float(jax.tree.leaves(run())[0]) for run in runs.values()]
  candidates = floor_candidates(size, limit) if has_floor else {}
  seconds = in_rounds({**runs, **candidates}, rounds)
  row = {
    **size.fields(),
    "rounds": rounds,
    "cpu_s": {n: float(np.median(seconds[n][:, 0])) for n in runs},
    "wall_s": {n: float(seconds[n][:, 1].min()) for n in runs},
    "left_out_bytes": left_out,
    "losses_differ_by": _spread(losses),
  }
  references = {name: seconds[name][:, 0] for name in runs}
  if has_floor:
    row["floor"], floors = _floor(size, candidates, seconds)
    references |= floors
  row["to"] = {}
  for name, reference in references.items():
    mine = "ours value" if name.endswith(" value") else "ours"
    if mine in runs and name != mine:
      row["to"][name] = _quartiles(references[mine] / reference)
  return row


def _floor(size, candidates, seconds):
  """The floor's figures, and its seconds by round."""
  best = {}
  for product in PRODUCTS:
    labels = [label for name, label in candidates if name == product]
    best[product] = min(
      labels, key=lambda label: np.median(seconds[product, label][:, 0])
    )
  flop = 2 * size.tokens * size.features * size.vocabulary
  by_product = {name: seconds[name, label] for name, label in best.items()}
  figures: dict[str, Any] = {
    "products": {
      name: {
        "form": best[name],
        "cpu_s": float(np.median(by_product[name][:, 0])),
        "wall_s": float(by_product[name][:, 1].min()),
        "gflop_per_cpu_s": flop
        / 1e9
        / float(np.median(by_product[name][:, 0])),
      }
      for name in best
    }
  }
  floors = {}
  for label, has_gradients in (("floor", True), ("floor value", False)):
    counts = products_of(size, has_gradients)
    total = sum(n * by_product[name][:, 0] for name, n in counts.items())
    floors[label] = total
    cpu = float(np.median(total))
    figures[label] = {
      "cpu_s": cpu,
      "wall_s": float(
        sum(n * by_product[name][:, 1].min() for name, n in counts.items())
      ),
      "gflop_per_cpu_s": sum(counts.values()) * flop / 1e9 / cpu,
    }
  return figures, floors


# Rows, tables and arguments.


@functools.cache
def say(text: str) -> None:
  """Prints a remark once."""
  print(f"({text})", flush=True)


def processor() -> str:
  path = pathlib.Path("/proc/cpuinfo")
  if path.exists():
    for line in path.read_text().splitlines():
      if line.startswith("model name"):
        return line.partition(":")[2].strip()
  return platform.processor() or platform.machine()


def load_average() -> list[float]:
  return [round(load, 2) for load in os.getloadavg()]


def emit(row: dict[str, Any], path: str | None) -> dict[str, Any]:
  """Prints a row as one line of JSON, and appends it to a file."""
  row = {
    "benchmark": pathlib.Path(sys.argv[0]).stem,
    **row,
    "processor": processor(),
    "cores": os.cpu_count(),
    "device": str(jax.devices()[0]),
    "jax": jax.__version__,
    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    "load_average": load_average(),
    "malloc": os.environ.get("GLIBC_TUNABLES"),
  }
  line = json.dumps(row)
  print(line, flush=True)
  if path:
    with open(path, "a") as file:
      file.write(line + "\n")
  return row


def print_table(title: str, names: list[str], rows: list[list[Any]]) -> None:
  """A table that reads in a terminal and as Markdown."""
  cells = [names, *[[_cell(value) for value in row] for row in rows]]
  widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
  cells.insert(1, ["-" * width for width in widths])
  print(f"\n{title}\n")
  for line in cells:
    padded = [c.ljust(w) for c, w in zip(line, widths, strict=True)]
    print(f"| {' | '.join(padded)} |")
  print(flush=True)


def _cell(value: Any) -> str:
  if value is None:
    return "-"
  if isinstance(value, float):
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
  return f"{value:,}" if isinstance(value, int) else str(value)


def mib(size: float | None) -> float | None:
  return None if size is None else size / 2**20


def print_hardware() -> None:
  print(
    f"jax {jax.__version__}, {processor()}, {os.cpu_count()} cores,"
    f" {jax.devices()[0]}, load average {load_average()}",
    flush=True,
  )


def triple(text: str) -> tuple[int, int, int]:
  """`N,D,V` from the command line."""
  numbers = tuple(int(part) for part in text.split(","))
  if len(numbers) != 3 or min(numbers) < 1:
    raise argparse.ArgumentTypeError(
      f"a size must be three positive numbers N,D,V; received {text!r}"
    )
  return numbers


def size_columns(row: dict[str, Any]) -> list[Any]:
  return [row[name] for name in SIZE_FIELDS]


def quartiles(values: list[float] | None) -> str | None:
  if values is None:
    return None
  return "{:.2f} ({:.2f} to {:.2f})".format(*values)


def make_parser(description: str) -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(description=description.splitlines()[0])
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument(
    "--limit-gib",
    type=float,
    default=6.0,
    help="what takes more beside its arguments is not run",
  )
  parser.add_argument("--quick", action="store_true", help="tiny sizes")
  parser.add_argument("--json", help="append the rows to this file")
  return parser


def add_sizes(
  parser: argparse.ArgumentParser,
  kinds: tuple[str, ...] = KINDS,
  dtypes: tuple[str, ...] = DTYPES,
) -> None:
  parser.add_argument("--kinds", nargs="+", choices=KINDS, default=kinds)
  parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=dtypes)
  parser.add_argument(
    "--sizes",
    nargs="+",
    type=triple,
    metavar="N,D,V",
    help="tokens, features, vocabulary",
  )


def each_size(
  kinds: Iterable[str],
  dtypes: Iterable[str],
  sizes: Iterable[tuple[int, int, int]],
) -> list[Size]:
  """Every combination; the kinds of one size and dtype share a floor."""
  return [
    Size(
      kind=kind,
      tokens=tokens,
      features=features,
      vocabulary=vocabulary,
      dtype=dtype,
    )
    for tokens, features, vocabulary in sizes
    for dtype in dtypes
    for kind in kinds
  ]


def limit_of(arguments: argparse.Namespace) -> int:
  return int(arguments.limit_gib * 2**30)
