"""What a user meets first: names, options, errors and `repr` of all caches, and one call for all of them."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers: python -m pip install 'kvtwin[hf]'")

from transformers import DynamicCache

import kvtwin.optimized.hf
import kvtwin.reference.hf
from kvtwin.conformance import discovery
from kvtwin.conformance.methods.support import tiny_models
from kvtwin.conformance.methods.support.hf_cases import feed
from kvtwin.conformance.methods.support.tiny_models import generate, prompts
from kvtwin.reference.hf import cache_adapter_contents as contents

pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.whole]

SIDES = {"reference": kvtwin.reference.hf, "optimized": kvtwin.optimized.hf}
NAMES = {pair.name: f"{pair.state.__name__.removesuffix('State')}Cache" for pair in discovery.built_in() if pair.state}
#: What a budget of 16 tokens, or a ratio, cannot mean.
BITS = "{}Cache evicts no token, so budget=16 has no effect: its bits say how much it compresses"
WARNS = {
    "kivi": BITS.format("KIVI"), "pm_kvq": BITS.format("PMKVQ"),
    "epikv": "the prompt's 40 tokens and 4 recent ones are more than the budget of 16, which EpiKVCache now applies to",
}
NO_RATIO = {
    "kivi": "compression_ratio is not an option of KIVICache, which evicts no token",
    "pm_kvq": "compression_ratio is not an option of PMKVQCache, which evicts no token",
    "epikv": "compression_ratio needs keep_prompt=False, .*: EpiKVCache keeps the whole prompt, so pass a budget",
}
#: Caches that hold more tokens than their budget: those of all layers, of the prompt, or in fewer bits.
HOLD_MORE = {"kivi", "pm_kvq", "quest", "synckv", "epikv", "cake"}
every_method = pytest.mark.parametrize("method", NAMES)
both_sides = pytest.mark.parametrize("side", SIDES)
kernels = pytest.mark.parametrize(("method", "side"), [
    pytest.param(name, side, marks=pytest.mark.slow_on_cpu) if side == "optimized" and name != "tova" else (name, side)
    for name in NAMES for side in SIDES
])


def model(device: torch.device | str = "cpu") -> Any:
    """Layers enough for the two bands of EpiKV; a head fits KIVI's groups."""
    made = tiny_models.model("llama", device=device, num_hidden_layers=4, head_dim=32, num_attention_heads=2)
    made.set_attn_implementation("kvtwin")
    return made


def of_tensors(cache: Any) -> int:
    """The bytes of the keys and values of a cache of transformers."""
    return sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))


@kernels
def test_a_budget_alone_makes_a_cache_generate(method, side, device):
    """And the cache says what it holds, before the first token and after."""
    of, inputs, full = model(device), prompts(40, [0, 3], device), DynamicCache()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        cache = SIDES[side].cache(method, of, budget=16)
        assert repr(cache).startswith(f"<{NAMES[method]} of kvtwin.{side}: ")
        assert repr(cache).endswith(" 4 layers; no tokens, 0 B>")
        assert generate(of, inputs, 3, past_key_values=cache).shape == (2, 3)
    assert [str(one.message)[:len(WARNS.get(method, ""))] for one in said] == list(filter(None, [WARNS.get(method)]))
    generate(of, inputs, 3, past_key_values=full)
    assert cache.full_nbytes == of_tensors(full)
    held = max(int(layer.state.occupied.sum(-1).max()) for layer in cache.layers)
    assert held <= 16 or method in HOLD_MORE
    assert f"; {held} of 42 tokens, {contents.in_words(cache.nbytes)} (full cache: " in repr(cache)
    own = (one for layer in cache.layers for one in vars(layer.state).values() if isinstance(one, Tensor))
    assert cache.nbytes >= sum(one.nbytes for one in {one.data_ptr(): one for one in own}.values()) > 0
    cache.reset()
    assert "; no tokens, " in repr(cache)


