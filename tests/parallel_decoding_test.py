"""Grid, partitions, trajectory and teacher target, against float64 NumPy."""

from fractions import Fraction
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_objectives.objectives.parallel_decoding import partitions
from diffusion_objectives.objectives.parallel_decoding import schedule
from diffusion_objectives.objectives.parallel_decoding import teacher
from diffusion_objectives.objectives.parallel_decoding import trajectory

FlowSchedule = schedule.FlowSchedule
BOTH = {"video": 12.0, "audio": 3.0}


# The oracle: subtraction of exact fractions' noise levels, in float64.


def sigma(u, shift, end=0.999):
  z = u / end
  return end * shift * z / (1 + (shift - 1) * z)


def nodes(count, end=0.999):
  return np.array([end * (1 - j / count) for j in range(count + 1)])


# Schedule.


@pytest.mark.parametrize(
  ("shift", "sigmas", "increments"),
  [
    (
      12.0,
      [0.999, 0.972, 0.922153846154, 0.7992, 0],
      [-0.027, -0.049846153846, -0.122953846154, -0.7992],
    ),
    (
      3.0,
      [0.999, 0.8991, 0.74925, 0.4995, 0],
      [-0.0999, -0.14985, -0.24975, -0.4995],
    ),
  ],
)
def test_noise_levels_of_four_intervals(shift, sigmas, increments):
  flow = FlowSchedule(4, {"x": shift})
  np.testing.assert_allclose(flow.sigmas["x"], sigmas, atol=5e-13)
  np.testing.assert_allclose(flow.increments["x"], increments, atol=5e-13)


def test_noise_levels_of_thirty_two_intervals():
  flow = FlowSchedule(32, BOTH)
  expected = {
    "video": [0.999, 0.98724706, 0.972, 0.63094737, 0],
    "audio": [0.999, 0.95359091, 0.8991, 0.2997, 0],
  }
  for name, levels in expected.items():
    found = flow.sigmas[name][[0, 4, 8, 28, 32]]
    np.testing.assert_allclose(found, levels, atol=5e-9)


@pytest.mark.parametrize("shift", [0.2, 1.0, 3.0, 12.0, 100.0])
@pytest.mark.parametrize("count", [2, 5, 32, 256])
def test_laws_of_the_noise_level(count, shift):
  flow = FlowSchedule(count, {"x": shift})
  levels, widths = flow.sigmas["x"], flow.increments["x"]
  np.testing.assert_allclose(levels, sigma(nodes(count), shift), atol=1e-15)
  assert levels[0] == pytest.approx(0.999, abs=4e-16) and levels[-1] == 0
  np.testing.assert_allclose(widths.sum(), -0.999, atol=4e-15)
  assert (widths < 0).all()
  np.testing.assert_allclose(np.diff(levels), widths, atol=4e-15)
  np.testing.assert_allclose(
    flow.base_time("x", levels), flow.nodes, atol=4e-15
  )
  step = 1e-6
  inner = flow.nodes[1:-1]
  slope = (flow.sigma(inner + step)["x"] - flow.sigma(inner - step)["x"]) / (
    2 * step
  )
  np.testing.assert_allclose(flow.slope(inner)["x"], slope, rtol=2e-5)


def test_shifts_compose_by_their_product():
  inner = FlowSchedule(8, {"x": 3.0})
  outer = FlowSchedule(8, {"x": 4.0})
  both = FlowSchedule(8, {"x": 12.0})
  np.testing.assert_allclose(
    outer.sigma(inner.sigmas["x"])["x"], both.sigmas["x"], atol=1e-15
  )


def exact_increments(count, shift):
  """By rational arithmetic."""
  end, c = Fraction(999, 1000), Fraction(shift)
  levels = []
  for j in range(count + 1):
    z = 1 - Fraction(j, count)
    levels.append(end * c * z / (1 + (c - 1) * z))
  return np.array([float(b - a) for a, b in itertools.pairwise(levels)])


def test_increments_are_exact_where_subtraction_is_not():
  flow = FlowSchedule(256, {"x": 12.0})
  exact = exact_increments(256, 12)
  relative = np.abs(flow.increments["x"] / exact - 1).max()
  assert relative < 1e-15
  rounded = flow.increments["x"].astype(np.float32)
  assert np.abs(rounded / exact - 1).max() < 6e-8
  subtracted = np.diff(flow.sigmas["x"].astype(np.float32))
  assert np.abs(subtracted / exact - 1).max() > 1e-4


