"""Named regressions: faults of other code, each with its public report.

The numbers are in `cases.py`. A loss must give the right sum, denominator, mean
and gradient, none of the known wrong ones, and must refuse what has no right
answer: `check_values` raises, and a compiled step gives NaN.
"""

import dataclasses
import functools
import math

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tunix.sft import peft_trainer

import diffusion_objectives as do
from diffusion_objectives.trainers import accumulate
from diffusion_objectives.trainers import tunix
from tests import cases

P = jax.sharding.PartitionSpec

# Reports of the same kinds that no test here carries over, and why.
EXCLUDED = {
  "SWivid/F5-TTS#631": "an exponential average of parameters; there is none",
  "pytorch/pytorch#73205": "label smoothing; there is none",
}


def of(table):
  """Parametrises a test over a table of cases."""
  return pytest.mark.parametrize(
    "case",
    table.values(),
    ids=[f"{name} {case['source']}" for name, case in table.items()],
  )


def split(table):
  """A table's cases with an answer, and those to be refused."""
  answered = {k: v for k, v in table.items() if "reject" not in v}
  return answered, {k: v for k, v in table.items() if "reject" in v}


def row(values, dtype=None):
  """`[1, ...]`, what a case gives as one row."""
  return np.array(values, dtype)[None]


def token_batch(case, is_supervised=None):
  weights = row(case["weights"], case.get("weights_dtype", np.float32))
  labels = row(case["labels"])
  repeat = case.get("repeat", 1)
  return do.DiffusionTokenBatch(
    model_inputs=np.zeros((1, 1), np.float32),
    target_ids=np.tile(labels, (1, repeat)),
    loss_weights=np.tile(weights, (1, repeat)),
    is_supervised=is_supervised,
  )


def logits_of(case, name="logits", dtype=np.float32):
  values = row(case[name], dtype).astype(case.get(f"{name}_dtype", dtype))
  return np.tile(values, (1, case.get("repeat", 1), 1))


def distillation_batch(case):
  labels = case.get("labels", [0] * len(case["weights"]))
  return do.DiffusionDistillationBatch(
    student_batch=token_batch({**case, "labels": labels}),
    teacher=do.DenseTeacher(logits=logits_of(case, "teacher")),
  )


def opd(case):
  return functools.partial(
    do.prepared_opd_loss,
    temperature=case["T"],
    soft_loss_weight=case["soft"],
    hard_loss_weight=case["hard"],
  )


@functools.lru_cache
def compiled(loss):
  """A step: the mean, the output, and the mean's gradient."""

  def mean(logits, batch):
    output = loss(logits, batch)
    return output.primary_loss.compute(), output

  return jax.jit(jax.value_and_grad(mean, has_aux=True))


def evaluate(loss, logits, batch):
  """Sum, denominator, mean and the mean's gradient, by a compiled step."""
  (value, output), gradient = compiled(loss)(logits, batch)
  results = {
    "sum": output.primary_loss.unreduced_sum,
    "denom": output.primary_loss.denominator,
    "mean": value,
    "grad_mean": gradient[0],
  }
  for name in ("soft", "hard"):
    metric = output.aux_metrics.get(f"distill/{name}_loss")
    if metric is not None:
      results[f"{name}_sum"] = metric.unreduced_sum
  return results


def assert_right_and_not_wrong(case, results):
  tolerance = case.get("tolerance", 1e-5)
  for name, value in case["expect"].items():
    if name in results:
      atol = 1e-7 if name.startswith("grad") else 0
      if results[name].dtype == jnp.bfloat16:  # rounded once, at the end
        value = np.array(value, jnp.bfloat16).astype(np.float64)
      np.testing.assert_allclose(
        np.float64(results[name]), value, rtol=tolerance, atol=atol
      )
  assert {"mean", "sum"} & set(case["expect"]) & set(results)
  for fault, name, value in case.get("wrong", ()):
    assert not is_near(results[name], value), fault


def is_near(result, value):
  return np.allclose(np.float64(result), value, rtol=1e-4, equal_nan=True)


def assert_refused(case, loss, logits, batch, vocabulary_size, message):
  """By the value check where values are visible, else by NaN."""
  with pytest.raises(ValueError, match=message):
    batch.check_values(vocabulary_size)
  with pytest.raises(ValueError, match=message):
    jax.tree.map(jnp.asarray, batch).check_values(vocabulary_size)
  results = evaluate(loss, logits, batch)
  assert np.isnan(results["sum"]) and np.isnan(results["mean"])
  for fault, value in case["never"]:
    assert not is_near(results["mean"], value), fault


# Weighted cross entropy.

ANSWERED, REFUSED = split(cases.WEIGHTED_CROSS_ENTROPY)


@of(ANSWERED)
def test_cross_entropy_answers_a_reported_input_rightly(case):
  batch = token_batch(case)
  logits = logits_of(case)
  batch.check_values(logits.shape[-1])
  results = evaluate(do.weighted_cross_entropy_loss, logits, batch)
  assert_right_and_not_wrong(case, results)
  assert np.all(np.isfinite(np.float32(results["grad_mean"])))
  assert results["sum"].dtype == results["denom"].dtype == jnp.float32


