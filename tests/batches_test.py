"""Batches: static checks, value checks, alignment, denominators.

A static check says the same for NumPy and device arrays, under `jit`, for
abstract arrays and for symbolic dimensions.
"""

import contextlib
import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import diffusion_objectives as do
from tests import oracles

NAN, INF = np.nan, np.inf


def zeros(*shape, dtype=np.float32):
  return np.zeros(shape, dtype)


def token_batch(**changes):
  fields = dict(
    model_inputs={"x": zeros(2, 4, 3)},
    target_ids=zeros(2, 4, dtype=np.int32),
    loss_weights=zeros(2, 4),
    is_supervised=zeros(2, 4, dtype=bool),
  )
  return do.DiffusionTokenBatch(**{**fields, **changes})


def teacher(**changes):
  return do.DenseTeacher(**{"logits": zeros(2, 4, 3), **changes})


def hidden(**changes):
  return do.HiddenTeacher(**{"hidden": zeros(2, 4, 5), **changes})


def with_hidden(hidden):
  """A batch of a student and a teacher's hidden states of other shapes."""
  return distillation_batch(teacher=do.HiddenTeacher(hidden=hidden))


def top_k(**changes):
  fields = dict(
    token_ids=zeros(2, 4, 2, dtype=np.int32),
    log_probs=zeros(2, 4, 2),
    temperature=1.0,
    is_valid=zeros(2, 4, 2, dtype=bool),
  )
  return do.TopKTeacher(**{**fields, **changes})


def sampled(**changes):
  fields = dict(log_probs=zeros(2, 4), temperature=1.0)
  return do.SampledTokenTeacher(**{**fields, **changes})


def with_top_k(log_probs):
  """A batch of a student and a top-k teacher of other shapes."""
  teacher = top_k(
    token_ids=zeros(2, 5, 2, dtype=np.int32), log_probs=log_probs, is_valid=None
  )
  return distillation_batch(teacher=teacher)


def distillation_batch(logits=None, **changes):
  fields = dict(student_batch=token_batch(), teacher=teacher())
  if logits is not None:
    fields["teacher"] = do.DenseTeacher(logits=logits)
  return do.DiffusionDistillationBatch(**{**fields, **changes})


def cross_entropy(logits):
  return do.weighted_cross_entropy_loss(logits, token_batch())


def forward_kl(logits):
  batch = distillation_batch(logits=zeros(2, 4, 6))
  return do.forward_kl_loss(logits, batch)


# Static checks: (what is built, what is passed, the error, its message).

ARRAY = "must be a JAX/NumPy array or ShapeDtypeStruct; received"
SHAPE = "must have shape [batch, length]; received"
REAL = "must have real numeric or boolean dtype; received"

