"""Caches whose states take a prompt in one piece, inside transformers: every layer against a loop over its float64
state. A method is a row of a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: python -m pip install 'kvtwin[hf]'")

from kvtwin.conformance.methods.support import tiny_models
from kvtwin.conformance.methods.support.hf_cases import check_against_loops, fits, own_cache
from kvtwin.conformance.methods.support.hf_loops import F64, PromptLoop, sizes
from kvtwin.conformance.methods.support.tiny_models import cache_class, generate, prompts

pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.whole]

both_sides = pytest.mark.parametrize("side", ["reference", "optimized"])


@dataclass(frozen=True)
class Row:
    """The cache of a method, in two generations: one that loses something, and one that loses nothing."""

    options: dict[str, Any]                 # of both
    lossy: dict[str, Any]                   # further options of the first,
    exact: dict[str, Any]                   # and of the second
    prompt: tuple[int, list[int], int]      # of the first: its length, the padding of its rows, and the new tokens
    fields: tuple[str, ...]                 # what states hold beside tokens
    shown: Callable[[list[Any]], Any]       # of all states: what shows that something is lost, or nothing,
    after: tuple[Any, Any]                  # and its values after the two generations
    layers: tuple[dict[str, Any], dict[str, Any]] = ({}, {})   # how the configs of the layers differ in the first


ROWS = {
    "kivi": Row(
        {"key_bits": 4, "value_bits": 2, "group": 4, "max_tokens": 40}, {"residual": 4}, {"residual": 40},
        (9, [0, 2], 8), ("keys_quantized", "values_quantized"),
        lambda states: [(int(state.keys_quantized[0]), int(state.values_quantized[0])) for state in states],
        ([(16, 12)] * 2, [(0, 0)] * 2),
    ),
    # 17 tokens: of budgets of 16 and 5 bits, the second shrinks to 8 and 4 bits.
    "pm_kvq": Row(
        {"group": 4, "max_tokens": 24}, {"window": 4, "bits": [16, 5]}, {"window": 24, "bits": 16},
        (9, [0, 0], 8), ("tokens_quantized", "width"),
        lambda states: [(int(state.tokens_quantized[0]), state.width) for state in states],
        ([(12, 16), (12, 4)], [(0, 16)] * 2), ({"bits": 16}, {"bits": 5}),
    ),
    "quest": Row(
        {"page_size": 2, "max_tokens": 40}, {"budget": 4, "skip_layers": 1}, {"budget": 40}, (9, [0, 2], 5),
        ("selected",), lambda states: [state.selected.shape[2] for state in states], ([20, 2], [20, 20]),
        ({"budget": 40}, {}),
    ),
    "cake": Row(
        {"window": 2, "kernel_size": 3}, {"budget": 5}, {"budget": 20}, (13, [0, 2], 4), ("budgets",),
        lambda states: sum(state.budgets for state in states).tolist(), ([6, 6], [36, 36]),
    ),
}
every_row = pytest.mark.parametrize("method", ROWS)


def cache_of(twins: Any, side: str, method: str, model: Any, **options: Any) -> Any:
    model.set_attn_implementation("kvtwin")
    return cache_class(twins, side, method)(model.config, **ROWS[method].options | options)


def states(cache: Any) -> list[Any]:
    return [layer.state for layer in cache.layers if not layer.is_sliding]


def contents(method: str, state: Any, row: int, padding: int = 0) -> list[Any]:
    """The tokens of a row, by KV head if heads differ, and the row's fields."""
    heads = torch.atleast_2d(state.positions[row]).tolist()
    fields = (torch.as_tensor(getattr(state, name)) for name in ROWS[method].fields)
    return [
        [[token + padding for token in head if token >= 0] for head in heads],
        *((field[row] if field.dim() else field).tolist() for field in fields),
    ]