REFUSED_VALUES = {
  name: case
  for name, case in REFUSED.items()
  if case["reject"] in ("label-out-of-range", "weights-negative")
}


@of(REFUSED_VALUES)
def test_cross_entropy_refuses_a_reported_value(case):
  logits = logits_of(case)
  message = {
    "label-out-of-range": "active target_ids must be nonnegative and smaller",
    "weights-negative": "loss_weights must be finite and nonnegative",
  }[case["reject"]]
  assert_refused(
    case,
    do.weighted_cross_entropy_loss,
    logits,
    token_batch(case),
    logits.shape[-1],
    message,
  )


@of({k: v for k, v in REFUSED.items() if v["reject"] == "weights-shape"})
def test_weights_that_would_broadcast_are_refused(case):
  def loss(logits, labels, weights):
    batch = do.DiffusionTokenBatch(
      model_inputs=labels, target_ids=labels, loss_weights=weights
    )
    return do.weighted_cross_entropy_loss(logits, batch).primary_loss

  logits, weights = (
    np.array(case[name], np.float32) for name in ("logits", "weights")
  )
  labels = np.array(case["labels"])
  compiled_loss = jax.jit(loss)
  for run in (loss, compiled_loss):
    with pytest.raises(ValueError, match=r"^loss_weights must"):
      run(logits, labels, weights)
  if "on_request" in case:  # by broadcasting where one can see it
    metric = compiled_loss(
      logits, labels, np.broadcast_to(weights, labels.shape)
    )
    right = case["on_request"]
    np.testing.assert_allclose(metric.unreduced_sum, right["sum"], rtol=1e-6)
    np.testing.assert_allclose(metric.denominator, right["denom"], rtol=1e-6)
    np.testing.assert_allclose(metric.compute(), right["mean"], rtol=1e-6)


def test_every_refused_cross_entropy_case_is_tested():
  reasons = {case["reject"] for case in REFUSED.values()}
  assert reasons == {"label-out-of-range", "weights-negative", "weights-shape"}


# Forward KL.

KL_ANSWERED, KL_REFUSED = split(cases.FORWARD_KL)


@of(KL_ANSWERED)
def test_forward_kl_answers_a_reported_input_rightly(case):
  batch = distillation_batch(case)
  logits = logits_of(case, "student")
  batch.check_values(logits.shape[-1])
  loss = functools.partial(do.forward_kl_loss, temperature=case.get("T", 1.0))
  results = evaluate(loss, logits, batch)
  assert_right_and_not_wrong(case, results)
  assert np.all(np.isfinite(results["grad_mean"]))


def test_forward_kl_without_student_mass_has_the_gradient_q_minus_p():
  """verl-project/verl#7855: +inf, with a finite and useful gradient."""
  case = cases.FORWARD_KL["KL-07"]
  batch, logits = distillation_batch(case), logits_of(case, "student")
  results = evaluate(do.forward_kl_loss, logits, batch)
  assert results["mean"] == math.inf
  np.testing.assert_allclose(
    results["grad_mean"], [[-1 / 3, 1 / 6, 1 / 6]], rtol=1e-6
  )


def test_forward_kl_refuses_another_vocabulary():
  """microsoft/LMOps#331: neither padded nor truncated in silence."""
  case = cases.FORWARD_KL["KL-09"]
  batch, logits = distillation_batch(case), logits_of(case, "student")
  with pytest.raises(ValueError, match="must have one vocabulary"):
    batch.check_values(logits.shape[-1])
  for run in (do.forward_kl_loss, jax.jit(do.forward_kl_loss)):
    with pytest.raises(ValueError, match="must have identical shapes"):
      run(logits, batch)
  on_request = do.DiffusionDistillationBatch(
    student_batch=batch.student_batch,
    teacher=do.DenseTeacher(logits=batch.teacher.logits[..., :4]),
  )
  results = evaluate(do.forward_kl_loss, logits, on_request)
  right = case["on_request"]["mean_if_truncated_on_request"]
  np.testing.assert_allclose(results["mean"], right, rtol=1e-5)


def test_forward_kl_refuses_another_length():
  """huggingface/trl#6006: no trimming, of the numerator alone or at all."""
  case = cases.FORWARD_KL["KL-13"]

  def build(student, teacher):
    weights = jnp.asarray(row(case["weights"], np.float32))
    batch = do.DiffusionDistillationBatch(
      student_batch=do.DiffusionTokenBatch(
        model_inputs=weights,
        target_ids=jnp.zeros(weights.shape, jnp.int32),
        loss_weights=weights,
      ),
      teacher=do.DenseTeacher(logits=teacher),
    )
    return do.forward_kl_loss(student, batch)

  for run in (build, jax.jit(build)):
    with pytest.raises(ValueError, match=r"^teacher logits must match target_"):
      run(logits_of(case, "student"), logits_of(case, "teacher"))


def test_every_refused_divergence_case_is_tested():
  assert set(KL_REFUSED) == {"KL-09", "KL-13"}


