"""Named regressions of `cases.py` through the losses from hidden states.

Cases of logits go through a head with the identity as its kernel, so that the
hidden states are the logits and their gradient is that of the logits. A logit
of -inf, which no product has, is a bias.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffusion_objectives as do
from tests import cases
from tests import cases_test
from tests.cases_test import distillation_batch
from tests.cases_test import logits_of
from tests.cases_test import of
from tests.cases_test import token_batch

IMPLEMENTATIONS = {
  "grad_in_forward": dict(
    implementation="grad_in_forward", token_block=2, vocabulary_block=2
  ),
  "recompute": dict(
    implementation="recompute", token_block=2, vocabulary_block=2
  ),
}
everyhow = pytest.mark.parametrize(
  "how", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS
)


def split_logits(logits, weights):
  """Hidden states and a head whose logits are the given ones."""
  dtype, size = logits.dtype, logits.shape[-1]
  rows = np.float32(logits)
  is_active = np.float32(weights) != 0
  is_out = np.isneginf(rows)
  excluded = is_out[is_active].any(axis=0)
  assert is_out[is_active][:, excluded].all()  # one bias for all positions
  bias = np.where(excluded, -np.inf, 0).astype(dtype)
  rows = np.where(is_active[..., None] & is_out, 0, rows)
  return rows.astype(dtype), do.OutputHead(
    kernel=np.eye(size, dtype=np.float32).astype(dtype),
    bias=bias if excluded.any() else None,
  )


@functools.cache
def compiled(loss):
  def mean(hidden, head, batch):
    output = loss(hidden, head, batch)
    return output.primary_loss.compute(), output

  return jax.jit(jax.value_and_grad(mean, has_aux=True, argnums=(0, 1)))


CACHED = {}


def bound(loss, **options):
  """One function a loss and its options, so that it is compiled once."""
  key = (loss, tuple(sorted(options.items())))
  return CACHED.setdefault(key, functools.partial(loss, **options))


def evaluate(loss, hidden, head, batch):
  (value, output), (d_hidden, d_head) = compiled(loss)(hidden, head, batch)
  results = {
    "sum": output.primary_loss.unreduced_sum,
    "denom": output.primary_loss.denominator,
    "mean": value,
    "grad_mean": d_hidden[0],
    "grad_kernel": d_head.kernel,
  }
  for name in ("soft", "hard"):
    metric = output.aux_metrics.get(f"distill/{name}_loss")
    if metric is not None:
      results[f"{name}_sum"] = metric.unreduced_sum
  return results


def assert_right_and_not_wrong(case, results):
  """As for the losses of logits; a sum in blocks may miss 0 by its rounding."""
  right = dict(case["expect"])
  for name, value in case["expect"].items():
    if value == 0 and name in results:
      assert abs(float(results[name])) <= 1e-6, name
      right[name] = results[name]
  cases_test.assert_right_and_not_wrong({**case, "expect": right}, results)


def through(loss, case, name="logits"):
  """Hidden states, head and batch of a case."""
  batch = token_batch(case) if name == "logits" else distillation_batch(case)
  weights = getattr(batch, "student_batch", batch).loss_weights
  return (*split_logits(logits_of(case, name), weights), batch)


# Weighted cross entropy.

ANSWERED, REFUSED = cases_test.split(cases.WEIGHTED_CROSS_ENTROPY)


@everyhow
@of(ANSWERED)
def test_cross_entropy_answers_a_reported_input_rightly(case, how):
  loss = bound(do.linear_weighted_cross_entropy_loss, **how)
  hidden, head, batch = through(loss, case)
  results = evaluate(loss, hidden, head, batch)
  assert_right_and_not_wrong(case, results)
  assert np.all(np.isfinite(np.float32(results["grad_mean"])))
  assert results["sum"].dtype == results["denom"].dtype == jnp.float32


@everyhow
@of(cases_test.REFUSED_VALUES)
def test_cross_entropy_refuses_a_reported_value(case, how):
  loss = bound(do.linear_weighted_cross_entropy_loss, **how)
  results = evaluate(loss, *through(loss, case))
  assert np.isnan(results["sum"]) and np.isnan(results["mean"])
  for fault, value in case["never"]:
    assert not cases_test.is_near(results["mean"], value), fault


@of({k: v for k, v in REFUSED.items() if v["reject"] == "weights-shape"})
def test_weights_that_would_broadcast_are_refused(case):
  def loss(hidden, labels, weights):
    batch = do.DiffusionTokenBatch(
      model_inputs=labels, target_ids=labels, loss_weights=weights
    )
    head = do.OutputHead(kernel=np.eye(hidden.shape[-1], dtype=np.float32))
    return do.linear_weighted_cross_entropy_loss(hidden, head, batch)

  hidden, weights = (
    np.array(case[name], np.float32) for name in ("logits", "weights")
  )
  labels = np.array(case["labels"])
  for run in (loss, jax.jit(loss)):
    with pytest.raises(ValueError, match=r"^loss_weights must"):
      run(hidden, labels, weights)
  if "on_request" in case:
    weights = np.broadcast_to(weights, labels.shape)
    metric = jax.jit(loss)(hidden, labels, weights).primary_loss
    right = case["on_request"]
    np.testing.assert_allclose(metric.unreduced_sum, right["sum"], rtol=1e-6)
    np.testing.assert_allclose(metric.denominator, right["denom"], rtol=1e-6)


# Forward KL and the mix.

KL_ANSWERED, KL_REFUSED = cases_test.split(cases.FORWARD_KL)


@everyhow
@of(KL_ANSWERED)
def test_forward_kl_answers_a_reported_input_rightly(case, how):
  options = dict(temperature=case.get("T", 1.0), **how)
  loss = bound(do.linear_forward_kl_loss, **options)
  hidden, head, batch = through(loss, case, "student")
  results = evaluate(loss, hidden, head, batch)
  assert_right_and_not_wrong(case, results)
  assert np.all(np.isfinite(results["grad_mean"]))


@everyhow
def test_forward_kl_without_student_mass_has_the_gradient_q_minus_p(how):
  """verl-project/verl#7855: +inf, with a finite and useful gradient."""
  case = cases.FORWARD_KL["KL-07"]
  loss = bound(do.linear_forward_kl_loss, temperature=1.0, **how)
  results = evaluate(loss, *through(loss, case, "student"))
  assert results["mean"] == np.inf
  np.testing.assert_allclose(
    results["grad_mean"], [[-1 / 3, 1 / 6, 1 / 6]], rtol=1e-6
  )


