"""Divergences: closed forms, digits, infinities, limits, your own."""

import functools

import jax
import jax.numpy as jnp
from jax.test_util import check_grads
import numpy as np
import pytest

import diffusion_objectives as do
from diffusion_objectives import divergences
from diffusion_objectives._core import numerics
from tests import oracles

INF = np.inf


def jensen_shannon(beta, normalize=False):
  """The divergence and its oracle."""
  return divergences.jensen_shannon(beta, normalize), functools.partial(
    oracles.jensen_shannon, beta=beta, normalize=normalize
  )


# Each with a float64 oracle of `(log_p, log_q)`.
DIVERGENCES = {
  "forward": (divergences.forward_kl, oracles.relative_entropy),
  "reverse": (divergences.reverse_kl, oracles.reverse_kl),
  "jensen_shannon": jensen_shannon(0.5),
  "jensen_shannon 0.1": jensen_shannon(0.1, normalize=True),
  "skew_forward": (
    divergences.skew_forward_kl(0.1),
    functools.partial(oracles.skew_forward_kl, ratio=0.1),
  ),
  "skew_reverse": (
    divergences.skew_reverse_kl(0.1),
    functools.partial(oracles.skew_reverse_kl, ratio=0.1),
  ),
  "total_variation": (divergences.total_variation, oracles.total_variation),
}
SMOOTH = [name for name in DIVERGENCES if name != "total_variation"]
FINITE = [name for name in DIVERGENCES if name not in ("forward", "reverse")]
every = pytest.mark.parametrize("name", DIVERGENCES)


@functools.partial(jax.jit, static_argnums=(0, 3))
def rows(divergence, teacher, student, temperature=1.0):
  """Values and gradients, a row each."""

  def value(student, teacher):
    return numerics.token_divergence(divergence, teacher, student, temperature)

  return jax.vmap(jax.value_and_grad(value))(student, teacher)


def row(divergence, teacher, student):
  """Value and gradient of one row."""
  value, gradient = rows(
    divergence, np.float32([teacher]), np.float32([student])
  )
  return float(value[0]), np.asarray(gradient[0])


def between(divergence, p, q):
  """The divergence of two distributions."""
  return row(divergence, np.log(p), np.log(q))[0]


P, Q = [0.7, 0.2, 0.1], [0.4, 0.4, 0.2]


@pytest.mark.parametrize(
  ("divergence", "expected", "source"),
  [
    (divergences.forward_kl, 0.183787, "transformers#1181"),
    (divergences.reverse_kl, 0.192043, "huggingface/trl#5731"),
    (divergences.jensen_shannon(), 0.046201, "huggingface/trl#2202"),
    (divergences.jensen_shannon(0.1), 0.016518, "huggingface/trl#3043"),
    (
      divergences.jensen_shannon(1 - 1e-6, normalize=True),
      0.192042,
      "verl-project/verl-recipe#151",
    ),
    (
      divergences.jensen_shannon(1e-6, normalize=True),
      0.183787,
      "verl-project/verl-recipe#151",
    ),
    (divergences.total_variation, 0.3, "by hand"),
  ],
)
def test_a_value_is_that_of_its_report(divergence, expected, source):
  assert between(divergence, P, Q) == pytest.approx(expected, abs=2e-6), source


def test_padding_of_the_vocabulary_by_minus_inf_is_no_nan():
  """huggingface/trl#5594: `0 * -inf` in the reverse KL."""
  value, gradient = row(divergences.reverse_kl, [1, 1.5, -INF], [1, 2, -INF])
  assert value == pytest.approx(0.026345, abs=1e-6)
  assert np.isfinite(gradient).all() and gradient[2] == 0


