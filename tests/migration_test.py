"""Each row of the migration page: their number, and ours.

Optax and Tunix are called. TRL's and torch's losses are computed in NumPy from
their documented formulas.
"""

import functools
import math
import pathlib
import re

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tunix.distillation.strategies import logit
from tunix.sft import peft_trainer

import diffusion_objectives as do
from tests import oracles

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "migration.md"


@pytest.fixture(autouse=True)
def default_promotion():
  """What Optax and Tunix are written for."""
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    yield


# The page's batch: two rows, each a micro-batch; row 0 is mostly padding.
Z = np.float32(
  [[[2, 0, -1], [0, 1, 0], [0, 0, 0]], [[1, 0, 0], [0, 0, 1], [1, -1, 0]]]
)
Y = np.float32(
  [[[0, 2, 0], [1, 0, 1], [0, 0, 0]], [[1, 1, 0], [0, 2, 1], [0, 0, 2]]]
)
X = np.int32([[1, 0, 0], [0, 2, 0]])
MASK = np.array([[1, 0, 0], [1, 1, 1]], bool)
ALL = np.ones_like(MASK)
T, ALPHA = 2.0, 0.5
ONE_HOT = np.eye(3, dtype=np.float32)[X]
INF = np.inf


def batch(weights=MASK, ids=X, teacher=None):
  tokens = do.DiffusionTokenBatch(
    model_inputs=np.zeros(weights.shape, np.float32),
    target_ids=ids,
    loss_weights=weights.astype(np.float32),
    is_supervised=weights > 0,
  )
  if teacher is None:
    return tokens
  return do.DiffusionDistillationBatch(
    student_batch=tokens, teacher=do.DenseTeacher(logits=teacher)
  )


def ours(loss, logits, given, **options):
  loss = functools.partial(loss, **options)
  return jax.jit(loss)(logits, given).primary_loss.compute()


def cross_entropy(weights=MASK, **options):
  return ours(do.weighted_cross_entropy_loss, Z, batch(weights), **options)


def forward_kl(weights=MASK, scale=False, **options):
  return ours(
    do.forward_kl_loss,
    Z,
    batch(weights, teacher=Y),
    temperature=T,
    scale_by_temperature_squared=scale,
    **options,
  )


def divergence(divergence):
  """Ours at temperature 1, as TRL's GKD."""
  given = batch(teacher=Y)
  return ours(do.divergence_loss, Z, given, divergence=divergence)


def top_k_kl(student, teacher, k):
  """Ours of one row of probabilities, from the teacher's `k` most probable."""
  ids = np.argsort(-np.asarray(teacher))[:k]
  given = do.DiffusionDistillationBatch(
    student_batch=batch(np.ones((1, 1)), np.zeros((1, 1), np.int32)),
    teacher=do.TopKTeacher(
      token_ids=ids[None, None].astype(np.int32),
      log_probs=np.log(np.float32(teacher))[None, None, ids],
      temperature=1.0,
    ),
  )
  logits = np.log(np.float32(student))[None, None]
  return ours(do.forward_kl_loss, logits, given)


def renormalized_kl(student, teacher, k):
  """What both sides' renormalisation on the `k` ids makes of it."""
  p, q = np.asarray(teacher), np.asarray(student)
  ids = np.argsort(-p)[:k]
  p, q = p[ids] / p[ids].sum(), q[ids] / q[ids].sum()
  return np.sum(p * np.log(p / q))


def opd(weights=MASK):
  return ours(
    do.prepared_opd_loss,
    Z,
    batch(weights, teacher=Y),
    temperature=T,
    soft_loss_weight=ALPHA,
    hard_loss_weight=1 - ALPHA,
  )


def row_kl(student, teacher):
  """Our divergence of one row."""
  student, teacher = np.float32([[student]]), np.float32([[teacher]])
  given = batch(np.ones((1, 1)), np.zeros((1, 1), np.int32), teacher)
  return ours(do.forward_kl_loss, student, given)


def teacher_gradient(student, teacher):
  """The largest entry of our gradient in the teacher's logits."""

  def value(teacher):
    given = batch(np.ones((1, 1)), np.zeros((1, 1), np.int32), teacher)
    loss = do.forward_kl_loss(np.float32([[student]]), given)
    return loss.primary_loss.compute()

  return jnp.max(jnp.abs(jax.grad(value)(jnp.float32([[teacher]]))))


