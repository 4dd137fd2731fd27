"""Activation buffers in one arena."""

from __future__ import annotations

import random

from caudal.ops.buffer_plan import ALIGNMENT, Lifetime, place_buffers


def test_live_buffers_never_overlap() -> None:
    rng = random.Random(0)
    for _ in range(50):
        lifetimes = []
        for _ in range(40):
            first = rng.randrange(30)
            lifetimes.append(Lifetime(rng.randrange(1, 5000), first, first + rng.randrange(8)))
        offsets, arena_nbytes = place_buffers(lifetimes)
        for i, a in enumerate(lifetimes):
            assert offsets[i] % ALIGNMENT == 0
            assert offsets[i] + a.nbytes <= arena_nbytes
            for j, b in enumerate(lifetimes[:i]):
                is_live_together = a.first <= b.last and b.first <= a.last
                is_apart = (
                    offsets[i] + a.nbytes <= offsets[j] or offsets[j] + b.nbytes <= offsets[i]
                )
                assert is_apart or not is_live_together


def test_memory_is_reused_along_a_chain() -> None:
    chain = [Lifetime(1024, step, step + 1) for step in range(100)]
    assert place_buffers(chain)[1] == 2 * 1024


def test_no_buffers_need_no_memory() -> None:
    assert place_buffers([]) == ([], 0)
