"""Forward passes that do not reach all layers or kvtwin's attention, and copies, for the caches of all methods."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: python -m pip install 'kvtwin[hf]'")

from kvtwin.conformance import discovery
from kvtwin.conformance.judge import checkers
from kvtwin.conformance.methods.support import tiny_models
from kvtwin.conformance.methods.support.hf_cases import feed
from kvtwin.conformance.methods.support.tiny_models import generate, prompts
from kvtwin.reference.hf import H2OCache, LongFlowCache

pytestmark = [pytest.mark.kind("bad_input"), pytest.mark.whole]

NAMES = [f"{pair.state.__name__.removesuffix('State')}Cache" for pair in discovery.built_in() if pair.state is not None]
OPTIONS: dict[str, dict[str, Any]] = {
    "EpiKVCache": {"layers": ((0,), (1,))}, "SyncKVCache": {"max_tokens": 40}, "ThinKVCache": {"max_tokens": 40},
    "KIVICache": {"group": 4, "value_bits": 4, "residual": 8, "max_tokens": 40},
    "PMKVQCache": {"bits": 5, "window": 4, "group": 8, "max_tokens": 40},
    "QuestCache": {"max_tokens": 40}, "CAKECache": {"window": 4},
}

every_cache = pytest.mark.parametrize("name", NAMES)
# The adapter is the same on both sides, and for all States that take blocks.
KINDS = ["H2OCache", *(f"{name}Cache" for name in ("LongFlow", "EpiKV", "SyncKV", "ThinKV", "KIVI", "Quest", "CAKE"))]
REQUIRED = {
    f"{pair.state.__name__.removesuffix('State')}Cache": {
        **checkers.with_budget(pair.name, 32), **checkers.required(pair.name)
    }
    for pair in discovery.built_in() if pair.state is not None
}
both_sides = pytest.mark.parametrize(
    ("name", "side"), [*((name, "reference") for name in NAMES), *((name, "optimized") for name in KINDS)]
)


def make(side: str, name: str, model: Any, **options: Any) -> Any:
    """A cache that evicts nothing in these tests."""
    first = model if name == "EpiKVCache" else model.config
    made = getattr(importlib.import_module(f"kvtwin.{side}.hf"), name)
    return made(first, **{**REQUIRED.get(name, {}), **OPTIONS.get(name, {}), **options})


def llama(device: torch.device | str = "cpu") -> Any:
    model = tiny_models.model("llama", device=device)
    model.set_attn_implementation("kvtwin")
    return model


def stop(*_: object) -> None:
    raise InterruptedError


def interrupt(module: Any, run: Callable[[], None]) -> None:
    """Call `run`, which is interrupted before it calls `module`."""
    hook = module.register_forward_pre_hook(stop)
    with pytest.raises(InterruptedError):
        run()
    hook.remove()


def lengths(cache: Any) -> list[int]:
    return [layer.get_seq_length() for layer in cache.layers]


# Interrupted passes --------------------------------------------------------------------------------------------------


@both_sides
def test_an_interrupted_pass_is_refused_until_a_reset(name: str, side: str, device: torch.device) -> None:
    model = llama(device)
    cache = make(side, name, model)
    feed(model, cache)
    interrupt(model.model.layers[1], lambda: feed(model, cache, [5]))
    assert lengths(cache) == [4, 3]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"layer 0: 4, layer 1: 3\) because .* interrupted: call reset\(\)"):
            feed(model, cache, [5])
        assert lengths(cache) == [4, 3], "the refused pass changed the cache"
    cache.reset()
    expected = generate(model, prompts(3, [0], device), 2)
    assert torch.equal(generate(model, prompts(3, [0], device), 2, past_key_values=cache), expected)


@pytest.mark.parametrize("name", ["LongFlowCache", "H2OCache", "EpiKVCache"])
def test_an_interrupted_prompt_is_refused(name: str) -> None:
    model = llama()
    cache = make("reference", name, model)
    interrupt(model.model.layers[1], lambda: feed(model, cache))
    with pytest.raises(RuntimeError, match=r"a forward pass was interrupted.*call reset\(\)"):
        feed(model, cache)
    cache.reset()
    feed(model, cache)


@every_cache
def test_a_pass_interrupted_in_attention_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second layer counts the token, but its state does not have it."""
    model = llama()
    cache = make("reference", name, model)
    feed(model, cache)
    with monkeypatch.context() as patch:
        patch.setattr(cache.layers[1], "_make_state", stop)
        with pytest.raises(InterruptedError):
            feed(model, cache, [5])
    assert lengths(cache) == [4, 4]
    with pytest.raises(RuntimeError, match=r"interrupted in layer 1: call reset\(\)"):
        feed(model, cache, [5])
    cache.reset()
    assert [layer.pending for layer in cache.layers] == [0, 0]
    feed(model, cache)
    feed(model, cache, [5])
    assert lengths(cache) == [4, 4]


