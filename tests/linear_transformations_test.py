"""Losses from hidden states under JAX's transformations: value and gradients.

Each answer is the float64 oracle's. One case with every part of a head, for a
loss with targets alone and one with both terms, each by one implementation.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffusion_objectives as do
from diffusion_objectives.testing import strategies
from tests import linear_cases

FORM = linear_cases.FORMS["all"]
BLOCKS = dict(token_block=3, vocabulary_block=5)


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
  """An objective by one implementation."""

  objective: linear_cases.Objective
  implementation: str

  def sum(self, *arguments):
    """The unreduced sum, of the arguments of `linear_cases.total`."""
    loss = self.objective.bind(implementation=self.implementation, **BLOCKS)
    return linear_cases.total(loss, *arguments)[0]

  def case(self, seed=0, **options):
    return linear_cases.draw(self.objective, FORM, seed=seed, **options)

  def arguments(self, seed=0):
    return linear_cases.on_device(self.case(seed))

  def assert_right(self, found, seed=0):
    """Compares a value and its gradients with the answer of a case."""
    answer = self.objective.expected(self.case(seed))
    self.assert_near(*found, answer)

  def assert_near(self, value, gradients, answer):
    assert linear_cases.error(value, answer.total) <= 3e-6
    for name, gradient in linear_cases.named(gradients).items():
      size = linear_cases.error(gradient, answer.gradients[name])
      assert size <= 3e-6, name


SUBJECTS = {
  f"{name} {implementation}": Subject(
    linear_cases.OBJECTIVES[name], implementation
  )
  for name, implementation in (
    ("cross entropy", "recompute"),
    ("opd hidden", "grad_in_forward"),
  )
}
subjects = pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)
DIFFERENTIATED = (0, 1, 2)


def value_and_grad(f):
  return jax.value_and_grad(f, argnums=DIFFERENTIATED)


def stacked(trees):
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


WRAPPINGS = {
  "eager": lambda f: value_and_grad(f),
  "jit": lambda f: jax.jit(value_and_grad(f)),
  "inner jit": lambda f: value_and_grad(jax.jit(f)),
  "checkpoint": lambda f: jax.jit(value_and_grad(jax.checkpoint(f))),
  "nothing saved": lambda f: jax.jit(
    value_and_grad(
      jax.checkpoint(f, policy=jax.checkpoint_policies.nothing_saveable)
    )
  ),
}


@subjects
@pytest.mark.parametrize("wrap", WRAPPINGS.values(), ids=WRAPPINGS)
def test_value_and_gradients_are_right(subject, wrap):
  found = wrap(subject.sum)(*subject.arguments())
  subject.assert_right(found)


@subjects
@pytest.mark.parametrize("is_reversed", [False, True])
def test_calls_that_differentiate_different_parts(subject, is_reversed):
  """In one function, of the same shapes: a frozen head here, trained there."""
  stop = jax.lax.stop_gradient

  def summed(hidden, head, weights, *rest):
    calls = [
      (hidden, head, weights),
      (hidden, stop(head), weights),
      (stop(hidden), head, weights),
      (hidden, head, stop(weights)),
    ]
    calls = calls[::-1] if is_reversed else calls
    return sum(subject.sum(*call, *rest) for call in calls)

  value, gradients = value_and_grad(summed)(*subject.arguments())
  subject.assert_right((value / 4, jax.tree.map(lambda g: g / 3, gradients)))


@subjects
def test_what_was_frozen_is_trained_later(subject):
  arguments = subject.arguments()
  for parts in (DIFFERENTIATED, 0, 1, 2):
    jax.jit(jax.grad(subject.sum, argnums=parts))(*arguments)
  for wrap in WRAPPINGS.values():
    subject.assert_right(wrap(subject.sum)(*arguments))
  mapped = jax.vmap(value_and_grad(subject.sum))
  found = mapped(*stacked([arguments, arguments]))
  subject.assert_right(jax.tree.map(lambda x: x[1], found))


@subjects
def test_a_cotangent_scales_every_gradient(subject):
  arguments = subject.arguments()
  tripled = jax.jit(value_and_grad(lambda *a: -3.0 * subject.sum(*a)))
  value, gradients = tripled(*arguments)
  gradients = jax.tree.map(lambda g: g / -3, gradients)
  subject.assert_right((value / -3, gradients))


@subjects
@pytest.mark.parametrize("order", ["vmap of grad", "grad of vmap"])
def test_vmap_over_batches(subject, order):
  """Of cases, each with a head of its own."""
  several = [subject.arguments(seed) for seed in range(3)]
  if order == "vmap of grad":
    f = jax.vmap(value_and_grad(subject.sum))
    values, gradients = jax.jit(f)(*stacked(several))
  else:

    def summed(*arguments):
      values = jax.vmap(subject.sum)(*arguments)
      return jnp.sum(values), values

    f = jax.value_and_grad(summed, argnums=DIFFERENTIATED, has_aux=True)
    (_, values), gradients = jax.jit(f)(*stacked(several))
  for seed in range(3):
    one = jax.tree.map(lambda x: x[seed], (values, gradients))  # noqa: B023
    subject.assert_right(one, seed)


@subjects
def test_vmap_over_heads_and_over_hidden_states(subject):
  """One of the arguments is mapped over, the others are not."""
  arguments = subject.arguments()
  for index in DIFFERENTIATED:
    axes = [None] * len(arguments)
    axes[index] = 0
    changed = list(arguments)
    changed[index] = stacked(
      [jax.tree.map(lambda x, c=c: x * c, arguments[index]) for c in (1.0, 0.5)]
    )
    f = jax.jit(jax.vmap(value_and_grad(subject.sum), in_axes=axes))
    values, gradients = f(*changed)
    for i, factor in enumerate((1.0, 0.5)):
      hidden, head, weights = (
        jax.tree.map(lambda x: np.asarray(x) * np.float32(factor), x)  # noqa: B023
        if index == j
        else x
        for j, x in enumerate(jax.tree.map(np.asarray, arguments[:3]))
      )
      case = subject.case()
      batch = strategies.replace_tokens(case.batch, loss_weights=weights)
      case = dataclasses.replace(case, hidden=hidden, head=head, batch=batch)
      subject.assert_near(
        values[i],
        jax.tree.map(lambda x: x[i], gradients),  # noqa: B023
        subject.objective.expected(case),
      )


def micro_batches(subject, count=3):
  """Cases that share one head, and the sum of their answers."""
  first = subject.case()
  cases = [
    dataclasses.replace(
      subject.case(seed), head=first.head, teacher_head=first.teacher_head
    )
    for seed in range(count)
  ]
  answers = [subject.objective.expected(case) for case in cases]
  arguments = [linear_cases.on_device(case) for case in cases]
  (_, head, _, _, teacher_head) = arguments[0]
  rows = stacked([(a[0], a[2], a[3]) for a in arguments])
  return head, teacher_head, rows, answers


def assert_summed(value, gradient, answers):
  """The head's gradient is the sum over micro-batches."""
  total = sum(answer.total for answer in answers)
  assert linear_cases.error(value, total) <= 3e-6
  found = linear_cases.named((None, gradient, None))
  for name in set(found) - {"hidden", "weights"}:
    expected = sum(answer.gradients[name] for answer in answers)
    assert linear_cases.error(found[name], expected) <= 3e-6, name


