r"""Where tokens and head lie on a mesh of devices, and the sums over it.

Tokens lie over some axes, the head over features, vocabulary or both:

  axis of    hidden states   kernel       each device
  tokens     split           whole        has tokens of its own
  features   split (tokens)  split        gathers the kernel's features
  vocabulary whole           split        has columns of its own

A device forms the logits of its tokens on its columns. Statistics of rows are
joined over the axis of the vocabulary, block by block. Once, after all blocks,
gradients of the head are summed over the axes of tokens (to the shards that the
features came from), and those of the hidden states over that of the vocabulary.
"""

import dataclasses
import math
from typing import Any
import warnings

import jax
from jax import lax
import jax.extend
from jax.interpreters import batching
from jax.interpreters import mlir
from jax.interpreters import pxla
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from diffusion_objectives._core import checks
from diffusion_objectives.objectives.linear_vocabulary import head as heads

# What an axis is for by its name, where the caller names none.
NAMES = {
  "batch": ("data", "dp", "replica", "fsdp"),
  "length": ("sequence", "seq", "sp", "context", "cp"),
  "vocabulary": ("tensor", "tp", "model"),
}
FEATURES = "fsdp"

TokenAxes = str | tuple[str, ...] | P | None


@dataclasses.dataclass(frozen=True)
class Placement:
  """Which axes of a mesh split what; by default one device has all.

  Attributes:
    mesh: over which the kernel is mapped. None where it is not: on one device,
      and in a manual region, where the caller has mapped it.
    batch, length: axes of the tokens' two dimensions.
    features: the axis of the kernel's features, one of the tokens', or None.
    vocabulary: the axis of the kernel's columns, or None.
  """

  mesh: Any = None
  batch: tuple[str, ...] = ()
  length: tuple[str, ...] = ()
  features: str | None = None
  vocabulary: str | None = None

  @property
  def tokens(self) -> tuple[str, ...]:
    """All axes that tokens lie over."""
    return self.batch + self.length

  @property
  def axes(self) -> set[str]:
    """All axes."""
    return {*self.tokens, *_names(self.features), *_names(self.vocabulary)}

  @property
  def free(self) -> set[str]:
    """The mesh's axes that no caller has mapped over."""
    return set(_free(self.mesh))

  def __str__(self) -> str:
    return (
      f"token_axes={self.tokens}, feature_axis={self.features!r},"
      f" vocabulary_axis={self.vocabulary!r}"
    )

  @property
  def shards(self) -> int:
    """How many devices share the vocabulary."""
    if self.vocabulary is None:
      return 1
    if self.mesh is None:
      return lax.axis_size(self.vocabulary)
    return self.mesh.shape[self.vocabulary]

  def size(self, head: heads.OutputHead) -> int:
    """The number of ids; in a manual region, of all shards."""
    return head.size * (self.shards if self.mesh is None else 1)

  # How arrays lie.

  def rows(self, *rest: Any) -> P:
    """Of `[batch, length, ...]`."""
    return P(self.batch or None, self.length or None, *rest)

  def of_head(self, head: heads.OutputHead) -> heads.OutputHead:
    """Of a head's arrays."""
    kernel = P(self.features, self.vocabulary)
    if head.layout != heads.LAYOUTS[0]:
      kernel = P(self.vocabulary, self.features)
    return jax.tree.unflatten(
      jax.tree.structure(head),
      [
        kernel,
        *([] if head.bias is None else [P(self.vocabulary)]),
        *(
          []
          if head.low_rank is None
          else [P(self.features, None), P(None, self.vocabulary)]
        ),
      ],
    )

  # What is sent. All of it is called by each device, within the map.

  def first(self, columns: int) -> Any:
    """The id of the first of a device's columns."""
    if self.vocabulary is None:
      return 0
    return columns * lax.axis_index(self.vocabulary)

  def shared(self, zero: jax.Array) -> jax.Array:
    """A zero that is the same on all shards of the vocabulary (`blocks`)."""
    if self.vocabulary is None or self.mesh is not None:
      return zero
    return lax.pmax(zero, self.vocabulary)

  def whole_features(self, head: heads.OutputHead) -> heads.OutputHead:
    """The head with all features of the device's columns."""
    if self.features is None:
      return head

    def gather(array, spec):
      if self.features not in tuple(spec):
        return array
      axis = tuple(spec).index(self.features)
      return lax.all_gather(array, self.features, axis=axis, tiled=True)

    return jax.tree.map(gather, head, self.of_head(head))

  def without_padding(self, head: heads.OutputHead) -> heads.OutputHead:
    """The head with 0 where a device's columns stand for no id."""
    if self.vocabulary is None or head.vocabulary_size is None:
      return head
    columns = head.columns
    is_id = self.first(columns) + jnp.arange(columns) < head.vocabulary_size

    def clean(array, spec):
      if self.vocabulary not in tuple(spec):
        return array
      shape = [1] * array.ndim
      shape[tuple(spec).index(self.vocabulary)] = columns
      return jnp.where(is_id.reshape(shape), array, 0)

    return jax.tree.map(clean, head, self.of_head(head))

  def total_of_columns(self, gradient: jax.Array) -> jax.Array:
    """By tokens, the sum over all columns."""
    if self.vocabulary is None:
      return gradient
    return lax.psum(gradient, self.vocabulary)

  def total_of_tokens(self, gradient: jax.Array, spec: P) -> jax.Array:
    """Of a part of the head that lies as the spec says, the sum over tokens.

    Of features, which were gathered, each device keeps its own. A part without
    columns is summed over these, too.
    """
    split = tuple(spec)
    if self.features is not None and self.features in split:
      gradient = lax.psum_scatter(
        gradient,
        self.features,
        scatter_dimension=split.index(self.features),
        tiled=True,
      )
    axes = (*self.tokens, *_names(self.vocabulary))
    left = tuple(axis for axis in axes if axis not in split)
    return lax.psum(gradient, left) if left else gradient


