"""Hidden states and output head of Tunix's own networks."""

from collections.abc import Iterator
from collections.abc import Mapping
import functools
import inspect
import re
from typing import Any

from flax import nnx
import jax

from diffusion_objectives._core import checks
from diffusion_objectives.objectives import linear_vocabulary
from diffusion_objectives.trainers.tunix import preparation

# Classes whose head is known here, by module and name: a network is looked at
# only where Tunix has been imported.
_KNOWN = (
  ("tunix.models.qwen3.model", "Qwen3"),
  ("tunix.models.gemma3.model", "Gemma3"),
)

# What their logits come from: a class that overrides one may have others.
_OF_LOGITS = ("__call__", "compute_final_logits")

# Where a network keeps what it was asked to output beside its logits.
_SOWN = "all_hidden_states"


def model_hidden_and_head(
  model: nnx.Module, model_inputs: Any, *, lora_scale: float | None = None
) -> tuple[jax.Array, linear_vocabulary.OutputHead]:
  """The `hidden_fn` of Tunix's own Qwen3 and Gemma 3.

  Hidden states are those that the network applies its head to, after the last
  norm. The head is `lm_head` or the tied embedding, in the dtype that the
  network computes logits in; a LoRA pair of `lm_head` goes with it, its scale
  multiplied into the first side. `head.logits(hidden)` are the network's own
  logits, but for the rounding of a network that rounds its logits to bfloat16.

  Args:
    model: a `Qwen3` or `Gemma3` of `tunix.models`, with or without LoRA.
    model_inputs: a mapping of keyword arguments.
    lora_scale: what the product of a LoRA pair on `lm_head` is multiplied by;
      None takes alpha / rank of the qwix rule. Refused where there is none.

  Returns:
    `[batch, length, features]` hidden states and their `OutputHead`. Where the
    vocabulary is padded, name its size in a `hidden_fn` of your own, by
    `dataclasses.replace(head, vocabulary_size=...)`.

  Raises:
    TypeError: `model_inputs` is no mapping; another network, also a subclass
      that overrides how logits are computed; another head; or a head that qwix
      quantizes.
    ValueError: `model` still holds sown hidden states, a scale that cannot be
      read, is not finite or is of no pair, or dropout between hidden states and
      head.

  Example:
    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> from tunix.models.gemma3 import model as gemma3
    >>> model = gemma3.Gemma3(
    ...     gemma3.ModelConfig(
    ...         num_layers=1, num_embed=24, embed_dim=16, hidden_dim=32,
    ...         num_heads=2, head_dim=8, num_kv_heads=1, sliding_window_size=8,
    ...         param_dtype=jnp.float32),
    ...     rngs=nnx.Rngs(0))
    >>> hidden, head = model_hidden_and_head(model, {
    ...     "last_tokens": jnp.zeros((2, 3), jnp.int32),
    ...     "positions": jnp.tile(jnp.arange(3), (2, 1)), "cache": None,
    ...     "attention_mask": jnp.ones((2, 3, 3), bool)})
    >>> hidden.shape, head.kernel.shape, head.layout
    ((2, 3, 16), (24, 16), 'vocabulary_features')
  """
  preparation.check_model_inputs(model_inputs)
  _check_known(model)
  head = _head(model, lora_scale)  # all is refused before the network runs
  return _hidden(model, model_inputs), head


def _check_known(model: Any) -> None:
  """Refuses a network whose logits may be others than those known here."""
  received = checks.describe(model)
  for cls in type(model).__mro__:
    if (cls.__module__, cls.__name__) in _KNOWN:
      return
    changed = [
      name
      for name in _OF_LOGITS
      if name in vars(cls) and not _is_theirs(vars(cls)[name])
    ]
    if changed:
      received = f"{cls.__name__} with a {changed[0]} of its own"
      break
  raise checks.fail(
    TypeError,
    "model must be Tunix's Qwen3 or Gemma3 (else give a hidden_fn(model,"
    " model_inputs) that returns (hidden [batch, length, features],"
    " OutputHead))",
    received,
  )


def _is_theirs(method_or_class: Any) -> bool:
  """Whether it was defined by Tunix's networks or by qwix."""
  module = getattr(method_or_class, "__module__", "")
  return f"{module}.".startswith(("tunix.models.", "qwix."))