OF_ARRAYS = [
  (
    token_batch,
    dict(target_ids=zeros(4, dtype=np.int32)),
    ValueError,
    f"target_ids {SHAPE} int32[4]",
  ),
  (
    token_batch,
    dict(target_ids=zeros(2, 4, 3, dtype=np.uint8)),
    ValueError,
    f"target_ids {SHAPE} uint8[2, 4, 3]",
  ),
  (
    token_batch,
    dict(target_ids=zeros(2, 4)),
    TypeError,
    "target_ids must have integer dtype; received float32",
  ),
  (
    token_batch,
    dict(target_ids=zeros(2, 4, dtype=bool)),
    TypeError,
    "target_ids must have integer dtype; received bool",
  ),
  (
    token_batch,
    dict(target_ids=zeros(2, 5, dtype=np.int32)),
    ValueError,
    "loss_weights must match target_ids shape; received (2, 4) and (2, 5)",
  ),
  (
    token_batch,
    dict(loss_weights=zeros(2, 1)),
    ValueError,
    "loss_weights must match target_ids shape; received (2, 1) and (2, 4)",
  ),
  (
    token_batch,
    dict(loss_weights=zeros(1, 4, dtype=bool)),
    ValueError,
    "loss_weights must match target_ids shape; received (1, 4) and (2, 4)",
  ),
  (
    token_batch,
    dict(loss_weights=zeros(4)),
    ValueError,
    f"loss_weights {SHAPE} float32[4]",
  ),
  (
    token_batch,
    dict(loss_weights=zeros()),
    ValueError,
    f"loss_weights {SHAPE} float32[]",
  ),
  (
    token_batch,
    dict(loss_weights=zeros(2, 4, dtype=np.complex64)),
    TypeError,
    f"loss_weights {REAL} complex64",
  ),
  (
    token_batch,
    dict(is_supervised=zeros(2, 4, dtype=np.int32)),
    TypeError,
    "is_supervised must have boolean dtype; received int32",
  ),
  (
    token_batch,
    dict(is_supervised=zeros(2, 5, dtype=bool)),
    ValueError,
    "is_supervised must match target_ids shape; received (2, 5) and (2, 4)",
  ),
  (
    token_batch,
    dict(segment_ids=zeros(2, 4)),
    TypeError,
    "segment_ids must have integer dtype; received float32",
  ),
  (
    token_batch,
    dict(segment_ids=zeros(2, 5, dtype=np.int32)),
    ValueError,
    "segment_ids must match target_ids shape; received (2, 5) and (2, 4)",
  ),
  (
    token_batch,
    dict(segment_ids=zeros(2, 4, dtype=np.int32), is_supervised=None),
    ValueError,
    "segment_ids must come with is_supervised; received is_supervised=None",
  ),
  (
    token_batch,
    dict(is_supervised=zeros(2, dtype=bool)),
    ValueError,
    f"is_supervised {SHAPE} bool[2]",
  ),
  (
    token_batch,
    dict(model_inputs={"x": zeros()}),
    ValueError,
    "model_inputs['x'] must be batch-major, not scalar; received shape ()",
  ),
  (
    token_batch,
    dict(model_inputs={"x": (zeros(2), zeros(3, 4))}),
    ValueError,
    "model_inputs['x'][1] must share the first axis of target_ids;"
    " received batch size 3; expected 2",
  ),
  (
    token_batch,
    dict(model_inputs=zeros(2, dtype=np.complex64)),
    TypeError,
    f"model_inputs {REAL} complex64",
  ),
  (
    teacher,
    dict(logits=zeros(2, 4)),
    ValueError,
    "teacher logits must have shape [batch, length, vocab];"
    " received float32[2, 4]",
  ),
  (
    teacher,
    dict(logits=zeros(2, 4, 3, dtype=np.int32)),
    TypeError,
    "teacher logits must have floating-point dtype; received int32",
  ),
  (
    teacher,
    dict(logits=zeros(2, 4, 0)),
    ValueError,
    "teacher logits must have a non-empty vocabulary; received (2, 4, 0)",
  ),
  (
    distillation_batch,
    dict(logits=zeros(2, 5, 3)),
    ValueError,
    "teacher logits must match target_ids shape in its first 2 axes;"
    " received (2, 5, 3) and (2, 4)",
  ),
  (
    hidden,
    dict(hidden=zeros(2, 4)),
    ValueError,
    "teacher hidden must have shape [batch, length, features];"
    " received float32[2, 4]",
  ),
  (
    hidden,
    dict(hidden=zeros(2, 4, 5, dtype=np.int32)),
    TypeError,
    "teacher hidden must have floating-point dtype; received int32",
  ),
  (
    hidden,
    dict(hidden=zeros(2, 4, 0)),
    ValueError,
    "teacher hidden must have at least one feature; received (2, 4, 0)",
  ),
  (
    with_hidden,
    dict(hidden=zeros(2, 5, 3)),
    ValueError,
    "teacher hidden must match target_ids shape in its first 2 axes;"
    " received (2, 5, 3) and (2, 4)",
  ),
  (
    cross_entropy,
    dict(logits=zeros(2, 4)),
    ValueError,
    "logits must have shape [batch, length, vocab]; received float32[2, 4]",
  ),
  (
    cross_entropy,
    dict(logits=zeros(2, 4, 3, dtype=np.int32)),
    TypeError,
    "logits must have floating-point dtype; received int32",
  ),
  (
    cross_entropy,
    dict(logits=zeros(2, 4, 0)),
    ValueError,
    "logits must have a non-empty vocabulary; received (2, 4, 0)",
  ),
  (
    cross_entropy,
    dict(logits=zeros(2, 5, 3)),
    ValueError,
    "logits must align with target_ids, shape [batch, length];"
    " received (2, 5, 3) and (2, 4)",
  ),
  (
    top_k,
    dict(token_ids=zeros(2, 4, 2)),
    TypeError,
    "token_ids must have integer dtype; received float32",
  ),
  (
    top_k,
    dict(token_ids=zeros(2, 4, 0, dtype=np.int32)),
    ValueError,
    "token_ids must list at least one id; received (2, 4, 0)",
  ),
  (
    top_k,
    dict(log_probs=zeros(2, 4, 3)),
    ValueError,
    "log_probs must match token_ids shape; received (2, 4, 3) and (2, 4, 2)",
  ),
  (
    top_k,
    dict(is_valid=zeros(2, 4, 2)),
    TypeError,
    "is_valid must have boolean dtype; received float32",
  ),
  (
    sampled,
    dict(log_probs=zeros(2, 4, 1)),
    ValueError,
    "log_probs must have shape [batch, length]; received float32[2, 4, 1]",
  ),
  (
    with_top_k,
    dict(log_probs=zeros(2, 5, 2)),
    ValueError,
    "teacher log_probs must match target_ids shape in its first 2 axes;"
    " received (2, 5, 2) and (2, 4)",
  ),
  (
    forward_kl,
    dict(logits=zeros(2, 4, 3)),
    ValueError,
    "student and teacher logits must have identical shapes;"
    " received (2, 4, 3) and (2, 4, 6)",
  ),
  (
    do.shift_right,
    dict(logits=zeros(2, 4)),
    ValueError,
    "logits must have shape [batch, length, vocab]; received float32[2, 4]",
  ),
]

OTHERS = [
  (
    token_batch,
    dict(target_ids=[[0, 0, 0, 0]] * 2),
    TypeError,
    f"target_ids {ARRAY} list",
  ),
  (
    token_batch,
    dict(target_ids=None),
    TypeError,
    f"target_ids {ARRAY} NoneType",
  ),
  (
    token_batch,
    dict(loss_weights=1.0),
    TypeError,
    f"loss_weights {ARRAY} float",
  ),
  (
    token_batch,
    dict(loss_weights=np.full((2, 4), "1")),
    TypeError,
    f"loss_weights {REAL} <U1",
  ),
  (
    token_batch,
    dict(is_supervised=True),
    TypeError,
    f"is_supervised {ARRAY} bool",
  ),
  (
    token_batch,
    dict(model_inputs={}),
    ValueError,
    "model_inputs must hold at least one array; received dict",
  ),
  (
    token_batch,
    dict(model_inputs=None),
    ValueError,
    "model_inputs must hold at least one array; received NoneType",
  ),
  (
    token_batch,
    dict(model_inputs={"x": zeros(2), "mode": "train"}),
    TypeError,
    f"model_inputs['mode'] {ARRAY} str",
  ),
  (
    token_batch,
    dict(model_inputs=[zeros(2), 3]),
    TypeError,
    f"model_inputs[1] {ARRAY} int",
  ),
  (teacher, dict(logits=[[[0.0]]]), TypeError, f"teacher logits {ARRAY} list"),
  (hidden, dict(hidden=[[[0.0]]]), TypeError, f"teacher hidden {ARRAY} list"),
  (
    distillation_batch,
    dict(student_batch={}),
    TypeError,
    "student_batch must be a DiffusionTokenBatch; received dict",
  ),
  (
    distillation_batch,
    dict(teacher=zeros(2, 4, 3)),
    TypeError,
    "teacher must be a DenseTeacher or HiddenTeacher or TopKTeacher or"
    " SampledTokenTeacher; received float32[2, 4, 3]",
  ),
  (
    cross_entropy,
    dict(logits=[[0.0]]),
    TypeError,
    f"logits {ARRAY} list",
  ),
]


def eager(build, arrays):
  return build(**arrays)


def on_device(build, arrays):
  return build(**jax.tree.map(jnp.asarray, arrays))


