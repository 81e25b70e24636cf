"""Static checks, in one message form: what must hold; what was received.

Wrong types and dtypes raise `TypeError`, all else `ValueError`. A check reads
type, dtype and shape alone, so it says the same for a NumPy array, a device
array, a tracer and a `jax.ShapeDtypeStruct`, symbolic dimensions included.
"""

from collections.abc import Mapping
import math
import numbers
from typing import Any
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

_T = TypeVar("_T")


def fail(kind: type[Exception], must: str, received: object) -> Exception:
  """Returns an exception in the library's one message form."""
  return kind(f"{must}; received {received}")


def describe(value: object) -> str:
  """Names a value by dtype and shape where it has them, else by type."""
  if is_array(value):
    return f"{value.dtype}{list(value.shape)}"  # type: ignore[attr-defined]
  return type(value).__name__


def is_array(value: object) -> bool:
  """Whether `value` is a JAX or NumPy array, a tracer or an abstract array."""
  if isinstance(value, np.ma.MaskedArray):
    return False
  if isinstance(
    value, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct
  ):
    return True
  # JAX 0.8 wraps NumPy arrays in a class of its own under some transforms.
  is_of_jax = type(value).__module__.startswith("jax.")
  return is_of_jax and hasattr(value, "shape") and hasattr(value, "dtype")


def is_concrete(*values: object) -> bool:
  """Whether this process can read every value."""
  return all(
    isinstance(value, np.ndarray | np.generic | bool | int | float)
    or (
      isinstance(value, jax.Array)
      and not isinstance(value, jax.core.Tracer)
      and value.is_fully_addressable
    )
    for value in values
  )


def _is_real_dtype(dtype: Any) -> bool:
  return any(
    jnp.issubdtype(dtype, kind)
    for kind in (jnp.bool_, jnp.integer, jnp.floating)
  )


_DTYPES = {
  "integer": lambda dtype: jnp.issubdtype(dtype, jnp.integer),
  "floating-point": lambda dtype: jnp.issubdtype(dtype, jnp.floating),
  "boolean": lambda dtype: jnp.issubdtype(dtype, jnp.bool_),
  "real numeric or boolean": _is_real_dtype,
}


def array(name: str, value: Any, *, dtype: str, axes: tuple[str, ...]) -> None:
  """Checks an array's type, its kind of dtype and its rank.

  Args:
    name: how the message names the value.
    value: what was passed.
    dtype: one of "integer", "floating-point", "boolean", "real numeric or
      boolean".
    axes: the names of the axes; their number is the rank.

  Raises:
    TypeError: not an array, or another dtype.
    ValueError: another rank.
  """
  if not is_array(value):
    raise fail(
      TypeError,
      f"{name} must be a JAX/NumPy array or ShapeDtypeStruct",
      describe(value),
    )
  if len(value.shape) != len(axes):
    wanted = f"shape [{', '.join(axes)}]" if axes else "a scalar shape ()"
    raise fail(ValueError, f"{name} must have {wanted}", describe(value))
  if not _DTYPES[dtype](value.dtype):
    raise fail(TypeError, f"{name} must have {dtype} dtype", value.dtype)


def same_shape(
  name: str, value: Any, other_name: str, other: Any, *, axes: int
) -> None:
  """Checks that two arrays agree in their first `axes` axes."""
  if tuple(value.shape[:axes]) != tuple(other.shape[:axes]):
    raise fail(
      ValueError,
      f"{name} must match {other_name} shape"
      + ("" if axes == len(value.shape) else f" in its first {axes} axes"),
      f"{tuple(value.shape)} and {tuple(other.shape)}",
    )


