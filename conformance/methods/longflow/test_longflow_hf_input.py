"""Input that LongFlow's cache for transformers refuses, and the reasons that the errors give."""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: python -m pip install 'kvtwin[hf]'")

import transformers
from transformers import DynamicCache

from kvtwin.conformance.methods.support import tiny_models
from kvtwin.conformance.methods.support.hf_cases import check_second_turn_in_chunks, feed
from kvtwin.conformance.methods.support.tiny_models import prompts
from kvtwin.reference.hf import LongFlowCache
from kvtwin.reference.hf.cache_adapter import ARGUMENT, attention

pytestmark = [pytest.mark.kind("bad_input"), pytest.mark.main, pytest.mark.whole]

MASK = torch.ones(1, 5, dtype=torch.long)


@pytest.fixture(scope="module")
def model() -> Any:
    """A shared model, which no test modifies. Every test has its own cache."""
    model = tiny_models.model("llama")
    model.set_attn_implementation("kvtwin")
    return model


@pytest.fixture
def inputs() -> dict[str, torch.Tensor]:
    return prompts(5, [0])


def test_without_transformers_the_extra_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("kvtwin.reference.hf")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'kvtwin\[hf\]'"):
        importlib.import_module("kvtwin.reference.hf")


# ---- the constructor ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, TypeError, "budget"),
        ({"budget": 0}, ValueError, "budget must be at least 1"),
        ({"budget": 8.0}, TypeError, "budget must be an int"),
        ({"budget": 4, "sinks": 3}, ValueError, "protected tokens"),
        ({"budget": 4, "window_size": 3}, TypeError, "window_size"),
        ({"budget": 4, "scale": 0.1}, TypeError, "scale is not an option"),
        ({"budget": 4, "attention_mask": [[1, 1]]}, TypeError, "attention_mask must be a torch.Tensor"),
        ({"budget": 4, "attention_mask": MASK[0]}, ValueError, r"attention_mask must be \[B, T\]"),
        ({"budget": 4, "attention_mask": MASK.float()}, ValueError, "of bools or integers"),
    ],
)
def test_options(model, options, error, message):
    with pytest.raises(error, match=message):
        LongFlowCache(model.config, **options)


def test_rejects_a_model_as_config(model):
    with pytest.raises(TypeError, match=r"model\.config"):
        LongFlowCache(model, budget=4)


def test_a_model_that_shares_keys_between_layers():
    with pytest.raises(NotImplementedError, match="KV sharing"):
        LongFlowCache(transformers.Gemma3nTextConfig(num_hidden_layers=10, num_kv_shared_layers=5), budget=4)


def test_a_model_without_full_attention_gets_a_warning():
    config = transformers.MistralConfig(num_hidden_layers=2, sliding_window=8)
    with pytest.warns(UserWarning, match="nothing will be evicted"):
        LongFlowCache(config, budget=4)


def test_the_cache_is_the_argument_that_this_transformers_takes(model, inputs):
    """Under the name that raises neither an error nor a warning."""
    cache = LongFlowCache(model.config, budget=4)
    assert cache.argument[ARGUMENT] is cache
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate(**inputs, **cache.argument, max_new_tokens=3)
    assert cache.get_seq_length() == 7


# ---- the model ------------------------------------------------------------------------------------------------------


def test_rejects_a_model_without_our_attention(inputs):
    """The first forward pass says which line is missing."""
    model = tiny_models.model("llama")
    cache = LongFlowCache(model.config, budget=4)
    with pytest.raises(RuntimeError, match=r'model\.set_attn_implementation\("kvtwin"\)'):
        model.generate(**inputs, past_key_values=cache, max_new_tokens=3)
    cache.reset()
    model.set_attn_implementation("kvtwin")
    model.generate(**inputs, past_key_values=cache, max_new_tokens=3)


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias"])
def test_rejects_options_that_change_logits(name):
    query = torch.zeros(1, 2, 3, 16)
    with pytest.raises(NotImplementedError, match=f"Identity passes {name}"):
        attention(torch.nn.Identity(), query, query, query, None, **{name: torch.ones(1)})


def test_dropout():
    model = tiny_models.model("llama", attention_dropout=0.5).train()
    model.set_attn_implementation("kvtwin")
    with pytest.raises(NotImplementedError, match=r"model\.eval\(\)"):
        feed(model, LongFlowCache(model.config, budget=4))


def test_gradients(model, inputs):
    with pytest.raises(ValueError, match="no_grad"):
        model(**inputs, past_key_values=LongFlowCache(model.config, budget=4))


def test_keys_of_another_layer(model):
    """A model that shares keys between layers hands the same tensors to attention twice."""
    layer = LongFlowCache(model.config, budget=4).layers[0]
    query = torch.randn(1, 4, 3, 16)
    key, value = layer.update(torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16))
    mask = tiny_mask(3)
    attention(model.model.layers[0].self_attn, query, key, value, mask)
    with pytest.raises(NotImplementedError, match="KV sharing"):
        attention(model.model.layers[1].self_attn, query, key, value, mask)