def compiled(build, arrays):
  return jax.jit(lambda arrays: build(**arrays))(arrays)


def abstract(build, arrays):
  if build in (cross_entropy, forward_kl, do.shift_right):
    return jax.eval_shape(lambda arrays: build(**arrays), arrays)
  return build(
    **jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
  )


MODES = [eager, on_device, compiled, abstract]


@contextlib.contextmanager
def refused(error, message):
  """Expects an error of just that type and message."""
  with pytest.raises(error) as raised:
    yield
  assert type(raised.value) is error
  assert str(raised.value) == message


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
  ("build", "arrays", "error", "message"),
  OF_ARRAYS,
  ids=[f"{case[0].__name__}-{case[3]}" for case in OF_ARRAYS],
)
def test_a_static_check_says_the_same_in_every_mode(
  build, arrays, error, message, mode
):
  with refused(error, message):
    mode(build, arrays)


@pytest.mark.parametrize("is_traced", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(
  ("build", "values", "error", "message"),
  OTHERS,
  ids=[f"{case[0].__name__}-{case[3]}" for case in OTHERS],
)
def test_what_is_no_array_is_refused(build, values, error, message, is_traced):
  f = functools.partial(build, **values)
  with refused(error, message):
    jax.eval_shape(f) if is_traced else f()


def test_a_prng_key_is_no_model_input():
  keys = jax.random.split(jax.random.key(0), 2)
  with pytest.raises(TypeError, match=r"model_inputs\['key'\] must have real"):
    token_batch(model_inputs={"key": keys})


SYMBOLIC = [
  (dict(target_ids="b, l"), None),
  (dict(target_ids="b, l", model_inputs="b"), None),
  (dict(target_ids="b, 2*l"), "loss_weights must match target_ids shape;"
   " received (b, l) and (b, 2*l)"),
  (dict(loss_weights="b, l + 1"), "loss_weights must match target_ids shape;"
   " received (b, l + 1) and (b, l)"),
  (dict(loss_weights="2, l"), "loss_weights must match target_ids shape;"
   " received (2, l) and (b, l)"),
  (dict(is_supervised="l, b"), "is_supervised must match target_ids shape;"
   " received (l, b) and (b, l)"),
  (dict(target_ids="b"), f"target_ids {SHAPE} int32[b]"),
  (dict(model_inputs="2*b, l"), "model_inputs must share the first axis of"
   " target_ids; received batch size 2*b; expected b"),
  (dict(logits="b, l"), "teacher logits must have shape [batch, length,"
   " vocab]; received float32[b, l]"),
  (dict(logits="b, l, v"), None),
  (dict(logits="b, l - 1, v"), "teacher logits must match target_ids shape in"
   " its first 2 axes; received (b, l - 1, v) and (b, l)"),
]  # fmt: skip


@pytest.mark.parametrize(("shapes", "message"), SYMBOLIC)
def test_symbolic_dimensions_are_compared_as_such(shapes, message):
  scope = jax.export.SymbolicScope(("l >= 2",))
  dtypes = dict(
    model_inputs=np.float32,
    target_ids=np.int32,
    loss_weights=np.float32,
    is_supervised=bool,
    logits=np.float32,
  )

  def struct(name, shape):
    shape = jax.export.symbolic_shape(shape, scope=scope)
    return jax.ShapeDtypeStruct(shape, dtypes[name])

  def build():
    arrays = {
      name: struct(
        name, shapes.get(name, "b, l, v" if name == "logits" else "b, l")
      )
      for name in dtypes
    }
    logits = arrays.pop("logits")
    return do.DiffusionDistillationBatch(
      student_batch=do.DiffusionTokenBatch(**arrays),
      teacher=do.DenseTeacher(logits=logits),
    )

  if message is None:
    build()
    return
  with refused(ValueError, message):
    build()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
  "arrays",
  [
    dict(target_ids=zeros(2, 4, dtype=np.uint8)),
    dict(target_ids=zeros(2, 4, dtype=np.int16)),
    dict(target_ids=zeros(2, 4, dtype=np.uint32)),
    dict(loss_weights=zeros(2, 4, dtype=bool)),
    dict(loss_weights=zeros(2, 4, dtype=np.int8)),
    dict(loss_weights=zeros(2, 4, dtype=np.float16)),
    dict(loss_weights=zeros(2, 4, dtype=ml_dtypes.bfloat16)),
    dict(is_supervised=None),
    dict(model_inputs=[zeros(2), (zeros(2, 5, dtype=bool), None)]),
    dict(model_inputs=zeros(2, 3, dtype=np.int32)),
  ],
  ids=lambda arrays: "-".join(
    str(getattr(x, "dtype", x)) for x in jax.tree.leaves(arrays)
  ),
)
def test_every_real_dtype_and_any_tree_of_inputs_is_accepted(arrays, mode):
  assert isinstance(mode(token_batch, arrays), do.DiffusionTokenBatch)


def test_an_empty_batch_is_accepted():
  batch = do.DiffusionTokenBatch(
    model_inputs=zeros(0, 4),
    target_ids=zeros(0, 4, dtype=np.int32),
    loss_weights=zeros(0, 4),
  )
  batch.check_values(3)
  loss = do.weighted_cross_entropy_loss(zeros(0, 4, 3), batch)
  assert loss.primary_loss.compute() == 0


# Value checks.

IDS = np.array([[0, 7, 3], [2, 5, 1]], np.int32)
WEIGHTS = np.array([[1, 2, 0], [0.5, 1, 3]], np.float32)
VOCABULARY = 8


def at(array, position, value, dtype=None):
  """A copy of an array with one element or row changed."""
  array = np.array(array, dtype)
  array[position] = value
  return array


def values(ids=IDS, weights=WEIGHTS, is_supervised=None, segment_ids=None):
  return do.DiffusionTokenBatch(
    model_inputs=np.zeros(2, np.float32),
    target_ids=ids,
    loss_weights=weights,
    is_supervised=is_supervised,
    segment_ids=segment_ids,
  )


