"""The kernel of a prompt's attention: PyTorch's for whole prompts on a GPU, kvtwin's where they cannot run.

PyTorch's kernels need a GPU and 16-bit numbers. In the interpreter, PyTorch's attention in plain operations takes their
place, so that what surrounds the kernels is tested everywhere.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtwin.conformance import discovery
from kvtwin.conformance.cases.oracle import attend
from kvtwin.conformance.cases.state_trace import StateTrace
from kvtwin.conformance.judge import bounds, checkers, lockstep
from kvtwin.conformance.judge.compare import assert_same, assert_within
from kvtwin.optimized._common import library_attention, prompt_attention
from kvtwin.optimized._common.block_cache import ops
from kvtwin.optimized._common.block_cache import state as block_state

pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.whole]

#: Prompts of two rows: the numbers of tokens for each kernel. CUDNN_WORK is between those of a GPU.
LENGTHS = {"cpu": {"math": 40}, "cuda": {"cudnn": 2100, "flash": 700}}
CUDNN_TOKENS = 1400
#: Methods whose instances know whether PyTorch's kernels may attend: by default, they may.
CHOOSE_WHEN_MADE = ("streaming_llm",)
#: Methods that read the softmaxes of a block's queries, which PyTorch's kernels do not return.
READ_SOFTMAXES = tuple(
    pair.name for pair in discovery.with_state()
    if pair.state is not None and not getattr(getattr(pair.optimized, pair.state.__name__), "_library_attends", True)
    and pair.name not in CHOOSE_WHEN_MADE
)


@pytest.fixture(autouse=True)
def library(device: torch.device, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """In the interpreter, PyTorch's plain operations are the library's kernel."""
    monkeypatch.setattr(library_attention, "CUDNN_WORK", 2 * 4 * 64 * CUDNN_TOKENS**2)
    if device.type == "cpu" and "others" not in request.node.name:
        monkeypatch.setattr(library_attention, "library_kernel", lambda *_, **__: "math")
        monkeypatch.setattr(block_state, "library_kernel", lambda *_: "math")


def expected(name: str, occupied: Tensor | None) -> str:
    """The kernel of a prompt that would take the kernel `name` without padding. Rows with padding are attended to one
    by one, each with half of the batch's work."""
    if name != "cudnn":
        return name
    if occupied is not None and not occupied.all():
        shortest = min(int(count) for count in occupied.sum(1) if count)
        name = "cudnn" if shortest**2 >= 2 * CUDNN_TOKENS**2 else "flash"
    return name if library_attention.cudnn_is_chosen(torch.device("cuda")) else "flash"


