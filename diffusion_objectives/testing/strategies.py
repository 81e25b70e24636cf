"""Few shapes, many values: what the laws are tried on.

A case is drawn as a shape bucket, a scale, a pattern of weights and a seed; the
arrays come from NumPy's generator. Few shapes mean few compilations, so values
can be many. Every bucket has one structure of the batch: the second and fourth
carry `is_supervised`, the others do not, so both default denominators occur;
the fourth is packed, with `segment_ids`.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

from hypothesis import strategies as st
import jax
import numpy as np

from diffusion_objectives import batches
from diffusion_objectives.objectives import parallel_decoding

# (batch, length, vocabulary): the least, odd co-primes, and two whose batch
# divides over 2 and 4 devices.
SHAPES = ((1, 1, 2), (3, 5, 7), (2, 4, 6), (4, 3, 9))
SCALES = (0.0, 1.0, 30.0)
WEIGHTS = ("all", "none", "binary", "fractional", "tiny", "one row")

# What inactive positions are filled with: ids, logits.
POISONS = ((-100, np.nan), (-1, np.inf), (10**6, -np.inf), (0, 1e30))


@dataclasses.dataclass(frozen=True)
class Regime:
  """What a case is made of.

  Attributes:
    shape: `(batch, length, vocabulary)`, one of `SHAPES`.
    scale: standard deviation of the logits, one of `SCALES`.
    weights: the pattern of the weights, one of `WEIGHTS`.
    seed: of NumPy's generator.
  """

  shape: tuple[int, int, int]
  scale: float
  weights: str
  seed: int


@dataclasses.dataclass(frozen=True)
class Case:
  """A prediction, a batch, and the size that rounding is measured against.

  Attributes:
    prediction: the network's output, NumPy.
    batch: the batch, NumPy leaves.
    magnitude: a bound, up to a small factor, on the sum of the absolute terms.
  """

  prediction: Any
  batch: Any
  magnitude: float


def regimes() -> st.SearchStrategy[Regime]:
  """All shapes, scales and patterns of weights, with a seed."""
  return st.builds(
    Regime,
    shape=st.sampled_from(SHAPES),
    scale=st.sampled_from(SCALES),
    weights=st.sampled_from(WEIGHTS),
    seed=st.integers(0, 2**32 - 1),
  )


def position_weights(regime: Regime, rng: np.random.Generator) -> np.ndarray:
  """`[batch, length]` float32 weights of the regime's pattern."""
  shape = regime.shape[:2]
  fractional = 10 ** rng.uniform(-3, 1, shape) * (rng.random(shape) < 0.7)
  patterns: dict[str, Callable[[], np.ndarray]] = {
    "all": lambda: np.ones(shape),
    "none": lambda: np.zeros(shape),
    "binary": lambda: rng.random(shape) < 0.5,
    "fractional": lambda: fractional,
    "tiny": lambda: fractional * 1e-8,
    "one row": lambda: fractional * (np.arange(shape[0]) == 0)[:, None],
  }
  return patterns[regime.weights]().astype(np.float32)