def batch_major(
  name: str, tree: Any, *, batch: Any, of: str = "target_ids"
) -> None:
  """Checks that a pytree holds arrays, each with `batch` as its first axis.

  Args:
    name: how the message names the pytree.
    tree: what was passed.
    batch: the size of the first axis.
    of: whose size that is.

  Raises:
    TypeError: a leaf is no array, or is complex, a string or a PRNG key.
    ValueError: no leaf at all, a scalar leaf, or another first axis.
  """
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  if not leaves:
    raise fail(
      ValueError, f"{name} must hold at least one array", describe(tree)
    )
  for path, leaf in leaves:
    label = name + jax.tree_util.keystr(path)
    if not is_array(leaf):
      raise fail(
        TypeError,
        f"{label} must be a JAX/NumPy array or ShapeDtypeStruct",
        describe(leaf),
      )
    if not leaf.shape:
      raise fail(
        ValueError, f"{label} must be batch-major, not scalar", "shape ()"
      )
    if leaf.shape[0] != batch:
      raise fail(
        ValueError,
        f"{label} must share the first axis of {of}",
        f"batch size {leaf.shape[0]}; expected {batch}",
      )
    if not _is_real_dtype(leaf.dtype):
      raise fail(
        TypeError,
        f"{label} must have real numeric or boolean dtype",
        leaf.dtype,
      )


def finite_real(
  name: str, value: Any, *, positive: bool = False, nonnegative: bool = False
) -> float:
  """Checks a static hyper-parameter and returns it as a Python float.

  Raises:
    TypeError: not a real number (a boolean, a string, a device array).
    ValueError: not finite, outside the asked range, or too large or too small
      to be a normal float32 number, in which losses are computed.
  """
  if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real):
    raise fail(
      TypeError, f"{name} must be a finite real scalar", describe(value)
    )
  number = float(value)
  if not math.isfinite(number):
    raise fail(ValueError, f"{name} must be a finite real scalar", value)
  if positive and number <= 0:
    raise fail(ValueError, f"{name} must be positive", value)
  if nonnegative and number < 0:
    raise fail(ValueError, f"{name} must be nonnegative", value)
  return normal(name, number)


def temperature(value: Any) -> float:
  """Checks a temperature, whose square scales a loss, as `finite_real` does."""
  number = finite_real("temperature", value, positive=True)
  normal("the square of temperature", number * number)
  return number


def coefficients(**values: Any) -> tuple[float, ...]:
  """Checks the coefficients of a loss's terms, by name.

  Raises:
    TypeError, ValueError: as `finite_real`; or one that is negative, or none
      that is positive.
  """
  numbers_ = tuple(
    finite_real(name, value, nonnegative=True) for name, value in values.items()
  )
  if not any(numbers_):
    raise fail(
      ValueError,
      f"at least one of {' and '.join(values)} must be positive",
      " and ".join("0" for _ in values),
    )
  return numbers_


def normal(name: str, number: float) -> float:
  """Checks that a number is 0 or one that float32 holds to full accuracy."""
  tiny = float(np.finfo(np.float32).tiny)
  largest = float(np.finfo(np.float32).max)
  if number and not tiny <= abs(number) <= largest:
    raise fail(
      ValueError,
      f"{name} must be within float32, {tiny:.1e} to {largest:.1e}",
      number,
    )
  return number


def boolean(name: str, value: Any) -> bool:
  """Checks a static switch."""
  if not isinstance(value, bool):
    raise fail(TypeError, f"{name} must be a bool", describe(value))
  return value


def positive_integer(name: str, value: Any) -> int:
  """Checks a static size and returns it as a Python integer."""
  if isinstance(value, bool | np.bool_) or not isinstance(
    value, numbers.Integral
  ):
    raise fail(TypeError, f"{name} must be an int", describe(value))
  if value <= 0:
    raise fail(ValueError, f"{name} must be positive", value)
  return int(value)


def function(name: str, value: Any) -> None:
  """Checks that a value can be called."""
  if not callable(value):
    raise fail(TypeError, f"{name} must be callable", describe(value))


def instance(name: str, value: Any, *kinds: type[_T]) -> _T:
  """Checks that a value is of one of the classes, and returns it."""
  if not isinstance(value, kinds):
    names = " or ".join(kind.__name__ for kind in kinds)
    raise fail(TypeError, f"{name} must be a {names}", describe(value))
  return value


def mapping(name: str, value: Any, kind: type) -> None:
  """Checks a mapping from strings to `kind`."""
  if not isinstance(value, Mapping) or jax.tree_util.all_leaves([value]):
    raise fail(
      TypeError,
      f"{name} must be a mapping that is a pytree, such as a dict",
      describe(value),
    )
  for key, item in value.items():
    if not isinstance(key, str):
      raise fail(TypeError, f"{name} must have string keys", describe(key))
    instance(f"{name}[{key!r}]", item, kind)
