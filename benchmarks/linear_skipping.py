"""What do positions of weight 0 cost?

The same batch with all, half and a tenth of its positions weighted, at random
places; each form's time over its own time with all of them. Value and gradients
in alternating rounds of one process, seconds of CPU time, medians.

  python -m benchmarks.linear_skipping --help
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from benchmarks import _linear

SHARES = (1.0, 0.5, 0.1)
FORMS = ("ours", "dense")


def weigh(batch, share):
  """The batch with weight 1 at that share of its positions, 0 elsewhere."""
  if not hasattr(batch, "loss_weights"):
    student = weigh(batch.student_batch, share)
    return dataclasses.replace(batch, student_batch=student)
  count = batch.target_ids.size
  chosen = np.random.default_rng(0).permutation(count)[: round(share * count)]
  weights = np.zeros(count, np.float32)
  weights[chosen] = 1
  return dataclasses.replace(
    batch, loss_weights=jnp.asarray(weights.reshape(batch.target_ids.shape))
  )


def measure(size, rounds, limit):
  hidden, kernel, batch, teacher_kernel = _linear.arrays(size)
  runs = {}
  for form in FORMS:
    loss = _linear.with_gradients(_linear.FORMS[form](size))
    compiled = _linear.compile_at(loss, size)
    if _linear.held_bytes(compiled) > limit:
      _linear.say(f"{form} is not run: it takes more than the limit")
      continue
    for share in SHARES:
      runs[form, share] = functools.partial(
        compiled, hidden, kernel, weigh(batch, share), teacher_kernel
      )
  seconds = _linear.in_rounds(runs, rounds)
  for form, share in runs:
    cpu = seconds[form, share][:, 0]
    ratio = np.quantile(cpu / seconds[form, 1.0][:, 0], (0.5, 0.25, 0.75))
    yield {
      **size.fields(),
      "form": form,
      "weighted": share,
      "rounds": rounds,
      "cpu_s": float(np.median(cpu)),
      "wall_s": float(seconds[form, share][:, 1].min()),
      "to_all": [float(q) for q in ratio],
    }


def main():
  parser = _linear.make_parser(__doc__)
  _linear.add_sizes(parser, kinds=("ce", "kl_hidden"), dtypes=("float32",))
  arguments = parser.parse_args()
  sizes = arguments.sizes or (
    [(512, 32, 2048)] if arguments.quick else [(2048, 512, 32768)]
  )
  _linear.print_hardware()
  rows = []
  limit = _linear.limit_of(arguments)
  for size in _linear.each_size(arguments.kinds, arguments.dtypes, sizes):
    for row in measure(size, arguments.rounds, limit):
      rows.append(_linear.emit(row, arguments.json))
  _linear.print_table(
    "Seconds of CPU time, and over the own time of all (quartiles)",
    [*_linear.SIZE_NAMES, "form", "weighted", "CPU s", "wall s", "to all"],
    [
      [
        *_linear.size_columns(row),
        row["form"],
        f"{row['weighted']:.0%}",
        row["cpu_s"],
        row["wall_s"],
        _linear.quartiles(row["to_all"]),
      ]
      for row in rows
    ],
  )


if __name__ == "__main__":
  main()
