"""Every documented snippet runs, and the tables name what exists."""

import doctest
import importlib
import pathlib
import pkgutil
import re

import jax
import pytest

import diffusion_objectives
from diffusion_objectives.testing import laws
from diffusion_objectives.trainers import tunix

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPET = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
MODULES = [
  module.name
  for module in pkgutil.walk_packages(
    diffusion_objectives.__path__, "diffusion_objectives."
  )
  if not module.name.endswith("__main__")
]


@pytest.fixture(autouse=True)
def default_promotion():
  """What a reader has: JAX's default promotion rules."""
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    yield


def first_column(page, pattern=r"`([^`]+)`"):
  """The names in backticks in the first column of a page's tables."""
  text = (ROOT / "docs" / page).read_text()
  rows = re.findall(r"^\| *(`.*?) *\|", text, re.MULTILINE)
  return [name for row in rows for name in re.findall(pattern, row)]


@pytest.mark.parametrize(
  "page", [p for p in PAGES if SNIPPET.search(p.read_text())], ids=str
)
def test_the_snippets_of_a_page_run_in_order(page):
  """Snippets of a page share names; law suites that they define must hold."""
  namespace = {"__name__": "snippet"}
  for snippet in SNIPPET.findall(page.read_text()):
    exec(compile(snippet, str(page), "exec"), namespace)
  for name, value in list(namespace.items()):
    if name.startswith("Test"):
      for test in dir(value):
        if test.startswith("test_"):
          getattr(value, test)()


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_run(name):
  failures, _ = doctest.testmod(importlib.import_module(name))
  assert failures == 0


def test_links_lead_somewhere():
  for page in PAGES:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
      assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_laws_are_listed_in_their_order():
  assert first_column("testing.md") == [law.__name__ for law in laws.LAWS]


def test_every_touched_attribute_is_listed():
  listed = first_column("trainers.md")
  expected = {"_diffusion_objective"}.union(
    *({*g.attributes, *g.signatures} for g in tunix.GENERATIONS)
  )
  assert expected <= set(listed)
  assert len(listed) == len(set(listed))