@of(cases.TOP_K)
def test_a_top_k_teacher_has_a_tail(case):
  log_p, log_q = (
    np.log(np.float32([[case[name]]]))
    for name in ("teacher_probs", "student_probs")
  )
  ids = np.argsort(-log_p, axis=-1)[..., : case["k"]].astype(np.int32)
  listed = np.take_along_axis(log_p, ids, axis=-1)
  batch = do.DiffusionDistillationBatch(
    student_batch=do.DiffusionTokenBatch(
      model_inputs=log_q,
      target_ids=np.zeros((1, 1), np.int32),
      loss_weights=np.ones((1, 1), np.float32),
    ),
    teacher=do.DenseTeacher(logits=log_p),
  )
  cut = do.TopKTeacher(token_ids=ids, log_probs=listed, temperature=1.0)
  results = {
    name: evaluate(
      do.forward_kl_loss, log_q, dataclasses.replace(batch, teacher=teacher)
    )["sum"]
    for name, teacher in (("full", batch.teacher), ("sum", cut))
  }
  assert_right_and_not_wrong(case, results)


# The on-policy mix.

OPD_ANSWERED, OPD_REFUSED = split(cases.OPD)


@of(OPD_ANSWERED)
def test_the_mix_answers_a_reported_input_rightly(case):
  batch = distillation_batch(case)
  logits = logits_of(case, "student")
  batch.check_values(logits.shape[-1], check_targets=case["hard"] > 0)
  results = evaluate(opd(case), logits, batch)
  assert {"soft_sum", "hard_sum"} <= set(results)
  assert_right_and_not_wrong(case, results)


@of(OPD_REFUSED)
def test_the_mix_refuses_a_reported_setting(case):
  batch, logits = distillation_batch(case), logits_of(case, "student")
  message = "at least one of soft_loss_weight and hard_loss_weight"
  for run in (opd(case), jax.jit(opd(case))):
    with pytest.raises(ValueError, match=message):
      run(logits, batch)
  with pytest.raises(ValueError, match=message):
    tunix.configure_prepared_diffusion_opd(
      make_trainer(),
      temperature=case["T"],
      soft_loss_weight=case["soft"],
      hard_loss_weight=case["hard"],
    )


# Accumulation: by merging, and by a configured trainer. The sole parameter is
# added to the logits that a batch brings with it.


@pytest.fixture
def default_promotion():
  """Optax relies on JAX's default promotion rules."""
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    yield


class Bias(nnx.Module):
  """Adds its parameter to the logits that it is given."""

  def __init__(self, theta):
    self.theta = nnx.Param(jnp.asarray(theta))

  def __call__(self, logits):
    return logits + self.theta[...]


def make_trainer(theta=(0.0, 0.0), steps=None, optimizer=None):
  return peft_trainer.PeftTrainer(
    Bias(theta),
    optax.sgd(1.0) if optimizer is None else optimizer,
    peft_trainer.TrainingConfig(
      eval_every_n_steps=1, gradient_accumulation_steps=steps
    ),
  )


def history(trainer, name, mode="train"):
  return np.asarray(trainer.metrics_logger.get_metric_history("", name, mode))


def with_inputs(batch, logits):
  """A batch whose network input are the logits."""
  fields = {
    name: getattr(batch, name)
    for name in ("target_ids", "loss_weights", "is_supervised")
  }
  return do.DiffusionTokenBatch(model_inputs={"logits": logits}, **fields)


def micro_batches(case):
  """`(loss, [(logits, batch)], configure)` of an accumulation case."""
  if "T" in case:
    parts = [
      (logits_of(part, "student"), distillation_batch(part))
      for part in case["micro"]
    ]
    batches = [
      do.DiffusionDistillationBatch(
        student_batch=with_inputs(batch.student_batch, logits),
        teacher=batch.teacher,
      )
      for logits, batch in parts
    ]
    return opd(case), parts, batches
  parts = [(logits_of(part), token_batch(part)) for part in case["micro"]]
  batches = [with_inputs(batch, logits) for logits, batch in parts]
  return do.weighted_cross_entropy_loss, parts, batches


@of(cases.ACCUMULATED)
def test_merged_micro_batches_are_one_batch(case):
  loss, parts, _ = micro_batches(case)

  @jax.jit
  @functools.partial(jax.value_and_grad, has_aux=True)
  def merged(theta, parts):
    output = do.merge([loss(logits + theta, batch) for logits, batch in parts])
    return output.primary_loss.compute(), output.primary_loss

  theta = jnp.zeros((1, 1, parts[0][0].shape[-1]))
  (mean, metric), gradient = merged(theta, parts)
  results = {
    "sum": metric.unreduced_sum,
    "denom": metric.denominator,
    "mean": mean,
    "grad_theta": gradient[0, 0],
  }
  assert_right_and_not_wrong(case, results)


