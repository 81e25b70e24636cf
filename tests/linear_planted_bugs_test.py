"""The agreement with the oracle has teeth: planted bugs, each at 20 seeds.

The losses here are one small implementation in blocks, written apart from the
library's: without a bug it agrees, with one the wrong results are named.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffusion_objectives as do
from tests import linear_cases

SEEDS = range(20)


@dataclasses.dataclass(frozen=True)
class Setting:
  """What is static: the mix, the head's scale and cap, the blocks, the bug."""

  soft: float
  hard: float
  temperature: float
  logit_scale: float
  soft_cap: float
  token_block: int
  vocabulary_block: int
  bug: str | None


def spans(size, block):
  return [(start, min(start + block, size)) for start in range(0, size, block)]


def tile(s, head, rows, span, with_bias=True):
  """Logits of some rows at some ids, and `dz/du`."""
  kernel, bias = (x[..., slice(*span)] for x in head)
  if s.bug == "zero columns padded in":
    missing = s.vocabulary_block - (span[1] - span[0])
    kernel = jnp.pad(kernel, ((0, 0), (0, missing)))
    bias = jnp.pad(bias, (0, missing))
  u = jnp.matmul(rows, kernel, preferred_element_type=jnp.float32)
  if with_bias:
    u += bias[None].astype(jnp.float32)
  t = jnp.tanh(s.logit_scale * u / s.soft_cap)
  slope = s.logit_scale * (1 - t**2)
  if s.bug == "no slope of the soft cap":
    slope = jnp.full_like(slope, s.logit_scale)
  return s.soft_cap * t, slope


class LogSum:
  """`log sum exp` over blocks, and sums with the same factors."""

  def __init__(self, count, is_carried):
    self.top = jnp.full(count, -jnp.inf)
    self.sums = {"one": jnp.zeros(count)}
    self.is_carried = is_carried

  def add(self, block, **values):
    top = jnp.maximum(self.top, block.max(axis=-1))
    kept = jnp.exp(self.top - top) if self.is_carried else 1.0
    terms = jnp.exp(block - top[:, None])
    for name, value in {"one": jnp.ones_like(block), **values}.items():
      before = self.sums.get(name, jnp.zeros_like(top))
      self.sums[name] = before * kept + jnp.sum(terms * value, axis=-1)
    self.top = top

  def value(self):
    return self.top + jnp.log(self.sums["one"])

  def mean(self, name):
    return self.sums[name] / self.sums["one"]


