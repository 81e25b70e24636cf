"""The tree keeps its promises: who imports what, and what a loss comes with."""

import ast
import inspect
import pathlib
import re
import subprocess
import sys

import pytest

import diffusion_objectives as do
from diffusion_objectives import corruption
from diffusion_objectives import parallel_decoding
from diffusion_objectives.testing import laws
from diffusion_objectives.trainers import accumulate
from diffusion_objectives.trainers import accumulate_nnx
from diffusion_objectives.trainers import tunix

PACKAGE = "diffusion_objectives"
ROOT = pathlib.Path(do.__file__).parent
REPOSITORY = ROOT.parent
TESTS = pathlib.Path(__file__).parent

SOURCES = {
  path.relative_to(ROOT).as_posix(): path.read_text()
  for path in sorted(ROOT.rglob("*.py"))
}

# What a part may import of the package, beside itself.
BELOW = {
  "_core": set(),
  "outputs": {"_core"},
  "batches": {"_core", "outputs"},
  "divergences": {"_core"},
  "corruption": {"_core", "outputs", "batches"},
}
BELOW["objectives"] = {*BELOW}
BELOW["__init__"] = {*BELOW}
BELOW["trainers"] = {*BELOW}
BELOW["testing"] = {*BELOW} - {"trainers"}
BELOW["demo"] = {*BELOW} - {"testing"}

# What a part may import from outside, beside the standard library.
EVERYWHERE = {"jax", "numpy"}
TRAINER_STACK = {"flax", "optax", "tunix", "orbax", "grain"}
OUTSIDE = {
  "trainers": EVERYWHERE | TRAINER_STACK,
  "demo": EVERYWHERE | TRAINER_STACK | {"matplotlib"},
  "testing": EVERYWHERE | {"hypothesis", "pytest"},
}


def imports(source):
  """The dotted names that a module imports, wherever in its text."""
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      origin = "." * node.level + (node.module or "")
      yield from (f"{origin}.{alias.name}" for alias in node.names)


def part_of(names):
  """The part of the package that a dotted name lies in."""
  return names[1] if len(names) > 1 and names[1] in BELOW else "__init__"


def violations(path, source):
  """What a module of the package imports against the rules."""
  place = path.removesuffix(".py").split("/")
  part = place[0]
  for name in imports(source):
    names = name.split(".")
    if not names[0]:
      yield f"{path}: {name} is relative"
    elif names[0] != PACKAGE:
      allowed = OUTSIDE.get(part, EVERYWHERE)
      if names[0] not in allowed | sys.stdlib_module_names:
        yield f"{path}: {name} is foreign to {part}"
    elif part_of(names) not in BELOW[part] | {part}:
      yield f"{path}: {name} lies above {part}"
    elif names[1:2] == ["objectives"] == [part] and names[2:3] != place[1:2]:
      yield f"{path}: {name} is another family"


@pytest.mark.parametrize("path", SOURCES)
def test_imports_point_down_only(path):
  assert list(violations(path, SOURCES[path])) == []


@pytest.mark.parametrize(
  ("path", "source"),
  [
    ("_core/numerics.py", "from diffusion_objectives import outputs"),
    ("_core/numerics.py", "import diffusion_objectives"),
    ("_core/checks.py", "import diffusion_objectives.batches as b"),
    ("outputs.py", "from diffusion_objectives import batches"),
    ("batches.py", "from diffusion_objectives import corruption"),
    ("batches.py", "import diffusion_objectives as do"),
    ("corruption/a.py", "from diffusion_objectives.objectives import other"),
    ("objectives/one.py", "from diffusion_objectives.objectives import other"),
    ("objectives/one.py", "import diffusion_objectives.objectives.other.part"),
    ("objectives/one/head.py", "from diffusion_objectives.objectives import x"),
    ("objectives/one.py", "from diffusion_objectives.trainers import tunix"),
    ("objectives/one.py", "from diffusion_objectives import testing"),
    ("objectives/one.py", "from diffusion_objectives import merge"),
    ("__init__.py", "from diffusion_objectives import trainers"),
    ("trainers/tunix.py", "from diffusion_objectives.testing import laws"),
    ("testing/laws.py", "from diffusion_objectives.trainers import tunix"),
    ("testing/laws.py", "from flax import nnx"),
    ("objectives/one.py", "def f():\n  import optax"),
    ("objectives/one.py", "import tunix.sft.peft_trainer"),
    ("batches.py", "import orbax.checkpoint as ocp"),
    ("corruption.py", "import grain"),
    ("_core/pytree.py", "import flax"),
    ("trainers/tunix.py", "import hypothesis"),
    ("demo/run.py", "from hypothesis import given"),
    ("outputs.py", "import hypothesis.strategies as st"),
    ("outputs.py", "import scipy"),
    ("outputs.py", "from . import batches"),
    ("objectives/one.py", "from .. import batches"),
  ],
)
def test_an_import_against_the_rules_is_found(path, source):
  assert len(list(violations(path, source))) == 1