@of(cases.ACCUMULATED)
@pytest.mark.usefixtures("default_promotion")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trainer_steps_by_sums_over_denominators(case):
  _, parts, batches = micro_batches(case)
  trainer = make_trainer(np.zeros(parts[0][0].shape[-1]), len(batches))
  if "T" in case:
    tunix.configure_prepared_diffusion_opd(
      trainer,
      temperature=case["T"],
      soft_loss_weight=case["soft"],
      hard_loss_weight=case["hard"],
    )
  else:
    tunix.configure_diffusion_sft(trainer)
  trainer.train(batches)
  results = {
    "mean": history(trainer, "loss")[0],
    "grad_theta": -trainer.model.theta[...],
  }
  assert_right_and_not_wrong(
    {**case, "wrong": [x for x in case["wrong"] if x[1] in results]}, results
  )


def mesh_of(shape, names):
  kinds = (jax.sharding.AxisType.Auto,) * len(names)
  return jax.make_mesh(shape, names, axis_types=kinds)


def sharded_results(mesh, logits, batch, *, reduce):
  """Value and gradient over the mesh's first axis, by `jit` or `shard_map`."""

  def output(logits, batch):
    return do.weighted_cross_entropy_loss(logits, batch).primary_loss

  def whole(theta, logits, batch):
    metric = output(logits + theta, batch)
    return metric.compute(), metric

  def by_shard(theta, logits, batch):
    def shard(theta, logits, batch):
      gradient, metric = jax.grad(
        lambda theta: (
          (metric := output(logits + theta, batch)).unreduced_sum,
          metric,
        ),
        has_aux=True,
      )(jax.lax.pcast(theta, mesh.axis_names[0], to="varying"))
      gradient, metric = jax.lax.psum((gradient, metric), mesh.axis_names[0])
      return metric.compute(), metric, gradient / metric.denominator

    rows = P(mesh.axis_names[0])
    return jax.shard_map(
      shard, mesh=mesh, in_specs=(P(), rows, rows), out_specs=P()
    )(theta, logits, batch)

  rows = jax.sharding.NamedSharding(mesh, P(mesh.axis_names[0]))
  theta = jnp.zeros((1, 1, logits.shape[-1]))
  arguments = (theta, *jax.device_put((logits, batch), rows))
  if reduce == "shard_map":
    mean, metric, gradient = jax.jit(by_shard)(*arguments)
  else:
    f = jax.jit(jax.value_and_grad(whole, has_aux=True))
    (mean, metric), gradient = f(*arguments)
  return {
    "sum": metric.unreduced_sum,
    "denom": metric.denominator,
    "mean": mean,
    "grad_theta": gradient[0, 0],
  }


reductions = pytest.mark.parametrize("reduce", ["jit", "shard_map"])


@reductions
@of({"ACC-02": cases.ACCUMULATED["ACC-02"]})
def test_shards_add_sums_and_counts_not_means(case, reduce):
  parts = [(logits_of(part), token_batch(part)) for part in case["micro"]]
  logits, batch = jax.tree.map(lambda *rows: np.concatenate(rows), *parts)
  mesh = mesh_of((4,), ("data",))
  results = sharded_results(mesh, logits, batch, reduce=reduce)
  assert_right_and_not_wrong(case, results)


def logits_with_losses(losses):
  """`[..., 2]` logits whose cross entropy with label 1 is the given loss."""
  with np.errstate(divide="ignore"):
    first = np.log(np.expm1(np.array(losses, np.float64)))
  return np.stack([first, np.zeros_like(first)], axis=-1).astype(np.float32)


cross_entropy = jax.jit(do.weighted_cross_entropy_loss)


def batch_with_losses(losses, weights, is_supervised=None):
  """`(logits, batch)` with the given token losses and weights."""
  logits = logits_with_losses(losses)
  weights = np.array(weights, np.float32)
  return logits, do.DiffusionTokenBatch(
    model_inputs={"logits": logits},
    target_ids=np.ones(weights.shape, np.int32),
    loss_weights=weights,
    is_supervised=is_supervised,
  )


@reductions
@of(cases.MESH)
def test_replicas_do_not_count_again(case, reduce):
  # Token losses of the shards' sums and counts; the second row's is full.
  assert case["shard_sum"] == [3, 5] and case["shard_count"] == [2, 3]
  logits, batch = batch_with_losses(
    [[1, 2, 9], [1, 2, 2]], [[1, 1, 0], [1, 1, 1]]
  )
  mesh = mesh_of((2, case["replicas"]), ("data", "replica"))
  assert mesh.size == case["expect"]["devices"]
  results = sharded_results(mesh, logits, batch, reduce=reduce)
  assert_right_and_not_wrong(case, results)
  slopes = -np.expm1(-np.array([1, 2, 1, 2, 2]))  # 1 - exp(-loss)
  np.testing.assert_allclose(
    results["grad_theta"], [slopes.sum() / 5, -slopes.sum() / 5], rtol=1e-5
  )


def merged_loss(parts):
  """The cross entropy of all micro-batches together."""
  return do.merge([cross_entropy(*part) for part in parts]).primary_loss


def one_token_batches(case):
  """Micro-batches of one token whose weight is the denominator."""
  return [
    batch_with_losses([[total / count]], [[count]])
    for total, count in zip(case["sum"], case["denom"], strict=True)
  ]