def row_sharded(x):
  mesh = jax.make_mesh(
    (2,),
    ("data",),
    axis_types=(jax.sharding.AxisType.Auto,),
    devices=jax.devices()[:2],
  )
  spec = jax.sharding.PartitionSpec("data")
  return jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))


def mixed(first):
  """Alternately on the host and on a device."""

  def convert(batch):
    leaves, structure = jax.tree.flatten(batch)
    leaves = [
      x if (i + first) % 2 else jnp.asarray(x) for i, x in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, leaves)

  return convert


PLACES = {
  "numpy": lambda batch: batch,
  "device": lambda batch: jax.tree.map(jnp.asarray, batch),
  "sharded": lambda batch: jax.tree.map(row_sharded, batch),
  "mixed": mixed(0),
  "mixed too": mixed(1),
}

everywhere = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)

NONNEGATIVE = "loss_weights must be finite and nonnegative; received"
IN_VOCABULARY = (
  "active target_ids must be nonnegative and smaller than vocabulary size 8;"
  " received"
)
SUPERVISED = "loss_weights must be 0 where is_supervised is False; received"

BAD_VALUES = [
  (dict(weights=at(WEIGHTS, (1, 0), -1)), f"{NONNEGATIVE} -1.0 at [1, 0]"),
  (dict(weights=at(WEIGHTS, (0, 2), NAN)), f"{NONNEGATIVE} nan at [0, 2]"),
  (dict(weights=at(WEIGHTS, (1, 2), INF)), f"{NONNEGATIVE} inf at [1, 2]"),
  (dict(weights=at(WEIGHTS, (0, 0), -INF)), f"{NONNEGATIVE} -inf at [0, 0]"),
  (
    dict(weights=at(WEIGHTS, (0, 1), -2, np.int32)),
    f"{NONNEGATIVE} -2 at [0, 1]",
  ),
  (
    dict(weights=at(WEIGHTS, (0, 1), NAN, np.float16)),
    f"{NONNEGATIVE} nan at [0, 1]",
  ),
  (
    dict(weights=at(WEIGHTS, (0, 1), -1, ml_dtypes.bfloat16)),
    f"{NONNEGATIVE} -1.0 at [0, 1]",
  ),
  (dict(ids=at(IDS, (1, 1), -1)), f"{IN_VOCABULARY} -1 at [1, 1]"),
  (dict(ids=at(IDS, (0, 0), -100)), f"{IN_VOCABULARY} -100 at [0, 0]"),
  (dict(ids=at(IDS, (1, 2), 8)), f"{IN_VOCABULARY} 8 at [1, 2]"),
  (dict(ids=at(IDS, (1, 2), 8, np.uint8)), f"{IN_VOCABULARY} 8 at [1, 2]"),
  (
    dict(ids=at(IDS, (0, 1), 2**31 + 3, np.uint32)),
    f"{IN_VOCABULARY} 2147483651 at [0, 1]",
  ),
  (
    dict(ids=at(IDS, (0, 1), -3, np.int8), weights=WEIGHTS > 0),
    f"{IN_VOCABULARY} -3 at [0, 1]",
  ),
  (
    dict(
      is_supervised=WEIGHTS > 0,
      segment_ids=at((WEIGHTS > 0).astype(np.int64), (1, 1), 0),
    ),
    "segment_ids must be positive where is_supervised is True; received 0 at"
    " [1, 1]",
  ),
  (
    dict(is_supervised=at(WEIGHTS > 0, (1, 1), False)),
    f"{SUPERVISED} 1.0 at [1, 1]",
  ),
  (
    dict(weights=WEIGHTS > 0, is_supervised=at(WEIGHTS > 0, (0, 0), False)),
    f"{SUPERVISED} True at [0, 0]",
  ),
]


@everywhere
@pytest.mark.parametrize(
  ("fields", "message"), BAD_VALUES, ids=[message for _, message in BAD_VALUES]
)
def test_a_bad_value_is_refused_and_named(fields, message, place):
  batch = place(values(**fields))
  with refused(ValueError, message):
    batch.check_values(VOCABULARY)


@everywhere
def test_the_first_bad_value_is_named_and_the_others_counted(place):
  ids = np.where(IDS > 2, 99, IDS)
  message = f"{IN_VOCABULARY} 99 at [0, 1] and 1 more"  # a third is inactive
  with refused(ValueError, message):
    place(values(ids=ids)).check_values(VOCABULARY)


@pytest.mark.parametrize("weights", [WEIGHTS, jnp.asarray(WEIGHTS)])
@pytest.mark.parametrize(
  ("bad", "dtype"),
  [
    (2**32 + 5, np.int64),
    (-(2**32) + 5, np.int64),
    (2**32 + 5, np.uint64),
    (2**63 + 5, np.uint64),
    (2**64 - 1, np.uint64),
  ],
)
def test_a_wide_id_is_refused_and_not_wrapped(bad, dtype, weights):
  ids = at(IDS, (0, 1), bad, dtype)
  message = f"{IN_VOCABULARY} {bad} at [0, 1]"
  with refused(ValueError, message):
    values(ids=ids, weights=weights).check_values(VOCABULARY)
  with pytest.raises(ValueError, match="active target_ids"):
    values(ids=ids, weights=weights).check_values()
  loss = do.weighted_cross_entropy_loss(
    np.zeros((2, 3, 8), np.float32), values(ids=ids, weights=weights)
  )
  assert jnp.isnan(loss.primary_loss.unreduced_sum)


@everywhere
def test_ids_and_weights_of_every_width_are_accepted(place):
  for dtype in (np.int8, np.uint8, np.int16, np.uint32, np.int32):
    place(values(ids=IDS.astype(dtype))).check_values(VOCABULARY)
  for dtype in (bool, np.int8, np.float16, ml_dtypes.bfloat16):
    place(values(weights=WEIGHTS.astype(dtype))).check_values(VOCABULARY)
  ids = at(IDS, (0, 1), 255, np.uint8)
  place(values(ids=ids)).check_values(256)
  with pytest.raises(ValueError, match="size 255; received 255"):
    place(values(ids=ids)).check_values(255)


