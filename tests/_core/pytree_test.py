"""Records: checked when a person builds one, never when JAX rebuilds one.

Every probe runs on every record. `stacked` records carry one more leading axis
than a constructor accepts, as they do inside `vmap`, `scan` and a sharded step.
"""

import copy
import dataclasses
import functools
import pickle
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from tunix.sft import sharding_utils

import diffusion_objectives as do
from diffusion_objectives._core import pytree

ROWS = 4


def token_arrays():
  return dict(
    model_inputs={
      "input_tokens": np.arange(8, dtype=np.int32).reshape(ROWS, 2),
      "features": (np.ones((ROWS, 3), np.float32), None),
    },
    target_ids=np.array([[1, 2], [0, 3], [2, 2], [3, -100]], np.int32),
    loss_weights=np.array([[1, 2], [0.5, 1], [3, 1], [1, 0]], np.float32),
  )


def token_batch():
  return do.DiffusionTokenBatch(**token_arrays())


def supervised_batch():
  supervised = np.array([[True, True]] * 3 + [[True, False]])
  return do.DiffusionTokenBatch(**token_arrays(), is_supervised=supervised)


def teacher():
  logits = np.arange(32, dtype=np.float32).reshape(ROWS, 2, 4) / 8
  return do.DenseTeacher(logits=logits)


def metric(total=3.0, denominator=0.5):
  return do.WeightedMetric(
    unreduced_sum=np.array(total, np.float32),
    denominator=np.array(denominator, np.float32),
  )


def loss_output():
  return do.LossOutput(
    primary_loss=metric(),
    aux_metrics={"accuracy": metric(1, 2), "distill/entropy": metric(4, 2)},
  )


def distillation_batch():
  return do.DiffusionDistillationBatch(
    student_batch=supervised_batch(), teacher=teacher()
  )


def top_k_batch():
  teacher = do.TopKTeacher(
    token_ids=np.tile(np.array([1, 3], np.int32), (ROWS, 2, 1)),
    log_probs=np.full((ROWS, 2, 2), -1.5, np.float32),
    is_valid=np.tile(np.array([True, False]), (ROWS, 2, 1)),
    temperature=2.0,
  )
  return do.DiffusionDistillationBatch(
    student_batch=token_batch(), teacher=teacher
  )


def sampled_batch():
  teacher = do.SampledTokenTeacher(
    log_probs=np.full((ROWS, 2), -1.5, np.float32), temperature=2.0
  )
  return do.DiffusionDistillationBatch(
    student_batch=token_batch(), teacher=teacher
  )


def hidden_batch():
  teacher = do.HiddenTeacher(hidden=np.full((ROWS, 2, 3), 0.5, np.float32))
  return do.DiffusionDistillationBatch(
    student_batch=token_batch(), teacher=teacher
  )


def output_head():
  return do.OutputHead(
    kernel=np.arange(20, dtype=np.float32).reshape(ROWS, 5) / 8,
    bias=np.ones(ROWS, np.float32),
    low_rank=(np.ones((5, 2), np.float32), np.full((2, ROWS), 0.5, np.float32)),
    layout="vocabulary_features",
    logit_scale=0.5,
    soft_cap=3.0,
    vocabulary_size=3,
  )


BUILDERS = [
  metric,
  loss_output,
  token_batch,
  supervised_batch,
  teacher,
  distillation_batch,
  top_k_batch,
  sampled_batch,
  hidden_batch,
  output_head,
]


@pytest.fixture(params=BUILDERS, ids=[build.__name__ for build in BUILDERS])
def record(request):
  return request.param()


@pytest.fixture
def stacked(record):
  """Four versions of the record, stacked."""
  return stack(
    [
      jax.tree.map(lambda x: x * np.array(i, x.dtype), record)  # noqa: B023
      for i in range(4)
    ]
  )


def stack(records):
  return jax.tree.map(lambda *rows: jnp.stack(rows), *records)