@pytest.mark.parametrize(
  ("path", "source"),
  [
    ("objectives/one.py", "from diffusion_objectives._core import numerics"),
    (
      "objectives/one/head.py",
      "from diffusion_objectives.objectives.one import x",
    ),
    ("corruption.py", "from diffusion_objectives import batches"),
    ("trainers/tunix.py", "from flax import nnx\nimport optax, functools"),
    ("demo/run.py", "from diffusion_objectives.trainers import tunix"),
    ("demo/run.py", "import diffusion_objectives as do"),
    ("testing/laws.py", "import hypothesis\nimport math"),
  ],
)
def test_an_import_within_the_rules_passes(path, source):
  assert list(violations(path, source)) == []


@pytest.mark.parametrize("module", [PACKAGE, f"{PACKAGE}.testing"])
def test_importing_the_package_imports_no_trainer_stack(module):
  script = (
    f"import sys, {module}; print(*(name for name in sorted(sys.modules) if"
    f" name in {sorted(TRAINER_STACK | {'hypothesis', 'pytest'})!r}))"
  )
  result = subprocess.run(
    [sys.executable, "-c", script],
    capture_output=True,
    text=True,
    check=True,
    cwd=REPOSITORY,
    timeout=120,
  )
  loaded = set(result.stdout.split())
  assert not loaded & TRAINER_STACK
  if module == PACKAGE:
    assert not loaded


# What a loss comes with.

EXPORTED = sorted(name for name in vars(do) if name.endswith("_loss"))


def defined_losses():
  """Every public function of a family that is named like a loss."""
  for path, source in SOURCES.items():
    if path.startswith("objectives/"):
      for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and re.fullmatch(
          r"[a-z].*_loss", node.name
        ):
          yield node.name


def test_every_loss_is_exported():
  assert "weighted_cross_entropy_loss" in EXPORTED
  assert sorted(defined_losses()) == EXPORTED


@pytest.mark.parametrize("name", EXPORTED)
def test_a_loss_has_its_row_in_the_documentation(name):
  page = REPOSITORY / "docs" / "objectives.md"
  rows = [
    line
    for line in page.read_text().splitlines()
    if line.startswith("|") and f"`{name}`" in line
  ]
  assert len(rows) >= 1


@pytest.mark.parametrize("name", EXPORTED)
def test_a_loss_has_its_law_suite(name):
  family = getattr(do, name).__module__.split(".")[2]
  path = TESTS / "objectives" / f"{family}_test.py"
  text = path.read_text()
  attributes = {
    ast.unparse(node)
    for node in ast.walk(ast.parse(text))
    if isinstance(node, ast.Attribute)
  }
  assert "laws.suite" in attributes and f"do.{name}" in attributes
  suites = [
    node
    for node in ast.parse(text).body
    if isinstance(node, ast.Assign)
    and ast.unparse(node.targets[0]).startswith("Test")
    and f"do.{name}" in ast.unparse(node.value)
  ]
  assert suites


@pytest.mark.parametrize("name", EXPORTED)
def test_a_loss_takes_a_prediction_a_batch_and_keywords(name):
  parameters = list(inspect.signature(getattr(do, name)).parameters.values())
  names = [p.name for p in parameters]
  if names[0] == "hidden":  # with the head it is the prediction
    assert names[1] == "head"
    del parameters[1], names[1]
  assert names[0] in ("logits", "prediction", "hidden", "heads")
  assert names[1] == "batch"
  assert {p.kind for p in parameters[2:]} <= {inspect.Parameter.KEYWORD_ONLY}
  assert parameters[2:]
  # Which divergence is no hyper-parameter that one value fits.
  required = [p.name for p in parameters[2:] if p.default is p.empty]
  assert required in ([], ["divergence"])
  annotation = inspect.signature(getattr(do, name)).return_annotation
  assert annotation is do.LossOutput


# Documentation in the code.


def public():
  """Every function and class that a user calls, by its dotted name."""
  named = {f"do.{name}": value for name, value in vars(do).items()}
  modules = (corruption, parallel_decoding, accumulate, accumulate_nnx, tunix)
  for module in modules:
    for name, value in vars(module).items():
      if inspect.isfunction(value) and value.__module__.startswith(
        module.__name__
      ):
        named[f"{module.__name__.split('.', 1)[1]}.{name}"] = value
  named["testing.laws.suite"] = laws.suite
  return {
    name: value
    for name, value in named.items()
    if (inspect.isfunction(value) or inspect.isclass(value))
    and not name.split(".")[-1].startswith("_")
  }


PUBLIC = public()


def test_the_public_names_are_found():
  expected = {
    "do.merge",
    "do.DenseTeacher",
    "corruption.elbo_weights",
    "trainers.accumulate.value_and_grad",
    "trainers.tunix.configure_objective",
    "testing.laws.suite",
  }
  assert expected <= set(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_an_example(name):
  text = inspect.getdoc(PUBLIC[name])
  assert re.search(r"^Example:\n.*>>> ", text, re.DOTALL | re.MULTILINE)