def with_teacher_head(batch):
  """The dense teacher's logits as hidden states, and the identity as head."""
  logits = batch.teacher.logits
  is_out = np.isneginf(np.float32(logits))
  head = do.OutputHead(kernel=np.eye(logits.shape[-1], dtype=np.float32))
  weights = batch.student_batch.loss_weights
  if is_out[weights != 0].any():
    rows, head = split_logits(logits, weights)
  else:
    rows = logits
  teacher = do.HiddenTeacher(hidden=rows.astype(np.float32))
  return dataclasses.replace(batch, teacher=teacher), head


@of(KL_ANSWERED)
def test_forward_kl_answers_rightly_from_a_teachers_hidden_states(case):
  how = IMPLEMENTATIONS["grad_in_forward"]
  options = dict(temperature=case.get("T", 1.0), **how)
  loss = bound(do.linear_forward_kl_loss, **options)
  hidden, head, batch = through(loss, case, "student")
  batch, teacher_head = with_teacher_head(batch)
  loss = functools.partial(loss, teacher_head=teacher_head)
  results = evaluate(loss, hidden, head, batch)
  assert_right_and_not_wrong(case, results)


@pytest.mark.parametrize("teacher", ["dense", "hidden"])
def test_forward_kl_refuses_another_vocabulary(teacher):
  """microsoft/LMOps#331: neither padded nor truncated in silence."""
  case = cases.FORWARD_KL["KL-09"]
  hidden, head, batch = through(None, case, "student")
  options = {}
  if teacher == "hidden":
    batch, options["teacher_head"] = with_teacher_head(batch)
  loss = functools.partial(do.linear_forward_kl_loss, **options)
  for run in (loss, jax.jit(loss)):
    with pytest.raises(ValueError, match=r" must .*; received"):
      run(hidden, head, batch)


