"""Cases of the losses from hidden states, and agreement with the oracle."""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import diffusion_objectives as do
from diffusion_objectives.testing import strategies
from tests import linear_oracles
from tests import oracles

# Batch, length, features, ids: neither divides into blocks of 3 and of 5.
SMALL = (2, 7, 6, 23)
LARGE = (3, 41, 16, 257)
WEIGHTS = ("ones", "fractional", "binary", "none")


@dataclasses.dataclass(frozen=True, eq=False)
class Objective:
  """One loss with its hyper-parameters, for the library and for the oracle.

  Attributes:
    loss: `(hidden, head, batch, **options)`.
    options: hyper-parameters of the loss.
    terms: the same for the oracle.
    teacher: "dense", "hidden", "top-k", or None.
  """

  loss: Callable[..., do.LossOutput]
  options: Mapping[str, Any]
  terms: Mapping[str, Any]
  teacher: str | None = None

  @property
  def temperature(self):
    return self.options.get("temperature", 1.0)

  def bind(self, **how):
    """The loss with its hyper-parameters and, say, block sizes."""
    return functools.partial(self.loss, **self.options, **how)

  def expected(self, case):
    return linear_oracles.evaluate(
      case.hidden,
      case.head,
      case.batch,
      teacher_head=case.teacher_head,
      **self.terms,
    )


def _kl(teacher, temperature=1.0, scale=True):
  return Objective(
    do.linear_forward_kl_loss,
    dict(temperature=temperature, scale_by_temperature_squared=scale),
    dict(soft=1.0, temperature=temperature, scale=scale),
    teacher,
  )


def _opd(teacher, temperature=2.0, soft=0.7, hard=0.4):
  return Objective(
    do.linear_prepared_opd_loss,
    dict(temperature=temperature, soft_loss_weight=soft, hard_loss_weight=hard),
    dict(soft=soft, hard=hard, temperature=temperature),
    teacher,
  )


OBJECTIVES = {
  "cross entropy": Objective(
    do.linear_weighted_cross_entropy_loss, {}, dict(hard=1.0)
  ),
  "kl dense": _kl("dense", 2.0),
  "kl dense unscaled": _kl("dense", 0.5, scale=False),
  "kl hidden": _kl("hidden"),
  "kl top-k": _kl("top-k", 2.0),
  "opd dense": _opd("dense"),
  "opd hidden": _opd("hidden"),
  "opd top-k": _opd("top-k"),
}


@dataclasses.dataclass(frozen=True)
class Form:
  """What an output head is made of."""

  layout: str = "features_vocabulary"
  bias: bool = False
  low_rank: bool = False
  logit_scale: float = 1.0
  soft_cap: float | None = None
  padding: int = 0

  def draw(self, rng, features, size):
    """A head of `size` ids; logits of hidden states of size 1 have size 3."""
    columns = size + self.padding
    kernel = 3 * rng.standard_normal((features, columns)) / np.sqrt(features)
    arrays = {
      "kernel": kernel if self.layout == "features_vocabulary" else kernel.T
    }
    if self.bias:
      arrays["bias"] = rng.standard_normal(columns)
    if self.low_rank:
      a = rng.standard_normal((features, 2)) / np.sqrt(features)
      arrays["low_rank"] = (a, rng.standard_normal((2, columns)))
    return do.OutputHead(
      **jax.tree.map(np.float32, arrays),
      layout=self.layout,
      logit_scale=self.logit_scale,
      soft_cap=self.soft_cap,
      vocabulary_size=size if self.padding else None,
    )


TIED = "vocabulary_features"
FORMS = {
  "plain": Form(),
  "tied": Form(layout=TIED),
  "bias": Form(bias=True),
  "low rank": Form(low_rank=True),
  "scale and cap": Form(logit_scale=1.7, soft_cap=4.0),
  "padding": Form(padding=2),
  "all": Form(
    bias=True, low_rank=True, logit_scale=0.6, soft_cap=5.0, padding=3
  ),
  "all tied": Form(
    layout=TIED,
    bias=True,
    low_rank=True,
    logit_scale=-0.6,
    soft_cap=5.0,
    padding=3,
  ),
}


@dataclasses.dataclass(frozen=True)
class Case:
  """The arguments of a loss, NumPy."""

  hidden: Any
  head: Any
  batch: Any
  teacher_head: Any = None


def weights_of(pattern, rng, shape):
  is_active = rng.random(shape) < 0.6
  is_active.flat[rng.integers(is_active.size)] = True
  return {
    "ones": np.ones(shape),
    "fractional": 10 ** rng.uniform(-3, 1, shape) * is_active,
    "binary": is_active,
    "none": np.zeros(shape),
  }[pattern].astype(np.float32)