@everywhere
@pytest.mark.parametrize("sentinel", [-100, -1, 8, 2**31 - 1, -(2**31)])
def test_a_sentinel_at_an_inactive_position_is_accepted(sentinel, place):
  batch = place(values(ids=at(IDS, (0, 2), sentinel)))
  batch.check_values(VOCABULARY)


@everywhere
def test_without_a_vocabulary_the_upper_end_is_open(place):
  place(values(ids=at(IDS, (0, 0), 10**9))).check_values()
  with pytest.raises(ValueError, match=r"received -1 at \[0, 0\]"):
    place(values(ids=at(IDS, (0, 0), -1))).check_values()


@everywhere
def test_targets_that_are_not_used_are_not_checked(place):
  batch = place(values(ids=np.full_like(IDS, -1)))
  batch.check_values(VOCABULARY, check_targets=False)
  with pytest.raises(ValueError, match="active target_ids"):
    batch.check_values(VOCABULARY)
  batch = place(values(weights=-WEIGHTS))
  with pytest.raises(ValueError, match="loss_weights"):
    batch.check_values(VOCABULARY, check_targets=False)


def test_64_bit_arrays_are_checked_where_jax_has_them():
  with jax.enable_x64(True):
    for bad in (-1, 8, 2**32 + 5):
      ids = jnp.asarray(at(IDS, (0, 1), bad, np.int64))
      with pytest.raises(ValueError, match=f"received {bad} at"):
        values(ids=ids).check_values(VOCABULARY)
    weights = jnp.asarray(at(WEIGHTS, (0, 1), NAN, np.float64))
    with pytest.raises(ValueError, match="received nan at"):
      values(weights=weights).check_values(VOCABULARY)
    values(ids=jnp.asarray(IDS, jnp.int64)).check_values(VOCABULARY)


# The teacher's values.

TEACHER = np.arange(48, dtype=np.float32).reshape(2, 3, 8) / 10
USABLE = (
  "active teacher logits must have a finite value in each row, no NaN and no"
  " +inf; received"
)


def scored(logits, **fields):
  return do.DiffusionDistillationBatch(
    student_batch=values(**fields), teacher=do.DenseTeacher(logits=logits)
  )


DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
all_dtypes = pytest.mark.parametrize("dtype", DTYPES)


@everywhere
@all_dtypes
@pytest.mark.parametrize(
  ("position", "value", "received"),
  [
    ((1, 0, 3), NAN, "nan at [1, 0, 3]"),
    ((1, 0, 7), INF, "inf at [1, 0, 7]"),
    ((1, 0), -INF, "no finite value at [1, 0]"),
    ((1, 0), NAN, "nan at [1, 0, 0]"),
  ],
  ids=["one nan", "one +inf", "all -inf", "all nan"],
)
def test_an_unusable_active_teacher_row_is_refused(
  position, value, received, dtype, place
):
  logits = at(TEACHER, position, value, dtype)
  batch = place(scored(logits))
  with pytest.raises(ValueError, match="^" + re.escape(USABLE)) as raised:
    batch.check_values(VOCABULARY)
  assert str(raised.value).endswith(f"received {received}")
  batch.check_values(VOCABULARY, check_teacher=False)
  with pytest.raises(ValueError, match="teacher logits"):
    batch.check_values(check_targets=False)


@everywhere
@all_dtypes
def test_a_teacher_row_with_some_minus_inf_or_inactive_is_accepted(
  dtype, place
):
  logits = at(TEACHER, (1, 0, slice(7)), -INF, dtype)
  place(scored(logits)).check_values(VOCABULARY)
  for value in (NAN, INF, -INF):
    logits = at(TEACHER, (0, 2), value, dtype)
    place(scored(logits)).check_values(VOCABULARY)


@everywhere
def test_teacher_and_student_have_one_vocabulary(place):
  batch = place(scored(TEACHER))
  message = (
    "teacher and student must have one vocabulary; received teacher 8 and"
    " student 9"
  )
  with refused(ValueError, message):
    batch.check_values(9)
  batch.check_values(9, check_teacher=False)


@everywhere
def test_a_distillation_batch_checks_its_student_batch(place):
  for fields in (dict(weights=-WEIGHTS), dict(ids=-1 - IDS)):
    with pytest.raises(ValueError, match=r"loss_weights|target_ids"):
      place(scored(TEACHER, **fields)).check_values(VOCABULARY)
  batch = place(scored(TEACHER, ids=-1 - IDS))
  batch.check_values(VOCABULARY, check_targets=False)


# Values of the other teachers. The third position of the first row is inactive.

LISTED = np.tile(np.array([5, 0, 3], np.int32), (2, 3, 1))
LOG_PROBS = np.log(np.tile(np.float32([0.5, 0.3, 0.1]), (2, 3, 1)))
NO_SLOT = np.ones((2, 3, 3), bool)


def listing(ids=LISTED, log_probs=LOG_PROBS, is_valid=None):
  teacher = do.TopKTeacher(
    token_ids=ids, log_probs=log_probs, temperature=1.0, is_valid=is_valid
  )
  return do.DiffusionDistillationBatch(student_batch=values(), teacher=teacher)


def sampling(log_probs):
  teacher = do.SampledTokenTeacher(log_probs=log_probs, temperature=1.0)
  return do.DiffusionDistillationBatch(student_batch=values(), teacher=teacher)


OF_IDS = (
  "active teacher token_ids must be nonnegative and smaller than vocabulary"
  " size 8; received"
)
NUMBERS = "active teacher log_probs must be neither NaN nor +inf; received"
LISTS = (
  "active teacher rows must list at least one id of finite log_probs; received"
)
MASS = (
  "active teacher probabilities must sum to at most 1.001, and to at least"
  " 0.999 where all 8 ids are listed; received"
)
SAMPLE = (
  "active teacher log_probs must be no NaN and of a probability of at most"
  " 1.001; received"
)
FULL = np.tile(np.arange(8, dtype=np.int32), (2, 3, 1))

