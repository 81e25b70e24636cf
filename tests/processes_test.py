"""A step of one's own in two processes is that of one device."""

import jax
import pytest

from tests import processes


@pytest.fixture(autouse=True)
def default_promotion():
  """Optax relies on it."""
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    yield


def test_two_processes_train_as_one_device(tmp_path):
  expected = processes.alone("plain")
  for case, found in processes.joined("plain", tmp_path).items():
    processes.assert_same(case, found, expected[case[1]])