def loop_of(method: str, model: Any, config: Any, stored: torch.dtype) -> PromptLoop:
    """A row without its padding. stored: the type of scales and minima."""
    own, made = own_cache("reference", method), []
    shared: dict[str, Any] = {}
    if hasattr(own, "Cascade"):
        shared["cascade"] = own.Cascade(config, layers=2, batch=1, device="cpu")
    for number, options in enumerate(ROWS[method].layers):
        place = shared | ({"layer": number} if shared else {})
        made.append(own.State(replace(config, **options), **sizes(model), **place))
        if hasattr(made[-1], "_stored"):
            made[-1]._stored = stored
    return PromptLoop(model, made)


@both_sides
@every_row
def test_generation_matches_the_decode_loop(method, side, twins, device):
    row, dtype = ROWS[method], F64 if side == "reference" else torch.float32
    small = {"num_attention_heads": 2, "num_key_value_heads": 1} if device.type == "cpu" and side == "optimized" else {}
    model = tiny_models.model("llama", dtype, device, **small)
    used = cache_of(twins, side, method, model, **row.lossy)

    def make(padding: int) -> tuple[PromptLoop, Callable[[], list[Any]]]:
        loop = loop_of(method, model, used.config, dtype)
        return loop, lambda: [contents(method, state, 0, padding) for state in loop.states]

    length, padding, new = row.prompt
    check_against_loops(
        make, model, used, prompts(length, padding, device), new,
        lambda layer, at: contents(method, layer.state, at),
    )
    assert row.shown(states(used)) == row.after[0]


WINDOWS = {
    "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}


@both_sides
@every_row
@pytest.mark.parametrize(("family", "options"), [("llama", {}), ("qwen2", WINDOWS)], ids=["llama", "windows"])
def test_with_room_for_all_tokens_generation_is_that_of_the_model(family, options, method, side, twins, device):
    """Layers with sliding windows, if there are any, keep transformers' cache."""
    small = {"num_attention_heads": 2, "num_key_value_heads": 1} if device.type == "cpu" else {}
    model, inputs = tiny_models.model(family, torch.float32, device, **small, **options), prompts(5, [0, 2], device)
    expected = generate(model, inputs, 4)
    used = cache_of(twins, side, method, model, **ROWS[method].exact)
    with fits():
        assert torch.equal(generate(model, inputs, 4, past_key_values=used), expected)
    assert len(states(used)) == 2
    assert ROWS[method].shown(states(used)) == ROWS[method].after[1]


NO_BUDGET = "{}Cache evicts no token, so budget=8 has no effect: its bits say how much it compresses"
WRONG = {
    "kivi-budget": ({"budget": 8}, UserWarning, NO_BUDGET.format("KIVI")),
    "pm_kvq-budget": ({"bits": 5, "budget": 8}, UserWarning, NO_BUDGET.format("PMKVQ")),
    "pm_kvq-bits-of-three-layers": (
        {"bits": [4.0] * 3}, ValueError, "bits needs one number per layer: expected 2, got 3",
    ),
    "pm_kvq-few-bits": ({"bits": [16, 1]}, ValueError, "bits = 1 is too small for max_tokens = 24"),
    "quest-negative-layers": ({"budget": 4, "skip_layers": -1}, ValueError, "skip_layers must be at least 0, got -1"),
    "quest-float-layers": ({"budget": 4, "skip_layers": 1.0}, TypeError, "skip_layers must be an int, got float"),
}


@pytest.mark.kind("bad_input")
@both_sides
@pytest.mark.parametrize(
    ("method", "options", "error", "says"), [(name.partition("-")[0], *row) for name, row in WRONG.items()], ids=WRONG
)
def test_wrong_options(method, options, error, says, side):
    with pytest.raises(error, match=f"^{says}"):
        own_cache(side, method)(tiny_models.model("llama").config, **ROWS[method].options | options)


@both_sides
def test_two_layers_of_quest_attend_to_all_tokens_unless_told_otherwise(side):
    assert own_cache(side, "quest")(tiny_models.model("llama").config, budget=4).skip_layers == 2
