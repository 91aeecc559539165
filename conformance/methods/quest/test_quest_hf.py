"""Quest inside transformers: the pages of every layer, against a loop over its float64 state."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers: python -m pip install 'kvtwin[hf]'")

from kvtwin.conformance.methods.support import tiny_models
from kvtwin.conformance.methods.support.hf_cases import check_against_loops
from kvtwin.conformance.methods.support.hf_loops import Loop
from kvtwin.conformance.methods.support.tiny_models import generate, prompts
from kvtwin.reference.baselines.quest import QuestConfig, QuestState
from kvtwin.reference.hf.cache_adapter_selecting import SelectingCache

pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.whole]

F64 = torch.float64
SMALL: dict[str, Any] = {"budget": 4, "page_size": 2, "max_tokens": 40, "skip_layers": 1}
both_sides = pytest.mark.parametrize("side", ["reference", "optimized"])


def cache_of(twins: Any, side: str, model: Any, **options: Any) -> SelectingCache:
    """A QuestCache of a side. If an implementation has only a state, our cache adapter wraps it."""
    own: type[SelectingCache] = importlib.import_module(f"kvtwin.{side}.hf").QuestCache
    state = getattr(getattr(twins, side).baselines.quest, "QuestState", own.State)
    made = own if state is own.State else type("QuestCache", (own,), {"State": state})
    model.set_attn_implementation("kvtwin")
    return made(model.config, **{**SMALL, **options})


class QuestLoop(Loop):
    """A row without its padding, with one state per layer, the first of which attends to all tokens."""

    def __init__(self, model: Any, config: QuestConfig, padding: int) -> None:
        super().__init__(model)
        self.padding, sizes = padding, model.config
        self.states = [
            QuestState(
                replace(config, budget=config.max_tokens) if number < SMALL["skip_layers"] else config,
                batch=1, query_heads=sizes.num_attention_heads, key_value_heads=sizes.num_key_value_heads,
                head_dim=layer.self_attn.head_dim, dtype=F64, device="cpu",
            )
            for number, layer in enumerate(model.model.layers)
        ]

    def attend(self, number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        tokens = [tensor.transpose(0, 1)[None] for tensor in (query, key, value)]           # [1, H, Q, D]
        if self.seen == 0:
            return self.states[number].prefill(*tokens)[0].transpose(0, 1)
        return self.states[number].step(*(tensor[:, :, 0] for tensor in tokens))

    def held(self) -> list[tuple[list[int], list[list[int]]]]:
        return [held(state, 0, self.padding) for state in self.states]


def held(state: Any, row: int, padding: int = 0) -> tuple[list[int], list[list[int]]]:
    """The tokens of a row, and the pages of its last step."""
    tokens = [position + padding for position in state.positions[row].tolist() if position >= 0]
    return tokens, state.selected[row].tolist()


@both_sides
def test_generation_matches_the_decode_loop(side, twins, device):
    """Rows with padding."""
    dtype = F64 if side == "reference" else torch.float32
    small = {"num_attention_heads": 2, "num_key_value_heads": 1} if device.type == "cpu" and side == "optimized" else {}
    model = tiny_models.model("llama", dtype, device, **small)
    used = cache_of(twins, side, model)
    check_against_loops(
        lambda padding: (loop := QuestLoop(model, used.config, padding), loop.held), model, used,
        prompts(9, [0, 2], device), 5, lambda layer, row: held(layer.state, row),
    )
    assert [layer.state.selected.shape[2] for layer in used.layers] == [20, 2]


@pytest.mark.slow_on_cpu
@both_sides
def test_if_all_layers_are_skipped_generation_is_that_of_the_model(side, twins, device):
    """By default, two layers are."""
    small = {"num_attention_heads": 2, "num_key_value_heads": 1} if device.type == "cpu" else {}
    model, inputs = tiny_models.model("llama", torch.float32, device, **small), prompts(5, [0, 2], device)
    full = generate(model, inputs, 4)
    used = cache_of(twins, side, model, skip_layers=2)
    assert generate(model, inputs, 4, past_key_values=used).tolist() == full.tolist()
    assert cache_of(twins, side, model).skip_layers == 1
    assert importlib.import_module(f"kvtwin.{side}.hf").QuestCache(model.config, budget=4).skip_layers == 2


@pytest.mark.kind("bad_input")
@both_sides
@pytest.mark.parametrize(("value", "error", "says"), [
    (-1, ValueError, "skip_layers must be at least 0, got -1"),
    (1.0, TypeError, "skip_layers must be an int, got float"),
], ids=str)
def test_wrong_numbers_of_layers(value, error, says, side, twins, device):
    with pytest.raises(error, match=f"^{says}"):
        cache_of(twins, side, tiny_models.model("llama", torch.float32, device), skip_layers=value)