def with_gradients(s, hidden, head, weights, ids, teacher):
  """The sum, each token's loss, and the gradients in hidden and head."""
  size = head[0].shape[-1]
  blocks = spans(size, s.vocabulary_block)
  if s.bug == "last block dropped":
    blocks = blocks[: size // s.vocabulary_block]
  hard_temperature = s.temperature if s.bug == "T on the hard term" else 1.0
  losses, d_hidden = [], []
  narrow = s.bug == "bfloat16 accumulator"
  d_kernel = jnp.zeros(head[0].shape, jnp.bfloat16 if narrow else jnp.float32)
  d_bias = jnp.zeros(head[1].shape)
  for start, stop in spans(len(hidden), s.token_block):
    rows, w, targets = (x[start:stop] for x in (hidden, weights, ids))
    y = teacher[start:stop]
    is_carried = s.bug != "maximum not carried"
    hard, student, other = (LogSum(len(rows), is_carried) for _ in range(3))
    picked = jnp.zeros(len(rows))
    for span in blocks:
      z, _ = tile(s, head, rows, span)
      width = span[1] - span[0]
      is_target = jnp.arange(*span)[None] == targets[:, None]
      hard.add(z / hard_temperature)
      picked += jnp.sum(jnp.where(is_target, z[:, :width], 0), axis=-1)
      if s.soft:
        gap = (y[:, slice(*span)] - z[:, :width]) / s.temperature
        student.add(z / s.temperature)
        other.add(y[:, slice(*span)] / s.temperature, gap=gap)
    loss = s.hard * (hard.value() - picked / hard_temperature)
    if s.soft:
      kl = other.mean("gap") - other.value() + student.value()
      loss += s.soft * s.temperature**2 * kl
    losses.append(loss)
    d_rows = jnp.zeros(rows.shape, jnp.float32)
    for span in blocks:
      with_bias = s.bug != "no bias in the gradient"
      z, slope = tile(s, head, rows, span, with_bias)
      z, slope = (x[:, : span[1] - span[0]] for x in (z, slope))
      is_target = jnp.arange(*span)[None] == targets[:, None]
      q = jnp.exp(z / hard_temperature - hard.value()[:, None])
      g = s.hard * (q - is_target.astype(q.dtype)) / hard_temperature
      if s.soft:
        q = jnp.exp(z / s.temperature - student.value()[:, None])
        p = jnp.exp(y[:, slice(*span)] / s.temperature - other.value()[:, None])
        g += s.soft * s.temperature * (q - p)
      du = g * slope
      of_head = w[:1] if s.bug == "first token's weight" else w
      kernel = head[0][:, slice(*span)].astype(jnp.float32)
      d_rows += (w[:, None] * du) @ kernel.T
      part = rows.T.astype(jnp.float32) @ (of_head[:, None] * du)
      d_kernel = d_kernel.at[:, slice(*span)].add(part.astype(d_kernel.dtype))
      d_bias = d_bias.at[slice(*span)].add(jnp.sum(w[:, None] * du, axis=0))
    d_hidden.append(d_rows)
  losses = jnp.where(weights != 0, jnp.concatenate(losses), 0)
  return (
    jnp.sum(weights * losses),
    losses,
    jnp.concatenate(d_hidden).astype(hidden.dtype),
    (d_kernel.astype(head[0].dtype), d_bias.astype(head[1].dtype)),
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def weighted_sum(s, hidden, head, weights, ids, teacher):
  return with_gradients(s, hidden, head, weights, ids, teacher)[0]


def _forward(s, *arguments):
  value, *saved = with_gradients(s, *arguments)
  return value, saved


def _backward(s, saved, cotangent):
  losses, d_hidden, d_head = saved
  if s.bug == "no gradient of the weights":
    losses = jnp.zeros_like(losses)
  scaled = jax.tree.map(
    lambda x: x * cotangent.astype(x.dtype), (d_hidden, d_head, losses)
  )
  return (*scaled, None, None)


weighted_sum.defvjp(_forward, _backward)


def in_blocks(
  hidden,
  head,
  batch,
  *,
  bug=None,
  soft=0.0,
  hard=1.0,
  temperature=1.0,
  token_block=5,
  vocabulary_block=9,
):
  """The loss, of heads with a bias and a soft cap and of dense teachers."""
  tokens = getattr(batch, "student_batch", batch)
  setting = Setting(
    soft,
    hard,
    temperature,
    head.logit_scale,
    head.soft_cap,
    token_block,
    vocabulary_block,
    bug,
  )
  weights = jnp.asarray(tokens.loss_weights).ravel()
  is_active = weights != 0
  rows = hidden.reshape(-1, hidden.shape[-1])
  teacher = jnp.zeros((len(rows), 0))
  if soft:
    y = batch.teacher.logits
    y = y.reshape(-1, y.shape[-1]).astype(jnp.float32)
    teacher = jnp.where(is_active[:, None], y, 0)
  value = weighted_sum(
    setting,
    jnp.where(is_active[:, None], rows, 0),
    (head.kernel, head.bias),
    weights,
    jnp.where(is_active, jnp.asarray(tokens.target_ids).ravel(), 0),
    teacher,
  )
  metric = do.WeightedMetric(unreduced_sum=value, denominator=jnp.sum(weights))
  return do.LossOutput(primary_loss=metric, aux_metrics={})


CROSS_ENTROPY = linear_cases.OBJECTIVES["cross entropy"]
MIX = linear_cases.OBJECTIVES["opd dense"]
FORM = linear_cases.Form(bias=True, logit_scale=1.3, soft_cap=4.0)
GRADIENTS = {"hidden", "kernel", "bias"}
EVERYTHING = GRADIENTS | {"value", "weights"}

# The weights, and what each bug makes wrong. Where few tokens weigh, all of
# them may have their maximum in the first block.
BUGS = {
  "first token's weight": (CROSS_ENTROPY, "fractional", {"kernel"}),
  "last block dropped": (CROSS_ENTROPY, "fractional", EVERYTHING),
  "zero columns padded in": (CROSS_ENTROPY, "fractional", EVERYTHING),
  "maximum not carried": (CROSS_ENTROPY, "ones", EVERYTHING),
  "T on the hard term": (MIX, "binary", EVERYTHING),
  "no bias in the gradient": (CROSS_ENTROPY, "binary", GRADIENTS),
  "no slope of the soft cap": (MIX, "fractional", GRADIENTS),
  "no gradient of the weights": (MIX, "fractional", {"weights"}),
}


def bound(objective, **how):
  return functools.partial(in_blocks, **objective.terms, **how)


def found_at_seeds(objective, loss, tolerance=linear_cases.FLOAT32, **options):
  for seed in SEEDS:
    case = linear_cases.draw(objective, FORM, seed=seed, **options)
    if tolerance is linear_cases.BFLOAT16:
      case = linear_cases.narrowed(case, jnp.bfloat16)
    yield linear_cases.disagreements(loss, objective, case, tolerance)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found_at_every_seed(bug):
  objective, weights, wrong = BUGS[bug]
  loss = bound(objective, bug=bug)
  for found in found_at_seeds(objective, loss, weights=weights):
    assert found.keys() == wrong


@pytest.mark.parametrize("objective", [CROSS_ENTROPY, MIX], ids=["ce", "mix"])
def test_without_a_bug_nothing_is_found(objective):
  assert not any(found_at_seeds(objective, bound(objective)))


def test_a_bfloat16_accumulator_is_found_among_bfloat16_gradients():
  many = dict(token_block=7, vocabulary_block=257)
  options = dict(
    tolerance=linear_cases.BFLOAT16, shape=linear_cases.LARGE, weights="ones"
  )
  right = bound(CROSS_ENTROPY, **many)
  assert not any(found_at_seeds(CROSS_ENTROPY, right, **options))
  wrong = bound(CROSS_ENTROPY, bug="bfloat16 accumulator", **many)
  for found in found_at_seeds(CROSS_ENTROPY, wrong, **options):
    assert found.keys() == {"kernel"}
    assert np.isfinite(found["kernel"])
