"""How much memory does a linear loss take beside its arguments?

By the compiler's own analysis (temporaries and results of the value with both
gradients; nothing is run, so any size can be asked), and by the growth of a
fresh process's peak resident memory over one run. Temporaries are predicted by

  4 c V a tile + 4 c D (+ 4 D V where the kernel is stored below float32)

with blocks of `c` tokens, and two tiles where the teacher is a head, else one.

  python -m benchmarks.linear_memory --help
"""

import dataclasses
import functools
import json
import pathlib

import jax

from benchmarks import _linear

# The runs in a fresh process, N, D, V.
PROCESS_SIZES = [(2048, 512, 32768), (8192, 512, 65536)]


def predicted_bytes(size, token_block):
  if not token_block:
    return None  # the library chooses the block
  block = min(token_block, size.tokens)
  tiles = 1 + (size.kind in _linear.HAS_TEACHER_HEAD)
  temporary = 4 * block * (tiles * size.vocabulary + size.features)
  if size.is_low:
    temporary += 4 * size.features * size.vocabulary
  return temporary


def compile_form(form, size, token_block):
  options = {"token_block": token_block} if form == "ours" else {}
  loss = _linear.FORMS[form](size, **options)
  if loss is None:
    return None
  return _linear.compile_at(_linear.with_gradients(loss), size)


def compiled_row(size, token_block):
  temporary, outputs = {}, {}
  for form in _linear.FORMS:
    compiled = compile_form(form, size, token_block)
    if compiled is not None:
      memory = compiled.memory_analysis()
      temporary[form] = memory.temp_size_in_bytes
      outputs[form] = memory.output_size_in_bytes
  return {
    "measured": "compiler",
    **size.fields(),
    "token_block": token_block,
    "temporary_bytes": temporary,
    "output_bytes": outputs,
    "predicted_bytes": predicted_bytes(size, token_block),
    "ours_to": {
      form: temporary["ours"] / n for form, n in temporary.items() if n
    },
  }


def measure_here(request):
  """One run's growth of this process's peak memory."""
  size = _linear.Size(**request["size"])
  compiled = compile_form(request["form"], size, request["token_block"])
  if compiled is None:
    return {"growth_bytes": None, "held_bytes": None}
  held = _linear.held_bytes(compiled)
  if held > request["limit"]:
    return {"growth_bytes": None, "held_bytes": held}
  # What a first run starts, such as threads, is not the loss's.
  small = dataclasses.replace(size, tokens=8, features=8, vocabulary=64)
  warm_up = compile_form(request["form"], small, request["token_block"])
  jax.block_until_ready(warm_up(*_linear.arrays(small)))
  operands = _linear.arrays(size)
  _linear.reset_peak()
  before = _linear.peak_bytes()
  jax.block_until_ready(compiled(*operands))
  return {
    "growth_bytes": _linear.peak_bytes() - before,
    "before_bytes": before,
    "held_bytes": held,
  }


def process_row(size, form, token_block, limit):
  found = _linear.in_fresh_process(
    "benchmarks.linear_memory",
    {
      "size": size.fields(),
      "form": form,
      "token_block": token_block,
      "limit": limit,
    },
  )
  return {
    "measured": "process",
    **size.fields(),
    "form": form,
    "token_block": token_block,
    **found,
  }


