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
      TypeError: there is no array in it, or an abstract one.
    """
    graph, state = nnx.split(value)
    leaves, tree = jax.tree.flatten(state)
    for leaf in leaves:
      is_array = isinstance(leaf, jax.Array | np.ndarray | np.generic)
      if not is_array or isinstance(leaf, jax.core.Tracer):
        raise checks.fail(
          TypeError,
          "frozen must hold arrays outside of any trace",
          checks.describe(leaf),
        )
    if not leaves:
      raise checks.fail(
        TypeError,
        "frozen must be a pytree of arrays or an nnx.Module",
        checks.describe(value),
      )
    arrays = (x if isinstance(x, jax.Array) else jnp.array(x) for x in leaves)
    return cls((graph, tree), tuple(arrays))

  def rebuild(self, arrays: Iterable[jax.Array]) -> Any:
    """The pytree or module with other arrays, such as a trace's."""
    graph, tree = self.structure
    return nnx.merge(graph, jax.tree.unflatten(tree, arrays))

  def check_unshared(self, name: str, donated: Any) -> None:
    """Refuses arrays that a step would hand over to the compiler.

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
    """Replicates over the mesh what lies elsewhere, once and for all steps."""
    mesh = pxla.thread_resources.env.physical_mesh
    if mesh.empty or mesh == self.mesh:
      return
    self.mesh = mesh
    devices = set(mesh.devices.flat)
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    self.arrays = tuple(
      array
      if array.sharding.device_set == devices
      else jax.device_put(array, everywhere)
      for array in self.arrays
    )


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
