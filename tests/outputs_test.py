"""Outputs: a ratio divided once, merged exactly, combined over one unit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffusion_objectives as do

NAN, INF = np.nan, np.inf


def metric(total, denominator, dtype=np.float32):
  return do.WeightedMetric(
    unreduced_sum=jnp.asarray(total, dtype),
    denominator=jnp.asarray(denominator, dtype),
  )


def output(total, denominator, **aux_metrics):
  return do.LossOutput(
    primary_loss=metric(total, denominator),
    aux_metrics={name: metric(*pair) for name, pair in aux_metrics.items()},
  )


def ratio(total, denominator):
  return metric(total, denominator).compute()


# One ratio.


@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
  ("total", "denominator", "expected"),
  [
    (3.0, 0.5, 6.0),
    (0.0, 4.0, 0.0),
    (1e-9, 1e-9, 1.0),
    (3.0, 3e-6, 1e6),
    (INF, 2.0, INF),
    (0.0, 0.0, 0.0),
    (5.0, 0.0, 0.0),
    (NAN, 0.0, 0.0),
    (INF, 0.0, 0.0),
    (1.0, NAN, NAN),
    (0.0, NAN, NAN),
    (NAN, 1.0, NAN),
  ],
)
def test_a_ratio_is_the_plain_quotient_and_0_over_nothing(
  total, denominator, expected, run
):
  value = run(lambda m: m.compute())(metric(total, denominator))
  np.testing.assert_allclose(value, expected, rtol=1e-6)
  assert value.shape == () and value.dtype == jnp.float32


@pytest.mark.parametrize("total", [0.0, 5.0, NAN, INF, -INF])
def test_the_gradient_over_nothing_is_exactly_0(total):
  for wrt in (0, 1):
    assert jax.grad(ratio, argnums=wrt)(total, 0.0) == 0


def test_the_gradient_is_that_of_the_quotient():
  assert jax.grad(ratio)(3.0, 0.5) == 2
  assert jax.grad(ratio, argnums=1)(3.0, 0.5) == -12
  assert jnp.isnan(jax.grad(ratio)(3.0, NAN))


def test_ratios_are_taken_row_by_row_under_vmap():
  totals = jnp.array([4.0, 5.0, 6.0])
  denominators = jnp.array([2.0, 0.0, 4.0])
  values = jax.vmap(ratio)(totals, denominators)
  np.testing.assert_array_equal(values, [2.0, 0.0, 1.5])
  slopes = jax.vmap(jax.grad(ratio))(totals, denominators)
  np.testing.assert_array_equal(slopes, [0.5, 0.0, 0.25])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_a_ratio_keeps_its_dtype(dtype):
  value = metric(3.0, 2.0, dtype).compute()
  assert value == 1.5 and value.dtype == dtype


ARRAY = "must be a JAX/NumPy array or ShapeDtypeStruct; received"
SCALAR = "must have a scalar shape (); received"
FLOATING = "must have floating-point dtype; received"


@pytest.mark.parametrize("field", ["unreduced_sum", "denominator"])
@pytest.mark.parametrize(
  ("value", "error", "message"),
  [
    (1.0, TypeError, f"{ARRAY} float"),
    (1, TypeError, f"{ARRAY} int"),
    (None, TypeError, f"{ARRAY} NoneType"),
    (np.ones(1, np.float32), ValueError, f"{SCALAR} float32[1]"),
    (np.ones((2, 3), bool), ValueError, f"{SCALAR} bool[2, 3]"),
    (np.array(3, np.int32), TypeError, f"{FLOATING} int32"),
    (np.array(True), TypeError, f"{FLOATING} bool"),
  ],
)
def test_a_metric_takes_floating_point_scalars_alone(
  field, value, error, message
):
  fields = {"unreduced_sum": jnp.ones(()), "denominator": jnp.ones(())}

  def build(value):
    return do.WeightedMetric(**{**fields, field: value})

  with pytest.raises(error) as raised:
    build(value)
  assert str(raised.value) == f"{field} {message}"
  if isinstance(value, np.ndarray):
    for run in (jax.jit(build), lambda x: build(jnp.asarray(x))):
      with pytest.raises(error) as raised:
        run(value)
      assert str(raised.value) == f"{field} {message}"


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    (
      dict(primary_loss=jnp.ones(())),
      "primary_loss must be a WeightedMetric; received float32[]",
    ),
    (
      dict(aux_metrics=[("a", metric(1, 1))]),
      "aux_metrics must be a mapping that is a pytree, such as a dict;"
      " received list",
    ),
    (
      dict(aux_metrics=None),
      "aux_metrics must be a mapping that is a pytree, such as a dict;"
      " received NoneType",
    ),
    (
      dict(aux_metrics={1: metric(1, 1)}),
      "aux_metrics must have string keys; received int",
    ),
    (
      dict(aux_metrics={"accuracy": jnp.ones(())}),
      "aux_metrics['accuracy'] must be a WeightedMetric; received float32[]",
    ),
    (
      dict(aux_metrics={"accuracy": 0.5}),
      "aux_metrics['accuracy'] must be a WeightedMetric; received float",
    ),
  ],
)
def test_an_output_takes_metrics_alone(fields, message):
  with pytest.raises(TypeError) as raised:
    do.LossOutput(**{"primary_loss": metric(1, 1), "aux_metrics": {}, **fields})
  assert str(raised.value) == message


# Merging micro-batches.


@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_merging_adds_sums_and_denominators(run):
  parts = [
    output(4, 1, accuracy=(1, 1), entropy=(2, 8)),
    output(9, 9, entropy=(1, 4), accuracy=(0, 3)),
  ]
  merged = run(do.merge)(parts)
  mean_of_means = np.mean([part.primary_loss.compute() for part in parts])
  assert mean_of_means == 2.5
  assert merged.primary_loss.unreduced_sum == 13
  assert merged.primary_loss.denominator == 10
  np.testing.assert_allclose(merged.primary_loss.compute(), 1.3, rtol=1e-6)
  assert merged.aux_metrics["accuracy"].compute() == 0.25
  assert merged.aux_metrics["entropy"].compute() == 0.25


def test_merging_is_of_any_number_and_in_any_order():
  one = output(4, 1)
  assert do.merge([one]).primary_loss.compute() == 4
  many = [output(i, i + 1) for i in range(6)]
  for order in (many, many[::-1], (part for part in many)):
    merged = do.merge(order).primary_loss
    assert (merged.unreduced_sum, merged.denominator) == (15, 21)


def test_merging_keeps_an_empty_micro_batch_neutral_and_a_nan_visible():
  merged = do.merge([output(4, 2), output(0, 0)])
  assert merged.primary_loss.compute() == 2
  assert jnp.isnan(
    do.merge([output(4, 2), output(1, NAN)]).primary_loss.compute()
  )
  assert jnp.isnan(
    do.merge([output(4, 2), output(NAN, 1)]).primary_loss.compute()
  )


def test_merging_equals_the_loss_of_the_whole_batch():
  rng = np.random.default_rng(0)
  logits = rng.standard_normal((6, 3, 5)).astype(np.float32)
  weights = (rng.random((6, 3)) * (rng.random((6, 3)) < 0.6)).astype(np.float32)
  ids = rng.integers(0, 5, (6, 3), dtype=np.int32)

  @jax.jit
  def loss(logits, ids, weights):
    batch = do.DiffusionTokenBatch(
      model_inputs=ids, target_ids=ids, loss_weights=weights
    )
    return do.weighted_cross_entropy_loss(logits, batch)

  arrays = (logits, ids, weights)
  whole = loss(*arrays)
  parts = [loss(*(x[i : i + 2] for x in arrays)) for i in (0, 2, 4)]
  merged = do.merge(parts)
  for got, want in zip(
    jax.tree.leaves(merged), jax.tree.leaves(whole), strict=True
  ):
    np.testing.assert_allclose(got, want, rtol=2e-6)


@pytest.mark.parametrize(
  ("parts", "message"),
  [
    ([], "outputs must not be empty; received 0 outputs"),
    (
      [output(1, 1, a=(1, 1)), output(1, 1, b=(1, 1))],
      "outputs must have the same aux_metrics; received ['a'] and ['b']",
    ),
    (
      [output(1, 1, a=(1, 1)), output(1, 1, a=(1, 1)), output(1, 1)],
      "outputs must have the same aux_metrics; received ['a'] and []",
    ),
  ],
)
def test_merging_refuses_nothing_and_differing_names(parts, message):
  with pytest.raises(ValueError) as raised:  # noqa: PT011
    do.merge(parts)
  assert str(raised.value) == message


# Combining terms of one batch.

both = pytest.mark.parametrize(
  "run", [lambda f: f, jax.jit], ids=["eager", "jit"]
)


@both
@pytest.mark.parametrize(
  ("coefficients", "total"),
  [
    ((1.0, 0.5), 7.0),
    ((2, 0), 8.0),
    ((0.0, 0.0), 0.0),
    ((-1.0, 1.0), 2.0),
    ((np.float32(0.5), np.float64(1)), 8.0),
  ],
)
def test_combining_weighs_the_sums_over_the_shared_denominator(
  coefficients, total, run
):
  terms = [output(4, 2, soft=(1, 2)), output(6, 2, hard=(3, 2))]
  combined = run(lambda terms: do.combine(terms, coefficients))(terms)
  assert combined.primary_loss.unreduced_sum == total
  assert combined.primary_loss.denominator == 2
  assert combined.primary_loss.compute() == total / 2
  assert set(combined.aux_metrics) == {"soft", "hard"}
  assert combined.aux_metrics["hard"].compute() == 1.5


@both
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_term_of_coefficient_0_adds_nothing(value, run):
  def total(x, coefficients):
    terms = [output(x, 2), output(x * value, 2)]
    return do.combine(terms, coefficients).primary_loss.unreduced_sum

  f = run(lambda x: (total(x, (3.0, 0.0)), total(x, (0, 1.0))))
  kept, poisoned = f(4.0)
  assert kept == 12
  np.testing.assert_array_equal(poisoned, value)
  assert jax.grad(lambda x: total(x, (3.0, 0.0)))(4.0) == 3


def test_differing_denominators_are_refused_where_concrete():
  for other in (3.0, 2.0000002, NAN):
    with pytest.raises(
      ValueError, match="must share one denominator"
    ) as raised:
      do.combine([output(4, 2), output(6, other)], [1.0, 1.0])
    assert str(raised.value).endswith(f"; received 2.0 and {np.float32(other)}")


def test_differing_denominators_are_nan_under_trace():
  def f(one, other, coefficients):
    terms = [output(4, one), output(6, other), output(1, one)]
    return do.combine(terms, coefficients).primary_loss

  for coefficients in ((1.0, 1.0, 1.0), (1.0, 0.5, 0.0)):
    g = jax.jit(lambda one, other: f(one, other, coefficients))  # noqa: B023
    assert jnp.isfinite(g(2.0, 2.0).compute())
    assert jnp.isnan(g(2.0, 3.0).unreduced_sum)
    assert jnp.isnan(g(2.0, 3.0).compute())
    assert jnp.isnan(g(2.0, NAN).unreduced_sum)


@both
def test_a_shared_nan_denominator_stays_nan(run):
  terms = [output(4, NAN), output(6, NAN)]
  combined = run(lambda terms: do.combine(terms, [1.0, 1.0]))(terms)
  assert jnp.isnan(combined.primary_loss.denominator)
  assert jnp.isnan(combined.primary_loss.compute())


@both
def test_an_empty_batch_combines_to_0(run):
  terms = [output(0, 0), output(0, 0)]
  combined = run(lambda terms: do.combine(terms, [1.0, 2.0]))(terms)
  assert combined.primary_loss.compute() == 0


@pytest.mark.parametrize(
  ("terms", "coefficients", "error", "message"),
  [
    ([], [], ValueError, "one equal, positive length; received 0 and 0"),
    (
      [output(1, 1)],
      [1.0, 2.0],
      ValueError,
      "one equal, positive length; received 1 and 2",
    ),
    (
      [output(1, 1, a=(1, 1)), output(1, 1, a=(2, 1))],
      [1.0, 1.0],
      ValueError,
      "terms must not share a metric name; received 'a'",
    ),
    (
      [output(1, 1)],
      [NAN],
      ValueError,
      "coefficient must be a finite real scalar; received nan",
    ),
    (
      [output(1, 1)],
      [True],
      TypeError,
      "coefficient must be a finite real scalar; received bool",
    ),
    (
      [output(1, 1)],
      ["1"],
      TypeError,
      "coefficient must be a finite real scalar; received str",
    ),
    (
      [output(1, 1)],
      [jnp.float32(1)],
      TypeError,
      "coefficient must be a finite real scalar; received float32[]",
    ),
  ],
)
def test_combining_refuses_what_is_no_weighted_sum(
  terms, coefficients, error, message
):
  with pytest.raises(error) as raised:
    do.combine(terms, coefficients)
  assert str(raised.value).endswith(message)
