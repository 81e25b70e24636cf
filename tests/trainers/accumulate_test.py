"""Accumulation: exact for any partition, denominators and devices."""

import functools
import re
import subprocess
import sys

from flax import linen
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import diffusion_objectives as do
from diffusion_objectives.trainers import accumulate
from diffusion_objectives.trainers import accumulate_nnx
from tests import oracles

P = jax.sharding.PartitionSpec
NAN = np.nan
VOCABULARY, LENGTH, ROWS = 6, 3, 42
COEFFICIENTS = {"ce": 0.7, "z": -0.25}
SEEDS = range(20)


@pytest.fixture(autouse=True)
def default_promotion():
  """Strict promotion holds here, other than in the rest of this folder."""


# A network that is a table of logits, two terms with units of their own, and
# both once more in closed form.


def random_params(seed=0, dtype=np.float32):
  rng = np.random.default_rng(seed)
  table = rng.standard_normal((VOCABULARY, VOCABULARY))
  return {"table": table.astype(dtype), "frozen": None}


def random_batch(seed=0, rows=ROWS, scale=1.0):
  """Weights over four decades from row to row; some rows have none."""
  rng = np.random.default_rng(seed)
  shape = (rows, LENGTH)
  decades = 10.0 ** rng.uniform(-3, 1, (rows, 1))
  weights = scale * decades * rng.random(shape) * (rng.random(shape) < 0.7)
  ids = rng.integers(0, VOCABULARY, (2, *shape), dtype=np.int32)
  return do.DiffusionTokenBatch(
    model_inputs=ids[0], target_ids=ids[1], loss_weights=np.float32(weights)
  )


def without_weights(batch, rows):
  weights = batch.loss_weights.copy()
  weights[rows] = 0
  return do.DiffusionTokenBatch(
    model_inputs=batch.model_inputs,
    target_ids=batch.target_ids,
    loss_weights=weights,
  )


def metric(total, denominator):
  return do.WeightedMetric(unreduced_sum=total, denominator=denominator)


def output(total, denominator):
  return do.LossOutput(primary_loss=metric(total, denominator), aux_metrics={})


def cross_entropy(params, batch):
  logits = params["table"][batch.model_inputs]
  return do.weighted_cross_entropy_loss(logits, batch)


def squared_logits(params, batch):
  """`sum z^2` over positions of positive weight, divided by their number."""
  active = jnp.asarray(batch.loss_weights) > 0
  z = params["table"][batch.model_inputs].astype(float)
  squares = jnp.where(active[..., None], z, 0) ** 2
  count = jnp.sum(active, dtype=jnp.int32).astype(float)
  return output(jnp.sum(squares), count)


def two_terms(params, batch):
  return {
    "ce": cross_entropy(params, batch),
    "z": squared_logits(params, batch),
  }


def closed_form(params, batch):
  """By term, in float64: sum, denominator, and the sum's gradient."""
  table = np.float64(params["table"])
  weights = np.float64(batch.loss_weights).ravel()
  inputs, targets = batch.model_inputs.ravel(), batch.target_ids.ravel()
  z = table[inputs]

  def scattered(gradient):
    total = np.zeros_like(table)
    np.add.at(total, inputs, gradient)
    return total

  losses = oracles.nll(z, targets)
  residual = oracles.softmax(z) - np.eye(VOCABULARY)[targets]
  active = (weights > 0)[:, None]
  return {
    "ce": (
      (weights * losses).sum(),
      weights.sum(),
      scattered(weights[:, None] * residual),
    ),
    "z": ((active * z**2).sum(), active.sum(), scattered(2 * active * z)),
  }


def expected_gradient(terms, coefficients):
  return sum(
    c * terms[name][2] / (terms[name][1] or 1.0)
    for name, c in coefficients.items()
  )


def assert_gradient(actual, terms, coefficients, tolerance=2e-6):
  """To rounding, relative to the largest entry."""
  expected = expected_gradient(terms, coefficients)
  size = np.abs(expected).max()
  np.testing.assert_allclose(
    np.float64(actual), expected, rtol=0, atol=tolerance * size
  )


def assert_output(actual, term, tolerance=2e-6):
  loss = actual.primary_loss
  np.testing.assert_allclose(loss.unreduced_sum, term[0], rtol=tolerance)
  np.testing.assert_allclose(loss.denominator, term[1], rtol=tolerance)


one_term = jax.jit(accumulate.value_and_grad(cross_entropy))
both_terms = jax.jit(
  accumulate.value_and_grad(two_terms, coefficients=COEFFICIENTS)
)