def rebuilt(value):
  """A record again, each part of it through its constructor."""
  if dataclasses.is_dataclass(value):
    return type(value)(
      **{
        field.name: rebuilt(getattr(value, field.name))
        for field in dataclasses.fields(value)
      }
    )
  if isinstance(value, dict):
    return {key: rebuilt(item) for key, item in value.items()}
  return value


def total(value):
  """One float of all leaves."""
  return sum(
    jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(value)
  )


def doubled(value):
  return jax.tree.map(lambda leaf: leaf + leaf, value)


def abstract(value):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), value)


def on_device(value):
  return jax.tree.map(jnp.asarray, value)


def assert_same(actual, expected):
  assert type(actual) is type(expected)
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  for got, want in zip(
    jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
  ):
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    assert got.dtype == want.dtype


def mesh():
  return jax.make_mesh(
    (4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
  )


P = jax.sharding.PartitionSpec


def by_rows():
  return jax.sharding.NamedSharding(mesh(), P("data"))


# The decorator.


@pytree.record
class Toy:
  """Static fields between the others; counts its checks."""

  name: str = dataclasses.field(metadata={"static": True})
  x: Any
  scale: float = dataclasses.field(default=1.0, metadata={"static": True})
  y: Any = None

  def __post_init__(self):
    CHECKED.append(self.name)


CHECKED = []


def test_static_fields_are_structure_and_the_others_children():
  toy = Toy(name="a", x=jnp.ones(2), scale=3.0, y={"z": 1})
  leaves, structure = jax.tree.flatten(toy)
  assert len(leaves) == 2
  again = jax.tree.unflatten(structure, [None, object()])
  assert (again.name, again.scale, again.x) == ("a", 3.0, None)
  assert structure != jax.tree.structure(dataclasses.replace(toy, scale=4.0))
  assert structure == jax.tree.structure(dataclasses.replace(toy, x=0))


def test_jit_retraces_for_a_static_field_and_for_nothing_else():
  seen = []

  @jax.jit
  def f(toy):
    seen.append(toy.name)
    return toy.x * 2

  for name, x in (("a", 1.0), ("a", 2.0), ("b", 2.0), ("b", 3.0)):
    f(Toy(name=name, x=x))
  assert seen == ["a", "b"]


def test_the_constructor_and_replace_check_and_jax_does_not():
  CHECKED.clear()
  toy = Toy(name="a", x=jnp.ones(2))
  toy = dataclasses.replace(toy, name="b")
  assert CHECKED == ["a", "b"]
  jax.jit(jax.vmap(lambda t: jax.tree.map(lambda x: x + 1, t)))(toy)
  copy.deepcopy(pickle.loads(pickle.dumps(toy)))
  assert CHECKED == ["a", "b"]


def test_a_record_compares_by_identity_and_hashes():
  one, other = Toy(name="a", x=1), Toy(name="a", x=1)
  assert one == one and one != other
  assert len({one, other}) == 2


def test_a_record_is_frozen(record):
  for field in dataclasses.fields(record):
    with pytest.raises(dataclasses.FrozenInstanceError):
      setattr(record, field.name, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
      delattr(record, field.name)


def test_a_record_takes_keywords_alone(record):
  values = [getattr(record, field.name) for field in dataclasses.fields(record)]
  with pytest.raises(TypeError, match="positional"):
    type(record)(*values)
  with pytest.raises(TypeError, match="unexpected keyword"):
    dataclasses.replace(record, another_field=1)


OPTIONAL = {
  do.DiffusionTokenBatch: ["is_supervised", "segment_ids"],
  do.OutputHead: [
    "bias",
    "low_rank",
    "layout",
    "logit_scale",
    "soft_cap",
    "vocabulary_size",
  ],
}


def test_a_record_needs_every_field_but_the_optional_ones(record):
  with pytest.raises(TypeError, match=r"missing .* required keyword-only"):
    type(record)()
  optional = [
    field.name
    for field in dataclasses.fields(record)
    if field.default is not dataclasses.MISSING
  ]
  assert optional == OPTIONAL.get(type(record), [])


KEY_PATHS = {
  metric: [".unreduced_sum", ".denominator"],
  loss_output: [
    ".primary_loss.unreduced_sum",
    ".primary_loss.denominator",
    ".aux_metrics['accuracy'].unreduced_sum",
    ".aux_metrics['accuracy'].denominator",
    ".aux_metrics['distill/entropy'].unreduced_sum",
    ".aux_metrics['distill/entropy'].denominator",
  ],
  token_batch: [
    ".model_inputs['features'][0]",
    ".model_inputs['input_tokens']",
    ".target_ids",
    ".loss_weights",
  ],
  teacher: [".logits"],
  distillation_batch: [
    ".student_batch.model_inputs['features'][0]",
    ".student_batch.model_inputs['input_tokens']",
    ".student_batch.target_ids",
    ".student_batch.loss_weights",
    ".student_batch.is_supervised",
    ".teacher.logits",
  ],
  output_head: [".kernel", ".bias", ".low_rank[0]", ".low_rank[1]"],
}


@pytest.mark.parametrize(
  "build", KEY_PATHS, ids=[build.__name__ for build in KEY_PATHS]
)
def test_key_paths_are_attribute_names(build):
  paths = jax.tree_util.tree_leaves_with_path(build())
  assert [jax.tree_util.keystr(path) for path, _ in paths] == KEY_PATHS[build]


# Construction and replacement.


REFUSED = {
  do.WeightedMetric: {"unreduced_sum": 1.0},
  do.LossOutput: {"primary_loss": None},
  do.DiffusionTokenBatch: {"loss_weights": None},
  do.DenseTeacher: {"logits": None},
  do.DiffusionDistillationBatch: {"teacher": None},
  do.OutputHead: {"kernel": None},
}


def test_replace_checks_again(record):
  with pytest.raises(TypeError, match=r"must be a.*; received"):
    dataclasses.replace(record, **REFUSED[type(record)])
  same = dataclasses.replace(record)
  assert same is not record
  assert_same(same, record)


@pytest.mark.parametrize("convert", [lambda x: x, jnp.asarray])
def test_a_record_keeps_the_objects_it_is_given(record, convert):
  arrays = jax.tree.map(convert, record)
  again = rebuilt(arrays)
  for got, want in zip(
    jax.tree.leaves(again), jax.tree.leaves(arrays), strict=True
  ):
    assert got is want


def test_a_record_of_abstract_arrays_is_accepted(record):
  again = rebuilt(abstract(record))
  assert jax.tree.structure(again) == jax.tree.structure(record)


def test_symbolic_shapes_are_accepted_or_refused_rightly(record):
  if isinstance(record, do.OutputHead):  # what has the vocabulary's axis first
    record = dataclasses.replace(record, low_rank=None, vocabulary_size=None)
  rows, more = jax.export.symbolic_shape("rows, more")
  is_batch = jax.tree.leaves(record)[0].ndim > 0

  def symbolic(*firsts):
    leaves, structure = jax.tree.flatten(record)
    sizes = [firsts[0]] * (len(leaves) - 1) + [firsts[-1]]
    shapes = [
      (size, *leaf.shape[1:]) if is_batch else (size,)
      for size, leaf in zip(sizes, leaves, strict=True)
    ]
    structs = [
      jax.ShapeDtypeStruct(shape, leaf.dtype)
      for shape, leaf in zip(shapes, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, structs)

  if not is_batch:
    with pytest.raises(ValueError, match=r"scalar shape \(\); .*\[rows\]"):
      rebuilt(symbolic(rows))
    return
  rebuilt(symbolic(rows))
  if len(jax.tree.leaves(record)) > 1:
    with pytest.raises(ValueError, match="more"):
      rebuilt(symbolic(rows, more))


# JAX's transformations. Those with a rebuilt record run the constructor, too.


def test_jit(record):
  assert_same(jax.jit(lambda r: doubled(rebuilt(r)))(record), doubled(record))


def test_eval_shape(record):
  result = jax.eval_shape(lambda r: doubled(rebuilt(r)), record)
  assert jax.tree.structure(result) == jax.tree.structure(record)
  for got, want in zip(
    jax.tree.leaves(result), jax.tree.leaves(record), strict=True
  ):
    assert isinstance(got, jax.ShapeDtypeStruct)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)


def assert_ones_and_float0(gradient, primal):
  assert type(gradient) is type(primal)
  for got, want in zip(
    jax.tree.leaves(gradient), jax.tree.leaves(primal), strict=True
  ):
    assert got.shape == want.shape
    if jnp.issubdtype(want.dtype, jnp.floating):
      np.testing.assert_array_equal(got, np.ones_like(want))
    else:
      assert got.dtype == jax.dtypes.float0


def test_grad_with_float0_cotangents(record):
  gradient = jax.grad(lambda r: total(rebuilt(r)), allow_int=True)(record)
  assert_ones_and_float0(gradient, record)


def test_vmap_with_a_record_of_axes_and_none(record, stacked):
  leaves, structure = jax.tree.flatten(stacked)
  axes = [None if i == 1 else 0 for i in range(len(leaves))]
  leaves = [
    x if axis == 0 else x[1] for x, axis in zip(leaves, axes, strict=True)
  ]
  in_axes = jax.tree.unflatten(structure, axes)
  arrays = jax.tree.unflatten(structure, leaves)
  result = jax.vmap(
    lambda r: doubled(rebuilt(r)), in_axes=(in_axes,), out_axes=0
  )(arrays)
  for got, leaf, axis in zip(
    jax.tree.leaves(result), leaves, axes, strict=True
  ):
    want = leaf if axis == 0 else np.stack([leaf] * 4)
    np.testing.assert_array_equal(got, want + want)


def test_scan_over_micro_batches(stacked):
  def step(carry, micro_batch):
    return doubled(carry), doubled(rebuilt(micro_batch))

  first = jax.tree.map(lambda x: x[0], stacked)
  carry, result = jax.lax.scan(step, on_device(first), stacked)
  assert_same(result, doubled(stacked))
  assert type(carry) is type(stacked)


@pytest.mark.parametrize("jacobian", [jax.jacrev, jax.jacfwd])
def test_jacobians_in_and_of_a_record(record, jacobian):
  record = jax.tree.map(lambda x: x.astype(np.float32), record)
  inward = jax.jit(jacobian(total))(record)
  assert_same(inward, jax.tree.map(np.ones_like, record))
  outward = jacobian(lambda x: jax.tree.map(lambda leaf: x * leaf, record))(
    jnp.float32(1)
  )
  assert_same(outward, record)
  square = jax.jit(jacobian(doubled))(
    record
  )  # a record whose leaves are records
  shapes = [leaf.shape for leaf in jax.tree.leaves(record)]
  assert [leaf.shape for leaf in jax.tree.leaves(square)] == [
    row + column for row in shapes for column in shapes
  ]


def test_custom_vjp(record):
  @jax.custom_vjp
  def f(r):
    return total(r)

  def backward(saved, cotangent):
    return (
      jax.tree.map(
        lambda x: (
          jnp.full_like(x, cotangent)
          if jnp.issubdtype(x.dtype, jnp.floating)
          else np.zeros(x.shape, jax.dtypes.float0)
        ),
        rebuilt(saved),
      ),
    )

  f.defvjp(lambda r: (total(r), r), backward)
  gradient = jax.grad(f, allow_int=True)(record)
  assert_ones_and_float0(gradient, record)


def test_cond(record):
  branches = (lambda r: doubled(rebuilt(r)), lambda r: r)
  f = jax.jit(lambda is_doubled, r: jax.lax.cond(is_doubled, *branches, r))
  assert_same(f(True, record), doubled(record))
  assert_same(f(False, record), record)


def test_while_loop(record):
  _, result = jax.lax.while_loop(
    lambda state: state[0] < 2,
    lambda state: (state[0] + 1, doubled(rebuilt(state[1]))),
    (0, on_device(record)),
  )
  assert_same(result, doubled(doubled(record)))


def test_remat(record):
  f = jax.checkpoint(lambda r: total(rebuilt(r)))
  gradient = jax.grad(f, allow_int=True)(record)
  assert_ones_and_float0(gradient, record)


def test_shard_map(stacked):
  specs = jax.tree.map(lambda _: P("data"), stacked)

  @jax.jit
  @functools.partial(
    jax.shard_map, mesh=mesh(), in_specs=(specs,), out_specs=(specs, P())
  )
  def f(r):
    one = jax.tree.map(lambda x: x[0], r)
    return doubled(r), jax.lax.psum(total(rebuilt(one)), "data")

  result, summed = f(stacked)
  assert_same(result, doubled(stacked))
  np.testing.assert_allclose(summed, total(stacked), rtol=1e-6)


def test_export_with_a_symbolic_batch(stacked):
  (rows,) = jax.export.symbolic_shape("rows")
  arguments = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), stacked
  )

  def f(r):
    one = jax.tree.map(lambda x: x[0], r)
    return doubled(r), total(rebuilt(one))

  exported = jax.export.export(jax.jit(f))(arguments)
  for part in (stacked, jax.tree.map(lambda x: x[1:], stacked)):
    result, summed = exported.call(part)
    assert_same(result, doubled(part))
    np.testing.assert_allclose(summed, f(part)[1], rtol=1e-6)


