"""A whole prompt leaves the same bits in a state as its segments one after the other, as several ranks append them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvtwin.conformance.cases import contents, draws
from kvtwin.conformance.cases.layouts import lay_out
from kvtwin.conformance.judge.compare import assert_same
from kvtwin.optimized import thinkv
from kvtwin.optimized._common.launch import INTERPRETED
from kvtwin.optimized.thinkv.state import BESIDE
from kvtwin.reference.thinkv import ThinKVConfig

pytestmark = pytest.mark.kind("equivalence")

FORMATS = ("nvfp4", "ternary", "int2", "int4", "fp8", "unquantized")
#: tau, group, block, retention. Groups that do not divide a segment, blocks that do not divide a group, one level,
#: segments that lose all tokens, and segments that lose none.
SHAPES = (
    (8, 4, 2, (4, 2)), (16, 8, 4, (8, 4, 1)), (10, 4, 3, (7, 7, 2)), (6, 8, 8, (3,)), (7, 1, 1, (5, 3)),
    (8, 4, 2, (4, 0)), (4, 2, 2, (6, 4)),
)
#: Those that a fixed test takes, and one whose group is not a power of two. On a GPU few, since each is compiled.
FIXED = (*(SHAPES if INTERPRETED else (SHAPES[2], SHAPES[3], SHAPES[5])), (10, 3, 2, (5, 2)))
HEAD_DIMS = (16, 20, 64)
#: On a GPU, where every combination is compiled: each shape, format, head_dim and dtype.
ON_GPUS = (
    (SHAPES[0], "nvfp4", 64, torch.bfloat16), (SHAPES[1], "ternary", 20, torch.bfloat16),
    (SHAPES[2], "fp8", 64, torch.float32), (SHAPES[3], "int4", 16, torch.float32),
    (SHAPES[4], "unquantized", 20, torch.bfloat16), (SHAPES[5], "int2", 16, torch.float32),
    (SHAPES[2], "nvfp4", 20, torch.float32), (SHAPES[0], "unquantized", 16, torch.float32),
    (SHAPES[1], "fp8", 16, torch.bfloat16),
)


def state(config: ThinKVConfig, key: Tensor) -> thinkv.ThinKVState:
    batch, heads, _, head_dim = key.shape
    return thinkv.ThinKVState(
        config, batch=batch, query_heads=heads, key_value_heads=heads, head_dim=head_dim, dtype=key.dtype,
        device=key.device,
    )


def by_segments(config: ThinKVConfig, key: Tensor, value: Tensor, occupied: Tensor) -> thinkv.ThinKVState:
    """A state that was given the prompt as several ranks give it."""
    made = state(config, key)
    made._append_segments(key, value, made._order(occupied, True)[0])
    return made


def contents_of(made: thinkv.ThinKVState) -> dict[str, Tensor]:
    """All that a prompt changes, except its tokens' number. Of the list of entries, those in use."""
    cache = made.cache
    held: dict[str, Any] = cache._tables._asdict()
    entries = torch.arange(held["order"].shape[1], device=cache.device)
    held["order"] = held["order"].where(entries < cache._tables.counts[:, :3].sum(1, keepdim=True), -1)
    codes = {f"codes {number}": tensor for number, tensor in enumerate(cache.codes())}
    key, value = cache.dequantized()
    names = ("sparsity", "over_budget", "levels", "_segment_sizes", "_live", "_segment", "_thought", "_thoughts")
    return {**held, **codes, "key": key, "value": value, **{name: getattr(made, name) for name in names}}


def assert_same_state(tested: thinkv.ThinKVState, expected: thinkv.ThinKVState) -> None:
    found = contents_of(tested)
    for name, tensor in contents_of(expected).items():
        assert_same(found[name], tensor, what=name)


def sorts(device: torch.device) -> st.SearchStrategy[tuple[Any, ...]]:
    """Shapes, formats, head dims and dtypes."""
    if device.type == "cuda":
        return st.sampled_from(draws.third_of_run(ON_GPUS))
    return st.tuples(*(st.sampled_from(one) for one in (SHAPES, FORMATS, HEAD_DIMS, (torch.float32, torch.bfloat16))))


@given(
    budget=st.integers(1, 40), total=st.integers(1, 90),
    content=st.sampled_from(("ordinary", "duplicates", "near_ties", "identical", "extreme_1e4", "tiny_values")),
    occupancy=st.sampled_from(("full", "random", "left_padding", "one_token", "empty_row")),
    seed=st.integers(0, 2**32 - 1), data=st.data(),
)
def test_a_prompt_is_its_segments_one_after_the_other(budget, total, content, occupancy, seed, data, device):
    (tau, group, block, retention), fmt, head_dim, dtype = data.draw(sorts(device))
    config = ThinKVConfig(
        budget, tau=tau, group=group, block=block, retention=retention, max_tokens=96,
        formats={"R": fmt, "E": "nvfp4", "T": "ternary"},
    )
    generator = torch.Generator(device).manual_seed(seed)
    tokens = contents.fill(
        content, generator, batch=2, key_value_heads=2, group=1, queries=total, slots=total, head_dim=head_dim,
        dtype=dtype, scale=head_dim**-0.5,
    )
    query, key, value = (tensor.to(dtype) for tensor in tokens)
    occupied = contents.occupancy(occupancy, generator, (2, total))
    tested = state(config, key)
    tested.prefill(query, key, value, occupied)
    assert_same_state(tested, by_segments(config, key, value, occupied))