def test_forward_kl_refuses_another_length():
  """huggingface/trl#6006: no trimming, of hidden states either."""
  case = cases.FORWARD_KL["KL-13"]
  teacher = do.HiddenTeacher(hidden=logits_of(case, "teacher"))
  batch = token_batch({**case, "labels": [0, 0, 0, 0]})
  with pytest.raises(ValueError, match=r"^teacher hidden must match target_"):
    do.DiffusionDistillationBatch(student_batch=batch, teacher=teacher)


@everyhow
@of(cases.TOP_K)
def test_a_top_k_teacher_has_a_tail(case, how):
  log_p, log_q = (
    np.log(np.float32([[case[name]]]))
    for name in ("teacher_probs", "student_probs")
  )
  ids = np.argsort(-log_p, axis=-1)[..., : case["k"]].astype(np.int32)
  batch = do.DiffusionDistillationBatch(
    student_batch=do.DiffusionTokenBatch(
      model_inputs=log_q,
      target_ids=np.zeros((1, 1), np.int32),
      loss_weights=np.ones((1, 1), np.float32),
    ),
    teacher=do.DenseTeacher(logits=log_p),
  )
  cut = do.TopKTeacher(
    token_ids=ids,
    log_probs=np.take_along_axis(log_p, ids, axis=-1),
    temperature=1.0,
  )
  hidden, head = split_logits(log_q, np.ones((1, 1)))
  loss = bound(do.linear_forward_kl_loss, temperature=1.0, **how)
  results = {
    name: evaluate(
      loss, hidden, head, dataclasses.replace(batch, teacher=teacher)
    )["sum"]
    for name, teacher in (("full", batch.teacher), ("sum", cut))
  }
  cases_test.assert_right_and_not_wrong(case, results)


OPD_ANSWERED, OPD_REFUSED = cases_test.split(cases.OPD)


def mix(case, how):
  return bound(
    do.linear_prepared_opd_loss,
    temperature=case["T"],
    soft_loss_weight=case["soft"],
    hard_loss_weight=case["hard"],
    **how,
  )


@everyhow
@of(OPD_ANSWERED)
def test_the_mix_answers_a_reported_input_rightly(case, how):
  loss = mix(case, how)
  results = evaluate(loss, *through(loss, case, "student"))
  assert {"soft_sum", "hard_sum"} <= set(results)
  assert_right_and_not_wrong(case, results)


@of(OPD_REFUSED)
def test_the_mix_refuses_a_reported_setting(case):
  loss = mix(case, {})
  arguments = through(loss, case, "student")
  message = "at least one of soft_loss_weight and hard_loss_weight"
  for run in (loss, jax.jit(loss)):
    with pytest.raises(ValueError, match=message):
      run(*arguments)


@everyhow
@of(cases.ACCUMULATED)
def test_merged_micro_batches_are_one_batch(case, how):
  """What is added to all logits is the head's bias."""
  is_mix = "T" in case
  loss = (
    mix(case, how)
    if is_mix
    else bound(do.linear_weighted_cross_entropy_loss, **how)
  )
  name = "student" if is_mix else "logits"
  parts = [through(loss, part, name) for part in case["micro"]]

  @jax.jit
  @functools.partial(jax.value_and_grad, has_aux=True)
  def merged(theta, parts):
    output = do.merge(
      [
        loss(hidden, dataclasses.replace(head, bias=theta), batch)
        for hidden, head, batch in parts
      ]
    )
    return output.primary_loss.compute(), output.primary_loss

  (mean, metric), gradient = merged(jnp.zeros(parts[0][1].size), parts)
  results = {
    "sum": metric.unreduced_sum,
    "denom": metric.denominator,
    "mean": mean,
    "grad_theta": gradient,
  }
  cases_test.assert_right_and_not_wrong(case, results)


# Heads.