@jax.jit
@jax.grad
def one_batch(params, batch):
  return cross_entropy(params, batch).primary_loss.compute()


# Values and gradients.


@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_micro_batches_give_what_one_big_batch_gives(steps):
  for seed, scale in enumerate([1.0, 1.0, 1.0, 1e-6, 1e-6]):
    params, batch = random_params(seed), random_batch(seed, scale=scale)
    if steps > 1:  # one micro-batch without weight
      batch = without_weights(batch, slice(1, None, steps))
    micro_batches = accumulate.split(batch, steps)
    terms = closed_form(params, batch)
    merged, gradients = one_term(params, micro_batches)
    assert_gradient(gradients["table"], terms, {"ce": 1.0})
    assert_output(merged, terms["ce"])
    np.testing.assert_allclose(
      gradients["table"],
      one_batch(params, batch)["table"],
      rtol=2e-5,
      atol=1e-7,
    )
    merged, gradients = both_terms(params, micro_batches)
    assert_gradient(gradients["table"], terms, COEFFICIENTS)
    for name, term in terms.items():
      assert_output(merged[name], term)
    assert gradients["frozen"] is None


def test_metrics_are_added_and_not_divided():
  params, batch = random_params(), random_batch()
  merged, _ = one_term(params, accumulate.split(batch, 7))
  whole = cross_entropy(params, batch)
  assert set(merged.aux_metrics) == set(whole.aux_metrics) != set()
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-6), merged, whole
  )


def test_double_precision_is_kept():
  with jax.enable_x64(True):
    params = random_params(dtype=np.float64)
    batch = random_batch()
    merged, gradients = both_terms(params, accumulate.split(batch, 3))
    terms = closed_form(params, batch)
    assert gradients["table"].dtype == np.float64
    assert_gradient(gradients["table"], terms, COEFFICIENTS, tolerance=1e-14)
    assert_output(merged["z"], terms["z"], tolerance=1e-14)


def test_bfloat16_gradients_are_summed_in_float32_and_rounded_once():
  def loss(params, batch):
    return two_terms({"table": params["table"].astype(float)}, batch)

  params, batch = random_params(dtype=jnp.bfloat16), random_batch()
  _, gradients = accumulate.value_and_grad(loss, coefficients=COEFFICIENTS)(
    params, accumulate.split(batch, 7)
  )
  assert gradients["table"].dtype == jnp.bfloat16
  assert_gradient(
    gradients["table"], closed_form(params, batch), COEFFICIENTS, 2**-7
  )


def test_a_bfloat16_sum_of_many_micro_batches_does_not_stall():
  def loss(params, batch):
    return output(params.astype(float) * batch, jnp.ones((), float))

  ones = np.ones(512, np.float32)  # a bfloat16 count stops at 256
  _, gradient = jax.jit(accumulate.value_and_grad(loss))(jnp.bfloat16(0), ones)
  assert gradient == 1 and gradient.dtype == jnp.bfloat16


def test_where_no_weight_is_the_gradient_is_exactly_0():
  params = random_params()
  batch = without_weights(random_batch(), slice(None))
  merged, gradients = both_terms(params, accumulate.split(batch, 3))
  np.testing.assert_array_equal(gradients["table"], 0)
  assert merged["ce"].primary_loss.compute() == 0


def test_a_term_without_weight_adds_exactly_0_to_another():
  params, batch = random_params(), random_batch()
  empty = without_weights(batch, slice(None))

  def loss(params, batches):
    weighted, unweighted = batches
    return {
      "ce": cross_entropy(params, weighted),
      "z": squared_logits(params, unweighted),
    }

  differentiated = accumulate.value_and_grad(loss, coefficients=COEFFICIENTS)
  _, gradients = jax.jit(differentiated)(
    params, accumulate.split((batch, empty), 3)
  )
  assert_gradient(
    gradients["table"], closed_form(params, batch), {"ce": COEFFICIENTS["ce"]}
  )


@pytest.mark.parametrize("value", [NAN, np.inf])
def test_a_term_of_coefficient_0_adds_nothing(value):
  def loss(params, batch):
    poisoned = jnp.sum(params["table"]) * value
    return {**two_terms(params, batch), "off": output(poisoned, poisoned)}

  params, batch = random_params(), random_batch()
  coefficients = {**COEFFICIENTS, "off": 0.0}
  merged, gradients = jax.jit(
    accumulate.value_and_grad(loss, coefficients=coefficients)
  )(params, accumulate.split(batch, 3))
  assert_gradient(gradients["table"], closed_form(params, batch), COEFFICIENTS)
  assert np.isnan(merged["off"].primary_loss.compute())
  nothing = dict.fromkeys(coefficients, 0)
  _, gradients = accumulate.value_and_grad(loss, coefficients=nothing)(
    params, accumulate.split(batch, 3)
  )
  np.testing.assert_array_equal(gradients["table"], 0)


