"""KeyDiff's benchmarks: eviction (score, selection and compaction) against eager PyTorch, and a decode step.

The eager version is what caches in PyTorch do: normalize, mean, cosine_similarity, topk, gather.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kvtwin.conformance.cases.fp8_cases import FORMATS
from kvtwin.conformance.cases.key_cases import KeyCase
from kvtwin.conformance.cases.oracle import upcast
from kvtwin.conformance.cases.paged_states import empty_pages
from kvtwin.conformance.cases.paged_view import PagedLayout
from kvtwin.conformance.judge.bounds import UNIT
from kvtwin.conformance.judge.checkers import keydiff as judge
from kvtwin.conformance.judge.compare import assert_same
from kvtwin.optimized import keydiff
from kvtwin.optimized._common.pages import write_slots
from kvtwin.reference import keydiff as reference
from kvtwin.reference.contract import Pages

pytestmark = pytest.mark.benchmark(group="keydiff")

DEVICE = "cuda"
DTYPE = torch.bfloat16
ITEM = DTYPE.itemsize
HEADS = 8
HEAD_DIM = 128
BUDGET = 8192
#: Ranking and replacing in a decode step may take this many times as long as reading the keys at copy bandwidth.
MAX_OVER_READING = 1.1


class Shape(NamedTuple):
    """B and S. The number of heads and their size are fixed."""

    batch: int
    slots: int

    def __str__(self) -> str:
        return f"B{self.batch}-S{self.slots}"

    @property
    def key_bytes(self) -> int:
        return self.batch * HEADS * self.slots * HEAD_DIM * ITEM

    def evict_bytes(self, budget: int) -> int:
        """Bytes: the keys are read twice (anchor, ranks), and the kept keys and values are read and written."""
        return 2 * self.key_bytes + 4 * self._replace(slots=budget).key_bytes


EVICTIONS = (Shape(8, 32768), Shape(1, 131072))
STEPS = (Shape(128, 3200), Shape(1, 32768))
PAGE_SIZES = (16, 64)


@pytest.fixture
def draw() -> Callable[..., Tensor]:
    """Normal numbers with a nonzero mean, like real keys, the same in every run."""
    generator = torch.Generator(DEVICE).manual_seed(30)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=DTYPE, device=DEVICE, generator=generator).add_(0.25)

    return normal


def eager(key: Tensor, value: Tensor, budget: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and slots of the kept tokens, in slot order."""
    anchor = functional.normalize(key, dim=-1).mean(2, keepdim=True)
    score = -functional.cosine_similarity(key, anchor, dim=-1)
    kept = score.topk(budget, -1).indices.sort(-1).values
    index = kept[..., None].expand(-1, -1, -1, key.shape[-1])
    return key.gather(2, index), value.gather(2, index), kept


def check_evicted(
    key: Tensor, value: Tensor, result: keydiff.EvictResult, budget: int, heads: tuple[int, ...] = (0, HEADS - 1)
) -> None:
    """Check these heads of one row against float64, and in all heads that the kept tokens are exact copies."""
    assert not bool(result.key.isnan().any()), "part of the keys was not written"
    index = result.kept[..., None].expand(result.key.shape)
    assert bool(result.occupied.all()), "every kept slot must hold a token"
    assert bool((result.kept.diff() > 0).all()), "slots must ascend"
    for name, kept, given in (("key", result.key, key), ("value", result.value, value)):
        assert_same(kept, given.gather(2, index), what=f"kept {name}")
    for head in heads:
        part = slice(key.shape[0] - 1, None), slice(head, head + 1)
        low, high = judge.rank_interval(KeyCase.of(key[part], budget=budget))
        check_cut(low, high, torch.zeros_like(low, dtype=torch.bool).scatter(-1, result.kept[part], True))


def check_cut(low: Tensor, high: Tensor, keep_mask: Tensor) -> None:
    """Assert that within the error bounds no evicted token ranks above a kept one. (The suite's judge also checks ties,
    which takes S^2 memory.)"""
    kept, evicted = high[keep_mask].min(), low[~keep_mask].max()
    assert bool(evicted <= kept), f"an evicted token ranks at least {evicted:.9g}, a kept one at most {kept:.9g}"


@pytest.mark.parametrize("shape", EVICTIONS, ids=str)
def test_evict(device_benchmark, draw, shape):
    """Eviction of a prompt down to the budget, all launches included."""
    key, value = (draw(shape.batch, HEADS, shape.slots, HEAD_DIM) for _ in range(2))
    device_benchmark(
        lambda: keydiff.evict(key, value, BUDGET), moves=shape.evict_bytes(BUDGET),
        verify=lambda result: check_evicted(key, value, keydiff.EvictResult(*result), BUDGET),
        references={"eager": lambda: eager(key, value, BUDGET)},
    )


