"""Parallel decoding distillation of flow models.

A teacher integrates `N` fine intervals one after the other. A student predicts
one direction for each of them, its heads, in one forward, and moves over a
block of intervals at once.

`schedule` has the fine grid and its noise levels, `partitions` the blocks and
the laws they are drawn from, `trajectory` moves a state by heads, `teacher`
forms the direction that a head is to have.

Source: arXiv:2607.26004.
"""
