"""Optax and Tunix's networks rely on JAX's default promotion rules."""

import jax
import pytest


@pytest.fixture(autouse=True)
def default_promotion():
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    yield