# Trees of anything.


SENTINELS = {
  "none": lambda leaf: None,
  "bool": lambda leaf: True,
  "shape": lambda leaf: leaf.shape,
  "spec": lambda leaf: P("data"),
  "string": lambda leaf: "leaf",
  "object": lambda leaf: object(),
}


@pytest.mark.parametrize("sentinel", SENTINELS.values(), ids=SENTINELS)
def test_tree_map_to_anything(record, sentinel):
  result = jax.tree.map(sentinel, record)
  assert type(result) is type(record)
  for path, leaf in jax.tree_util.tree_leaves_with_path(record):
    got = functools.reduce(
      lambda node, key: (
        getattr(node, key.name)
        if isinstance(key, jax.tree_util.GetAttrKey)
        else node[getattr(key, "key", getattr(key, "idx", None))]
      ),
      path,
      result,
    )
    if sentinel is SENTINELS["object"]:
      assert type(got) is object
    else:
      assert got == sentinel(leaf)


def test_unflatten_takes_any_leaves(record):
  structure = jax.tree.structure(record)
  leaves = [object() for _ in range(structure.num_leaves)]
  assert jax.tree.leaves(jax.tree.unflatten(structure, leaves)) == leaves


def test_tree_transpose_both_ways(record):
  outer = jax.tree.structure(record)
  inner = jax.tree.structure([0, 0])
  pairs = jax.tree.map(lambda x: [x, x + x], record)
  one, two = jax.tree.transpose(outer, inner, pairs)
  assert_same(one, record)
  assert_same(two, doubled(record))
  back = jax.tree.transpose(inner, outer, [one, two])
  assert jax.tree.structure(back) == jax.tree.structure(pairs)