@pytest.mark.parametrize("shape", EVICTIONS[:1], ids=str)
def test_score(device_benchmark, draw, shape):
    """Scores alone: reads the keys twice and writes one float32 per key."""
    key = draw(shape.batch, HEADS, shape.slots, HEAD_DIM)

    def verify(score: Tensor) -> None:
        assert not bool(score.isnan().any()), "part of the scores was not written"
        for head in (0, HEADS - 1):
            part = slice(shape.batch - 1, None), slice(head, head + 1)
            judge.assert_score_right(score[part], KeyCase.of(key[part]))

    device_benchmark(
        lambda: keydiff.score(key), moves=2 * shape.key_bytes + shape.key_bytes // HEAD_DIM // ITEM * 4, verify=verify,
        gated=False,
    )


@pytest.mark.parametrize("fp8", FORMATS)
@pytest.mark.parametrize("shape", EVICTIONS[:1], ids=str)
def test_score_fp8(device_benchmark, draw, shape, fp8):
    """Scores of FP8 keys, which need no scales. The peer is the same function in bfloat16."""
    most = torch.finfo(FORMATS[fp8]).max
    plain = draw(shape.batch, HEADS, shape.slots, HEAD_DIM)
    key = (plain * (most / 8)).clamp(-most, most).to(FORMATS[fp8])
    scores = shape.key_bytes // HEAD_DIM // ITEM * 4

    def verify(score: Tensor) -> None:
        assert not bool(score.isnan().any()), "part of the scores was not written"
        for head in (0, HEADS - 1):
            part = slice(shape.batch - 1, None), slice(head, head + 1)
            judge.assert_score_right(score[part], KeyCase.of(key[part]))

    device_benchmark(
        lambda: keydiff.score(key), moves=shape.key_bytes + scores, verify=verify, gated=False,
        peers={"bfloat16": lambda: keydiff.score(plain)}, peers_move=2 * shape.key_bytes + scores,
    )


# ---- a decode step ---------------------------------------------------------------------------------------------------


def filled_state(
    shape: Shape, draw: Callable[..., Tensor], page_size: int | None = None
) -> keydiff.KeyDiffState:
    """A full cache with a new token in slot `budget`, as in a step after its attention. page_size: the tokens are in
    pages, in any order."""
    sizes = {
        "batch": shape.batch, "key_value_heads": HEADS, "head_dim": HEAD_DIM, "dtype": DTYPE, "device": DEVICE
    }
    pages = None if page_size is None else empty_pages(PagedLayout(page_size), slots=shape.slots + 1, **sizes)
    state = keydiff.KeyDiffState(keydiff.KeyDiffConfig(shape.slots), query_heads=HEADS, pages=pages, **sizes)
    for start in range(0, shape.slots, 3200):
        tokens = min(3200, shape.slots - start)
        state.append_block(*(draw(shape.batch, HEADS, tokens, HEAD_DIM) for _ in range(3)))
    state.step(*(draw(shape.batch, HEADS, HEAD_DIM) for _ in range(3)))
    return state


@pytest.mark.parametrize("shape", STEPS, ids=str)
def test_replace(device_benchmark, draw, shape):
    """KeyDiff's part of a step: add the new key to the anchor, rank all tokens, replace one.

    Attention belongs to the block cache and is not timed. `moves` counts one read of the keys.
    """
    state = filled_state(shape, draw)

    def verify(_: object) -> None:
        check_replaced(state, draw)

    figures = device_benchmark(state._replace, moves=shape.key_bytes, verify=verify, gated=False)
    if figures is not None and shape == STEPS[0]:
        times = 1 / figures.share
        assert times <= MAX_OVER_READING, (
            f"takes {times:.3f} times as long as reading the keys at copy bandwidth, at most {MAX_OVER_READING} allowed"
        )


def check_replaced(state: keydiff.KeyDiffState, draw: Callable[..., Tensor]) -> None:
    """Take one more step on the timed buffers. Assert that float64 evicts the same token and that the others did not
    move.

    The carried anchor has the error of up to `refresh` steps. Each step adds one unit vector and subtracts another,
    both with the error of normalizing, and rounds the sum twice.
    """
    budget, part = state.config.budget, (slice(-1, None), slice(HEADS - 1, None))
    token = [draw(state.sizes.batch, HEADS, HEAD_DIM) for _ in range(3)]
    before = torch.cat((state.key[part][:, :, :budget], token[1][part][:, :, None]), 2)
    positions = state.positions[..., :budget].clone()
    state.step(*token)
    taken = state.positions[..., :budget] == state.tokens_seen - 1                        # [B, Hkv, N]
    assert_same(state.positions[..., :budget].where(~taken, 0), positions.where(~taken, 0), what="kept tokens")
    slot = taken[part].long().argmax(-1)                                                  # 0 if the new token left
    evicted = torch.where(taken[part].any(-1), slot, budget)[..., None]
    keep_mask = torch.arange(budget + 1, device=DEVICE) != evicted                        # [1, 1, N + 1]

    case = KeyCase.of(before, budget=budget)
    fresh = judge.keys_of(case)
    term = (1 + fresh.own) * (1 + fresh.common) - 1
    drift = state.config.refresh * 2 * (term + UNIT * (fresh.direction.abs() + fresh.unit_sum_error + 1))
    keys = judge.Keys(fresh.key, fresh.occupied, carried=fresh.unit_sum_error + drift)
    rank, error = reference.rank(upcast(before), fresh.occupied, "mean_normalized", "cosine"), keys.product_error()
    check_cut(rank - error, rank + error, keep_mask)


