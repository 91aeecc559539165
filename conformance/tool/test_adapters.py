"""The adapter to kvpress, without kvpress: its arguments, its results, and the input that it refuses.

The presses here are stand-ins with kvpress's interface. test_adapters_kvpress.py tests the real ones.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kvtwin.conformance import adapters, discovery
from kvtwin.conformance.harness import impl

pytest_plugins = ["pytester"]

NAME = "kvtwin.conformance.adapters.kvpress"


@dataclass
class Press:
    """Like kvpress's ScorerPress: keeps the tokens with the highest scores, in the order of their scores."""

    compression_ratio: float = 0.0

    def score(self, layer, hidden, keys, values, attentions, kwargs):
        return keys[..., 0]

    def compress(self, layer, hidden, keys, values, attentions, kwargs):
        assert 0 <= self.compression_ratio < 1
        if self.compression_ratio == 0:
            return keys, values
        count = max(1, int(keys.shape[2] * (1 - self.compression_ratio)))
        index = self.score(layer, hidden, keys, values, attentions, kwargs).topk(count).indices
        index = index[..., None].expand(-1, -1, -1, layer.head_dim)
        return keys.gather(2, index), values.gather(2, index)


@dataclass
class Observing(Press):
    """Like its SnapKVPress, but the score is the first channel of each query, which shows the queries of a press."""

    window_size: int = 64
    kernel_size: int = 5

    def score(self, layer, hidden, keys, values, attentions, kwargs):
        batch, _, tokens, head_dim = keys.shape
        assert values.shape == keys.shape and attentions is None
        query = layer.q_proj(hidden).view(batch, tokens, layer.config.num_attention_heads, head_dim).transpose(1, 2)
        cosine, sine = (turn[:, None] for turn in kwargs["position_embeddings"])
        query = query * cosine + query.roll(head_dim // 2, -1) * sine
        return query[:, :: layer.config.num_attention_heads // layer.config.num_key_value_heads, :, 0]


@dataclass
class Sinking(Press):
    n_sink: int = 4

    def score(self, layer, hidden, keys, values, attentions, kwargs):
        score = torch.ones_like(keys[..., 0])
        tokens = score.shape[2]
        score[..., self.n_sink:self.n_sink + tokens - int(tokens * (1 - self.compression_ratio))] = 0
        return score


PRESSES = {"ScorerPress": Press, "KeyDiffPress": Press, "SnapKVPress": Observing, "TOVAPress": Observing,
           "StreamingLLMPress": Sinking}


@pytest.fixture
def fresh(monkeypatch):
    """Unload the adapter before and after the test, so that no other test gets one with the stand-ins."""
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    monkeypatch.delattr(adapters, "kvpress", raising=False)
    yield
    sys.modules.pop(NAME, None)
    vars(adapters).pop("kvpress", None)


@pytest.fixture
def adapter(fresh, monkeypatch):
    kvpress = types.ModuleType("kvpress")
    vars(kvpress).update(PRESSES)
    monkeypatch.setitem(sys.modules, "kvpress", kvpress)
    return importlib.import_module(NAME)


@pytest.fixture
def absent(fresh, monkeypatch):
    monkeypatch.setitem(sys.modules, "kvpress", None)  # as if it were not installed


def test_without_kvpress_it_names_the_extra(absent):
    with pytest.raises(ImportError, match=r"^kvpress cannot be imported \(.*\): .*pip install 'kvtwin\[kvpress\]'"):
        importlib.import_module(NAME)


def test_without_kvpress_a_run_ends_with_that(absent, pytester):
    pytester.makepyfile("def test_it(): pass")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--kv-impl", NAME)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*--kv-impl {NAME}: cannot import it: *'kvtwin[[]kvpress]'*"])