def state_and_prompt(
    pair: discovery.Pair, tokens: int, padding: str, device: torch.device
) -> tuple[Any, dict[str, Tensor | None]]:
    """An empty state, and a prompt of one block beyond its budget."""
    options = {**checkers.ask(pair.name, "SMALL", {}), **checkers.with_budget(pair.name, tokens // 4)}
    assert pair.config is not None and pair.state is not None
    fields = {field.name for field in dataclasses.fields(pair.config)}
    more = {"block_size": tokens, "max_tokens": tokens}
    options |= {name: value for name, value in more.items() if name in fields}
    trace = StateTrace(
        method=pair.name, config=tuple(options.items()), prompt=tokens, steps=1, padding=padding, batch=2,
        key_value_heads=2, group=2, head_dim=64, device=str(device), seed=11,
        dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
    )
    state = getattr(pair.optimized, pair.state.__name__)(pair.config(**trace.options), **trace.sizes)
    prompt = trace.prompt_inputs
    assert prompt is not None
    return state, prompt | checkers.extras(state, prompt["query"], prompt["key"], prompt["value"])


def assert_same_tokens(pair: discovery.Pair, state: Any, other: Any) -> None:
    """Both states hold the same tokens, with the same bits."""
    hidden = ~other.occupied
    for field in checkers.ask(pair.name, "Adapter", lockstep.Adapter).stored:
        one, two = getattr(state, field), getattr(other, field)
        if one.dim() == 4 and not checkers.ask(pair.name, "LOSSY", False):
            free = hidden if hidden.dim() == 3 else hidden[:, None]
            one, two = (tensor.masked_fill(free[..., None], 0) for tensor in (one, two))
        assert_same(one, two, what=field)
    assert_same(state.positions, other.positions, what="positions")
    assert_same(state.occupied, other.occupied, what="occupied")


@pytest.mark.slow_on_cpu
@pytest.mark.parametrize("pair", discovery.with_state(), ids=str)
@pytest.mark.parametrize("padding", ["none", "left_padding", "full"])
def test_a_state_is_the_same_after_pytorchs_kernel_and_kvtwins(pair, padding, device, monkeypatch):
    """Prompts without a mask, with padding before the tokens, and with a mask of ones. What a state keeps does not
    depend on the output, which is right within its bounds."""
    for name, tokens in LENGTHS[device.type].items():
        state, prompt = state_and_prompt(pair, tokens, padding, device)
        output = state.prefill(**prompt)
        used = "kvtwin" if pair.name in READ_SOFTMAXES else expected(name, prompt["occupied"])
        assert state.prompt_kernel == used
        inputs = {name: prompt[name] for name in ("query", "key", "value", "occupied")}
        if inputs["occupied"] is None:
            inputs["occupied"] = torch.ones(2, tokens, dtype=torch.bool, device=device)
        check(output, **inputs, scale=state.scale)
        plain, _ = state_and_prompt(pair, tokens, padding, device)
        with monkeypatch.context() as without:
            for module in (library_attention, block_state):
                without.setattr(module, "library_kernel", lambda *_, **__: "kvtwin")
            plain.prefill(**prompt)
        assert plain.prompt_kernel == "kvtwin"
        assert_same_tokens(pair, state, plain)


@pytest.mark.slow_on_cpu
@pytest.mark.parametrize("pair", discovery.with_state(), ids=str)
def test_a_prompt_may_come_late_and_be_overwritten_at_once(pair, device):
    """On a GPU, a method's own work runs beside the attention, on another stream. Here the caller's stream is busy when
    prefill is called, fills the prompt after that, and overwrites it as soon as prefill returns."""
    tokens = LENGTHS[device.type]["cudnn" if device.type == "cuda" else "math"]
    expected_state, prompt = state_and_prompt(pair, tokens, "none", device)
    expected_output = expected_state.prefill(**prompt)
    state, _ = state_and_prompt(pair, tokens, "none", device)
    late = {name: None if one is None else torch.full_like(one, torch.nan) for name, one in prompt.items()}
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda._sleep(2 * 10**8)                                           # about a tenth of a second
    for name, one in late.items():
        if one is not None:
            one.copy_(prompt[name])
    output = state.prefill(**late)
    for one in late.values():
        if one is not None:
            one.fill_(torch.nan)
    assert_same(output, expected_output, what="the output")
    assert_same_tokens(pair, state, expected_state)


def tensors(device: torch.device, tokens: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """query [2, 4, T, 64]; key, value [2, 2, T, 64], each in its own memory order."""
    generator = torch.Generator(device).manual_seed(tokens)
    query, key, value = (
        torch.randn(2, tokens, heads, 64, generator=generator, device=device).to(dtype).transpose(1, 2)
        for heads in (4, 2, 2)
    )
    return query, key.contiguous(), value


def test_rows_with_padding_before_and_behind_their_tokens(device):
    """Padding may contain NaN. A row may have no token."""
    for name, tokens in LENGTHS[device.type].items():
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        for ranges in (((3, tokens), (0, tokens - 9)), ((0, tokens), (7, tokens - 8)), ((1, tokens), (5, 5))):
            occupied = torch.zeros(2, tokens, dtype=torch.bool, device=device)
            for row, (start, end) in enumerate(ranges):
                occupied[row, start:end] = True
            query, key, value = (
                tensor.masked_fill(~occupied[:, None, :, None], torch.nan) for tensor in tensors(device, tokens, dtype)
            )
            output, used = library_attention.attend_prompt(query, key, value, occupied, 0.125, padded=True)
            assert used == expected(name, occupied)
            check(output, query, key, value, occupied, 0.125)
            again, _ = library_attention.attend_prompt(query, key, value, occupied, 0.125, padded=True)
            assert_same(output, again, what="the output of a second call")


def check(output: Tensor, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, scale: float) -> None:
    whole = {"query": query, "key": key, "value": value, "occupied": occupied, "scale": scale}
    assert_within(output, attend(**whole, causal=True).output, bounds.causal_output(**whole), what="the output")


def test_a_scale_reaches_pytorchs_kernel(device):
    for name, tokens in LENGTHS[device.type].items():
        inputs = tensors(device, tokens, torch.bfloat16 if device.type == "cuda" else torch.float32)
        occupied = torch.ones(2, tokens, dtype=torch.bool, device=device)
        output, used = library_attention.attend_prompt(*inputs, occupied, 0.5, padded=False)
        assert used == name
        check(output, *inputs, occupied, 0.5)


@pytest.mark.parametrize("why", ["gap", "float32", "short", "stride", "negative scale"])
def test_all_others_take_kvtwins_kernel(why, device):
    """On the CPU, all prompts do."""
    tokens = 40 if device.type == "cpu" or why == "short" else 600
    half = device.type == "cuda" and why != "float32"
    query, key, value = tensors(device, tokens, torch.bfloat16 if half else torch.float32)
    occupied = torch.ones(2, tokens, dtype=torch.bool, device=device)
    scale = -0.125 if why == "negative scale" else 0.125
    if why == "gap":
        occupied[1, 5] = False
    if why == "stride":
        key = torch.cat([key, key], 3)[..., ::2]
    output, used = library_attention.attend_prompt(query, key, value, occupied, scale, padded=why == "gap")
    assert used == "kvtwin"
    check(output, query, key, value, occupied, scale)


def test_a_captured_prompt_with_a_mask_takes_kvtwins_kernel(device):
    """A capture cannot ask the GPU where the padding is."""
    if device.type == "cpu":
        pytest.skip("needs CUDA graphs; runs with --kv-device=cuda")
    query, key, value = tensors(device, 600, torch.bfloat16)
    occupied = torch.ones(2, 600, dtype=torch.bool, device=device)
    for padded, expected in ((True, "kvtwin"), (False, "flash")):
        library_attention.attend_prompt(query, key, value, occupied, 0.125, padded=padded)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output, used = library_attention.attend_prompt(query, key, value, occupied, 0.125, padded=padded)
        assert used == expected
        graph.replay()
        direct = (
            prompt_attention.causal_attention(query, key, value, occupied, 0.125) if padded
            else library_attention.attend_prompt(query, key, value, occupied, 0.125, padded=False)[0]
        )
        assert_same(output, direct, what="the output of a replay")


@pytest.mark.parametrize(("row", "found"), [
    ("1111", (0, 4)), ("0011", (2, 4)), ("1100", (0, 2)), ("0110", (1, 3)), ("0001", (3, 4)), ("1011", None),
    ("1001", None),
])
def test_the_range_of_a_rows_tokens(row, found, device):
    occupied = torch.tensor([[True] * 4, [digit == "1" for digit in row]], device=device)
    assert library_attention.token_ranges(occupied) == (None if found is None else [(0, 4), found])


def test_a_row_without_tokens_has_an_empty_range(device):
    occupied = torch.tensor([[False, False], [True, False]], device=device)
    start, end = library_attention.token_ranges(occupied)[0]
    assert start >= end


@pytest.mark.parametrize("name", ["random", "streaming_llm"])
def test_evictions_behind_pytorchs_kernel_wait_for_its_end(name, device, monkeypatch):
    """Whether such a kernel lets the next launch start before earlier ones have ended is not ours to know."""
    pair = next(pair for pair in discovery.with_state() if pair.name == name)
    state, prompt = state_and_prompt(pair, min(LENGTHS[device.type].values()), "none", device)
    events: list[str] = []
    attend_prompt, launch = state._attend_prompt, ops.dependent_launch

    def attending(*arguments: Any, **options: Any) -> Tensor:
        events.append("attends")
        return attend_prompt(*arguments, **options)

    def launching(where: torch.device) -> dict[str, bool]:
        events.append("starts early")
        return launch(where)

    monkeypatch.setattr(state, "_attend_prompt", attending)
    monkeypatch.setattr(ops, "dependent_launch", launching)
    state.prefill(**prompt)
    assert state.prompt_kernel in LENGTHS[device.type]
    assert events == ["starts early", "attends"], "only the arrival's launch, before the attention, may start early"
