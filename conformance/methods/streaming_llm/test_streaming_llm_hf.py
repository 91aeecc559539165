"""StreamingLLMCache(rerotate_keys=True) in models of transformers: tokens are rotated by their places in the cache.

That a generation is the decode loop's is a row of the checker's CACHES.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: python -m pip install 'kvtwin[hf]'")

from kvtwin.conformance.methods.support import tiny_models
from kvtwin.conformance.methods.support.hf_cases import feed
from kvtwin.conformance.methods.support.hf_loops import F64
from kvtwin.conformance.methods.support.tiny_models import FAMILIES, cache_class, generate, prompts
from kvtwin.reference.hf.rotation import frequencies, unrotated

pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.whole]


def cache_of(twins: Any, side: str, model: Any, **options: Any) -> Any:
    model.set_attn_implementation("kvtwin")
    return cache_class(twins, side, "streaming_llm")(model.config, **{"sinks": 1, "rerotate_keys": True, **options})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_full_budget_matches_the_stock_model(family, dtype, twins, device):
    """Places in the cache are then positions without padding."""
    model, inputs = tiny_models.model(family, dtype, device), prompts(9, [0, 4], device)
    expected = generate(model, inputs, 8)
    for chunk in (None, 3):
        used = cache_of(twins, "reference", model, budget=20, block_size=4)
        assert torch.equal(generate(model, inputs, 8, past_key_values=used, prefill_chunk_size=chunk), expected)


def test_keys_are_stored_before_their_rotation(twins, device):
    """The key of a token does not depend on its position, but for the rounding of undoing the rotation."""
    model = tiny_models.model("llama", F64, device)
    used = cache_of(twins, "reference", model, budget=20)
    feed(model, used, [7] * 5)
    key = used.layers[0].state.key[0, :, :5]
    assert float((key - key[:, :1]).abs().max()) <= 2.0**-45 * float(key.abs().max())
    feed(model, used, [7])
    assert used.layers[0].state.positions[0, 0, :6].tolist() == [0, 1, 2, 3, 4, 5]


def test_without_the_option_positions_in_the_text_count(twins, device):
    model, outputs = tiny_models.model("llama", F64, device), []
    for option in (False, True):
        used = cache_of(twins, "reference", model, budget=4, rerotate_keys=option)
        feed(model, used, range(9))
        with torch.no_grad():
            outputs.append(model(torch.tensor([[5]], device=device), past_key_values=used).logits)
        assert (used.config.inv_freq is None) != option
    assert not torch.equal(*outputs)


@pytest.mark.parametrize("family", FAMILIES)
def test_frequencies_are_the_model_s(family):
    model = tiny_models.model(family)
    assert frequencies(model.config) == tuple(model.model.rotary_emb.inv_freq.tolist())


def test_undoing_a_rotation_gives_the_vector_before():
    generator = torch.Generator().manual_seed(1)
    vector, angle = torch.randn(2, 3, 4, 16, generator=generator, dtype=F64), torch.rand(2, 1, 4, 8, dtype=F64)
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()       # as a model in low precision has them
    one, other = vector.chunk(2, -1)
    c, s = cos.double(), sin.double()
    turned = torch.cat([one * c - other * s, other * c + one * s], -1)
    assert float((unrotated(turned, cos, sin) - vector).abs().max()) <= 2.0**-48


@pytest.mark.kind("bad_input")
@pytest.mark.parametrize("side", ["reference", "optimized"])
def test_models_with_another_rotation_are_refused(side):
    made = importlib.import_module(f"kvtwin.{side}.hf").StreamingLLMCache
    for family in ("granite", "mistral"):
        with pytest.raises(NotImplementedError, match=f"that of {family} is not supported"):
            made(tiny_models.model(family).config, budget=8, rerotate_keys=True)
    scaled = tiny_models.model("llama").config
    scaled.rope_parameters = {**scaled.rope_parameters, "rope_type": "linear", "factor": 2.0}
    with pytest.raises(NotImplementedError, match="needs the default rotary embedding, got rope_type 'linear'"):
        made(scaled, budget=8, rerotate_keys=True)
    scaled.rope_parameters = {**scaled.rope_parameters, "rope_type": "default", "partial_rotary_factor": 0.5}
    with pytest.raises(NotImplementedError, match="needs a rotary embedding of all channels"):
        made(scaled, budget=8, rerotate_keys=True)
    with pytest.raises(TypeError, match=r"config must be model\.config"):
        made("llama", budget=8, rerotate_keys=True)


@pytest.mark.kind("bad_input")
def test_attention_without_positions_is_refused(twins):
    model = tiny_models.model("llama")
    used = cache_of(twins, "reference", model, budget=8)
    key = torch.zeros(1, 2, 3, 16)
    with torch.no_grad(), pytest.raises(NotImplementedError, match=r"needs the model to pass position_ids"):
        used.layers[0].update(key, key)
        used.layers[0].attend(torch.zeros(1, 4, 3, 16), key, key, None, None, None)
