"""Every call gives the same bits each time, whatever its scratch memory held and whatever else the GPU does.

With the profile "thorough", each call is made 100 times on a GPU.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from kvtwin.conformance import discovery
from kvtwin.conformance.cases import draws, every_call, strategies, tiny
from kvtwin.conformance.cases.load import FILLS, Load, memory_filled_with
from kvtwin.conformance.lab import compile_only
from kvtwin.optimized._common.launch import INTERPRETED

pytestmark = [
    pytest.mark.kind("laws"),
    pytest.mark.slow_on_cpu,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.whole,
    pytest.mark.first,
]

ROUNDS = 100 if settings().max_examples >= 1000 and not INTERPRETED else 2


def contents(result: Any) -> list[tuple[torch.dtype, tuple[int, ...], Tensor]]:
    """Copies of the bytes of all tensors in a call's result."""
    copies = [tensor.clone(memory_format=torch.contiguous_format) for tensor in every_call.tensors(result)]
    return [(tensor.dtype, tuple(tensor.shape), tensor.flatten().view(torch.uint8)) for tensor in copies]


def same(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(
        a[:2] == b[:2] and torch.equal(a[2], b[2]) for a, b in zip(one, other, strict=True)
    )


def first_that_differs(calls: list[every_call.Call], device: torch.device, rounds: int) -> str | None:
    """Make all calls `rounds` times, each time in another order, under load and on other contents of memory. Returns
    the name of the first call whose bits differ from those of the first round."""
    expected: dict[int, Any] = {}  # by the place among `calls`: variants of a call have the same name
    load = Load(device, seed=0)
    for number in range(rounds):
        order = random.Random(number).sample(range(len(calls)), len(calls))
        with memory_filled_with(FILLS[number % len(FILLS)]):
            for place in order:
                call = calls[place]
                load.add()
                found = contents(call.run())
                assert found, f"{call.name} returns no tensors"
                if not same(found, expected.setdefault(place, found)):
                    return f"{call.name}, in round {number}"
    return None


VARIANTS = [
    pytest.param(pair, large, fused, id=f"{pair}-{'larger' if large else 'tiny'}{'-fused' if fused else ''}")
    for pair in discovery.pairs()
    for fused in compile_only.ways(pair)
    for large in ((False,) if INTERPRETED else (False, True))
]


@pytest.mark.parametrize(("pair", "large", "fused"), VARIANTS)
def test_a_call_gives_the_same_bits_each_time(pair, large, fused, device):
    """On a GPU, tiny calls have float32 and a small head_dim, for which other tests compile the kernels as well. With
    the profile gpu, larger ones have the usual shape, for the same reason."""
    dtype, head_dim = (torch.bfloat16, 64) if large or INTERPRETED else (torch.float32, tiny.HEAD_DIM)
    sizes: dict[str, int] = {}
    if large and draws.shares_kernels():
        head_dim, group, dtype = strategies.USUAL
        sizes = {"head_dim": head_dim, "group": group}
    with tiny.larger(**sizes) if large else nullcontext(), compile_only.fused_as(pair, fused):
        calls = list(every_call.calls_of(pair, device, dtype, (head_dim,), (True,)))
        assert first_that_differs(calls, device, ROUNDS) is None


@pytest.mark.parametrize(("ill", "noticed"), [
    (lambda calls: torch.zeros(3), False),
    (lambda calls: torch.full((3,), float(calls)), True),
    (lambda calls: torch.empty(3), True),
    (lambda calls: torch.zeros(3) * (-1) ** calls, True),
], ids=["healthy", "counts calls", "leaves memory unwritten", "changes the sign of zero"])
def test_a_call_that_differs_is_noticed(ill, noticed):
    made = []

    def run():
        made.append(1)
        return ill(len(made))

    found = first_that_differs([every_call.Call("call", run)], torch.device("cpu"), 3)
    assert found == ("call, in round 1" if noticed else None)