def _hidden(model: Any, model_inputs: Mapping[str, Any]) -> jax.Array:
  if "skip_lm_head" in inspect.signature(model.__call__).parameters:
    return model(**{**model_inputs, "skip_lm_head": True})[0]
  # 0.1.7: they come beside logits, which the compiler drops.
  if hasattr(model, _SOWN):
    raise checks.fail(
      ValueError,
      f"model must hold no sown {_SOWN} (nnx.pop takes them off)",
      "some of an earlier call",
    )
  model(**{**model_inputs, "output_hidden_states": True})
  (hidden,) = getattr(model, _SOWN).get_value()
  delattr(model, _SOWN)
  return hidden


def _head(model: Any, lora_scale: float | None) -> linear_vocabulary.OutputHead:
  is_tied = not hasattr(model, "lm_head")
  head = model.embedder if is_tied else model.lm_head
  rules = _head_rules(model, is_tied)
  for rule in rules:
    if rule.weight_qtype is not None or rule.act_qtype is not None:
      raise checks.fail(
        TypeError, "the head must not be quantized by qwix", f"{rule!r}"
      )
  low_rank = None
  if not is_tied and hasattr(head, "w_lora_a"):
    a, b = head.w_lora_a.get_value(), head.w_lora_b.get_value()
    scale = _lora_scale(model, rules) if lora_scale is None else lora_scale
    low_rank = (a * checks.finite_real("lora_scale", scale), b)
  elif lora_scale is not None:
    raise checks.fail(
      ValueError,
      "lora_scale must come with a LoRA pair on lm_head",
      f"{lora_scale} and a head without one",
    )
  return linear_vocabulary.OutputHead(
    kernel=_weight(head, "input_embedding" if is_tied else "w"),
    layout="vocabulary_features" if is_tied else "features_vocabulary",
    low_rank=low_rank,
  )


def _weight(module: Any, name: str) -> jax.Array:
  """A module's weight in the dtype that the module multiplies in."""
  weight = getattr(module, name, None)
  if not _is_theirs(type(module)) or weight is None:
    raise checks.fail(
      TypeError,
      f"the head must be of Tunix's own class, with {name}",
      checks.describe(module),
    )
  if not isinstance(weight, nnx.Variable) or not hasattr(
    weight.get_value(), "astype"
  ):
    raise checks.fail(
      TypeError,
      f"{type(module).__name__}.{name} must be a variable of an array",
      checks.describe(weight),
    )
  value = weight.get_value()
  return value.astype(getattr(module, "dtype", value.dtype))


# qwix keeps no scale with a LoRA pair, and nothing with a weight that it
# quantizes in each call: it is the rule's, which only the class that qwix made
# of the network's refers to.


def _head_rules(model: Any, is_tied: bool) -> list[Any]:
  """The rules that qwix applies to the head: the first of each operation."""
  path, operations = (
    ("embedder", ("dot", "dot_general"))
    if is_tied
    else ("lm_head", ("einsum",))
  )
  of_path = [
    rule
    for rule in _rules(type(model).__call__)
    if re.fullmatch(rule.module_path, path)
  ]
  first = (
    next(
      (r for r in of_path if not r.op_names or operation in r.op_names), None
    )
    for operation in operations
  )
  return [rule for rule in first if rule is not None]


def _lora_scale(model: Any, rules: list[Any]) -> float:
  for rule in rules:
    if not hasattr(rule, "alpha"):
      continue
    if rule.dropout:
      raise checks.fail(
        ValueError,
        "the LoRA pair of lm_head must have no dropout",
        f"dropout={rule.dropout}",
      )
    return rule.alpha / rule.rank
  raise checks.fail(
    ValueError,
    "the LoRA pair of lm_head must be of a rule of qwix's that can be read"
    " (else give lora_scale=)",
    checks.describe(model),
  )


def _rules(method: Any) -> Iterator[Any]:
  """The rules of the qwix provider that an intercepted method refers to."""
  for cell in getattr(method, "__closure__", None) or ():
    held = cell.cell_contents
    arguments = held.args if isinstance(held, functools.partial) else ()
    for owner in (getattr(held, "__self__", None), *arguments):
      if hasattr(owner, "get_intercept_map"):
        yield from getattr(owner, "_rules", ())
        return
