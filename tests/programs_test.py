"""The counts of compiled programs, on programs whose counts are known."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import pytest

from benchmarks import _programs

X, Y = jnp.ones((16, 8)), jnp.ones((8, 4))
FLOP = 2 * 16 * 8 * 4
MESH = {"x": 4, "y": 2}


def text_of(function, *operands):
  return jax.jit(function).lower(*operands).compile().as_text()


def mapped(function, array):
  """The text of a function of one shard."""
  spec = P("x")
  mesh = jax.make_mesh(
    tuple(MESH.values()),
    tuple(MESH),
    axis_types=(jax.sharding.AxisType.Auto,) * len(MESH),
  )
  return text_of(
    jax.shard_map(
      function, mesh=mesh, in_specs=spec, out_specs=P(), check_vma=False
    ),
    jax.device_put(array, NamedSharding(mesh, spec)),
  )


def line(opcode, returned, groups):
  """A program of one collective."""
  return (
    "HloModule m, num_partitions=8\n\n"
    "ENTRY %main (p: f32[]) -> f32[] {\n"
    f"  ROOT %c = {returned} {opcode}(%p), channel_id=1,"
    f" replica_groups={groups}, to_apply=%add\n}}\n"
  ).replace(", to_apply=%add", "")


# Products.


def test_one_product():
  assert _programs.count(text_of(jnp.matmul, X, Y)).flop == FLOP


def test_a_product_in_a_fusion():
  def function(x, y):
    return jnp.exp(x @ jnp.tanh(y)) + 1

  assert _programs.count(text_of(function, X, Y)).flop == FLOP


def test_a_product_of_two_axes_in_a_batch():
  def function(x, y):
    return jnp.einsum("abij,aijk->abk", x, y)

  text = text_of(function, jnp.ones((3, 5, 4, 6)), jnp.ones((3, 4, 6, 2)))
  assert _programs.count(text).flop == 2 * 3 * 5 * 24 * 2


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_product_in_16_bits(dtype):
  text = text_of(jnp.matmul, X.astype(dtype), Y.astype(dtype))
  assert _programs.count(text).flop == FLOP


def test_loops_within_loops():
  def inner(x, _):
    return jnp.tanh(x @ jnp.ones((8, 8))), None

  def outer(x, _):
    return lax.scan(inner, x, length=5)[0], None

  text = text_of(lambda x: lax.scan(outer, x, length=7)[0], X)
  assert _programs.count(text).flop == 35 * 2 * 16 * 8 * 8


def test_a_loop_of_unknown_length():
  def function(n, x):
    return lax.fori_loop(0, n, lambda _, x: x @ jnp.ones((8, 8)), x)

  text = text_of(function, jnp.int32(3), X)
  assert _programs.count(text, dynamic_trips=3).flop == 3 * 2 * 16 * 8 * 8
  assert _programs.count(text, dynamic_trips=0).flop == 0
  with pytest.raises(ValueError, match="dynamic_trips must be given"):
    _programs.count(text)


def test_the_branch_with_the_most_operations():
  def function(i, x, y):
    def twice(x, y):
      return jnp.tanh(x @ y) @ y.T @ y

    return lax.switch(i, [jnp.matmul, twice, lambda x, y: x[:, :4]], x, y)

  text = text_of(function, jnp.int32(1), X, Y)
  assert " conditional(" in text
  assert _programs.count(text).flop == 3 * FLOP


# Collectives.


def test_a_sum_over_an_axis():
  counts = _programs.count(mapped(lambda x: lax.psum(x, "x"), X))
  assert counts.sent == {"all-reduce": 2 * 3 / 4 * 4 * 4 * 8}
  assert (counts.flop, counts.collectives, counts.largest) == (0, 1, 32)


def test_a_sum_over_all_axes():
  counts = _programs.count(mapped(lambda x: lax.psum(x, ("x", "y")), X))
  assert counts.sent == {"all-reduce": 2 * 7 / 8 * 4 * 4 * 8}


def test_a_gather_and_its_transpose():
  def function(x):
    whole = lax.all_gather(x, "x", tiled=True)
    return lax.psum_scatter(jnp.tanh(whole), "x", tiled=True)

  counts = _programs.count(mapped(function, X))
  part = 3 / 4 * 4 * 16 * 8
  assert counts.sent == {"all-gather": part, "reduce-scatter": part}
  assert (counts.collectives, counts.largest) == (2, 16 * 8)


def test_an_exchange_and_a_shift():
  def function(x):
    shifted = lax.ppermute(x, "x", [(i, (i + 1) % 4) for i in range(4)])
    return lax.all_to_all(jnp.tanh(shifted), "x", 0, 0, tiled=True)

  counts = _programs.count(mapped(function, X))
  assert counts.sent == {"collective-permute": 128, "all-to-all": 96}


def test_a_sum_within_a_loop():
  def function(x):
    return lax.scan(
      lambda x, _: (jnp.tanh(lax.psum(x, "y")), None), x, length=6
    )[0]

  counts = _programs.count(mapped(function, X))
  assert counts.sent == {"all-reduce": 6 * 4 * 4 * 8}
  assert counts.collectives == 6


def test_a_product_whose_contracted_axis_is_split():
  """A device's part of the work, and the sum that the compiler adds."""
  mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
  at = functools.partial(NamedSharding, mesh)
  text = (
    jax.jit(
      jnp.matmul,
      in_shardings=(at(P(None, "x")), at(P("x"))),
      out_shardings=at(P()),
    )
    .lower(jnp.ones((16, 64)), jnp.ones((64, 4)))
    .compile()
    .as_text()
  )
  counts = _programs.count(text)
  assert counts.flop == 2 * 16 * 8 * 4
  assert counts.sent == {"all-reduce": 2 * 7 / 8 * 4 * 16 * 4}


@pytest.mark.parametrize(
  ("groups", "size"),
  [
    ("{}", 8),
    ("{{0,1,2,3,4,5,6,7}}", 8),
    ("{{0,2},{1,3},{4,6},{5,7}}", 2),
    ("[2,4]<=[8]", 4),
    ("[4,2]<=[2,4]T(1,0)", 2),
    ("[2,4]<=[2,2,2]T(1,0,2)", 4),
    ("mesh['a'=4,'b'=1,'c'=2] {'a'}", 4),
    ("mesh['a'=4,'b'=1,'c'=2] {'a','c'}", 8),
  ],
)
def test_groups_in_every_form(groups, size):
  text = line("all-gather", "(bf16[8,6]{1,0}, pred[8]{0})", groups)
  counts = _programs.count(text)
  assert counts.sent == {"all-gather": (2 * 48 + 8) * (size - 1) / size}
  assert counts.largest == 48


def test_what_cannot_be_read_is_refused():
  with pytest.raises(ValueError, match="replica_groups have an unknown form"):
    _programs.count(line("all-gather", "f32[8]", "strange"))
  for opcode in ("custom-call", "all-gather-start", "collective-broadcast"):
    with pytest.raises(ValueError, match="must not hold"):
      _programs.count(line(opcode, "f32[8]", "{}"))
  with pytest.raises(ValueError, match="with an ENTRY"):
    _programs.count("")
