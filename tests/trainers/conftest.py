"""Optax and Tunix's networks rely on JAX's default promotion rules."""

import importlib

import jax
import pytest

from tests.trainers import runs


@pytest.fixture(autouse=True)
def default_promotion():
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    yield


@pytest.fixture(params=runs.TRAINERS)
def trainer_module(request, monkeypatch):
  """One after the other: every trainer that the installed Tunix has."""
  module = importlib.import_module(request.param)
  monkeypatch.setattr(runs.under_test, "module", module)
  return module
