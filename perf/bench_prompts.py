"""Benchmarks of prompts, whole and in blocks of 128 tokens, beside PyTorch's attention to the same prompt, and of the
memory that they need.

The calls are not captured: an empty state gets a prompt as a model gives it. Not gated: with 64K tokens, the blocks of
methods without a target.
"""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtwin.conformance import discovery
from kvtwin.conformance.judge import checkers
from kvtwin.conformance.judge.compare import assert_same
from kvtwin.optimized._common import graph
from kvtwin.optimized._common.block_cache.state import BlockState

from .bench_longflow import check_causal, prompt_bytes
from .blocks import BLOCK, DEVICE, DTYPE, Shape, tokens
from .peers import causal_peers

BUDGET = 2048
SHAPES = (Shape(1, 32, 16384, BUDGET), Shape(8, 32, 4096, BUDGET), Shape(1, 32, 65536, BUDGET))
#: A prompt of 64K tokens takes as long as 16 of the others.
ROUNDS = {shape: 10 if shape.queries == 65536 else 100 for shape in SHAPES}
#: Methods whose attention to a whole prompt PyTorch's kernels compute.
WHOLE = ("longflow", "snapkv", "synckv", "epikv", "thinkv")
IN_BLOCKS = tuple(
    pair.name for pair in discovery.built_in()
    if pair.state is not None and issubclass(getattr(pair.optimized, pair.state.__name__), BlockState)
)

#: Methods with a target for 64K tokens in blocks.
LONG = ("streaming_llm", "h2o", "tova", "vatp", "snapkv", "keydiff")


def empty_state(method: str, shape: Shape, block: int) -> Any:
    pair = checkers.pair(method)
    assert pair.config is not None and pair.state is not None
    fields = {field.name for field in dataclasses.fields(pair.config)}
    options = {"block_size": block, "max_tokens": shape.queries + 1, "keep_prompt": False}
    return getattr(pair.optimized, pair.state.__name__)(
        pair.config(**checkers.with_budget(method, BUDGET),
                    **{name: value for name, value in options.items() if name in fields},
                    **checkers.measured(method, BUDGET)),
        batch=shape.batch, query_heads=shape.query_heads, key_value_heads=shape.key_value_heads,
        head_dim=shape.head_dim, dtype=DTYPE, device=DEVICE,
    )


def moved(shape: Shape) -> int:
    return prompt_bytes(shape._replace(slots=shape.queries))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("method", WHOLE)
def test_whole_prompt(device_benchmark, method, shape):
    state, given = empty_state(method, shape, shape.queries), tokens(shape, shape.queries, seed=1)
    more = checkers.extras(state, *given)
    occupied = torch.ones(shape.batch, shape.queries, dtype=torch.bool, device=DEVICE)

    device_benchmark(
        lambda: state.prefill(*given, **more), before=state.reset, moves=moved(shape),
        verify=lambda output: check_causal(*given, occupied, output), capture=False, rounds=ROUNDS[shape],
        peers=causal_peers(*given),
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("method", IN_BLOCKS)
def test_prompt_in_blocks(device_benchmark, method, shape, monkeypatch):
    """After timing, the output and the cache are compared with those of blocks without a graph."""
    state, given = empty_state(method, shape, BLOCK), tokens(shape, shape.queries, seed=1)

    def verify(output: Tensor) -> None:
        plain = empty_state(method, shape, BLOCK)
        with monkeypatch.context() as without:
            without.setattr(graph, "BLOCKS", shape.queries)
            assert_same(output, plain.prefill(*given), what="the output of blocks by a graph")
        for name in ("positions", "occupied", "score"):
            assert_same(getattr(state, name), getattr(plain, name), what=name)

    device_benchmark(
        lambda: state.prefill(*given), before=state.reset, moves=moved(shape), verify=verify, capture=False,
        rounds=ROUNDS[shape], gated=shape is not SHAPES[2] or method in LONG, peers=causal_peers(*given),
    )


# Memory --------------------------------------------------------------------------------------------------------------


def of_graphs() -> int:
    """The bytes in the pools of graphs. States share them, so an earlier state may have allocated them."""
    segments = torch.cuda.memory_snapshot()
    return sum(one["allocated_size"] for one in segments if tuple(one["segment_pool_id"]) != (0, 0))


@pytest.mark.parametrize(("method", "block"), [
    *((method, SHAPES[2].queries) for method in WHOLE), *((method, BLOCK) for method in IN_BLOCKS),
])
def test_memory(gpu, record_property, method, block):
    """Beyond inputs, output and cache, the first prompt of 64K tokens of a state needs at most 64 MB."""
    shape = SHAPES[2]
    given, state = tokens(shape, shape.queries, seed=1), empty_state(method, shape, block)
    more = checkers.extras(state, *given)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() - of_graphs()
    output = state.prefill(*given, **more)
    torch.cuda.synchronize()
    needed = (torch.cuda.max_memory_allocated() - before - output.nbytes) / 10**6
    record_property("megabytes", round(needed, 1))
    assert needed <= 64
