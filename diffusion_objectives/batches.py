"""Batches: what a loss needs beside the network's output.

Records are frozen, keyword-only pytrees. Every array leaf is batch-major. A
record checks types, dtypes and shapes when a person builds it, and never when
JAX rebuilds it; values are read by `check_values` alone.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusion_objectives._core import checks
from diffusion_objectives._core import numerics
from diffusion_objectives._core import pytree

UNITS = ("weights", "tokens", "masked", "sequences")


@pytree.record
class DiffusionTokenBatch:
  """Token targets aligned with the network's prediction positions.

  Position `i` of the logits is trained towards `target_ids[:, i]`; a shift, if
  the network needs one (`shift_right`), is resolved before.

  Attributes:
    model_inputs: pytree of arrays `[batch, ...]`, what the network is called
      with. It holds at least one array.
    target_ids: `[batch, length]` integer. Ids at positions of weight 0 may be
      sentinels such as -100.
    loss_weights: `[batch, length]` boolean, integer or floating-point, finite
      and nonnegative. 0 makes a position inert.
    is_supervised: `[batch, length]` boolean or None. The positions that the
      corruption could have masked: the units "tokens" and "sequences" count
      them. A positive weight lies on a supervised position.
    segment_ids: `[batch, length]` integer or None. Where rows are packed, the
      sequence of each position, 0 for padding: the unit "sequences" counts
      them. None where each row is one sequence. Only with `is_supervised`.

  Raises:
    TypeError: no array where one must be, or another dtype.
    ValueError: another rank or shape, `model_inputs` without an array, or
      `segment_ids` without `is_supervised`.

  Example:
    >>> import numpy as np
    >>> batch = DiffusionTokenBatch(
    ...     model_inputs={"input_tokens": np.array([[5, 9, 9]])},
    ...     target_ids=np.array([[5, 6, 7]]),
    ...     loss_weights=np.array([[0.0, 2.0, 2.0]]),
    ...     is_supervised=np.array([[False, True, True]]))
    >>> batch.check_values(vocabulary_size=8)
  """

  model_inputs: Any
  target_ids: jax.Array | np.ndarray
  loss_weights: jax.Array | np.ndarray
  is_supervised: jax.Array | np.ndarray | None = None
  segment_ids: jax.Array | np.ndarray | None = None

  def __post_init__(self) -> None:
    axes = ("batch", "length")
    ids = self.target_ids
    checks.array("target_ids", ids, dtype="integer", axes=axes)
    checks.array(
      "loss_weights",
      self.loss_weights,
      dtype="real numeric or boolean",
      axes=axes,
    )
    checks.same_shape(
      "loss_weights", self.loss_weights, "target_ids", ids, axes=2
    )
    if self.is_supervised is not None:
      checks.array(
        "is_supervised", self.is_supervised, dtype="boolean", axes=axes
      )
      checks.same_shape(
        "is_supervised", self.is_supervised, "target_ids", ids, axes=2
      )
    if self.segment_ids is not None:
      checks.array("segment_ids", self.segment_ids, dtype="integer", axes=axes)
      checks.same_shape(
        "segment_ids", self.segment_ids, "target_ids", ids, axes=2
      )
      if self.is_supervised is None:
        raise checks.fail(
          ValueError,
          "segment_ids must come with is_supervised",
          "is_supervised=None",
        )
    checks.batch_major("model_inputs", self.model_inputs, batch=ids.shape[0])

  def check_values(
    self, vocabulary_size: int | None = None, *, check_targets: bool = True
  ) -> None:
    """Refuses values that no loss can be right on.

    NumPy arrays are read on the host; device arrays by one compiled reduction
    and one scalar read. What is traced, abstract or not addressable from this
    process is not read.

    Args:
      vocabulary_size: the number of ids; None leaves their upper end open.
      check_targets: whether `target_ids` are going to be used.

    Raises:
      ValueError: a weight that is negative, NaN or infinite, a positive weight
        on a position that is not supervised, a supervised position whose
        segment id is not positive, or an id outside the vocabulary on a
        position of positive weight.
    """
    _check_values(_token_values(self, vocabulary_size, check_targets))


@pytree.record
class DenseTeacher:
  """A teacher's logits over the whole vocabulary.

  Attributes:
    logits: `[batch, length, vocabulary]` floating-point, aligned with the
      student's. -inf is probability 0.

  Raises:
    TypeError: no array, or not floating-point.
    ValueError: another rank, or an empty vocabulary.

  Example:
    >>> import numpy as np
    >>> DenseTeacher(logits=np.zeros((2, 3, 8), np.float32)).logits.shape
    (2, 3, 8)
  """

  logits: jax.Array | np.ndarray

  def __post_init__(self) -> None:
    check_logits("teacher logits", self.logits)


@pytree.record
class DiffusionDistillationBatch:
  """A student's batch and its teacher's view of the same inputs.

  Attributes:
    student_batch: the batch that the student is scored on.
    teacher: the teacher's distribution at the same positions.

  Raises:
    TypeError: a field of another class.
    ValueError: teacher and student differ in batch or length.

  Example:
    >>> import numpy as np
    >>> ids = np.zeros((2, 3), np.int32)
    >>> batch = DiffusionDistillationBatch(
    ...     student_batch=DiffusionTokenBatch(
    ...         model_inputs={"input_tokens": ids}, target_ids=ids,
    ...         loss_weights=np.ones((2, 3), np.float32)),
    ...     teacher=DenseTeacher(logits=np.zeros((2, 3, 8), np.float32)))
    >>> batch.check_values(vocabulary_size=8)
  """

  student_batch: DiffusionTokenBatch
  teacher: DenseTeacher

  def __post_init__(self) -> None:
    checks.instance("student_batch", self.student_batch, DiffusionTokenBatch)
    checks.instance("teacher", self.teacher, DenseTeacher)
    checks.same_shape(
      "teacher logits",
      self.teacher.logits,
      "target_ids",
      self.student_batch.target_ids,
      axes=2,
    )

  def check_values(
    self,
    vocabulary_size: int | None = None,
    *,
    check_targets: bool = True,
    check_teacher: bool = True,
  ) -> None:
    """Refuses values that no loss can be right on.

    Args:
      vocabulary_size: the number of ids; None leaves their upper end open.
      check_targets: whether the student batch's targets are going to be used.
      check_teacher: whether the teacher is going to be used.

    Raises:
      ValueError: as `DiffusionTokenBatch.check_values`; or another vocabulary
        than `vocabulary_size`, a NaN, a +inf or no finite logit in a teacher
        row on a position of positive weight.
    """
    values = _token_values(self.student_batch, vocabulary_size, check_targets)
    if check_teacher:
      logits = self.teacher.logits
      if vocabulary_size not in (None, logits.shape[-1]):
        raise checks.fail(
          ValueError,
          "teacher and student must have one vocabulary",
          f"teacher {logits.shape[-1]} and student {vocabulary_size}",
        )
      values["teacher"] = logits
    _check_values(values)


def shift_right(logits: jax.Array) -> jax.Array:
  """Aligns logits of a network that predicts the next position.

  `shift_right(z)[:, i] = z[:, i - 1]`, and `z[:, 0]` stays at position 0, for
  checkpoints that began as autoregressive models (Dream, DiffuLLaMA). The
  first position has no prediction of its own: give it weight 0, or keep it as
  these models do.

  Args:
    logits: `[batch, length, vocabulary]`.

  Returns:
    Logits of the same shape, aligned with same-position targets.

  Raises:
    ValueError: another rank.

  Example:
    >>> import jax.numpy as jnp
    >>> shift_right(jnp.arange(3.0).reshape(1, 3, 1)).ravel().tolist()
    [0.0, 0.0, 1.0]
  """
  check_logits("logits", logits)
  return jnp.concatenate([logits[:, :1], logits[:, :-1]], axis=1)


def check_logits(
  name: str, logits: Any, batch: DiffusionTokenBatch | None = None
) -> None:
  """Checks logits' rank, dtype and vocabulary, and their fit to a batch."""
  checks.array(
    name,
    logits,
    dtype="floating-point",
    axes=("batch", "length", "vocabulary"),
  )
  if logits.shape[-1] == 0:
    raise checks.fail(
      ValueError, f"{name} must have a non-empty vocabulary", logits.shape
    )
  if batch is not None and tuple(logits.shape[:2]) != tuple(
    batch.target_ids.shape
  ):
    raise checks.fail(
      ValueError,
      f"{name} must align with target_ids, shape [batch, length]",
      f"{tuple(logits.shape)} and {tuple(batch.target_ids.shape)}",
    )