def test_a_refused_weight_is_nan():
  params, batch = random_params(), random_batch()
  batch.loss_weights[5, 1] = -1
  merged, gradients = one_term(params, accumulate.split(batch, 3))
  assert np.isnan(gradients["table"]).any()
  assert np.isnan(merged.primary_loss.compute())


def in_float64(params, micro_batches):
  """The closed form of each micro-batch."""
  steps = len(micro_batches.target_ids)
  return [
    closed_form(params, jax.tree.map(lambda leaf, k=k: leaf[k], micro_batches))
    for k in range(steps)
  ]


def accumulated(
  parts,
  *,
  mean_of_means=False,
  smallest_denominator=0.0,
  shared_denominator=False,
  means=(),
  divided_again=False,
  dtype=np.float64,
):
  """The formula once more, with places for bugs."""
  totals = {n: sum(p[n][1] for p in parts) for n in COEFFICIENTS}
  result = np.zeros((VOCABULARY, VOCABULARY), dtype)
  for part in parts:
    for name, coefficient in COEFFICIENTS.items():
      denominator = totals["ce" if shared_denominator else name]
      if mean_of_means or name in means:
        denominator = part[name][1] * (len(parts) if mean_of_means else 1)
      denominator = max(denominator, smallest_denominator)
      gradient = coefficient * part[name][2] / denominator
      result = (result + gradient.astype(dtype)).astype(dtype)
  return result / len(parts) if divided_again else result


BUGS = {
  "a mean of means": dict(mean_of_means=True),
  "a denominator clamped to 1": dict(smallest_denominator=1.0),
  "the first term's denominator for all": dict(shared_denominator=True),
  "one term added once a micro-batch": dict(means=("z",)),
  "sums in bfloat16": dict(dtype=jnp.bfloat16),
  "divided by the number of micro-batches": dict(divided_again=True),
}


@pytest.mark.parametrize("bug", [None, *BUGS])
def test_a_planted_bug_is_seen_at_every_seed(bug):
  for seed in SEEDS:
    params = random_params(seed)
    batch = random_batch(seed, scale=1e-3)
    micro_batches = accumulate.split(batch, 7)
    terms = closed_form(params, batch)
    result = accumulated(in_float64(params, micro_batches), **BUGS.get(bug, {}))
    if bug is None:
      assert_gradient(result, terms, COEFFICIENTS, tolerance=1e-12)
      _, gradients = both_terms(params, micro_batches)
      assert_gradient(gradients["table"], terms, COEFFICIENTS)
    else:
      with pytest.raises(AssertionError):
        assert_gradient(result, terms, COEFFICIENTS)


# Denominators.


def test_a_denominator_with_a_derivative_is_refused():
  @jax.checkpoint
  def depends(params, batch):
    total = cross_entropy(params, batch).primary_loss.unreduced_sum
    return output(total, total)

  def loss(params, batch):
    return {"ce": cross_entropy(params, batch), "own": depends(params, batch)}

  with pytest.raises(ValueError, match="must not depend on params") as raised:
    accumulate.value_and_grad(loss, coefficients={"ce": 1.0, "own": 1.0})(
      random_params(), accumulate.split(random_batch(), 3)
    )
  assert str(raised.value).endswith(
    "; received one with a derivative in params"
  )


def test_a_denominator_without_a_derivative_is_a_constant():
  def counted(params, batch):
    """The mean over those positions that are predicted rightly."""
    z = params["table"][batch.model_inputs]
    hits = (jnp.argmax(z, axis=-1) == batch.target_ids).astype(float)
    return output(jnp.sum(hits * z[..., 0]), jnp.sum(hits))

  def stopped(params, batch):
    mean = counted(params, batch).primary_loss
    soft = mean.denominator * jnp.exp(0 * params["table"][0, 0])
    return output(mean.unreduced_sum, jax.lax.stop_gradient(soft))

  params, batch = random_params(), random_batch()
  whole = jax.grad(lambda p: counted(p, batch).primary_loss.compute())(params)
  for loss in (counted, stopped):
    _, gradients = accumulate.value_and_grad(loss)(
      params, accumulate.split(batch, 3)
    )
    np.testing.assert_allclose(
      gradients["table"], whole["table"], rtol=1e-5, atol=1e-7
    )