BAD_TEACHERS = [
  (listing(ids=at(LISTED, (1, 0, 2), -1)), f"{OF_IDS} -1 at [1, 0, 2]"),
  (listing(ids=at(LISTED, (0, 1, 0), 8)), f"{OF_IDS} 8 at [0, 1, 0]"),
  (listing(ids=at(LISTED, (0, 1, 0), 8, np.uint8)), f"{OF_IDS} 8 at [0, 1, 0]"),
  (
    listing(ids=at(LISTED, (1, 1, 0), 3)),
    "active teacher token_ids must be distinct in each row; received 3 at"
    " [1, 1]",
  ),
  (
    listing(log_probs=at(LOG_PROBS, (1, 2, 1), NAN)),
    f"{NUMBERS} nan at [1, 2, 1]",
  ),
  (
    listing(log_probs=at(LOG_PROBS, (1, 2, 1), INF)),
    f"{NUMBERS} inf at [1, 2, 1]",
  ),
  (
    listing(log_probs=at(LOG_PROBS, (1, 0), -INF)),
    f"{LISTS} 0 at [1, 0]",
  ),
  (
    listing(is_valid=at(NO_SLOT, (1, 0), False)),
    f"{LISTS} 0 at [1, 0]",
  ),
  (
    listing(log_probs=at(LOG_PROBS, (0, 0), np.log(0.335))),
    f"{MASS} 1.005",
  ),
  (listing(log_probs=at(LOG_PROBS, (0, 0, 0), 1e30)), f"{MASS} inf at [0, 0]"),
  (
    listing(ids=FULL, log_probs=np.full((2, 3, 8), np.log(0.1), np.float32)),
    f"{MASS} 0.79",
  ),
  (sampling(at(-WEIGHTS, (1, 1), NAN)), f"{SAMPLE} nan at [1, 1]"),
  (sampling(at(-WEIGHTS, (1, 1), INF)), f"{SAMPLE} inf at [1, 1]"),
  (sampling(at(-WEIGHTS, (0, 0), 0.002)), f"{SAMPLE} 0.002"),
]


@jax.jit
@jax.value_and_grad
def divergence_of(logits, batch):
  is_sampled = isinstance(batch.teacher, do.SampledTokenTeacher)
  loss = do.sampled_reverse_kl_loss if is_sampled else do.forward_kl_loss
  return loss(logits, batch).primary_loss.unreduced_sum


@pytest.mark.parametrize("place", [PLACES["numpy"], PLACES["device"]])
@pytest.mark.parametrize(
  ("batch", "message"), BAD_TEACHERS, ids=[m for _, m in BAD_TEACHERS]
)
def test_a_bad_teacher_is_refused_and_nan_under_trace(batch, message, place):
  batch = place(batch)
  with pytest.raises(ValueError, match="^" + re.escape(message)):
    batch.check_values(VOCABULARY)
  batch.check_values(VOCABULARY, check_teacher=False)
  value, gradient = divergence_of(TEACHER, batch)
  assert np.isnan(value) and np.isnan(gradient).any()


HIDDEN = np.arange(30, dtype=np.float32).reshape(2, 3, 5) / 10


def remembered(states, **fields):
  return do.DiffusionDistillationBatch(
    student_batch=values(**fields), teacher=do.HiddenTeacher(hidden=states)
  )


@everywhere
@all_dtypes
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_teachers_hidden_state_that_is_no_number_is_refused(
  bad, dtype, place
):
  batch = place(remembered(at(HIDDEN, (1, 0, 3), bad, dtype)))
  message = (
    f"active teacher hidden states must be finite; received {bad} at [1, 0, 3]"
  )
  with refused(ValueError, message):
    batch.check_values(VOCABULARY)
  with refused(ValueError, message):
    batch.check_values(check_targets=False)
  batch.check_values(VOCABULARY, check_teacher=False)
  place(remembered(at(HIDDEN, (0, 2), bad, dtype))).check_values(VOCABULARY)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_teachers_hidden_state_that_is_no_number_is_nan_under_trace(bad):
  head = do.OutputHead(kernel=np.ones((5, 8), np.float32))
  student = np.ones((2, 3, 5), np.float32)
  run = jax.jit(functools.partial(do.linear_forward_kl_loss, teacher_head=head))
  for position, is_nan in (((1, 0, 3), True), ((0, 2, 3), False)):
    batch = remembered(at(HIDDEN, position, bad))
    total = run(student, head, batch).primary_loss.unreduced_sum
    assert np.isnan(total) == is_nan


@everywhere
def test_what_a_teacher_may_hold_is_accepted(place):
  for batch in (
    listing(),
    listing(ids=LISTED.astype(np.uint8)),
    listing(ids=LISTED.astype(np.int64)),
    listing(log_probs=LOG_PROBS.astype(ml_dtypes.bfloat16)),
    listing(log_probs=at(LOG_PROBS, (1, 1, 0), -INF)),
    # Rounding of stored probabilities, and what is inactive or lists nothing.
    listing(log_probs=at(LOG_PROBS, (0, 0), np.log(1.0005 / 3))),
    listing(ids=at(LISTED, (0, 2), -9), log_probs=at(LOG_PROBS, (0, 2), NAN)),
    listing(
      ids=at(LISTED, (1, 1, 0), 0),
      log_probs=at(LOG_PROBS, (1, 1, 0), INF),
      is_valid=at(NO_SLOT, (1, 1, 0), False),
    ),
    sampling(-WEIGHTS),
    sampling(at(-WEIGHTS, (1, 1), -INF)),
    sampling(at(-WEIGHTS, (0, 2), NAN)),
  ):
    place(batch).check_values(VOCABULARY)
    place(batch).check_values()


def test_a_slot_that_lists_nothing_is_no_id_of_a_narrow_dtype():
  """Of 256 ids in uint8, none is kept for what is not read."""
  ids = at(LISTED, (1, 1), (255, 254, 253), np.uint8)
  is_valid = at(NO_SLOT, (1, 1, 2), False)
  for place in (PLACES["numpy"], PLACES["device"]):
    place(listing(ids=ids, is_valid=is_valid)).check_values(256)


# What is not read, and what reading costs.


def bad_batch():
  return scored(
    at(TEACHER, (0, 0), NAN),
    ids=-1 - IDS,
    weights=WEIGHTS,
    is_supervised=np.zeros((2, 3), bool),
  )