def test_it_has_our_methods_functions_and_arguments(adapter):
    """Otherwise a function with a wrong name would never be called and would count as left out on purpose."""
    pairs = {pair.name: pair for pair in discovery.pairs()}
    methods = {name: found for name, found in vars(adapter).items() if isinstance(found, types.SimpleNamespace)}
    assert set(methods) == {"keydiff", "snapkv", "streaming_llm", "tova"}
    for name, functions in ((name, methods[name]) for name in methods.keys() & pairs.keys()):
        for function, theirs in vars(functions).items():
            assert function in pairs[name].exports
            ours = getattr(pairs[name].reference, function)
            # The suite asks nobody else's functions for several ranks, or for FP8 with scales.
            other = ("process_group", "key_scale", "value_scale")
            asked = [one for one in inspect.signature(ours).parameters.values() if one.name not in other]
            found = inspect.signature(theirs).parameters.values()
            assert [*map(str, found)] == [*map(str, asked)], f"{name}.{function}"


def test_the_suite_finds_it(adapter):
    side = impl.Twins(NAME).optimized
    key = torch.arange(12.0).view(1, 1, 6, 2)
    found = side.baselines.snapkv.compress(torch.ones(1, 1, 2, 2), key, key, 6)
    assert type(found).__name__ == "CompressResult"
    with pytest.raises(impl.NotProvided, match=r"snapkv\.SnapKVState$"):
        side.baselines.snapkv.SnapKVState  # noqa: B018


def test_a_budget_arrives_whole(adapter):
    """With a ratio of 1 - budget / tokens, kvpress would keep none of 3 tokens instead of 1, and 1 of 6 instead of
    2."""
    for tokens in range(1, 50):
        key = torch.arange(tokens).float()[None, None, :, None].expand(1, 1, tokens, 2)
        for budget in range(1, tokens + 2):
            kept = adapter.keydiff.evict(key, key, budget)["kept"]
            assert kept[0, 0].tolist() == list(range(max(0, tokens - budget), tokens))


