"""Batches: what a loss needs beside the network's output.

Records are frozen, keyword-only pytrees. Every array leaf is batch-major. A
record checks types, dtypes and shapes when a person builds it, and never when
JAX rebuilds it; values are read by `check_values` alone.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
import dataclasses
import functools
from typing import Any
from typing import NamedTuple

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
class HiddenTeacher:
  """A teacher's hidden states; its output head is given to the loss beside it.

  Attributes:
    hidden: `[batch, length, features]` floating-point, what the teacher's
      output head is applied to.

  Raises:
    TypeError: no array, or not floating-point.
    ValueError: another rank, or no feature.

  Example:
    >>> import numpy as np
    >>> HiddenTeacher(hidden=np.zeros((2, 3, 4), np.float32)).hidden.shape
    (2, 3, 4)
  """

  hidden: jax.Array | np.ndarray

  def __post_init__(self) -> None:
    check_hidden("teacher hidden", self.hidden)


@pytree.record
class TopKTeacher:
  """A teacher's `k` listed ids; all other ids together are its tail.

  The log-probabilities are true ones, `log softmax(y / T)` over the whole
  vocabulary, taken before the list was cut: what they leave of 1 is the tail's.
  A total above 1 by up to 1e-3 counts as rounding of stored values and is
  divided out. Store them in float32: bfloat16 rounds the probability of a
  log-probability of -1 by 0.4 %, of -10 by 4 %, and may be refused.

  Attributes:
    token_ids: `[batch, length, k]` integer, distinct in each row.
    log_probs: `[batch, length, k]` floating-point, nats; -inf is probability 0.
    temperature: the `T > 0` that the log-probabilities were taken at, a Python
      number and part of the tree's structure. A loss refuses another.
    is_valid: `[batch, length, k]` boolean or None. Slots that list nothing are
      False: their id and log-probability may hold anything.

  Raises:
    TypeError: no array where one must be, or another dtype.
    ValueError: another rank or shape, no slot, or a temperature not positive.

  Example:
    >>> import numpy as np
    >>> probs = np.array([[[0.5, 0.3]]], np.float32)  # the tail has 0.2
    >>> teacher = TopKTeacher(token_ids=np.array([[[7, 2]]]),
    ...                       log_probs=np.log(probs), temperature=1.0)
    >>> teacher.log_probs.shape
    (1, 1, 2)
  """

  token_ids: jax.Array | np.ndarray
  log_probs: jax.Array | np.ndarray
  temperature: float = dataclasses.field(metadata={"static": True})
  is_valid: jax.Array | np.ndarray | None = None

  def __post_init__(self) -> None:
    axes = ("batch", "length", "k")
    ids = self.token_ids
    checks.array("token_ids", ids, dtype="integer", axes=axes)
    if ids.shape[-1] == 0:
      raise checks.fail(
        ValueError, "token_ids must list at least one id", ids.shape
      )
    checks.array("log_probs", self.log_probs, dtype="floating-point", axes=axes)
    checks.same_shape("log_probs", self.log_probs, "token_ids", ids, axes=3)
    if self.is_valid is not None:
      checks.array("is_valid", self.is_valid, dtype="boolean", axes=axes)
      checks.same_shape("is_valid", self.is_valid, "token_ids", ids, axes=3)
    checks.temperature(self.temperature)


@pytree.record
class SampledTokenTeacher:
  """A teacher's log-probability of the one id that the student sampled.

  The sampled ids are the student batch's `target_ids`.

  Attributes:
    log_probs: `[batch, length]` floating-point, nats: `log softmax(y / T)` over
      the whole vocabulary at `target_ids`; -inf is probability 0.
    temperature: the `T > 0` that they were taken at, a Python number and part
      of the tree's structure. A loss refuses another.

  Raises:
    TypeError: no array, or not floating-point.
    ValueError: another rank, or a temperature not positive.

  Example:
    >>> import numpy as np
    >>> log_probs = np.zeros((2, 3), np.float32)
    >>> SampledTokenTeacher(log_probs=log_probs, temperature=1.0).temperature
    1.0
  """

  log_probs: jax.Array | np.ndarray
  temperature: float = dataclasses.field(metadata={"static": True})

  def __post_init__(self) -> None:
    checks.array(
      "log_probs",
      self.log_probs,
      dtype="floating-point",
      axes=("batch", "length"),
    )
    checks.temperature(self.temperature)


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
  teacher: DenseTeacher | HiddenTeacher | TopKTeacher | SampledTokenTeacher

  def __post_init__(self) -> None:
    checks.instance("student_batch", self.student_batch, DiffusionTokenBatch)
    teacher = self.teacher
    checks.instance(
      "teacher",
      teacher,
      DenseTeacher,
      HiddenTeacher,
      TopKTeacher,
      SampledTokenTeacher,
    )
    if isinstance(teacher, DenseTeacher):
      name, values = "logits", teacher.logits
    elif isinstance(teacher, HiddenTeacher):
      name, values = "hidden", teacher.hidden
    else:
      name, values = "log_probs", teacher.log_probs
    ids = self.student_batch.target_ids
    checks.same_shape(f"teacher {name}", values, "target_ids", ids, axes=2)

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
      ValueError: as `DiffusionTokenBatch.check_values`; or, on a position of
        positive weight, a teacher that is no distribution: a NaN or +inf, a
        row without a finite value, another vocabulary than `vocabulary_size`;
        of a top-k teacher's valid slots an id outside the vocabulary or listed
        twice, or a total probability above 1.001 (below 0.999 where the whole
        vocabulary is listed); a sampled id's probability above 1.001.
    """
    values = _token_values(self.student_batch, vocabulary_size, check_targets)
    if check_teacher:
      values |= _teacher_values(self.teacher, vocabulary_size)
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
    axes=("batch", "length", "vocab"),
  )
  if logits.shape[-1] == 0:
    raise checks.fail(
      ValueError, f"{name} must have a non-empty vocabulary", logits.shape
    )
  _check_aligned(name, logits, batch)