def test_nothing_is_read_where_traced():
  def f(batch):
    batch.check_values(VOCABULARY)
    return batch.student_batch.loss_weights

  jax.jit(f)(bad_batch())
  jax.vmap(lambda batch: f(batch))(
    jax.tree.map(lambda x: np.stack([x, x]), bad_batch())
  )


def test_what_is_concrete_is_read_beside_what_is_traced():
  def f(weights):
    values(ids=-1 - IDS, weights=weights).check_values(VOCABULARY)
    values(ids=weights.astype(jnp.int32), weights=-WEIGHTS).check_values()

  with pytest.raises(ValueError, match="loss_weights must be finite"):
    jax.eval_shape(f, WEIGHTS)


def test_nothing_is_read_where_abstract():
  batch = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), bad_batch()
  )
  batch.check_values(VOCABULARY)
  jax.eval_shape(lambda: bad_batch().student_batch.loss_weights)


def test_nothing_is_read_where_not_addressable(monkeypatch):
  batch = jax.tree.map(jnp.asarray, bad_batch())
  with pytest.raises(ValueError, match="must"):
    batch.check_values(VOCABULARY)
  elsewhere = property(lambda self: False)
  monkeypatch.setattr(
    type(batch.teacher.logits), "is_fully_addressable", elsewhere
  )
  batch.check_values(VOCABULARY)


def test_a_check_on_devices_reads_one_scalar(monkeypatch):
  batch = PLACES["sharded"](scored(TEACHER, is_supervised=WEIGHTS > 0))
  batch.check_values(VOCABULARY)
  kind = type(batch.teacher.logits)
  value, read = kind._value, []

  def counted(self):
    read.append(self.shape)
    return value.fget(self)

  monkeypatch.setattr(kind, "_value", property(counted))
  batch.check_values(VOCABULARY)
  assert read == [()]
  np.asarray(batch.teacher.logits)  # the count does count
  assert read == [(), TEACHER.shape]


def test_a_check_on_the_host_touches_no_device(monkeypatch):
  monkeypatch.setattr(jax, "jit", None)
  with jax.transfer_guard("disallow_explicit"):
    scored(TEACHER).check_values(VOCABULARY)


# Alignment.


def test_shift_right_moves_logits_by_one_position():
  logits = np.arange(24, dtype=np.float32).reshape(2, 4, 3)
  shifted = do.shift_right(logits)
  np.testing.assert_array_equal(shifted[:, 0], logits[:, 0])
  np.testing.assert_array_equal(shifted[:, 1:], logits[:, :-1])
  assert do.shift_right(jnp.zeros((1, 1, 2), jnp.bfloat16)).dtype == (
    jnp.bfloat16
  )


def test_a_shift_too_many_has_the_closed_form():
  logits = 3 * np.eye(3, dtype=np.float32)[None]
  batch = do.DiffusionTokenBatch(
    model_inputs=logits,
    target_ids=np.array([[0, 1, 2]]),
    loss_weights=np.array([[0, 1, 1]], np.float32),
  )
  loss = jax.jit(do.weighted_cross_entropy_loss)
  aligned = loss(logits, batch)
  shifted = loss(do.shift_right(logits), batch)
  low = math.log(math.exp(3) + 2) - 3
  assert round(low, 4) == 0.0949
  np.testing.assert_allclose(aligned.primary_loss.compute(), low, rtol=1e-5)
  np.testing.assert_allclose(shifted.primary_loss.compute(), 3 + low, rtol=1e-5)


# Denominators.

UNITS = {"weights": 8.5, "tokens": 6.0, "masked": 4.0, "sequences": 2.0}
FRACTIONAL = np.array([[0.5, 0, 0, 0], [1, 3, 4, 0], [0, 0, 0, 0]], np.float32)
ANSWER = np.array([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]], bool)


def unit_batch(is_supervised=ANSWER):
  return do.DiffusionTokenBatch(
    model_inputs=FRACTIONAL,
    target_ids=np.array([[0, 1, 2, 0], [2, 1, 0, 1], [9, 9, 9, 9]]),
    loss_weights=FRACTIONAL,
    is_supervised=is_supervised,
  )


def losses_of(logits, is_supervised, denominator):
  """Every token loss, as functions of logits."""
  batch = unit_batch(is_supervised)
  scores = do.DiffusionDistillationBatch(
    student_batch=batch, teacher=do.DenseTeacher(logits=-logits)
  )
  unit = dict(denominator=denominator)
  return (
    lambda z: do.weighted_cross_entropy_loss(z, batch, **unit),
    lambda z: do.forward_kl_loss(z, scores, **unit),
    lambda z: do.prepared_opd_loss(z, scores, hard_loss_weight=1.0, **unit),
  )


LOGITS = np.random.default_rng(0).standard_normal((3, 4, 3)).astype(np.float32)


@pytest.mark.parametrize("unit", UNITS)
def test_each_unit_counts_what_its_name_says(unit):
  total = oracles.weighted(
    oracles.nll(LOGITS, np.where(FRACTIONAL > 0, unit_batch().target_ids, 0)),
    FRACTIONAL,
  )
  for index, loss in enumerate(losses_of(LOGITS, ANSWER, unit)):
    metric = jax.jit(loss)(LOGITS).primary_loss
    assert metric.denominator == UNITS[unit]
    assert metric.denominator.dtype == jnp.float32
    if index == 0:
      np.testing.assert_allclose(metric.unreduced_sum, total, rtol=1e-5)
      np.testing.assert_allclose(
        metric.compute(), total / UNITS[unit], rtol=1e-5
      )


PACKED = np.array(
  [
    [[1, 1, 2, 2], [3, 3, 9, 9], [1, 2, 3, 4], [5, 5, 5, 5]],
    [[1, 1, 1, 2], [2, 7, 1, 2], [0, 0, 0, 0], [8, 8, 0, 0]],
  ]
).reshape(8, 4)
# Prompts and padding are not counted, whatever their ids.
PACKED_ANSWER = np.array(
  [
    [[1, 1, 1, 1], [1, 0, 0, 0], [1, 0, 1, 1], [1, 0, 0, 1]],
    [[1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0]],
  ],
  bool,
).reshape(8, 4)
SEQUENCES = (2, 1, 3, 1, 2, 3, 0, 1)