def of(
  axes: tuple[Any, Any, Any],
  hidden: Any,
  student: heads.OutputHead,
  teacher: heads.OutputHead | None,
) -> Placement:
  """The placement that axes name, else the names of the mesh's axes.

  The mesh is that of `jax.set_mesh` or of `with mesh:`. In a manual region
  nothing is read: what is not named is whole.

  Args:
    axes: `token_axes`, `feature_axis` and `vocabulary_axis`.
    hidden: `[batch, length, features]`.
    student: the student's head.
    teacher: the teacher's head, or None.
  """
  named = _named(*axes)
  by_name = dict(head=student, teacher_head=teacher)
  given = {name: head for name, head in by_name.items() if head is not None}
  mesh = _mesh()
  if mesh is None:
    if named != Placement():
      raise checks.fail(
        ValueError,
        "axes must be those of a mesh in context (jax.set_mesh, or with mesh:)",
        f"{named} and no mesh",
      )
    return named
  unknown = named.axes - set(mesh.shape)
  if unknown:
    raise checks.fail(
      ValueError,
      f"axes must be among those of the mesh, {tuple(mesh.shape)}",
      f"{named}",
    )
  free = _free(mesh)
  sizes = {name: mesh.shape[name] for name in free if mesh.shape[name] > 1}
  if {named.features, named.vocabulary} & (set(mesh.shape) - set(free)):
    return _in_manual_region(named, sizes, hidden, given)
  if not sizes:
    return Placement()
  if named == Placement():
    named = _read(sizes, given)
  place = dataclasses.replace(
    named,
    mesh=mesh,
    batch=tuple(axis for axis in named.batch if axis in free),
    length=tuple(axis for axis in named.length if axis in free),
  )
  if not set(sizes) <= place.axes:
    raise checks.fail(
      ValueError,
      "token_axes and vocabulary_axis must name every axis of several devices,"
      f" {sizes}, as along another they would all do the same",
      f"{place}",
    )
  if place.features is not None and place.features not in place.tokens:
    raise checks.fail(
      ValueError,
      "feature_axis must be one of the tokens' axes, as devices along another"
      " would all do the same",
      f"{place}",
    )
  _check_columns(place, given)
  _check_sizes(place, hidden, given)
  return place


