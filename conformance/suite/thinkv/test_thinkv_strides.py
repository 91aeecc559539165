"""ThinKV's functions and its paged cache with arguments of which each has a stride of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.cases.paged_cases import empty
from kvtwin.conformance.judge.checkers.thinkv_paging import assert_same_contents
from kvtwin.conformance.judge.compare import assert_same

pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.property("layouts")]

RETENTION = (8, 4, 2)


def spaced(tensor: Tensor, step: int) -> Tensor:
    """The same numbers, `step` elements apart, between others."""
    room = torch.empty(*tensor.shape, step, dtype=tensor.dtype, device=tensor.device)
    room.copy_(tensor.flip(0)[..., None] if tensor.dtype == torch.bool else (tensor + 1)[..., None])
    room[..., 0] = tensor
    return room[..., 0]


@pytest.mark.parametrize("seed", range(4))
def test_anneal_reads_every_argument_by_its_own_stride(seed, twins, device):
    generator = torch.Generator().manual_seed(seed)
    size = torch.randint(0, 13, (3, 6), generator=generator).to(device)
    level, thought = (torch.randint(0, 3, (3, 6), generator=generator).to(device) for _ in range(2))
    current, live = torch.tensor([5, 2, 4], device=device), size.sum(1) + torch.tensor([0, 40, 3], device=device)
    change = torch.tensor([True, False, True], device=device)
    numbers = {"budget": 21, "retention": RETENTION}
    plain = twins.reference.thinkv.anneal(size, level, thought, current, change, live=live, **numbers)
    given = [spaced(tensor, step) for step, tensor in enumerate((size, level, thought, current, change, live), 2)]
    found = twins.optimized.thinkv.anneal(*given[:5], live=given[5], **numbers)
    for name, one, other in zip(plain._fields, found, plain, strict=True):
        assert_same(one, other, what=name)


def test_representatives_read_every_argument_by_its_own_stride(twins, device):
    key = torch.randn(2, 2, 9, 40, generator=torch.Generator().manual_seed(4)).to(device)
    slots = torch.tensor([[[8, 0, 3], [5, 7, -1]], [[2, 1, 8], [6, 4, 0]]], device=device)
    keep = torch.tensor([[2, 1], [1, 2]], device=device)
    cut = twins.optimized.thinkv.segment_representatives
    assert_same(cut(spaced(key, 2), spaced(slots, 3), spaced(keep, 4)), cut(key, slots, keep), what="kept tokens")


def test_a_paged_cache_reads_every_argument_by_its_own_stride(twins, device):
    """Rows are flushed with thoughts and segments of their own, and lose tokens of their own."""
    plain, other = (empty(twins.optimized.thinkv, device, batch=3) for _ in range(2))
    generator = torch.Generator().manual_seed(5)
    thought, segment = torch.tensor([2, 0, 1], device=device), torch.tensor([0, 2, 1], device=device)
    for first in (0, 2):
        for position in range(first, first + 2):
            key, value = torch.randn(2, 3, 1, 16, generator=generator).to(device)
            at = torch.tensor([position, position + 1, -1 if position == 1 else position], device=device)
            plain.append(key, value, at)
            other.append(spaced(key, 2), spaced(value, 3), spaced(at, 4))
        rows = torch.tensor([True, first == 2, True], device=device)
        plain.flush(rows, thought, segment)
        other.flush(spaced(rows, 2), spaced(thought, 3), spaced(segment, 4))
        assert_same_contents(other, plain, numbers=True)
        assert_same(other.segments, plain.segments, what="segments")
        assert_same(other.overflow, plain.overflow, what="overflow")
    gone = torch.rand(plain.positions.shape, generator=generator).to(device) < 0.5
    plain.evict(gone)
    other.evict(spaced(gone, 2))
    assert_same_contents(other, plain, numbers=True)