def test_jensen_shannon_is_symmetric_at_one_half_and_bounded():
  rng = np.random.default_rng(0)
  y, z = 5 * rng.standard_normal((2, 50, 6)).astype(np.float32)
  for beta in (0.1, 0.5, 0.9):
    divergence = divergences.jensen_shannon(beta)
    one, _ = rows(divergence, y, z)
    bound = -beta * np.log(beta) - (1 - beta) * np.log1p(-beta)
    assert np.all(one >= 0) and np.all(one <= bound + 1e-6)
    swapped, _ = rows(divergences.jensen_shannon(1 - beta), z, y)
    np.testing.assert_allclose(one, swapped, rtol=1e-5)


def test_a_skew_divergence_is_bounded():
  for skew in (divergences.skew_forward_kl, divergences.skew_reverse_kl):
    value, _ = row(skew(0.1), [0, -INF], [-INF, 0])
    assert value == pytest.approx(-np.log(0.1), rel=1e-6)


@pytest.mark.parametrize("beta", [1e-30, 1e-6, 1e-3])
def test_normalised_jensen_shannon_tends_to_both_divergences(beta):
  """Values and gradients, in float32; apart by at most some `beta`."""
  rng = np.random.default_rng(0)
  y, z = rng.standard_normal((2, 4, 50)).astype(np.float32)
  near = [divergences.jensen_shannon(beta, normalize=True)]
  end = [divergences.forward_kl]
  if 1 - beta < 1:
    near += [divergences.jensen_shannon(1 - beta, normalize=True)]
    end += [divergences.reverse_kl]
  for one, other in zip(near, end, strict=True):
    for a, b in zip(rows(one, y, z), rows(other, y, z), strict=True):
      np.testing.assert_allclose(a, b, rtol=2e-6 + 9 * beta, atol=1e-7 + beta)


@pytest.mark.parametrize("share", [1e-30, 1e-6, 0.1, 0.5, 0.9, 1 - 1e-6])
def test_the_logarithm_of_a_mixture_keeps_its_digits(share):
  d = np.linspace(-100, 100, 2001, dtype=np.float32)
  d = np.concatenate([d, np.float32([-1e-4, 1e-4, -1e4])])
  wide = d.astype(np.longdouble)
  expected = np.log1p(share * np.expm1(wide))
  actual = numerics.log_mixture(jnp.asarray(d), share)
  np.testing.assert_allclose(actual, expected, rtol=1e-6)
  far = numerics.log_mixture(jnp.float32([1e4, INF, -INF]), share)
  np.testing.assert_allclose(
    far, [1e4 + np.log(share), INF, np.log1p(-share)], rtol=1e-6
  )


def test_normalised_jensen_shannon_has_its_ends():
  at = functools.partial(divergences.jensen_shannon, normalize=True)
  assert at(0) is divergences.forward_kl
  assert at(1.0) is divergences.reverse_kl


@every
@pytest.mark.parametrize("noise", [1e-3, 0.1, 30.0])
def test_a_value_keeps_its_digits(name, noise):
  divergence, oracle = DIVERGENCES[name]
  rng = np.random.default_rng(0)
  teacher = rng.standard_normal((2, 32_000)).astype(np.float32)
  change = noise * rng.standard_normal(teacher.shape)
  student = (teacher + change).astype(np.float32)
  value, _ = rows(divergence, teacher, student)
  expected = oracle(oracles.log_softmax(teacher), oracles.log_softmax(student))
  np.testing.assert_allclose(value, expected, rtol=2e-6)


@every
def test_a_gradient_keeps_its_digits(name):
  """Against the same formulas in float64, which `check_grads` holds."""
  divergence, _ = DIVERGENCES[name]
  rng = np.random.default_rng(0)
  teacher = rng.standard_normal((2, 32_000)).astype(np.float32)
  for noise in (1e-3, 3.0):
    change = noise * rng.standard_normal(teacher.shape)
    student = (teacher + change).astype(np.float32)
    _, gradient = rows(divergence, teacher, student)
    with jax.enable_x64(True):
      _, exact = rows(divergence, np.float64(teacher), np.float64(student))
      exact = np.asarray(exact)
    assert np.linalg.norm(gradient - exact) < 2e-6 * np.linalg.norm(exact)