def _warn_of_devices(context: Any, array: Any) -> list[Any]:
  """Lowers the identity; what runs on several devices, each does whole."""
  devices = getattr(context.module_context.axis_context, "num_devices", 1)
  if devices > 1:
    warnings.warn(
      f"a linear-vocabulary loss is compiled for {devices} devices without a"
      " mesh in context (jax.set_mesh, or with mesh:): values are right, but"
      " each device does the work of all, and gathers a head that is split",
      stacklevel=2,
    )
  return [array]


def alone(is_active: jax.Array) -> jax.Array:
  """The array, of a loss without a mesh; a warning where that is slow."""
  return _ALONE.bind(is_active)


_ALONE = jax.extend.core.Primitive("without_a_mesh")
_ALONE.def_impl(lambda array: array)
_ALONE.def_abstract_eval(lambda array: array)
batching.primitive_batchers[_ALONE] = lambda arguments, axes: (
  _ALONE.bind(*arguments),
  axes[0],
)
mlir.register_lowering(_ALONE, _warn_of_devices)


def _names(part: Any) -> tuple[str, ...]:
  """The axes in one entry of a `PartitionSpec`."""
  return (part,) if isinstance(part, str) else tuple(part or ())


def _named(
  token_axes: Any, feature_axis: Any, vocabulary_axis: Any
) -> Placement:
  """What the caller names, of a mesh that is not known yet."""
  parts = tuple(token_axes) if isinstance(token_axes, P) else (token_axes,)
  names = [
    name
    for part in parts
    for name in (part if isinstance(part, tuple) else (part,))
  ]
  if len(parts) > 2 or not all(n is None or isinstance(n, str) for n in names):
    raise checks.fail(
      TypeError,
      "token_axes must be None, an axis, a tuple of axes, or a PartitionSpec of"
      " [batch, length]",
      repr(token_axes),
    )
  for name, axis in (
    ("feature_axis", feature_axis),
    ("vocabulary_axis", vocabulary_axis),
  ):
    if not (axis is None or isinstance(axis, str)):
      raise checks.fail(
        TypeError, f"{name} must be None or an axis", repr(axis)
      )
  batch, length = (*map(_names, parts), (), ())[:2]
  place = Placement(None, batch, length, feature_axis, vocabulary_axis)
  split = [*place.tokens, *_names(vocabulary_axis)]
  if len(split) != len(set(split)):
    raise checks.fail(
      ValueError,
      "an axis must split one dimension, tokens' or vocabulary",
      place,
    )
  return place


def _mesh() -> Any:
  """The mesh in context, or None."""
  mesh: Any = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    mesh = pxla.thread_resources.env.physical_mesh
  return None if mesh.empty else mesh


def _free(mesh: Any) -> list[str]:
  """The axes that no manual region maps over."""
  kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
  return [name for name, kind in kinds if kind != jax.sharding.AxisType.Manual]