# What is compiled.


def loop_bodies(text):
  """The text of every loop's body, called computations included."""
  computations, name = {}, None
  for line in text.splitlines():
    head = re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line)
    if head:
      name = head[1]
      computations[name] = []
    elif name:
      computations[name].append(line)

  def reached(name, seen):
    if name in computations and name not in seen:
      seen.add(name)
      for line in computations[name]:
        for called in re.findall(r"%([\w.\-]+)", line):
          reached(called, seen)
    return seen

  return [
    "\n".join(line for n in reached(body, set()) for line in computations[n])
    for body in re.findall(r" while\(.*body=%?([\w.\-]+)", text)
  ]


def mlp_params(width=32, dtype=np.float32):
  rng = np.random.default_rng(0)
  shapes = {
    "embed": (VOCABULARY, width),
    "hidden": (width, width),
    "head": (width, VOCABULARY),
  }
  return {
    name: (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(dtype)
    for name, shape in shapes.items()
  }


def mlp_logits(params, ids):
  return jnp.tanh(params["embed"][ids] @ params["hidden"]) @ params["head"]


def mlp_loss(params, batch):
  logits = mlp_logits(params, batch.model_inputs)
  return {
    "ce": do.weighted_cross_entropy_loss(logits, batch),
    "z": squared_logits({"table": params["head"]}, batch),
  }


def test_the_first_pass_computes_denominators_alone():
  def needs_the_network(params, batch):
    terms = mlp_loss(params, batch)
    loss = terms["ce"].primary_loss
    needed = jax.lax.stop_gradient(loss.unreduced_sum)
    return {**terms, "ce": output(loss.unreduced_sum, needed)}

  for loss, passes in (
    (mlp_loss, [False, True]),
    (needs_the_network, [True] * 2),
  ):
    compiled = jax.jit(
      accumulate.value_and_grad(loss, coefficients=COEFFICIENTS)
    ).lower(mlp_params(), accumulate.split(random_batch(), 3))
    bodies = loop_bodies(compiled.compile().as_text())
    assert [" dot(" in body for body in bodies] == passes
    assert ["exponential" in body for body in bodies] == passes


def test_the_loss_is_traced_once_for_equal_shapes():
  traces = []

  def loss(params, batch):
    traces.append(None)
    return two_terms(params, batch)

  step = jax.jit(accumulate.value_and_grad(loss, coefficients=COEFFICIENTS))
  for seed in range(3):
    step(random_params(seed), accumulate.split(random_batch(seed), 3))
  assert len(traces) == 1
  step(random_params(), accumulate.split(random_batch(), 2))
  assert len(traces) == 2


def test_memory_does_not_grow_with_the_number_of_micro_batches():
  def temporary_bytes(steps, rows):
    step = jax.jit(
      accumulate.value_and_grad(mlp_loss, coefficients=COEFFICIENTS)
    )
    micro_batches = accumulate.split(random_batch(rows=rows), steps)
    compiled = step.lower(mlp_params(), micro_batches).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  few, many = temporary_bytes(2, 2 * 64), temporary_bytes(16, 16 * 64)
  assert many < 1.05 * few
  assert temporary_bytes(1, 16 * 64) > 4 * many


def test_parameters_can_be_donated():
  @functools.partial(jax.jit, donate_argnums=0)
  def step(params, batch):
    _, gradients = accumulate.value_and_grad(cross_entropy)(
      params, accumulate.split(batch, 3)
    )
    return jax.tree.map(lambda p, g: p - g, params, gradients)

  params = jax.tree.map(jnp.asarray, random_params())
  new = step(params, random_batch())
  assert params["table"].is_deleted()
  assert_gradient(
    random_params()["table"] - np.asarray(new["table"]),
    closed_form(random_params(), random_batch()),
    {"ce": 1.0},
  )


def test_a_rematerialised_loss_gives_the_same():
  params, micro_batches = mlp_params(), accumulate.split(random_batch(), 3)
  plain, remat = (
    jax.jit(accumulate.value_and_grad(loss, coefficients=COEFFICIENTS))(
      params, micro_batches
    )
    for loss in (mlp_loss, jax.checkpoint(mlp_loss))
  )
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7),
    plain,
    remat,
  )


