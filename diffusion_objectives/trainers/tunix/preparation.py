"""From an item of the data set to a checked batch, before the compiled step."""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import inspect
from typing import Any

from flax import nnx
import jax

from diffusion_objectives import batches
from diffusion_objectives._core import checks
from diffusion_objectives.objectives import linear_vocabulary
from diffusion_objectives.objectives.linear_vocabulary import head as heads
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
  check_model_inputs(model_inputs)
  result = model(**model_inputs)
  return result[0] if isinstance(result, tuple) else result


def check_model_inputs(model_inputs: Any) -> None:
  """Checks what a network is called with by name."""
  if not isinstance(model_inputs, Mapping):
    raise checks.fail(
      TypeError,
      "model_inputs must be a mapping of the model's keyword arguments",
      checks.describe(model_inputs),
    )


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
class LogitsScorer:
  """How a network is scored: by its logits."""

  function: LogitsFn

  def __call__(self, model: Any, model_inputs: Any, *given: Any) -> jax.Array:
    return self.function(model, model_inputs, *given)

  def check_output(
    self, logits: Any, tokens: batches.DiffusionTokenBatch
  ) -> int:
    """Checks shapes against a batch's and returns the vocabulary's size."""
    batches.check_logits("logits", logits, tokens)
    return logits.shape[-1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiddenScorer:
  """How a network is scored: by hidden states and head."""

  function: HiddenFn
  name: str = "hidden_fn"

  def __call__(
    self, model: Any, model_inputs: Any, *given: Any
  ) -> tuple[jax.Array, linear_vocabulary.OutputHead]:
    """The checked result of the function."""
    result = self.function(model, model_inputs, *given)
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
    heads.check_features(f"the {self.name}'s hidden", hidden, head)
    return hidden, head

  def check_output(
    self,
    output: tuple[Any, linear_vocabulary.OutputHead],
    tokens: batches.DiffusionTokenBatch,
  ) -> int:
    """Checks shapes against a batch's and returns the vocabulary's size."""
    hidden, head = output
    batches.check_hidden(f"the {self.name}'s hidden", hidden, tokens)
    return head.size


Scorer = LogitsScorer | HiddenScorer


def scorer_of(
  logits_fn: LogitsFn | None,
  hidden_fn: HiddenFn | None,
  *,
  logits_name: str = "logits_fn",
  parameters: tuple[str, ...] = ("model", "model_inputs"),
) -> Scorer:
  """Takes one of the functions, or the default where none is given."""
  for name, value in ((logits_name, logits_fn), ("hidden_fn", hidden_fn)):
    if value is not None:
      check_takes(name, value, *parameters)
  if hidden_fn is None:
    return LogitsScorer(function=logits_fn or model_logits)
  if logits_fn is not None:
    raise checks.fail(
      ValueError,
      f"at most one of {logits_name} and hidden_fn must be given",
      "both",
    )
  return HiddenScorer(function=hidden_fn)


def check_takes(name: str, function: Any, *parameters: str) -> None:
  """Checks that a function can be called with so many arguments."""
  checks.function(name, function)
  try:
    signature = inspect.signature(function)
  except ValueError:  # a builtin has none
    return
  try:
    signature.bind(*parameters)
  except TypeError:
    raise checks.fail(
      TypeError,
      f"{name} must take ({', '.join(parameters)})",
      f"({', '.join(map(str, signature.parameters.values()))})",
    ) from None


@dataclasses.dataclass
class Preparation:
  """The adapter of the two token objectives.

  It fixes the denominator's unit by the first batch, learns the vocabulary's
  size from the scorer's shapes, and checks values.

  Attributes:
    kind: of the batch.
    frozen: the teacher where `teacher` is a scorer, the head of hidden teachers
      where it is a head, else the third argument of `scorer`'s function.
    teacher: how the frozen network is scored, or the frozen head by its shapes.
    uses_teacher: whether the loss has a term of the teacher.
    unit: of the denominator, once it is known.
    vocabulary_size: of the scorer's output, once it is known.
  """

  kind: type
  trainer: Any
  batch_adapter: BatchAdapter | None
  scorer: Scorer
  denominator: str | None
  check_values: bool
  identity: identity.Identity
  value_options: Mapping[str, bool] = dataclasses.field(default_factory=dict)
  frozen: frozen_arrays.Frozen | None = None
  teacher: HiddenScorer | linear_vocabulary.OutputHead | None = None
  uses_teacher: bool = False
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
    head = None
    if self.uses_teacher and not is_of_tokens:
      head = self._head_of(batch.teacher)
    if self.vocabulary_size is None:
      self.vocabulary_size = self._vocabulary_size(tokens)
    if head is not None:
      _check_one_vocabulary(head.size, self.vocabulary_size)
    if self.check_values:
      batch.check_values(self.vocabulary_size, **self.value_options)
    if self.unit is None:  # fixed by the first batch that passed
      self.identity.fix_denominator(unit)
      self.unit = unit
    return batch

  def _head_of(self, teacher: Any) -> linear_vocabulary.OutputHead | None:
    """The head that a teacher's hidden states need, if it is one of these."""
    if not isinstance(teacher, batches.HiddenTeacher):
      return None
    head = self.teacher
    if not isinstance(head, linear_vocabulary.OutputHead):
      raise checks.fail(
        ValueError,
        "a HiddenTeacher must come with its head, hidden_fn= and"
        " frozen=OutputHead",
        "none",
      )
    heads.check_features("teacher hidden", teacher.hidden, head)
    return head

  def _vocabulary_size(self, tokens: batches.DiffusionTokenBatch) -> int:
    model = self.trainer.model
    if self.teacher is None and self.frozen is not None:
      return _output_size(self.scorer, tokens, model, self.frozen)
    size = _output_size(self.scorer, tokens, model)
    if isinstance(self.teacher, HiddenScorer) and self.frozen is not None:
      theirs = _output_size(self.teacher, tokens, self.frozen)
      _check_one_vocabulary(theirs, size)
    return size


def _check_one_vocabulary(theirs: int, ours: int) -> None:
  if theirs != ours:
    raise checks.fail(
      ValueError,
      "teacher and student must have one vocabulary",
      f"teacher {theirs} and student {ours}",
    )


def _output_size(
  scorer: Scorer, tokens: batches.DiffusionTokenBatch, *held: Any
) -> int:
  """The vocabulary's size, by the shapes of a scorer's output alone.

  Args:
    scorer: which is called.
    tokens: the batch that it scores.
    *held: what it takes beside `model_inputs`, each as it is or `Frozen`.
  """
  is_frozen = [isinstance(one, frozen_arrays.Frozen) for one in held]

  def output(model_inputs, *arguments):
    model, *given = (
      one.rebuild(argument) if frozen else argument
      for one, argument, frozen in zip(held, arguments, is_frozen, strict=True)
    )
    return scorer(model, model_inputs, *given)

  arguments = (
    one.arrays if frozen else one
    for one, frozen in zip(held, is_frozen, strict=True)
  )
  result = nnx.eval_shape(output, tokens.model_inputs, *arguments)
  return scorer.check_output(result, tokens)
