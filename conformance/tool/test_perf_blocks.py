"""Benchmarks of block caches compare a state that has seen tokens with float64: their check, without timing, on the CPU
if there is no GPU."""

from __future__ import annotations

import pytest
import torch

from kvtwin.conformance import discovery
from kvtwin.conformance.judge import checkers
from kvtwin.conformance.tool.perf_source import PERF, perf_module

if not (PERF / "conftest.py").is_file():
    pytest.skip("perf/ is not in the wheel", allow_module_level=True)

METHODS = ["keydiff", *sorted(pair.name for pair in discovery.methods() if pair.is_baseline and pair.takes_blocks)]
BUDGET, BLOCK = 24, 8
PAGES = {"alpha": None, "page_size": 2, "interval": 2}


@pytest.fixture(scope="module")
def bench():
    module = perf_module("blocks")
    before = module.DEVICE, module.BLOCK
    module.DEVICE, module.BLOCK = "cuda" if torch.cuda.is_available() else "cpu", BLOCK
    yield module
    module.DEVICE, module.BLOCK = before


def full(bench, method, queries, **options):
    shape = bench.Shape(2, 2, queries, BUDGET, 1, 16)
    given = bench.tokens(shape, queries, seed=1)
    return bench.full_state(method, shape, **options), given


@pytest.mark.slow_on_cpu
@pytest.mark.parametrize("queries", [1, BLOCK], ids=["step", "block"])
@pytest.mark.parametrize(
    ("method", "options"), [*((method, {}) for method in METHODS), pytest.param("raas", PAGES, id="raas-pages")]
)
def test_a_state_that_has_seen_tokens_is_right(bench, method, options, queries):
    state, given = full(bench, method, queries, **options)
    for _ in range(3):
        state.append_block(*given)
    bench.check_state(state, given, method)


@pytest.mark.parametrize(
    ("method", "memory", "options"),
    [
        ("lazy_eviction", "_carried", {"alpha": 0.1}), ("lag_kv", "_score", {}),
        ("r_kv", "_window_query", {"interval": 1}), ("snapkv", "_window_query", {"window": 8}),
        ("raas", "_score", PAGES),
    ],
)
def test_a_state_that_remembers_something_else_is_noticed(bench, monkeypatch, method, memory, options):
    """What a method remembers besides keys and values changes after the reference has copied it."""
    state, given = full(bench, method, 1, **options)
    adapter = checkers.ask(method, "Adapter", None)
    resume = adapter.resume

    def damaged(self, tested, reference):
        resume(self, tested, reference)
        tensor = getattr(state, memory)
        tensor.copy_(tensor.flip(2))

    monkeypatch.setattr(adapter, "resume", damaged)
    with pytest.raises(AssertionError):
        bench.check_state(state, given, method)


@pytest.mark.parametrize(
    ("method", "interval", "options"), [("snapkv", 3, {"window": 8}), ("raas", 4, {"alpha": None, "page_size": 4})]
)
def test_an_interval_is_right_and_ends_with_an_eviction(bench, monkeypatch, method, interval, options):
    """The benchmark of an interval with its own checks, twice, but without the peers, which are kernels for GPUs."""
    monkeypatch.setattr(bench, "decode_peers", lambda *_: {})
    asked = {}

    def benchmark(function, *, verify, **others):
        function()
        verify(function())
        asked.update(others)

    shape = bench.Shape(2, 2, 1, BUDGET, 1, 16)
    bench.time_interval(benchmark, method, shape, interval, gated=False, **options)
    assert asked["peers_move"] == interval * shape._replace(slots=BUDGET + interval // 2).attention_bytes
