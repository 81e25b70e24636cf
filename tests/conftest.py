"""Stricter than users: several devices, strict promotion, fixed profiles."""

import os

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
  "gate", max_examples=100, deadline=None, derandomize=True, database=None
)
hypothesis.settings.register_profile(
  "nightly", max_examples=1000, deadline=None
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