def denominator_unit(batch: DiffusionTokenBatch, unit: str | None) -> str:
  """The unit that a loss divides by: the named one, or the batch's default.

  Args:
    batch: the batch.
    unit: one of `UNITS`, or None for "tokens" where the batch has
      `is_supervised` and "weights" where not.

  Raises:
    ValueError: an unknown unit, or one that counts supervised positions of a
      batch without `is_supervised`.
  """
  check_unit(unit)
  if unit is None:
    return "weights" if batch.is_supervised is None else "tokens"
  if unit in ("tokens", "sequences") and batch.is_supervised is None:
    raise checks.fail(
      ValueError,
      f"denominator {unit!r} must have a batch with is_supervised",
      "is_supervised=None",
    )
  return unit


def check_unit(unit: str | None) -> None:
  """Checks the name of a denominator's unit."""
  if unit is not None and unit not in UNITS:
    raise checks.fail(
      ValueError, f"denominator must be None or one of {UNITS}", repr(unit)
    )


def position_weights(
  batch: DiffusionTokenBatch, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
  """The loss weights in `dtype`, and where they are not 0.

  A weight that `check_values` would refuse is NaN.
  """
  weights = jnp.asarray(batch.loss_weights).astype(dtype)
  is_valid = (weights >= 0) & jnp.isfinite(weights)
  if batch.is_supervised is not None:
    is_valid &= (weights == 0) | jnp.asarray(batch.is_supervised)
  if batch.segment_ids is not None:
    is_valid &= ~_bad_segments(
      jnp, batch.is_supervised, numerics.token_ids(batch.segment_ids)
    )
  return jnp.where(is_valid, weights, jnp.nan), weights != 0


def batch_denominator(
  batch: DiffusionTokenBatch, unit: str | None, dtype: jnp.dtype
) -> jax.Array:
  """The denominator of a token loss, a scalar of `dtype`.

  "weights": the sum of the loss weights; "tokens": supervised positions;
  "masked": positions of positive weight; "sequences": rows with a supervised
  position, or the segments of rows with one.
  """
  unit = denominator_unit(batch, unit)
  weights, is_active = position_weights(batch, dtype)
  if unit == "weights":
    return numerics.masked_sum(weights, is_active)
  if unit == "masked":
    is_counted = is_active
  else:
    is_counted = jnp.asarray(batch.is_supervised)
    if unit == "sequences":
      is_counted = _is_sequence(is_counted, batch.segment_ids)
  # A count of 0 must not turn refused weights into a mean of 0.
  return numerics.poison(
    numerics.count(is_counted, dtype), ~jnp.any(jnp.isnan(weights))
  )


def _is_sequence(
  is_supervised: jax.Array, segment_ids: jax.typing.ArrayLike | None
) -> jax.Array:
  """True once for each sequence with a supervised position."""
  if segment_ids is None:
    return jnp.any(is_supervised, axis=1)
  # Each id that is left occurs once as the first of its equals.
  ordered = jnp.sort(
    jnp.where(is_supervised, numerics.token_ids(segment_ids), 0), axis=1
  )
  before = jnp.pad(ordered[:, :-1], ((0, 0), (1, 0)))
  return (ordered > 0) & (ordered != before)


# Value checks. Each says at which positions `[batch, length]` the named arrays
# are bad; `xp` is NumPy on the host and jax.numpy in the compiled form.


def _bad_weights(xp: Any, weights: Any) -> Any:
  return ~xp.isfinite(weights) | (weights < 0)


def _bad_supervision(xp: Any, weights: Any, is_supervised: Any) -> Any:
  return (weights != 0) & ~is_supervised


def _bad_segments(xp: Any, is_supervised: Any, segments: Any) -> Any:
  return is_supervised & (segments <= 0)


def _bad_targets(xp: Any, weights: Any, targets: Any, size: Any) -> Any:
  return (weights != 0) & ((targets < 0) | (targets >= size))


def _bad_teacher(xp: Any, weights: Any, teacher: Any) -> Any:
  is_finite = xp.isfinite(teacher)
  is_usable = is_finite | (teacher == -xp.inf)
  return (weights != 0) & ~(
    xp.all(is_usable, axis=-1) & xp.any(is_finite, axis=-1)
  )


# What is bad where, the arrays that the check reads (it reports the last), and
# what must hold.
_VALUE_CHECKS = (
  (
    _bad_weights,
    ("weights",),
    "loss_weights must be finite and nonnegative",
  ),
  (
    _bad_supervision,
    ("is_supervised", "weights"),
    "loss_weights must be 0 where is_supervised is False",
  ),
  (
    _bad_segments,
    ("is_supervised", "segments"),
    "segment_ids must be positive where is_supervised is True",
  ),
  (
    _bad_targets,
    ("size", "weights", "targets"),
    "active target_ids must be nonnegative and smaller than vocabulary"
    " size {size}",
  ),
  (
    _bad_teacher,
    ("weights", "teacher"),
    "active teacher logits must have a finite value in each row, no NaN"
    " and no +inf",
  ),
)


def _token_values(
  batch: DiffusionTokenBatch,
  vocabulary_size: int | None,
  check_targets: bool,
) -> dict[str, Any]:
  values: dict[str, Any] = {"weights": batch.loss_weights}
  if batch.is_supervised is not None:
    values["is_supervised"] = batch.is_supervised
  if batch.segment_ids is not None:
    values["segments"] = batch.segment_ids
  if check_targets:
    values["targets"] = batch.target_ids
    values["size"] = np.array(
      np.iinfo(np.int32).max if vocabulary_size is None else vocabulary_size
    )
  return values


def _as_read(array: Any) -> Any:
  """A float64 NumPy array as a loss will read it, maybe no longer finite."""
  if not isinstance(array, np.ndarray) or array.dtype != np.float64:
    return array
  with np.errstate(over="ignore"):
    return array.astype(jax.dtypes.canonicalize_dtype(np.float64))


def _check_values(values: dict[str, Any]) -> None:
  values = {name: _as_read(array) for name, array in values.items()}
  on_device = []
  for index, (_, names, _) in enumerate(_VALUE_CHECKS):
    read = [values[name] for name in names if name in values]
    if len(read) < len(names) or not checks.is_concrete(*read):
      continue
    if any(isinstance(array, jax.Array) for array in read):
      on_device.append(index)
    else:
      _check_on_host(index, values)
  if not on_device:
    return
  wanted = {name for index in on_device for name in _VALUE_CHECKS[index][1]}
  arrays = {name: values[name] for name in wanted}
  for name in wanted & {"targets", "size", "segments"}:
    arrays[name] = numerics.token_ids(arrays[name])
  if _is_any_bad(tuple(on_device), arrays):
    for index in on_device:
      _check_on_host(index, {name: np.asarray(values[name]) for name in wanted})


@functools.partial(jax.jit, static_argnums=0)
def _is_any_bad(indices: tuple[int, ...], arrays: dict[str, Any]) -> jax.Array:
  if "weights" in arrays:
    weights = arrays["weights"]
    arrays["weights"] = weights.astype(
      numerics.accumulation_dtype(weights.dtype)
    )
  if "size" in arrays:
    arrays["size"] = arrays["size"].astype(arrays["targets"].dtype)
  flags = []
  for index in indices:
    is_bad, names, _ = _VALUE_CHECKS[index]
    bad = is_bad(jnp, **{name: arrays[name] for name in names})
    flags.append(jnp.any(bad))
  return jnp.any(jnp.stack(flags))


def _check_on_host(index: int, values: dict[str, Any]) -> None:
  is_bad, names, must = _VALUE_CHECKS[index]
  arrays = {name: values[name] for name in names}
  bad = is_bad(np, **arrays)
  if not bad.any():
    return
  position = tuple(int(i) for i in np.argwhere(bad)[0])
  received = arrays[names[-1]][position]
  if received.ndim:  # a teacher's row: its first entry that is not usable
    unusable = np.isnan(received) | (received == np.inf)
    first = int(np.argmax(unusable))
    received = received[first] if unusable.any() else "no finite value"
    position += (first,) if unusable.any() else ()
  more = int(bad.sum()) - 1
  raise checks.fail(
    ValueError,
    must.format(**arrays),
    f"{received} at {list(position)}" + (f" and {more} more" if more else ""),
  )
