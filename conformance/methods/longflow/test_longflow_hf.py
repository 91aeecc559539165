"""LongFlow inside transformers with a budget for all tokens: it generates the same tokens as the stock model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: python -m pip install 'kvtwin[hf]'")

from transformers import DynamicCache

from kvtwin.conformance.methods.support import tiny_models
from kvtwin.conformance.methods.support.tiny_models import FAMILIES, cache_class, generate, prompts

pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.whole]

F64 = torch.float64


@pytest.fixture(params=["reference", "optimized"])
def side(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def cache(twins: Any, side: str) -> Any:
    return cache_class(twins, side)


@pytest.fixture
def steps(side: str, device: torch.device) -> int:
    """The number of tokens to generate. Each takes a tenth of a second in the interpreter."""
    return 4 if side == "optimized" and device.type == "cpu" else 16


@pytest.mark.parametrize("family", FAMILIES)
def test_full_budget_matches_the_stock_model(cache, side, steps, device, family):
    inputs = prompts(7, [0, 4], device)
    for dtype in (torch.float32, F64) if side == "reference" else (torch.float32,):
        model = tiny_models.model(family, dtype, device)
        expected = generate(model, inputs, 16, past_key_values=DynamicCache(config=model.config))
        assert len(set(expected[0].tolist())) > 5, "a generation of few tokens proves little"
        expected = expected[:, :steps]
        if dtype == torch.float32:                          # transformers' eager attention gives NaN in float64 here
            model.set_attn_implementation("eager")
            assert torch.equal(generate(model, inputs, steps), expected)
        model.set_attn_implementation("kvtwin")
        budget = 7 + steps
        assert torch.equal(generate(model, inputs, steps, past_key_values=cache(model.config, budget=budget)), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_full_budget_without_padding(twins, device, family):
    for dtype in (torch.float32, F64):
        model, inputs = tiny_models.model(family, dtype, device), prompts(9, [0, 0], device)
        expected = generate(model, inputs, 16)
        model.set_attn_implementation("eager")
        assert torch.equal(generate(model, inputs, 16), expected)
        model.set_attn_implementation("kvtwin")
        for budget in (25, 40):
            used = cache_class(twins, "reference")(model.config, budget=budget)
            assert torch.equal(generate(model, inputs, 16, past_key_values=used), expected)


def test_full_budget_with_the_scaling_of_the_model(twins, device):
    model, inputs = tiny_models.model("granite", device=device, attention_multiplier=0.6), prompts(9, [0, 4], device)
    expected = generate(model, inputs, 12)
    model.set_attn_implementation("kvtwin")
    used = cache_class(twins, "reference")(model.config, budget=21)
    assert torch.equal(generate(model, inputs, 12, past_key_values=used), expected)
    assert used.layers[0].state.scale == 0.6
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.5
    with pytest.raises(ValueError, match=r"scaling 0\.6, now 0\.5"), torch.no_grad():
        model(torch.tensor([[1], [2]], device=device), past_key_values=used)


def test_full_budget_after_a_prompt_of_one_token(cache, device):
    model, inputs = tiny_models.model("llama", device=device), prompts(1, [0, 0], device)
    expected = generate(model, inputs, 4)
    model.set_attn_implementation("kvtwin")
    assert torch.equal(generate(model, inputs, 4, past_key_values=cache(model.config, budget=5)), expected)


@pytest.mark.parametrize("chunk", [3, 7, 10])
def test_full_budget_in_chunks(twins, device, chunk):
    model, inputs = tiny_models.model("qwen3", device=device), prompts(9, [0, 3], device)
    expected = generate(model, inputs, 10)
    model.set_attn_implementation("kvtwin")
    used = cache_class(twins, "reference")(model.config, budget=19)
    assert torch.equal(generate(model, inputs, 10, past_key_values=used, prefill_chunk_size=chunk), expected)


def test_full_budget_from_embeddings(twins, device):
    model, inputs = tiny_models.model("qwen2", device=device), prompts(9, [0, 3], device)
    expected = generate(model, inputs, 10)
    model.set_attn_implementation("kvtwin")
    used = cache_class(twins, "reference")(model.config, budget=19)
    embedded = model.get_input_embeddings()(inputs["input_ids"]).detach()
    output = model.generate(
        inputs_embeds=embedded, attention_mask=inputs["attention_mask"], past_key_values=used, max_new_tokens=10,
        do_sample=False,
    )
    assert torch.equal(output, expected)


def test_full_budget_with_beams(twins, device):
    model, inputs = tiny_models.model("llama", device=device), prompts(9, [0, 4], device)
    expected = generate(model, inputs, 12, num_beams=3)
    model.set_attn_implementation("kvtwin")
    used = cache_class(twins, "reference")(
        model.config, budget=21, attention_mask=inputs["attention_mask"]              # [2, T] for six rows
    )
    assert torch.equal(generate(model, inputs, 12, num_beams=3, past_key_values=used), expected)


def test_full_budget_over_two_turns(twins, device):
    model, first = tiny_models.model("llama", device=device), prompts(9, [0, 4], device)
    results = []
    for name in ("sdpa", "kvtwin"):
        model.set_attn_implementation(name)
        used = DynamicCache(config=model.config) if name == "sdpa" else cache_class(twins, "reference")(
            model.config, budget=40
        )
        answer = generate(model, first, 7, past_key_values=used)
        second = prompts(5, [0, 0], device)["input_ids"]
        ids = torch.cat([first["input_ids"], answer, second], 1)
        mask = torch.cat([first["attention_mask"], torch.ones_like(ids[:, 9:])], 1)
        turn = {"input_ids": ids, "attention_mask": mask}
        before = copy.deepcopy(used)                                                 # a prefix for several turns
        results.append(generate(model, turn, 7, past_key_values=used))
        assert torch.equal(generate(model, turn, 7, past_key_values=before), results[-1])
    assert torch.equal(*results)


def test_layers_with_a_sliding_window_stay_stock(twins, device):
    model = tiny_models.model(
        "qwen2", device=device, use_sliding_window=True, sliding_window=5, max_window_layers=1, num_hidden_layers=3
    )
    inputs = prompts(9, [0, 4], device)
    expected = generate(model, inputs, 12)
    model.set_attn_implementation("kvtwin")
    used = cache_class(twins, "reference")(model.config, budget=21)
    assert [layer.is_sliding for layer in used.layers] == [False, True, True]
    assert torch.equal(generate(model, inputs, 12, past_key_values=used), expected)
    # Another cache, or none, under our attention: transformers' own.
    assert torch.equal(generate(model, inputs, 12), expected)
    assert torch.equal(generate(model, inputs, 12, use_cache=False), expected)


def test_padding_may_be_given_to_the_cache_instead_of_the_model(twins, device):
    """A loop over forward() that passes positions but no mask. The padding is given to the constructor."""
    model, inputs = tiny_models.model("llama", device=device), prompts(6, [0, 4], device)
    model.set_attn_implementation("kvtwin")
    cache = cache_class(twins, "reference")
    mask, ids = inputs["attention_mask"], inputs["input_ids"]
    places = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        told = cache(model.config, budget=4, attention_mask=mask)
        model(ids, position_ids=places, past_key_values=told)
        asked = cache(model.config, budget=4)
        model(ids, position_ids=places, attention_mask=mask, past_key_values=asked)
    for one, other in zip(told.layers, asked.layers, strict=True):
        assert one.state.positions.tolist() == other.state.positions.tolist()
        assert set(one.state.positions[1].tolist()) == {4, 5, -1}
