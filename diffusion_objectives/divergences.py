r"""Divergences of a student's categories `q` from a teacher's `p`.

Each is a sum over categories of a function that is homogeneous of degree 1,

  D(p, q) = sum_v g(p_v, q_v),    h_v = q_v dg/dq_v                         (1)

and with `q = softmax(z / T)` its gradient is

  dD/dz = (h - q sum_v h_v) / T                                             (2)

A multiple of `q_v - p_v` may be added to `g`, as it sums to 0, and a multiple
of `q_v` to `h`, as (2) does not see it. They are chosen so that every term is
nonnegative and nothing cancels. All but (8) are made of one function,

  kl(x, y) = x log(x / y) - x + y >= 0                                      (3)

With `d = log q - log p` and, for mixtures, `L(d, s) = log((1-s) + s exp(d))`:

  forward          g = kl(p, q)              h = q - p                      (4)
  reverse          g = kl(q, p)              h = q d                        (5)
  Jensen-Shannon   g = b kl(p, m) + (1-b) kl(q, m),    m = b p + (1-b) q
    log(m/p) = L(d, 1-b),  log(m/q) = L(-d, b),  h = (1-b) q log(q/m)       (6)
  skew forward     g = kl(p, m),    m = l p + (1-l) q
    log(m/p) = L(d, 1-l),                        h = (1-l) q (1 - p/m)      (7)
  skew reverse     g = kl(q, m),    m = (1-l) p + l q
    log(m/q) = L(-d, 1-l),       h = q (log(q/m) + l (1 - q/m))            (7')
  total variation  g = |q - p| / 2           h = q sign(q - p) / 2          (8)

Where `p` and `q` are near, all but (8) are quadratic in `d`, so `T^2 D` has a
gradient that does not depend on `T` as `T` grows. (8) is linear in `d`.

A category of probability 0 on both sides contributes 0. Student probability 0
under teacher mass: (4) is +inf, with its gradient (2). Teacher probability 0
under student mass: (5) is +inf, with the gradient of `sum q d` over the other
categories. (6) to (8) are finite.
"""

from collections.abc import Callable
import dataclasses

import jax
import jax.numpy as jnp

from diffusion_objectives._core import checks
from diffusion_objectives._core import numerics