def test_a_fixed_point_of_one_cuts_the_first_level():
  one = FlowSchedule(128, {"x": 5.0}, fixed_point="one")
  end = FlowSchedule(128, {"x": 5.0})
  v = nodes(128)
  expected = np.minimum(0.999, 5 * v / (1 + 4 * v))
  np.testing.assert_allclose(one.sigmas["x"], expected, atol=2e-16)
  np.testing.assert_allclose(one.increments["x"], np.diff(expected), atol=1e-15)
  gap = np.abs(one.sigmas["x"] - end.sigmas["x"]).max()
  assert gap == pytest.approx(8.0e-4, abs=5e-6)
  assert one.increments["x"][0] == pytest.approx(-0.000773, abs=5e-7)
  assert end.increments["x"][0] == pytest.approx(-0.001571, abs=5e-7)


def test_a_schedule_is_static():
  one, other = FlowSchedule(4, BOTH), FlowSchedule(4, dict(BOTH))
  assert one == other and hash(one) == hash(other)
  assert FlowSchedule(4, {"x": 2.0}) != FlowSchedule(4, {"x": 3.0})
  traced = []

  @functools.partial(jax.jit, static_argnums=0)
  def first(flow, x):
    traced.append(flow)
    return x * jnp.float32(flow.sigmas["video"][1])

  first(one, jnp.float32(1)), first(other, jnp.float32(1))
  assert len(traced) == 1


@pytest.mark.parametrize(
  ("kind", "arguments", "message"),
  [
    (TypeError, (True, BOTH), "intervals must be an int; received"),
    (TypeError, (4.0, BOTH), "intervals must be an int; received"),
    (ValueError, (1, BOTH), "intervals must be at least 2; received 1"),
    (TypeError, (4, [3.0]), "shifts must be a mapping .*; received list"),
    (ValueError, (4, {}), "shifts must name a modality; received none"),
    (TypeError, (4, {1: 3.0}), "shifts must have string keys; received int"),
    (ValueError, (4, {"x": 0.0}), "must be positive; received 0.0"),
    (ValueError, (4, {"x": -1.0}), "must be positive; received -1.0"),
    (TypeError, (4, {"x": "3"}), "must be a finite real scalar; received str"),
    (ValueError, (4, {"x": math.inf}), "finite real scalar; received inf"),
  ],
)
def test_a_wrong_schedule_is_refused(kind, arguments, message):
  with pytest.raises(kind, match=message):
    FlowSchedule(*arguments)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"end": 0.0}, "end must be positive; received 0.0"),
    ({"end": 1.5}, "end must be at most 1; received 1.5"),
    ({"fixed_point": "two"}, "must be one of .*; received 'two'"),
    ({"fixed_point": "one"}, "must come with one modality.*; received"),
  ],
)
def test_a_wrong_option_of_a_schedule_is_refused(options, message):
  with pytest.raises(ValueError, match=message):
    FlowSchedule(4, BOTH, **options)


def test_an_interval_of_no_length_is_refused():
  """Of many fine intervals at a large shift, more than the first is cut."""
  with pytest.raises(ValueError, match="must be finite and negative; received"):
    FlowSchedule(1000, {"x": 12.0}, fixed_point="one")


# Partitions.


@pytest.mark.parametrize(
  ("intervals", "blocks", "expected"),
  [
    (32, 8, list(range(0, 33, 4))),
    (32, 6, [0, 5, 10, 16, 21, 26, 32]),
    (32, 5, [0, 6, 12, 19, 25, 32]),
    (32, 3, [0, 10, 21, 32]),
    (10, 3, [0, 3, 6, 10]),
    (128, 3, [0, 42, 85, 128]),
    (5, 2, [0, 2, 5]),
  ],
)
def test_balanced_partitions(intervals, blocks, expected):
  assert list(partitions.partition(intervals, blocks)) == expected


