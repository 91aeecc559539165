"""What the tests of `captured` share: caches, models, and passes of one token. Needs transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....optimized import hf
from ....reference.hf.cache_adapter import ARGUMENT
from ...judge.compare import assert_same
from . import tiny_models

Make = Callable[[Any], Any]
MAKE: dict[str, Make] = {
    "H2O": lambda model: hf.H2OCache(model.config, budget=6, block_size=4),
    "EpiKV": lambda model: hf.EpiKVCache(model, budget=12, layers=((0,), (1,)), window=4, recent=2),
    "CAKE": lambda model: hf.CAKECache(model.config, budget=6, window=4),
}
#: H2O: a state that takes blocks. EpiKV: layers that share a scorer, and hooks. CAKE: buffers of a prompt's own size.
h2o = MAKE["H2O"]
for _name in MAKE:
    getattr(hf, f"{_name}Cache")                # imports its module: see `stand_in.install`


def made(family: str, device: torch.device, **options: Any) -> Any:
    found = tiny_models.model(family, device=device, **options)
    found.set_attn_implementation("kvtwin")
    return found


def feed(model: Any, cache: Any, ids: list[list[int]], **options: Any) -> Tensor:
    """The logits of one forward pass."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor(ids, device=model.device), **{ARGUMENT: cache}, **options).logits
    return logits


def decode(model: Any, cache: Any, new: int) -> list[Tensor]:
    """The logits of a prompt of three tokens and of so many steps, whose tokens depend on the logits."""
    logits = [feed(model, cache, [[3, 1, 4]])]
    for _ in range(new):
        logits.append(feed(model, cache, [[int(logits[-1][0, -1].argmax())]]))
    return logits


def assert_logits(given: list[Tensor], expected: list[Tensor]) -> None:
    for step, (mine, other) in enumerate(zip(given, expected, strict=True)):
        assert_same(mine, other, what=f"logits of pass {step}")
