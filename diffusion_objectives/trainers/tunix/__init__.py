"""One call that gives a Tunix `PeftTrainer` an exactly weighted objective.

Three trainers exist: that of google-tunix 0.1.7, that of Tunix main, and main's
experimental one with separate executables. They average in different places:
the gradient over micro-batches, the logged loss over micro-batches, the
evaluation loss over batches; each a mean of means, wrong as soon as the
denominators differ. All call their input function inside the compiled step,
where no value can be checked. A configured trainer instead

* adapts and checks every batch before the compiled step (`preparation`);
* updates by the sum of gradients over the sum of denominators, for any number
  of micro-batches; a window of denominator 0 gives the optimizer a zero
  gradient (`generations`);
* logs sums over sums, in float64 on the host (`hook`);
* writes the objective's identity into every checkpoint and refuses to resume
  under another (`identity`).

Only attributes of the trainer's instance, of its checkpoint manager and of its
optimizer are set; nothing is patched or forked, and a checkpoint's arrays keep
the trainer's own tree.
"""

from diffusion_objectives.trainers.tunix.configure import (
  configure_diffusion_sft as configure_diffusion_sft,
)
from diffusion_objectives.trainers.tunix.configure import (
  configure_objective as configure_objective,
)
from diffusion_objectives.trainers.tunix.configure import (
  configure_prepared_diffusion_opd as configure_prepared_diffusion_opd,
)
from diffusion_objectives.trainers.tunix.generations import (
  GENERATIONS as GENERATIONS,
)
from diffusion_objectives.trainers.tunix.hidden import (
  model_hidden_and_head as model_hidden_and_head,
)
from diffusion_objectives.trainers.tunix.hook import (
  RESERVED_METRICS as RESERVED_METRICS,
)
from diffusion_objectives.trainers.tunix.identity import (
  IDENTITY_KEY as IDENTITY_KEY,
)
from diffusion_objectives.trainers.tunix.preparation import (
  model_logits as model_logits,
)
from diffusion_objectives.trainers.tunix.preparation import (
  token_batch as token_batch,
)
