r"""Corruption processes and their weights, with explicit keys.

A masking process hides each supervised token at time `t` with probability
`m(t) = 1 - alpha(t)`, data at `t = 0`. The masked-diffusion bound is

  E_t E_mask [ sum_{masked i} w(t) (-log p(x_i | noisy)) ],
  w(t) = -alpha'(t) / (1 - alpha(t)) = m'(t) / m(t)                         (1)

(Sahoo et al. 2024, arXiv:2406.07524, eq. 10; Shi et al. 2024, arXiv:2406.04329,
eq. 4). Divided by the supervised tokens it bounds the negative log-likelihood
per token, in nats. Every schedule with `m(0) = 0` and `m(1) = 1` has the same
expectation: with `c(M)` the cost of a mask `M` of `k` of `n` tokens,

  int w(t) m^k (1 - m)^(n - k) dt = int_0^1 u^(k - 1) (1 - u)^(n - k) du
                                  = 1 / (k C(n, k)),
  bound = sum_M c(M) / (k C(n, k)) = sum_{k = 1}^n E[c | k] / k             (2)

so a law of masks that is uniform given its size needs the weight

  w(k) = 1 / (k P(k))                                                       (3)

`(n + 1) / k` where all sizes `0..n` are equally likely (Bernoulli masks at
`m = t`, `t` uniform), `n / k` where the sizes `1..n` are.

Positions that share a time are a block: the row by default, or a run of equal
`block_ids`. In a sum over blocks, (1) to (3) hold for each (block diffusion:
Arriola et al. 2025, arXiv:2503.09573).
"""

from diffusion_objectives.corruption.masked_diffusion import (
  MaskedTokens as MaskedTokens,
)
from diffusion_objectives.corruption.masked_diffusion import (
  bernoulli_masking as bernoulli_masking,
)
from diffusion_objectives.corruption.masked_diffusion import (
  count_weighted_masking as count_weighted_masking,
)
from diffusion_objectives.corruption.masked_diffusion import (
  masked_diffusion_batch as masked_diffusion_batch,
)
from diffusion_objectives.corruption.masked_diffusion import (
  nonempty_masking as nonempty_masking,
)
from diffusion_objectives.corruption.masked_diffusion import (
  uniform_count_masking as uniform_count_masking,
)
from diffusion_objectives.corruption.masks import (
  complementary_masks as complementary_masks,
)
from diffusion_objectives.corruption.masks import count_weights as count_weights
from diffusion_objectives.corruption.masks import (
  mask_bernoulli as mask_bernoulli,
)
from diffusion_objectives.corruption.masks import (
  mask_exact_count as mask_exact_count,
)
from diffusion_objectives.corruption.masks import mask_nonempty as mask_nonempty
from diffusion_objectives.corruption.masks import (
  nonempty_probability as nonempty_probability,
)
from diffusion_objectives.corruption.masks import (
  uniform_replacement as uniform_replacement,
)
from diffusion_objectives.corruption.packing import block_ids as block_ids
from diffusion_objectives.corruption.packing import (
  next_token_supervision as next_token_supervision,
)
from diffusion_objectives.corruption.packing import (
  sequence_weights as sequence_weights,
)
from diffusion_objectives.corruption.packing import (
  supervision_by_length as supervision_by_length,
)
from diffusion_objectives.corruption.schedules import (
  MaskProbability as MaskProbability,
)
from diffusion_objectives.corruption.schedules import block_times as block_times
from diffusion_objectives.corruption.schedules import (
  cosine_mask_probability as cosine_mask_probability,
)
from diffusion_objectives.corruption.schedules import (
  elbo_weights as elbo_weights,
)
from diffusion_objectives.corruption.schedules import (
  linear_mask_probability as linear_mask_probability,
)
from diffusion_objectives.corruption.schedules import (
  polynomial_mask_probability as polynomial_mask_probability,
)
from diffusion_objectives.corruption.schedules import (
  stratified_times as stratified_times,
)
