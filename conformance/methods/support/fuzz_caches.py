"""Targets of `fuzz` in the caches for transformers: constructors, and changes of rows. Needs transformers."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from functools import cache, partial
from typing import Any

import torch

from ...cases.fuzz import Made, Target
from ...discovery import Pair
from ...judge import checkers
from . import tiny_models

#: Fields of configs that are no options of a cache: the model determines them, or an argument of another name.
NO_OPTIONS = ("scale", "budget", "k", "bands", "hidden_size", "inv_freq", "edges")
OPTIONS: dict[str, dict[str, Any]] = {
    "epikv": {"layers": ((0,), (1,))}, "synckv": {"max_tokens": 40}, "thinkv": {"max_tokens": 40},
    "kivi": {"group": 4, "value_bits": 4, "residual": 8, "max_tokens": 40},
    "pm_kvq": {"bits": 5, "window": 4, "group": 8, "max_tokens": 40},
    "quest": {"max_tokens": 40}, "cake": {"window": 4},
}
ROWS = 2
#: Good arguments of the methods that change rows. A tensor is one of row numbers.
CHANGES: dict[str, dict[str, Any]] = {
    "reorder_cache": {"beam_idx": [1, 0]}, "batch_repeat_interleave": {"repeats": 2},
    "batch_select_indices": {"indices": [1, 0, 1]},
}


@cache
def _model(device: torch.device) -> Any:
    model = tiny_models.model("llama", device=device)
    model.set_attn_implementation("kvtwin")
    return model


def targets(pair: Pair, side: str) -> list[Target]:
    """The constructor of a method's cache, and the changes of rows of a cache with and one without tokens."""
    assert pair.state is not None
    name = f"{pair.state.__name__.removesuffix('State')}Cache"
    made = getattr(importlib.import_module(f"kvtwin.{side}.hf"), name)
    return [
        Target(name, partial(_constructor, pair, made)),
        *(
            Target(f"{name}.{change}", partial(_change, pair, made, used, change))
            for change in CHANGES for used in (True, False)
        ),
    ]


def _good(pair: Pair, made: Any, device: torch.device) -> dict[str, Any]:
    """Good arguments of a cache."""
    first = next(name for name in inspect.signature(made).parameters if name in ("model", "config"))
    model = _model(device)
    return {
        first: model if first == "model" else model.config, **checkers.with_budget(pair.name, 32),
        **checkers.required(pair.name), **OPTIONS.get(pair.name, {}),
    }


def _constructor(pair: Pair, made: Any, device: torch.device) -> Made:
    good = _good(pair, made, device)
    config = made(**good).config
    own = {
        parameter.name: parameter.default for parameter in inspect.signature(made).parameters.values()
        if parameter.default is not parameter.empty
    }
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    options = {name: value for name, value in fields.items() if name not in NO_OPTIONS}
    mask = torch.ones(ROWS, 3, dtype=torch.bool, device=device)
    return made, None, {**own, **options, "attention_mask": mask, **good}


def _change(pair: Pair, made: Any, used: bool, change: str, device: torch.device) -> Made:
    found = made(**_good(pair, made, device))
    if used:
        with torch.no_grad():
            _model(device)(torch.full((ROWS, 3), 5, device=device), past_key_values=found)
    good = CHANGES[change].items()
    return getattr(found, change), found, {
        name: torch.tensor(value, device=device) if isinstance(value, list) else value for name, value in good
    }
