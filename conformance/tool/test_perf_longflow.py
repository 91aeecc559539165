"""LongFlow's benchmarks detect wrong results: their own checks, without timing, on the CPU if there is no GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvtwin.conformance.tool.perf_source import PERF, perf_module
from kvtwin.optimized import longflow

if not (PERF / "conftest.py").is_file():
    pytest.skip("perf/ is not in the wheel", allow_module_level=True)


@pytest.fixture(scope="module")
def bench():
    module = perf_module("bench_longflow")
    device = module.DEVICE
    module.DEVICE = "cpu" if not torch.cuda.is_available() else device
    yield module
    module.DEVICE = device


def test_every_gated_benchmark_has_thresholds_and_the_other_way_round(bench):
    thresholds = perf_module("gate").load(PERF / "thresholds" / "longflow.toml")
    paged = {f"step_over_pages[{bench.STEPS[0]}-{size}]" for size in bench.PAGE_SIZES}
    fp8 = {f"decode_attention_fp8[{bench.STEPS[0]}-{name}]" for name in ("e4m3", "e5m2")}
    prompt = {f"whole_prompt[{shape}]" for shape in perf_module("bench_prompts").SHAPES}
    assert thresholds.keys() == {f"step[{shape}]" for shape in bench.STEPS} | paged | fp8 | prompt


def test_the_bytes_of_a_step(bench):
    """Counted by hand: 2 * 128 * 8 * 3200 * 128 * 2 bytes of keys and values, and 2.8 MB for the rest."""
    shape = bench.STEPS[0]
    cache = 1_677_721_600
    assert shape.attention_bytes == cache + 2 * 128 * 32 * 128 * 2
    assert shape.step_bytes - shape.attention_bytes == 4 * 128 * 8 * 128 * 2 + 128 * 3200 * 5
    assert shape.fp8_bytes == 838_860_800 + 2 * 128 * 32 * 128 * 2 + 64


@pytest.mark.parametrize("page_size", [None, 4], ids=["one_tensor", "pages"])
@pytest.mark.parametrize("damage", ["none", "output", "score", "slot", "key", "protected"])
def test_a_wrong_step_is_noticed(bench, damage, page_size):
    """In a state of 8 slots, after the first overwrite."""
    shape = bench.Shape(2, 2, 8, key_value_heads=1, head_dim=16)
    generator = torch.Generator().manual_seed(3)

    def draw(*sizes):
        return torch.randn(sizes, generator=generator).to(bench.DEVICE, bench.DTYPE)

    state = bench.empty_state(shape, shape.slots, page_size)
    state.prefill(*bench.prompt(shape, shape.slots - 1, draw))
    query, key, value = (draw(2, heads, 16) for heads in (2, 1, 1))
    for _ in range(2):
        output = state.step(query, key, value)
    rows = torch.arange(2, device=bench.DEVICE)

    def check():
        bench.assert_all_written(output, state.score)
        bench.check_step(state, query, key, value, output, rows)
        bench.check_attention(state, query, output[:, :, None], rows)

    if damage == "none":
        check()
        return
    if damage == "output":
        output[1, 1, 3] *= 1.5
    elif damage == "score":
        state.score[0, int(state.score[0].argmin())] *= 1.01
    elif damage == "slot":
        state.next_slot[1] = state.score[1].masked_fill(state.score[1].isinf(), -1).argmax()
    elif damage == "key":
        newest = int((state.positions[0] == state.tokens_seen - 1).long().argmax())
        if page_size is None:
            state.key[0, 0, newest, 0] += 1
        else:
            state.pages.key_cache[state.pages.block_table[0, newest // page_size], newest % page_size, 0, 0] += 1
    else:
        state.positions[0] = -1
    with pytest.raises(AssertionError):
        check()


@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
@pytest.mark.parametrize("damage", ["none", "output", "score", "slot", "scale"])
def test_a_wrong_result_over_fp8_is_noticed(bench, damage, fp8):
    """By the benchmark's own inputs, which have the largest codes and different scales, and by its own check."""
    generator = torch.Generator().manual_seed(6)
    inputs = bench.fp8_inputs(
        bench.Shape(2, 4, 40, key_value_heads=2, head_dim=16), fp8,
        lambda *sizes: torch.randn(sizes, generator=generator).to(bench.DEVICE, bench.DTYPE),
    )
    assert float(inputs["key"].float().abs().max()) > torch.finfo(inputs["key"].dtype).max / 4
    output, score, slot = longflow.decode_attention(**inputs)
    rows = torch.arange(2, device=bench.DEVICE)
    if damage == "none":
        bench.check_fp8(inputs, (output, score, slot), rows)
        return
    if damage == "output":
        output[1, 1, 3] *= 1.5
    elif damage == "score":
        score[0, int(score[0].argmin())] *= 1.01
    elif damage == "slot":
        slot[1] = score[1].argmax()
    else:
        inputs["key_scale"] = inputs["value_scale"]
    with pytest.raises(AssertionError):
        bench.check_fp8(inputs, (output, score, slot), rows)


def test_a_wrong_prompt_is_noticed(bench):
    """Causal attention and compression of 40 tokens to 20, with the benchmark's own checks."""
    generator = torch.Generator().manual_seed(4)
    query, key, value = (
        torch.randn(1, heads, 40, 16, generator=generator).to(bench.DEVICE, bench.DTYPE) for heads in (8, 8, 8)
    )
    occupied = torch.ones(1, 40, dtype=torch.bool, device=bench.DEVICE)
    output = bench.causal_attention(query, key, value, occupied, 16**-0.5)
    bench.check_causal(query, key, value, occupied, output)
    output[0, 3, 24] += 1
    with pytest.raises(AssertionError, match="output of the queries up to 25"):
        bench.check_causal(query, key, value, occupied, output)

    window = query[:, :, -4:]
    result = longflow.compress_prefill(window, key, value, 20)
    bench.check_compressed(window, key, value, *result)
    with pytest.raises(AssertionError, match="compressed key"):
        bench.check_compressed(window, key, value, result.key + 1, result.value, result.kept)


def test_peers_compute_the_same(bench):
    """The peers that run here: query heads as rows of their KV head are the same mathematics."""
    peers = perf_module("peers")
    query, key, value = (
        torch.randn(*sizes, generator=torch.Generator().manual_seed(5)).to(bench.DEVICE, bench.DTYPE)
        for sizes in ((2, 4, 16), (2, 2, 24, 16), (2, 2, 24, 16))
    )
    found = peers.decode_peers(query, key, value)
    assert found
    state = SimpleNamespace(
        key=key, value=value, occupied=torch.ones(2, 24, dtype=torch.bool, device=bench.DEVICE)
    )
    rows = torch.arange(2, device=bench.DEVICE)
    for peer in found.values():
        bench.check_attention(state, query, peer(), rows)
