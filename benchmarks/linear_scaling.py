"""How does the time grow with the tokens and with the vocabulary?

Ours, our dense loss and the matrix products alone, in two sweeps; clocks and
the floor as in `linear_speed`.

  python -m benchmarks.linear_scaling --help
"""

from benchmarks import _linear


def main():
  parser = _linear.make_parser(__doc__)
  parser.add_argument(
    "--kinds", nargs="+", choices=_linear.KINDS, default=("ce", "kl_hidden")
  )
  parser.add_argument("--dtype", choices=_linear.DTYPES, default="float32")
  parser.add_argument("--features", type=int, default=512)
  parser.add_argument(
    "--tokens", nargs="+", type=int, default=[256, 512, 1024, 2048, 4096, 8192]
  )
  parser.add_argument(
    "--vocabularies",
    nargs="+",
    type=int,
    default=[4096, 8192, 16384, 32768, 65536, 131072],
  )
  parser.add_argument("--fixed-tokens", type=int, default=1024)
  parser.add_argument("--fixed-vocabulary", type=int, default=32768)
  arguments = parser.parse_args()
  if arguments.quick:
    arguments.features = 32
    arguments.tokens, arguments.fixed_tokens = [256, 512], 256
    arguments.vocabularies, arguments.fixed_vocabulary = [512, 1024], 512
  _linear.print_hardware()
  sweeps = {
    "tokens": [(n, arguments.fixed_vocabulary) for n in arguments.tokens],
    "vocabulary": [(arguments.fixed_tokens, v) for v in arguments.vocabularies],
  }
  rows = []
  for sweep, points in sweeps.items():
    for tokens, vocabulary in points:
      for kind in arguments.kinds:
        row = _linear.measure(
          _linear.Size(
            kind=kind,
            tokens=tokens,
            features=arguments.features,
            vocabulary=vocabulary,
            dtype=arguments.dtype,
          ),
          forms=("ours", "dense"),
          rounds=arguments.rounds,
          limit=_linear.limit_of(arguments),
        )
        rows.append(_linear.emit({"sweep": sweep, **row}, arguments.json))
  for sweep in sweeps:
    _linear.print_table(
      f"Against the {sweep}: seconds of CPU time; ours over each (quartiles)",
      [
        *_linear.SIZE_NAMES,
        "floor",
        "ours",
        "dense",
        "ours, ns a logit",
        "to floor",
        "to dense",
      ],
      [
        [
          *_linear.size_columns(row),
          row["floor"]["floor"]["cpu_s"],
          row["cpu_s"].get("ours"),
          row["cpu_s"].get("dense"),
          _a_logit(row),
          _linear.quartiles(row["to"].get("floor")),
          _linear.quartiles(row["to"].get("dense")),
        ]
        for row in rows
        if row["sweep"] == sweep
      ],
    )


def _a_logit(row):
  seconds = row["cpu_s"].get("ours")
  if seconds is None:
    return None
  return 1e9 * seconds / (row["tokens"] * row["vocabulary"])


if __name__ == "__main__":
  main()
