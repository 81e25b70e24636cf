"""How far are the linear losses from the matrix products they need?

The floor is those products alone, each in its best layout, whole or in blocks
of tokens: logits, both gradients, and the logits of a teacher's head where
there is one. Ours and our dense loss compute their metrics; plain JAX, Optax
and tokamax compute the loss alone, which favours them. All weights are 1, every
form gives the value and the gradients in hidden states and kernel, and all run
in alternating rounds of one process. Seconds are medians of the process's CPU
time; the wall's are minima; ratios are medians over rounds.

  python -m benchmarks.linear_speed --help
"""

from benchmarks import _linear


def print_tables(rows):
  others = [name for name in _linear.FORMS if name != "ours"]
  _linear.print_table(
    "Value and gradients, seconds of CPU time (minimum of the wall)",
    [*_linear.SIZE_NAMES, "floor", "GF/s", *_linear.FORMS],
    [
      [
        *_linear.size_columns(row),
        both(row["floor"]["floor"]["cpu_s"], row["floor"]["floor"]["wall_s"]),
        row["floor"]["floor"]["gflop_per_cpu_s"],
        *[
          both(row["cpu_s"].get(name), row["wall_s"].get(name))
          for name in _linear.FORMS
        ],
      ]
      for row in rows
    ],
  )
  _linear.print_table(
    "Value and gradients, ours over each (quartiles)",
    [*_linear.SIZE_NAMES, "floor", *others],
    [
      [
        *_linear.size_columns(row),
        *[
          _linear.quartiles(row["to"].get(name)) for name in ("floor", *others)
        ],
      ]
      for row in rows
    ],
  )
  _linear.print_table(
    "Value alone, seconds of CPU time, and ours over each (quartiles)",
    [*_linear.SIZE_NAMES, "floor", "ours", "dense", "to floor", "to dense"],
    [
      [
        *_linear.size_columns(row),
        row["floor"]["floor value"]["cpu_s"],
        row["cpu_s"].get("ours value"),
        row["cpu_s"].get("dense value"),
        _linear.quartiles(row["to"].get("floor value")),
        _linear.quartiles(row["to"].get("dense value")),
      ]
      for row in rows
    ],
  )
  _linear.print_table(
    "The floor's products in their best form",
    [*_linear.SIZE_NAMES, "product", "form", "CPU s", "GF/s"],
    [
      [
        *_linear.size_columns(row),
        name,
        product["form"],
        product["cpu_s"],
        product["gflop_per_cpu_s"],
      ]
      for row in rows
      for name, product in row["floor"]["products"].items()
    ],
  )


def both(cpu, wall):
  return None if cpu is None else f"{cpu:.3g} ({wall:.3g})"


def main():
  parser = _linear.make_parser(__doc__)
  _linear.add_sizes(parser)
  parser.add_argument(
    "--forms",
    nargs="+",
    choices=list(_linear.FORMS),
    default=list(_linear.FORMS),
    help="beside the floor; fewer leave time for more rounds",
  )
  arguments = parser.parse_args()
  sizes = arguments.sizes or (
    [(512, 32, 2048)] if arguments.quick else [(2048, 512, 32768)]
  )
  _linear.print_hardware()
  rows = []
  for size in _linear.each_size(arguments.kinds, arguments.dtypes, sizes):
    row = _linear.measure(
      size,
      forms=tuple(arguments.forms),
      values=tuple(n for n in ("ours", "dense") if n in arguments.forms),
      rounds=arguments.rounds,
      limit=_linear.limit_of(arguments),
    )
    rows.append(_linear.emit(row, arguments.json))
  print_tables(rows)


if __name__ == "__main__":
  main()