def test_what_stays_is_read_off_in_the_order_of_tokens(adapter):
    key = torch.randn(2, 3, 9, 4, generator=torch.Generator().manual_seed(0))
    found = adapter.keydiff.evict(key, -key, 5)
    expected = key[..., 0].topk(5).indices.sort().values
    assert torch.equal(found["kept"], expected)
    assert torch.equal(found["key"], key.gather(2, expected[..., None].expand(-1, -1, -1, 4)))
    assert torch.equal(found["value"], -found["key"])
    assert found["occupied"].all() and found["occupied"].shape == expected.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_press_computes_the_queries_of_the_test(adapter, dtype):
    """With the projection and RoPE of the stub layer, bitwise equal."""
    query = torch.randn(2, 6, 3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    key = torch.zeros(2, 2, 7, 5, dtype=dtype)
    score = adapter.tova.attend(query, key, key, torch.ones(2, 7, dtype=torch.bool))["received"]
    assert torch.equal(score[..., -3:], query[:, ::3, :, 0])
    assert not score[..., :-3].any()
    assert (adapter.snapkv.window_score(query, key)[..., -3:] == torch.inf).all()


def test_attention_is_causal_and_grouped(adapter):
    """The attention of the stub for the model's layer."""
    value = torch.eye(4).expand(1, 2, 4, 4) * torch.tensor([1.0, 10.0]).view(1, 2, 1, 1)
    found = adapter.tova.attend(torch.zeros(1, 4, 2, 4), torch.zeros(1, 2, 4, 4), value, torch.ones(1, 4) > 0)
    output = found["output"][0]                                                           # [Hq, Q, D]
    assert (output > 0).all(0).tolist() == [[True, True, True, False], [True] * 4]
    assert (output[:, :, 0] > 1).tolist() == [[False, False], [False, False], [True, True], [True, True]]


@pytest.mark.parametrize("sinks", [0, 1, 4])
def test_sinks_and_newest_stay(adapter, sinks):
    keep = adapter.streaming_llm.keep(torch.arange(7, 17).expand(2, 3, 10), 6, sinks=sinks)
    assert keep.shape == (2, 3, 10)
    assert keep[1, 2].nonzero()[:, 0].tolist() == [*range(sinks), *range(10 - 6 + sinks, 10)]


MASK = torch.tensor([[True, True, False, True]])
ALL = torch.ones(1, 4, dtype=torch.bool)
KEY = torch.ones(1, 1, 4, 2)
WINDOW = torch.ones(1, 1, 2, 2)


@pytest.mark.parametrize(
    ("path", "arguments", "refused"),
    [
        ("keydiff.score", {"key": KEY, "occupied": MASK}, "occupied"),
        ("keydiff.score", {"key": KEY, "occupied": MASK.expand(1, 1, 4)}, "occupied"),
        ("keydiff.score", {"key": KEY, "anchor": "median"}, "anchor"),
        ("keydiff.score", {"key": KEY, "similarity": "dot"}, "similarity"),
        ("keydiff.evict", {"key": KEY, "value": KEY, "budget": 2, "occupied": MASK}, "occupied"),
        ("keydiff.evict", {"key": KEY, "value": KEY, "budget": 2, "recent": 1}, "recent"),
        ("keydiff.evict", {"key": KEY, "value": KEY, "budget": 2, "protected": MASK}, "protected"),
        ("keydiff.evict", {"key": KEY, "value": KEY, "budget": 2, "anchor": "mean"}, "anchor"),
        ("keydiff.evict", {"key": KEY, "value": KEY, "budget": 2, "similarity": "euclidean"}, "similarity"),
        ("snapkv.window_score", {"query_window": WINDOW, "key": KEY, "occupied": MASK}, "occupied"),
        ("snapkv.window_score", {"query_window": WINDOW, "key": KEY, "shared_heads": True}, "shared_heads"),
        ("snapkv.window_score", {"query_window": WINDOW, "key": KEY, "scale": 1.0}, "scale"),
        ("snapkv.window_score", {"query_window": KEY, "key": KEY}, "window_of_all"),
        ("snapkv.compress", {"query_window": WINDOW, "key": KEY, "value": KEY, "budget": 2, "occupied": MASK},
         "occupied"),
        ("snapkv.compress", {"query_window": WINDOW, "key": KEY, "value": KEY, "budget": 2, "protected": MASK},
         "protected"),
        ("snapkv.compress", {"query_window": WINDOW, "key": KEY, "value": KEY, "budget": 2, "scale": 1.0}, "scale"),
        ("snapkv.compress", {"query_window": WINDOW, "key": KEY, "value": KEY, "budget": 2, "shared_heads": True},
         "shared_heads"),
        ("snapkv.compress", {"query_window": KEY, "key": KEY, "value": KEY, "budget": 2}, "window_of_all"),
        ("snapkv.compress", {"query_window": WINDOW, "key": KEY, "value": KEY, "budget": 0}, "budget"),
        ("tova.attend", {"query": WINDOW, "key": KEY, "value": KEY, "occupied": MASK}, "occupied"),
        ("tova.attend", {"query": WINDOW, "key": KEY, "value": KEY, "occupied": ALL, "scale": 1.0}, "scale"),
        ("streaming_llm.keep", {"positions": torch.tensor([0, 1, -1]), "budget": 2, "sinks": 1}, "free_slots"),
        ("streaming_llm.keep", {"positions": torch.tensor([0, 2, 1]), "budget": 2, "sinks": 1}, "order"),
        ("streaming_llm.keep", {"positions": torch.arange(4), "budget": 5, "sinks": 4}, "sinks"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_kvpress_does_not_take_is_refused_by_name(adapter, path, arguments, refused):
    method, function = path.split(".")
    with pytest.raises(NotImplementedError, match=f"^{refused}$"):
        getattr(vars(adapter)[method], function)(**arguments)


def test_what_changes_nothing_is_taken(adapter):
    adapter.keydiff.score(KEY, occupied=ALL)
    adapter.keydiff.evict(KEY, KEY, 2, occupied=ALL, protected=~ALL)
    adapter.snapkv.compress(WINDOW, KEY, KEY, 2, occupied=ALL, protected=~ALL, scale=2**-0.5)


def test_every_known_difference_names_a_test():
    """A renamed test would leave a stale entry, which only warns, and only in a run with kvpress installed."""
    here = Path(adapters.__file__).parent
    tests = "\n".join(path.read_text(encoding="utf-8") for path in here.parent.rglob("test_*.py"))
    for line in (here / "kvpress.xfails").read_text(encoding="utf-8").splitlines():
        name = line.split("#")[0].strip().rpartition("::")[2].split("[")[0]
        assert not name or f"def {name}(" in tests, line
