"""KIVI inside transformers: the tokens and the quantized part of every layer, against a loop over its float64 state."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers: python -m pip install 'kvtwin[hf]'")

from kvtwin.conformance.methods.support import tiny_models
from kvtwin.conformance.methods.support.hf_cases import Loop, check_against_loops
from kvtwin.conformance.methods.support.tiny_models import generate, prompts
from kvtwin.reference.baselines.kivi import KIVIConfig, KIVIState
from kvtwin.reference.hf.cache_adapter_quantized import QuantizedCache

pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.whole]

F64 = torch.float64
SMALL: dict[str, Any] = {"key_bits": 4, "value_bits": 2, "group": 4, "residual": 4, "max_tokens": 40}
both_sides = pytest.mark.parametrize("side", ["reference", "optimized"])


def cache_of(twins: Any, side: str, model: Any, **options: Any) -> QuantizedCache:
    """A KIVICache of a side. If an implementation has only a state, our cache adapter wraps it."""
    own: type[QuantizedCache] = importlib.import_module(f"kvtwin.{side}.hf").KIVICache
    state = getattr(getattr(twins, side).baselines.kivi, "KIVIState", own.State)
    made = own if state is own.State else type("KIVICache", (own,), {"State": state})
    model.set_attn_implementation("kvtwin")
    return made(model.config, **{**SMALL, **options})


class KIVILoop(Loop):
    """A row without its padding, with one state per layer. stored: the type of scales and minima."""

    def __init__(self, model: Any, config: KIVIConfig, padding: int, stored: torch.dtype) -> None:
        super().__init__(model)
        self.padding, sizes = padding, model.config
        self.states = [
            KIVIState(
                config, batch=1, query_heads=sizes.num_attention_heads, key_value_heads=sizes.num_key_value_heads,
                head_dim=model.model.layers[0].self_attn.head_dim, dtype=F64, device="cpu",
            )
            for _ in model.model.layers
        ]
        for state in self.states:
            state._stored = stored

    def attend(self, number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        tokens = [tensor.transpose(0, 1)[None] for tensor in (query, key, value)]           # [1, H, Q, D]
        if self.seen == 0:
            return self.states[number].prefill(*tokens)[0].transpose(0, 1)
        return self.states[number].step(*(tensor[:, :, 0] for tensor in tokens))

    def held(self) -> list[tuple[list[int], int, int]]:
        return [held(state, 0, self.padding) for state in self.states]


def held(state: Any, row: int, padding: int = 0) -> tuple[list[int], int, int]:
    """The tokens of a row, and how many of its keys and values are quantized."""
    tokens = [position + padding for position in state.positions[row].tolist() if position >= 0]
    return tokens, int(state.keys_quantized[row]), int(state.values_quantized[row])


@both_sides
def test_generation_matches_the_decode_loop(side, twins, device):
    """Rows with padding, and several rounds of quantization."""
    dtype = F64 if side == "reference" else torch.float32
    small = {"num_attention_heads": 2, "num_key_value_heads": 1} if device.type == "cpu" and side == "optimized" else {}
    model = tiny_models.model("llama", dtype, device, **small)
    used = cache_of(twins, side, model)
    check_against_loops(
        lambda padding: (loop := KIVILoop(model, used.config, padding, dtype), loop.held), model, used,
        prompts(9, [0, 2], device), 8, lambda layer, row: held(layer.state, row),
    )
    assert held(used.layers[0].state, 0)[1:] == (16, 12)


@both_sides
def test_with_a_residual_of_all_tokens_generation_is_that_of_the_model(side, twins, device):
    small = {"num_attention_heads": 2, "num_key_value_heads": 1} if device.type == "cpu" else {}
    model, inputs = tiny_models.model("llama", torch.float32, device, **small), prompts(5, [0, 2], device)
    full = generate(model, inputs, 6)
    used = cache_of(twins, side, model, residual=40)
    assert generate(model, inputs, 6, past_key_values=used).tolist() == full.tolist()
    assert held(used.layers[0].state, 0)[1:] == (0, 0)


@pytest.mark.kind("bad_input")
@both_sides
def test_a_budget_is_no_option(side, twins, device):
    with pytest.raises(TypeError, match="^budget is not an option here: the cache evicts no token"):
        cache_of(twins, side, tiny_models.model("llama", torch.float32, device), budget=8)