def _in_manual_region(
  named: Placement,
  left: dict[str, int],
  hidden: Any,
  given: dict[str, heads.OutputHead],
) -> Placement:
  """The caller has mapped: each device has its tokens and its columns.

  Args:
    named: the axes that are named.
    left: the sizes of those of several devices that are not mapped over.
    hidden: `[batch, length, features]`.
    given: the heads by name.
  """
  if left:
    raise checks.fail(
      ValueError,
      "a manual region that splits the vocabulary must map over every axis of"
      " several devices, as along another they would all do the same",
      f"{left}, which are not mapped over",
    )
  if named.features is not None:
    raise checks.fail(
      ValueError,
      "in a manual region features must be whole (jax.lax.all_gather)",
      f"{named}",
    )
  axis: Any = named.vocabulary
  index = lax.axis_index(axis)
  if jax.typeof(index) == jax.typeof(jnp.zeros((), index.dtype)):
    raise checks.fail(
      ValueError,
      "vocabulary_axis in a manual region must come with check_vma in"
      " jax.shard_map, which knows what is the same on all shards",
      "check_vma=False",
    )
  _check_split("hidden", hidden, axis, is_split=False)
  for name, head in given.items():
    if head.vocabulary_size is not None:
      raise checks.fail(
        ValueError,
        f"{name}.vocabulary_size must be None in a manual region that splits"
        " the vocabulary (a bias of -inf excludes ids)",
        head.vocabulary_size,
      )
    _check_split(f"{name}.kernel", head.kernel, axis, is_split=True)
  place = Placement(vocabulary=named.vocabulary)
  _check_columns(place, given)
  return place


def _check_split(name: str, array: Any, axis: str, *, is_split: bool) -> None:
  """Checks whether JAX knows an array as one that differs along an axis."""
  array = jnp.asarray(array)
  if 0 in array.shape:
    return
  corner = array[(0,) * array.ndim]
  split = corner + lax.axis_index(axis).astype(corner.dtype)
  if (jax.typeof(split) == jax.typeof(corner)) != is_split:
    raise checks.fail(
      ValueError,
      f"{name} must {'differ' if is_split else 'be the same'} along"
      f" vocabulary_axis={axis!r} in a manual region",
      "one that is the same" if is_split else "one that differs",
    )


def _check_sizes(
  place: Placement, hidden: Any, given: dict[str, heads.OutputHead]
) -> None:
  hint = " (pad them, and give vocabulary_size)"
  for name, size, split in (
    ("batch", hidden.shape[0], place.batch),
    ("length", hidden.shape[1], place.length),
    *(
      (f"features of {n}", h.features, place.features) for n, h in given.items()
    ),
    *(
      (f"columns of {n}", h.columns, place.vocabulary) for n, h in given.items()
    ),
  ):
    parts = math.prod(place.mesh.shape[axis] for axis in _names(split))
    if isinstance(size, int) and size % parts:  # not symbolic
      raise checks.fail(
        ValueError,
        f"{name} must divide over {parts} devices of {split!r}"
        f"{hint if name.startswith('columns') else ''}",
        size,
      )


def _check_columns(
  place: Placement, given: dict[str, heads.OutputHead]
) -> None:
  columns = {name: head.columns for name, head in given.items()}
  if place.vocabulary is not None and len(set(columns.values())) > 1:
    raise checks.fail(
      ValueError,
      "head and teacher_head must have the same columns, padding included,"
      " where the vocabulary is split",
      columns,
    )


def _read(
  sizes: dict[str, int], given: dict[str, heads.OutputHead]
) -> Placement:
  """What the axes of several devices are for, by their names.

  Features that do not divide are whole: no array can be split so.
  """
  found = {
    part: tuple(name for name in sizes if name in names)
    for part, names in NAMES.items()
  }
  unknown = set(sizes) - {name for names in found.values() for name in names}
  if unknown or len(found["vocabulary"]) > 1:
    raise checks.fail(
      ValueError,
      "token_axes, feature_axis and vocabulary_axis must be given where the"
      f" names of the mesh's axes do not tell them ({NAMES})",
      sizes,
    )
  is_split = FEATURES in found["batch"] and not any(
    head.features % sizes[FEATURES] for head in given.values()
  )
  return Placement(
    None,
    found["batch"],
    found["length"],
    FEATURES if is_split else None,
    next(iter(found["vocabulary"]), None),
  )
