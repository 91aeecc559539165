"""Prompts of many blocks, which a CUDA graph appends: the same bits as plain calls."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtwin.conformance import discovery
from kvtwin.conformance.judge import checkers
from kvtwin.conformance.judge.compare import assert_same
from kvtwin.optimized._common import graph
from kvtwin.optimized._common.block_cache import ops
from kvtwin.optimized._common.block_cache import state as blocks
from kvtwin.optimized._common.block_cache.state import BlockState
from kvtwin.optimized._common.launch import on_device_of

pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.slow_on_cpu, pytest.mark.whole]
BLOCKS = [
    pair for pair in discovery.with_state() if issubclass(getattr(pair.optimized, pair.state.__name__), BlockState)
]
#: In these tests a graph is worth its capture from LEAST blocks on, and a prompt has TIMES as many blocks as a chunk,
#: which has CHUNK at most.
LEAST, CHUNK, TIMES = 4, 2, 2
BLOCK, BUDGET, HEAD_DIM = 3, 12, 20
TOKENS = BLOCK * (LEAST + 1) + 2
#: Methods whose evictions do not depend on the attention of a block.
EARLY = ("keydiff", "lag_kv", "r_kv", "random", "snapkv", "streaming_llm")
some_pairs = pytest.mark.parametrize("pair", [pair for pair in BLOCKS if pair.name in ("keydiff", "tova")], ids=str)


@pytest.fixture(autouse=True)
def graphs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short prompts take graphs, too. The CPU has no CUDA graphs: there, a replay is another call."""
    monkeypatch.setattr(graph, "BLOCKS", LEAST)
    monkeypatch.setattr(graph, "CHUNK", CHUNK)
    monkeypatch.setattr(graph, "TIMES", TIMES)
    monkeypatch.setattr(graph, "_memories", {})
    if device.type == "cpu":
        monkeypatch.setattr(graph, "DEVICES", ("cpu",))
        monkeypatch.setattr(graph, "captured", captured)


def captured(function: Callable[[], Tensor | None], memory: object) -> Callable[[], None]:
    """Like `graph.captured`, whose call does not run."""

    def replay() -> None:
        function()

    return replay


def state_of(
    pair: discovery.Pair, device: torch.device, dtype: torch.dtype = torch.float16, head_dim: int = HEAD_DIM,
    block_size: int = BLOCK,
) -> Any:
    options = checkers.ask(pair.name, "SMALL", {}) | {"budget": BUDGET, "block_size": block_size}
    return getattr(pair.optimized, pair.state.__name__)(
        pair.config(**options), batch=2, query_heads=4, key_value_heads=2, head_dim=head_dim, dtype=dtype,
        device=device,
    )


