"""From an item of the data set to a checked batch, before the compiled step."""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
from typing import Any

from flax import nnx
import jax

from diffusion_objectives import batches
from diffusion_objectives._core import checks
from diffusion_objectives.objectives import linear_vocabulary
from diffusion_objectives.trainers.tunix import frozen_arrays
from diffusion_objectives.trainers.tunix import identity

# `(model, model_inputs)`, and what is frozen where the call says so.
LogitsFn = Callable[..., jax.Array]
HiddenFn = Callable[..., tuple[jax.Array, linear_vocabulary.OutputHead]]
BatchAdapter = Callable[[Any], Any]


def model_logits(model: nnx.Module, model_inputs: Any) -> jax.Array:
  """The default scorer: `model(**model_inputs)`, the first of a tuple.

  Tunix's own classes return `(logits, cache)`.

  Args:
    model: the network.
    model_inputs: a mapping of keyword arguments.

  Returns:
    `[batch, length, vocabulary]` logits.

  Raises:
    TypeError: `model_inputs` is no mapping.

  Example:
    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> table = nnx.Embed(8, 8, rngs=nnx.Rngs(0))
    >>> model_logits(table, {"inputs": jnp.array([[1, 2]])}).shape
    (1, 2, 8)
  """
  if not isinstance(model_inputs, Mapping):
    raise checks.fail(
      TypeError,
      "model_inputs must be a mapping of the model's keyword arguments",
      checks.describe(model_inputs),
    )
  result = model(**model_inputs)
  return result[0] if isinstance(result, tuple) else result


def token_batch(batch: Any) -> batches.DiffusionTokenBatch:
  """Ours from Tunix main's own `tunix.diffusion.DiffusionTokenBatch`.

  It has the same three fields and no `is_supervised`, so that its denominator
  is the sum of the weights. `configure_diffusion_sft` converts such batches by
  itself; a `DiffusionDistillationBatch` is built from a converted one.

  Args:
    batch: anything with `model_inputs`, `target_ids` and `loss_weights`; a
      batch of this library is returned as it is.

  Returns:
    A `DiffusionTokenBatch`, checked as at any construction.

  Raises:
    TypeError: a field is missing, or no array where one must be.
    ValueError: as `DiffusionTokenBatch`.

  Example:
    >>> import types
    >>> import numpy as np
    >>> ids = np.zeros((1, 2), np.int32)
    >>> theirs = types.SimpleNamespace(
    ...     model_inputs={"input_tokens": ids}, target_ids=ids,
    ...     loss_weights=np.ones((1, 2), np.float32))
    >>> token_batch(theirs).target_ids.shape
    (1, 2)
  """
  if isinstance(batch, batches.DiffusionTokenBatch):
    return batch
  if not _has_token_fields(batch):
    raise checks.fail(
      TypeError,
      f"batch must have the fields {', '.join(_TOKEN_FIELDS)}",
      checks.describe(batch),
    )
  return batches.DiffusionTokenBatch(
    **{name: getattr(batch, name) for name in _TOKEN_FIELDS}
  )


_TOKEN_FIELDS = ("model_inputs", "target_ids", "loss_weights")


