"""Arrays that a compiled step reads and never changes, such as a teacher's.

An array that a loss function closes over is compiled into the step as a
constant. One that is part of the batch is laid over the data axis by the
trainer, for each step anew. Frozen arrays are arguments of the compiled step
instead, added to the batch after the trainer has placed it.
"""

from collections.abc import Iterable
import dataclasses
from typing import Any

from flax import nnx
import jax
from jax.interpreters import pxla
import jax.numpy as jnp
import numpy as np

from diffusion_objectives._core import checks
from diffusion_objectives._core import pytree


@dataclasses.dataclass(eq=False)
class Frozen:
  """A pytree or module, taken apart into its arrays and all else.

  Attributes:
    structure: what is known to the compiler; it need not be hashable.
    arrays: the step's arguments.
    mesh: that which they were placed on.
  """

  structure: Any
  arrays: tuple[jax.Array, ...]
  mesh: jax.sharding.Mesh | None = None

  @classmethod
  def of(cls, value: Any) -> "Frozen":
    """Takes a pytree or module apart as it is now.

    Raises:
      TypeError: there is no array in it, an abstract or deleted one, or in a
        pytree anything else.
    """
    for leaf in jax.tree.leaves(value, is_leaf=_is_of_nnx):
      if not _is_of_nnx(leaf):
        _check_array(leaf)
    graph, state = nnx.split(value)
    leaves, tree = jax.tree.flatten(state)
    for leaf in leaves:
      _check_array(leaf)
    if not leaves:
      raise _no_arrays("none")
    arrays = (x if isinstance(x, jax.Array) else jnp.array(x) for x in leaves)
    return cls((graph, tree), tuple(arrays))

  def rebuild(self, arrays: Iterable[jax.Array]) -> Any:
    """The pytree or module with other arrays, such as a trace's."""
    graph, tree = self.structure
    return nnx.merge(graph, jax.tree.unflatten(tree, arrays))

  def check_unshared(self, name: str, donated: Any) -> None:
    """Refuses arrays of a module that a step hands over to the compiler.

    Raises:
      ValueError: one of them is frozen.
    """
    theirs = {id(leaf) for leaf in jax.tree.leaves(nnx.state(donated))}
    shared = [array for array in self.arrays if id(array) in theirs]
    if shared:
      raise checks.fail(
        ValueError,
        f"frozen must not share arrays with trainer.{name}, which this trainer"
        " donates to its compiled step (jax.tree.map(jnp.copy, ...))",
        f"{len(shared)} shared, the first {checks.describe(shared[0])}",
      )

  def place(self) -> None:
    """Replicates over the mesh what lies elsewhere, once and for all steps.

    The compiler wants one order of devices in all arguments.
    """
    mesh = pxla.thread_resources.env.physical_mesh
    if mesh.empty or mesh == self.mesh:
      return
    self.mesh = mesh
    devices = list(mesh.devices.flat)
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    self.arrays = tuple(
      array
      if list(array.sharding.devices_indices_map(array.shape)) == devices
      else jax.device_put(array, everywhere)
      for array in self.arrays
    )


def _is_of_nnx(node: Any) -> bool:
  return isinstance(node, nnx.Module | nnx.Variable)


def _no_arrays(received: str) -> Exception:
  return checks.fail(
    TypeError, "frozen must be an nnx.Module or a pytree of arrays", received
  )


def _check_array(leaf: Any) -> None:
  is_array = checks.is_array(leaf) and isinstance(
    leaf, jax.Array | np.ndarray | np.generic
  )
  if not is_array:
    raise _no_arrays(f"{checks.describe(leaf)} in it")
  if isinstance(leaf, jax.core.Tracer):
    raise _no_arrays(f"{checks.describe(leaf)} of a trace")
  if isinstance(leaf, jax.Array):
    if leaf.is_deleted():
      raise _no_arrays(f"{checks.describe(leaf)} that was deleted")
  elif not any(
    jnp.issubdtype(leaf.dtype, kind) for kind in (np.number, np.bool_)
  ):
    raise _no_arrays(f"{checks.describe(leaf)} in it")


@pytree.record
class Supplied:
  """What a compiled step takes: the trainer's input and the frozen arrays."""

  inputs: Any
  frozen: tuple[Any, ...]


class SuppliedStep:
  """A trainer's compiled step that is handed the frozen arrays.

  `func` is what the trainer reads of its own.
  """

  def __init__(self, step: Any, frozen: Frozen | None):
    self.step = step
    self.frozen = frozen

  @property
  def func(self) -> Any:
    return self.step.func

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    if "inputs" in kwargs:
      kwargs["inputs"] = self._supplied(kwargs["inputs"])
    elif args:  # an update alone takes no input
      args = (self._supplied(args[0]), *args[1:])
    return self.step(*args, **kwargs)

  def _supplied(self, inputs: Any) -> Supplied:
    arrays = self.frozen.arrays if self.frozen else ()
    return Supplied(inputs=inputs, frozen=arrays)