def packed(dtype=np.int32):
  return do.DiffusionTokenBatch(
    model_inputs=PACKED,
    target_ids=np.zeros((8, 4), np.int32),
    loss_weights=PACKED_ANSWER.astype(np.float32),
    is_supervised=PACKED_ANSWER,
    segment_ids=PACKED.astype(dtype),
  )


@jax.jit
def sequences(batch):
  logits = jnp.zeros((*batch.target_ids.shape, 3))
  return do.weighted_cross_entropy_loss(
    logits, batch, denominator="sequences"
  ).primary_loss.denominator


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8])
def test_sequences_of_packed_rows_are_counted_by_segment(dtype):
  batch = packed(dtype)
  batch.check_values(1)
  assert sum(SEQUENCES) == 13 and sequences(batch) == 13
  assert sequences(jax.tree.map(row_sharded, batch)) == 13
  for row, count in enumerate(SEQUENCES):
    assert (
      sequences(jax.tree.map(lambda x, b=row: x[b : b + 1], batch)) == count
    )
  assert oracles.denominator(batch, "sequences") == 13


def test_a_supervised_position_of_no_segment_is_nan_under_trace():
  batch = dataclasses.replace(packed(), segment_ids=np.maximum(PACKED - 1, 0))
  for unit in UNITS:
    loss = functools.partial(do.weighted_cross_entropy_loss, denominator=unit)
    metric = jax.jit(loss)(np.zeros((8, 4, 3), np.float32), batch).primary_loss
    assert np.isnan(metric.unreduced_sum) and np.isnan(metric.denominator)


@pytest.mark.parametrize(
  ("is_supervised", "default"), [(ANSWER, "tokens"), (None, "weights")]
)
def test_the_default_unit_is_tokens_where_known_else_weights(
  is_supervised, default
):
  for loss in losses_of(LOGITS, is_supervised, None):
    metric = jax.jit(loss)(LOGITS).primary_loss
    assert metric.denominator == UNITS[default]


@pytest.mark.parametrize("unit", ["tokens", "sequences"])
def test_a_unit_of_supervised_positions_needs_them(unit):
  message = (
    f"denominator '{unit}' must have a batch with is_supervised;"
    " received is_supervised=None"
  )
  for loss in losses_of(LOGITS, None, unit):
    for run in (loss, jax.jit(loss)):
      with refused(ValueError, message):
        run(LOGITS)
  for unit in ("weights", "masked"):
    for loss in losses_of(LOGITS, None, unit):
      jax.eval_shape(loss, LOGITS)


@pytest.mark.parametrize("unit", ["mean", "", 1])
def test_an_unknown_unit_is_refused(unit):
  message = (
    "denominator must be None or one of ('weights', 'tokens', 'masked',"
    f" 'sequences'); received {unit!r}"
  )
  for is_supervised in (ANSWER, None):
    for loss in losses_of(LOGITS, is_supervised, unit):
      with refused(ValueError, message):
        loss(LOGITS)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("bad", [-1.0, NAN, INF, -INF])
def test_a_count_of_refused_weights_is_nan(bad, unit):
  batch = unit_batch()
  batch = jax.tree.map(jnp.asarray, batch)
  weights = at(FRACTIONAL, (1, 1), bad)
  loss = jax.jit(
    lambda z, w: do.weighted_cross_entropy_loss(
      z,
      do.DiffusionTokenBatch(
        model_inputs=w,
        target_ids=batch.target_ids,
        loss_weights=w,
        is_supervised=batch.is_supervised,
      ),
      denominator=unit,
    )
  )
  metric = loss(LOGITS, weights).primary_loss
  assert jnp.isnan(metric.denominator) and jnp.isnan(metric.unreduced_sum)
  assert jnp.isnan(metric.compute())


def test_values_are_judged_in_the_dtype_that_a_loss_reads():
  """Finite in float64, infinite in float32."""
  with refused(
    ValueError,
    "loss_weights must be finite and nonnegative; received inf at [0, 0]",
  ):
    values(weights=at(WEIGHTS, (0, 0), 1e39, np.float64)).check_values()
  teacher = at(TEACHER, (1, 0, 3), 1e300, np.float64)
  with pytest.raises(ValueError, match=r"received inf at \[1, 0, 3\]"):
    scored(teacher).check_values(VOCABULARY)


def test_wide_integer_weights_keep_their_size():
  """JAX would wrap NumPy's 64-bit integers."""
  ids = np.zeros((1, 2), np.int32)
  batch = do.DiffusionTokenBatch(
    model_inputs={"input_tokens": ids},
    target_ids=ids,
    loss_weights=np.array([[2**40, 2**32 + 3]]),
  )
  batch.check_values(5)
  output = do.weighted_cross_entropy_loss(
    np.zeros((1, 2, 5), np.float32), batch
  )
  total = output.primary_loss.denominator
  np.testing.assert_allclose(total, 2**40 + 2**32 + 3, rtol=1e-6)


def test_segments_that_int32_cannot_tell_apart_are_refused():
  ids = np.zeros((1, 2), np.int32)
  batch = do.DiffusionTokenBatch(
    model_inputs={"input_tokens": ids},
    target_ids=ids,
    loss_weights=np.ones((1, 2), np.float32),
    is_supervised=np.ones((1, 2), bool),
    segment_ids=np.array([[2**33 + 1, 2**33 + 2]]),
  )
  with pytest.raises(ValueError, match="segment_ids must be smaller than"):
    batch.check_values(5)
  output = do.weighted_cross_entropy_loss(
    np.zeros((1, 2, 5), np.float32), batch, denominator="sequences"
  )
  assert np.isnan(output.primary_loss.compute())


def test_float64_numpy_logits_are_cast_without_a_warning():
  ids = np.zeros((1, 2), np.int32)
  batch = do.DiffusionTokenBatch(
    model_inputs={"input_tokens": ids},
    target_ids=ids,
    loss_weights=np.ones((1, 2)),
  )
  output = do.weighted_cross_entropy_loss(np.zeros((1, 2, 5)), batch)
  assert output.primary_loss.unreduced_sum.dtype == np.float32
