"""LongFlow's benchmarks: a whole decode step against the fastest kernels for attention alone.

The functions for prompts are not gated, since they run once per sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.cases.case import DecodeCase, WindowCase
from kvtwin.conformance.cases.fp8_cases import FORMATS, Fp8Case
from kvtwin.conformance.cases.oracle import attend
from kvtwin.conformance.cases.paged_states import empty_pages
from kvtwin.conformance.cases.paged_view import PagedLayout
from kvtwin.conformance.judge import bounds
from kvtwin.conformance.judge.checkers.longflow import assert_decode_right
from kvtwin.conformance.judge.checkers.snapkv import assert_compress_right
from kvtwin.conformance.judge.compare import assert_same, assert_within
from kvtwin.optimized import longflow
from kvtwin.optimized._common.prompt_attention import causal_attention
from kvtwin.reference import longflow as reference

from .peers import causal_peers, decode_peers

pytestmark = pytest.mark.benchmark(group="longflow")

DEVICE = "cuda"
DTYPE = torch.bfloat16
ITEM = DTYPE.itemsize
#: Rows of a batch that are compared with float64. All rows would take longer than the benchmark.
ROWS_CHECKED = 4


class Shape(NamedTuple):
    """B, Hq, Hkv, S (slots, or tokens of a prompt), D."""

    batch: int
    query_heads: int
    slots: int
    key_value_heads: int = 8
    head_dim: int = 128

    def __str__(self) -> str:
        return f"B{self.batch}-Hq{self.query_heads}-S{self.slots}"

    @property
    def attention_bytes(self) -> int:
        """The minimum for attention alone: read keys, values and queries once, write the output once."""
        cache = 2 * self.batch * self.key_value_heads * self.slots * self.head_dim
        return (cache + 2 * self.batch * self.query_heads * self.head_dim) * ITEM

    @property
    def fp8_bytes(self) -> int:
        """The minimum for attention over FP8 keys and values with scales of heads."""
        cache = 2 * self.batch * self.key_value_heads * self.slots * self.head_dim
        return cache + 2 * self.batch * self.query_heads * self.head_dim * ITEM + 2 * self.key_value_heads * 4

    @property
    def step_bytes(self) -> int:
        """The minimum for a step: also read the new token and write it to its slot, read the mask of occupied slots and
        write their scores."""
        token = 2 * self.batch * self.key_value_heads * self.head_dim * ITEM
        return self.attention_bytes + 2 * token + self.batch * self.slots * (1 + 4)


PAGE_SIZES = (16, 64)
STEPS = (Shape(128, 32, 3200), Shape(128, 16, 3200), Shape(1, 32, 32768), Shape(8, 32, 3200))


@pytest.fixture
def draw() -> Callable[..., Tensor]:
    """Normal numbers in the benchmarks' dtype, the same in every run."""
    generator = torch.Generator(DEVICE).manual_seed(20)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=DTYPE, device=DEVICE, generator=generator)

    return normal