@of(cases.WINDOWS)
def test_a_window_is_divided_by_what_arrived_in_it(case):
  merged = merged_loss(one_token_batches(case)[: case["window"]])
  results = {"mean": merged.compute(), "denom": merged.denominator}
  assert_right_and_not_wrong(case, results)


@of({k: v for k, v in cases.WINDOWS.items() if len(v["sum"]) > v["window"]})
@pytest.mark.usefixtures("default_promotion")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trainer_counts_over_its_own_window(case):
  batches = [batch for _, batch in one_token_batches(case)]
  trainer = make_trainer(steps=case["window"], optimizer=optax.sgd(0.0))
  tunix.configure_diffusion_sft(trainer)
  trainer.train(batches)
  results = {"mean": history(trainer, "loss")[0]}
  assert_right_and_not_wrong(case, results)


@of(cases.TWO_TERMS)
def test_two_terms_are_each_divided_once_by_their_own_denominator(case):
  def term(total, denominator):
    metric = do.WeightedMetric(unreduced_sum=total, denominator=denominator)
    return do.LossOutput(primary_loss=metric, aux_metrics={})

  def loss(theta, batch):  # linear in theta, so that the total is its gradient
    one = jnp.ones_like(batch["denom"])
    return {
      "main": term(theta * batch["sum"], batch["denom"]),
      "aux": term(theta * batch["aux_mean"], one),
    }

  coefficients = {"main": 1.0, "aux": case["coef"]}
  names = ("sum", "denom", "aux_mean")
  merged, total = accumulate.value_and_grad(loss, coefficients=coefficients)(
    jnp.float32(1), {name: np.float32(case[name]) for name in names}
  )
  results = {n: merged[n].primary_loss.compute() for n in coefficients}
  results["total"] = total
  for name, value in case["expect"].items():
    np.testing.assert_allclose(results[name], value, rtol=1e-6)
  for fault, name, value in case["wrong"]:
    assert not is_near(results[name], value), fault


def linear_objective(model, batch):
  """The sum `theta . gradients` of a batch, so that they are its gradient."""
  return do.LossOutput(
    primary_loss=do.WeightedMetric(
      unreduced_sum=jnp.sum(
        batch["gradient"] * model.theta[...], dtype=jnp.float32
      ),
      denominator=jnp.sum(batch["denominator"]),
    ),
    aux_metrics={},
  )


@of(cases.CLIP)
@pytest.mark.usefixtures("default_promotion")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trainer_accumulates_divides_and_only_then_clips(case):
  clip = optax.clip_by_global_norm(case["max_norm"])
  trainer = make_trainer(
    steps=len(case["denom"]), optimizer=optax.chain(clip, optax.sgd(1.0))
  )
  tunix.configure_objective(trainer, linear_objective)
  trainer.train(
    [
      {"gradient": row(g, np.float32), "denominator": row(d, np.float32)}
      for g, d in zip(case["grad_sum"], case["denom"], strict=True)
    ]
  )
  clipped = -trainer.model.theta[...]
  right = case["expect"]
  np.testing.assert_allclose(clipped, right["clipped"], rtol=1e-5)
  np.testing.assert_allclose(
    np.linalg.norm(clipped), right["clipped_norm"], rtol=1e-5
  )
  np.testing.assert_allclose(
    history(trainer, "grad_norm"), [right["norm"]], rtol=1e-5
  )
  for fault, _, value in case["wrong"]:
    assert not is_near(clipped, value), fault


@pytest.mark.usefixtures("default_promotion")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trainer_rounds_a_bfloat16_gradient_once():
  """AI-Hypercomputer/maxtext#5060: the reciprocal is not rounded."""
  sums = np.linspace(3, 6, 200).astype(jnp.bfloat16)
  trainer = make_trainer(np.zeros(200, jnp.bfloat16))
  tunix.configure_objective(trainer, linear_objective)
  three = np.array([3.0], np.float32)
  trainer.train([{"gradient": sums[None], "denominator": three}])
  result = -np.asarray(trainer.model.theta[...])
  right = (sums.astype(np.float32) / 3).astype(jnp.bfloat16)
  rounded = np.array(1 / 3, jnp.bfloat16).astype(np.float32)
  wrong = (sums.astype(np.float32) * rounded).astype(jnp.bfloat16)
  assert result.dtype == jnp.bfloat16 and result[0] == 1
  assert not np.array_equal(right, wrong)
  np.testing.assert_array_equal(result, right)


@of(cases.METRICS)
@pytest.mark.usefixtures("default_promotion")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_evaluation_does_not_depend_on_its_batches(case):
  parts = [
    batch_with_losses([[total / count] * count], np.ones((1, count)))
    for total, count in zip(case["sum"], case["count"], strict=True)
  ]
  trainer = make_trainer(optimizer=optax.sgd(0.0))
  tunix.configure_diffusion_sft(trainer)
  batches = [batch for _, batch in parts]
  trainer.train(batches[:1], batches)
  merged = merged_loss(parts)
  right = case["expect"]
  assert merged.denominator == right["count"]
  np.testing.assert_allclose(merged.compute(), right["loss"], rtol=1e-6)
  for name in ("loss", "perplexity"):
    values = history(trainer, name, "eval")
    np.testing.assert_allclose(values, right[name], rtol=1e-6)
    for fault, wrong_name, value in case["wrong"]:
      assert wrong_name != name or not is_near(values[0], value), fault