def test_stack_and_row_slice_by_tree_map(record):
  several = stack([record, doubled(record), record])
  row = jax.tree.map(lambda x: x[1], several)
  assert_same(rebuilt(row), doubled(record))


# Placement.


def test_device_put_with_a_tree_of_shardings(stacked):
  shardings = jax.tree.map(lambda _: by_rows(), stacked)
  placed = jax.device_put(stacked, shardings)
  assert_same(placed, stacked)
  assert all(x.sharding == by_rows() for x in jax.tree.leaves(placed))


def test_in_shardings_and_out_shardings(stacked):
  shardings = jax.tree.map(lambda _: by_rows(), stacked)
  f = jax.jit(doubled, in_shardings=(shardings,), out_shardings=shardings)
  result = f(stacked)
  assert_same(result, doubled(stacked))
  assert all(x.sharding == by_rows() for x in jax.tree.leaves(result))


def test_donation(record):
  donated = jax.tree.map(lambda x: jnp.array(x, copy=True), record)
  result = jax.jit(doubled, donate_argnums=0)(donated)
  assert_same(result, doubled(record))
  assert all(x.is_deleted() for x in jax.tree.leaves(donated))


@pytest.mark.filterwarnings("ignore:.*thread_resources:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*with mesh:DeprecationWarning")
def test_shard_input_of_tunix_without_and_with_a_mesh(stacked):
  assert sharding_utils.shard_input(stacked, ("data",)) is stacked
  with mesh():
    placed = sharding_utils.shard_input(stacked, ("data",))
    assert_same(placed, stacked)
    assert all(x.sharding.spec == P("data") for x in jax.tree.leaves(placed))
    again = sharding_utils.shard_input(placed, ("data",))
    assert again is placed


