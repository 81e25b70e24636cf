"""Foundations that know nothing of diffusion: records, checks, numerics."""