@subjects
def test_a_gradient_inside_a_scan(subject):
  head, teacher_head, rows, answers = micro_batches(subject)

  def step(carry, row):
    hidden, weights, batch = row
    value, (d_hidden, d_head, d_weights) = value_and_grad(subject.sum)(
      hidden, head, weights, batch, teacher_head
    )
    carry = jax.tree.map(jnp.add, carry, (value, d_head))
    return carry, (d_hidden, d_weights)

  start = (jnp.float32(0), jax.tree.map(jnp.zeros_like, head))
  run = jax.jit(lambda rows: jax.lax.scan(step, start, rows))
  (value, gradient), (d_hidden, d_weights) = run(rows)
  assert_summed(value, gradient, answers)
  for i, answer in enumerate(answers):
    for found, name in ((d_hidden, "hidden"), (d_weights, "weights")):
      assert linear_cases.error(found[i], answer.gradients[name]) <= 3e-6


@subjects
@pytest.mark.parametrize("is_remat", [False, True], ids=["plain", "remat"])
def test_a_gradient_of_a_scan(subject, is_remat):
  head, teacher_head, rows, answers = micro_batches(subject)

  def summed(head, hidden, rows):
    def step(carry, row):
      hidden, (weights, batch) = row
      return carry + subject.sum(hidden, head, weights, batch, teacher_head), 0

    step = jax.checkpoint(step) if is_remat else step
    return jax.lax.scan(step, jnp.float32(0), (hidden, rows))[0]

  value, (gradient, d_hidden) = jax.jit(
    jax.value_and_grad(summed, argnums=(0, 1))
  )(head, rows[0], rows[1:])
  assert_summed(value, gradient, answers)
  for i, answer in enumerate(answers):
    size = linear_cases.error(d_hidden[i], answer.gradients["hidden"])
    assert size <= 3e-6