@of(cases.SELECTED)
def test_rows_of_length_1_do_not_multiply_across(case):
  # Token losses are nonnegative: negative values are a second term.
  values = np.array(case["value"])[:, None]
  mask = np.array(case["mask"])[:, None]

  def term(losses):
    output = cross_entropy(*batch_with_losses(losses, mask))
    return do.LossOutput(primary_loss=output.primary_loss, aux_metrics={})

  combined = do.combine(
    [term(np.maximum(values, 0)), term(np.maximum(-values, 0))], [1.0, -1.0]
  ).primary_loss
  right = case["expect"]
  np.testing.assert_allclose(combined.unreduced_sum, right["sum"], rtol=1e-6)
  assert combined.denominator == right["count"]
  np.testing.assert_allclose(combined.compute(), right["mean"], rtol=1e-6)
  for weights in (mask[:, 0], mask.T):
    with pytest.raises(ValueError, match=r"^loss_weights must"):
      do.DiffusionTokenBatch(
        model_inputs=values,
        target_ids=np.ones(values.shape, np.int32),
        loss_weights=weights,
      )


# Counts and large sums.


def exact_parts(count):
  """A count as a sum of float32 numbers."""
  high = count // 128 * 128
  parts = [high, count - high]
  assert all(int(np.float32(part)) == part for part in parts)
  return [part for part in parts if part]


@of(cases.COUNTERS)
@pytest.mark.usefixtures("default_promotion")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trainer_counts_beyond_float32_and_int32(case):
  counts = exact_parts(case["start"]) + [1] * case["add_one"]

  def objective(model, batch):
    return do.LossOutput(
      primary_loss=do.WeightedMetric(
        unreduced_sum=jnp.sum(batch["sum"]) + 0 * jnp.sum(model.theta[...]),
        denominator=jnp.sum(batch["count"]),
      ),
      aux_metrics={},
    )

  trainer = make_trainer()
  tunix.configure_objective(trainer, objective)
  one = np.ones(1, np.float32)
  data = [{"sum": one, "count": row(count, np.float32)} for count in counts]
  trainer.train(data[:1], data)
  counted = len(counts) / history(trainer, "loss", "eval")
  np.testing.assert_allclose(counted, case["expect"]["count"], rtol=1e-12)
  for fault, _, value in case["wrong"]:
    assert not np.allclose(counted, value, rtol=1e-9), fault


@of(cases.LARGE_SUM)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_a_large_sum_neither_overflows_nor_stalls(case, dtype):
  shape = (1, case["n"])
  logits, batch = batch_with_losses(
    np.full(shape, case["value"]), np.ones(shape)
  )
  batch = do.DiffusionTokenBatch(
    model_inputs=logits,
    target_ids=batch.target_ids,
    loss_weights=batch.loss_weights.astype(dtype),
  )
  results = evaluate(
    do.weighted_cross_entropy_loss, logits.astype(dtype), batch
  )
  assert_right_and_not_wrong(case, results)


def equations(jaxpr):
  for equation in jaxpr.eqns:
    yield equation
    for inner in jax.tree.leaves(
      list(equation.params.values()),
      is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"),
    ):
      inner = getattr(inner, "jaxpr", inner)
      if hasattr(inner, "eqns"):
        yield from equations(inner)


@of(cases.FLAT_INDEX)
@pytest.mark.parametrize(
  "loss", [do.weighted_cross_entropy_loss, do.forward_kl_loss]
)
def test_no_flat_index_into_the_logits_is_formed(case, loss):
  # Traced at full size, which nothing could hold: 2**31 entries and more.
  shape = (1, case["rows"], case["vocab"])
  assert math.prod(shape) == case["expect"]["elements"] > 2**31
  logits = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
  batch = do.DiffusionTokenBatch(
    model_inputs=jax.ShapeDtypeStruct(shape[:2], jnp.int32),
    target_ids=jax.ShapeDtypeStruct(shape[:2], jnp.int32),
    loss_weights=jax.ShapeDtypeStruct(shape[:2], jnp.float32),
  )
  if loss is do.forward_kl_loss:
    batch = do.DiffusionDistillationBatch(
      student_batch=batch, teacher=do.DenseTeacher(logits=logits)
    )
  traced = jax.make_jaxpr(
    jax.grad(lambda z, b: loss(z, b).primary_loss.compute())
  )(logits, batch)
  found = list(equations(traced.jaxpr))
  assert len(found) > 20
  for equation in found:
    assert "gather" not in equation.primitive.name
    assert "scatter" not in equation.primitive.name
    for variable in (*equation.invars, *equation.outvars):
      assert max((0, *variable.aval.shape)) <= case["vocab"]


# Positions.