def plot(rows, path):
  """Memory and time against the vocabulary."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot as plt

  figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
  vocabularies = [row["vocabulary"] for row in rows]
  for form in ("ours", "dense", "plain", "optax"):
    for axes, values in (
      (left, [_linear.mib(row["temporary_bytes"].get(form)) for row in rows]),
      (right, [row["cpu_s"].get(form) for row in rows]),
    ):
      points = [(x, y) for x, y in zip(vocabularies, values, strict=True) if y]
      if points:
        axes.plot(*zip(*points, strict=True), "o-", label=form)
  floors = [row["floor"]["floor"]["cpu_s"] for row in rows]
  right.plot(vocabularies, floors, "k--", label="matrix products")
  left.set_ylabel("temporaries, MiB")
  right.set_ylabel("CPU seconds")
  for axes in (left, right):
    axes.set(xscale="log", yscale="log", xlabel="vocabulary")
    axes.set_xticks(vocabularies, [f"{v:,}" for v in vocabularies], rotation=30)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
  right.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
  first = rows[0]
  figure.suptitle(
    f"{first['kind']}, {first['dtype']}, {first['tokens']:,} tokens,"
    f" {first['features']} features: value and gradients"
  )
  figure.tight_layout()
  pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=150)


def print_tables(compiled, flat, processes, plotted):
  columns = _linear.size_columns
  if compiled:
    _linear.print_table(
      "Temporaries by the compiler, MiB",
      [
        *_linear.SIZE_NAMES,
        "predicted",
        *_linear.FORMS,
        "ours to dense",
        "results",
      ],
      [
        [
          *columns(row),
          _linear.mib(row["predicted_bytes"]),
          *[_linear.mib(row["temporary_bytes"].get(f)) for f in _linear.FORMS],
          row["ours_to"].get("dense"),
          _linear.mib(row["output_bytes"]["ours"]),
        ]
        for row in compiled
      ],
    )
  if flat:
    _linear.print_table(
      "Temporaries against the number of tokens, MiB",
      [*_linear.SIZE_NAMES, "predicted", "ours", "dense"],
      [
        [
          *columns(row),
          _linear.mib(row["predicted_bytes"]),
          _linear.mib(row["temporary_bytes"]["ours"]),
          _linear.mib(row["temporary_bytes"]["dense"]),
        ]
        for row in flat
      ],
    )
  if processes:
    _linear.print_table(
      "Growth of a fresh process's peak resident memory over one run, MiB",
      [*_linear.SIZE_NAMES, "form", "growth", "by the compiler"],
      [
        [
          *columns(row),
          row["form"],
          _linear.mib(row["growth_bytes"]),
          _linear.mib(row["held_bytes"]),
        ]
        for row in processes
      ],
    )
  if plotted:
    forms = ("ours", "dense", "plain", "optax")
    _linear.print_table(
      "Against the vocabulary: temporaries, MiB, and seconds of CPU time",
      [
        *_linear.SIZE_NAMES,
        *[f"{form}, MiB" for form in forms],
        *[f"{form}, s" for form in forms],
        "floor, s",
      ],
      [
        [
          *columns(row),
          *[_linear.mib(row["temporary_bytes"].get(form)) for form in forms],
          *[row["cpu_s"].get(form) for form in forms],
          row["floor"]["floor"]["cpu_s"],
        ]
        for row in plotted
      ],
    )


def main():
  parser = _linear.make_parser(__doc__)
  _linear.add_sizes(parser)
  parser.add_argument(
    "--token-block", type=int, default=256, help="0: the library's choice"
  )
  parser.add_argument(
    "--parts",
    nargs="+",
    choices=("process", "compiler", "flat"),
    default=("process", "compiler", "flat"),
  )
  parser.add_argument(
    "--process-kinds", nargs="+", choices=_linear.KINDS, default=("ce",)
  )
  parser.add_argument("--plot", help="draw memory and time into this file")
  parser.add_argument(
    "--plot-vocabularies",
    nargs="+",
    type=int,
    default=[4096, 8192, 16384, 32768, 65536],
  )
  parser.add_argument("--child", help="a request, for the script's own use")
  arguments = parser.parse_args()
  if arguments.child:
    print(json.dumps(measure_here(json.loads(arguments.child))))
    return
  token_block = arguments.token_block or None
  limit = _linear.limit_of(arguments)
  quick = arguments.quick
  sizes = arguments.sizes or ([(512, 32, 2048)] if quick else PROCESS_SIZES)
  make = functools.partial(_linear.each_size, arguments.kinds, arguments.dtypes)
  _linear.print_hardware()

  def emit(row):
    return _linear.emit(row, arguments.json)

  processes, compiled, flat, plotted = [], [], [], []
  # First, while this process is small: a child's peak starts at its parent's.
  if "process" in arguments.parts:
    for size in _linear.each_size(arguments.process_kinds, ("float32",), sizes):
      for form in ("ours", "dense"):
        processes.append(emit(process_row(size, form, token_block, limit)))
  if "compiler" in arguments.parts:
    compiled = [emit(compiled_row(size, token_block)) for size in make(sizes)]
  if "flat" in arguments.parts:
    _, features, vocabulary = sizes[0]
    counts = (256, 512) if quick else (1024, 2048, 4096, 8192)
    swept = [(tokens, features, vocabulary) for tokens in counts]
    flat = [
      emit(compiled_row(size, token_block))
      for size in _linear.each_size(
        arguments.kinds, arguments.dtypes[:1], swept
      )
    ]
  if arguments.plot:
    tokens, features, _ = sizes[0]
    vocabularies = (512, 2048) if quick else arguments.plot_vocabularies
    swept = [(tokens, features, vocabulary) for vocabulary in vocabularies]
    for size in _linear.each_size(
      arguments.kinds[:1], arguments.dtypes[:1], swept
    ):
      times = _linear.measure(
        size,
        forms=("ours", "dense", "plain", "optax"),
        rounds=arguments.rounds,
        limit=limit,
        options={"token_block": token_block},
      )
      plotted.append(emit(compiled_row(size, token_block) | times))
    plot(plotted, arguments.plot)
  print_tables(compiled, flat, processes, plotted)


if __name__ == "__main__":
  main()
