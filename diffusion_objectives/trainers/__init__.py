"""Wiring into trainers: the only modules that import flax, optax or Tunix."""