def test_widths_differ_by_one_at_most():
  for intervals in range(2, 60):
    for blocks in range(1, intervals + 1):
      widths = np.diff(partitions.partition(intervals, blocks))
      assert widths.max() == -(-intervals // blocks)
      assert widths.min() == intervals // blocks
  assert max(np.diff(partitions.partition(256, 40))) == 7


def test_nodes_of_ones_own_hold_for_their_number_alone():
  own = {2: np.array([0, 3, 8])}
  assert partitions.partition(8, 2, own) == (0, 3, 8)
  assert partitions.partition(8, 4, own) == (0, 2, 4, 6, 8)


@pytest.mark.parametrize(
  ("kind", "arguments", "options", "message"),
  [
    (TypeError, (True, 1), {}, "intervals must be an int"),
    (ValueError, (1, 1), {}, "intervals must be at least 2"),
    (TypeError, (8, True), {}, "blocks must be an int"),
    (ValueError, (8, 0), {}, "blocks must be positive"),
    (ValueError, (8, 9), {}, "blocks must be at most the 8 intervals"),
    (TypeError, (8, 2, [0, 4, 8]), {}, "nodes must be a mapping"),
    (TypeError, (8, 2, {2: "048"}), {}, "nodes must be integers"),
    (TypeError, (8, 2, {2: [0.0, 4.0, 8.0]}), {}, "nodes must be integers"),
    (TypeError, (8, 1, {1: [False, True]}), {}, "nodes must be integers"),
    (ValueError, (8, 2, {2: [0, 8]}), {}, r"must have shape \(3,\)"),
    (ValueError, (8, 2, {2: [1, 4, 8]}), {}, "must rise from 0 to 8"),
    (ValueError, (8, 2, {2: [0, 4, 7]}), {}, "must rise from 0 to 8"),
    (ValueError, (8, 3, {3: [0, 4, 4, 8]}), {}, "must rise from 0 to 8"),
    (ValueError, (8, 2), {"largest": 3}, "more than 3 intervals"),
  ],
)
def test_a_wrong_partition_is_refused(kind, arguments, options, message):
  with pytest.raises(kind, match=f"{message}.*; received"):
    partitions.partition(*arguments, **options)


@pytest.mark.parametrize(
  ("sizes", "message"),
  [
    ((5, 4), "must be at most block_size_max; received 5 and 4"),
    ((4, 40), "at most the 32 intervals; received 40"),
    ((5, 8), "must divide the 32 intervals; received 5"),
    ((0, 8), "block_size_min must be positive; received 0"),
  ],
)
def test_wrong_block_sizes_are_refused(sizes, message):
  with pytest.raises(ValueError, match=message):
    partitions.block_sizes(32, *sizes)


def test_the_law_of_starts_and_heads():
  """Chi-square of 400,000 draws against the joint law."""
  intervals, low, high, draws = 32, 4, 12, 400_000
  keys = jax.random.split(jax.random.key(3))
  starts = partitions.sample_starts(
    keys[0], draws, intervals=intervals, block_size_min=low
  )
  heads = jax.jit(
    functools.partial(
      partitions.sample_heads, intervals=intervals, block_size_max=high
    )
  )(keys[1], starts)
  expected = np.zeros((intervals, intervals))
  for start in range(0, intervals, low):
    end = min(start + high, intervals)
    expected[start, start:end] = low / intervals / (end - start)
  marginal = expected.sum(axis=0)[::low] * 8
  np.testing.assert_allclose(
    marginal, [1 / 12, 2 / 12, *[3 / 12] * 4, 0.2917, 0.4583], atol=5e-5
  )
  found = np.zeros((intervals, intervals))
  np.add.at(found, (np.asarray(starts), np.asarray(heads)), 1)
  assert not found[expected == 0].any()
  possible = expected > 0
  chi_square = (
    (found - draws * expected)[possible] ** 2 / (draws * expected[possible])
  ).sum()
  freedom = possible.sum() - 1
  assert freedom == 83
  assert abs(chi_square - freedom) < 4 * math.sqrt(2 * freedom)


def test_a_segment_confines_the_head():
  starts = jnp.array([0, 4, 8] * 500)
  ends = jnp.array([3, 6, 9] * 500)
  heads = partitions.sample_heads(
    jax.random.key(0),
    starts,
    intervals=32,
    block_size_max=8,
    segment_end=ends,
  )
  for start, end in ((0, 3), (4, 6), (8, 9)):
    drawn = heads[starts == start]
    assert set(drawn.tolist()) == set(range(start, end))


# Trajectory.


GOLDEN = FlowSchedule(4, BOTH)
STATE = {"video": jnp.ones((1, 1)), "audio": jnp.ones((1, 1))}
HEADS = {
  "video": jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 4, 1),
  "audio": jnp.array([1.0, -1.0, 2.0, 0.0]).reshape(1, 4, 1),
}