def rows_checked(batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(batch)
    return torch.randperm(batch, generator=generator)[:ROWS_CHECKED].to(DEVICE)


def prompt(shape: Shape, tokens: int, draw: Callable[..., Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """query [B, Hq, T, D], key and value [B, Hkv, T, D]."""
    batch, query_heads, _, heads, head_dim = shape
    query, key, value = (draw(batch, count, tokens, head_dim) for count in (query_heads, heads, heads))
    return query, key, value


def empty_state(shape: Shape, budget: int, page_size: int | None = None) -> longflow.LongFlowState:
    """page_size: the tokens are in pages, in any order."""
    heads = {"key_value_heads": shape.key_value_heads, "head_dim": shape.head_dim}
    more = {"batch": shape.batch, **heads, "dtype": DTYPE, "device": DEVICE}
    pages = None if page_size is None else empty_pages(PagedLayout(page_size), slots=budget, **more)
    return longflow.LongFlowState(
        longflow.LongFlowConfig(budget), query_heads=shape.query_heads, pages=pages, **more
    )


# ---- a decode step ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", STEPS, ids=str)
def test_step(device_benchmark, draw, shape):
    """One step: write the token, attend to all tokens, score all slots and choose the next slot."""
    state = empty_state(shape, shape.slots)
    # One token below the budget: the first step fills the last slot, and every later step overwrites a slot.
    state.prefill(*prompt(shape, shape.slots - 1, draw))
    query = draw(shape.batch, shape.query_heads, shape.head_dim)
    key, value = (draw(shape.batch, shape.key_value_heads, shape.head_dim) for _ in range(2))
    rows = rows_checked(shape.batch)

    def verify(output: Tensor) -> None:
        assert_all_written(output, state.score)
        check_step(state, query, key, value, output, rows)

    device_benchmark(
        lambda: state.step(query, key, value), moves=shape.step_bytes, verify=verify, poison=[state.score],
        peers=decode_peers(query, state.key, state.value), peers_move=shape.attention_bytes,
        verify_peer=lambda output: check_attention(state, query, output, rows),
        references={"eager": lambda: reference.decode_attention(query, state.key, state.value, state.occupied)},
    )


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("shape", STEPS[:1], ids=str)
def test_step_over_pages(device_benchmark, draw, shape, page_size):
    """The same step of a state whose tokens are in pages, compared with that of a state with tensors of its own."""
    paged, plain = (empty_state(shape, shape.slots, size) for size in (page_size, None))
    tokens = prompt(shape, shape.slots - 1, draw)
    for state in (paged, plain):
        state.prefill(*tokens)
    query = draw(shape.batch, shape.query_heads, shape.head_dim)
    key, value = (draw(shape.batch, shape.key_value_heads, shape.head_dim) for _ in range(2))
    rows = rows_checked(shape.batch)

    def verify(output: Tensor) -> None:
        assert_all_written(output, paged.score)
        check_step(paged, query, key, value, output, rows)

    device_benchmark(
        lambda: paged.step(query, key, value), moves=shape.step_bytes, verify=verify, poison=[paged.score],
        peers={"one_tensor": lambda: plain.step(query, key, value)}, peers_move=shape.step_bytes,
        verify_peer=lambda output: check_attention(plain, query, output, rows),
    )


@pytest.mark.parametrize("shape", STEPS[:1], ids=str)
def test_decode_attention(device_benchmark, draw, shape):
    """The function. Unlike a step, it computes the norms of all values, which a state stores."""
    key, value = (draw(shape.batch, shape.key_value_heads, shape.slots, shape.head_dim) for _ in range(2))
    query = draw(shape.batch, shape.query_heads, shape.head_dim)
    occupied = torch.ones(shape.batch, shape.slots, dtype=torch.bool, device=DEVICE)
    rows = rows_checked(shape.batch)

    def verify(result: longflow.DecodeResult) -> None:
        assert_all_written(result[0], result[1])
        case = DecodeCase.of(query[rows], key[rows], value[rows], occupied[rows])
        assert_decode_right([part[rows] for part in result], case)

    device_benchmark(
        lambda: longflow.decode_attention(query, key, value, occupied), moves=shape.attention_bytes, verify=verify,
        peers=decode_peers(query, key, value), gated=False,
    )


@pytest.mark.parametrize("fp8", FORMATS)
@pytest.mark.parametrize("shape", STEPS[:1], ids=str)
def test_decode_attention_fp8(device_benchmark, draw, shape, fp8):
    """The function over FP8 keys and values with a scale of each head, compared with the same function in bfloat16."""
    inputs = fp8_inputs(shape, fp8, draw)
    plain = {**inputs, "key": inputs["key"].to(DTYPE), "value": inputs["value"].to(DTYPE)}
    del plain["key_scale"], plain["value_scale"]
    rows = rows_checked(shape.batch)
    device_benchmark(
        lambda: longflow.decode_attention(**inputs), moves=shape.fp8_bytes,
        verify=lambda result: check_fp8(inputs, result, rows),
        peers={"bfloat16": lambda: longflow.decode_attention(**plain)}, peers_move=shape.attention_bytes,
    )


def fp8_inputs(shape: Shape, fp8: str, draw: Callable[..., Tensor]) -> dict[str, Tensor]:
    """Arguments of `decode_attention`, with numbers that reach the largest one of the format."""
    most = torch.finfo(FORMATS[fp8]).max
    numbers = [draw(shape.batch, shape.key_value_heads, shape.slots, shape.head_dim) for _ in range(2)]
    key, value = ((number * (most / 8)).clamp(-most, most).to(FORMATS[fp8]) for number in numbers)
    scale = torch.linspace(4 / most, 8 / most, shape.key_value_heads, device=DEVICE)
    return {
        "query": draw(shape.batch, shape.query_heads, shape.head_dim), "key": key, "value": value,
        "occupied": torch.ones(shape.batch, shape.slots, dtype=torch.bool, device=DEVICE),
        "key_scale": scale, "value_scale": 2 * scale.flip(0),
    }


def check_fp8(inputs: dict[str, Tensor], result: longflow.DecodeResult, rows: Tensor) -> None:
    assert_all_written(result[0], result[1])
    case = Fp8Case.of(**{name: given if "scale" in name else given[rows] for name, given in inputs.items()})
    assert_decode_right([part[rows] for part in result], case)


def check_step(
    state: longflow.LongFlowState, query: Tensor, key: Tensor, value: Tensor, output: Tensor, rows: Tensor
) -> None:
    """Check the state after a step: the new token is in exactly one slot, and the results match the cache."""
    newest = state.positions == state.tokens_seen - 1                                     # [B, S]
    assert state.tokens_seen > state.config.budget, "no slot was overwritten"
    assert bool((newest.sum(-1) == 1).all()), "the newest token must be in one slot of each row"
    place = newest.long().argmax(-1)[:, None, None, None].expand(-1, key.shape[1], 1, key.shape[2])
    for name, stored, given in (("key", state.key, key), ("value", state.value, value)):
        assert_same(stored.gather(2, place)[:, :, 0], given, what=f"the new {name}")
    case = DecodeCase.of(
        query[rows], state.key[rows], state.value[rows], state.occupied[rows], protected=newest[rows]
    )
    assert_decode_right((output[rows], state.score[rows], state.next_slot[rows]), case)


def check_attention(state: longflow.LongFlowState, query: Tensor, output: Tensor, rows: Tensor) -> None:
    """Check a peer's output, which has [B, Hq, D] elements in this order."""
    case = DecodeCase.of(query[rows], state.key[rows], state.value[rows], state.occupied[rows])
    actual = output.reshape(query.shape)[rows]
    assert_within(actual, case.attention.output[:, :, 0], bounds.decode_output(case), what="attention")


def assert_all_written(output: Tensor, score: Tensor) -> None:
    """Assert that all rows were written: both buffers contained NaN before the last round."""
    assert not bool(output.isnan().any()), "part of the output was not written"
    assert not bool(score.isnan().any()), "part of the scores was not written"


# ---- the prompt, not gated -------------------------------------------------------------------------------------------

PROMPT = Shape(1, 32, 16384)
BUDGET = 3200


@pytest.mark.parametrize("shape", [PROMPT], ids=str)
def test_causal_attention(device_benchmark, draw, shape):
    """Attention of a prompt. It is compute-bound, so its share of the bandwidth is small."""
    query, key, value = prompt(shape, shape.slots, draw)
    occupied = torch.ones(shape.batch, shape.slots, dtype=torch.bool, device=DEVICE)

    def verify(output: Tensor) -> None:
        assert not bool(output.isnan().any()), "part of the output was not written"
        check_causal(query, key, value, occupied, output)

    device_benchmark(
        lambda: causal_attention(query, key, value, occupied, shape.head_dim**-0.5),
        moves=prompt_bytes(shape), verify=verify, gated=False,
        peers=causal_peers(query, key, value),
        verify_peer=lambda output: check_causal(query, key, value, occupied, output),
    )


@pytest.mark.parametrize("shape", [PROMPT], ids=str)
def test_prefill(device_benchmark, draw, shape):
    """The state's whole prefill: attention, compression to the budget, and filling the cache."""
    tensors = prompt(shape, shape.slots, draw)
    occupied = torch.ones(shape.batch, shape.slots, dtype=torch.bool, device=DEVICE)
    state = empty_state(shape, BUDGET)

    def verify(output: Tensor) -> None:
        check_causal(*tensors, occupied, output)
        query, key, value = tensors
        filled = slice(BUDGET - 1)
        check_compressed(
            query[:, :, -state.config.window:], key, value, state.key[:, :, filled], state.value[:, :, filled],
            state.positions[:, filled],
        )

    device_benchmark(
        lambda: state.prefill(*tensors), before=state.reset, moves=prompt_bytes(shape), verify=verify, capture=False,
        gated=False, peers=causal_peers(*tensors), verify_peer=lambda output: check_causal(*tensors, occupied, output),
    )


@pytest.mark.parametrize("shape", [PROMPT._replace(batch=8)], ids=str)
def test_compress_prefill(device_benchmark, draw, shape):
    """SnapKV's compression: reads all keys, and copies the kept keys and their values."""
    query, key, value = prompt(shape, shape.slots, draw)
    window = query[:, :, -32:].contiguous()
    del query
    target = BUDGET - 1
    row = shape.key_value_heads * shape.head_dim * ITEM
    device_benchmark(
        lambda: longflow.compress_prefill(window, key, value, target),
        moves=shape.batch * row * (shape.slots + 3 * target), capture=False, gated=False,
        verify=lambda result: check_compressed(window, key, value, *result),
        references={"eager": lambda: reference.compress_prefill(window, key, value, target)},
    )


def prompt_bytes(shape: Shape) -> int:
    heads = 2 * shape.query_heads + 2 * shape.key_value_heads
    return shape.batch * heads * shape.slots * shape.head_dim * ITEM


def check_causal(query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, output: Tensor) -> None:
    """Compare three blocks of 16 queries, at the end, the middle and the start, each of one KV head's group, with
    float64."""
    group, total = query.shape[1] // key.shape[1], key.shape[2]
    for head, end in ((0, total), (3, total // 2 + 5), (7, 16)):
        heads, one = slice(head * group, (head + 1) * group), slice(head, head + 1)
        block = slice(end - 16, end)
        truth = attend(query[:, heads, block], key[:, one, :end], value[:, one, :end], occupied[:, :end], causal=True)
        assert_within(
            output[:, heads, block], truth.output, bounds.output_error(truth, bounds.arithmetic(query.dtype)),
            what=f"output of the queries up to {end}",
        )


def check_compressed(
    window: Tensor, key: Tensor, value: Tensor, kept_key: Tensor, kept_value: Tensor, kept: Tensor
) -> None:
    """Check one row against float64: the choice must be right, and the kept keys and values exact copies."""
    row = slice(0, 1)
    case = WindowCase.of(window[row], key[row], value[row], budget=kept.shape[1])
    assert_compress_right((kept_key[row], kept_value[row], kept[row]), case)
