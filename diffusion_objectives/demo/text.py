"""The text: rows of the character tables in Python's `encodings` package.

The package's modules hold one row a character, for example

  '\u03c4'   #  0x00e7 -> GREEK SMALL LETTER TAU

Tables repeat each other, so a row that an earlier file has is left out: what is
held out then occurs nowhere in training. The distinct rows, in the order of the
sorted file names, are cut into blocks of `ROWS_PER_BLOCK`; every
`HELD_OUT_EVERY`-th block is held out. Windows never cross a block's edge.
"""

import dataclasses
import encodings
import hashlib
import pathlib
import re

import numpy as np

LENGTH = 64  # bytes of a window
MASK_ID = 128  # the text is ASCII; this id stands for a hidden byte
VOCABULARY_SIZE = MASK_ID + 1
ROWS_PER_BLOCK = 40
HELD_OUT_EVERY = 8

_ROW = re.compile(rb"^    \S.*#\s+0x[0-9a-fA-F]+ -> [ -~]*$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Text:
  """Blocks of bytes for training, and others held out."""

  training: tuple[bytes, ...]
  held_out: tuple[bytes, ...]

  @property
  def digest(self) -> str:
    """Names the text, since Python versions may differ in it."""
    parts = b"\0".join((*self.training, b"", *self.held_out))
    return hashlib.sha256(parts).hexdigest()[:16]


def load() -> Text:
  """Reads the slice of the standard library."""
  folder = pathlib.Path(encodings.__file__).parent
  rows: dict[bytes, None] = {}  # a set that keeps the order
  for path in sorted(folder.glob("*.py")):
    rows.update(dict.fromkeys(_ROW.findall(path.read_bytes())))
  return split(list(rows))


def split(rows: list[bytes]) -> Text:
  """Cuts rows into blocks and holds out every `HELD_OUT_EVERY`-th."""
  blocks = [
    b"".join(row + b"\n" for row in rows[start : start + ROWS_PER_BLOCK])
    for start in range(0, len(rows), ROWS_PER_BLOCK)
  ]
  is_held_out = [
    index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 for index in range(len(blocks))
  ]
  pairs = list(zip(blocks, is_held_out, strict=True))
  return Text(
    training=tuple(block for block, held in pairs if not held),
    held_out=tuple(block for block, held in pairs if held),
  )


def windows(blocks: tuple[bytes, ...], *, stride: int) -> np.ndarray:
  """All windows of the blocks that start at multiples of `stride`.

  Returns:
    `[windows, LENGTH]` int32 ids.
  """
  cut = [
    np.lib.stride_tricks.sliding_window_view(
      np.frombuffer(block, np.uint8), LENGTH
    )[::stride]
    for block in blocks
    if len(block) >= LENGTH
  ]
  return np.concatenate(cut).astype(np.int32)


def markov_nll(
  blocks: tuple[bytes, ...], ids: np.ndarray, *, size: int = MASK_ID
) -> dict[str, float]:
  """What counting bytes, and pairs of bytes, achieves on windows.

  Counts come from `blocks`, each plus one. A window's first byte has no
  predecessor in the window, so the bigram predicts it as the unigram does: it
  sees what a network sees.

  Args:
    blocks: the training bytes.
    ids: `[windows, length]`, the bytes to predict.
    size: the number of different bytes.

  Returns:
    `{"unigram": ..., "bigram": ...}`, nats per byte.
  """
  single = np.ones(size)
  pair = np.ones((size, size))
  for block in blocks:
    values = np.frombuffer(block, np.uint8)
    np.add.at(single, values, 1)
    np.add.at(pair, (values[:-1], values[1:]), 1)
  single_nll = -np.log(single / single.sum())
  pair_nll = -np.log(pair / pair.sum(axis=1, keepdims=True))
  followers = pair_nll[ids[:, :-1], ids[:, 1:]].sum()
  return {
    "unigram": float(single_nll[ids].mean()),
    "bigram": float((single_nll[ids[:, 0]].sum() + followers) / ids.size),
  }


def printable(ids: np.ndarray) -> str:
  """One window on one line; a byte that is still hidden shows as a block."""
  line = "".join("\u2588" if i == MASK_ID else chr(i) for i in ids.tolist())
  return line.replace("\\", "\\\\").translate(
    {code: f"\\x{code:02x}" for code in (*range(32), 127)} | {10: "\\n"}
  )