def check_hidden(
  name: str, hidden: Any, batch: DiffusionTokenBatch | None = None
) -> None:
  """Checks hidden states' rank, dtype, features, and their fit to a batch."""
  checks.array(
    name, hidden, dtype="floating-point", axes=("batch", "length", "features")
  )
  if hidden.shape[-1] == 0:
    raise checks.fail(
      ValueError, f"{name} must have at least one feature", hidden.shape
    )
  _check_aligned(name, hidden, batch)


def _check_aligned(
  name: str, values: Any, batch: DiffusionTokenBatch | None
) -> None:
  if batch is not None and tuple(values.shape[:2]) != tuple(
    batch.target_ids.shape
  ):
    raise checks.fail(
      ValueError,
      f"{name} must align with target_ids, shape [batch, length]",
      f"{tuple(values.shape)} and {tuple(batch.target_ids.shape)}",
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
  weights = numerics.cast(batch.loss_weights, dtype)
  is_valid = (weights >= 0) & jnp.isfinite(weights)
  if batch.is_supervised is not None:
    is_valid &= (weights == 0) | jnp.asarray(batch.is_supervised)
  if batch.segment_ids is not None:
    segments = numerics.token_ids(batch.segment_ids)
    is_counted = (segments > 0) & (segments < jnp.iinfo(segments.dtype).max)
    is_valid &= is_counted | ~jnp.asarray(batch.is_supervised)
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


def check_teacher_temperature(
  teacher: TopKTeacher | SampledTokenTeacher, temperature: float
) -> None:
  """Checks that log-probabilities were taken at a loss's temperature."""
  if teacher.temperature != temperature:
    raise checks.fail(
      ValueError,
      "temperature must be that of the teacher's log_probs",
      f"{temperature} and a teacher at {float(teacher.temperature)}",
    )


class ListedCategories(NamedTuple):
  """A top-k teacher's `k` ids and their tail, cleaned.

  Attributes:
    ids: `[batch, length, k]`, 0 where nothing is listed.
    is_listed: `[batch, length, k]`.
    logits: `[batch, length, k + 1]`, `T log p` of the ids and of the tail.
    best_id: `[batch, length]`, the most probable listed id.
  """

  ids: jax.Array
  is_listed: jax.Array
  logits: jax.Array
  best_id: jax.Array


def listed_categories(
  teacher: TopKTeacher,
  is_active: jax.Array,
  temperature: float,
  dtype: jnp.dtype,
  vocabulary_size: int,
) -> ListedCategories:
  """The `k + 1` categories of a top-k teacher at the loss's temperature."""
  check_teacher_temperature(teacher, temperature)
  is_listed = jnp.broadcast_to(is_active[..., None], teacher.token_ids.shape)
  if teacher.is_valid is not None:
    is_listed &= jnp.asarray(teacher.is_valid)
  ids = numerics.clean_ids(teacher.token_ids, is_listed)
  log_probs = jnp.where(
    is_listed, jnp.asarray(teacher.log_probs).astype(dtype), -jnp.inf
  )
  mass = jnp.sum(jnp.exp(log_probs), axis=-1, keepdims=True)
  # Rounding must not leave mass on the tail of a list that has every id.
  listed = jnp.sum(is_listed, axis=-1, keepdims=True)
  has_tail = (mass < 1) & (listed != vocabulary_size)
  tail = jnp.where(has_tail, jnp.log1p(-jnp.where(has_tail, mass, 0)), -jnp.inf)
  best = jnp.argmax(log_probs, axis=-1)[..., None]
  return ListedCategories(
    ids=ids,
    is_listed=is_listed,
    logits=temperature * jnp.concatenate([log_probs, tail], axis=-1),
    best_id=jnp.take_along_axis(ids, best, axis=-1)[..., 0],
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


# Value checks. Each yields what must hold, where it does not (at positions
# `[batch, length]` or at entries of an array) and what to report there; `xp` is
# NumPy on the host and jax.numpy in a compiled form.

# By how much stored probabilities may add up to more than 1: their rounding.
MASS_ROUNDING = 1e-3

Faults = Iterator[tuple[str, Any, Any]]


def _weight_faults(xp: Any, weights: Any) -> Faults:
  yield (
    "loss_weights must be finite and nonnegative",
    ~xp.isfinite(weights) | (weights < 0),
    weights,
  )


def _supervision_faults(xp: Any, is_supervised: Any, weights: Any) -> Faults:
  yield (
    "loss_weights must be 0 where is_supervised is False",
    (weights != 0) & ~is_supervised,
    weights,
  )


def _segment_faults(xp: Any, is_supervised: Any, segments: Any) -> Faults:
  yield (
    "segment_ids must be positive where is_supervised is True",
    is_supervised & (segments <= 0),
    segments,
  )
  # JAX narrows NumPy's; those that do not fit are saturated, and so refused.
  narrow = segments.dtype if xp is jnp else jnp.asarray(segments[:0]).dtype
  largest = jnp.iinfo(narrow).max
  yield (
    f"segment_ids must be smaller than {largest} where is_supervised is True",
    is_supervised & (segments >= largest),
    segments,
  )


def _target_faults(xp: Any, size: Any, weights: Any, targets: Any) -> Faults:
  yield (
    "active target_ids must be nonnegative and smaller than vocabulary"
    f" size {size}",
    (weights != 0) & ((targets < 0) | (targets >= size)),
    targets,
  )


def _logit_faults(xp: Any, weights: Any, teacher_logits: Any) -> Faults:
  is_finite = xp.isfinite(teacher_logits)
  is_usable = is_finite | (teacher_logits == -xp.inf)
  bad = ~(xp.all(is_usable, axis=-1) & xp.any(is_finite, axis=-1))
  yield (
    "active teacher logits must have a finite value in each row, no NaN"
    " and no +inf",
    (weights != 0) & bad,
    teacher_logits,
  )


def _hidden_faults(xp: Any, weights: Any, teacher_hidden: Any) -> Faults:
  is_finite = xp.isfinite(teacher_hidden)
  yield (
    "active teacher hidden states must be finite",
    (weights != 0)[..., None] & ~is_finite,
    teacher_hidden,
  )


def _top_k_faults(
  xp: Any, size: Any, weights: Any, is_valid: Any, listed: Any, log_probs: Any
) -> Faults:
  is_active = weights != 0
  is_read = xp.broadcast_to(is_active[..., None] & is_valid, listed.shape)
  yield (
    "active teacher token_ids must be nonnegative and smaller than vocabulary"
    f" size {size}",
    is_read & ((listed < 0) | (listed >= size)),
    listed,
  )
  # What slots hold that are not read is negative and distinct.
  others = ~xp.arange(listed.shape[-1], dtype=listed.dtype)
  ids = xp.where(is_read, listed, xp.broadcast_to(others, listed.shape))
  ids = xp.sort(ids, axis=-1)
  is_repeated = ids[..., 1:] == ids[..., :-1]
  yield (
    "active teacher token_ids must be distinct in each row",
    is_active & xp.any(is_repeated, axis=-1),
    xp.max(xp.where(is_repeated, ids[..., 1:], -1), axis=-1, initial=-1),
  )
  is_number = ~xp.isnan(log_probs) & (log_probs != xp.inf)
  yield (
    "active teacher log_probs must be neither NaN nor +inf",
    is_read & ~is_number,
    log_probs,
  )
  finite = xp.sum(is_read & xp.isfinite(log_probs), axis=-1)
  yield (
    "active teacher rows must list at least one id of finite log_probs",
    is_active & (finite == 0),
    finite,
  )
  probs = xp.exp(_wide(xp, xp.where(is_read & is_number, log_probs, -xp.inf)))
  mass = xp.sum(probs, axis=-1)
  is_whole = xp.sum(is_read, axis=-1, dtype=size.dtype) == size
  yield (
    f"active teacher probabilities must sum to at most {1 + MASS_ROUNDING},"
    f" and to at least {1 - MASS_ROUNDING} where all {size} ids are listed",
    is_active
    & ((mass > 1 + MASS_ROUNDING) | (is_whole & (mass < 1 - MASS_ROUNDING))),
    mass,
  )


def _sample_faults(xp: Any, weights: Any, sampled: Any) -> Faults:
  is_number = ~xp.isnan(sampled) & (sampled != xp.inf)
  probs = xp.exp(_wide(xp, xp.where(is_number, sampled, xp.inf)))
  yield (
    "active teacher log_probs must be no NaN and of a probability of at most"
    f" {1 + MASS_ROUNDING}",
    (weights != 0) & ~(probs <= 1 + MASS_ROUNDING),
    sampled,
  )


def _wide(xp: Any, array: Any) -> Any:
  return array.astype(
    np.float64 if xp is np else numerics.accumulation_dtype(array.dtype)
  )


# Each check, and the arrays that it reads.
_VALUE_CHECKS: tuple[tuple[Callable[..., Faults], tuple[str, ...]], ...] = (
  (_weight_faults, ("weights",)),
  (_supervision_faults, ("is_supervised", "weights")),
  (_segment_faults, ("is_supervised", "segments")),
  (_target_faults, ("size", "weights", "targets")),
  (_logit_faults, ("weights", "teacher_logits")),
  (_hidden_faults, ("weights", "teacher_hidden")),
  (_top_k_faults, ("size", "weights", "is_valid", "listed", "log_probs")),
  (_sample_faults, ("weights", "sampled")),
)

_IDS = ("segments", "targets", "listed")


def is_usable_teacher(
  teacher: TopKTeacher | SampledTokenTeacher,
  weights: jax.Array,
  vocabulary_size: int,
) -> jax.Array:
  """Where `[batch, length]` the value check refuses nothing, under trace."""
  values = _teacher_values(teacher, vocabulary_size) | {"weights": weights}
  faults = _top_k_faults if isinstance(teacher, TopKTeacher) else _sample_faults
  names = dict(_VALUE_CHECKS)[faults]
  is_usable = jnp.ones(weights.shape, bool)
  for _, bad, _ in faults(jnp, **_readable(names, values)):
    is_usable &= ~(bad if bad.ndim == weights.ndim else jnp.any(bad, axis=-1))
  return is_usable


def _readable(names: Iterable[str], values: dict[str, Any]) -> dict[str, Any]:
  """The named values as device arrays, ids and size of one signed dtype."""
  arrays = {
    name: numerics.token_ids(values[name])
    if name in (*_IDS, "size")
    else jnp.asarray(values[name])
    for name in names
  }
  ids = [arrays[name].dtype for name in _IDS if name in arrays]
  wide = jnp.int64 if jnp.dtype(jnp.int64) in ids else jnp.int32
  for name in {*_IDS, "size"} & arrays.keys():
    arrays[name] = arrays[name].astype(wide)
  if "weights" in arrays:
    weights = arrays["weights"]
    arrays["weights"] = weights.astype(
      numerics.accumulation_dtype(weights.dtype)
    )
  return arrays


def _size(vocabulary_size: int | None) -> np.ndarray:
  return np.array(
    np.iinfo(np.int32).max if vocabulary_size is None else vocabulary_size
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
    values["size"] = _size(vocabulary_size)
  return values


def _teacher_values(
  teacher: DenseTeacher | HiddenTeacher | TopKTeacher | SampledTokenTeacher,
  vocabulary_size: int | None,
) -> dict[str, Any]:
  if isinstance(teacher, SampledTokenTeacher):
    return {"sampled": teacher.log_probs}
  if isinstance(teacher, HiddenTeacher):
    return {"teacher_hidden": teacher.hidden}
  if isinstance(teacher, TopKTeacher):
    return {
      "size": _size(vocabulary_size),
      "is_valid": np.True_ if teacher.is_valid is None else teacher.is_valid,
      "listed": teacher.token_ids,
      "log_probs": teacher.log_probs,
    }
  size = teacher.logits.shape[-1]
  if vocabulary_size not in (None, size):
    raise checks.fail(
      ValueError,
      "teacher and student must have one vocabulary",
      f"teacher {size} and student {vocabulary_size}",
    )
  return {"teacher_logits": teacher.logits}


def _as_read(array: Any) -> Any:
  """A float64 NumPy array as a loss will read it, maybe no longer finite."""
  if not isinstance(array, np.ndarray) or array.dtype != np.float64:
    return array
  with np.errstate(over="ignore"):
    return array.astype(jax.dtypes.canonicalize_dtype(np.float64))


def _check_values(values: dict[str, Any]) -> None:
  values = {name: _as_read(array) for name, array in values.items()}
  on_device = []
  for index, (_, names) in enumerate(_VALUE_CHECKS):
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
  arrays = {
    name: numerics.token_ids(values[name])
    if name in (*_IDS, "size")
    else values[name]
    for name in wanted
  }
  if _is_any_bad(tuple(on_device), arrays):
    for index in on_device:
      _check_on_host(index, {name: np.asarray(values[name]) for name in wanted})


@functools.partial(jax.jit, static_argnums=0)
def _is_any_bad(indices: tuple[int, ...], arrays: dict[str, Any]) -> jax.Array:
  arrays = _readable(arrays, arrays)
  flags = []
  for index in indices:
    faults, names = _VALUE_CHECKS[index]
    for _, bad, _ in faults(jnp, **{name: arrays[name] for name in names}):
      flags.append(jnp.any(bad))
  return jnp.any(jnp.stack(flags))


def _check_on_host(index: int, values: dict[str, Any]) -> None:
  faults, names = _VALUE_CHECKS[index]
  arrays = {
    name: values[name].astype(np.int64) if name == "listed" else values[name]
    for name in names
  }
  with np.errstate(over="ignore"):
    for must, bad, report in faults(np, **arrays):
      if bad.any():
        raise _fault(must, bad, report)


def _fault(must: str, bad: np.ndarray, report: np.ndarray) -> Exception:
  position = tuple(int(i) for i in np.argwhere(bad)[0])
  received = report[position]
  if received.ndim:  # a teacher's row: its first entry that is not usable
    unusable = np.isnan(received) | (received == np.inf)
    first = int(np.argmax(unusable))
    received = received[first] if unusable.any() else "no finite value"
    position += (first,) if unusable.any() else ()
  more = int(bad.sum()) - 1
  return checks.fail(
    ValueError,
    must,
    f"{received} at {list(position)}" + (f" and {more} more" if more else ""),
  )
