"""Parallel decoding distillation of flow models.

A teacher integrates `N` fine intervals one after the other. A student predicts
one direction for each of them, its heads, in one forward, and moves over a
block of intervals at once.

`schedule` has the fine grid and its noise levels, `partitions` the blocks and
the laws they are drawn from, `trajectory` moves a state by heads, `teacher`
forms the direction that a head is to have, `losses` compares the two, `carry`
walks over the student's own states.

Source: arXiv:2607.26004.
"""

from diffusion_objectives.objectives.parallel_decoding.carry import (
  Stream as Stream,
)
from diffusion_objectives.objectives.parallel_decoding.carry import (
  advance as advance,
)
from diffusion_objectives.objectives.parallel_decoding.carry import (
  block_of as block_of,
)
from diffusion_objectives.objectives.parallel_decoding.carry import (
  check_coverage as check_coverage,
)
from diffusion_objectives.objectives.parallel_decoding.carry import (
  draw_noise as draw_noise,
)
from diffusion_objectives.objectives.parallel_decoding.carry import (
  first_rungs as first_rungs,
)
from diffusion_objectives.objectives.parallel_decoding.carry import (
  noised as noised,
)
from diffusion_objectives.objectives.parallel_decoding.carry import (
  refill as refill,
)
from diffusion_objectives.objectives.parallel_decoding.carry import (
  step_keys as step_keys,
)
from diffusion_objectives.objectives.parallel_decoding.carry import (
  walk_nodes as walk_nodes,
)
from diffusion_objectives.objectives.parallel_decoding.carry import (
  walk_to as walk_to,
)
from diffusion_objectives.objectives.parallel_decoding.losses import (
  ParallelDecodingBatch as ParallelDecodingBatch,
)
from diffusion_objectives.objectives.parallel_decoding.losses import (
  pdd_head_loss as pdd_head_loss,
)
from diffusion_objectives.objectives.parallel_decoding.losses import (
  pdd_modality_losses as pdd_modality_losses,
)
from diffusion_objectives.objectives.parallel_decoding.losses import (
  supervise as supervise,
)
from diffusion_objectives.objectives.parallel_decoding.partitions import (
  block_sizes as block_sizes,
)
from diffusion_objectives.objectives.parallel_decoding.partitions import (
  partition as partition,
)
from diffusion_objectives.objectives.parallel_decoding.partitions import (
  sample_heads as sample_heads,
)
from diffusion_objectives.objectives.parallel_decoding.partitions import (
  sample_starts as sample_starts,
)
from diffusion_objectives.objectives.parallel_decoding.schedule import (
  FlowSchedule as FlowSchedule,
)
from diffusion_objectives.objectives.parallel_decoding.teacher import (
  guided as guided,
)
from diffusion_objectives.objectives.parallel_decoding.teacher import (
  teacher_target as teacher_target,
)
from diffusion_objectives.objectives.parallel_decoding.trajectory import (
  advance_block as advance_block,
)
from diffusion_objectives.objectives.parallel_decoding.trajectory import (
  advance_fused as advance_fused,
)
from diffusion_objectives.objectives.parallel_decoding.trajectory import (
  base_times as base_times,
)
from diffusion_objectives.objectives.parallel_decoding.trajectory import (
  block_weights as block_weights,
)
from diffusion_objectives.objectives.parallel_decoding.trajectory import (
  data_from_head as data_from_head,
)
from diffusion_objectives.objectives.parallel_decoding.trajectory import (
  data_from_points as data_from_points,
)
from diffusion_objectives.objectives.parallel_decoding.trajectory import (
  fuse_head_parameters as fuse_head_parameters,
)
from diffusion_objectives.objectives.parallel_decoding.trajectory import (
  sample as sample,
)
from diffusion_objectives.objectives.parallel_decoding.trajectory import (
  window_offset as window_offset,
)