# Storage and copies.


def test_orbax_saves_and_restores(record, tmp_path):
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "record", on_device(record))
    checkpointer.wait_until_finished()
    target = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(
        x.shape,
        x.dtype,
        sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]),
      ),
      record,
    )
    restored = checkpointer.restore(tmp_path / "record", target)
  assert_same(restored, record)


@pytest.mark.parametrize("convert", [lambda x: x, jnp.asarray])
@pytest.mark.parametrize(
  "copied", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy, copy.copy]
)
def test_pickle_and_copy(record, convert, copied):
  arrays = jax.tree.map(convert, record)
  assert_same(copied(arrays), arrays)


def test_asdict(record):
  def as_dict(value):
    if isinstance(value, dict):
      return {key: as_dict(item) for key, item in value.items()}
    if not dataclasses.is_dataclass(value):
      return value
    names = [field.name for field in dataclasses.fields(value)]
    return {name: as_dict(getattr(value, name)) for name in names}

  result = dataclasses.asdict(record)
  # A static number is a leaf here.
  assert_same(*jax.tree.map(np.asarray, (result, as_dict(record))))


# Flax.


class Model(nnx.Module):
  """One parameter, so that a record's total is scaled by it."""

  def __init__(self):
    self.scale = nnx.Param(jnp.float32(2))

  def __call__(self, value):
    return self.scale[...] * total(value)


def test_nnx_jit(record):
  f = nnx.jit(lambda model, r: (model(rebuilt(r)), doubled(r)))
  value, result = f(Model(), record)
  np.testing.assert_allclose(value, 2 * total(record), rtol=1e-6)
  assert_same(result, doubled(record))


def test_nnx_value_and_grad(record):
  f = nnx.value_and_grad(lambda model, r: model(rebuilt(r)))
  value, gradient = f(Model(), record)
  np.testing.assert_allclose(value, 2 * total(record), rtol=1e-6)
  np.testing.assert_allclose(gradient["scale"][...], total(record), rtol=1e-6)


def test_nnx_vmap(stacked):
  f = nnx.vmap(
    lambda model, r: (model(rebuilt(r)), doubled(r)), in_axes=(None, 0)
  )
  values, result = f(Model(), stacked)
  assert values.shape == (4,)
  assert_same(result, doubled(stacked))


def test_nnx_cached_partial(record):
  f = nnx.cached_partial(
    nnx.jit(lambda model, r: (model(rebuilt(r)), doubled(r))), Model()
  )
  for _ in range(2):
    value, result = f(record)
    np.testing.assert_allclose(value, 2 * total(record), rtol=1e-6)
    assert_same(result, doubled(record))