def test_golden_advances():
  moved = trajectory.advance_block(GOLDEN, STATE, HEADS, 0, jnp.array([2]))
  np.testing.assert_allclose(moved["video"], [[0.873307692308]], rtol=1e-7)
  np.testing.assert_allclose(moved["audio"], [[1.04995]], rtol=1e-7)
  moved = trajectory.advance_block(GOLDEN, STATE, HEADS, 0, 4)
  np.testing.assert_allclose(moved["video"], [[-2.692353846154]], rtol=1e-6)
  np.testing.assert_allclose(moved["audio"], [[0.55045]], rtol=1e-6)
  fused = {
    name: jnp.einsum("j,bjc->bc", jnp.asarray(w, jnp.float32), HEADS[name])
    for name, w in trajectory.block_weights(GOLDEN, 0, 4).items()
  }
  np.testing.assert_allclose(fused["video"], [[3.696049896050]], rtol=1e-6)
  np.testing.assert_allclose(fused["audio"], [[0.45]], rtol=1e-6)
  again = trajectory.advance_fused(GOLDEN, STATE, fused, 0, 4)
  for name in BOTH:
    np.testing.assert_allclose(again[name], moved[name], rtol=1e-6)


def random_problem(rows=5, count=32, seed=0):
  rng = np.random.default_rng(seed)
  flow = FlowSchedule(count, BOTH)
  shapes = {"video": (3, 2), "audio": (7,)}
  state = {n: rng.standard_normal((rows, *s)) for n, s in shapes.items()}
  heads = {n: rng.standard_normal((rows, count, *s)) for n, s in shapes.items()}
  return flow, state, heads


def advanced(state, heads, starts, ends, count=32):
  """One interval after the other, in float64."""
  moved = {name: x.copy() for name, x in state.items()}
  for name, shift in BOTH.items():
    levels = sigma(nodes(count), shift)
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
      for j in range(start, end):
        step = levels[j + 1] - levels[j]
        moved[name][row] += step * heads[name][row, j]
  return moved


STARTS, ENDS = [0, 4, 31, 12, 8], [32, 5, 32, 12, 20]


@pytest.mark.parametrize("is_compiled", [False, True])
def test_each_row_has_a_block_of_its_own(is_compiled):
  flow, state, heads = random_problem()
  expected = advanced(state, heads, STARTS, ENDS)

  def advance(state, heads, start, end):
    return trajectory.advance_block(flow, state, heads, start, end)

  given = (
    *jax.tree.map(jnp.float32, (state, heads)),
    jnp.array(STARTS),
    jnp.array(ENDS),
  )
  moved = (jax.jit(advance) if is_compiled else advance)(*given)
  for name in BOTH:
    np.testing.assert_allclose(moved[name], expected[name], atol=1e-6)
    np.testing.assert_array_equal(moved[name][3], given[0][name][3])
  with jax.enable_x64(True):
    moved = advance(state, heads, np.array(STARTS), np.array(ENDS))
    for name in BOTH:
      np.testing.assert_allclose(moved[name], expected[name], atol=1e-13)


def test_heads_outside_of_a_block_may_hold_anything():
  flow, state, heads = random_problem()
  given = jax.tree.map(jnp.float32, (state, heads))
  clean = trajectory.advance_block(
    flow, *given, np.array(STARTS), np.array(ENDS)
  )
  intervals = np.arange(32)
  is_outside = (intervals < np.array(STARTS)[:, None]) | (
    intervals >= np.array(ENDS)[:, None]
  )
  for poison in (np.nan, np.inf, 1e30):
    spoilt = {
      name: jnp.where(
        is_outside.reshape(5, 32, *(1,) * (x.ndim - 2)), poison, x
      )
      for name, x in given[1].items()
    }

    def total(heads):
      moved = trajectory.advance_block(
        flow, given[0], heads, np.array(STARTS), np.array(ENDS)
      )
      return sum(jnp.sum(x) for x in moved.values()), moved

    gradient, moved = jax.grad(total, has_aux=True)(spoilt)
    for name in BOTH:
      np.testing.assert_array_equal(moved[name], clean[name])
      assert np.isfinite(gradient[name]).all()
      assert not np.asarray(gradient[name])[is_outside].any()


def test_a_window_of_heads_is_enough():
  flow, state, heads = random_problem()
  given = jax.tree.map(jnp.float32, (state, heads))
  window = {name: x[:, 8:20] for name, x in given[1].items()}
  start, end = np.array([8, 9, 12, 19, 8]), np.array([20, 9, 13, 20, 8])
  whole = trajectory.advance_block(flow, *given, start, end)
  part = trajectory.advance_block(
    flow, given[0], window, start, end, head_offset=8
  )
  for name in BOTH:
    np.testing.assert_allclose(part[name], whole[name], atol=1e-6)