def row_cross_entropy(logits, target):
  given = batch(np.ones((1, 1)), np.int32([[target]]))
  with_nan = ours(do.weighted_cross_entropy_loss, np.float32([[logits]]), given)
  try:
    given.check_values(len(logits))
  except ValueError:
    assert np.isnan(with_nan)
    return "refused"
  return with_nan


def nothing():
  return cross_entropy(np.zeros_like(MASK))


# Theirs.


def optax_losses():
  return optax.softmax_cross_entropy_with_integer_labels(Z, X)


def optax_kl(student, teacher):
  return optax.kl_divergence(
    jax.nn.log_softmax(student), jax.nn.softmax(teacher)
  )


def mean_of_micro_means(losses):
  """What a trainer that averages micro-batches' means makes of them."""
  return np.mean([losses[b][MASK[b]].mean() for b in range(2)])


def logit_strategy():
  strategy = logit.LogitStrategy(None, None, None, temperature=T, alpha=ALPHA)
  return strategy.compute_loss(Z, Y, ONE_HOT)[0]


class Fixed(nnx.Module):
  """A network that returns `Z` for the rows it is given."""

  def __call__(self, tokens, positions, cache, attention_mask):
    return jnp.asarray(Z)[positions[:, 0]], None


def tunix_sft(rows):
  """Tunix 0.1.7's default loss of SFT; `rows` pick those of the batch."""
  rows = np.array(rows)
  loss = peft_trainer._default_loss_fn(
    Fixed(), X[rows], SFT_MASK[rows], np.tile(rows[:, None], 3), None
  )
  # Tunix main returns the sum and its denominator.
  return loss.primary_loss.compute() if hasattr(loss, "primary_loss") else loss


# Position 0 is never a target there.
SFT_MASK = np.array([[0, 1, 0], [0, 1, 1]], bool)


def shifted_cross_entropy():
  return ours(
    do.weighted_cross_entropy_loss, do.shift_right(Z), batch(SFT_MASK)
  )


def numpy_kl():
  return oracles.forward_kl(Y, Z, T)


def numpy_losses():
  return oracles.nll(Z, X)


