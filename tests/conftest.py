"""Stricter than users: several devices, strict promotion, fixed profiles."""

import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import hypothesis
import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

hypothesis.settings.register_profile(
  "dev", max_examples=25, deadline=None, print_blob=True
)
hypothesis.settings.register_profile(
  "brief", max_examples=10, deadline=None, derandomize=True, database=None
)
hypothesis.settings.register_profile(
  "gate", max_examples=100, deadline=None, derandomize=True, database=None
)
hypothesis.settings.register_profile(
  "nightly", max_examples=1000, deadline=None
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_runtest_teardown() -> None:
  """Drops compiled programs before the process has no room for more.

  Each takes some of the memory maps of which Linux grants a process 65,530;
  beyond them the compiler crashes.
  """
  maps = pathlib.Path("/proc/self/maps")
  if maps.exists() and maps.read_bytes().count(b"\n") > 30_000:
    jax.clear_caches()
