"""How exact are the gradients of the linear losses?

Relative L2 errors of the gradients in hidden states and kernel, against float64
on the same (rounded) inputs. First the losses at several block sizes and the
dense form; then the forward KL from a teacher that is near the student, the
student's hidden states plus `gap` times noise under the same head, where the
gradient is a small difference. Small sizes: nothing is timed.

  python -m benchmarks.linear_accuracy --help
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _linear
import diffusion_objectives as do

GAPS = (1.0, 0.1, 0.01)
CHUNK = 64  # tokens of the reference at a time


def log_softmax(logits):
  shifted = logits - logits.max(-1, keepdims=True)
  return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def reference(hidden, kernel, batch, teacher_kernel):
  """The mean loss and its two gradients in float64, weights 1."""
  features, vocabulary = kernel.shape
  x = np.asarray(hidden, np.float64).reshape(-1, features)
  w = np.asarray(kernel, np.float64)
  count = len(x)
  loss, dx, dw = 0.0, np.zeros_like(x), np.zeros_like(w)
  for start in range(0, count, CHUNK):
    rows = slice(start, start + CHUNK)
    log_q = log_softmax(x[rows] @ w)
    if teacher_kernel is None:
      p = np.eye(vocabulary)[np.asarray(batch.target_ids).ravel()[rows]]
      terms = -p * log_q
    else:
      teacher = np.asarray(batch.teacher.hidden, np.float64)
      y = teacher.reshape(-1, features)[rows]
      log_p = log_softmax(y @ np.asarray(teacher_kernel, np.float64))
      p = np.exp(log_p)
      terms = p * (log_p - log_q)
    slopes = (np.exp(log_q) - p) / count
    loss += terms.sum() / count
    dx[rows] = slopes @ w.T
    dw += x[rows].T @ slopes
  return loss, dx.reshape(hidden.shape), dw


def relative_error(found, expected):
  difference = np.asarray(found, np.float64) - expected
  return float(np.linalg.norm(difference) / np.linalg.norm(expected))


def from_stored_logits(dtype):
  """The dense form with teacher logits that were stored in a dtype."""

  def loss(hidden, kernel, batch, teacher_kernel):
    head = do.OutputHead(kernel=teacher_kernel)
    teacher = do.DenseTeacher(
      logits=head.logits(batch.teacher.hidden).astype(dtype)
    )
    output = do.forward_kl_loss(
      do.OutputHead(kernel=kernel).logits(hidden),
      dataclasses.replace(batch, teacher=teacher),
    )
    return output.primary_loss.compute(), {}

  return loss


def errors(loss, operands, expected):
  (value, _), gradients = jax.jit(_linear.with_gradients(loss))(*operands)
  found = (value, *gradients)
  names = ("value_error", "hidden_error", "kernel_error")
  return {
    name: relative_error(ours, exact)
    for name, ours, exact in zip(names, found, expected, strict=True)
  }


def block_sizes(size):
  """Of tokens and of the vocabulary; None is the library's choice."""
  return [
    (None, None),
    (32, None),
    (size.tokens, None),
    (32, min(512, size.vocabulary)),
  ]


def at_block_sizes(size):
  operands = _linear.arrays(size)
  expected = reference(*operands)
  for tokens, vocabulary in block_sizes(size):
    loss = _linear.ours(size, token_block=tokens, vocabulary_block=vocabulary)
    yield {
      **size.fields(),
      "form": f"ours, blocks {tokens or 'auto'} x {vocabulary or 'auto'}",
      **errors(loss, operands, expected),
    }
  yield {
    **size.fields(),
    "form": "dense",
    **errors(_linear.dense(size), operands, expected),
  }


def near_teachers(size):
  hidden, kernel, batch, _ = _linear.arrays(size)
  noise = jax.random.normal(jax.random.key(1), hidden.shape)
  forms = {
    "ours": _linear.ours(size),
    "dense, teacher logits in float32": from_stored_logits(jnp.float32),
    "dense, teacher logits in bfloat16": from_stored_logits(jnp.bfloat16),
  }
  for gap in GAPS:
    near = (hidden.astype(jnp.float32) + gap * noise).astype(hidden.dtype)
    operands = (
      hidden,
      kernel,
      dataclasses.replace(batch, teacher=do.HiddenTeacher(hidden=near)),
      kernel,
    )
    expected = reference(*operands)
    for form, loss in forms.items():
      yield {
        **size.fields(),
        "gap": gap,
        "form": form,
        "loss": float(expected[0]),
        **errors(loss, operands, expected),
      }


def main():
  parser = _linear.make_parser(__doc__)
  parser.add_argument(
    "--size", type=_linear.triple, default=(389, 64, 5003), metavar="N,D,V"
  )
  arguments = parser.parse_args()
  tokens, features, vocabulary = (
    (61, 16, 499) if arguments.quick else arguments.size
  )
  _linear.print_hardware()
  losses, near = [], []
  for dtype in _linear.DTYPES:
    for kind in ("ce", "kl_hidden"):
      size = _linear.Size(
        kind=kind,
        tokens=tokens,
        features=features,
        vocabulary=vocabulary,
        dtype=dtype,
      )
      for row in at_block_sizes(size):
        losses.append(_linear.emit(row, arguments.json))
    for row in near_teachers(size):
      near.append(_linear.emit(row, arguments.json))
  shown = ("form", "value_error", "hidden_error", "kernel_error")
  names = ["form", "value", "gradient in hidden", "gradient in kernel"]
  _linear.print_table(
    "Relative errors against float64",
    [*_linear.SIZE_NAMES, *names],
    [[*_linear.size_columns(r), *[r[n] for n in shown]] for r in losses],
  )
  _linear.print_table(
    "Relative errors as the teacher nears the student",
    [*_linear.SIZE_NAMES, "gap", "loss", *names],
    [
      [
        *_linear.size_columns(r),
        r["gap"],
        r["loss"],
        *[r[n] for n in shown],
      ]
      for r in near
    ],
  )


if __name__ == "__main__":
  main()