@every
def test_the_gradient_is_the_derivative(name):
  divergence, _ = DIVERGENCES[name]
  order = 1 if name == "total_variation" else 2
  rng = np.random.default_rng(0)
  with jax.enable_x64(True):
    for scale in (0.3, 3.0):
      y, z = scale * rng.standard_normal((2, 5))
      check_grads(
        lambda z, y=y: numerics.token_divergence(divergence, y, z, 2.0),
        (jnp.asarray(z),),
        order=order,
        modes=("fwd", "rev"),
        atol=1e-6,
        rtol=1e-6,
      )


@every
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
def test_equal_distributions_have_value_and_gradient_0(name, scale):
  logits = scale * np.random.default_rng(0).standard_normal((4, 100))
  logits = logits.astype(np.float32)
  logits[0, :3] = -INF
  for leaf in rows(DIVERGENCES[name][0], logits, logits):
    assert not np.any(leaf)


@every
def test_what_both_exclude_changes_nothing(name):
  divergence, _ = DIVERGENCES[name]
  value, gradient = row(divergence, [1, 2, 0.5], [1, 1.5, 0])
  padded, wide = row(divergence, [1, -INF, 2, 0.5], [1, -INF, 1.5, 0])
  assert padded == pytest.approx(value, rel=1e-6)
  np.testing.assert_allclose(wide[[0, 2, 3]], gradient, rtol=1e-5)
  assert wide[1] == 0


# Teacher, student: which of them excludes what the other does not.
EXCLUDED = [
  ([1, 2, -INF], [1, 1.5, 0.3]),
  ([1, 2, 0.3], [1, 1.5, -INF]),
  ([1, 2, -INF], [1, -INF, 0.3]),
  ([0, -INF, -INF], [-INF, 0, 1]),
]


@pytest.mark.parametrize("name", FINITE)
@pytest.mark.parametrize(("teacher", "student"), EXCLUDED)
def test_a_bounded_divergence_stays_finite(name, teacher, student):
  divergence, oracle = DIVERGENCES[name]
  value, gradient = row(divergence, teacher, student)
  expected = oracle(oracles.log_softmax(teacher), oracles.log_softmax(student))
  assert value == pytest.approx(expected, rel=1e-6)
  assert np.isfinite(gradient).all()
  # That of a student and a teacher that exclude all but nothing.
  lifted = [np.maximum(logits, -80.0) for logits in (teacher, student)]
  near_value, near = row(divergence, *lifted)
  assert near_value == pytest.approx(value, rel=1e-5)
  np.testing.assert_allclose(gradient, near, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("teacher", "student"), EXCLUDED)
def test_an_unbounded_divergence_is_inf_with_a_finite_gradient(
  teacher, student
):
  p, q = oracles.softmax(teacher), oracles.softmax(student)
  value, gradient = row(divergences.forward_kl, teacher, student)
  assert (value == INF) == bool(np.any((p > 0) & (q == 0)))
  np.testing.assert_allclose(gradient, q - p, atol=1e-6)
  value, gradient = row(divergences.reverse_kl, teacher, student)
  assert (value == INF) == bool(np.any((q > 0) & (p == 0)))
  # That of sum q (log q - log p) over the ids that the teacher has.
  is_kept = (q > 0) & (p > 0)
  slope = np.where(is_kept, 0.0, -q)
  slope[is_kept] = q[is_kept] * np.log(q[is_kept] / p[is_kept])
  expected = slope - q * slope.sum()
  np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_a_probability_below_float32_is_no_exclusion():
  """Logits 120 apart: the reverse KL is large, and finite."""
  value, _ = row(divergences.reverse_kl, [0, 0, -120], [0, 0, 0])
  assert value == pytest.approx(39.594535, rel=1e-6)


@every
@pytest.mark.parametrize(
  ("teacher", "student"),
  [
    ([1, np.nan, 0], [1, 2, 3]),
    ([1, 2, 3], [1, np.nan, 0]),
    ([1, 2, 3], [1, INF, 0]),
    ([1, 2, 3], [-INF] * 3),
    ([-INF] * 3, [1, 2, 3]),
  ],
)
def test_a_row_that_is_no_distribution_is_nan(name, teacher, student):
  value, gradient = row(DIVERGENCES[name][0], teacher, student)
  assert np.isnan(value) and np.isnan(gradient).any()