@pytest.mark.parametrize(("start", "end"), [(7, 12), (8, 21), (12, 10)])
def test_a_block_that_heads_do_not_cover_is_refused(start, end):
  flow, state, heads = random_problem()
  window = {name: jnp.float32(x[:, 8:20]) for name, x in heads.items()}
  state = jax.tree.map(jnp.float32, state)
  starts, ends = np.full(5, 8), np.full(5, 20)
  starts[1], ends[1] = start, end
  advance = functools.partial(
    trajectory.advance_block, flow, state, window, head_offset=8
  )
  with pytest.raises(
    ValueError, match=r"must lie within the heads .*; received"
  ):
    advance(starts, ends)
  moved = jax.jit(advance)(starts, ends)
  for x in moved.values():
    assert np.isnan(x[1]).all() and np.isfinite(np.delete(x, 1, 0)).all()


def test_a_block_at_once_is_one_interval_after_the_other():
  flow, state, heads = random_problem()
  with jax.enable_x64(True):
    for start in range(0, 32, 5):
      for end in range(start + 1, 33, 4):
        moved = trajectory.advance_block(flow, state, heads, start, end)
        weights = trajectory.block_weights(flow, start, end)
        velocity = {
          name: np.tensordot(
            heads[name][:, start:end], weights[name], axes=(1, 0)
          )
          for name in BOTH
        }
        fused = trajectory.advance_fused(flow, state, velocity, start, end)
        for name in BOTH:
          np.testing.assert_allclose(fused[name], moved[name], atol=1e-14)
          assert weights[name].sum() == pytest.approx(1, abs=1e-15)
          assert (weights[name] > 0).all()


def test_a_fused_layer_gives_the_mean_of_its_heads():
  flow = FlowSchedule(8, BOTH)
  rng = np.random.default_rng(0)
  kernel, bias = rng.standard_normal((6, 8, 3)), rng.standard_normal((8, 3))
  features = rng.standard_normal((4, 6))
  heads = np.einsum("bf,fjc->bjc", features, kernel) + bias
  weights = trajectory.block_weights(flow, 2, 7)["video"]
  fused = trajectory.fuse_head_parameters(
    flow,
    "video",
    {"kernel": jnp.float32(kernel), "bias": jnp.float32(bias)},
    2,
    7,
  )
  found = features @ np.asarray(fused["kernel"]) + np.asarray(fused["bias"])
  expected = np.einsum("j,bjc->bc", weights, heads[:, 2:7])
  np.testing.assert_allclose(found, expected, atol=2e-6)
  low = trajectory.fuse_head_parameters(flow, "video", jnp.bfloat16(bias), 2, 7)
  assert low.dtype == jnp.bfloat16


def test_a_running_state_is_at_least_float32():
  """64 heads in bfloat16 are summed in float32."""
  flow = FlowSchedule(64, {"x": 5.0})
  rng = np.random.default_rng(0)
  state = jnp.bfloat16(rng.standard_normal((2, 50)))
  heads = jnp.bfloat16(rng.standard_normal((2, 64, 50)))
  moved = trajectory.advance_block(flow, {"x": state}, {"x": heads}, 0, 64)["x"]
  assert moved.dtype == jnp.float32
  expected = np.float64(state) + np.einsum(
    "j,bjc->bc", exact_increments(64, 5), np.float64(heads)
  )
  np.testing.assert_allclose(moved, expected, atol=1e-6)


@pytest.mark.parametrize(
  ("kind", "changes", "message"),
  [
    (TypeError, {"state": 3}, "state must be a mapping"),
    (ValueError, {"state": {"video": STATE["video"]}}, "must have the modali"),
    (
      TypeError,
      {"state": {**STATE, "audio": jnp.ones((1, 1), jnp.int32)}},
      r"state\['audio'\] must be a floating-point array",
    ),
    (
      ValueError,
      {"state": {**STATE, "audio": jnp.ones((2, 1))}},
      "state must have one batch size",
    ),
    (
      ValueError,
      {"heads": {**HEADS, "audio": jnp.ones((1, 4, 2))}},
      r"heads\['audio'\] must have the shape of state",
    ),
    (
      ValueError,
      {"heads": {**HEADS, "audio": jnp.ones((1, 3, 1))}},
      "heads must be as many for each modality",
    ),
    (ValueError, {"head_offset": 1}, "heads must lie within the 4 intervals"),
    (ValueError, {"head_offset": -1}, "heads must lie within the 4 intervals"),
    (TypeError, {"start": jnp.zeros(1)}, "start must have integer dtype"),
    (ValueError, {"end": jnp.ones(2, jnp.int32)}, "end must share the batch"),
  ],
)
def test_a_wrong_advance_is_refused(kind, changes, message):
  arguments = {
    "state": STATE,
    "heads": HEADS,
    "start": 0,
    "end": 2,
    "head_offset": 0,
    **changes,
  }
  with pytest.raises(kind, match=f"{message}.*; received"):
    trajectory.advance_block(GOLDEN, **arguments)


