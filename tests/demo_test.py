"""The demonstration: a tiny run, killed, continued and refused."""

import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("tunix")

with warnings.catch_warnings():
  warnings.simplefilter("ignore")  # Tunix imports names JAX has deprecated
  from diffusion_objectives.demo import __main__ as demo
  from diffusion_objectives.demo import canvases
  from diffusion_objectives.demo import run
  from diffusion_objectives.demo import text
  from diffusion_objectives.demo import training

STEPS = 3
TINY = ("--quick", "--steps", str(STEPS))
ROOT = pathlib.Path(__file__).resolve().parent.parent


def start(folder, cache, *options):
  """The demonstration in a process of its own, as users run it."""
  environment = dict(os.environ)
  # One device, and little time spent on making tiny programs fast.
  environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
  environment["PYTHONPATH"] = str(ROOT)
  # What a run compiled, the next one reads.
  environment["JAX_COMPILATION_CACHE_DIR"] = str(cache)
  environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
  return subprocess.Popen(
    [
      *(sys.executable, "-m", "diffusion_objectives.demo"),
      *(*TINY, *options, "--output", str(folder)),
    ],
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
  return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, cache):
  """A run that nobody interrupted: its folder and what it printed."""
  folder = tmp_path_factory.mktemp("runs") / "whole"
  process = start(folder, cache)
  out, err = process.communicate()
  assert process.returncode == 0, err
  return folder, out


def contents(folder):
  return {
    path.relative_to(folder): (path.read_bytes(), path.stat().st_mtime_ns)
    for path in folder.rglob("*")
    if path.is_file()
  }


def test_run_makes_its_files_and_a_finite_table(finished):
  folder, out = finished
  assert {path.name for path in folder.iterdir()} == {
    *(run.SETTINGS, run.LOG, run.RESULTS, run.CURVES, run.SAMPLES),
    *run.PHASES,
  }
  figures = json.loads((folder / run.RESULTS).read_text())["figures"]
  assert list(figures) == [
    *("unigram", "bigram", "teacher", "student, untrained"),
    *("student, supervised", "student, distilled"),
  ]
  for name, values in figures.items():
    assert len(values) == (3 if name.startswith("student") else 1)
    assert all(math.isfinite(v) and v > 0 for v in values.values())
    for value in values.values():
      assert f"{value:.4f}" in out
  assert (folder / run.CURVES).read_bytes().startswith(b"\x89PNG")
  for phase in run.PHASES:
    assert phase in out  # progress


def test_log_has_each_step_once(finished):
  folder, _ = finished
  rows = run.rows(folder)
  for phase in run.PHASES:
    last = 3 * STEPS if phase == "teacher" else STEPS
    steps = [
      row["step"]
      for row in rows
      if row["phase"] == phase and row["kind"] == "step"
    ]
    assert steps == list(range(1, last + 1))
    measured = [
      row["step"]
      for row in rows
      if row["phase"] == phase and row["kind"] == "measurement"
    ]
    assert measured == list(range(last + 1))
  assert sum(row["phase"] == "results" for row in rows) == 6


def test_killed_and_continued_equals_uninterrupted(finished, cache, tmp_path):
  folder = tmp_path / "killed"
  process = start(folder, cache)
  deadline = time.monotonic() + 120
  while not any(
    row["phase"] == "distilled" and row["step"] >= 2 for row in run.rows(folder)
  ):
    assert process.poll() is None and time.monotonic() < deadline
    time.sleep(0.02)
  process.send_signal(signal.SIGKILL)
  process.communicate()
  assert not (folder / run.RESULTS).exists()
  with (folder / run.LOG).open("a") as log:
    log.write('{"phase": "disti')  # a row that the kill cut off
  process = start(folder, cache)
  _, err = process.communicate()
  assert process.returncode == 0, err
  whole, _ = finished
  assert run.rows(folder) == run.rows(whole)
  for name in (run.RESULTS, run.SAMPLES):
    assert (folder / name).read_text() == (whole / name).read_text()


def test_finished_run_prints_its_table_again(finished, capsys):
  folder, out = finished
  before = contents(folder)
  demo.main([*TINY, "--output", str(folder)])
  assert capsys.readouterr().out in out
  assert contents(folder) == before


def test_another_runs_folder_is_refused_untouched(finished, capsys):
  folder, _ = finished
  before = contents(folder)
  with pytest.raises(SystemExit):
    demo.main([*TINY, "--seed", "1", "--output", str(folder)])
  error = " ".join(capsys.readouterr().err.split())
  assert "output must be a folder that is new, empty or of a run" in error
  assert "with seed=0, not 1" in error
  assert contents(folder) == before


@pytest.mark.parametrize("name", ["notes.txt", run.LOG])
def test_foreign_files_are_refused_untouched(name, tmp_path, capsys):
  (tmp_path / name).write_text("mine")
  before = contents(tmp_path)
  with pytest.raises(SystemExit):
    demo.main([*TINY, "--output", str(tmp_path)])
  assert f"received {tmp_path} with {name!r}" in capsys.readouterr().err
  assert contents(tmp_path) == before


def test_file_as_output_is_refused(tmp_path, capsys):
  path = tmp_path / "file"
  path.write_text("mine")
  with pytest.raises(SystemExit):
    demo.main([*TINY, "--output", str(path)])
  assert f"received the file {path}" in capsys.readouterr().err