def prompt_of(seed: int, device: torch.device, total: int = TOKENS, head_dim: int = HEAD_DIM) -> dict[str, Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    query, key, value = (
        torch.randn(2, total, heads, head_dim, generator=generator, device=device).half().transpose(1, 2)
        for heads in (4, 2, 2)
    )
    occupied = torch.rand(2, total, generator=generator, device=device) < 0.9
    return {"query": query, "key": key, "value": value, "occupied": occupied}


def assert_equal(state: Any, plain: Any, what: str) -> None:
    for place, (mine, other) in enumerate(zip(state._tensors(), plain._tensors(), strict=True)):
        assert mine.data_ptr() != other.data_ptr() or not mine.numel()
        assert mine.shape == other.shape, (what, place)
    for name in ("key", "value", "occupied", "positions", "score", "tokens_seen"):
        mine, other = getattr(state, name), getattr(plain, name)
        if isinstance(mine, int):
            assert mine == other
            continue
        if name in ("key", "value"):                             # those of free slots are unspecified
            mine, other = (one.masked_fill(~plain.occupied[..., None], 0) for one in (mine, other))
        assert_same(mine, other, what=f"{name} after {what}")


@pytest.mark.parametrize(("total", "pair"), [
    *(pytest.param(TOKENS, pair, id=f"rest-{pair}") for pair in BLOCKS),
    # Which blocks there are does not depend on the method.
    *(pytest.param(total, pair, id=f"{name}-{pair}") for pair in BLOCKS if pair.name == "keydiff"
      for total, name in ((LEAST * BLOCK, "whole"), ((3 * CHUNK + 1) * BLOCK, "chunks"))),
])
def test_blocks_by_a_graph_have_the_bits_of_plain_calls(pair, total, device, monkeypatch):
    """Three prompts: one captures a block, one a chunk, and one is all replays. Then one more state, whose graph shares
    the memory; steps."""
    state, plain, other = (state_of(pair, device) for _ in range(3))
    # The memory does not depend on the method either; on the CPU there is none.
    shares = pair.name == "keydiff" or device.type == "cuda"
    for number, mine in enumerate((*[state] * 3, other) if shares else [state] * 3):
        mine.reset()
        plain.reset()
        prompt = prompt_of(number, device, total)
        output = mine.prefill(**prompt)
        with monkeypatch.context() as without:
            without.setattr(graph, "BLOCKS", total)
            expected = plain.prefill(**prompt)
        assert (mine in graph._graphs, plain in graph._graphs) == (True, False)
        assert_same(output, expected, what=f"output of prompt {number}")
        assert_equal(mine, plain, f"prompt {number}")
        for step in range(3):
            part = {name: prompt[name][:, :, step] for name in ("query", "key", "value")}
            assert_same(mine.step(**part), plain.step(**part), what=f"output of step {step}")


@pytest.mark.parametrize("pair", [pair for pair in BLOCKS if pair.name == "snapkv"], ids=str)
def test_steps_after_a_prompt_by_a_graph_know_its_last_queries(pair, device):
    """Blocks that have SnapKV's whole window do not store its queries, but the prompt does in the end, as a block that
    is appended alone."""
    size = 4                                                               # even: in the interpreter, see `ops.at_once`
    state, plain = (state_of(pair, device, block_size=size) for _ in range(2))
    assert pair.config is not None and state.config.observers <= size
    prompt = prompt_of(0, device, size * LEAST)
    output = state.prefill(**prompt)
    parts = [
        plain.append_block(**{
            name: tensor[..., start : start + size] if name == "occupied" else tensor[:, :, start : start + size]
            for name, tensor in prompt.items()
        })
        for start in range(0, size * LEAST, size)
    ]
    assert_same(output, torch.cat(parts, 2), what="output of the prompt")
    assert state in graph._graphs
    for step in range(3):
        part = {name: prompt[name][:, :, step] for name in ("query", "key", "value")}
        assert_same(state.step(**part), plain.step(**part), what=f"output of step {step}")
        assert_equal(state, plain, f"step {step}")


@some_pairs
def test_blocks_of_a_chunk_that_is_a_replay_from_the_start(pair, device, monkeypatch):
    """Blocks of 8 tokens are aligned: all blocks of a chunk take the kernels that the first prompt has compiled."""
    state, plain = (state_of(pair, device, block_size=8) for _ in range(2))
    for number in range(2):
        state.reset()
        plain.reset()
        prompt = prompt_of(number, device, 8 * (2 * CHUNK + 1))
        output = state.prefill(**prompt)
        assert graph._graphs[state]._memory.aligned
        with monkeypatch.context() as without:
            without.setattr(graph, "BLOCKS", 10**6)
            assert_same(output, plain.prefill(**prompt), what=f"output of prompt {number}")
        assert_equal(state, plain, f"prompt {number}")
    assert graph._graphs[state]._replays.keys() == {(1, 0), (CHUNK, 0)}


@pytest.mark.parametrize("pair", [pair for pair in BLOCKS if pair.name == "keydiff"], ids=str)
@pytest.mark.parametrize("blocks", [LEAST, 10**6], ids=["graph", "plain"])
@pytest.mark.parametrize("total", [TOKENS, LEAST * BLOCK])
def test_no_block_is_empty(pair, total, blocks, device, monkeypatch):
    """Without a graph, every block of the prompt is appended by a call. With a graph, a call appends the first block, a
    call is captured, and one call appends the rest."""
    state, lengths = state_of(pair, device), []
    append = state._append

    def counted(*block: Tensor) -> Tensor:                                # in a graph, its output comes last
        lengths.append(block[0].shape[2])
        assert lengths[-1], "an empty block"
        return append(*block)

    monkeypatch.setattr(graph, "BLOCKS", blocks)
    monkeypatch.setattr(state, "_append", counted)
    state.prefill(**prompt_of(4, device, total))
    rest = [total % BLOCK] if total % BLOCK else []
    full = len(lengths) - len(rest)
    assert lengths == [BLOCK] * full + rest
    assert 0 < full <= total // BLOCK + 1 if blocks == LEAST else full == total // BLOCK


@some_pairs
def test_a_copy_and_a_state_with_other_buffers_need_a_graph_of_their_own(pair, device):
    state, prompt = state_of(pair, device), prompt_of(3, device)
    expected = state.prefill(**prompt)
    copied = copy.deepcopy(state)
    assert copied not in graph._graphs
    copied.reset()
    assert_same(copied.prefill(**prompt), expected, what="the copy's output")
    first = graph._graphs[state]
    state.key = state.key.clone()
    state.reset()
    assert_same(state.prefill(**prompt), expected, what="output with another buffer")
    assert graph._graphs[state] is not first
    assert_equal(state, copied, "a prompt with another buffer")


@some_pairs
@pytest.mark.parametrize("captures", [0, 1], ids=["block", "chunk"])
def test_without_a_capture_blocks_are_appended_one_by_one(pair, captures, device, monkeypatch):
    """As when the GPU has no memory left for it, or only for the graph of a block. A warning says so, once for a state.
    """
    state, plain, prompt = state_of(pair, device), state_of(pair, device), prompt_of(5, device)
    capture, done = graph.captured, []

    def fails(function: Any, memory: Any) -> Any:
        keeps_pool = memory.pool is not None and memory._anchor is None
        if len(done) == captures and not (captures and keeps_pool):
            raise RuntimeError("out of memory")
        if not keeps_pool:
            done.append(function)
        return capture(function, memory)

    with monkeypatch.context() as broken:
        broken.setattr(graph, "captured", fails)
        outputs = []
        for number in range(3):
            expected = pytest.warns(UserWarning, match="without a CUDA graph: out of memory")
            state.reset()
            with expected if number == captures else nullcontext():
                outputs.append(state.prefill(**prompt))
    assert not graph._memories
    with monkeypatch.context() as without:
        without.setattr(graph, "BLOCKS", TOKENS)
        expected = plain.prefill(**prompt)
    for number, output in enumerate(outputs):
        assert_same(output, expected, what=f"output of prompt {number}")
    assert_equal(state, plain, "a prompt")


@pytest.mark.parametrize("pair", [pair for pair in BLOCKS if pair.name in EARLY], ids=str)
def test_evictions_are_chosen_on_a_branch_and_tokens_move_after_it(pair, device, monkeypatch):
    """The branch begins when the block is in its slots. Until it is joined, nothing moves."""
    state, done = state_of(pair, device), []

    def noted(module: Any, name: str) -> None:
        call = getattr(module, name)

        def noting(*arguments: Any, **options: Any) -> Any:
            done.append(name)
            return call(*arguments, **options)

        monkeypatch.setattr(module, name, noting)

    @contextmanager
    def on(side: object) -> Iterator[None]:
        done.append("on the branch")
        yield
        done.append("off the branch")

    monkeypatch.setattr(graph, "BLOCKS", TOKENS)
    for module, name in (
        (ops, "arrive"), (state, "_prepare"), (graph, "fork"), (state, "_choose"), (blocks, "attend"), (graph, "join"),
        (state, "_settle"),
    ):
        noted(module, name)
    monkeypatch.setattr(graph, "on", on)
    # A block with the whole window of SnapKV has what it needs after its attention.
    state.append_block(**prompt_of(0, device, 1 if pair.name == "snapkv" else BLOCK))
    assert done == [
        "arrive", "_prepare", "fork", "on the branch", "_choose", "off the branch", "attend", "join", "_settle",
    ]


def test_there_is_no_branch_outside_of_a_capture_of_ours(device):
    assert graph.fork() is None
    graph.join(None)
    with graph.on(None):
        assert getattr(graph._capture, "branch", None) is None


def test_states_come_and_go_and_their_memory_stays(device):
    pair = BLOCKS[0]
    memories = set()
    for _ in range(3):
        state = state_of(pair, device)
        state.prefill(**prompt_of(1, device))
        memories.add(id(graph._graphs[state]._memory))
        del state
    assert len(memories) == 1
    assert len(graph._memories) <= graph.MEMORIES


def test_the_memories_of_the_newest_shapes_stay(device, monkeypatch):
    """A shape includes the dtype."""
    monkeypatch.setattr(graph, "MEMORIES", 2)
    kept: list[object] = []
    for dtype, head_dim in ((torch.float16, 16), (torch.float32, 16), (torch.float16, 20), (torch.float32, 16)):
        state, plain = (state_of(BLOCKS[0], device, dtype, head_dim) for _ in range(2))
        prompt = {name: one.to(dtype) if one.is_floating_point() else one
                  for name, one in prompt_of(1, device, head_dim=head_dim).items()}
        output = state.prefill(**prompt)
        with monkeypatch.context() as without:
            without.setattr(graph, "BLOCKS", TOKENS)
            assert_same(output, plain.prefill(**prompt), what=f"output of {dtype}, head_dim {head_dim}")
        kept.append(graph._graphs[state]._memory)
        assert list(graph._memories.values()) == (kept if len(kept) < 3 else kept[1:3])
    assert kept[3] is kept[1] and len({id(memory) for memory in kept}) == 3


def test_graphs_of_one_memory_do_not_run_at_the_same_time(device):
    """The second thread begins while the first is appending, and waits until it is done."""
    prompts = [torch.full((1, 1, 8, 16), float(number), device=device) for number in range(2)]
    outputs = [torch.zeros_like(prompt) for prompt in prompts]
    begun, second_ran = threading.Event(), threading.Event()

    def append(block: Tensor, output: Tensor) -> Tensor:
        if not begun.is_set():
            begun.set()
            assert not second_ran.wait(0.5)
        return torch.add(block, 1, out=output)

    def run(number: int) -> None:
        given = graph.Prompt((prompts[number],), outputs[number], 2, 4)
        found = graph.BlockGraph(given, ())
        if number:
            begun.wait(10)
        with on_device_of(prompts[0]):
            found.run(append if not number else second, given)

    def second(block: Tensor, output: Tensor) -> Tensor:
        second_ran.set()
        return torch.add(block, 1, out=output)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for prompt, output in zip(prompts, outputs, strict=True):
        assert torch.equal(output, prompt + 1)


def test_prompts_in_and_outside_of_inference_mode(device):
    states = [state_of(BLOCKS[0], device) for _ in range(2)]
    prompt = prompt_of(2, device)
    with torch.inference_mode():
        first = states[0].prefill(**prompt)
    with torch.no_grad():
        second = states[1].prefill(**prompt)
        states[0].reset()
        third = states[0].prefill(**prompt)
    assert_same(first.clone(), second, what="output")
    assert_same(first.clone(), third, what="output of the second prompt")


@pytest.mark.parametrize(("blocks", "most", "expected"), [
    (9, 8, {1}), (15, 8, {1}), (16, 8, {2}), (40, 8, {4}), (43, 8, {4}), (64, 8, {8}), (200, 8, {8}), (67, 3, {3}),
], ids=str)
def test_a_graph_has_one_block_per_eight_blocks_of_the_prompt(blocks, most, expected, device, monkeypatch):
    """At most as many as a chunk has. Behind the last chunk and in a state's first prompt, it has one."""
    monkeypatch.setattr(graph, "TIMES", 8)
    monkeypatch.setattr(graph, "CHUNK", most)
    prompt = torch.rand(1, 1, 2 * blocks, 16, device=device)
    appended: list[Tensor] = []

    def append(block: Tensor, output: Tensor | None = None) -> Tensor:
        appended.append(block.clone())
        return torch.add(block, 1, out=output)

    output = torch.zeros_like(prompt)
    given = graph.Prompt((prompt,), output, 2, blocks)
    graphs = graph.BlockGraph(given, ())
    # The first prompt captures a block, the second a chunk, and the third a chunk in the other half of the memory.
    for found in ({1}, {1} | expected, {1} | expected):
        halves = {(most, 1) for most in expected - {1}} if (max(expected), 0) in graphs._replays else set()
        appended.clear()
        output.zero_()
        graphs.run(append, given)
        assert graphs._replays.keys() == {(most, 0) for most in found} | halves
        assert torch.equal(output, prompt + 1)
        if device.type == "cpu":                                         # where a replay calls `append`
            assert torch.equal(torch.cat(appended, 2), prompt)


def test_a_chunk_whose_capture_fails_is_appended_block_by_block(device, monkeypatch):
    """After a first prompt, whose block was captured, a chunk is a replay from the start."""
    prompt = torch.rand(1, 1, 16, 16, device=device)
    appended: list[Tensor] = []

    def append(block: Tensor, output: Tensor | None = None) -> Tensor:
        appended.append(block.clone())
        return torch.add(block, 1, out=output)

    def fails(*_: object) -> Any:
        raise RuntimeError("out of memory")

    output = torch.zeros_like(prompt)
    given = graph.Prompt((prompt,), output, 2, 8)
    graphs = graph.BlockGraph(given, ())
    graphs.run(append, given)
    appended.clear()
    output.zero_()
    monkeypatch.setattr(graph, "captured", fails)
    with pytest.warns(UserWarning, match="without a CUDA graph: out of memory"):
        graphs.run(append, given)
    assert torch.equal(torch.cat(appended, 2), prompt)
    assert torch.equal(output, prompt + 1)


@pytest.mark.parametrize(("batch", "size", "blocks"), [(1, 128, 8), (8, 128, 4), (1, 2048, 1)])
def test_a_graph_s_memory_has_a_limit_for_each_row(batch, size, blocks, device, monkeypatch):
    """Two chunks and their outputs, in bytes; a block of more than half of it has one of each."""
    monkeypatch.undo()                                                     # the sizes of this file are small
    query, key = (torch.empty(batch, heads, size, 128, dtype=torch.bfloat16, device=device) for heads in (32, 8))
    valid = torch.empty(batch, size, dtype=torch.bool, device=device)
    memory = graph.Memory(graph.Prompt((query, key, key, valid), query, size, 1))
    assert memory.blocks == blocks
    taken = sum(tensor.numel() * tensor.itemsize for tensor in (*memory.chunk, memory.output))
    assert taken <= batch * 48 * 2**20


@pytest.mark.parametrize("contiguous", [True, False], ids=["heads-first", "tokens-first"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bool], ids=str)
def test_larger_elements_are_copied_where_the_layout_allows(dtype, contiguous):
    """As many bytes at a time as divide all strides and the offset: 16 at most."""
    whole = torch.rand(2, 3, 9, 20) < 0.5 if dtype == torch.bool else torch.rand(2, 3, 9, 20).to(dtype)
    whole = whole if contiguous else whole.transpose(1, 2).contiguous().transpose(1, 2)
    assert graph.in_words(whole, whole)[0].dtype.itemsize == {4: 16, 2: 8, 1: 4}[dtype.itemsize]
    for part in (whole[:, :, 1:], whole[..., 1:], whole[..., :7], whole[..., ::2], whole.mT):
        source = part.clone(memory_format=torch.contiguous_format)
        target, given = graph.in_words(torch.zeros_like(source), part)
        target.copy_(given)
        assert torch.equal(target.view(dtype), source)


def test_large_blocks_and_short_prompts_take_no_graph(device):
    query = torch.empty(1, 4, 8 * LEAST, 64, device=device)
    assert graph.worth_a_graph(query, 8)
    assert not graph.worth_a_graph(query, 9)
    assert not graph.worth_a_graph(query.expand(graph.ELEMENTS, 4, 8 * LEAST, 64), 8)
    long = query[:, :, :1].expand(1, 4, graph.ELEMENTS, 64)
    assert graph.worth_a_graph(long, 8)
