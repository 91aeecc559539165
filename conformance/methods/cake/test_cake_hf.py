"""CAKE inside transformers: the budgets and tokens of every layer, against a loop over its float64 states."""

from __future__ import annotations

import copy
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
from kvtwin.reference.baselines.cake import CAKECascade, CAKEConfig, CAKEState
from kvtwin.reference.hf.cache_adapter_cascading import CascadingCache

pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.whole]

F64 = torch.float64
SMALL: dict[str, Any] = {"budget": 5, "window": 2, "kernel_size": 3}
both_sides = pytest.mark.parametrize("side", ["reference", "optimized"])


def cache_of(twins: Any, side: str, model: Any, **options: Any) -> CascadingCache:
    """A CAKECache of a side. If an implementation has only a state, our cache adapter wraps it."""
    own: type[CascadingCache] = importlib.import_module(f"kvtwin.{side}.hf").CAKECache
    cake = getattr(twins, side).baselines.cake
    state, cascade = getattr(cake, "CAKEState", own.State), getattr(cake, "CAKECascade", own.Cascade)
    made = own if state is own.State else type("CAKECache", (own,), {"State": state, "Cascade": cascade})
    model.set_attn_implementation("kvtwin")
    return made(model.config, **{**SMALL, **options})


class CAKELoop(Loop):
    """A row without its padding, with one state per layer and one cascade."""

    def __init__(self, model: Any, config: CAKEConfig, padding: int) -> None:
        super().__init__(model)
        self.padding, sizes, count = padding, model.config, len(model.model.layers)
        cascade = CAKECascade(config, layers=count, batch=1, device="cpu")
        self.states = [
            CAKEState(
                config, batch=1, query_heads=sizes.num_attention_heads, key_value_heads=sizes.num_key_value_heads,
                head_dim=layer.self_attn.head_dim, dtype=F64, device="cpu", cascade=cascade, layer=number,
            )
            for number, layer in enumerate(model.model.layers)
        ]

    def attend(self, number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        tokens = [tensor.transpose(0, 1)[None] for tensor in (query, key, value)]           # [1, H, Q, D]
        if self.seen == 0:
            return self.states[number].prefill(*tokens)[0].transpose(0, 1)
        return self.states[number].step(*(tensor[:, :, 0] for tensor in tokens))

    def held(self) -> list[tuple[int, list[list[int]]]]:
        return [held(state, 0, self.padding) for state in self.states]


def held(state: Any, row: int, padding: int = 0) -> tuple[int, list[list[int]]]:
    """The budget of a row, and the tokens of each KV head."""
    tokens = [sorted(one + padding for one in head if one >= 0) for head in state.positions[row].tolist()]
    return int(state.budgets[row]), tokens


@both_sides
def test_generation_matches_the_decode_loop(side, twins, device):
    """Rows with padding, whose layers share budgets of their own."""
    dtype = F64 if side == "reference" else torch.float32
    small = {"num_attention_heads": 2, "num_key_value_heads": 1} if device.type == "cpu" and side == "optimized" else {}
    model = tiny_models.model("llama", dtype, device, **small)
    used = cache_of(twins, side, model)
    check_against_loops(
        lambda padding: (loop := CAKELoop(model, used.config, padding), loop.held), model, used,
        prompts(13, [0, 2], device), 4, lambda layer, row: held(layer.state, row),
    )
    granted = used.cascade.budgets
    assert granted.shape == (2, 2) and granted.sum(1).tolist() == [6, 6]


@pytest.mark.slow_on_cpu
@both_sides
def test_a_budget_of_all_tokens_is_the_model(side, twins, device):
    small = {"num_attention_heads": 2, "num_key_value_heads": 1} if device.type == "cpu" else {}
    model, inputs = tiny_models.model("llama", torch.float32, device, **small), prompts(5, [0, 2], device)
    full = generate(model, inputs, 4)
    assert generate(model, inputs, 4, past_key_values=cache_of(twins, side, model, budget=20)).tolist() == full.tolist()


@both_sides
def test_a_cache_is_reset_reordered_and_copied_with_its_cascade(side, twins, device):
    model = tiny_models.model("llama", torch.float32, device, num_attention_heads=2, num_key_value_heads=1)
    used = cache_of(twins, side, model)
    assert used.cascade is None
    inputs = prompts(12, [0, 0], device)["input_ids"]

    @torch.no_grad()
    def feed() -> None:
        model(inputs, past_key_values=used)

    found = []
    for _ in range(2):
        feed()
        found.append(used.cascade.budgets.tolist())
        assert {id(layer.state.cascade) for layer in used.layers} == {id(used.cascade)}
        used.reset()
        assert used.cascade.budgets.tolist() == [[3, 3], [3, 3]]
    assert found[0] == found[1] and found[0][0] != found[0][1]
    feed()
    other = copy.deepcopy(used)
    assert other.cascade is not used.cascade and other.layers[1].state.cascade is other.cascade
    used.reorder_cache(torch.tensor([1, 0], device=device))
    assert used.cascade.budgets.tolist() == found[0][::-1] and other.cascade.budgets.tolist() == found[0]
    assert used.layers[0].state.budgets.tolist() == [row[0] for row in found[0][::-1]]


@torch.no_grad()
def feed(model: Any, inputs: Tensor, used: CascadingCache) -> None:
    """Pass a prompt [B, T] to the model. The cascade must fit it."""
    try:
        model(inputs, past_key_values=used)
    except ValueError as error:
        pytest.fail(str(error))


@both_sides
def test_a_cache_takes_a_batch_of_another_size_after_a_reset(side, twins, device):
    """Its layers then share a new cascade."""
    model = tiny_models.model("llama", torch.float32, device, num_attention_heads=2, num_key_value_heads=1)
    used, inputs = cache_of(twins, side, model), prompts(12, [0, 0], device)["input_ids"]
    for rows in (2, 1):
        feed(model, inputs[:rows], used)
        assert used.cascade.budgets.shape == (rows, 2)
        assert {id(layer.state.cascade) for layer in used.layers} == {id(used.cascade)}
        used.reset()


@both_sides
def test_layers_with_sliding_windows_have_no_part_in_the_cascade(side, twins, device):
    """Of three layers, the first keeps transformers' cache. The others are layers 0 and 1 of the cascade."""
    model = tiny_models.model(
        "qwen2", torch.float32, device, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=3,
        use_sliding_window=True, sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
    )
    used = cache_of(twins, side, model)
    feed(model, prompts(12, [0, 0], device)["input_ids"], used)
    evicting = [layer.state for layer in used.layers[1:]]
    assert used.cascade.layers == 2 and [state.layer for state in evicting] == [0, 1]
    assert used.cascade.budgets.sum(1).tolist() == [6, 6]