@of(cases.ALIGNED)
def test_a_shift_is_the_callers_and_explicit(case):
  batch = token_batch({**case, "labels": case["tokens"]})
  logits = logits_of(case)
  same = cross_entropy(logits, batch).primary_loss
  later = do.DiffusionTokenBatch(
    model_inputs=logits,
    target_ids=batch.target_ids,
    loss_weights=batch.loss_weights * np.float32([[0, 1, 1, 1]]),
  )
  shifted = do.shift_right(logits)
  following = cross_entropy(shifted, later).primary_loss
  results = {
    "same_position": same.compute(),
    "same_denom": same.denominator,
    "next_token": following.compute(),
    "next_denom": following.denominator,
  }
  for name, value in case["expect"].items():
    np.testing.assert_allclose(results[name], value, rtol=1e-5)
  for fault, name, value in case["wrong"]:
    assert not is_near(results[name], value), fault


@of(cases.MASKED)
def test_a_masked_diffusion_row_is_divided_by_its_supervised_tokens(case):
  masked = np.array(case["masked"], np.float32)
  logits, batch = batch_with_losses(
    case["token_ce"],
    masked / np.float32(case["p_mask"])[:, None],
    np.array(case["supervised"], bool),
  )
  batch.check_values(2)
  results = evaluate(do.weighted_cross_entropy_loss, logits, batch)
  assert_right_and_not_wrong(case, results)
  on_request = {
    "divided by masked count": "masked",
    "divided by sum of 1/p": "weights",
  }
  for fault, name, value in case["wrong"]:
    if fault in on_request:
      loss = functools.partial(
        do.weighted_cross_entropy_loss, denominator=on_request[fault]
      )
      np.testing.assert_allclose(
        evaluate(loss, logits, batch)[name], value, rtol=1e-5
      )


# A trainer's state and configuration.


def shared_buffers(leaves):
  """Pairs of names whose arrays are one buffer: they cannot be donated."""
  seen, pairs = {}, []
  for name, leaf in leaves:
    first = seen.setdefault(leaf.unsafe_buffer_pointer(), name)
    if first != name:
      pairs.append([first, name])
  return pairs


def named_leaves(tree):
  return [
    (jax.tree_util.keystr(path), leaf)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  ]


def configured_trainer(steps=2, optimizer=None, theta=(0.0, 0.0)):
  trainer = make_trainer(theta, steps, optimizer)
  tunix.configure_objective(trainer, linear_objective)
  return trainer


def linear_batches(count, width=2):
  ones = np.ones((1, width), np.float32)
  return [{"gradient": ones, "denominator": ones[:, 0]}] * count


@of(cases.ALIASED)
@pytest.mark.usefixtures("default_promotion")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_configured_trainers_state_shares_no_buffer(case):
  buffers = {}
  aliased = [
    (name, buffers.setdefault(number, jnp.full(3, float(number))))
    for name, number in case["leaves"]
  ]
  assert shared_buffers(aliased) == case["expect"]["duplicates"]
  trainer = configured_trainer(optimizer=optax.adam(0.1))
  assert shared_buffers(named_leaves(nnx.state(trainer.optimizer))) == []
  trainer.train(linear_batches(4))  # donates it, twice
  assert trainer.train_steps == 2


def changed_dtypes(before, after):
  return [name for name in before if before[name] != after[name]]


@of(cases.DTYPES)
@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.usefixtures("default_promotion")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trainers_state_keeps_its_dtypes(case, steps):
  found = changed_dtypes(case["before"], case["after"])
  assert found == case["expect"]["changed"]
  optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
  trainer = configured_trainer(steps, optimizer, np.zeros(2, jnp.bfloat16))

  def dtypes():
    return {
      name: leaf.dtype
      for name, leaf in named_leaves(
        nnx.state((trainer.model, trainer.optimizer))
      )
    }

  before = dtypes()
  assert jnp.bfloat16 in before.values()
  trainer.train(linear_batches(4))
  assert changed_dtypes(before, dtypes()) == []


@of(cases.RESUMED)
@pytest.mark.usefixtures("default_promotion")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_resumed_run_names_what_differs(case, tmp_path):
  def trainer(**config):
    return peft_trainer.PeftTrainer(
      Bias((0.0, 0.0)),
      optax.sgd(1.0),
      peft_trainer.TrainingConfig(
        **{"eval_every_n_steps": 1, **config},
        checkpoint_root_directory=str(tmp_path),
      ),
    )

  batch = do.DiffusionDistillationBatch(
    student_batch=with_inputs(
      *batch_with_losses([[1.0]], np.ones((1, 1)))[::-1]
    ),
    teacher=do.DenseTeacher(logits=np.zeros((1, 1, 2), np.float32)),
  )
  first = trainer()
  tunix.configure_prepared_diffusion_opd(first, **case["saved"])
  first.train([batch])
  resumed = trainer(**case["may_change"])
  with pytest.raises(ValueError, match="; received") as error:
    tunix.configure_prepared_diffusion_opd(resumed, **case["now"])
  differences = str(error.value).split("; received ")[1].split("; ")
  names = [text.split(": ")[0] for text in differences]
  assert names == case["expect"]["differs"]
  tunix.configure_prepared_diffusion_opd(resumed, **case["saved"])