@pytest.mark.parametrize("shape", FIXED, ids=str)
def test_sizes_that_do_not_divide_each_other(shape, device):
    """As above, with three rows, values in another memory order than keys, and a thought that prefill replaces."""
    tau, group, block, retention = shape
    config = ThinKVConfig(2 * tau, tau=tau, group=group, block=block, retention=retention, max_tokens=96)
    generator, total = torch.Generator(device).manual_seed(1), 5 * tau + 3
    key, value = (torch.randn(3, 2, total, 20, generator=generator, device=device) for _ in range(2))
    value = value.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0)
    occupied = torch.rand(3, total, generator=generator, device=device) > 0.1
    tested = state(config, key)
    tested.thought = torch.zeros_like(tested.thought)
    tested.prefill(key, key, value, occupied)
    assert_same_state(tested, by_segments(config, key, value, occupied))


@pytest.mark.parametrize("fmt", ["nvfp4", "fp8"])
def test_a_prompt_at_the_sizes_of_the_paper(fmt, device):
    """Segments of 128 tokens in groups of 16, blocks of 8, head_dim 128, five levels; some tokens by strides."""
    config = ThinKVConfig(
        160, max_tokens=1024, retention=(64, 32, 16, 8, 4), formats={"R": fmt, "E": "nvfp4", "T": "ternary"}
    )
    total = 300 if device.type == "cpu" else 1000
    key, value = (torch.randn(2, total, 1, 128, device=device).transpose(1, 2) for _ in range(2))
    occupied = torch.ones(2, total, dtype=torch.bool, device=device)
    occupied[0, :130] = False
    tested = state(config, key)
    tested.prefill(key, key, value, occupied)
    assert_same_state(tested, by_segments(config, key, value, occupied))


def test_a_prompt_without_padding_is_one_whose_tokens_all_count(device):
    config = ThinKVConfig(16, tau=8, group=4, block=2, retention=(4, 2), max_tokens=64)
    key, value = (torch.randn(2, 2, 50, 16, device=device) for _ in range(2))
    plain, all_count = state(config, key), state(config, key)
    plain.prefill(key, key, value)
    all_count.prefill(key, key, value, torch.ones(2, 50, dtype=torch.bool, device=device))
    assert_same_state(plain, all_count)


def test_a_padded_prompt_of_many_segments(device):
    """So many that the tables are made beside the attention. A row's padding is before its tokens, or anywhere."""
    total = BESIDE + 8
    config = ThinKVConfig(8, tau=1, group=1, block=2, retention=(1, 0), max_tokens=total)
    generator = torch.Generator(device).manual_seed(1)
    key, value = (torch.randn(2, 1, total, 16, generator=generator, device=device) for _ in range(2))
    occupied = torch.rand(2, total, generator=generator, device=device) > 0.2
    occupied[0] = torch.arange(total, device=device) >= 5
    tested = state(config, key)
    tested.prefill(key, key, value, occupied)
    assert_same_state(tested, by_segments(config, key, value, occupied))


def test_the_heads_of_a_prompt_may_be_far_apart(device):
    """The keys of the third of three heads begin more than 2^31 elements after those of the first."""
    config = ThinKVConfig(8, tau=8, group=4, block=2, retention=(4, 2), max_tokens=40)
    key = torch.randn(1, 3, 40, 16, device=device).to(torch.bfloat16)
    far = lay_out(key, "far")
    assert 2**30 <= far.stride(1) < 2**31 <= 2 * far.stride(1)
    tested, expected = state(config, key), state(config, key)
    tested.prefill(key, far, far)
    expected.prefill(key, key, key)
    assert_same_state(tested, expected)


def test_a_prompt_whose_attention_fails_leaves_an_interrupted_cache(device, monkeypatch):
    """Its tables have the prompt's tokens then, and its pool does not. After reset, all is as before."""
    config = ThinKVConfig(8, tau=1, group=1, block=2, retention=(1,), max_tokens=BESIDE + 8)
    key = torch.randn(1, 1, BESIDE + 8, 16, device=device)
    tested, expected = state(config, key), state(config, key)

    def fail(*_: Any, **__: Any) -> Tensor:
        raise MemoryError("no memory for the output")

    with monkeypatch.context() as failing, pytest.raises(MemoryError):
        failing.setattr(tested, "_attend_prompt", fail)
        tested.prefill(key, key, key)
    with pytest.raises(RuntimeError, match="append"):
        tested.cache.append(key[:, :, 0], key[:, :, 0], torch.zeros(1, dtype=torch.int64, device=device))
    with pytest.raises(RuntimeError, match="prefill"):
        tested.prefill(key, key, key)
    tested.reset()
    for one in (tested, expected):
        one.prefill(key, key, key)
    assert_same_state(tested, expected)
