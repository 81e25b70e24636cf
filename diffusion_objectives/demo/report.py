"""What a finished run shows: a table, curves and samples."""

import io

from diffusion_objectives.demo import run

Figures = dict[str, dict[str, float]]  # of each network, by name

_COLUMNS = (
  ("held_out_nll", "NLL, held out"),
  ("held_out_kl", "KL, held out"),
  ("own_kl", "KL, own canvases"),
)
_CAPTION = (
  "NLL: nats per byte; of a network, the bound of masked diffusion.\n"
  "KL: KL(teacher || student), nats per hidden byte."
)


def table(figures: Figures) -> str:
  """The figures, one network a line, and what they are."""
  width = max(map(len, figures))
  lines = [" " * width + "".join(f"{title:>18}" for _, title in _COLUMNS)]
  for name, values in figures.items():
    cells = (
      f"{values[key]:.4f}" if key in values else "-" for key, _ in _COLUMNS
    )
    lines.append(f"{name:<{width}}" + "".join(f"{cell:>18}" for cell in cells))
  return "\n".join((*lines, _CAPTION))


def samples(windows: dict[str, list[str]]) -> str:
  """What each network drew, one window a line."""
  return "".join(
    f"{name}:\n" + "".join(f"  {line}\n" for line in lines)
    for name, lines in windows.items()
  )


def curves(rows: list[run.Row], figures: Figures) -> bytes:
  """Training losses and held-out figures against the step, as a PNG."""
  # Imported here: nothing else needs it, and it is slow to import.
  from matplotlib.figure import Figure

  figure = Figure(figsize=(12, 7), layout="constrained")
  panels = dict(
    zip(
      ("loss", "held_out_nll", "held_out_kl", "own_kl"),
      figure.subplots(2, 2).flat,
      strict=True,
    )
  )
  titles = {"loss": "training loss (each phase its own)"} | {
    key: f"{title}, nats" for key, title in _COLUMNS
  }
  for key, axes in panels.items():
    axes.set(title=titles[key], xlabel="step")
    for number, phase in enumerate(run.PHASES):
      points = [
        (row["step"], row[key])
        for row in rows
        if row["phase"] == phase and key in row
      ]
      if points:
        axes.plot(
          *zip(*points, strict=True),
          color=f"C{number}",
          label=phase,
          linewidth=1,
        )
    axes.set_yscale("log")
  for name, style in (("unigram", ":"), ("bigram", "--")):
    panels["held_out_nll"].axhline(
      figures[name]["held_out_nll"], color="gray", linestyle=style, label=name
    )
  for axes in panels.values():
    axes.legend()
  buffer = io.BytesIO()
  figure.savefig(buffer, format="png", dpi=120)
  return buffer.getvalue()
