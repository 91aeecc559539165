"""EpiKV's hooks: in models of several architectures, and forward passes that they do not report."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: python -m pip install 'kvtwin[hf]'")

from kvtwin.conformance.methods.epikv.epikv_loops import BANDS
from kvtwin.conformance.methods.support import tiny_models
from kvtwin.conformance.methods.support.hf_cases import feed
from kvtwin.conformance.methods.support.tiny_models import generate, prompts
from kvtwin.reference.hf import EpiKVCache

pytestmark = [pytest.mark.kind("bad_input"), pytest.mark.whole]

both_sides = pytest.mark.parametrize("side", ["reference", "optimized"])


def make(side: str, model: Any, **options: Any) -> Any:
    model.set_attn_implementation("kvtwin")
    made = importlib.import_module(f"kvtwin.{side}.hf.epikv").EpiKVCache
    return made(model, **{"budget": 32, "layers": BANDS, **options})


def layers_of(model: Any) -> Any:
    decoder = model.get_decoder()
    return decoder.h if hasattr(decoder, "h") else decoder.layers


# Architectures -------------------------------------------------------------------------------------------------------


@pytest.mark.kind("equivalence")
@pytest.mark.parametrize("family", ["gpt_neox", "gpt2"])
def test_full_budget_matches_the_stock_model(family: str, device: torch.device) -> None:
    """The layers of these models get the cache under another name, or as a positional argument."""
    model, inputs = tiny_models.other(family, device=device), prompts(6, [0, 2], device)
    expected = generate(model, inputs, 8)
    with make("reference", model) as cache:
        assert torch.equal(generate(model, inputs, 8, past_key_values=cache), expected)


@pytest.mark.kind("equivalence")
@pytest.mark.parametrize("family", ["gpt_neox", "gpt2"])
def test_the_scorer_gets_the_outputs_of_the_layers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models.other(family)
    cache = make("reference", model)
    feed(model, cache)
    outputs: list[Any] = []
    for layer in layers_of(model):
        layer.register_forward_hook(lambda module, args, output: outputs.append(output))
    steps: list[Any] = []
    monkeypatch.setattr(cache._passes.scorer, "step", steps.append)
    feed(model, cache, [5])
    expected = [output[0] if isinstance(output, tuple) else output for output in outputs]
    for heard, output in zip(steps[0], expected, strict=True):
        assert torch.equal(heard[:, 0], output[:, -1])
    cache.close()


@pytest.mark.parametrize("family", [*tiny_models.GPTJ, "bloom", "falcon", "mpt"])
def test_models_with_attention_of_their_own_are_refused(family: str) -> None:
    model = tiny_models.other(family)
    with make("reference", model) as cache, pytest.raises(RuntimeError, match="does not support it"):
        feed(model, cache)


def test_a_model_without_a_list_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models.model("llama")
    monkeypatch.setattr(model, "get_decoder", torch.nn.Identity)
    with pytest.raises(NotImplementedError, match="Identity must have one ModuleList of its 2 layers, .*got 0.*kv_key"):
        EpiKVCache(model, budget=8, layers=BANDS)


# Passes that the hooks do not report ---------------------------------------------------------------------------------


@both_sides
def test_a_closed_cache_takes_no_tokens(side: str, device: torch.device) -> None:
    model = tiny_models.model("llama", device=device)
    with make(side, model) as unused:
        pass
    with pytest.raises(RuntimeError, match=r"closed.*Create a new cache"):
        model.generate(**prompts(5, [0], device), past_key_values=unused, max_new_tokens=3)
    with make(side, model) as used:
        feed(model, used)
    with pytest.raises(RuntimeError, match=r"closed.*Create a new cache"):
        feed(model, used, [5])


def test_a_closed_cache_without_hooks_is_used_as_before(device: torch.device) -> None:
    model, inputs = tiny_models.model("llama", device=device), prompts(5, [0], device)
    expected = generate(model, inputs, 4)
    with make("reference", model, policy="kv_key", layers=None) as cache:
        pass
    assert torch.equal(generate(model, inputs, 4, past_key_values=cache), expected)


@both_sides
def test_the_cache_of_another_model_is_refused(side: str, device: torch.device) -> None:
    """The first pass is refused, because the second layer comes without the output of the first."""
    model, other = (tiny_models.model("llama", device=device) for _ in range(2))
    with make(side, other) as cache:
        model.set_attn_implementation("kvtwin")
        with pytest.raises(RuntimeError, match=r"outputs of layers \[0\].*created from.*new cache"):
            feed(model, cache)


def test_another_model_is_refused_when_only_the_last_layer_is_read() -> None:
    """The prompt needs no scores. The next pass does, and is refused."""
    model, other = (tiny_models.model("llama") for _ in range(2))
    with make("reference", other, policy="attn_x_hs", layers=((1,), ())) as cache:
        model.set_attn_implementation("kvtwin")
        feed(model, cache)
        with pytest.raises(RuntimeError, match=r"outputs of layers \[1\].*created from.*new cache"):
            feed(model, cache, [5])


@both_sides
def test_a_pass_interrupted_behind_the_last_attention_needs_a_reset(side: str, device: torch.device) -> None:
    """All layers have seen the token, but the scorer has not."""
    model = tiny_models.model("llama", device=device)
    with make(side, model) as cache:
        feed(model, cache)
        failing = model.model.layers[1].mlp.register_forward_pre_hook(
            lambda *_: (_ for _ in ()).throw(InterruptedError)
        )
        with pytest.raises(InterruptedError):
            feed(model, cache, [5])
        failing.remove()
        assert [layer.get_seq_length() for layer in cache.layers] == [4, 4]
        with pytest.raises(RuntimeError, match=r"outputs of layers \[1\].*interrupted.*reset\(\)"):
            feed(model, cache, [5])
        cache.reset()
        feed(model, cache)
        feed(model, cache, [5])
