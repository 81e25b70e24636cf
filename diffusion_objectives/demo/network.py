"""Tunix's own Qwen3, small and bidirectional, over the ids of the text."""

from collections.abc import Callable
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
from tunix.models.qwen3 import model as qwen3

from diffusion_objectives.demo import run
from diffusion_objectives.demo import text


def build(size: run.Size, *, seed: int) -> qwen3.Qwen3:
  """A fresh network in float32; equal seeds give equal weights."""
  config = qwen3.ModelConfig(
    num_layers=size.layers,
    vocab_size=text.VOCABULARY_SIZE,
    embed_dim=size.width,
    hidden_dim=8 * size.width // 3,
    num_heads=size.heads,
    head_dim=size.width // size.heads,
    num_kv_heads=size.heads,
    rope_theta=1_000_000,
    norm_eps=1e-6,
  )
  return qwen3.Qwen3(config, rngs=nnx.Rngs(seed))


def count_parameters(model: nnx.Module) -> int:
  """The number of trained scalars."""
  return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def logits(model: nnx.Module, model_inputs: dict[str, Any]) -> jax.Array:
  """Scores every position from all positions.

  A language model is causal by its attention mask alone; under a mask that is
  true everywhere the same class predicts hidden bytes from both sides.

  Args:
    model: a `Qwen3`.
    model_inputs: `{"input_tokens": [batch, length]}`.

  Returns:
    `[batch, length, vocabulary]`.
  """
  ids = model_inputs["input_tokens"]
  batch, length = ids.shape
  scores, _ = model(
    input_tokens=ids,
    positions=jnp.broadcast_to(jnp.arange(length), ids.shape),
    cache=None,
    attention_mask=jnp.ones((batch, length, length), bool),
  )
  return scores


def scorer(model: nnx.Module) -> Callable[[jax.Array], jax.Array]:
  """`logits` as a function of the ids alone."""
  return lambda ids: logits(model, {"input_tokens": ids})