@dataclasses.dataclass(frozen=True, kw_only=True)
class Divergence:
  """`D(p, q) = sum_v g(p_v, q_v)`, given by its terms.

  Called as `divergence(p, q, d)` with arrays of one shape, where
  `d = log q - log p` is accurate also where `p` and `q` are near; it is -inf
  where `q` alone is 0, +inf where `p` alone is, 0 where both are.

  Attributes:
    name: for messages, and for the identity in checkpoints: another formula
      needs another name.
    pointwise: `(p, q, d, **hyper_parameters) -> (g, h)`, with `g` homogeneous
      of degree 1 in `(p, q)` and `h = q dg/dq`. A function of a module, so that
      equal divergences compare equal and `jit` does not retrace. Both are
      finite at `p = q = 0`.
    hyper_parameters: pairs of a name and a number.
    is_second_order: whether `D` is quadratic where `p` and `q` are near, so
      that the factor `T^2` keeps the size of its gradient.

  Raises:
    TypeError: `name` no string, `pointwise` not callable, `hyper_parameters` no
      tuple of pairs, or `is_second_order` no bool.

  Example:
    >>> import jax.numpy as jnp
    >>> def triangular(p, q, d):  # sum (p - q)^2 / (p + q)
    ...   total = jnp.where(p + q == 0, 1, p + q)
    ...   ratio = (q - p) / total
    ...   return ratio * (q - p), q * ratio * (2 - ratio)
    >>> divergence = Divergence(name="triangular", pointwise=triangular)
    >>> p, q = jnp.array([0.5, 0.5]), jnp.array([0.25, 0.75])
    >>> terms, _ = divergence(p, q, jnp.log(q / p))
    >>> print(f"{terms.sum():.4f}")
    0.1333
  """

  name: str
  pointwise: Callable[..., tuple[jax.Array, jax.Array]]
  hyper_parameters: tuple[tuple[str, float], ...] = ()
  is_second_order: bool = True

  def __post_init__(self) -> None:
    checks.instance("name", self.name, str)
    checks.function("pointwise", self.pointwise)
    checks.instance("hyper_parameters", self.hyper_parameters, tuple)
    for pair in self.hyper_parameters:
      if not isinstance(pair, tuple) or len(pair) != 2:
        raise checks.fail(
          TypeError,
          "hyper_parameters must be pairs of a name and a number",
          repr(pair),
        )
    checks.boolean("is_second_order", self.is_second_order)

  def __call__(
    self, p: jax.Array, q: jax.Array, d: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    result = self.pointwise(p, q, d, **dict(self.hyper_parameters))
    if not isinstance(result, tuple) or [
      getattr(part, "shape", None) for part in result
    ] != [p.shape, p.shape]:
      raise checks.fail(
        ValueError,
        f"the pointwise function of {self.name} must return (g, h), each of"
        f" shape {p.shape}",
        [checks.describe(part) for part in result]
        if isinstance(result, tuple)
        else checks.describe(result),
      )
    return result


def _forward_kl(p, q, d):
  return numerics.kl_terms_and_difference(p, q, d)


def _reverse_kl(p, q, d):
  # A term that is +inf has no slope in q log p, hence -1: its -q alone.
  slope = jnp.where(d == jnp.inf, -1, d)
  return numerics.kl_terms(q, p, -d), numerics.product(q, slope)


def _jensen_shannon(p, q, d, *, beta, scale):
  m = beta * p + (1 - beta) * q
  to_p = numerics.log_mixture(d, 1 - beta)
  to_q = numerics.log_mixture(-d, beta)
  of_p, of_q = scale * beta, scale * (1 - beta)
  terms = of_p * numerics.kl_terms(p, m, to_p)
  terms += of_q * numerics.kl_terms(q, m, to_q)
  return terms, -of_q * numerics.product(q, to_q)


def _skew_forward_kl(p, q, d, *, ratio):
  to_p = numerics.log_mixture(d, 1 - ratio)
  terms = numerics.kl_terms(p, ratio * p + (1 - ratio) * q, to_p)
  return terms, (ratio - 1) * numerics.product(q, jnp.expm1(-to_p))


def _skew_reverse_kl(p, q, d, *, ratio):
  to_q = numerics.log_mixture(-d, 1 - ratio)
  terms = numerics.kl_terms(q, (1 - ratio) * p + ratio * q, to_q)
  return terms, -numerics.product(q, to_q + ratio * jnp.expm1(-to_q))


def _total_variation(p, q, d):
  return jnp.abs(numerics.difference(p, q, d)) / 2, q * jnp.sign(d) / 2


forward_kl = Divergence(name="forward_kl", pointwise=_forward_kl)
reverse_kl = Divergence(name="reverse_kl", pointwise=_reverse_kl)
total_variation = Divergence(
  name="total_variation", pointwise=_total_variation, is_second_order=False
)


def jensen_shannon(beta: float = 0.5, normalize: bool = False) -> Divergence:
  """Generalised Jensen-Shannon, `beta KL(p || m) + (1 - beta) KL(q || m)`.

  `m = beta p + (1 - beta) q`. It is symmetric at 0.5, lies between 0 and
  `-beta log beta - (1 - beta) log(1 - beta)`, and vanishes as `beta` tends to 0
  or 1. Divided by `beta (1 - beta)` it tends to the forward KL at 0 and to the
  reverse KL at 1.

  Args:
    beta: the teacher's share of the mixture, in (0, 1); in [0, 1] where
      `normalize`.
    normalize: whether to divide by `beta (1 - beta)`.

  Raises:
    TypeError: `beta` no real number, or `normalize` no bool.
    ValueError: `beta` outside its range.

  Example:
    >>> jensen_shannon(0.0, normalize=True) is forward_kl
    True
    >>> jensen_shannon(0.1).hyper_parameters
    (('beta', 0.1), ('scale', 1.0))

  Source: arXiv:2306.13649, section 2, for the divergence and the side that
  `beta` is on; the normalisation is this library's.
  """
  beta = checks.finite_real("beta", beta)
  if checks.boolean("normalize", normalize):
    if not 0 <= beta <= 1:
      raise checks.fail(ValueError, "beta must lie in [0, 1]", beta)
    if beta in (0, 1):
      return reverse_kl if beta else forward_kl
  elif not 0 < beta < 1:
    raise checks.fail(
      ValueError,
      "beta must lie in (0, 1), as the divergence vanishes at both ends"
      " (normalize=True has the ends)",
      beta,
    )
  scale = 1 / (beta * (1 - beta)) if normalize else 1.0
  return Divergence(
    name="jensen_shannon",
    pointwise=_jensen_shannon,
    hyper_parameters=(("beta", beta), ("scale", scale)),
  )


def skew_forward_kl(ratio: float = 0.1) -> Divergence:
  """`KL(p || ratio p + (1 - ratio) q)`; at most `-log ratio`.

  Args:
    ratio: the teacher's share of the mixture, in (0, 1).

  Raises:
    TypeError: `ratio` no real number.
    ValueError: `ratio` outside (0, 1).

  Example:
    >>> skew_forward_kl() == skew_forward_kl(0.1)
    True

  Source: arXiv:2402.03898 (DistiLLM), section 3.1.
  """
  return _skew("skew_forward_kl", _skew_forward_kl, ratio)


def skew_reverse_kl(ratio: float = 0.1) -> Divergence:
  """`KL(q || (1 - ratio) p + ratio q)`; at most `-log ratio`.

  Args:
    ratio: the student's share of the mixture, in (0, 1).

  Raises:
    TypeError: `ratio` no real number.
    ValueError: `ratio` outside (0, 1).

  Example:
    >>> skew_reverse_kl(0.5).hyper_parameters
    (('ratio', 0.5),)

  Source: arXiv:2402.03898 (DistiLLM), section 3.1.
  """
  return _skew("skew_reverse_kl", _skew_reverse_kl, ratio)


def _skew(
  name: str,
  pointwise: Callable[..., tuple[jax.Array, jax.Array]],
  ratio: float,
) -> Divergence:
  ratio = checks.finite_real("ratio", ratio)
  if not 0 < ratio < 1:
    raise checks.fail(ValueError, "ratio must lie in (0, 1)", ratio)
  return Divergence(
    name=name, pointwise=pointwise, hyper_parameters=(("ratio", ratio),)
  )