def test_keys_and_state_go_along_with_the_micro_batches():
  def loss(params, seen, item):
    batch, key = item
    kept = jax.random.bernoulli(key, 0.5, batch.loss_weights.shape)
    dropped = without_weights_where(batch, ~kept)
    return cross_entropy(params, dropped), seen + jnp.sum(kept)

  def without_weights_where(batch, dropped):
    return do.DiffusionTokenBatch(
      model_inputs=batch.model_inputs,
      target_ids=batch.target_ids,
      loss_weights=jnp.where(dropped, 0, batch.loss_weights),
    )

  params, micro_batches = random_params(), accumulate.split(random_batch(), 3)
  keys = jax.random.split(jax.random.key(0), 3)
  merged, seen, gradients = jax.jit(accumulate.stateful_value_and_grad(loss))(
    params, 0, (micro_batches, keys)
  )
  count, kept_batches = 0, []
  for k, key in enumerate(keys):
    batch = jax.tree.map(lambda leaf, k=k: leaf[k], micro_batches)
    kept = jax.random.bernoulli(key, 0.5, batch.loss_weights.shape)
    count += int(kept.sum())
    kept_batches.append(without_weights_where(batch, ~kept))
  whole = jax.tree.map(lambda *x: np.concatenate(x), *kept_batches)
  assert seen == count
  terms = closed_form(params, whole)
  assert_gradient(gradients["table"], terms, {"ce": 1.0})
  assert_output(merged, terms["ce"])


# Splitting, and meshes.


def test_rows_go_round_the_micro_batches():
  batch = {
    "a": np.arange(12).reshape(6, 2),
    "k": jax.random.split(jax.random.key(0), 6),
  }
  micro_batches = accumulate.split(batch, 3)
  assert isinstance(micro_batches["a"], np.ndarray)
  assert np.shares_memory(micro_batches["a"], batch["a"])
  for k in range(3):
    np.testing.assert_array_equal(micro_batches["a"][k], batch["a"][k::3])
    assert jnp.all(micro_batches["k"][k] == batch["k"][k::3])


def mesh_of(*names):
  devices = np.array(jax.devices()[:4]).reshape(2, 2)
  return jax.sharding.Mesh(devices, names)


def placed(mesh, tree, spec):
  return jax.device_put(tree, jax.sharding.NamedSharding(mesh, spec))


COLLECTIVE = re.compile(
  r"all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
)


def test_splitting_a_sharded_batch_needs_no_communication():
  mesh = mesh_of("data", "tensor")
  rows = placed(mesh, np.zeros((16, 3), np.float32), P("data"))
  wanted = jax.sharding.NamedSharding(mesh, P(None, "data"))

  def contiguous(batch, steps):
    return batch.reshape(steps, -1, *batch.shape[1:])

  for cut, communicates in ((accumulate.split, False), (contiguous, True)):
    compiled = (
      jax.jit(cut, static_argnums=1, out_shardings=wanted)
      .lower(rows, 4)
      .compile()
    )
    assert bool(COLLECTIVE.search(compiled.as_text())) == communicates


@pytest.mark.parametrize(
  ("names", "batch_spec", "specs"),
  [
    (
      ("data", "fsdp"),
      P(("data", "fsdp")),
      dict.fromkeys(mlp_params(), P("fsdp")),
    ),
    (
      ("data", "tensor"),
      P("data"),
      {
        "embed": P(),
        "hidden": P(None, "tensor"),
        "head": P("tensor", None),
      },
    ),
  ],
  ids=["fsdp", "tensor"],
)
def test_a_mesh_changes_nothing(names, batch_spec, specs):
  mesh = mesh_of(*names)

  @jax.jit
  def step(params, batch):
    return accumulate.value_and_grad(mlp_loss, coefficients=COEFFICIENTS)(
      params, accumulate.split(batch, 3)
    )

  params, batch = mlp_params(), random_batch(rows=24)
  sharded = {name: placed(mesh, params[name], specs[name]) for name in params}
  expected = step(params, batch)
  compiled = step.lower(sharded, placed(mesh, batch, batch_spec)).compile()
  actual = compiled(sharded, placed(mesh, batch, batch_spec))
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6),
    actual,
    expected,
  )
  for name, gradient in actual[1].items():
    assert gradient.sharding.is_equivalent_to(sharded[name].sharding, 2)


def test_explicit_axes_are_kept():
  mesh = jax.sharding.Mesh(
    np.array(jax.devices()[:4]),
    ("data",),
    axis_types=(jax.sharding.AxisType.Explicit,),
  )

  @jax.jit
  def step(params, batch):
    def loss(params, batch):
      rows = params["table"].at[batch.model_inputs]
      return do.weighted_cross_entropy_loss(
        rows.get(out_sharding=P("data")), batch
      )

    micro_batches = accumulate.split(batch, 4)
    assert jax.typeof(micro_batches.target_ids).sharding.spec[1] == "data"
    return accumulate.value_and_grad(loss)(params, micro_batches)

  params, batch = random_params(), random_batch(rows=16)
  with jax.set_mesh(mesh):
    merged, gradients = step(
      placed(mesh, params, P()), placed(mesh, batch, P("data"))
    )
  terms = closed_form(params, batch)
  assert_gradient(gradients["table"], terms, {"ce": 1.0})
  assert_output(merged, terms["ce"])


