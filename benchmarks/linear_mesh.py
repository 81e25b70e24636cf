"""What does each device of a mesh do and send?

Value and gradients of the losses from hidden states, and of the dense ones, on
eight virtual devices: operations of matrix products over a device's share of
them, bytes sent by kind of collective, the largest array that one returns, all
read from the compiled program (`_programs`); and how far values and gradients
are from those of one device. Weights are 1, so that every block is run.

The dense form gets the same shardings of operands and results, and the compiler
decides what is sent. Bytes of both are those of a CPU's program: it sums in
float32 whatever the operands are.

  python -m benchmarks.linear_mesh --help
"""

import dataclasses
import math

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from benchmarks import _linear
from benchmarks import _programs

DEVICES = 8
TOKEN_BLOCK = 64
# By name: sizes of the axes, where `[batch, length]` and the head
# `[features, vocabulary]` lie.
MESHES = {
  "data": ({"data": 8}, P("data"), P()),
  "fsdp": ({"fsdp": 8}, P("fsdp"), P("fsdp")),
  "tensor": ({"tp": 8}, P(), P(None, "tp")),
  "fsdp x tensor": ({"fsdp": 4, "tp": 2}, P("fsdp"), P("fsdp", "tp")),
  "sequence": ({"sequence": 8}, P(None, "sequence"), P()),
}
FORMS = ("ours", "dense")


@dataclasses.dataclass(frozen=True)
class Layout:
  """A mesh, and where tokens and head lie on it."""

  mesh: jax.sharding.Mesh
  tokens: P
  head: P

  @property
  def parts_of_tokens(self) -> int:
    return math.prod(self.mesh.shape[a] for a in self.tokens if a is not None)

  def at(self, *axes) -> NamedSharding:
    return NamedSharding(self.mesh, P(*axes))

  def of(self, size, operands):
    """Where the operands of a loss lie."""
    hidden, _, batch, teacher_kernel = operands
    rows = self.at(*self.tokens)

    def of_batch(array):
      is_wide = array.ndim == 3 and array.shape[-1] == size.vocabulary
      if not is_wide:
        return rows
      batch, length = (*self.tokens, None, None)[:2]
      return self.at(batch, length, (*self.head, None, None)[1])

    head = self.at(*self.head)
    return (
      jax.tree.map(lambda _: rows, hidden),
      head,
      jax.tree.map(of_batch, batch),
      None if teacher_kernel is None else head,
    )


def layout(sizes: dict[str, int], tokens: P, head: P) -> Layout:
  mesh = jax.make_mesh(
    tuple(sizes.values()),
    tuple(sizes),
    axis_types=(jax.sharding.AxisType.Auto,) * len(sizes),
    devices=jax.devices()[: math.prod(sizes.values())],
  )
  return Layout(mesh, tokens, head)


def compile_on(place: Layout, form: str, size: _linear.Size):
  """Value and gradients, which lie as the operands do."""
  options = {"token_block": TOKEN_BLOCK} if form == "ours" else {}
  function = _linear.with_gradients(_linear.FORMS[form](size, **options))
  operands = _linear.shapes(size)
  shardings = place.of(size, operands)
  results = ((place.at(), place.at()), shardings[:2])
  with jax.set_mesh(place.mesh):
    jitted = jax.jit(function, in_shardings=shardings, out_shardings=results)
    return jitted.lower(*operands).compile()


def ideal(size: _linear.Size, devices: int) -> float:
  """A device's share of the operations of all products."""
  product = 2 * size.tokens * size.features * size.vocabulary
  return sum(_linear.products_of(size).values()) * product / devices


def counts_of(place: Layout, form: str, size: _linear.Size) -> _programs.Counts:
  """Of the compiled program: the loop over blocks of tokens runs for each."""
  blocks = size.tokens // place.parts_of_tokens // TOKEN_BLOCK
  text = compile_on(place, form, size).as_text()
  return _programs.count(text, dynamic_trips=blocks)


def describe(size, counts: _programs.Counts, devices: int):
  head = 4 * size.features * size.vocabulary
  return {
    "flop_to_ideal": counts.flop / ideal(size, devices),
    "sent_bytes": counts.sent,
    "sent_heads": counts.total_sent / head,
    "collectives": counts.collectives,
    "largest": counts.largest,
    "largest_to_logits": counts.largest
    / (size.tokens * size.vocabulary / devices),
  }


def distance(found, expected) -> float:
  """The relative L2 distance, of the worst array."""
  return max(
    float(np.linalg.norm(np.subtract(f, e)) / np.linalg.norm(e))
    for f, e in zip(
      jax.tree.leaves(jax.tree.map(_wide, found)),
      jax.tree.leaves(jax.tree.map(_wide, expected)),
      strict=True,
    )
  )


def _wide(array) -> np.ndarray:
  return np.asarray(array, np.float64)


def measure(name: str, size: _linear.Size):
  place = layout(*MESHES[name])
  operands = _linear.arrays(size)
  single = _linear.with_gradients(_linear.ours(size, token_block=TOKEN_BLOCK))
  (value, _), gradients = jax.jit(single)(*operands)
  for form in FORMS:
    counts = counts_of(place, form, size)
    row = {
      "mesh": name,
      **size.fields(),
      "form": form,
      **describe(size, counts, DEVICES),
      "value_apart": None,
      "gradients_apart": None,
    }
    if form == "ours":
      placed = jax.device_put(operands, place.of(size, operands))
      (found, _), of_mesh = compile_on(place, form, size)(*placed)
      row["value_apart"] = distance(found, value)
      row["gradients_apart"] = distance(of_mesh, gradients)
    yield row


def main():
  parser = _linear.make_parser(__doc__)
  _linear.add_sizes(parser, dtypes=("float32",))
  parser.add_argument("--meshes", nargs="+", choices=MESHES, default=[*MESHES])
  arguments = parser.parse_args()
  jax.config.update("jax_num_cpu_devices", DEVICES)
  sizes = arguments.sizes or (
    [(512, 64, 1024)] if arguments.quick else [(8192, 256, 8192)]
  )
  _linear.print_hardware()
  rows = []
  for size in _linear.each_size(arguments.kinds, arguments.dtypes, sizes):
    for name in arguments.meshes:
      for row in measure(name, size):
        rows.append(_linear.emit(row, arguments.json))
  _linear.print_table(
    "A device of eight: products to its share, what it sends, in heads of"
    " float32 and in MiB, the largest collective's elements to the logits that"
    " a device forms; from one device's value and gradients",
    [
      "mesh",
      *_linear.SIZE_NAMES,
      "form",
      "to ideal",
      "heads sent",
      "MiB by kind",
      "largest to logits",
      "value",
      "gradients",
    ],
    [
      [
        row["mesh"],
        *_linear.size_columns(row),
        row["form"],
        f"{row['flop_to_ideal']:.3f}",
        row["sent_heads"],
        by_kind(row["sent_bytes"]),
        row["largest_to_logits"],
        row["value_apart"],
        row["gradients_apart"],
      ]
      for row in rows
    ],
  )


def by_kind(sent: dict[str, float]) -> str:
  parts = [f"{kind} {size / 2**20:.3g}" for kind, size in sent.items()]
  return ", ".join(parts) or "nothing"


if __name__ == "__main__":
  main()