@of(cases.LOGGED)
def test_what_cannot_be_logged_is_refused_by_its_name(case):
  loggable = {}
  for name, shape in case["shape"].items():
    value = jnp.zeros(shape)
    if shape:
      with pytest.raises(ValueError, match=r"unreduced_sum must .*; received"):
        do.WeightedMetric(unreduced_sum=value, denominator=jnp.ones(()))
      metrics = {**loggable, name: value}
      with pytest.raises(TypeError, match=rf"aux_metrics\['{name}'\] must be"):
        do.LossOutput(primary_loss=loggable["loss"], aux_metrics=metrics)
    else:
      loggable[name] = do.WeightedMetric(
        unreduced_sum=value, denominator=jnp.ones(())
      )
  assert sorted(loggable) == case["expect"]["loggable"]
  assert (
    sorted({*case["shape"]} - {*loggable}) == (case["expect"]["not_loggable"])
  )


@of(cases.OPTIONS)
@pytest.mark.usefixtures("default_promotion")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_option_is_refused_or_has_its_effect(case):
  logits, batch = batch_with_losses([[1.0, 2.0]], np.array([[2.0, 3.0]]))
  option = case["option"]
  if "reject" in case:
    with pytest.raises(ValueError, match=f"denominator must .*{option}"):
      tunix.configure_diffusion_sft(make_trainer(), denominator=option)
    with pytest.raises(TypeError, match=option):
      tunix.configure_diffusion_sft(make_trainer(), **{option: 5.0})
    return
  output = do.weighted_cross_entropy_loss(logits, batch, denominator=option)
  total = output.primary_loss.denominator
  assert total == case["expect"]["denominator"]
  for fault, _, value in case["wrong"]:
    assert total != value, fault


def by_value(case):
  return np.array(case["tokens"]) != case["pad_id"]


def without_trailing_run(case):
  """Everything up to the last id that is not padding's."""
  return np.maximum.accumulate(by_value(case)[:, ::-1], axis=1)[:, ::-1]


@of(cases.PADDED)
def test_padding_is_what_lies_beyond_the_length(case):
  length = len(case["tokens"][0])
  lengths = np.array(case["lengths"])
  got = do.corruption.supervision_by_length(lengths, length=length)
  np.testing.assert_array_equal(got, np.array(case["expect"]["mask"], bool))
  assert got.sum() == case["expect"]["count"]
  faults = {
    "mask by value": by_value,
    "trailing run removed": without_trailing_run,
  }
  for fault, name, value in case["wrong"]:
    wrong = faults[fault](case)
    assert not np.array_equal(wrong, got)
    result = {"mask": wrong, "count": wrong.sum()}[name]
    np.testing.assert_array_equal(result, value, err_msg=fault)


@of(cases.PACKED)
def test_a_packed_row_predicts_no_token_across_a_boundary(case):
  segments, logits = row(case["segments"]), logits_of(case)
  crossing = np.ones(segments.shape, bool)
  crossing[:, 0] = False
  supervised = do.corruption.next_token_supervision(segments)
  np.testing.assert_array_equal(
    supervised[0, 1:], case["expect"]["target_weights"]
  )

  def results(weights):
    batch = token_batch(
      {"weights": weights[0], "labels": case["tokens"]}, is_supervised=weights
    )
    return evaluate(
      do.weighted_cross_entropy_loss, do.shift_right(logits), batch
    )

  right = {k: v for k, v in case["expect"].items() if k != "target_weights"}
  assert_right_and_not_wrong(
    {**case, "expect": right}, results(np.asarray(supervised))
  )
  for fault, name, value in case["wrong"]:
    np.testing.assert_allclose(
      results(crossing)[name], value, rtol=1e-5, err_msg=fault
    )


@of(cases.PACKED_MEANS)
def test_a_packed_row_is_as_many_sequences_as_it_has_segments(case):
  segments = np.array(case["segments"])
  supervised = segments > 0

  def means(segment_ids):
    """By sequence and by token, with their counts."""
    results = {}
    shares = do.corruption.sequence_weights(supervised, segment_ids)
    for name, weights, unit in (
      ("seq", shares, "sequences"),
      ("token", supervised, "tokens"),
    ):
      logits, batch = batch_with_losses(
        case["token_loss"], weights, is_supervised=supervised
      )
      batch = dataclasses.replace(batch, segment_ids=segment_ids)
      loss = functools.partial(do.weighted_cross_entropy_loss, denominator=unit)
      metric = jax.jit(loss)(logits, batch).primary_loss
      results[f"{name}_mean"] = metric.compute()
      plural = {"seq": "sequences", "token": "tokens"}[name]
      results[f"n_{plural}"] = metric.denominator
    return results

  right = means(segments)
  for name, value in case["expect"].items():
    np.testing.assert_allclose(right[name], value, rtol=1e-5)
  for fault, name, value in case["wrong"]:
    np.testing.assert_allclose(
      means(None)[name], value, rtol=1e-5, err_msg=fault
    )