@pytest.mark.parametrize("once", [False, True], ids=["automatic", "once"])
def test_in_a_manual_region_outputs_are_psummed(once):
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))

  def loss(params, rows):
    return jax.lax.psum(two_terms(params, rows), "data")

  def local_step(params, rows):
    if once:
      params = jax.lax.pcast(params, "data", to="varying")
    merged, gradients = accumulate.value_and_grad(
      loss, coefficients=COEFFICIENTS
    )(params, accumulate.split(rows, 2))
    return merged, jax.lax.psum(gradients, "data") if once else gradients

  step = jax.jit(
    jax.shard_map(
      local_step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()
    )
  )
  params, batch = random_params(), random_batch(rows=16)
  batch = without_weights(batch, slice(4))  # the first device has none
  merged, gradients = step(params, batch)
  terms = closed_form(params, batch)
  assert_gradient(gradients["table"], terms, COEFFICIENTS)
  for name, term in terms.items():
    assert_output(merged[name], term)
  bodies = loop_bodies(step.lower(params, batch).compile().as_text())
  table = rf"f32\[{VOCABULARY},{VOCABULARY}\].* all-reduce"
  assert any(re.search(table, body) for body in bodies) != once


# Frameworks.


class Network(nnx.Module):
  """Embedding, normalisation, dropout and head."""

  def __init__(self, *, normalise=False, rate=0.0, kind=nnx.Param):
    rngs = nnx.Rngs(0)
    self.embed = nnx.Embed(VOCABULARY, 8, rngs=rngs)
    self.head = nnx.Linear(8, VOCABULARY, rngs=rngs)
    self.norm = nnx.BatchNorm(8, rngs=rngs) if normalise else None
    self.dropout = nnx.Dropout(rate, rngs=rngs)
    self.scale = kind(jnp.ones(VOCABULARY))

  def __call__(self, ids):
    x = self.dropout(self.embed(ids))
    x = x if self.norm is None else self.norm(x)
    return self.head(x) * self.scale[...]


def module_loss(model, batch):
  return do.weighted_cross_entropy_loss(model(batch.model_inputs), batch)


def assert_same(one, other):
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6),
    nnx.to_pure_dict(one),
    nnx.to_pure_dict(other),
  )


@pytest.fixture
def standard():
  """Flax and optax rely on JAX's default promotion rules."""
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    yield


@pytest.mark.parametrize("wrt", [nnx.Param, nnx.LoRAParam])
@pytest.mark.usefixtures("standard")
def test_a_module_is_differentiated_as_on_one_big_batch(wrt):
  model = Network(kind=nnx.LoRAParam)
  batch = random_batch()
  merged, gradients = nnx.jit(
    accumulate_nnx.value_and_grad(module_loss, wrt=wrt)
  )(model, accumulate.split(batch, 3))
  value, expected = nnx.jit(
    nnx.value_and_grad(
      lambda model: module_loss(model, batch).primary_loss.compute(),
      argnums=nnx.DiffState(0, wrt),
    )
  )(model)
  np.testing.assert_allclose(merged.primary_loss.compute(), value, rtol=1e-5)
  assert jax.tree.structure(gradients) == jax.tree.structure(expected)
  assert_same(gradients, expected)


@pytest.mark.usefixtures("standard")
def test_a_module_trains_under_nnx_jit():
  model, other = Network(), Network()
  optimizers = [
    nnx.Optimizer(m, optax.adam(1e-2), wrt=nnx.Param) for m in (model, other)
  ]

  @nnx.jit
  def accumulated_step(model, optimizer, batch):
    output, gradients = accumulate_nnx.value_and_grad(module_loss)(
      model, accumulate.split(batch, 7)
    )
    optimizer.update(model, gradients)
    return output

  @nnx.jit
  def plain_step(model, optimizer, batch):
    optimizer.update(
      model,
      nnx.grad(lambda m: module_loss(m, batch).primary_loss.compute())(model),
    )

  for seed in range(3):
    accumulated_step(model, optimizers[0], random_batch(seed))
    plain_step(other, optimizers[1], random_batch(seed))
  assert_same(nnx.state(model, nnx.Param), nnx.state(other, nnx.Param))