@kernels
def test_a_cache_has_the_dtype_of_autocast(method, side, device):
    """As transformers' attention has. Without it, keys, which the model rotates in float32, differ from values."""
    of, inputs, full = model(device), prompts(12, [0], device), DynamicCache()
    with torch.autocast(device.type, dtype=torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        cache = SIDES[side].cache(method, of, budget=16)
        generate(of, inputs, 3, past_key_values=cache)
        generate(of, inputs, 3, past_key_values=full)
    state = cache.layers[0].state
    assert state.dtype == torch.bfloat16
    if method not in {*HOLD_MORE, "thinkv"}:                                # it stores codes
        assert torch.equal(state.key[:, :, :12], full.layers[0].keys[:, :, :12].bfloat16())


def test_what_layers_share_counts_once():
    of = model()
    with kvtwin.reference.hf.EpiKVCache(of, budget=16) as cache:
        feed(of, cache)
        states = [layer.state for layer in cache.layers]
        scorer = contents.nbytes([states[0].scorer])
        assert cache.nbytes == sum(contents.nbytes([state]) for state in states) - 3 * scorer > scorer > 0


@every_method
@pytest.mark.parametrize("ratio", [0.7, 0])
def test_a_ratio_is_the_budget_of_the_first_forward_pass(method, ratio):
    """int(T * (1 - ratio)) of T tokens, padding included, as kvpress rounds; another prompt has another budget."""
    of = model()
    if method in NO_RATIO:
        with pytest.raises(TypeError, match=f"^{NO_RATIO[method]}"):
            kvtwin.reference.hf.cache(method, of, compression_ratio=ratio)
        return
    cache = kvtwin.reference.hf.cache(method, of, compression_ratio=ratio)
    assert f": compression_ratio {ratio:g}, 4 layers; no tokens" in repr(cache)
    for length, padding in ((23, [0, 2]), (31, [1, 0]), (31, [0])):
        budget = max(1, int(length * (1 - ratio)))
        inputs = prompts(length, padding)
        plain = kvtwin.reference.hf.cache(method, of, budget=budget)
        expected = generate(of, inputs, 3, past_key_values=plain)
        assert torch.equal(generate(of, inputs, 3, past_key_values=cache), expected)
        assert cache.config == plain.config
        assert [layer.state.positions.tolist() for layer in cache.layers] == [
            layer.state.positions.tolist() for layer in plain.layers
        ]
        assert f"{budget}, compression_ratio {ratio:g}, 4 layers" in repr(cache)
        cache.reset()


@pytest.mark.parametrize(("ratio", "error", "says"), [
    (1.0, ValueError, "compression_ratio must be at least 0 and below 1, got 1.0"),
    (-0.1, ValueError, "compression_ratio must be at least 0 and below 1, got -0.1"),
    (float("nan"), ValueError, "compression_ratio must be at least 0 and below 1, got nan"),
    ("half", TypeError, "compression_ratio must be a number, got str: 'half'"),
    (True, TypeError, "compression_ratio must be a number, got bool: True"),
])  # fmt: skip
@pytest.mark.kind("bad_input")
def test_what_is_no_ratio(ratio, error, says):
    with pytest.raises(error, match=f"^{says}$"):
        kvtwin.reference.hf.H2OCache(model().config, compression_ratio=ratio)


@pytest.mark.kind("bad_input")
@both_sides
@every_method
def test_errors_name_the_class_that_was_called(method, side):
    of, cache = model(), getattr(SIDES[side], NAMES[method])
    first = of if method == "epikv" else of.config
    wrong = {
        "has no option 'budgett': did you mean 'budget'? There are: ": ((first,), {"budgett": 16}),
        "needs a budget, such as budget=1024, or a compression_ratio, got neither": ((first,), {}),
        "needs a budget, such as budget=1024, or a compression_ratio, got both": (
            (first,), {"budget": 16, "compression_ratio": 0.5},
        ),
        ": too many positional arguments": ((first, 16), {}),
        ": missing a required argument": ((), {"budget": 16}),
    }
    for says, (given, options) in wrong.items():
        if "needs a" in says and (method in NO_RATIO or (method, options) == ("thinkv", {})):
            continue
        with pytest.raises(TypeError) as caught:
            cache(*given, **options)
        assert str(caught.value).replace(" :", ":").startswith(f"{NAMES[method]} {says}".replace(" :", ":"))
        assert "__init__" not in str(caught.value)


@both_sides
def test_all_caches_are_listed(side):
    names = set(NAMES.values())
    assert {name for name in dir(SIDES[side]) if name.endswith("Cache")} == names
    space: dict[str, Any] = {}
    exec(f"from kvtwin.{side}.hf import *", space)
    assert names | {"cache"} | ({"captured"} if side == "optimized" else set()) == space.keys() - {"__builtins__"}
    assert SIDES[side].block_caches.names() == NAMES


def test_an_import_loads_no_method():
    code = f"import sys, {', '.join(side.__name__ for side in SIDES.values())}\n"
    code += "print([name for name in sys.modules if name.endswith(('.h2o', '.kivi'))])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@both_sides
@pytest.mark.parametrize(("name", "says"), [
    ("h20", "there is no cache 'h20': did you mean 'h2o'? There are: cake, "),
    ("xyz", "there is no cache 'xyz'; there are: cake, "), (None, "there is no cache None"),
])  # fmt: skip
@pytest.mark.kind("bad_input")
def test_an_unknown_name_gets_one_line(name, says, side):
    with pytest.raises(ValueError) as caught:
        SIDES[side].cache(name, model(), budget=16)
    assert str(caught.value).startswith(says) and "\n" not in str(caught.value)


def test_a_cache_by_name_takes_a_model_or_its_config():
    of = model()
    assert type(kvtwin.reference.hf.cache("h2o", of.config, budget=16)) is kvtwin.reference.hf.H2OCache
    assert type(kvtwin.optimized.hf.cache("h2o", of, budget=16)) is kvtwin.optimized.hf.H2OCache


# repr, where it could raise ------------------------------------------------------------------------------------------


def interrupted(of: Any) -> Any:
    cache = kvtwin.reference.hf.H2OCache(of.config, budget=16)
    cache.update(*torch.zeros(2, 1, 2, 5, 32), 0)
    return cache


def padding_only(of: Any) -> Any:
    cache = kvtwin.reference.hf.TOVACache(of.config, budget=16, attention_mask=torch.zeros(1, 3).long())
    feed(of, cache)
    return cache


def offloaded(of: Any) -> Any:
    cache = kvtwin.reference.hf.SyncKVCache(of.config, budget=4, clusters=1, offload=True, max_tokens=32)
    feed(of, cache)
    return cache


def incomplete(of: Any) -> Any:
    cache = kvtwin.reference.hf.LongFlowCache(of.config, budget=16)
    feed(of, cache)
    cache.layers[0].state._interrupted = "step"
    return cache


@pytest.mark.parametrize(("make", "says"), [
    (interrupted, "no tokens, 0 B>"), (padding_only, "0 of 3 tokens"), (offloaded, "3 of 3 tokens"),
    (incomplete, "3 of 3 tokens"),
])  # fmt: skip
def test_repr_never_raises(make, says):
    assert says in repr(make(model()))


def test_repr_reads_no_tensor_during_a_capture(monkeypatch):
    """Reading one would end the capture with an error."""
    of = model()
    cache = kvtwin.reference.hf.H2OCache(of.config, budget=2)
    feed(of, cache)
    monkeypatch.setattr(contents, "capturing", lambda device: True)
    monkeypatch.setattr(contents, "most_tokens", lambda states: pytest.fail("reads tensors"))
    assert repr(cache).endswith("B, during a capture>") and "budget 2, 4 layers" in repr(cache)