@pytest.mark.parametrize(("start", "end"), [(2, 2), (3, 1), (0, 5)])
def test_a_static_block_has_to_rise(start, end):
  with pytest.raises(ValueError, match="must rise within 0 to 4; received"):
    trajectory.block_weights(GOLDEN, start, end)


@pytest.mark.parametrize("index", [3, np.array([0, 31, 5])])
def test_previews_of_a_straight_path_are_its_data(index):
  flow = FlowSchedule(32, BOTH)
  rng = np.random.default_rng(0)
  data, noise = ({n: rng.standard_normal((3, 2)) for n in BOTH} for _ in "ab")

  def at(indices):
    levels = {n: flow.sigmas[n][indices].reshape(-1, 1) for n in BOTH}
    return {n: (1 - levels[n]) * data[n] + levels[n] * noise[n] for n in BOTH}

  with jax.enable_x64(True):
    direction = {n: noise[n] - data[n] for n in BOTH}
    found = trajectory.data_from_head(flow, at(index), direction, index)
    chord = trajectory.data_from_points(flow, at(4), at(9), 4, 9)
    last = trajectory.data_from_points(flow, at(4), noise, 4, 32)
  for name in BOTH:
    np.testing.assert_allclose(found[name], data[name], atol=1e-14)
    np.testing.assert_allclose(chord[name], data[name], atol=1e-12)
    np.testing.assert_allclose(last[name], noise[name], atol=1e-13)


def test_a_preview_beyond_the_grid_is_nan():
  state = {name: jnp.ones((3, 1)) for name in BOTH}
  index = jnp.array([-1, 4, 5])
  found = trajectory.data_from_head(GOLDEN, state, state, index)
  for x in found.values():
    assert np.isnan(x[:, 0]).tolist() == [True, False, True]


# The teacher's target.


def gaussian(levels):
  """Directions of data N(m, s^2): linear in the state, nonlinear in time.

  With `x = (1 - sigma) x0 + sigma noise`, the mean of `noise - x0` given `x`.
  """

  def predict(state, time):
    given = {}
    for name, x in state.items():
      mean, spread, shift = levels[name]
      s = sigma(time, shift).reshape(-1, *(1,) * (x.ndim - 1))
      variance = ((1 - s) * spread) ** 2 + s**2
      slope = (s - (1 - s) * spread**2) / variance
      given[name] = -mean + slope * (x - (1 - s) * mean)
    return given

  return predict


def flowed(level, x, start, end):
  """The closed form: standardised, a Gaussian's path stays where it is."""
  mean, spread, shift = level

  def spread_at(u):
    s = sigma(u, shift)
    return np.sqrt(((1 - s) * spread) ** 2 + s**2), (1 - s) * mean

  (scale0, mean0), (scale1, mean1) = spread_at(start), spread_at(end)
  return mean1 + (x - mean0) * scale1 / scale0


LEVELS = {"video": (0.7, 0.5, 12.0), "audio": (-0.3, 0.8, 3.0)}


def decoded(solver, count, shifts, clock=None):
  """Root mean square error of the state after all fine steps."""
  flow = FlowSchedule(count, shifts)
  levels = {name: (*LEVELS[name][:2], shift) for name, shift in shifts.items()}
  rng = np.random.default_rng(0)
  with jax.enable_x64(True):
    state = {name: rng.standard_normal((6, 4)) for name in shifts}
    expected = {
      name: flowed(levels[name], x, flow.nodes[0], 0.0)
      for name, x in state.items()
    }

    @jax.jit
    def step(k, state):
      target = teacher.teacher_target(
        gaussian(levels),
        flow,
        state,
        jnp.full(6, k),
        solver=solver,
        stage_clock=clock,
      )
      return {
        name: x + jnp.asarray(flow.increments[name])[k] * target[name]
        for name, x in state.items()
      }

    moved = jax.lax.fori_loop(
      0, count, step, {n: jnp.asarray(x) for n, x in state.items()}
    )
  squares = [
    np.square(np.asarray(moved[name]) - expected[name]) for name in shifts
  ]
  return math.sqrt(np.mean(squares))


