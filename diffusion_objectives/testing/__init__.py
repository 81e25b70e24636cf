"""The contract as executable laws, for this library's losses and for yours.

Needs hypothesis and pytest (`pip install diffusion_objectives[testing]`).
"""

from diffusion_objectives.testing import laws as laws
from diffusion_objectives.testing import strategies as strategies
