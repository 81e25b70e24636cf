"""Losses for training diffusion models in JAX.

A loss is a pure function `loss(prediction, batch, *, hyper_parameters)` that
returns a `LossOutput`: an unreduced sum and its denominator.
"""

from diffusion_objectives import corruption as corruption
from diffusion_objectives import divergences as divergences
from diffusion_objectives.batches import DenseTeacher as DenseTeacher
from diffusion_objectives.batches import (
  DiffusionDistillationBatch as DiffusionDistillationBatch,
)
from diffusion_objectives.batches import (
  DiffusionTokenBatch as DiffusionTokenBatch,
)
from diffusion_objectives.batches import HiddenTeacher as HiddenTeacher
from diffusion_objectives.batches import (
  SampledTokenTeacher as SampledTokenTeacher,
)
from diffusion_objectives.batches import TopKTeacher as TopKTeacher
from diffusion_objectives.batches import shift_right as shift_right
from diffusion_objectives.objectives import (
  parallel_decoding as parallel_decoding,
)
from diffusion_objectives.objectives.cross_entropy import (
  weighted_cross_entropy_loss as weighted_cross_entropy_loss,
)
from diffusion_objectives.objectives.distillation import (
  divergence_loss as divergence_loss,
)
from diffusion_objectives.objectives.distillation import (
  forward_kl_loss as forward_kl_loss,
)
from diffusion_objectives.objectives.distillation import (
  prepared_opd_loss as prepared_opd_loss,
)
from diffusion_objectives.objectives.distillation import (
  sampled_reverse_kl_loss as sampled_reverse_kl_loss,
)
from diffusion_objectives.objectives.linear_vocabulary import (
  OutputHead as OutputHead,
)
from diffusion_objectives.objectives.linear_vocabulary import (
  linear_forward_kl_loss as linear_forward_kl_loss,
)
from diffusion_objectives.objectives.linear_vocabulary import (
  linear_prepared_opd_loss as linear_prepared_opd_loss,
)
from diffusion_objectives.objectives.linear_vocabulary import (
  linear_token_log_probs as linear_token_log_probs,
)
from diffusion_objectives.objectives.linear_vocabulary import (
  linear_weighted_cross_entropy_loss as linear_weighted_cross_entropy_loss,
)
from diffusion_objectives.objectives.parallel_decoding import (
  FlowSchedule as FlowSchedule,
)
from diffusion_objectives.objectives.parallel_decoding import (
  ParallelDecodingBatch as ParallelDecodingBatch,
)
from diffusion_objectives.objectives.parallel_decoding import (
  pdd_head_loss as pdd_head_loss,
)
from diffusion_objectives.objectives.parallel_decoding import (
  pdd_modality_losses as pdd_modality_losses,
)
from diffusion_objectives.outputs import LossOutput as LossOutput
from diffusion_objectives.outputs import WeightedMetric as WeightedMetric
from diffusion_objectives.outputs import combine as combine
from diffusion_objectives.outputs import merge as merge

__version__ = "0.1.0"