@pytest.mark.parametrize(
  ("solver", "shifts", "order"),
  [
    ("euler", {"video": 1.0}, 1),
    ("heun", {"video": 1.0}, 2),
    ("rk4", {"video": 1.0}, 4),
    ("euler", BOTH, 1),
    ("midpoint", BOTH, 2),
    ("midpoint_corrected", BOTH, 3),  # more than 2: this flow is linear
    ("heun", BOTH, 2),
    ("rk4", BOTH, 4),
  ],
)
def test_the_order_of_a_solver(solver, shifts, order):
  errors = [decoded(solver, count, shifts) for count in (128, 256, 512)]
  rates = np.log2(np.divide(errors[:-1], errors[1:]))
  print(solver, len(shifts), errors, rates)
  assert errors[-1] < 1e-1
  np.testing.assert_allclose(rates, order, atol=0.2)


@pytest.mark.parametrize("shifts", [{"video": 5.0}, BOTH])
@pytest.mark.parametrize(
  "solver", ["euler", "midpoint", "midpoint_corrected", "heun"]
)
def test_straight_paths_are_exact(solver, shifts):
  flow = FlowSchedule(8, shifts)
  rng = np.random.default_rng(0)
  direction = {name: rng.standard_normal((8, 3)) for name in shifts}
  with jax.enable_x64(True):
    target = teacher.teacher_target(
      lambda state, time: direction,
      flow,
      {name: rng.standard_normal((8, 3)) for name in shifts},
      np.arange(8),
      solver=solver,
    )
  for name in shifts:
    np.testing.assert_allclose(target[name], direction[name], atol=1e-15)


@pytest.mark.parametrize(
  ("solver", "video", "audio"),
  [
    ("euler", 0.873307692308, 1.04995),
    ("midpoint", 0.834023592438, 0.937567851786),
    ("midpoint_corrected", 0.819619422485, 0.918837493750),
    ("heun", 0.819619422485, 0.918837493750),
  ],
)
def test_golden_targets(solver, video, audio):
  with jax.enable_x64(True):
    state = {
      "video": np.array([[0.873307692308]]),
      "audio": np.array([[1.04995]]),
    }
    target = teacher.teacher_target(
      lambda state, time: dict(state),
      GOLDEN,
      state,
      np.array([2]),
      solver=solver,
      stage_clock="base",
    )
  np.testing.assert_allclose(target["video"], [[video]], atol=2e-12)
  np.testing.assert_allclose(target["audio"], [[audio]], atol=2e-12)


def test_stages_come_at_their_times():
  flow = FlowSchedule(32, {"x": 12.0})
  times = []

  def predict(state, time):
    times.append(float(time[0]))
    return dict(state)

  def seen(**options):
    times.clear()
    with jax.enable_x64(True):
      teacher.teacher_target(
        predict, flow, {"x": np.ones((1, 1))}, np.array([31]), **options
      )
    return list(times)

  first, last = flow.nodes[31], flow.nodes[32]
  halfway = sigma(first, 12.0) / 2
  base = (first + last) / 2
  in_sigma = flow.base_time("x", halfway)
  assert seen() == [first]
  assert seen(solver="heun") == [first, last]
  assert seen(solver="midpoint") == pytest.approx([first, in_sigma])
  assert seen(solver="midpoint", stage_clock="base") == [first, base]
  assert seen(solver="rk4") == [first, base, base, last]
  share = (sigma(first, 12.0) - sigma(base, 12.0)) / sigma(first, 12.0)
  assert share == pytest.approx(0.4267, abs=5e-5)


def test_guidance_is_at_every_stage_and_free_at_one():
  flow = FlowSchedule(8, {"x": 3.0})
  calls = []

  def conditional(state, time):
    calls.append("with")
    return {"x": 2 * state["x"]}

  def unconditional(state, time):
    calls.append("without")
    return {"x": state["x"] - 1}

  state = {"x": jnp.ones((1, 1))}
  index = jnp.array([3])
  plain = teacher.guided(conditional, unconditional, 1.0)
  teacher.teacher_target(plain, flow, state, index, solver="heun")
  assert calls == ["with"] * 2
  calls.clear()
  both = teacher.guided(conditional, unconditional, 3.0)
  found = teacher.teacher_target(both, flow, state, index, solver="heun")
  assert calls == ["with", "without"] * 2
  # 3 (2 x) - 2 (x - 1) = 4 x + 2, at both stages.
  w = exact_increments(8, 3)[3]
  first = 4 * 1 + 2
  expected = (first + 4 * (1 + w * first) + 2) / 2
  np.testing.assert_allclose(found["x"], [[expected]], rtol=1e-6)
  with pytest.raises(ValueError, match=r"must be given unless .*; received 3"):
    teacher.guided(conditional, None, 3.0)
  with pytest.raises(ValueError, match="scale must be positive; received 0"):
    teacher.guided(conditional, unconditional, 0.0)