@everyhow
@of(cases.SOFT_CAPPED)
def test_padding_is_left_out_after_the_soft_cap(case, how):
  logits = logits_of(case)
  width = case["expect"]["physical_width"]
  assert width == case["padded_to"]
  size = logits.shape[-1]
  kernel = np.eye(size, width, dtype=np.float32)
  loss = bound(do.linear_weighted_cross_entropy_loss, **how)
  for layout in ("features_vocabulary", "vocabulary_features"):
    head = do.OutputHead(
      kernel=kernel if layout == "features_vocabulary" else kernel.T,
      layout=layout,
      soft_cap=case["cap"],
      vocabulary_size=size,
    )
    assert head.columns == width and head.size == size
    results = evaluate(loss, logits, head, token_batch(case))
    assert_right_and_not_wrong(case, results)


@pytest.mark.parametrize("vocabulary_block", [None, 1])
@of(cases.CHUNKED)
def test_a_chunk_of_tokens_is_a_matter_of_memory_alone(case, vocabulary_block):
  chunk = case["chunk"]
  length = len(case["labels"])
  assert -(-length // chunk) == case["expect"]["n_chunks"]
  for implementation in ("grad_in_forward", "recompute"):
    for token_block in (chunk, 1, length, None):
      loss = bound(
        do.linear_weighted_cross_entropy_loss,
        implementation=implementation,
        token_block=token_block,
        vocabulary_block=vocabulary_block,
      )
      results = evaluate(loss, *through(loss, case))
      assert_right_and_not_wrong(case, results)


@everyhow
@of(cases.LINEAR)
def test_a_heads_gradient_has_each_tokens_own_weight(case, how):
  hidden = np.float32([case["hidden"]])
  rows = np.float32(case["head"])
  loss = bound(do.linear_weighted_cross_entropy_loss, **how)
  for layout in ("features_vocabulary", "vocabulary_features"):
    is_tied = layout == "vocabulary_features"
    head = do.OutputHead(kernel=rows if is_tied else rows.T, layout=layout)
    results = evaluate(loss, hidden, head, token_batch(case))
    gradient = results["grad_kernel"]
    results["grad_head"] = gradient if is_tied else gradient.T
    results["grad_hidden"] = results["grad_mean"]
    results["grad_head_abs"] = jnp.sum(jnp.abs(gradient))
    assert_right_and_not_wrong(case, results)


@everyhow
@pytest.mark.parametrize("is_sharded", [False, True], ids=["one", "two"])
@of(cases.SHARDED_VOCABULARY)
def test_a_padded_shard_of_the_vocabulary(case, is_sharded, how):
  """Two devices have three columns each, the last one of them padding."""
  widths = [len(shard[0]) for shard in case["shards"]]
  assert widths == [3, 3] and case["real_width"] == [3, 2]
  hidden = np.concatenate(case["shards"], axis=-1)[None].astype(np.float32)
  head = do.OutputHead(
    kernel=np.eye(6, dtype=np.float32), vocabulary_size=sum(case["real_width"])
  )
  loss = bound(do.linear_weighted_cross_entropy_loss, **how)
  mesh = jax.make_mesh(
    (1 + is_sharded,),
    ("tensor",),
    axis_types=(jax.sharding.AxisType.Auto,),
    devices=jax.devices()[: 1 + is_sharded],
  )
  with jax.set_mesh(mesh):
    results = evaluate(loss, hidden, head, token_batch(case))
  assert not results["grad_mean"][:, 5:].any()
  assert not results["grad_kernel"][:, 5:].any()
  results["grad_mean"] = results["grad_mean"][:, :5]
  assert_right_and_not_wrong(case, results)


def test_every_case_of_a_vocabulary_is_tested():
  tables = (
    cases.SOFT_CAPPED,
    cases.CHUNKED,
    cases.LINEAR,
    cases.SHARDED_VOCABULARY,
    cases.WEIGHTED_CROSS_ENTROPY,
  )
  found = {name for table in tables for name in table if "VOC" in name}
  assert found == {f"VOC-0{i}" for i in range(1, 6)}
