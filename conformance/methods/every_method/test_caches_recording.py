"""Caches that take tokens back: assisted decoding has the tokens of plain decoding, or an error that says why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: python -m pip install 'kvtwin[hf]'")

from kvtwin.conformance.judge.compare import assert_same
from kvtwin.conformance.methods.every_method.test_caches_captured import FIRST, make
from kvtwin.conformance.methods.every_method.test_caches_rows import SIDES, integers, llama
from kvtwin.conformance.methods.support.hf_cases import feed
from kvtwin.conformance.methods.support.tiny_models import generate, prompts
from kvtwin.optimized.hf import H2OCache, captured

pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.whole]

#: Why caches take no token back.
REFUSED = {
    "thinkv": "thresholds decide for all layers", "synckv-offload": "offload=True", "cake": "have their budgets when",
    "epikv": "policy 'epikv' scores a token for all layers",
}
CACHES = [
    pytest.param(name, side, marks=pytest.mark.slow_on_cpu)
    if side == "optimized" and name not in ("longflow", "h2o-half-of-it-recent", *REFUSED) else (name, side)
    for name in (*FIRST, "thinkv-one-thought", "epikv-lag-kv", "synckv-offload") for side in SIDES
]


def contents(cache: Any) -> list[Any]:
    """The tokens that the layers hold, in their slots."""
    return [cache.get_seq_length(), *(integers(layer.state) for layer in cache.layers)]


def near(model: Any, device: torch.device) -> Any:
    """A model that often agrees with this one."""
    other, generator = llama(device), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_((0.03 * torch.randn(weight.shape, generator=generator)).to(device))
    return other


@pytest.mark.parametrize(("name", "side"), CACHES)
def test_assisted_decoding_has_the_tokens_of_plain_decoding(name, side, device):
    """Candidates of the text, of the same model and of another one, which come with the prompt and later ones."""
    model, inputs = llama(device), prompts(9, [3], device)
    new = 7 if side == "optimized" and device.type == "cpu" else 14
    plain, expected, taken = make(name, model, SIDES[side]), [], []
    if name not in REFUSED:
        expected = generate(model, inputs, new, past_key_values=plain).tolist()
    for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": llama(device)},
                    {"assistant_model": near(model, device)}):
        cache = make(name, model, SIDES[side])
        if name in REFUSED:
            with pytest.raises(NotImplementedError, match=f"^assisted decoding is not .*{REFUSED[name]}.*Leave"):
                generate(model, inputs, new, past_key_values=cache, **options)
            continue
        crop = cache.crop
        cache.crop = lambda count, crop=crop: (taken.append(count), crop(count))
        assert generate(model, inputs, new, past_key_values=cache, **options).tolist() == expected
        assert contents(cache) == contents(plain)
    assert name in REFUSED or min(taken) < 0, "no token was taken back"


@pytest.mark.parametrize(
    ("name", "side"), [case for case in CACHES if (case if isinstance(case, tuple) else case.values)[0] not in REFUSED]
)
def test_tokens_that_are_taken_back_leave_no_trace(name, side, device):
    """Later outputs are bitwise those of a cache that never had these tokens. A wrong number changes nothing."""
    model = llama(device)
    caches = [make(name, model, SIDES[side]) for _ in range(2)]
    for cache in caches:
        feed(model, cache, (3, 1, 4, 1, 5, 9, 2))
        cache.activate_past_recording()
    used, other = caches
    for tokens, count in (((6, 5, 3), 3), ((5, 8), 2)):
        feed(model, used, tokens)
        before = contents(used)
        for wrong, says in ((-count - 1, f"from -{count} to 0"), (1, "0 or negative")):
            with pytest.raises(ValueError, match=f"tokens_to_remove must be {says}"):
                used.crop(wrong)
        assert contents(used) == before
        used.crop(-1)
        used.crop(1 - count)
        assert contents(used) == contents(other)
        ids = torch.tensor([[7, 9]], device=device)
        with torch.no_grad():
            assert_same(*(model(ids, past_key_values=cache).logits for cache in caches), what="logits")
        assert contents(used) == contents(other)


@pytest.mark.usefixtures("graphs")
def test_a_reset_ends_the_recording(model, device):
    """Later steps are replays again, and nothing can be taken back."""
    cache, inputs = H2OCache(model.config, budget=6, block_size=4), prompts(5, [0], device)
    with captured(model) as steps:
        generate(model, inputs, 5, past_key_values=cache, prompt_lookup_num_tokens=2)
        assert (steps.replays, cache.recording) == (0, True)
        cache.reset()
        generate(model, inputs, 7, past_key_values=cache)
        assert (steps.replays, cache.recording) == (5, False)
    with pytest.raises(NotImplementedError, match="activate_past_recording"):
        cache.crop(-1)
