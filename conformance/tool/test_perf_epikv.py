"""EpiKV's benchmarks detect wrong results: their own checks, without timing, on the CPU if there is no GPU."""

from __future__ import annotations

import functools

import pytest
import torch

from kvtwin.conformance.tool.perf_source import PERF, perf_module

if not (PERF / "conftest.py").is_file():
    pytest.skip("perf/ is not in the wheel", allow_module_level=True)

pytestmark = pytest.mark.slow

NAMES = ("attn_x_hs", "segment_hs", "segment_hs_with_sparsity")


@pytest.fixture(scope="module")
def bench(device):
    module = perf_module("bench_epikv_hybrids")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "DEVICE", str(device))
        yield module


@pytest.fixture
def draw(bench):
    generator = torch.Generator().manual_seed(6)
    return lambda *sizes: torch.randn(sizes, generator=generator).to(bench.DEVICE, bench.DTYPE)


@pytest.fixture
def shape(bench):
    return bench.Shape(2, 1, 2, 1, 16, 24, 0, 20)


def tiny(bench, shape, draw, name):
    options = {**bench.POLICIES[name], **({"tau": 4} if name == "segment_hs" else {})}
    return bench.Layer(shape, draw, contested=8, **options)


def test_every_benchmark_has_its_place_among_the_thresholds(bench):
    """Or the file says that it has none, if it has not been measured."""
    path = PERF / "thresholds" / "epikv_hybrids.toml"
    thresholds = perf_module("gate").load(path)
    names = {f"hybrid_step[{name}]" for name in NAMES}
    assert bench.POLICIES.keys() == set(NAMES)
    assert thresholds.keys() <= names
    assert all(f'["{name}".held]' in path.read_text(encoding="utf-8") for name in names)


def test_the_bytes_of_a_step(bench):
    """Counted by hand: 2 * 64 * 8 * 4096 * 128 * 2 bytes of keys and values, queries and outputs of 32 heads, three
    hidden states of 4096 for each band, and 24 or 16 bytes for each of 64 * 4096 slots."""
    rest = 2 * 64 * 32 * 128 * 2
    assert bench.step_bytes(bench.SHAPE, "attn_x_hs") == 1_073_741_824 + rest + 3 * 64 * 4096 * 2 + 24 * 64 * 4096
    assert bench.step_bytes(bench.SHAPE, "segment_hs") == 1_073_741_824 + rest + 6 * 64 * 4096 * 2 + 16 * 64 * 4096


@pytest.mark.parametrize("name", NAMES)
def test_a_right_step_passes(name, bench, shape, draw):
    layer = tiny(bench, shape, draw, name)
    for _ in range(4 if name == "segment_hs" else 2):       # a segment of 4 starts within these
        bench.check(layer, layer.step())
    plain = bench.Layer(shape, draw, contested=8)
    bench.check_peer(layer, plain, plain.step())
    bench.check_peer(layer, plain, layer.step()[:, :, None])
    if name != "attn_x_hs":
        assert len(layer.state.thoughts[layer.state.positions >= 7].unique()) > 1, "there is only one thought type"


@pytest.mark.parametrize("name", NAMES)
def test_the_benchmark_runs(name, bench, shape, draw, monkeypatch):
    """As its fixture runs it, on a tiny layer with the peers that this machine has, at least "epikv"."""
    seen = {}

    def device_benchmark(function, *, moves, verify, peers, peers_move, verify_peer):
        for _ in range(2):
            output = function()
        for peer in peers.values():
            verify_peer(peer())
        verify(output)
        seen.update(peers=peers.keys(), moves=moves, peers_move=peers_move)

    monkeypatch.setattr(bench, "SHAPE", shape)
    monkeypatch.setattr(bench, "Layer", functools.partial(bench.Layer, contested=8))
    bench.test_hybrid_step(device_benchmark, draw, bench.POLICIES[name])
    assert "epikv" in seen["peers"]
    assert seen["moves"] > seen["peers_move"] == shape.cache_bytes


@pytest.mark.parametrize(("name", "damage"), [
    ("attn_x_hs", "output"), ("attn_x_hs", "key"), ("attn_x_hs", "score"), ("attn_x_hs", "slot"),
    ("segment_hs", "slot"), ("segment_hs", "thoughts first"),
])
def test_what_a_timed_step_left_wrong_is_noticed(name, damage, bench, shape, draw):
    layer = tiny(bench, shape, draw, name)
    state = layer.state
    output = layer.step()
    if damage == "output":
        output[1, 1, 3] *= 1.5
    elif damage == "key":
        state.key[0, 0, int((state.positions[0] == state.tokens_seen - 1).long().argmax()), 0] += 1
    elif damage == "score":
        state.score[0, int(state.score[0].argmin())] *= 1.01
    elif damage == "slot":
        state.next_slot[1] = state.score[1].masked_fill(state.score[1].isinf(), -99).argmax()
    else:
        thoughts = state.scorer.attention.thoughts
        thoughts[0, state.next_slot[0]] = 2
        thoughts[0, state.positions[0] == state.tokens_seen - layer.config.newest] = 0
    with pytest.raises(AssertionError):
        bench.check(layer, output)


@pytest.mark.parametrize(("name", "buffer", "says"), [
    ("attn_x_hs", "received", "attention received"), ("attn_x_hs", "frozen", "own score"),
    ("segment_hs", "score", "new token's score"), ("segment_hs", "thought", "thoughts"),
    ("segment_hs_with_sparsity", "thought", "of sparsity"),
])
def test_a_step_that_goes_wrong_is_noticed(name, buffer, says, bench, shape, draw, monkeypatch):
    """The step that the check itself runs, whose buffers it has recorded before."""
    layer = tiny(bench, shape, draw, name)
    output = layer.step()
    attention, right = layer.state.scorer.attention, layer.step

    def wrong():
        slot = layer.state.next_slot[:, None].clone()
        result = right()
        if buffer == "received":
            attention.aggregate[0, 5] *= 1.01
        elif buffer == "frozen":
            attention.frozen.scatter_add_(1, slot, torch.full_like(slot, 1, dtype=torch.float32))
        elif buffer == "score":
            layer.state.score.scatter_add_(1, slot, torch.full_like(slot, 1, dtype=torch.float32))
        else:
            attention.thoughts[1, slot[1]] = (attention.thoughts[1, slot[1]] + 1) % 3
        return result

    monkeypatch.setattr(layer, "step", wrong)
    with pytest.raises(AssertionError, match=says):
        bench.check(layer, output)