def _has_token_fields(batch: Any) -> bool:
  return all(hasattr(batch, name) for name in _TOKEN_FIELDS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scorer:
  """How a network is scored: by its logits, or by hidden states and head.

  One of the functions is None.
  """

  logits_fn: LogitsFn | None
  hidden_fn: HiddenFn | None
  name: str = "hidden_fn"

  @classmethod
  def of(
    cls,
    logits_fn: LogitsFn | None,
    hidden_fn: HiddenFn | None,
    *,
    logits_name: str = "logits_fn",
  ) -> "Scorer":
    """Takes one of them, or the default where none is given."""
    for name, value in ((logits_name, logits_fn), ("hidden_fn", hidden_fn)):
      if value is not None:
        checks.function(name, value)
    if hidden_fn is None:
      return cls(logits_fn=logits_fn or model_logits, hidden_fn=None)
    if logits_fn is not None:
      raise checks.fail(
        ValueError,
        f"at most one of {logits_name} and hidden_fn must be given",
        "both",
      )
    return cls(logits_fn=None, hidden_fn=hidden_fn)

  def logits(self, model: Any, model_inputs: Any, *given: Any) -> jax.Array:
    assert self.logits_fn is not None
    return self.logits_fn(model, model_inputs, *given)

  def hidden_and_head(
    self, model: Any, model_inputs: Any, *given: Any
  ) -> tuple[jax.Array, linear_vocabulary.OutputHead]:
    """The checked result of `hidden_fn`."""
    assert self.hidden_fn is not None
    result = self.hidden_fn(model, model_inputs, *given)
    is_pair = isinstance(result, tuple) and len(result) == 2
    if not is_pair or not isinstance(result[1], linear_vocabulary.OutputHead):
      received = (
        f"({', '.join(map(checks.describe, result))})"
        if isinstance(result, tuple)
        else checks.describe(result)
      )
      raise checks.fail(
        TypeError,
        f"the {self.name}'s result must be (hidden [batch, length, features],"
        " OutputHead)",
        received,
      )
    hidden, head = result
    batches.check_hidden(f"the {self.name}'s hidden", hidden)
    check_features(f"the {self.name}'s hidden", hidden, head)
    return hidden, head

  def vocabulary_size(
    self,
    model: Any,
    tokens: batches.DiffusionTokenBatch,
    frozen: frozen_arrays.Frozen | None = None,
  ) -> int:
    """Of the network's output on a batch, by its shapes alone."""
    arrays = frozen.arrays if frozen else ()

    def outputs(model, model_inputs, arrays):
      given = (frozen.rebuild(arrays),) if frozen else ()
      if self.hidden_fn is None:
        return self.logits(model, model_inputs, *given)
      return self.hidden_and_head(model, model_inputs, *given)

    result = nnx.eval_shape(outputs, model, tokens.model_inputs, arrays)
    if self.hidden_fn is None:
      batches.check_logits("logits", result, tokens)
      return result.shape[-1]
    hidden, head = result
    batches.check_hidden(f"the {self.name}'s hidden", hidden, tokens)
    return head.size


def check_features(
  name: str, hidden: Any, head: linear_vocabulary.OutputHead
) -> None:
  """Checks that a head can be applied to hidden states."""
  if hidden.shape[-1] != head.features:
    raise checks.fail(
      ValueError,
      f"{name} must have the features of its OutputHead, {head.features}",
      checks.describe(hidden),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Teacher:
  """A teacher that is frozen: its head, or all of it.

  Attributes:
    frozen: its arrays.
    head: where batches bring its hidden states.
    scorer: where the compiled step scores it.
  """

  frozen: frozen_arrays.Frozen
  head: linear_vocabulary.OutputHead | None
  scorer: Scorer | None

  @classmethod
  def of(cls, value: Any, scorer: Scorer | None) -> "Teacher":
    is_module = isinstance(value, nnx.Module)
    return cls(
      frozen=frozen_arrays.Frozen.of(value),
      head=None if is_module else value,
      scorer=scorer if is_module else None,
    )

  def vocabulary_size(self, tokens: batches.DiffusionTokenBatch) -> int:
    if self.head is not None:
      return self.head.size
    scorer = self.scorer
    assert scorer is not None

    def hidden_fn(arrays, model_inputs):
      return scorer.hidden_and_head(self.frozen.rebuild(arrays), model_inputs)

    rebuilt = dataclasses.replace(scorer, hidden_fn=hidden_fn)
    return rebuilt.vocabulary_size(self.frozen.arrays, tokens)


@dataclasses.dataclass
class Preparation:
  """The adapter of the two token objectives.

  It fixes the denominator's unit by the first batch, learns the vocabulary's
  size from the scorer's shapes, and checks values.
  """

  kind: type
  trainer: Any
  batch_adapter: BatchAdapter | None
  scorer: Scorer
  denominator: str | None
  check_values: bool
  identity: identity.Identity
  value_options: Mapping[str, bool] = dataclasses.field(default_factory=dict)
  frozen: frozen_arrays.Frozen | None = None  # what the scorer takes
  teacher: Teacher | None = None
  unit: str | None = None
  vocabulary_size: int | None = None

  def __post_init__(self) -> None:
    if self.batch_adapter is not None:
      checks.function("batch_adapter", self.batch_adapter)

  def __call__(self, item: Any) -> Any:
    batch = self.batch_adapter(item) if self.batch_adapter else item
    is_of_tokens = self.kind is batches.DiffusionTokenBatch
    if is_of_tokens and _has_token_fields(batch):
      batch = token_batch(batch)
    source = (
      "the batch_adapter's result"
      if self.batch_adapter
      else "an item of the data set (there is no batch_adapter)"
    )
    checks.instance(source, batch, self.kind)
    tokens = batch if is_of_tokens else batch.student_batch
    unit = batches.denominator_unit(tokens, self.denominator)
    if self.unit not in (None, unit):
      raise checks.fail(
        ValueError,
        "every batch must have the denominator unit of the first,"
        f" {self.unit!r}",
        f"one of unit {unit!r}",
      )
    if not is_of_tokens:
      self._check_teacher(batch.teacher)
    if self.vocabulary_size is None:
      self.vocabulary_size = self._vocabulary_size(tokens)
    if self.check_values:
      batch.check_values(self.vocabulary_size, **self.value_options)
    if self.unit is None:  # fixed by the first batch that passed
      self.identity.fix_denominator(unit)
      self.unit = unit
    return batch

  def _check_teacher(self, teacher: Any) -> None:
    """Refuses a teacher's hidden states without the head that they need."""
    if not isinstance(teacher, batches.HiddenTeacher):
      return
    head = self.teacher.head if self.teacher else None
    if head is None:
      raise checks.fail(
        ValueError,
        "a HiddenTeacher must come with its head, hidden_fn= and"
        " frozen=OutputHead",
        "none",
      )
    check_features("teacher hidden", teacher.hidden, head)

  def _vocabulary_size(self, tokens: batches.DiffusionTokenBatch) -> int:
    size = self.scorer.vocabulary_size(self.trainer.model, tokens, self.frozen)
    if self.teacher is not None:
      theirs = self.teacher.vocabulary_size(tokens)
      if theirs != size:
        raise checks.fail(
          ValueError,
          "teacher and student must have one vocabulary",
          f"teacher {theirs} and student {size}",
        )
    return size