@pytest.mark.usefixtures("standard")
def test_other_state_goes_from_micro_batch_to_micro_batch():
  model, other = (Network(normalise=True, rate=0.5) for _ in range(2))
  micro_batches = accumulate.split(random_batch(), 3)
  merged, _ = nnx.jit(accumulate_nnx.value_and_grad(module_loss))(
    model, micro_batches
  )
  evaluate = nnx.jit(module_loss)
  parts = [
    evaluate(other, jax.tree.map(lambda leaf, k=k: leaf[k], micro_batches))
    for k in range(3)
  ]
  np.testing.assert_allclose(
    merged.primary_loss.compute(),
    do.merge(parts).primary_loss.compute(),
    rtol=1e-5,
  )
  statistics = nnx.state(model, nnx.BatchStat)
  assert_same(statistics, nnx.state(other, nnx.BatchStat))
  assert model.dropout.rngs.count[...] == other.dropout.rngs.count[...] > 0
  fresh = nnx.state(Network(normalise=True), nnx.BatchStat)
  with pytest.raises(AssertionError):
    assert_same(statistics, fresh)


@pytest.mark.usefixtures("standard")
def test_plain_linen_and_nnx_agree():
  class Linen(linen.Module):
    @linen.compact
    def __call__(self, ids):
      x = linen.Embed(VOCABULARY, 8, name="embed")(ids)
      return linen.Dense(VOCABULARY, name="head")(x)

  model, batch = Network(), random_batch()
  values = nnx.to_pure_dict(nnx.state(model, nnx.Param))
  del values["scale"]

  def plain(params, batch):
    x = params["embed"]["embedding"][batch.model_inputs]
    logits = x @ params["head"]["kernel"] + params["head"]["bias"]
    return do.weighted_cross_entropy_loss(logits, batch)

  def applied(params, batch):
    logits = Linen().apply({"params": params}, batch.model_inputs)
    return do.weighted_cross_entropy_loss(logits, batch)

  micro_batches = accumulate.split(batch, 3)
  _, expected = accumulate_nnx.value_and_grad(module_loss)(model, micro_batches)
  expected = nnx.to_pure_dict(expected)
  del expected["scale"]
  for loss in (plain, applied):
    _, gradients = accumulate.value_and_grad(loss)(values, micro_batches)
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6),
      gradients,
      expected,
    )


def test_plain_jax_needs_neither_flax_nor_optax():
  script = (
    "import sys; sys.modules.update(flax=None, optax=None, tunix=None)\n"
    "import jax.numpy as jnp, diffusion_objectives as do\n"
    "from diffusion_objectives.trainers import accumulate\n"
    "def loss(p, b): return do.LossOutput(primary_loss=do.WeightedMetric(\n"
    "  unreduced_sum=p * b.sum(), denominator=jnp.float32(b.size)),\n"
    "  aux_metrics={})\n"
    "run = accumulate.value_and_grad(loss)\n"
    "print(run(jnp.float32(0), accumulate.split(jnp.arange(4.0), 2))[1])\n"
  )
  result = subprocess.run(
    [sys.executable, "-c", script],
    capture_output=True,
    text=True,
    check=True,
    timeout=120,
  )
  assert result.stdout.strip() == "1.5"


# Refusals.


DIVIDE = "steps must be positive and divide the batch; received"
INTEGER = "steps must be an integer; received"
AXIS = "batch must hold arrays of one positive first axis, batch; received"
EIGHT = {"x": np.zeros(8)}


@pytest.mark.parametrize(
  ("batch", "steps", "error", "message"),
  [
    (EIGHT, 3, ValueError, f"{DIVIDE} 3 and 8 rows"),
    (EIGHT, 0, ValueError, f"{DIVIDE} 0 and 8 rows"),
    (EIGHT, 2.0, TypeError, f"{INTEGER} float"),
    (EIGHT, True, TypeError, f"{INTEGER} bool"),
    ({}, 2, ValueError, f"{AXIS} no array"),
    ({"x": np.zeros((0, 2))}, 1, ValueError, f"{AXIS} 0 (batch['x'])"),
    (
      {**EIGHT, "y": np.zeros(4)},
      2,
      ValueError,
      f"{AXIS} 8 (batch['x']) and 4 (batch['y'])",
    ),
    (
      {"x": np.float32(1)},
      1,
      ValueError,
      "batch['x'] must have shape [batch, ...]; received shape ()",
    ),
    (
      {"x": [1.0]},
      1,
      TypeError,
      "batch['x'][0] must be a JAX/NumPy array; received float",
    ),
  ],
)
def test_splitting_refuses(batch, steps, error, message):
  with pytest.raises(error) as raised:
    accumulate.split(batch, steps)
  assert str(raised.value) == message


