"""The eviction of a block by given ranks: a stable sort says which tokens leave, and where the others go."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvtwin.optimized._common.block_cache import ops
from kvtwin.optimized._common.block_cache.kernels import PLAIN, Stored, attend

pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.whole]
BATCH, HEADS, HEAD_DIM = 2, 3, 16
#: (budget, tokens of the block): one chunk of slots, several, and so many tokens that a second launch moves them.
SIZES = {"cpu": ((5, 3), (40, 12), (70, 40)), "cuda": ((5, 3), (1000, 100), (5000, 300))}


def ranks_of(content: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if content == "ties":
        return torch.randint(0, 3, shape, generator=generator).float()
    if content == "close":                                       # neighbours in float32, around 1
        bits = torch.tensor(1.0).view(torch.int32) + torch.randint(-3, 4, shape, generator=generator)
        return bits.int().view(torch.float32)
    if content == "descending":                                  # the block has the lowest ranks of all
        return -torch.arange(math.prod(shape)).view(shape).float()
    if content == "wide":
        return torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-38, 38, shape, generator=generator)
    if content in ("integers", "equal integers"):
        return torch.randint(0, 2**60 if content == "integers" else 2, shape, generator=generator) << 1
    if content == "successive integers":
        return torch.rand(shape, generator=generator).argsort(-1).argsort(-1)
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38, 1.0])
    return special[torch.randint(0, len(special), shape, generator=generator)]


def longer(tensor: Tensor, by: int) -> Tensor:
    """A copy with `by` more slots, of zeros."""
    return torch.cat((tensor, torch.zeros_like(tensor[:, :, :by])), 2)


def after(
    rank: list[float], age: list[int], holds: list[bool], protected: list[bool], total: int, budget: int, sinks: int,
    recent: int,
) -> dict[int, int]:
    """The slots of a head's tokens after the eviction, by their slots before it."""
    slots = [slot for slot, there in enumerate(holds) if there]
    leaves = [slot for slot in slots if sinks <= age[slot] < total - recent and not protected[slot]]
    # Python's sort is stable: ties leave from the lowest slot up. NaN is the lowest rank.
    leaves.sort(key=lambda slot: -math.inf if math.isnan(rank[slot]) else rank[slot])
    gone = set(leaves[: max(0, len(slots) - budget)])
    free = [slot for slot in range(budget) if not holds[slot] or slot in gone]
    stay = {slot: slot for slot in slots if slot < budget and slot not in gone}
    return stay | dict(zip((slot for slot in slots if slot >= budget and slot not in gone), free, strict=False))


@pytest.mark.parametrize("place", range(3), ids=["small", "chunks", "apart"])
@pytest.mark.parametrize(
    "content", ["ties", "close", "wide", "descending", "special", "integers", "equal integers", "successive integers"]
)
@pytest.mark.parametrize("guarded", [False, True], ids=["all", "protected"])
@pytest.mark.parametrize("at_once", [False, True], ids=["passes", "at-once"])
def test_the_lowest_ranks_leave_and_ties_from_the_lowest_slot(content, place, guarded, at_once, device, monkeypatch):
    """A head's program passes over the codes in memory, or keeps them."""
    monkeypatch.setattr(ops, "at_once", lambda *_: at_once)
    budget, count = SIZES[device.type][place]
    shape, end = (BATCH, HEADS), budget + count
    generator = torch.Generator().manual_seed(place)
    sinks, recent = (1, 2) if guarded else (0, 0)
    rank = ranks_of(content, (*shape, end), generator)
    # Rows of masks are longer than those of ranks, and rows of buffers longer than both.
    protected = (torch.rand(*shape, end + 5, generator=generator) < 0.1)[..., :end] if guarded else None
    filled = torch.randint(budget * 3 // 4, budget + 1, (*shape, 1), generator=generator)
    filled[0] = budget
    valid = (torch.rand(BATCH, 1, count, generator=generator) < 0.8).expand(*shape, count)
    occupied = torch.cat((torch.arange(budget) < filled, valid), -1)
    total = occupied.sum(-1)
    age = torch.where(occupied, torch.rand(*shape, end, generator=generator), 2.0).argsort(-1).argsort(-1).int()
    keys = torch.arange(end, dtype=torch.float32)[None, None, :, None].expand(*shape, end, HEAD_DIM)
    given = {
        "key": keys, "value": -keys, "occupied": occupied, "positions": torch.arange(end).expand(*shape, end) + 7,
        "score": rank.float(), "token_index": age, "carried": keys[..., 0] * 2,
    }
    seen = torch.full((2, 1), 11, device=device)
    results = []
    for moved, counted in zip((True, False), seen, strict=True):
        mine = {name: longer(tensor, 3).to(device) for name, tensor in given.items()}
        on_device = [None if tensor is None else tensor.to(device) for tensor in (rank, protected)]
        numbers = counted, budget, count, 5, sinks, recent
        if moved:
            ops.evict(*on_device, *mine.values(), total.int().to(device), *numbers)
        else:
            to = ops.choose(*on_device, mine["occupied"], mine["token_index"], total.int().to(device), *numbers)
            ops.settle(to, *mine.values(), budget)
        results.append({name: tensor[:, :, :end].cpu() for name, tensor in mine.items()})
        assert not mine["occupied"][:, :, end:].any()
    assert seen.tolist() == [[16], [16]]
    mine, apart = results
    for name in mine:
        kept = apart[name][apart["occupied"]], mine[name][mine["occupied"]]
        assert torch.equal(*(tensor.nan_to_num() for tensor in kept)), name
    for b in range(BATCH):
        for h in range(HEADS):
            guards = [False] * end if protected is None else protected[b, h].tolist()
            moved = after(
                rank[b, h].tolist(), age[b, h].tolist(), occupied[b, h].tolist(), guards, int(total[b, h]), budget,
                sinks, recent,
            )
            sources, targets = list(moved), list(moved.values())
            where = torch.zeros(end, dtype=torch.bool)
            where[targets] = True
            assert torch.equal(mine["occupied"][b, h], where)
            assert bool((mine["positions"][b, h, budget:] == -1).all())
            for name in given.keys() - {"occupied"}:
                expected, found = given[name][b, h, sources], mine[name][b, h, targets]
                assert torch.equal(expected.nan_to_num(), found.nan_to_num()), (name, b, h)


def test_a_program_keeps_the_codes_of_short_caches(device, monkeypatch):
    """The eviction of one token needs none: the lowest code is enough."""
    monkeypatch.setattr(ops, "INTERPRETED", False)
    assert ops.at_once(ops.AT_ONCE, 128)
    assert not ops.at_once(ops.AT_ONCE + 1, 128)
    assert not ops.at_once(2176, 1)
    monkeypatch.setattr(ops, "INTERPRETED", True)
    assert not ops.at_once(ops.AT_ONCE + 1, 128), "counts of more slots do not fit into their bits of a sum"


def test_attention_into_an_output_refuses_others(device):
    """Of another shape, dtype or layout, or with FP8."""
    query, occupied = torch.zeros(1, 2, 3, 16, device=device), torch.ones(1, 4, dtype=torch.bool, device=device)
    key = torch.zeros(1, 1, 4, 16, device=device)
    for output, stored in (
        (query[:, :1].contiguous(), PLAIN), (query.half(), PLAIN), (query.mT.contiguous().mT, PLAIN),
        (query.clone(), Stored(torch.float8_e5m2)),
    ):
        with pytest.raises(ValueError, match=r"^output must be contiguous"):
            attend(query, key, key, occupied, 1.0, stored=stored, output=output)
