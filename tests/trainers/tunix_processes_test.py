"""A configured trainer in two processes is that of one device."""

from tests import processes


def test_two_processes_train_as_one_device(trainer_module, tmp_path):
  name = trainer_module.__name__
  expected = processes.alone("hooked", module=name)
  for case, found in processes.joined("hooked", tmp_path, name).items():
    processes.assert_same(case, found, expected[case[1]])
