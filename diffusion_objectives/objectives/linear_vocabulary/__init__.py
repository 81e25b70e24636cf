"""The token losses from hidden states and the output head."""

from diffusion_objectives.objectives.linear_vocabulary.head import (
  OutputHead as OutputHead,
)
from diffusion_objectives.objectives.linear_vocabulary.losses import (
  linear_forward_kl_loss as linear_forward_kl_loss,
)
from diffusion_objectives.objectives.linear_vocabulary.losses import (
  linear_prepared_opd_loss as linear_prepared_opd_loss,
)
from diffusion_objectives.objectives.linear_vocabulary.losses import (
  linear_token_log_probs as linear_token_log_probs,
)
from diffusion_objectives.objectives.linear_vocabulary.losses import (
  linear_weighted_cross_entropy_loss as linear_weighted_cross_entropy_loss,
)