def test_checkpoint_that_the_log_does_not_reach_is_discarded(tmp_path):
  for step in (2, 4):
    (tmp_path / "teacher" / str(step)).mkdir(parents=True)
  for step in (1, 2, 3):
    run.append(tmp_path, {"phase": "teacher", "kind": "step", "step": step})
  training.discard_unlogged(tmp_path, "teacher")
  assert [p.name for p in (tmp_path / "teacher").iterdir()] == ["2"]
  assert not (tmp_path / run.DISCARDED).exists()


def test_text_is_split_without_overlap():
  corpus = text.load()
  trained = set(b"".join(corpus.training).splitlines())
  held_out = b"".join(corpus.held_out).splitlines()
  assert len(held_out) > 400
  assert trained.isdisjoint(held_out)
  assert max(map(max, corpus.training + corpus.held_out)) < text.MASK_ID
  assert corpus.digest == text.load().digest


def test_windows_stay_within_their_block():
  blocks = (bytes(range(text.LENGTH + 2)), b"\x7f" * text.LENGTH, b"short")
  ids = text.windows(blocks, stride=2)
  np.testing.assert_array_equal(ids[:, 0], [0, 2, 127])
  np.testing.assert_array_equal(ids[1], np.arange(2, text.LENGTH + 2))


def test_unigram_and_bigram_of_a_counted_string():
  # Counts plus one over {0, 1}: 0 three times, 1 twice; 0 -> 1 twice and
  # 0 -> 0 once, 1 -> 0 once.
  nll = text.markov_nll((b"\0\0\1\0\1",), np.array([[0, 1, 0, 0]]), size=2)
  zero, one = math.log(7 / 4), math.log(7 / 3)
  assert nll["unigram"] == pytest.approx((3 * zero + one) / 4)
  pairs = math.log(5 / 3) + math.log(3 / 2) + math.log(5 / 2)
  assert nll["bigram"] == pytest.approx((zero + pairs) / 4)


def test_printable_is_one_line():
  ids = np.array([ord("a"), 10, ord("\\"), 7, text.MASK_ID])
  assert text.printable(ids) == "a\\n\\\\\\x07\u2588"


def uniform_student(canvas):
  return jnp.zeros((*canvas.shape, text.VOCABULARY_SIZE))


@pytest.fixture(scope="module")
def roll_out():
  return jax.jit(
    lambda ids, index: canvases.roll_out(
      uniform_student, ids, index, seed=3, denoising_steps=4
    )
  )


@pytest.fixture(scope="module")
def windows():
  return np.random.default_rng(0).integers(
    0, text.MASK_ID, (8, text.LENGTH), np.int32
  )


def test_canvas_depends_on_its_own_index_alone(roll_out, windows):
  index = jnp.arange(8, dtype=jnp.int32) + 16
  canvas = roll_out(windows, index)
  np.testing.assert_array_equal(canvas, roll_out(windows, index))
  order = np.random.default_rng(1).permutation(8)
  np.testing.assert_array_equal(
    canvas[order], roll_out(windows[order], index[order])
  )
  assert (canvas != roll_out(windows, index + 8)).any()


def test_canvases_are_part_text_part_student_part_hidden(windows):
  ids = np.resize(windows, (512, text.LENGTH))
  canvas = canvases.roll_out(
    uniform_student,
    ids,
    jnp.arange(512, dtype=jnp.int32),
    seed=0,
    denoising_steps=4,
  )
  is_hidden = np.asarray(canvas == text.MASK_ID)
  is_kept = np.asarray(canvas == ids)
  # Half is hidden, a third kept, a sixth drawn; 1 draw in 128 is the text.
  assert is_hidden.mean() == pytest.approx(0.5, abs=0.01)
  assert is_kept.mean() == pytest.approx(0.335, abs=0.02)
  shares = np.sort(is_hidden.mean(axis=1))
  assert shares[0] < 0.05 and shares[-1] > 0.95


def test_denoising_changes_hidden_positions_alone(windows):
  order = jnp.asarray(
    np.random.default_rng(2).random(windows.shape, np.float32)
  )
  hidden = jnp.where(order < 0.6, text.MASK_ID, windows)
  keys = jax.random.split(jax.random.key(0), 8)

  def denoise(stop):
    return canvases.denoise(
      uniform_student,
      hidden,
      order,
      jnp.full(8, 0.6),
      jnp.full(8, stop),
      keys,
      3,
    )

  partly = np.asarray(denoise(0.2))
  was_hidden = np.asarray(hidden == text.MASK_ID)
  np.testing.assert_array_equal(partly[~was_hidden], windows[~was_hidden])
  is_hidden = partly == text.MASK_ID
  assert (is_hidden <= was_hidden).all()
  np.testing.assert_array_equal(is_hidden, np.asarray(order) < 0.2)
  assert not (np.asarray(denoise(0.0)) == text.MASK_ID).any()


def test_data_adapter_is_a_function_of_the_index(windows):
  adapter = canvases.data_adapter(canvases.equal_batch, seed=0)
  first = adapter({"ids": windows, "index": np.arange(8)})
  again = adapter({"ids": windows, "index": np.arange(8)})
  other = adapter({"ids": windows, "index": np.arange(8, 16)})
  jax.tree.map(np.testing.assert_array_equal, first, again)
  noisy = first.model_inputs["input_tokens"]
  assert (noisy != other.model_inputs["input_tokens"]).any()
  np.testing.assert_array_equal(first.loss_weights, noisy == text.MASK_ID)