# Second derivatives.


@subjects
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "jit"])
def test_forward_over_reverse_is_the_derivative_of_the_gradient(
  subject, is_compiled
):
  arguments = subject.arguments()
  rng = np.random.default_rng(0)
  direction = jax.tree.map(
    lambda x: np.where(x == 0, 0, rng.standard_normal(x.shape)).astype(
      np.float32
    ),
    arguments[:3],
  )

  def product(differentiated, direction):
    gradient = jax.grad(
      lambda *d: subject.sum(*d, *arguments[3:]), argnums=DIFFERENTIATED
    )
    return jax.jvp(gradient, differentiated, direction)[1]

  f = jax.jit(product) if is_compiled else product
  found = linear_cases.named(f(arguments[:3], direction))

  def moved(by):
    hidden, head, weights = jax.tree.map(
      lambda x, u: np.float64(x) + by * np.float64(u),
      arguments[:3],
      direction,
    )
    case = subject.case()
    batch = strategies.replace_tokens(case.batch, loss_weights=weights)
    case = dataclasses.replace(case, hidden=hidden, head=head, batch=batch)
    return subject.objective.expected(case).gradients

  up, down = moved(1e-6), moved(-1e-6)
  for name, value in found.items():
    expected = (up[name] - down[name]) / 2e-6
    assert linear_cases.error(value, expected) <= 1e-5, name


@subjects
def test_a_hessian_by_forward_over_reverse(subject):
  """All of it, for one token's hidden state."""
  hidden, *others = subject.arguments()
  weights = np.asarray(others[1])
  position = tuple(np.argwhere(weights > 0)[0])

  def of_one(row):
    return subject.sum(hidden.at[position].set(row), *others)

  hessian = np.asarray(jax.jit(jax.jacfwd(jax.grad(of_one)))(hidden[position]))
  np.testing.assert_allclose(
    hessian, hessian.T, rtol=1e-4, atol=1e-5 * np.abs(hessian).max()
  )
  case = subject.case()

  def gradient(row):
    moved = np.array(case.hidden, np.float64)
    moved[position] = row
    answer = subject.objective.expected(dataclasses.replace(case, hidden=moved))
    return answer.gradients["hidden"][position]

  row = np.float64(case.hidden[position])
  for i, u in enumerate(np.eye(len(row))):
    expected = (gradient(row + 1e-6 * u) - gradient(row - 1e-6 * u)) / 2e-6
    assert linear_cases.error(hessian[i], expected) <= 1e-5


@subjects
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "jit"])
def test_reverse_over_reverse_is_refused_by_the_librarys_message(
  subject, is_compiled
):
  hidden, *others = subject.arguments()

  def of_gradient(hidden):
    gradient = jax.grad(lambda h: subject.sum(h, *others))(hidden)
    return jnp.sum(gradient**2)

  f = jax.grad(of_gradient)
  # A sentence of the library: what must hold; what was received.
  with pytest.raises(ValueError, match=r"reverse") as raised:
    (jax.jit(f) if is_compiled else f)(hidden)
  assert re.search(r"must .*; received", str(raised.value), re.DOTALL)


@subjects
def test_forward_mode_is_right_or_refused(subject):
  """Never a tangent that is wrong, or that is 0."""
  hidden, *others = subject.arguments()
  rng = np.random.default_rng(0)
  direction = rng.standard_normal(hidden.shape).astype(np.float32)
  try:
    _, tangent = jax.jvp(
      lambda h: subject.sum(h, *others), (hidden,), (direction,)
    )
  except TypeError as error:
    assert "forward-mode" in str(error) or "jvp" in str(error)  # noqa: PT017
    return
  gradient = subject.objective.expected(subject.case()).gradients["hidden"]
  np.testing.assert_allclose(
    tangent, np.vdot(gradient, direction), rtol=1e-5, atol=1e-4
  )


# Parts that are frozen.


