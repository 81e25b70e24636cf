"""The losses from hidden states on 8 devices: on meshes, in manual regions."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import diffusion_objectives as do
from diffusion_objectives.objectives.linear_vocabulary import placement
from diffusion_objectives.testing import strategies
from tests import linear_cases
from tests import sharding_test

# Batch, length, features, columns: all divide over 8 devices, and the blocks
# divide no device's tokens or columns.
BATCH, LENGTH, FEATURES, COLUMNS = 8, 8, 16, 72
BLOCKS = dict(token_block=3, vocabulary_block=5)

MESHES = {
  "data": {"data": 8},
  "fsdp": {"fsdp": 8},
  "tensor": {"tensor": 8},
  "fsdp x tensor": {"fsdp": 4, "tp": 2},
  "data x sequence": {"data": 2, "sequence": 4},
  "data x fsdp x tensor": {"data": 2, "fsdp": 2, "tp": 2},
}

OBJECTIVES = {
  name: linear_cases.OBJECTIVES[name]
  for name in ("cross entropy", "opd dense", "opd hidden", "opd top-k")
}
ALL = linear_cases.FORMS["all"]
PLAIN = linear_cases.FORMS["plain"]

both = pytest.mark.parametrize(
  "implementation", ["grad_in_forward", "recompute"]
)


def mesh_of(sizes, kind=jax.sharding.AxisType.Auto):
  return jax.make_mesh(
    tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes)
  )


def draw(objective, form=ALL, **options):
  shape = (BATCH, LENGTH, FEATURES, COLUMNS - form.padding)
  return linear_cases.draw(
    objective, form, shape=shape, is_split=True, **options
  )


def agrees_on(sizes, objective, case, **how):
  loss = objective.bind(**{**BLOCKS, **how})
  with jax.set_mesh(mesh_of(sizes)):
    linear_cases.agrees(loss, objective, case)


# On a mesh in context.


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_gives_the_oracles_values_and_gradients(mesh, name):
  objective = OBJECTIVES[name]
  agrees_on(MESHES[mesh], objective, draw(objective))


@pytest.mark.parametrize("form", linear_cases.FORMS)
def test_every_form_of_a_head_may_be_split(form):
  objective = OBJECTIVES["cross entropy"]
  case = draw(objective, linear_cases.FORMS[form])
  agrees_on(MESHES["fsdp x tensor"], objective, case)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_recomputing_form_on_a_mesh(name):
  objective = OBJECTIVES[name]
  agrees_on(
    MESHES["data x fsdp x tensor"],
    objective,
    draw(objective),
    implementation="recompute",
  )


@pytest.mark.parametrize("name", ["kl dense", "kl hidden", "kl top-k"])
def test_metrics_of_a_mesh_are_those_of_one_device(name):
  objective = linear_cases.OBJECTIVES[name]
  case = linear_cases.on_device(draw(objective))
  loss = objective.bind(**BLOCKS)
  (_, expected), _ = linear_cases.compiled(loss)(*case)
  with jax.set_mesh(mesh_of(MESHES["fsdp x tensor"])):
    (_, found), _ = linear_cases.compiled(loss)(*case)
  jax.tree.map(
    lambda a, e: np.testing.assert_allclose(a, e, rtol=2e-6), found, expected
  )


@pytest.mark.parametrize(
  ("sizes", "how"),
  [
    ({"x": 8}, {"token_axes": "x"}),
    ({"x": 4, "y": 2}, {"token_axes": ("x", "y"), "feature_axis": "y"}),
    ({"x": 4, "y": 2}, {"token_axes": P("y", "x")}),
    ({"x": 4, "y": 2}, {"token_axes": P(None, "x"), "vocabulary_axis": "y"}),
    ({"fsdp": 8}, {"vocabulary_axis": "fsdp"}),
    ({"x": 8, "one": 1}, {"token_axes": ("x", "one")}),
  ],
)
def test_axes_of_any_name(sizes, how):
  objective = OBJECTIVES["cross entropy"]
  agrees_on(sizes, objective, draw(objective), **how)


def test_features_that_do_not_divide_are_whole():
  objective = OBJECTIVES["cross entropy"]
  shape = (BATCH, LENGTH, 9, 24)
  case = linear_cases.draw(objective, PLAIN, shape=shape)
  agrees_on({"fsdp": 4, "tp": 2}, objective, case)


def test_the_mesh_of_a_with_statement():
  """That of Tunix: `with mesh:`."""
  objective = OBJECTIVES["opd hidden"]
  loss = objective.bind(**BLOCKS)
  with mesh_of({"fsdp": 2, "tp": 4}), warnings.catch_warnings():
    warnings.simplefilter("error")
    linear_cases.agrees(loss, objective, draw(objective))


def test_a_mesh_of_explicit_axes():
  """Arrays lie as the axes say; else JAX refuses."""
  objective = OBJECTIVES["opd dense"]
  case = linear_cases.on_device(draw(objective, PLAIN))
  loss = objective.bind(**BLOCKS)
  (_, expected), gradients = linear_cases.compiled(loss)(*case)
  mesh = mesh_of(MESHES["fsdp x tensor"], kind=jax.sharding.AxisType.Explicit)

  def put(x):
    is_wide = x.ndim == 3 and x.shape[-1] == COLUMNS
    spec = P("fsdp", None, "tp") if is_wide else P("fsdp")
    if x.ndim == 2 and x.shape[-1] == COLUMNS:
      spec = P("fsdp", "tp")
    return jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))

  with jax.set_mesh(mesh):
    (_, found), of_mesh = linear_cases.compiled(loss)(*jax.tree.map(put, case))
  assert of_mesh[1].kernel.sharding.spec == P("fsdp", "tp")
  jax.tree.map(
    lambda a, e: np.testing.assert_allclose(a, e, 1e-5, 1e-6),
    (found, of_mesh),
    (expected, gradients),
  )


@pytest.mark.parametrize("mesh", ["tensor", "fsdp x tensor"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -1e38])
def test_padding_may_hold_anything_on_a_mesh(poison, mesh):
  objective = OBJECTIVES["opd hidden"]
  case = draw(objective)
  head, teacher_head = (
    jax.tree.map(
      lambda x, columns=head.columns, size=head.size: (
        np.where(
          np.indices(x.shape)[x.shape.index(columns)] >= size, poison, x
        ).astype(x.dtype)
        if columns in x.shape
        else x
      ),
      head,
    )
    for head in (case.head, case.teacher_head)
  )
  assert not np.array_equal(head.kernel, case.head.kernel, equal_nan=True)
  loss = objective.bind(**BLOCKS)
  spoilt = dataclasses.replace(case, head=head, teacher_head=teacher_head)
  with jax.set_mesh(mesh_of(MESHES[mesh])):
    run = linear_cases.compiled(loss)
    clean = run(*linear_cases.on_device(case))
    found = run(*linear_cases.on_device(spoilt))
  jax.tree.map(np.testing.assert_array_equal, found, clean)


@pytest.mark.parametrize("mesh", ["data", "fsdp x tensor"])
@pytest.mark.parametrize("rows", [[], [3], [0, 1, 5]])
def test_devices_may_have_unequal_work(mesh, rows):
  """Tokens count in a few rows alone: some devices run no block of them."""
  objective = OBJECTIVES["cross entropy"]
  case = draw(objective, PLAIN)
  weights = np.zeros((BATCH, LENGTH), np.float32)
  weights[rows] = np.arange(1, LENGTH + 1) / 4
  batch = strategies.replace_tokens(case.batch, loss_weights=weights)
  agrees_on(MESHES[mesh], objective, dataclasses.replace(case, batch=batch))


def test_a_low_rank_pair_of_rank_0_on_a_mesh():
  case = draw(OBJECTIVES["cross entropy"], PLAIN)
  hidden, head, _, batch, _ = linear_cases.on_device(case)
  pair = jnp.zeros((FEATURES, 0)), jnp.zeros((0, COLUMNS))

  def total(hidden, head):
    output = do.linear_weighted_cross_entropy_loss(hidden, head, batch)
    return output.primary_loss.compute()

  expected = jax.jit(jax.grad(total))(hidden, head)
  with jax.set_mesh(mesh_of(MESHES["fsdp x tensor"])):
    found = jax.jit(jax.grad(total))(
      hidden, dataclasses.replace(head, low_rank=pair)
    )
  np.testing.assert_allclose(found, expected, 1e-5, 1e-6)


def test_log_probabilities_on_a_mesh():
  case = draw(OBJECTIVES["cross entropy"])
  hidden, head, weights, batch, _ = linear_cases.on_device(case)
  cotangents = jnp.asarray(
    np.random.default_rng(1).standard_normal(weights.shape, np.float32)
  )

  def total(hidden, head):
    log_probs = do.linear_token_log_probs(hidden, head, batch, **BLOCKS)
    return jnp.sum(cotangents * log_probs)

  gradient = jax.value_and_grad(total, argnums=(0, 1))
  expected = jax.jit(gradient)(hidden, head)
  with jax.set_mesh(mesh_of(MESHES["fsdp x tensor"])):
    found = jax.jit(gradient)(hidden, head)
  jax.tree.map(
    lambda a, e: np.testing.assert_allclose(a, e, 1e-5, 1e-5), found, expected
  )


def test_an_empty_batch_on_a_mesh():
  batch = do.DiffusionTokenBatch(
    model_inputs={"x": np.zeros((0, 4), np.int32)},
    target_ids=np.zeros((0, 4), np.int32),
    loss_weights=np.zeros((0, 4), np.float32),
  )
  with jax.set_mesh(mesh_of(MESHES["fsdp x tensor"])):
    output = jax.jit(do.linear_weighted_cross_entropy_loss)(
      jnp.zeros((0, 4, 8)), do.OutputHead(kernel=jnp.ones((8, 6))), batch
    )
  assert float(output.primary_loss.unreduced_sum) == 0


@both
@pytest.mark.parametrize("transformation", ["vmap", "scan", "checkpoint"])
def test_transformations_on_a_mesh(transformation, implementation):
  objective = OBJECTIVES["opd hidden"]
  loss = objective.bind(**BLOCKS, implementation=implementation)
  cases = [
    linear_cases.on_device(draw(objective, PLAIN, seed=seed))
    for seed in range(2)
  ]
  stacked = jax.tree.map(lambda *x: jnp.stack(x), *cases)
  (hidden, _, weights, batch, _) = stacked
  _, head, _, _, teacher_head = cases[0]

  def one(head, hidden, weights, batch):
    return linear_cases.total(loss, hidden, head, weights, batch, teacher_head)[
      0
    ]

  def total(head):
    parts = hidden, weights, batch
    if transformation == "vmap":
      return jnp.sum(jax.vmap(functools.partial(one, head))(*parts))
    if transformation == "scan":
      step = lambda sum_, part: (sum_ + one(head, *part), None)  # noqa: E731
      return jax.lax.scan(step, jnp.float32(0), parts)[0]
    each = jax.checkpoint(one)
    return sum(
      each(head, *(jax.tree.map(lambda x, i=i: x[i], part) for part in parts))
      for i in range(2)
    )

  expected = jax.jit(jax.value_and_grad(total))(head)
  with jax.set_mesh(mesh_of(MESHES["fsdp x tensor"])):
    found = jax.jit(jax.value_and_grad(total))(head)
  jax.tree.map(
    lambda a, e: np.testing.assert_allclose(a, e, 1e-5, 1e-5), found, expected
  )


def test_forward_over_reverse_on_a_mesh():
  objective = OBJECTIVES["cross entropy"]
  hidden, head, *rest = linear_cases.on_device(draw(objective, PLAIN))
  loss = objective.bind(**BLOCKS)

  def gradient(kernel):
    return jax.grad(
      lambda kernel: linear_cases.total(
        loss, hidden, dataclasses.replace(head, kernel=kernel), *rest
      )[0]
    )(kernel)

  def product(kernel):
    return jax.jvp(gradient, (kernel,), (jnp.cos(kernel),))[1]

  expected = jax.jit(product)(head.kernel)
  with jax.set_mesh(mesh_of(MESHES["fsdp x tensor"])):
    found = jax.jit(product)(head.kernel)
  np.testing.assert_allclose(found, expected, 1e-5, 1e-5)


# What is sent.


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("mesh", MESHES)
def test_nothing_larger_than_head_or_hidden_states_is_sent(mesh, name):
  """And the head's gradient lies as the head does."""
  sizes = MESHES[mesh]
  objective = OBJECTIVES[name]
  tokens, columns = 512, 4096
  case = linear_cases.draw(
    objective, PLAIN, shape=(64, 8, FEATURES, columns), is_split=True
  )
  case = linear_cases.on_device(case)
  on = mesh_of(sizes)
  with jax.set_mesh(on):
    place = placement.of((None,) * 3, case[0], case[1], case[4])

    def put(x):
      spec = place.rows() if x.ndim >= 2 else P()
      if x.shape[-1] == columns:
        spec = place.rows(place.vocabulary)
        if x.ndim == 2:
          spec = P(place.features, place.vocabulary)
      if x.shape[0] == columns:
        spec = P(place.vocabulary, *([place.features] if x.ndim == 2 else []))
      return jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=jax.sharding.NamedSharding(on, spec)
      )

    compiled = (
      linear_cases.compiled(objective.bind(token_block=16, vocabulary_block=64))
      .lower(*jax.tree.map(put, case))
      .compile()
    )
  largest, kind = max(sharding_test.collectives(compiled))
  tokens //= on.size // place.shards
  # A head (gathered, or its gradient), hidden states, or five numbers a token.
  bound = max(FEATURES * columns // place.shards, FEATURES * tokens, 5 * tokens)
  assert largest <= bound, kind
  assert tokens * columns // place.shards > 2 * bound
  _, (hidden, head, _) = compiled.output_shardings
  expected = jax.sharding.NamedSharding(on, place.of_head(case[1]).kernel)
  assert head.kernel.is_equivalent_to(expected, 2)
  rows = jax.sharding.NamedSharding(on, place.rows())
  assert hidden.is_equivalent_to(rows, 3)


# In a caller's manual region.


def head_specs(head):
  columns = P("tp", None) if head.layout == linear_cases.TIED else P(None, "tp")
  return jax.tree.unflatten(
    jax.tree.structure(head),
    [
      columns,
      *([] if head.bias is None else [P("tp")]),
      *([] if head.low_rank is None else [P(), P(None, "tp")]),
    ],
  )


def regions(case):
  """How a case lies in a region of tokens over `data`, columns over `tp`."""
  _, head, _, batch, teacher_head = case

  def of_batch(x):
    return P("data", None, "tp") if x.shape[2:] == (COLUMNS,) else P("data")

  return (
    P("data"),
    head_specs(head),
    P("data"),
    jax.tree.map(of_batch, batch),
    None if teacher_head is None else head_specs(teacher_head),
  )


@pytest.mark.parametrize("is_inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_manual_region_may_split_the_vocabulary(name, is_inside):
  objective = OBJECTIVES[name]
  form = dataclasses.replace(ALL, padding=0)
  case = linear_cases.on_device(draw(objective, form))
  here = objective.bind(**BLOCKS)
  there = functools.partial(here, vocabulary_axis="tp", token_axes="data")
  specs = regions(case)

  def total(loss, *arguments):
    return linear_cases.total(loss, *arguments)[0]

  def local(*arguments):
    if is_inside:
      value, gradients = jax.value_and_grad(
        functools.partial(total, there), argnums=(0, 1, 2)
      )(*arguments)
      return jax.lax.psum(value, "data"), gradients
    return jax.lax.psum(total(there, *arguments), "data")

  mapped = jax.shard_map(
    local,
    mesh=mesh_of({"data": 2, "tp": 4}),
    in_specs=specs,
    out_specs=(P(), specs[:3]) if is_inside else P(),
  )
  if not is_inside:
    mapped = jax.value_and_grad(mapped, argnums=(0, 1, 2))
  expected = jax.value_and_grad(
    functools.partial(total, here), argnums=(0, 1, 2)
  )
  jax.tree.map(
    lambda a, e: np.testing.assert_allclose(a, e, 1e-5, 1e-5),
    jax.jit(mapped)(*case),
    jax.jit(expected)(*case),
  )


def test_a_region_over_tokens_alone_leaves_the_rest_to_the_mesh():
  """`data` is the caller's; `tp` is still read from the mesh."""
  objective = OBJECTIVES["opd hidden"]
  case = linear_cases.on_device(draw(objective, PLAIN))
  loss = objective.bind(**BLOCKS)

  def total(hidden, weights, batch):
    _, head, _, _, teacher_head = case
    return linear_cases.total(loss, hidden, head, weights, batch, teacher_head)[
      0
    ]

  def local(*arguments):
    return jax.lax.psum(total(*arguments), "data")

  mesh = mesh_of({"data": 2, "tp": 4})
  given = case[0], case[2], case[3]
  with jax.set_mesh(mesh):
    found = jax.jit(
      jax.shard_map(
        local, in_specs=(P("data"),) * 3, out_specs=P(), axis_names={"data"}
      )
    )(*given)
  np.testing.assert_allclose(found, jax.jit(total)(*given), 1e-6)


# Errors, and the slower path.


def small_loss(sizes, shape=(4, 2, 8), head=None, manual=None, **how):
  """A cross entropy on a mesh, in context or in a manual region."""
  head = head or do.OutputHead(kernel=jnp.ones((8, 8)))

  def loss(hidden):
    ids = jnp.zeros(hidden.shape[:2], jnp.int32)
    batch = do.DiffusionTokenBatch(
      model_inputs={"x": ids},
      target_ids=ids,
      loss_weights=jnp.ones(ids.shape),
    )
    output = do.linear_weighted_cross_entropy_loss(hidden, head, batch, **how)
    return output.primary_loss.unreduced_sum

  hidden = jnp.ones(shape)
  if sizes is None:
    return loss(hidden)
  mesh = mesh_of(sizes)
  if manual is not None:
    manual = {"in_specs": P(), "out_specs": P(), **manual}
    return jax.shard_map(loss, mesh=mesh, **manual)(hidden)
  with jax.set_mesh(mesh):
    return jax.jit(loss)(hidden)


PADDED = do.OutputHead(kernel=np.ones((8, 8), np.float32), vocabulary_size=7)
WRONG = {
  "no mesh": (
    dict(sizes=None, token_axes="data"),
    "must be those of a mesh in context .*; received .* and no mesh",
  ),
  "no such axis": (
    dict(sizes={"x": 2}, token_axes="y"),
    r"must be among those of the mesh, \('x',\); received .*'y'",
  ),
  "not read": (
    dict(sizes={"x": 2, "y": 4}),
    "must be given where the names .* do not tell.*; received .*'x': 2",
  ),
  "two vocabularies": (
    dict(sizes={"tp": 2, "model": 4}),
    "must be given where the names .*; received",
  ),
  "idle": (
    dict(sizes={"x": 2, "y": 4}, token_axes="x"),
    "must name every axis of several devices, .*'y': 4.*; received",
  ),
  "features without tokens": (
    dict(
      sizes={"x": 2, "y": 4},
      token_axes="x",
      feature_axis="y",
    ),
    "feature_axis must be one of the tokens' axes.*; received",
  ),
  "used twice": (
    dict(sizes={"x": 2}, token_axes="x", vocabulary_axis="x"),
    "an axis must split one dimension.*; received",
  ),
  "batch": (
    dict(sizes={"data": 8}),
    r"batch must divide over 8 devices of \('data',\); received 4",
  ),
  "length": (
    dict(sizes={"sp": 4}),
    r"length must divide over 4 devices of \('sp',\); received 2",
  ),
  "columns": (
    dict(sizes={"tp": 2}, head=do.OutputHead(kernel=np.ones((8, 7)))),
    r"columns of head must divide over 2 devices of 'tp' \(pad .*; received 7",
  ),
  "features": (
    dict(
      sizes={"x": 4},
      token_axes="x",
      feature_axis="x",
      head=do.OutputHead(kernel=np.ones((6, 8))),
      shape=(4, 2, 6),
    ),
    "features of head must divide over 4 devices of 'x'; received 6",
  ),
  "padding in a region": (
    dict(sizes={"tp": 2}, manual={}, vocabulary_axis="tp", head=PADDED),
    "head.vocabulary_size must be None in a manual region.*; received 7",
  ),
  "features in a region": (
    dict(sizes={"x": 2}, manual={}, feature_axis="x"),
    "in a manual region features must be whole .*; received",
  ),
  "tokens' axis in a region": (
    dict(
      sizes={"tp": 2},
      manual={"in_specs": P("tp")},
      vocabulary_axis="tp",
    ),
    "hidden must be the same along vocabulary_axis='tp' .*; received",
  ),
  "automatic tokens in a region": (
    dict(
      sizes={"data": 2, "tp": 2},
      manual={"axis_names": {"tp"}},
      vocabulary_axis="tp",
    ),
    r"must map over every axis of several devices.*; received \{'data': 2\}",
  ),
  "whole head in a region": (
    dict(sizes={"tp": 2}, manual={}, vocabulary_axis="tp"),
    r"head\.kernel must differ along vocabulary_axis='tp' .*; received",
  ),
  "unchecked region": (
    dict(sizes={"tp": 2}, manual={"check_vma": False}, vocabulary_axis="tp"),
    "must come with check_vma .*; received check_vma=False",
  ),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_axis_that_cannot_be_is_refused(name):
  arguments, message = WRONG[name]
  with pytest.raises(ValueError, match=message):
    small_loss(**arguments)


@pytest.mark.parametrize(
  ("how", "message"),
  [
    (dict(token_axes=3), "token_axes must be .*; received 3"),
    (dict(token_axes=["x"]), r"token_axes must be .*; received \['x'\]"),
    (dict(token_axes=P("a", "b", "c")), "token_axes must be .*; received"),
    (dict(feature_axis=("x",)), "feature_axis must be .*; received"),
    (dict(vocabulary_axis=1), "vocabulary_axis must be .*; received 1"),
  ],
)
def test_an_axis_of_another_type_is_refused(how, message):
  with pytest.raises(TypeError, match=message):
    small_loss({"x": 2}, **how)


def test_heads_of_other_columns_are_refused_where_the_vocabulary_is_split():
  ids = jnp.zeros((2, 1), jnp.int32)
  batch = do.DiffusionDistillationBatch(
    student_batch=do.DiffusionTokenBatch(
      model_inputs={"x": ids}, target_ids=ids, loss_weights=jnp.ones((2, 1))
    ),
    teacher=do.HiddenTeacher(hidden=jnp.ones((2, 1, 2))),
  )
  heads = [
    do.OutputHead(kernel=np.ones((2, columns), np.float32), vocabulary_size=5)
    for columns in (6, 8)
  ]
  with (
    jax.set_mesh(mesh_of({"tp": 2})),
    pytest.raises(ValueError, match=r"must have the same columns.*; received"),
  ):
    do.linear_forward_kl_loss(
      jnp.ones((2, 1, 2)), heads[0], batch, teacher_head=heads[1]
    )


def test_several_devices_without_a_mesh_are_warned_of():
  objective = OBJECTIVES["cross entropy"]
  case = linear_cases.on_device(draw(objective, PLAIN))
  rows = jax.sharding.NamedSharding(mesh_of({"data": 8}), P("data"))
  whole = jax.sharding.NamedSharding(rows.mesh, P())
  shardings = (rows, whole, rows, rows, whole)
  loss = objective.bind(**BLOCKS)
  (_, expected), _ = linear_cases.compiled(loss)(*case)
  with pytest.warns(UserWarning, match="8 devices without a mesh in context"):
    (_, found), _ = linear_cases.compiled(loss)(
      *(
        jax.device_put(part, sharding)
        for part, sharding in zip(case, shardings, strict=True)
      )
    )
  np.testing.assert_allclose(
    found.primary_loss.compute(), expected.primary_loss.compute(), 1e-6
  )
