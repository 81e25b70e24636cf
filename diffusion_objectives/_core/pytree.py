"""The record decorator: checked when built, never when JAX rebuilds.

JAX rebuilds pytrees with leaves that no person would pass: `object()`, `None`,
booleans, shardings, tracers of another rank. A dataclass whose registered
unflatten runs `__post_init__` breaks `vmap`, `in_shardings`, checkpoint
restore and more. Construction and reconstruction are therefore two paths: the
constructor (and `dataclasses.replace`) runs `__post_init__`; unflatten starts
from `object.__new__` and runs nothing.
"""

import dataclasses
from typing import Any
from typing import TypeVar
from typing import dataclass_transform

import jax

_T = TypeVar("_T")


@dataclass_transform(
  kw_only_default=True, frozen_default=True, eq_default=False
)
def record(cls: type[_T]) -> type[_T]:
  """Makes `cls` a frozen, keyword-only dataclass registered as a pytree.

  A field declared with `dataclasses.field(metadata={"static": True})` is part
  of the tree's structure (hashable, compared by `jit`); every other field is a
  subtree. `__post_init__` may check and must not change.
  """
  cls = dataclasses.dataclass(frozen=True, kw_only=True, eq=False)(cls)
  fields = dataclasses.fields(cls)  # type: ignore[arg-type]
  static = tuple(f.name for f in fields if f.metadata.get("static", False))
  data = tuple(f.name for f in fields if f.name not in static)
  keys = tuple(jax.tree_util.GetAttrKey(name) for name in data)

  def flatten(obj: _T) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return (
      tuple(getattr(obj, name) for name in data),
      tuple(getattr(obj, name) for name in static),
    )

  def flatten_with_keys(obj: _T) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    children, structure = flatten(obj)
    return tuple(zip(keys, children, strict=True)), structure

  def unflatten(structure: tuple[Any, ...], children: Any) -> _T:
    obj = object.__new__(cls)
    for name, value in zip(static, structure, strict=True):
      object.__setattr__(obj, name, value)
    for name, value in zip(data, children, strict=True):
      object.__setattr__(obj, name, value)
    return obj

  jax.tree_util.register_pytree_with_keys(
    cls, flatten_with_keys, unflatten, flatten
  )
  return cls