@pytest.mark.parametrize("layer", [1, 2])
def test_layers_with_windows_take_part(layer: int) -> None:
    model = tiny_models.model(
        "qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=1, num_hidden_layers=3
    )
    model.set_attn_implementation("kvtwin")
    cache = H2OCache(model.config, budget=32)
    feed(model, cache)
    interrupt(model.model.layers[layer], lambda: feed(model, cache, [5]))
    with pytest.raises(RuntimeError, match=r"layer 2: 3\) because .* interrupted"):
        feed(model, cache, [5])
    cache.reset()
    feed(model, cache)
    feed(model, cache, [5])
    assert lengths(cache) == [4, 4, 4]


# Attention of another name -------------------------------------------------------------------------------------------


@every_cache
@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")  # by transformers
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("other", ["sdpa", "eager", "flex_attention"])
def test_one_pass_with_another_attention_is_refused(name: str, other: str) -> None:
    """The second layer refuses the pass, before it returns logits of full attention."""
    model = tiny_models.model("llama")
    model.set_attn_implementation(other)
    cache = make("reference", name, model)
    wanted = r"3 new token\(s\) of layer 0 .* model\.set_attn_implementation\(.kvtwin"
    with torch.compiler.set_stance("force_eager"), pytest.raises(RuntimeError, match=wanted):  # flex would be compiled
        feed(model, cache)
    model.set_attn_implementation("kvtwin")
    cache.reset()
    feed(model, cache)


def test_the_only_evicting_layer_names_both_causes() -> None:
    """Nothing follows the layer in its pass, so the next pass is refused."""
    model = tiny_models.model("llama", num_hidden_layers=1)
    cache = LongFlowCache(model.config, budget=32)
    feed(model, cache)
    with pytest.raises(RuntimeError, match=r"call model\.set_attn_implementation.*interrupted.*reset\(\)"):
        feed(model, cache, [5])


# Copies --------------------------------------------------------------------------------------------------------------


@both_sides
@pytest.mark.kind("equivalence")
def test_a_copy_continues_like_its_original(name: str, side: str, device: torch.device) -> None:
    model = llama(device)
    cache = make(side, name, model, **({"policy": "kv_key", "layers": None} if name == "EpiKVCache" else {}))
    feed(model, cache)
    copies = [cache, copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
    with torch.no_grad():
        logits = [model(torch.tensor([[5]], device=device), past_key_values=one).logits for one in copies]
    assert torch.equal(logits[1], logits[0])
    assert torch.equal(logits[2], logits[0])
    assert [lengths(one) for one in copies] == [[4, 4]] * 3


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_cache_with_hooks_has_no_copy(copied: Callable[[Any], Any]) -> None:
    cache = make("reference", "EpiKVCache", llama())
    with pytest.raises(NotImplementedError, match="hooks in its model"):
        copied(cache)
    cache.close()