@pytest.mark.parametrize("shape", STEPS[:1], ids=str)
def test_step(device_benchmark, draw, shape):
    """A whole step with attention. Not gated."""
    state = filled_state(shape, draw)
    token = [draw(shape.batch, HEADS, HEAD_DIM) for _ in range(3)]
    device_benchmark(
        lambda: state.step(*token), moves=3 * shape.key_bytes, verify=lambda _: check_replaced(state, draw), gated=False
    )


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("shape", STEPS[:1], ids=str)
def test_step_over_pages(device_benchmark, draw, shape, page_size):
    """The same step of a state whose tokens are in pages, compared with that of a state with tensors of its own."""
    paged, plain = (filled_state(shape, draw, size) for size in (page_size, None))
    token = [draw(shape.batch, HEADS, HEAD_DIM) for _ in range(3)]
    device_benchmark(
        lambda: paged.step(*token), moves=3 * shape.key_bytes, verify=lambda _: check_replaced(paged, draw),
        peers={"one_tensor": lambda: plain.step(*token)}, peers_move=3 * shape.key_bytes,
        verify_peer=lambda _: check_replaced(plain, draw),
    )


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("shape", STEPS[:1], ids=str)
def test_score_over_pages(device_benchmark, draw, shape, page_size):
    """The function, which reads the keys twice, compared with that over one tensor. Not gated."""
    key = draw(shape.batch, HEADS, shape.slots, HEAD_DIM)
    occupied = torch.ones(shape.batch, shape.slots, dtype=torch.bool, device=DEVICE)
    pages = in_pages(key, page_size)
    part = slice(shape.batch - 1, None), slice(HEADS - 1, None)

    def verify(score: Tensor) -> None:
        assert not bool(score.isnan().any()), "part of the scores was not written"
        judge.assert_score_right(score[part], KeyCase.of(key[part]))

    moves = 2 * shape.key_bytes + shape.key_bytes // HEAD_DIM // ITEM * 4
    device_benchmark(
        lambda: keydiff.paged_score(pages, occupied), moves=moves, verify=verify, gated=False,
        peers={"one_tensor": lambda: keydiff.score(key, occupied=occupied)}, peers_move=moves, verify_peer=verify,
    )


def in_pages(key: Tensor, page_size: int) -> Pages:
    """Pages in any order with these keys [B, Hkv, S, D], and with values that are not set."""
    batch, heads, slots, head_dim = key.shape
    pages = empty_pages(
        PagedLayout(page_size), batch=batch, slots=slots, key_value_heads=heads, head_dim=head_dim, dtype=key.dtype,
        device=key.device,
    )
    write_slots(pages.key_cache, pages.block_table, key)
    return pages


# ---- growth ----------------------------------------------------------------------------------------------------------

SIZES = [2**power for power in range(11, 21)]


def test_time_is_linear(gpu, draw, capsys):
    """Evict three quarters of S tokens. Fit a line, weighted by 1/S, to the times: its intercept is the cost of the
    launches, its slope the cost per token. Doubling S must not take more than 2.1 times as long; the 5 % are for
    measurement noise.
    """
    milliseconds = []
    for slots in SIZES:
        key, value = (draw(1, HEADS, slots, HEAD_DIM) for _ in range(2))
        program = gpu.capture(lambda key=key, value=value: keydiff.evict(key, value, key.shape[2] // 4))
        rounds = []
        for _ in range(20):
            gpu.cold()
            start = gpu.now()
            program.run()
            rounds.append((start, gpu.now()))
        milliseconds.append(1e3 * statistics.median(end - start for start, end in rounds[5:]))
        check_evicted(key, value, keydiff.EvictResult(*program.result), slots // 4, heads=() if slots > 2**17 else (0,))
    weights = [1 / slots for slots in SIZES]
    slope, intercept = weighted_line(SIZES, milliseconds, weights)
    with capsys.disabled():
        print(f"\nevict: {1e3 * intercept:.1f} us + {1e6 * slope:.4f} ns per token of {HEADS} heads of {HEAD_DIM}")
        for slots, took in zip(SIZES, milliseconds, strict=True):
            print(f"  S = {slots:8d}: {took:.4f} ms, on the line {intercept + slope * slots:.4f}")
    for slots, less, longer in zip(SIZES, milliseconds, milliseconds[1:], strict=False):
        assert longer <= 2.1 * less, f"{2 * slots} tokens took {longer / less:.2f} times as long as {slots}"


def weighted_line(x: list[int], y: list[float], weights: list[float]) -> tuple[float, float]:
    """Slope and intercept of a weighted least-squares line."""
    total = sum(weights)
    centre = sum(w * a for w, a in zip(weights, x, strict=True)) / total
    height = sum(w * b for w, b in zip(weights, y, strict=True)) / total
    rise = sum(w * (a - centre) * (b - height) for w, a, b in zip(weights, x, y, strict=True))
    run = sum(w * (a - centre) ** 2 for w, a in zip(weights, x, strict=True))
    return rise / run, height - rise / run * centre
