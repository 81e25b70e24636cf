r"""What one device does and sends in a compiled program, read from its text.

`count(compiled.as_text())` reads the optimized program of one device (SPMD):

- operations of matrix products, `2 x result x contracted size` of each `dot`,
  in fusions and other called computations too;
- the bytes that a device sends in each kind of collective (it receives as
  many), by rings of `n` devices:

    all-gather, reduce-scatter, all-to-all   (n - 1) / n of the whole array
    all-reduce                               twice that
    collective-permute                       the array;

- how many collectives are called, and the largest array that one returns.

A loop counts as often as it runs. A number that depends on data is the
caller's. Of a conditional's branches the one with the most operations counts.
What may hide a product or a collective is refused.
"""

import dataclasses
import functools
import math
import re

# By the bytes of what is returned and the number of devices.
RING = {
  "all-gather": lambda size, n: size * (n - 1) / n,
  "all-reduce": lambda size, n: 2 * size * (n - 1) / n,
  "reduce-scatter": lambda size, n: size * (n - 1),
  "all-to-all": lambda size, n: size * (n - 1) / n,
  "collective-permute": lambda size, n: size,
}
# Opcodes that would be miscounted.
REFUSED = re.compile(
  r"custom-call|convolution|ragged-.*|collective-broadcast|.*-start"
)
COMPUTATION = re.compile(r"(?:ENTRY )?%(\S+) \(.*\) -> .* \{$")
INSTRUCTION = re.compile(r" +(?:ROOT )?%(\S+) = (.*?) ([a-z][a-z\d-]*)\((.*)$")
ARRAY = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,]*)\]")
CALLED = re.compile(r"\b(?:calls|to_apply|body|condition)=%([^\s,]+)")
BRANCHES = re.compile(
  r"\b(?:branch_computations=\{(.*?)\}"
  r"|true_computation=([^\s,]+), false_computation=([^\s,]+))"
)


@dataclasses.dataclass(frozen=True)
class Counts:
  """Of one device in one call.

  Attributes:
    flop: operations of matrix products.
    sent: bytes by kind of collective.
    collectives: how many are called.
    largest: elements of the largest array that a collective returns.
  """

  flop: int = 0
  sent: dict[str, float] = dataclasses.field(default_factory=dict)
  collectives: int = 0
  largest: int = 0

  @property
  def total_sent(self) -> float:
    return sum(self.sent.values())

  def __add__(self, other: "Counts") -> "Counts":
    kinds = sorted({*self.sent, *other.sent})
    return Counts(
      self.flop + other.flop,
      {k: self.sent.get(k, 0) + other.sent.get(k, 0) for k in kinds},
      self.collectives + other.collectives,
      max(self.largest, other.largest),
    )

  def times(self, trips: int) -> "Counts":
    if not trips:
      return Counts()
    sent = {kind: trips * size for kind, size in self.sent.items()}
    return Counts(
      trips * self.flop, sent, trips * self.collectives, self.largest
    )


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line: `%name = returned opcode(rest`."""

  name: str
  returned: str
  opcode: str
  rest: str

  def sizes(self) -> list[tuple[int, int]]:
    """Elements and bytes of each array that is returned."""
    return [
      (elements, elements * int(bits or 8) // 8)
      for kind, bits, shape in ARRAY.findall(self.returned)
      if kind != "token"
      for elements in [math.prod(_numbers(shape))]
    ]


def count(text: str, dynamic_trips: int | None = None) -> Counts:
  """What a device does and sends.

  Args:
    text: `compiled.as_text()`.
    dynamic_trips: how often a loop runs whose number depends on data.

  Raises:
    ValueError: there is such a loop and no number; or what may hide a product
      or a collective.
  """
  computations, entry = _parse(text)
  devices = _devices(text)

  @functools.cache
  def of(name: str) -> Counts:
    shapes = {line.name: line.returned for line in computations[name]}
    total = Counts()
    for line in computations[name]:
      total += _own(line, shapes, devices)
      total += sum(map(of, CALLED.findall(line.rest)), Counts()).times(
        _trips(line, dynamic_trips)
      )
      branches = map(of, _branches(line))
      total += max(
        branches, key=lambda c: (c.flop, c.total_sent), default=Counts()
      )
    return total

  return of(entry)


def _parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
  """Each computation's instructions, and the first one's name."""
  computations: dict[str, list[Instruction]] = {}
  lines: list[Instruction] = []
  entry = ""
  for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
    if header := COMPUTATION.match(line):
      lines = computations.setdefault(header[1], [])
      if line.startswith("ENTRY"):
        entry = header[1]
    elif instruction := INSTRUCTION.match(line):
      lines.append(Instruction(*instruction.groups()))
  if not entry:
    raise ValueError("text must be that of a compiled program, with an ENTRY")
  return computations, entry


def _devices(text: str) -> int:
  """How many devices run the program."""
  header = text.partition("\n")[0]
  counts = re.findall(r"\b(?:replica_count|num_partitions)=(\d+)", header)
  return math.prod(map(int, counts))


def _own(line: Instruction, shapes: dict[str, str], devices: int) -> Counts:
  """An instruction's, without what it calls."""
  if REFUSED.fullmatch(line.opcode):
    raise ValueError(f"a program must not hold {line.opcode}: {line}")
  if line.opcode == "dot":
    return Counts(flop=_product(line, shapes))
  if line.opcode in RING:
    elements, sizes = zip(*line.sizes(), strict=True)
    sent = RING[line.opcode](sum(sizes), _group(line, devices))
    return Counts(0, {line.opcode: sent}, 1, max(elements))
  return Counts()