MEASURED = {
  "`optax` CE `.mean()`": (lambda: optax_losses().mean(), cross_entropy),
  "`optax` CE `.mean()`, nothing padded": (
    lambda: optax_losses().mean(),
    lambda: cross_entropy(ALL),
  ),
  "`optax` CE, masked means, micro-batches averaged": (
    lambda: mean_of_micro_means(np.asarray(optax_losses())),
    cross_entropy,
  ),
  "`optax.kl_divergence` `.mean()`": (
    lambda: optax_kl(Z / T, Y / T).mean(),
    forward_kl,
  ),
  "`optax.kl_divergence` `.mean()`, nothing padded": (
    lambda: optax_kl(Z / T, Y / T).mean(),
    lambda: forward_kl(ALL),
  ),
  "`LogitStrategy`": (logit_strategy, opd),
  "`LogitStrategy`, nothing padded": (logit_strategy, lambda: opd(ALL)),
  "Tunix SFT, one batch": (lambda: tunix_sft([0, 1]), shifted_cross_entropy),
  "Tunix SFT, micro-batches averaged": (
    lambda: (tunix_sft([0]) + tunix_sft([1])) / 2,
    shifted_cross_entropy,
  ),
  "TRL GKD, `beta=0`, one batch": (
    lambda: numpy_kl()[MASK].mean(),
    forward_kl,
  ),
  "TRL GKD, `beta=0`, micro-batches averaged": (
    lambda: mean_of_micro_means(numpy_kl()),
    forward_kl,
  ),
  "TRL GKD, `beta=0.5`, micro-batches averaged": (
    lambda: mean_of_micro_means(
      oracles.jensen_shannon(
        oracles.log_softmax(Y), oracles.log_softmax(Z), 0.5
      )
    ),
    lambda: divergence(do.divergences.jensen_shannon(0.5)),
  ),
  "TRL GKD, `beta=1`, one batch": (
    lambda: oracles.forward_kl(Z, Y)[MASK].mean(),
    lambda: divergence(do.divergences.reverse_kl),
  ),
  "MaxText, top 2 of 4 renormalised, mass moved outside": (
    lambda: renormalized_kl([0.3, 0.3, 0.2, 0.2], [0.4, 0.4, 0.1, 0.1], 2),
    lambda: top_k_kl([0.3, 0.3, 0.2, 0.2], [0.4, 0.4, 0.1, 0.1], 2),
  ),
  "`torch` CE, `ignore_index`": (
    lambda: numpy_losses()[MASK].mean(),
    cross_entropy,
  ),
  "`torch` CE, `ignore_index`, micro-batches averaged": (
    lambda: mean_of_micro_means(numpy_losses()),
    cross_entropy,
  ),
  "`torch` `kl_div`, `batchmean`, `[B, L, V]`": (
    lambda: numpy_kl().sum() / 2,
    forward_kl,
  ),
  '`torch` `kl_div`, `batchmean`, nothing padded; ours over `"sequences"`': (
    lambda: numpy_kl().sum() / 2,
    lambda: forward_kl(ALL, denominator="sequences"),
  ),
  "`torch` `kl_div`, `mean`": (lambda: numpy_kl().sum() / Z.size, forward_kl),
  "`optax.kl_divergence`, an id `-inf` on both sides": (
    lambda: optax_kl(np.float32([-INF, 1, 3]), np.float32([-INF, 0, 1])),
    lambda: row_kl([-INF, 1, 3], [-INF, 0, 1]),
  ),
  "`optax` `kl_divergence_with_log_targets`, teacher `-inf`": (
    lambda: optax.losses.kl_divergence_with_log_targets(
      jax.nn.log_softmax(np.float32([0, 1, 3])),
      jax.nn.log_softmax(np.float32([-INF, 0, 1])),
    ),
    lambda: row_kl([0, 1, 3], [-INF, 0, 1]),
  ),
  "`optax.kl_divergence`, teacher `-inf`, its gradient in the teacher": (
    lambda: jnp.max(
      jnp.abs(
        jax.grad(optax_kl, argnums=1)(
          jnp.float32([0, 1, 3]), jnp.float32([-INF, 0, 1])
        )
      )
    ),
    lambda: teacher_gradient([0, 1, 3], [-INF, 0, 1]),
  ),
  "`optax.softmax_cross_entropy`, a logit `-inf` of label 0": (
    lambda: optax.softmax_cross_entropy(
      np.float32([-INF, 1, 2]), np.float32([0, 1, 0])
    ),
    lambda: row_cross_entropy([-INF, 1, 2], 1),
  ),
  "`optax` CE, id `-1` of `[2, 1, 0]`": (
    lambda: optax.softmax_cross_entropy_with_integer_labels(
      np.float32([2, 1, 0]), np.int32(-1)
    ),
    lambda: row_cross_entropy([2, 1, 0], -1),
  ),
  "`optax` CE, id 3 of `[2, 1, 0]`": (
    lambda: optax.softmax_cross_entropy_with_integer_labels(
      np.float32([2, 1, 0]), np.int32(3)
    ),
    lambda: row_cross_entropy([2, 1, 0], 3),
  ),
  "`torch` CE, everything ignored": (lambda: math.nan, nothing),
}


def measured_rows():
  """`{name: (theirs, ours)}` of the page's table, as printed."""
  section = PAGE.read_text().split("## Measured", 1)[1].split("\n## ", 1)[0]
  rows = re.findall(r"^\| (.+?) \| (\S+) \| (\S+) \|", section, re.MULTILINE)
  return [row for row in rows if not row[0].startswith("---")][1:]


def test_the_table_has_the_measured_rows():
  names = [name for name, _, _ in measured_rows()]
  assert names == list(MEASURED)


def printed(value):
  if isinstance(value, str):
    return value
  return "NaN" if np.isnan(value) else f"{float(value):.4f}"


@pytest.mark.parametrize("index", range(len(MEASURED)))
def test_a_row_prints_what_is_measured(index):
  _, theirs, own = measured_rows()[index]
  measure_theirs, measure_ours = list(MEASURED.values())[index]
  assert (printed(measure_theirs()), printed(measure_ours())) == (theirs, own)