def _token_batch(
  regime: Regime, rng: np.random.Generator
) -> batches.DiffusionTokenBatch:
  batch, length, vocabulary = regime.shape
  weights = position_weights(regime, rng)
  is_supervised = (weights > 0) | (rng.random(weights.shape) < 0.3)
  ids = rng.integers(0, vocabulary, (batch, length), dtype=np.int32)
  segments = np.where(is_supervised, 1 + np.arange(length) // 2, 0)
  bucket = SHAPES.index(regime.shape)
  return batches.DiffusionTokenBatch(
    model_inputs={"input_tokens": ids},
    target_ids=ids,
    loss_weights=weights,
    is_supervised=is_supervised if bucket % 2 else None,
    segment_ids=segments.astype(np.int32) if bucket == 3 else None,
  )


def _logits(regime: Regime, rng: np.random.Generator) -> np.ndarray:
  return (regime.scale * rng.standard_normal(regime.shape)).astype(np.float32)


def token_case(regime: Regime) -> Case:
  """Logits and a `DiffusionTokenBatch`."""
  rng = np.random.default_rng(regime.seed)
  batch = _token_batch(regime, rng)
  return Case(
    prediction=_logits(regime, rng),
    batch=batch,
    magnitude=float(batch.loss_weights.sum()) * (1 + regime.scale),
  )


def distillation_case(regime: Regime) -> Case:
  """Student logits and a `DiffusionDistillationBatch` with a dense teacher."""
  rng = np.random.default_rng(regime.seed)
  student = _token_batch(regime, rng)
  return Case(
    prediction=_logits(regime, rng),
    batch=batches.DiffusionDistillationBatch(
      student_batch=student,
      teacher=batches.DenseTeacher(logits=_logits(regime, rng)),
    ),
    magnitude=float(student.loss_weights.sum()) * (1 + regime.scale),
  )


def top_k_case(regime: Regime, *, temperature: float = 1.0, k: int = 3) -> Case:
  """Student logits and a batch with a `TopKTeacher` at the temperature.

  Where `k` is not smaller than the vocabulary, all ids are listed. The buckets
  that carry `is_supervised` also carry `is_valid`: half of their slots beyond
  the first list nothing, and hold an id and a log-probability that no valid
  slot may.
  """
  case = distillation_case(regime)
  log_probs = _log_softmax(case.batch.teacher.logits, temperature)
  k = min(k, regime.shape[-1])
  ids = np.argsort(-log_probs, axis=-1)[..., :k].astype(np.int32)
  listed = np.take_along_axis(log_probs, ids, axis=-1).astype(np.float32)
  is_valid = None
  if SHAPES.index(regime.shape) % 2:
    is_valid = np.random.default_rng((regime.seed, 1)).random(ids.shape) < 0.5
    is_valid[..., 0] = True
    ids = np.where(is_valid, ids, -7)
    listed = np.where(is_valid, listed, np.float32(np.nan))
  teacher = batches.TopKTeacher(
    token_ids=ids, log_probs=listed, temperature=temperature, is_valid=is_valid
  )
  return dataclasses.replace(
    case, batch=dataclasses.replace(case.batch, teacher=teacher)
  )


def sampled_case(regime: Regime, *, temperature: float = 1.0) -> Case:
  """Student logits and a batch of ids drawn from them, on policy.

  Its `SampledTokenTeacher` has a dense teacher's log-probabilities of them.
  """
  case = distillation_case(regime)
  rng = np.random.default_rng((regime.seed, 1))
  noise = rng.gumbel(size=regime.shape)  # the largest is a draw
  drawn = np.argmax(case.prediction / temperature + noise, axis=-1)
  ids = drawn.astype(np.int32)
  log_probs = np.take_along_axis(
    _log_softmax(case.batch.teacher.logits, temperature), ids[..., None], -1
  )
  teacher = batches.SampledTokenTeacher(
    log_probs=log_probs[..., 0].astype(np.float32), temperature=temperature
  )
  batch = replace_tokens(case.batch, target_ids=ids)
  return Case(
    prediction=case.prediction,
    batch=dataclasses.replace(batch, teacher=teacher),
    magnitude=case.magnitude * (1 + regime.scale),  # squares
  )


def _log_softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
  rows = logits.astype(np.float64) / temperature
  rows -= rows.max(axis=-1, keepdims=True)
  return rows - np.log(np.exp(rows).sum(axis=-1, keepdims=True))


def token_part(batch: Any) -> batches.DiffusionTokenBatch:
  """The token batch of either kind of batch."""
  if isinstance(batch, batches.DiffusionDistillationBatch):
    return batch.student_batch
  return batch


def replace_tokens(batch: Any, **changes: Any) -> Any:
  """Either kind of batch with fields of its token batch replaced."""
  if isinstance(batch, batches.DiffusionDistillationBatch):
    return dataclasses.replace(
      batch,
      student_batch=dataclasses.replace(batch.student_batch, **changes),
    )
  return dataclasses.replace(batch, **changes)


def parallel_decoding_case(regime: Regime, *, heads: int = 4) -> Case:
  """Heads of two modalities and a `ParallelDecodingBatch`.

  A regime's `(batch, length, vocabulary)` gives video `[batch, length, 2]` and
  audio `[batch, vocabulary]`, its weights the valid elements. The buckets that
  carry `is_supervised` have a window of heads.
  """
  rng = np.random.default_rng(regime.seed)
  rows, length, width = regime.shape
  shapes = {"video": (rows, length, 2), "audio": (rows, width)}
  is_valid = position_weights(regime, rng) > 0
  valid = {
    "video": np.stack([is_valid] * 2, axis=-1),
    "audio": is_valid[:, :1] & (rng.random((rows, width)) < 0.7),
  }

  def drawn(axes=()):
    return {
      name: (
        regime.scale * rng.standard_normal((shape[0], *axes, *shape[1:]))
      ).astype(np.float32)
      for name, shape in shapes.items()
    }

  offset = rng.integers(0, 28, rows, dtype=np.int32)
  position = rng.integers(0, heads, rows, dtype=np.int32)
  is_window = SHAPES.index(regime.shape) % 2 == 1
  index = offset + position if is_window else position
  batch = parallel_decoding.ParallelDecodingBatch(
    start=(index - rng.integers(0, position + 1)).astype(np.int32),
    index=index,
    state=drawn(),
    target=drawn(),
    valid=valid,
    head_offset=offset if is_window else None,
  )
  return Case(
    prediction=drawn((heads,)),
    batch=batch,
    magnitude=10.0 * rows * (regime.scale + regime.scale**2),
  )


def poison_elements(case: Case, token_id: int, value: float) -> Case:
  """Fills every element that is not valid, and the indices of empty rows."""
  valid = case.batch.valid

  def fill(name: str, array: np.ndarray) -> np.ndarray:
    is_valid = valid[name] if array.ndim == valid[name].ndim else None
    if is_valid is None:  # heads
      is_valid = valid[name][:, None]
    return np.where(is_valid, array, np.asarray(value).astype(array.dtype))

  is_used = first_axis_activity(case.batch)
  batch = dataclasses.replace(
    case.batch,
    **{
      name: {key: fill(key, x) for key, x in getattr(case.batch, name).items()}
      for name in ("state", "target")
    },
    **{
      name: np.where(is_used, x, np.int32(token_id))
      for name in ("start", "index", "head_offset")
      if (x := getattr(case.batch, name)) is not None
    },
  )
  prediction = {key: fill(key, x) for key, x in case.prediction.items()}
  return dataclasses.replace(case, prediction=prediction, batch=batch)


# What the laws need of a batch, of any kind.


def activity(batch: Any) -> Any:
  """What says which positions count: weights, or boolean masks."""
  if isinstance(batch, parallel_decoding.ParallelDecodingBatch):
    return batch.valid
  return token_part(batch).loss_weights


def replace_activity(batch: Any, changed: Any) -> Any:
  """A batch with another `activity`."""
  if isinstance(batch, parallel_decoding.ParallelDecodingBatch):
    return dataclasses.replace(batch, valid=changed)
  return replace_tokens(batch, loss_weights=changed)


def first_axis_activity(batch: Any) -> np.ndarray:
  """`[batch]`, whether a row counts at all."""
  rows = [
    np.any(np.asarray(x), axis=tuple(range(1, x.ndim)))
    for x in jax.tree.leaves(activity(batch))
  ]
  return np.any(rows, axis=0)


def constants(batch: Any) -> dict[str, Any]:
  """The fields of a batch that no gradient may reach."""
  if isinstance(batch, batches.DiffusionDistillationBatch):
    return {"teacher": batch.teacher}
  if isinstance(batch, parallel_decoding.ParallelDecodingBatch):
    return {"state": batch.state, "target": batch.target}
  return {}


def poison_tokens(case: Case, token_id: int, value: float) -> Case:
  """Fills every position of weight 0: ids, logits, and what a teacher has."""
  tokens = token_part(case.batch)
  is_inactive = np.asarray(tokens.loss_weights) == 0

  def fill(array: np.ndarray) -> np.ndarray:
    is_filled = is_inactive.reshape(
      is_inactive.shape + (1,) * (array.ndim - is_inactive.ndim)
    )
    poison = value if array.dtype.kind == "f" else token_id
    return np.where(is_filled, np.asarray(poison).astype(array.dtype), array)

  batch = replace_tokens(
    case.batch, target_ids=fill(np.asarray(tokens.target_ids))
  )
  if isinstance(batch, batches.DiffusionDistillationBatch):
    batch = dataclasses.replace(
      batch, teacher=jax.tree.map(fill, batch.teacher)
    )
  return dataclasses.replace(
    case, prediction=jax.tree.map(fill, case.prediction), batch=batch
  )