def pick(arguments, part):
  """The part alone, and how to put it back."""
  hidden, head, weights, *others = arguments
  if part == "hidden":
    return hidden, lambda x: (x, head, weights, *others)
  if part == "weights":
    return weights, lambda x: (hidden, head, x, *others)
  replace = functools.partial(dataclasses.replace, head)
  return getattr(head, part), lambda x: (
    hidden,
    replace(**{part: x}),
    weights,
    *others,
  )


@subjects
@pytest.mark.parametrize(
  "part", ["hidden", "kernel", "bias", "low_rank", "weights"]
)
def test_a_gradient_in_one_part_alone(subject, part):
  value, put = pick(subject.arguments(), part)
  gradient = jax.jit(jax.grad(lambda x: subject.sum(*put(x))))(value)
  answer = subject.objective.expected(subject.case()).gradients
  names = ("a", "b") if part == "low_rank" else (part,)
  found = gradient if part == "low_rank" else (gradient,)
  for name, one in zip(names, found, strict=True):
    assert linear_cases.error(one, answer[name]) <= 3e-6, name


PASSED_ON = ("parameter", "get-tuple-element", "bitcast")


def made_like(kernel, compiled):
  """The operations of a compiled step that make an array like the kernel."""
  shapes = "|".join(
    f"f32\\[{','.join(map(str, shape))}\\]"
    for shape in (kernel.shape, kernel.shape[::-1])
  )
  made = re.findall(rf"= (?:{shapes})\S* ([a-z-]+)\(", compiled.as_text())
  return [name for name in made if name not in PASSED_ON]


@subjects
def test_no_gradient_of_a_frozen_kernel_is_formed(subject):
  shape = (2, 9, 6, 41)  # tokens, blocks and rank are of other sizes
  case = linear_cases.draw(subject.objective, FORM, shape=shape)
  arguments = linear_cases.on_device(case)

  def compiled(part):
    def gradient(value, arguments):
      _, put = pick(arguments, part)
      return jax.grad(lambda x: subject.sum(*put(x)))(value)

    value, _ = pick(arguments, part)
    return jax.jit(gradient).lower(value, arguments).compile()

  kernel = arguments[1].kernel
  assert made_like(kernel, compiled("kernel"))  # it would be seen
  for part in ("low_rank", "bias", "hidden", "weights"):
    assert made_like(kernel, compiled(part)) == [], part


# Log-probabilities of the targets.


def test_token_log_probs_under_transformations():
  """A loss of its own over them, of a squared ratio, agrees with logits."""
  objective = linear_cases.OBJECTIVES["cross entropy"]
  case = linear_cases.draw(objective, FORM, weights="binary")
  old = np.random.default_rng(1).standard_normal((2, 7)).astype(np.float32)

  def squares(log_probs):
    is_active = case.batch.loss_weights > 0
    return jnp.sum(jnp.where(is_active, log_probs - old, 0) ** 2)

  def from_hidden(hidden, head):
    return squares(
      do.linear_token_log_probs(hidden, head, case.batch, **BLOCKS)
    )

  def from_logits(hidden, head):
    rows = jax.nn.log_softmax(head.logits(hidden))
    ids = case.batch.target_ids[..., None]
    return squares(jnp.take_along_axis(rows, ids, axis=-1)[..., 0])

  arguments = (jnp.asarray(case.hidden), jax.tree.map(jnp.asarray, case.head))
  expected = jax.jit(jax.value_and_grad(from_logits, argnums=(0, 1)))(
    *arguments
  )
  grad = functools.partial(jax.value_and_grad, argnums=(0, 1))
  for f in (
    grad(from_hidden),
    jax.jit(grad(jax.jit(from_hidden))),
    jax.jit(grad(jax.checkpoint(from_hidden))),
  ):
    found = f(*arguments)
    for one, other in zip(
      jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
      assert linear_cases.error(one, other) <= 1e-5
  both = jax.jit(jax.vmap(grad(from_hidden)))(
    *jax.tree.map(lambda x: jnp.stack([x, 0.5 * x]), arguments)
  )
  halved = jax.tree.map(lambda x: 0.5 * x, arguments)
  for i, other in enumerate((expected, grad(from_logits)(*halved))):
    for one, leaf in zip(
      jax.tree.leaves(both), jax.tree.leaves(other), strict=True
    ):
      assert linear_cases.error(one[i], leaf) <= 1e-5
