"""What does each device do and send as devices are added?

The losses from hidden states on 1, 2, 4 and 8 virtual devices: a fixed problem,
and one whose tokens (over a tensor axis: whose vocabulary) grow with them.
Operations and bytes are counted in the compiled program, as in `linear_mesh`,
and stand beside the closed form of the bytes. By the same closed form, what a
chip of a large mesh would do and send.

  python -m benchmarks.linear_mesh_scaling --help
"""

import dataclasses

import jax

from benchmarks import _linear
from benchmarks import linear_mesh

P = linear_mesh.P
DEVICES = (1, 2, 4, 8)
# By name: the axes' sizes of `n` devices, and where tokens and head lie.
MESHES = {
  "data": (lambda n: {"data": n}, P("data"), P()),
  "fsdp": (lambda n: {"fsdp": n}, P("fsdp"), P("fsdp")),
  "tensor": (lambda n: {"tp": n}, P(), P(None, "tp")),
  "fsdp x tensor": (
    lambda n: {"fsdp": -(-n // 2), "tp": min(n, 2)},
    P("fsdp"),
    P("fsdp", "tp"),
  ),
  "sequence": (
    lambda n: {"sequence": n},
    P(None, "sequence"),
    P(),
  ),
}


# Numbers of a token that are summed over the axis of the vocabulary.
STATISTICS = {
  "ce": 4,
  "kl_dense": 10,
  "kl_hidden": 10,
  "kl_top_k": 4 + _linear.TOP_K,
  "opd": 11,
}


@dataclasses.dataclass(frozen=True)
class Split:
  """Over how many devices what is split: tokens over `replicas` and `fsdp`."""

  replicas: int = 1
  fsdp: int = 1
  tensor: int = 1

  @property
  def devices(self) -> int:
    return self.replicas * self.fsdp * self.tensor


def split_of(sizes: dict[str, int]) -> Split:
  return Split(
    sizes.get("data", 1) * sizes.get("sequence", 1),
    sizes.get("fsdp", 1),
    sizes.get("tp", 1),
  )


def closed_form(size: _linear.Size, split: Split, width: int = 4) -> float:
  """Bytes that a device sends, `width` of them an element of a head.

  By rings: gathering or scattering an array over `n` devices sends `(n - 1) /
  n` of it, summing it on all twice that. Sums are float32.
  """

  def part(n: int) -> float:
    return (n - 1) / n

  columns = size.vocabulary / split.tensor
  tokens = size.tokens / split.replicas / split.fsdp
  shard = size.features * columns
  heads = _linear.products_of(size)["logits"]
  return (
    heads * width * shard * part(split.fsdp)  # the heads' features
    + 4 * shard * part(split.fsdp)  # the gradient's, back
    + 2 * 4 * shard / split.fsdp * part(split.replicas)
    + 2 * 4 * tokens * size.features * part(split.tensor)  # the hidden states'
    + 2 * 4 * tokens * STATISTICS[size.kind] * part(split.tensor)
  )


def grown(size: _linear.Size, name: str, devices: int) -> _linear.Size:
  if name == "tensor":
    return dataclasses.replace(size, vocabulary=size.vocabulary * devices)
  return dataclasses.replace(size, tokens=size.tokens * devices)


def measure(name: str, devices: int, size: _linear.Size, problem: str):
  axes, tokens, head = MESHES[name]
  place = linear_mesh.layout(axes(devices), tokens, head)
  counts = linear_mesh.counts_of(place, "ours", size)
  return {
    "mesh": name,
    "problem": problem,
    "devices": devices,
    **size.fields(),
    "gflop": counts.flop / 1e9,
    **linear_mesh.describe(size, counts, devices),
    "closed_form_bytes": closed_form(size, split_of(axes(devices))),
  }


# A large mesh.


@dataclasses.dataclass(frozen=True)
class Chip:
  """Peak rates of a chip, as its maker gives them."""

  name: str
  flop_s: float
  bytes_s: float


# Of one chip: bfloat16 operations, and bytes to its neighbours.
CHIPS = (
  Chip("TPU v5e", 197e12, 200e9),
  Chip("TPU v5p", 459e12, 600e9),
)
LARGE = tuple(
  Split(*sizes)
  for sizes in ((256, 1, 1), (1, 256, 1), (1, 64, 4), (1, 16, 16), (4, 16, 4))
)
LARGE_TOKENS = 4096  # of a chip
LARGE_FEATURES, LARGE_VOCABULARY = 4096, 151_936


def extrapolate(kind: str):
  """A step's products and bytes on each of a large mesh's chips."""
  for split in LARGE:
    size = _linear.Size(
      kind=kind,
      tokens=LARGE_TOKENS * split.devices,
      features=LARGE_FEATURES,
      vocabulary=LARGE_VOCABULARY,
      dtype="bfloat16",
    )
    flop = linear_mesh.ideal(size, split.devices)
    # Heads whose features were gathered, and the float32 sum of the gradient.
    widths = 2 * _linear.products_of(size)["logits"] + 4
    heads = widths * size.features * size.vocabulary / split.tensor
    sent = closed_form(size, split, width=2)
    yield {
      **dataclasses.asdict(split),
      **size.fields(),
      "heads_gib": heads / 2**30,
      "tflop": flop / 1e12,
      "sent_mib": sent / 2**20,
      "seconds": {
        chip.name: (flop / chip.flop_s, sent / chip.bytes_s) for chip in CHIPS
      },
    }


def main():
  parser = _linear.make_parser(__doc__)
  parser.add_argument(
    "--kinds", nargs="+", choices=_linear.KINDS, default=("ce", "kl_hidden")
  )
  parser.add_argument("--meshes", nargs="+", choices=MESHES, default=[*MESHES])
  parser.add_argument(
    "--size",
    type=_linear.triple,
    metavar="N,D,V",
    help="of the fixed problem; the growing one is an eighth on one device",
  )
  arguments = parser.parse_args()
  jax.config.update("jax_num_cpu_devices", max(DEVICES))
  tokens, features, vocabulary = arguments.size or (
    (4096, 32, 1024) if arguments.quick else (8192, 256, 8192)
  )
  _linear.print_hardware()
  rows, large = [], []
  for kind in arguments.kinds:
    fixed = _linear.Size(
      kind=kind,
      tokens=tokens,
      features=features,
      vocabulary=vocabulary,
      dtype="float32",
    )
    for name in arguments.meshes:
      small = dataclasses.replace(
        fixed,
        **(
          {"vocabulary": vocabulary // 8}
          if name == "tensor"
          else {"tokens": tokens // 8}
        ),
      )
      for devices in DEVICES:
        for problem, size in (
          ("fixed", fixed),
          ("growing", grown(small, name, devices)),
        ):
          row = measure(name, devices, size, problem)
          rows.append(_linear.emit(row, arguments.json))
    large += [_linear.emit(row, arguments.json) for row in extrapolate(kind)]
  for problem in ("fixed", "growing"):
    _linear.print_table(
      f"A {problem} problem: what a device does and sends",
      [
        *("mesh", "kind", "devices", "N", "V", "GFLOP", "to ideal"),
        *("MiB sent", "closed form, MiB", "counted to closed form"),
      ],
      [
        [
          *(row[key] for key in ("mesh", "kind", "devices", "tokens")),
          row["vocabulary"],
          row["gflop"],
          f"{row['flop_to_ideal']:.3f}",
          _linear.mib(sum(row["sent_bytes"].values())),
          _linear.mib(row["closed_form_bytes"]),
          _ratio(row),
        ]
        for row in rows
        if row["problem"] == problem
      ],
    )
  _linear.print_table(
    "A chip of 256, by the closed forms: milliseconds of products at the peak"
    " rate, and of bytes at that of its links",
    [
      *("kind", "replicas", "fsdp", "tensor", "GiB of heads", "TFLOP"),
      "MiB sent",
      *(f"{chip.name}, {what}" for chip in CHIPS for what in ("ms", "ms sent")),
    ],
    [
      [
        *(row[key] for key in ("kind", "replicas", "fsdp", "tensor")),
        row["heads_gib"],
        row["tflop"],
        row["sent_mib"],
        *(1e3 * s for pair in row["seconds"].values() for s in pair),
      ]
      for row in large
    ],
  )


def _ratio(row):
  sent = row["closed_form_bytes"]
  return f"{sum(row['sent_bytes'].values()) / sent:.3f}" if sent else None


if __name__ == "__main__":
  main()
