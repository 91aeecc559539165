"""PM-KVQ inside transformers: every layer, with its own budget, against a loop over float64 states."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers: python -m pip install 'kvtwin[hf]'")

from kvtwin.conformance.methods.support import tiny_models
from kvtwin.conformance.methods.support.hf_cases import check_against_loops
from kvtwin.conformance.methods.support.hf_loops import Loop
from kvtwin.conformance.methods.support.tiny_models import generate, prompts
from kvtwin.reference.baselines.pm_kvq import PMKVQState
from kvtwin.reference.hf.cache_adapter_quantized import QuantizedCache

pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.whole]

F64 = torch.float64
SMALL: dict[str, Any] = {"window": 4, "group": 4, "max_tokens": 24}
both_sides = pytest.mark.parametrize("side", ["reference", "optimized"])
kernels_are_slow = pytest.mark.parametrize(
    "side", ["reference", pytest.param("optimized", marks=pytest.mark.slow_on_cpu)]
)


def cache_of(twins: Any, side: str, model: Any, **options: Any) -> QuantizedCache:
    """A PMKVQCache of a side. If an implementation has only a state, our cache adapter wraps it."""
    own: type[QuantizedCache] = importlib.import_module(f"kvtwin.{side}.hf").PMKVQCache
    state = getattr(getattr(twins, side).baselines.pm_kvq, "PMKVQState", own.State)
    made = own if state is own.State else type("PMKVQCache", (own,), {"State": state})
    model.set_attn_implementation("kvtwin")
    return made(model.config, **{"bits": 5, **SMALL, **options})


class PMKVQLoop(Loop):
    """A row without padding, with one state per layer. stored: the type of minima."""

    def __init__(self, model: Any, used: Any, stored: torch.dtype) -> None:
        super().__init__(model)
        attention = model.config
        self.states = [
            PMKVQState(
                layer._config, batch=1, query_heads=attention.num_attention_heads,
                key_value_heads=attention.num_key_value_heads, head_dim=model.model.layers[0].self_attn.head_dim,
                dtype=F64, device="cpu",
            )
            for layer in used.layers
        ]
        for state in self.states:
            state._stored = stored

    def attend(self, number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        tokens = [tensor.transpose(0, 1)[None] for tensor in (query, key, value)]           # [1, H, Q, D]
        if self.seen == 0:
            return self.states[number].prefill(*tokens)[0].transpose(0, 1)
        return self.states[number].step(*(tensor[:, :, 0] for tensor in tokens))

    def held(self) -> list[tuple[list[int], int, int]]:
        return [held(state, 0) for state in self.states]


def held(state: Any, row: int) -> tuple[list[int], int, int]:
    """The tokens of a row, how many of them are quantized, and in how many bits."""
    tokens = [position for position in state.positions[row].tolist() if position >= 0]
    return tokens, int(state.tokens_quantized[row]), state.width


@kernels_are_slow
def test_generation_matches_the_decode_loop_with_a_budget_for_each_layer(side, twins, device):
    """17 tokens: of budgets of 16 and 5 bits, the second shrinks to 8 and 4 bits."""
    dtype = F64 if side == "reference" else torch.float32
    small = {"num_attention_heads": 2, "num_key_value_heads": 1} if device.type == "cpu" and side == "optimized" else {}
    model = tiny_models.model("llama", dtype, device, **small)
    layers = model.config.num_hidden_layers
    used = cache_of(twins, side, model, bits=[16, *[5] * (layers - 1)])
    assert layers > 1
    check_against_loops(
        lambda padding: (loop := PMKVQLoop(model, used, dtype), loop.held), model, used,
        prompts(9, [0, 0], device), 8, lambda layer, row: held(layer.state, row),
    )
    assert [held(layer.state, 0)[1:] for layer in used.layers] == [(12, 16), *[(12, 4)] * (layers - 1)]


@pytest.mark.kind("bad_input")
@both_sides
def test_a_list_of_budgets_needs_one_for_each_layer(side, twins, device):
    model = tiny_models.model("llama", torch.float32, device)
    layers = model.config.num_hidden_layers
    with pytest.raises(ValueError, match=f"^bits needs one number per layer: expected {layers}, got {layers + 1}"):
        cache_of(twins, side, model, bits=[4.0] * (layers + 1))
    with pytest.raises(ValueError, match="^bits = 1 is too small for max_tokens = 24"):
        cache_of(twins, side, model, bits=[16] * (layers - 1) + [1])


@pytest.mark.slow_on_cpu
@both_sides
def test_with_a_window_of_all_tokens_generation_is_that_of_the_model(side, twins, device):
    small = {"num_attention_heads": 2, "num_key_value_heads": 1} if device.type == "cpu" else {}
    model, inputs = tiny_models.model("llama", torch.float32, device, **small), prompts(5, [0, 2], device)
    full = generate(model, inputs, 6)
    used = cache_of(twins, side, model, window=24, bits=16)
    assert generate(model, inputs, 6, past_key_values=used).tolist() == full.tolist()
    assert held(used.layers[0].state, 0)[1:] == (0, 16)


@pytest.mark.kind("bad_input")
@both_sides
def test_a_budget_of_tokens_is_no_option(side, twins, device):
    with pytest.raises(TypeError, match="^budget is not an option here: the cache evicts no token"):
        cache_of(twins, side, tiny_models.model("llama", torch.float32, device), budget=8)
