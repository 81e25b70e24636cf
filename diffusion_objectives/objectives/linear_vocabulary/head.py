"""The output head: from hidden states to logits."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusion_objectives._core import checks
from diffusion_objectives._core import numerics
from diffusion_objectives._core import pytree

LAYOUTS = ("features_vocabulary", "vocabulary_features")


@pytree.record
class OutputHead:
  """The linear layer that turns hidden states into logits.

  With `u = h W + (h a) b + bias` the logits are `z = logit_scale u`, or
  `z = soft_cap tanh(logit_scale u / soft_cap)`.

  Attributes:
    kernel: `W`, `[features, vocabulary]` floating-point, or its transpose, as a
      tied embedding is stored, where `layout` says so.
    bias: `[vocabulary]` floating-point or None; -inf excludes an id, where
      there is no `soft_cap` and the scale is positive.
    low_rank: None, or a LoRA pair `(a, b)` of `[features, rank]` and
      `[rank, vocabulary]`, in every layout. A scale is the caller's to multiply
      into one of them.
    layout: "features_vocabulary" or "vocabulary_features".
    logit_scale: finite, not 0.
    soft_cap: positive, or None.
    vocabulary_size: the number of ids where columns after them are padding;
      None where there is none.

  Raises:
    TypeError: no array where one must be, another dtype, or a setting of
      another type.
    ValueError: another rank or shape, an empty kernel, or a setting outside its
      range.

  Example:
    >>> import jax.numpy as jnp
    >>> head = OutputHead(kernel=jnp.eye(3), vocabulary_size=2)
    >>> head.logits(jnp.array([1.0, 2.0, 3.0])).tolist()
    [1.0, 2.0]
  """

  kernel: jax.Array | np.ndarray
  bias: jax.Array | np.ndarray | None = None
  low_rank: Any = None
  layout: str = dataclasses.field(
    default="features_vocabulary", metadata={"static": True}
  )
  logit_scale: float = dataclasses.field(default=1.0, metadata={"static": True})
  soft_cap: float | None = dataclasses.field(
    default=None, metadata={"static": True}
  )
  vocabulary_size: int | None = dataclasses.field(
    default=None, metadata={"static": True}
  )

  def __post_init__(self) -> None:
    if self.layout not in LAYOUTS:
      raise checks.fail(
        ValueError, f"layout must be one of {LAYOUTS}", repr(self.layout)
      )
    axes = tuple(self.layout.split("_"))
    checks.array("kernel", self.kernel, dtype="floating-point", axes=axes)
    features, columns = self.features, self.columns
    if not (features and columns):
      raise checks.fail(
        ValueError, "kernel must not be empty", checks.describe(self.kernel)
      )
    if self.bias is not None:
      checks.array(
        "bias", self.bias, dtype="floating-point", axes=("vocabulary",)
      )
      if self.bias.shape != (columns,):
        raise checks.fail(
          ValueError,
          f"bias must have the kernel's vocabulary, ({columns},)",
          checks.describe(self.bias),
        )
    if self.low_rank is not None:
      if not isinstance(self.low_rank, tuple) or len(self.low_rank) != 2:
        raise checks.fail(
          TypeError,
          "low_rank must be a pair (a, b)",
          checks.describe(self.low_rank),
        )
      a, b = self.low_rank
      checks.array(
        "low_rank[0]", a, dtype="floating-point", axes=("features", "rank")
      )
      checks.array(
        "low_rank[1]", b, dtype="floating-point", axes=("rank", "vocabulary")
      )
      if (a.shape[0], b.shape) != (features, (a.shape[1], columns)):
        raise checks.fail(
          ValueError,
          f"low_rank must be of shapes ({features}, rank) and (rank,"
          f" {columns})",
          f"{tuple(a.shape)} and {tuple(b.shape)}",
        )
    checks.finite_real("logit_scale", self.logit_scale)
    if self.logit_scale == 0:
      raise checks.fail(ValueError, "logit_scale must not be 0", 0)
    if self.soft_cap is not None:
      checks.finite_real("soft_cap", self.soft_cap, positive=True)
    size = self.vocabulary_size
    if size is None:
      return
    if checks.positive_integer("vocabulary_size", size) > columns:
      raise checks.fail(
        ValueError, f"vocabulary_size must be at most {columns}", size
      )

  @property
  def features(self) -> int:
    """The number of features."""
    return self.kernel.shape[self.layout != LAYOUTS[0]]

  @property
  def columns(self) -> int:
    """Of the kernel, padding included."""
    return self.kernel.shape[self.layout == LAYOUTS[0]]

  @property
  def size(self) -> int:
    """The number of ids."""
    size = self.vocabulary_size
    return self.columns if size is None else int(size)

  def logits(self, hidden: jax.Array) -> jax.Array:
    """`[..., vocabulary]` logits of `[..., features]`: the dense form."""
    check_features("hidden", hidden, self)
    product = numerics.product_dtype(hidden.dtype, self.kernel.dtype)
    dtype = numerics.accumulation_dtype(product)
    kernel = jnp.asarray(self.kernel).astype(product)
    if self.layout != LAYOUTS[0]:
      kernel = kernel.T
    kernel = kernel[:, : self.size]
    u = jnp.matmul(hidden.astype(product), kernel, preferred_element_type=dtype)
    if self.low_rank is not None:
      a, b = (jnp.asarray(x).astype(dtype) for x in self.low_rank)
      u += hidden.astype(dtype) @ a @ b[:, : self.size]
    if self.bias is not None:
      bias = jnp.asarray(self.bias)[: self.size].astype(dtype)
      u += jnp.broadcast_to(bias, u.shape)
    z = self.logit_scale * u
    if self.soft_cap is not None:
      z = self.soft_cap * jnp.tanh(z / self.soft_cap)
    return z


def check_features(name: str, hidden: Any, head: OutputHead) -> None:
  """Checks that hidden states have the features of a head."""
  if not jnp.issubdtype(hidden.dtype, jnp.floating):
    raise checks.fail(
      TypeError, f"{name} must be floating-point", checks.describe(hidden)
    )
  if hidden.shape[-1] != head.features:
    raise checks.fail(
      ValueError,
      f"{name} must have the features of its head, {head.features}",
      checks.describe(hidden),
    )
