"""Weighted cross entropy: laws, closed forms, public regressions."""

import functools

import diffusion_objectives as do
from diffusion_objectives.testing import laws
from tests import oracles


def oracle(logits, batch, unit=None):
  return (
    oracles.weighted(oracles.nll(logits, batch.target_ids), batch.loss_weights),
    oracles.denominator(batch, unit),
  )


TestLaws = laws.suite(do.weighted_cross_entropy_loss, oracle=oracle)
TestLawsMasked = laws.suite(
  functools.partial(do.weighted_cross_entropy_loss, denominator="masked"),
  oracle=functools.partial(oracle, unit="masked"),
)