def draw(
  objective,
  form,
  *,
  seed=0,
  shape=SMALL,
  weights="fractional",
  is_split=False,
):
  """A case of an objective with a head of a form.

  Both heads have features and columns that divide alike where `is_split`.
  """
  rng = np.random.default_rng(seed)
  rows, length, features, size = shape
  w = weights_of(weights, rng, (rows, length))
  ids = rng.integers(0, size, w.shape, dtype=np.int32)
  tokens = do.DiffusionTokenBatch(
    model_inputs={"input_tokens": ids}, target_ids=ids, loss_weights=w
  )
  case = Case(
    hidden=rng.standard_normal((*w.shape, features)).astype(np.float32),
    head=form.draw(rng, features, size),
    batch=tokens,
  )
  if objective.teacher is None:
    return case
  y = (3 * rng.standard_normal((*w.shape, size))).astype(np.float32)
  if objective.teacher == "hidden":
    # A head of its own: other features, another layout, other padding.
    other = Form(
      layout=TIED,
      bias=True,
      soft_cap=6.0,
      padding=form.padding if is_split else 1,
    )
    width = features // 2 if is_split else features - 1
    hidden = rng.standard_normal((*w.shape, width)).astype(np.float32)
    teacher = do.HiddenTeacher(hidden=hidden)
    case = dataclasses.replace(case, teacher_head=other.draw(rng, width, size))
  elif objective.teacher == "top-k":
    log_p = oracles.log_softmax(y, objective.temperature)
    listed = np.argsort(-log_p, axis=-1)[..., :4].astype(np.int32)
    teacher = do.TopKTeacher(
      token_ids=listed,
      log_probs=np.take_along_axis(log_p, listed, -1).astype(np.float32),
      temperature=objective.temperature,
      is_valid=rng.random(listed.shape) < [1, 0.8, 0.8, 0.8],
    )
  else:
    teacher = do.DenseTeacher(logits=y)
  return dataclasses.replace(
    case,
    batch=do.DiffusionDistillationBatch(student_batch=tokens, teacher=teacher),
  )


def narrowed(case, dtype, kernel_dtype=None):
  """The case with hidden states, heads and teacher's states in a dtype.

  Weights and a list's log-probabilities stay as they are.
  """

  def cast(tree, dtype):
    return jax.tree.map(lambda x: x.astype(dtype), tree)

  kernel_dtype = dtype if kernel_dtype is None else kernel_dtype
  batch = case.batch
  if isinstance(
    getattr(batch, "teacher", None), do.DenseTeacher | do.HiddenTeacher
  ):
    batch = dataclasses.replace(batch, teacher=cast(batch.teacher, dtype))
  return Case(
    hidden=case.hidden.astype(dtype),
    head=cast(case.head, kernel_dtype),
    batch=batch,
    teacher_head=cast(case.teacher_head, kernel_dtype),
  )


def output_of(loss, hidden, head, batch, teacher_head=None):
  options = {} if teacher_head is None else {"teacher_head": teacher_head}
  return loss(hidden, head, batch, **options)


def total(loss, hidden, head, weights, batch, teacher_head=None):
  """The unreduced sum as a function of all that has a gradient."""
  batch = strategies.replace_tokens(batch, loss_weights=weights)
  output = output_of(loss, hidden, head, batch, teacher_head)
  return output.primary_loss.unreduced_sum, output


def differentiated(case):
  """The arguments of `total`."""
  weights = strategies.token_part(case.batch).loss_weights
  return case.hidden, case.head, weights, case.batch, case.teacher_head


@functools.cache
def compiled(loss):
  """Value, output and all gradients; one compilation a shape."""
  return jax.jit(
    jax.value_and_grad(
      functools.partial(total, loss), argnums=(0, 1, 2), has_aux=True
    )
  )


def named(gradients):
  """The gradients in hidden states, head and weights, by the oracle's names."""
  hidden, head, weights = gradients
  found = {"hidden": hidden, "kernel": head.kernel, "weights": weights}
  if head.bias is not None:
    found["bias"] = head.bias
  if head.low_rank is not None:
    found["a"], found["b"] = head.low_rank
  return found


def error(actual, expected):
  """Relative, of the whole array; absolute where 0 is expected."""
  actual, expected = linear_oracles.wide(actual), linear_oracles.wide(expected)
  assert actual.shape == expected.shape
  return float(
    np.linalg.norm(actual - expected) / (np.linalg.norm(expected) or 1.0)
  )


def errors(found, answer):
  """By name, of `((sum, output), gradients)` as `compiled` gives it."""
  (value, output), gradients = found
  gradients = named(gradients)
  assert gradients.keys() == answer.gradients.keys()
  metric = output.primary_loss
  return {
    "value": error(value, answer.total),
    "denominator": error(metric.denominator, answer.denominator),
    **{
      name: error(gradients[name], answer.gradients[name]) for name in gradients
    },
  }


@dataclasses.dataclass(frozen=True)
class Tolerance:
  """Of values (a weight's gradient is one), and of the other gradients."""

  values: float
  gradients: float

  def of(self, name):
    is_value = name in ("value", "denominator", "weights")
    return self.values if is_value else self.gradients


FLOAT32 = Tolerance(3e-6, 3e-6)
# Gradients are rounded once, to their input's dtype, as are those of logits
# before the products; values are not.
BFLOAT16 = Tolerance(1e-5, 3e-3)


def disagreements(loss, objective, case, tolerance=FLOAT32):
  """What is off by more than the tolerance, by name; NaN is."""
  found = errors(
    compiled(loss)(*differentiated(case)), objective.expected(case)
  )
  return {
    name: size for name, size in found.items() if not size <= tolerance.of(name)
  }


def agrees(loss, objective, case, tolerance=FLOAT32):
  """Asserts that value, denominator and all gradients are the oracle's."""
  found = disagreements(loss, objective, case, tolerance)
  assert not found, found


def on_device(case):
  return jax.tree.map(jnp.asarray, differentiated(case))