def tiny_mask(length: int) -> Any:
    """The result of our mask function for a prompt without padding."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

    return ALL_MASK_ATTENTION_FUNCTIONS["kvtwin"](
        batch_size=1, q_length=length, kv_length=length, mask_function=causal_mask_function, attention_mask=None
    )


def test_dtypes_without_kernels_are_refused():
    from kvtwin.optimized.hf import LongFlowCache as Optimized

    model = tiny_models.model("llama", torch.float64)
    model.set_attn_implementation("kvtwin")
    with pytest.raises(TypeError, match=r"dtype must be one of torch\.float32"):
        feed(model, Optimized(model.config, budget=4))


# ---- masks ----------------------------------------------------------------------------------------------------------


def test_rejects_masks_other_than_padding(model):
    for mask in (torch.ones(1, 1, 3, 3, dtype=torch.bool), torch.zeros(1, 1, 3, 3)):
        with pytest.raises(NotImplementedError, match=r"a mask of its own \(Tensor\)"):
            feed(model, LongFlowCache(model.config, budget=4), attention_mask=mask)


def test_a_model_that_gives_no_mask(model):
    layer = LongFlowCache(model.config, budget=4).layers[0]
    query = torch.randn(1, 4, 3, 16)
    key, value = layer.update(torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16))
    with pytest.raises(NotImplementedError, match="no mask"):
        attention(model.model.layers[0].self_attn, query, key, value, None)


def test_masks_that_are_not_causal():
    """An evicting layer in a model with sliding windows gets the mask of the wrong layer type."""
    model = tiny_models.model("mistral", sliding_window=3)
    model.set_attn_implementation("kvtwin")
    everywhere = LongFlowCache(tiny_models.model("llama").config, budget=4)
    with pytest.raises(NotImplementedError, match="not the causal one"):
        feed(model, everywhere)


def test_padding_behind_the_first_chunk(model):
    with pytest.raises(ValueError, match="padding behind tokens that the cache has seen"):
        model.generate(
            **prompts(6, [0, 3]), past_key_values=LongFlowCache(model.config, budget=4), prefill_chunk_size=2,
            max_new_tokens=2,
        )
    padding = torch.tensor([[0, 0, 0, 1, 1]])
    told = LongFlowCache(model.config, budget=4, attention_mask=padding)
    feed(model, told, [0, 0])
    with pytest.raises(ValueError, match="padding behind tokens that the cache has seen"):
        feed(model, told, [0, 5, 5])


def test_two_masks_that_differ(model):
    other = torch.tensor([[0, 1, 1, 1, 1]])
    with pytest.raises(ValueError, match="differs from the model's"):
        feed(model, LongFlowCache(model.config, budget=4, attention_mask=other), [2] * 5, attention_mask=MASK)


@pytest.mark.parametrize("shape", [(2, 5), (1, 4)])
def test_a_mask_of_the_wrong_shape(model, shape):
    cache = LongFlowCache(model.config, budget=4, attention_mask=torch.ones(shape, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"B = 1 .*T at least 5"):
        feed(model, cache, [2] * 5)


def test_a_mask_that_forgets_the_tokens_before(model):
    """The mask that transformers 5.17 passes for prefill_chunk_size on a cache that is not empty."""
    cache = LongFlowCache(model.config, budget=4)
    feed(model, cache)
    with pytest.raises(ValueError, match="3 tokens that the cache has seen and the 2 new ones"):
        feed(model, cache, [5, 6], attention_mask=torch.ones(1, 2, dtype=torch.long))


@pytest.mark.parametrize("masked", [True, False])
def test_a_second_turn_in_chunks_is_right_or_refused(model, masked):
    check_second_turn_in_chunks(model, LongFlowCache(model.config, budget=40), masked)


# ---- the cache ------------------------------------------------------------------------------------------------------


def test_another_batch_on_a_cache_with_tokens(model):
    cache = LongFlowCache(model.config, budget=4)
    feed(model, cache)
    with torch.no_grad(), pytest.raises(ValueError, match=r"batch 1, now 2.*reset\(\)"):
        model(torch.tensor([[5], [6]]), past_key_values=cache)


def test_rejects_removing_tokens_that_were_not_recorded(model):
    cache = LongFlowCache(model.config, budget=4)
    feed(model, cache)
    cache.crop(0)
    with pytest.raises(NotImplementedError, match="evicted tokens cannot be restored.*activate_past_recording"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="tokens_to_remove must be 0 or negative.*got 3"):
        cache.crop(3)
    assert not cache.is_croppable
    assert not cache.is_compileable


def test_a_cache_and_a_cache_implementation(model, inputs):
    with pytest.raises(ValueError, match="cache_implementation"):
        model.generate(
            **inputs, past_key_values=LongFlowCache(model.config, budget=4), cache_implementation="static",
            max_new_tokens=2,
        )


def test_rejects_output_attentions(model, inputs):
    with pytest.raises(NotImplementedError, match="output_attentions"):
        model.generate(
            **inputs, past_key_values=LongFlowCache(model.config, budget=4), output_attentions=True,
            return_dict_in_generate=True, max_new_tokens=2,
        )


def test_stock_caches_are_unchanged(model, inputs):
    """Any other cache works with the attention "kvtwin", as it does with "sdpa"."""
    stock = tiny_models.model("llama")
    expected = stock.generate(**inputs, max_new_tokens=4)
    used = DynamicCache(config=model.config)
    assert torch.equal(model.generate(**inputs, past_key_values=used, max_new_tokens=4), expected)
