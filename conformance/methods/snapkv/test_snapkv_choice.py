"""SnapKV's choice of a block's evictions, from what keys received: lists of tokens say what leaves and where the rest
goes. The kernel that keeps codes in registers and the one that passes over the slots in chunks do the same."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.judge.bounds import DIVISION, EXP
from kvtwin.conformance.judge.compare import assert_same
from kvtwin.optimized._common.block_cache import compress, kernels, ops
from kvtwin.optimized._common.block_cache.pooled_choice import choose_pooled
from kvtwin.optimized.baselines import snapkv

pytestmark = pytest.mark.kind("equivalence")
BATCH, HEADS, HEAD_DIM = 2, 3, 16
#: (budget, tokens of the block, window, kernel_size).
SIZES = (
    (1, 1, 1, 1), (5, 2, 1, 1), (12, 6, 4, 3), (40, 24, 16, 5), (33, 31, 31, 11), (64, 17, 17, 17), (200, 150, 140, 7),
)


class Before(NamedTuple):
    """A row's buffers when a block is in its slots. counts [H]: tokens of the cache;
    order [H, budget]: their slots, the oldest first, then free ones; valid [Q] of the block; received [H, S]."""

    counts: list[int]
    order: Tensor
    valid: Tensor
    received: Tensor


class After(NamedTuple):
    score: list[float]
    destination: list[int]
    order: list[int]
    count: int


def before(budget: int, count: int, kind: str, seed: int) -> Before:
    """One head is full, one has room for some of the block, and one is empty. A free slot's order is its number."""
    generator = torch.Generator().manual_seed(seed)
    counts = [budget, max(0, budget - count // 2), 0]
    order = torch.stack([
        torch.cat((torch.randperm(held, generator=generator), torch.arange(held, budget))) for held in counts
    ])
    valid = torch.rand(count, generator=generator) < (0.7 if kind == "padding" else 2)
    # Multiples of 2^-12: their sums are exact. With few values, pools tie.
    values = 3 if kind == "ties" else 2**11
    received = torch.randint(0, values, (HEADS, budget + count), generator=generator) / 2**12
    return Before(counts, order, valid, received)


def expected(given: Before, head: int, budget: int, window: int, kernel_size: int) -> After:
    count = len(given.valid)
    tokens = given.order[head, : given.counts[head]].tolist()
    tokens += [budget + i for i in range(count) if given.valid[i]]
    prefix = len(tokens) - window
    weights = [given.received[head, slot].item() for slot in tokens[:prefix]]
    half = kernel_size // 2
    score = [0.0] * (budget + count)
    for i, slot in enumerate(tokens):
        pool = sum(weights[max(0, i - half) : i + half + 1]) / kernel_size
        score[slot] = pool if i < prefix else float("inf")
    leave = max(0, len(tokens) - budget)
    gone = set(sorted(tokens[:prefix], key=lambda slot: (score[slot], slot))[:leave])
    free = [slot for slot in range(budget) if slot not in tokens or slot in gone]
    moved = dict(zip((slot for slot in tokens if slot >= budget and slot not in gone), free, strict=False))
    kept = [moved.get(slot, slot) for slot in tokens if slot not in gone]
    return After(score, [moved.get(budget + i, -1) for i in range(count)], kept, len(kept))


@pytest.mark.parametrize("kind", ["plain", "ties", "padding"])
@pytest.mark.parametrize("by", ["registers", "ring", "chunks"])
@pytest.mark.parametrize(("budget", "count", "window", "kernel_size"), SIZES)
def test_the_choice_is_that_of_a_list_of_tokens(budget, count, window, kernel_size, by, kind, device):
    """The window is the end of the block, or, with a ring, what the positions of the window's queries say."""
    given = [before(budget, count, kind, seed=budget + row) for row in range(BATCH)]
    asks = torch.stack([row.valid[-window:] for row in given])
    slots = budget + count + 3
    occupied = torch.zeros(BATCH, HEADS, slots, dtype=torch.bool)
    for b, row in enumerate(given):
        for head, held in enumerate(row.counts):
            occupied[b, head, :held] = True
        occupied[b, :, budget : budget + count] = row.valid
    counts = occupied.sum(-1, dtype=torch.int32)
    order = torch.stack([row.order.int() for row in given]).to(device)
    window_positions = torch.where(asks, torch.arange(window), -1)
    if by == "registers":
        window_positions.fill_(-1)                                          # of an earlier block: not to be read
    occupied, counts, window_positions = (tensor.to(device) for tensor in (occupied, counts, window_positions))
    numbers = torch.full((4, BATCH * HEADS, slots), -7, dtype=torch.int32, device=device)
    score = torch.full((BATCH, HEADS, slots), -1.0, device=device)
    seen = torch.zeros(1, dtype=torch.int64, device=device)
    received = torch.stack([row.received for row in given]).float().to(device)
    if by == "chunks":
        token_index = torch.zeros(BATCH, HEADS, slots, dtype=torch.int32)
        for b, row in enumerate(given):
            for head, held in enumerate(row.counts):
                token_index[b, head, row.order[head, :held]] = torch.arange(held, dtype=torch.int32)
                token_index[b, head, budget : budget + count] = held + row.valid.cumsum(0).int() - 1
        key = torch.zeros(BATCH, HEADS, slots, HEAD_DIM, device=device)
        compress.compress(
            window_positions, received, key, key.clone(), occupied, torch.zeros_like(occupied, dtype=torch.int64),
            score, token_index.to(device), counts.clone(), seen, counts, order, numbers, budget, budget, count,
            kernel_size, False, False,
        )
        destination = numbers[3].view(BATCH, HEADS, slots)[..., budget : budget + count]
    else:
        destination = choose_pooled(
            window_positions, received, occupied, score, seen, counts, order, numbers, budget, count, kernel_size,
            by == "registers",
        )
    assert seen.item() == count
    for b, head in product(range(BATCH), range(HEADS)):
        wanted = expected(given[b], head, budget, int(asks[b].sum()), kernel_size)
        there = occupied[b, head, : budget + count].cpu()
        assert destination[b, head].tolist() == wanted.destination
        assert counts[b, head].item() == wanted.count
        assert order[b, head, : wanted.count].tolist() == wanted.order
        # The sums are exact.
        found = score[b, head, : budget + count].cpu()[there].double()
        exact = torch.tensor(wanted.score, dtype=torch.float64)[there]
        assert torch.equal(found.isinf(), exact.isinf())
        finite = exact.isfinite()
        assert bool(((found - exact).abs()[finite] <= DIVISION * exact[finite]).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_weights_of_a_blocks_last_queries_are_by_their_own_softmaxes(dtype, device):
    """With logits beyond 2^20, each query gives its best key a weight of 1, and all others 0. With the softmax of
    another query, or of a logit that was rounded otherwise, it would be 0 or infinite."""
    generator = torch.Generator().manual_seed(0)
    query, key = (
        (torch.randn(1, heads, count, 128, generator=generator) * 2.0**12).to(dtype).to(device)
        for heads, count in ((2, 64), (1, 300))
    )
    occupied = torch.ones(1, 1, 300, dtype=torch.bool, device=device)
    softmax_parts = kernels.attend(query, key, key, occupied, 1.0).softmax_parts
    for last in (1, 3, 8, 40):
        weight = kernels.received(query[:, :, -last:], key, occupied, softmax_parts[..., -last:], 1.0, mean=True)
        best = (query[0, :, -last:].double() @ key[0, 0].double().T).masked_fill(
            torch.arange(300, device=device) > torch.arange(300 - last, 300, device=device)[:, None], -torch.inf
        ).argmax(-1)
        # Sums of ones are exact. An exponential and two quotients: of the softmax and of the mean.
        exact = best.flatten().bincount(minlength=300).double() / best.numel()
        assert bool(((weight[0, 0].double() - exact).abs() <= (EXP + 2 * DIVISION) * exact).all())


def test_a_block_with_the_whole_window_takes_the_softmaxes_of_its_attention(device, monkeypatch):
    """Otherwise, the window's queries attend once more. The last queries of all blocks enter the window at the end."""
    done: list[str] = []

    def note(module: Any, name: str) -> None:
        call = getattr(module, name)

        def noting(*arguments: Any, **options: Any) -> Any:
            done.append(name)
            return call(*arguments, **options)

        monkeypatch.setattr(module, name, noting)

    for name in ("weigh_window", "choose_pooled", "observe"):
        note(snapkv, name)
    note(kernels, "received")
    note(ops, "settle")
    config = snapkv.SnapKVConfig(budget=12, window=4, block_size=4)
    state = snapkv.SnapKVState(
        config, batch=1, query_heads=4, key_value_heads=2, head_dim=HEAD_DIM, dtype=torch.float32, device=device
    )
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 10, HEAD_DIM, generator=generator).to(device) for heads in (4, 2, 2))
    state.prefill(query, key, value)
    late = ["received", "choose_pooled", "settle"]
    assert done == late * 2 + ["observe"] + ["observe", "weigh_window", "choose_pooled", "settle"]


def test_blocks_smaller_than_the_window_are_the_same_by_both_kernels(device, monkeypatch):
    """Their evictions are chosen before their attention. The kernel that passes over the slots in chunks leaves the
    destinations of a head's tokens among those of all its slots."""
    config = snapkv.SnapKVConfig(budget=12, window=4, block_size=3)
    generator = torch.Generator().manual_seed(0)
    blocks = [
        [torch.randn(BATCH, heads, 3, HEAD_DIM, generator=generator).to(device) for heads in (2 * HEADS, HEADS, HEADS)]
        for _ in range(9)
    ]

    def appended(at_once: bool) -> tuple[snapkv.SnapKVState, list[Tensor]]:
        monkeypatch.setattr(ops, "at_once", lambda end, count: at_once)
        state = snapkv.SnapKVState(
            config, batch=BATCH, query_heads=2 * HEADS, key_value_heads=HEADS, head_dim=HEAD_DIM, dtype=torch.float32,
            device=device,
        )
        return state, [state.append_block(*block) for block in blocks]

    contiguous: list[bool] = []
    settle = ops.settle

    def settling(destination: Tensor, *arguments: Any) -> None:
        contiguous.append(destination.is_contiguous())
        settle(destination, *arguments)

    monkeypatch.setattr(ops, "settle", settling)
    expected, outputs = appended(at_once=True)
    tested, found = appended(at_once=False)
    assert contiguous == [True] * len(blocks) + [False] * len(blocks)
    for one, other in zip(found, outputs, strict=True):
        assert_same(one, other, what="output")
    for name in ("positions", "key", "value", "occupied", "score"):
        assert_same(getattr(tested, name), getattr(expected, name), what=name)