@pytest.mark.parametrize("name", SMOOTH)
def test_a_large_temperature_leaves_the_centred_difference(name):
  """`T^2 D` has the gradient `c (z - mean z - (y - mean y)) / V` as T grows,
  with `c` the second derivative of the divergence where `p = q`."""
  size = {"jensen_shannon": 0.25, "skew_forward": 0.81, "skew_reverse": 0.81}
  rng = np.random.default_rng(0)
  z, y = rng.standard_normal((2, 1, 5)).astype(np.float32)
  _, gradient = rows(DIVERGENCES[name][0], y, z, 1e4)
  expected = size.get(name, 1.0) * (z - z.mean() - (y - y.mean())) / 5
  np.testing.assert_allclose(1e8 * gradient, expected, rtol=2e-3, atol=1e-4)


@every
def test_equal_divergences_are_one_static_argument(name):
  divergence, _ = DIVERGENCES[name]
  copy = divergences.Divergence(
    name=divergence.name,
    pointwise=divergence.pointwise,
    hyper_parameters=tuple(divergence.hyper_parameters),
    is_second_order=divergence.is_second_order,
  )
  assert copy == divergence and hash(copy) == hash(divergence)
  assert divergences.skew_forward_kl(0.1) == divergences.skew_forward_kl(0.1)
  assert divergences.skew_forward_kl(0.1) != divergences.skew_forward_kl(0.2)


@pytest.mark.parametrize(
  ("build", "error", "message"),
  [
    (
      lambda: divergences.jensen_shannon(0.0),
      ValueError,
      r"beta must lie in \(",
    ),
    (
      lambda: divergences.jensen_shannon(1.0),
      ValueError,
      r"beta must lie in \(",
    ),
    (
      lambda: divergences.jensen_shannon(1.5, normalize=True),
      ValueError,
      r"beta must lie in \[0, 1\]",
    ),
    (
      lambda: divergences.jensen_shannon("a"),
      TypeError,
      "beta must be a finite",
    ),
    (
      lambda: divergences.jensen_shannon(0.5, normalize=1),
      TypeError,
      "normalize must be a bool",
    ),
    (lambda: divergences.skew_forward_kl(0.0), ValueError, "ratio must lie in"),
    (lambda: divergences.skew_reverse_kl(1), ValueError, "ratio must lie in"),
    (
      lambda: divergences.Divergence(name="a", pointwise=None),
      TypeError,
      "pointwise must be callable",
    ),
    (
      lambda: divergences.Divergence(
        name="a", pointwise=abs, hyper_parameters={}
      ),
      TypeError,
      "hyper_parameters must be a tuple",
    ),
  ],
)
def test_a_hyper_parameter_is_checked_when_built(build, error, message):
  with pytest.raises(error, match=f"^{message}.*; received"):
    build()


def test_the_module_is_exported():
  assert do.divergences is divergences


@pytest.mark.parametrize(
  "pointwise",
  [
    lambda p, q, d: (p - q) ** 2,  # of two rows: unpacked by accident
    lambda p, q, d: ((p - q) ** 2, jnp.sum(q)),
    lambda p, q, d: ((p - q) ** 2, q, q),
  ],
)
def test_terms_without_their_slopes_are_refused(pointwise):
  p = jnp.full((2, 2), 0.5)
  divergence = divergences.Divergence(name="mine", pointwise=pointwise)
  with pytest.raises(ValueError, match=r"must return \(g, h\).*; received"):
    divergence(p, p, 0 * p)


def test_hyper_parameters_must_be_pairs():
  with pytest.raises(TypeError, match="must be pairs of a name and a number"):
    divergences.Divergence(
      name="mine", pointwise=lambda p, q, d: (p, q), hyper_parameters=(1, 2)
    )
