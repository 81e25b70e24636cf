"""From an item of the data set to a checked batch, before the compiled step."""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
from typing import Any

from flax import nnx
import jax

from diffusion_objectives import batches
from diffusion_objectives._core import checks
from diffusion_objectives.trainers.tunix import identity

LogitsFn = Callable[[nnx.Module, Any], jax.Array]
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


@dataclasses.dataclass
class Preparation:
  """The adapter of the two token objectives.

  It fixes the denominator's unit by the first batch, learns the vocabulary's
  size from the scorer's shapes, and checks values.
  """

  kind: type
  trainer: Any
  batch_adapter: BatchAdapter | None
  logits_fn: LogitsFn
  denominator: str | None
  check_values: bool
  identity: identity.Identity
  value_options: Mapping[str, bool] = dataclasses.field(default_factory=dict)
  unit: str | None = None
  vocabulary_size: int | None = None

  def __post_init__(self) -> None:
    for name in ("batch_adapter", "logits_fn"):
      value = getattr(self, name)
      if value is not None:
        checks.function(name, value)

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
    if self.vocabulary_size is None:
      logits = nnx.eval_shape(
        self.logits_fn, self.trainer.model, tokens.model_inputs
      )
      batches.check_logits("logits", logits, tokens)
      self.vocabulary_size = logits.shape[-1]
    if self.check_values:
      batch.check_values(self.vocabulary_size, **self.value_options)
    if self.unit is None:  # fixed by the first batch that passed
      self.identity.fix_denominator(unit)
      self.unit = unit
    return batch