def test_no_gradient_passes_through_the_teacher():
  flow = FlowSchedule(8, {"x": 3.0})

  def total(scale):
    target = teacher.teacher_target(
      lambda state, time: {"x": scale * state["x"]},
      flow,
      {"x": scale * jnp.ones((2, 1))},
      jnp.array([0, 7]),
      solver="rk4",
    )
    return jnp.sum(target["x"])

  assert float(total(2.0)) != float(total(3.0))
  assert float(jax.grad(total)(2.0)) == 0


def test_an_index_beyond_the_intervals_is_refused():
  flow = FlowSchedule(8, {"x": 3.0})

  def target(index):
    return teacher.teacher_target(
      lambda state, time: dict(state), flow, {"x": jnp.ones((3, 1))}, index
    )

  index = jnp.array([0, 8, -1])
  with pytest.raises(ValueError, match="at least 0 and below 8; received"):
    target(index)
  found = jax.jit(target)(index)["x"][:, 0]
  assert np.isnan(found).tolist() == [False, True, True]


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"solver": "rk2"}, "solver must be one of .*; received 'rk2'"),
    ({"stage_clock": "u"}, "stage_clock must be None or .*; received 'u'"),
    ({"stage_clock": "sigma"}, "must come with one shift .*; received"),
  ],
)
def test_a_wrong_rule_is_refused(options, message):
  with pytest.raises(ValueError, match=message):
    teacher.teacher_target(
      lambda state, time: dict(state), GOLDEN, STATE, jnp.array([0]), **options
    )


@pytest.mark.parametrize(
  ("kind", "changes", "message"),
  [
    (TypeError, {"state": 1.0}, "state must be a mapping"),
    (ValueError, {"state": {"video": jnp.ones((1, 1))}}, "state must have the"),
    (ValueError, {"index": jnp.array([0, 1])}, "index must share the batch"),
    (TypeError, {"index": jnp.ones(1)}, "index must have integer dtype"),
    (TypeError, {"predict": 3}, "predict must be callable"),
    (
      ValueError,
      {"predict": lambda state, time: {"video": state["video"]}},
      "what predict returns must have the modalities",
    ),
    (
      ValueError,
      {"predict": lambda state, time: {n: jnp.ones((1, 2)) for n in state}},
      "what predict returns.* must match state",
    ),
  ],
)
def test_a_wrong_state_or_prediction_is_refused(kind, changes, message):
  arguments = {
    "predict": lambda state, time: dict(state),
    "state": STATE,
    "index": jnp.array([0]),
    **changes,
  }
  with pytest.raises(kind, match=f"{message}.*; received"):
    teacher.teacher_target(flow=GOLDEN, **arguments)


def test_few_steps_by_exact_heads_are_the_fine_steps():
  """Heads that are the teacher's targets along their own trajectory."""
  flow = FlowSchedule(32, BOTH)
  rng = np.random.default_rng(0)
  with jax.enable_x64(True):
    noise = {name: rng.standard_normal((3, 2)) for name in BOTH}

    def heads_from(state, start, end):
      """Targets one after the other, each at the state that they lead to."""
      rows, at = {name: [] for name in BOTH}, dict(state)
      for k in range(start, end):
        target = teacher.teacher_target(
          gaussian(LEVELS), flow, at, np.full(3, k), solver="midpoint"
        )
        at = trajectory.advance_fused(flow, at, target, k, k + 1)
        for name in BOTH:
          rows[name].append(target[name])
      return {name: jnp.stack(rows[name], axis=1) for name in BOTH}

    def velocity(state, start, end):
      weights = trajectory.block_weights(flow, start, end)
      heads = heads_from(state, start, end)
      return {
        name: jnp.tensordot(heads[name], weights[name], axes=(1, 0))
        for name in BOTH
      }

    fine, few = (
      trajectory.sample(flow, velocity, noise, partitions.partition(32, blocks))
      for blocks in (32, 4)
    )
  for name in BOTH:
    np.testing.assert_allclose(few[name], fine[name], atol=1e-13)