RESULT = "the loss_fn's result"
ONE = f"{RESULT} must be a LossOutput (or, with coefficients, a mapping of"
UNIT = output(np.float32(1), np.float32(1))


def returning(value):
  return lambda params, batch: value


def narrow(params, batch):
  return output(params["x"].astype(jnp.bfloat16), jnp.ones((), float))


@pytest.mark.parametrize(
  ("loss", "coefficients", "error", "message"),
  [
    (None, None, TypeError, "loss_fn must be callable; received NoneType"),
    (
      returning(jnp.float32(1)),
      None,
      TypeError,
      f"{ONE} them); received float32[]",
    ),
    (returning({"a": UNIT}), None, TypeError, f"{ONE} them); received dict"),
    (
      returning(UNIT),
      {"a": 1.0},
      TypeError,
      f"{RESULT} must be a mapping that is a pytree, such as a dict; received"
      " LossOutput",
    ),
    (
      returning({"a": UNIT}),
      {"a": 1.0, "b": 1.0},
      ValueError,
      "coefficients must name the terms that the loss_fn returns; received"
      " ['a', 'b'] for ['a']",
    ),
    (
      narrow,
      None,
      TypeError,
      f"{RESULT}.primary_loss.unreduced_sum must be at least float32; received"
      " bfloat16",
    ),
    (
      two_terms,
      [1.0],
      TypeError,
      "coefficients must be a mapping from the terms' names; received list",
    ),
    (
      two_terms,
      {},
      ValueError,
      "coefficients must name at least one term; received none",
    ),
    (
      two_terms,
      {"ce": NAN},
      ValueError,
      "coefficients['ce'] must be a finite real scalar; received nan",
    ),
    (
      two_terms,
      {"ce": False},
      TypeError,
      "coefficients['ce'] must be a finite real scalar; received bool",
    ),
  ],
)
def test_a_loss_or_coefficients_of_another_kind_are_refused(
  loss, coefficients, error, message
):
  with pytest.raises(error) as raised:
    accumulate.value_and_grad(loss, coefficients=coefficients)(
      {"x": jnp.ones(())}, np.ones((2, 3), np.float32)
    )
  assert str(raised.value) == message


FLOATING = "must be a floating-point array (the loss_fn may close over others)"
STEPS = "micro_batches must hold arrays of one positive first axis, steps"


@pytest.mark.parametrize(
  ("params", "micro_batches", "error", "message"),
  [
    (
      {"n": np.zeros(3, int)},
      np.ones(2),
      TypeError,
      f"params['n'] {FLOATING}; received int64[3]",
    ),
    (
      {"f": abs},
      np.ones(2),
      TypeError,
      f"params['f'] {FLOATING}; received builtin_function_or_method",
    ),
    ({}, [], ValueError, f"{STEPS}; received no array"),
    (
      {},
      {"a": np.ones(2), "b": np.ones((3, 2))},
      ValueError,
      f"{STEPS}; received 2 (micro_batches['a']) and 3 (micro_batches['b'])",
    ),
  ],
)
def test_parameters_and_micro_batches_of_another_kind_are_refused(
  params, micro_batches, error, message
):
  with pytest.raises(error) as raised:
    accumulate.value_and_grad(two_terms)(params, micro_batches)
  assert str(raised.value) == message


@pytest.mark.usefixtures("standard")
@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_what_is_no_module_or_changes_one_is_refused():
  micro_batches = accumulate.split(random_batch(), 3)

  def growing(model, batch):
    model.seen = nnx.Variable(jnp.ones(()))
    return module_loss(model, batch)

  def sowing(model, batch):
    model.sow(nnx.Intermediate, "hidden", jnp.ones(()))
    return module_loss(model, batch)

  model, sown = Network(), Network()
  sowing(
    sown, jax.tree.map(lambda x: x[0], micro_batches)
  )  # as by a first call
  for value, loss, wrt, error, message in (
    (sown, sowing, nnx.Param, ValueError, "leave the model's structure"),
    ({}, module_loss, nnx.Param, TypeError, "model must be a Module"),
    (model, module_loss, nnx.LoRAParam, ValueError, "wrt must select"),
    (model, growing, nnx.Param, ValueError, "leave the model's structure"),
  ):
    with pytest.raises(error, match=message):
      accumulate_nnx.value_and_grad(loss, wrt=wrt)(value, micro_batches)