def _product(line: Instruction, shapes: dict[str, str]) -> int:
  """Operations of a `dot`."""
  left = re.search(r"%([^\s,)]+)", line.rest)[1]
  shape = _numbers(ARRAY.search(shapes[left])[3])
  axes = _numbers(re.search(r"lhs_contracting_dims=\{(.*?)\}", line.rest)[1])
  contracted = math.prod(shape[axis] for axis in axes)
  return 2 * contracted * sum(elements for elements, _ in line.sizes())


def _group(line: Instruction, devices: int) -> int:
  """How many devices a collective joins.

  Groups are lists, `{{0,1},{2,3}}` (none are all devices); or
  `[groups,devices]<=[...]`; or axes of a mesh, `mesh['x'=4,'y'=2] {'x'}`.
  """
  if line.opcode == "collective-permute":
    return 2
  groups = line.rest.partition("replica_groups=")[2]
  if groups.startswith("{}"):
    return devices
  if lists := re.match(r"\{(\{.*?\})\}", groups):
    return max(len(_numbers(g)) for g in re.findall(r"\{(.*?)\}", lists[1]))
  if shape := re.match(r"\[([\d,]+)\]<=", groups):
    return _numbers(shape[1])[-1]
  if mesh := re.match(r"mesh\[(.*?)\] \{((?:'\w+',? ?)+)\}", groups):
    axes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
    return math.prod(int(axes[a]) for a in re.findall(r"'(\w+)'", mesh[2]))
  raise ValueError(f"replica_groups have an unknown form: {line}")


def _trips(line: Instruction, dynamic_trips: int | None) -> int:
  """How often what an instruction calls is run."""
  if line.opcode != "while":
    return 1
  if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', line.rest):
    return int(known[1])
  if dynamic_trips is None:
    raise ValueError(
      f"dynamic_trips must be given for a loop of unknown length: {line.name}"
    )
  return dynamic_trips


def _branches(line: Instruction) -> list[str]:
  found = BRANCHES.search(line.rest)
  names = ",".join(filter(None, found.groups())) if found else ""
  return re.findall(r"%([^\s,]+)", names)


def _numbers(text: str) -> list[int]:
  return [int(part) for part in text.split(",") if part.strip()]
