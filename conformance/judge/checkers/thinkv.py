"""Checker of ThinKV: thoughts, eviction, paged cache and state, each in a module thinkv_*.py."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from ....reference.thinkv import quantize
from ...cases import tiny
from ...cases.format_cases import BytesCase, FormatsCase, QuantizedCase
from ...cases.paged_cases import FORMATS, PagedCase, config_of
from ...cases.thought_cases import SegmentCase, SparsityCase
from . import thinkv_eviction, thinkv_formats, thinkv_paging, thinkv_thoughts
from .thinkv_state import COMPILED, LONGEST, LOSSY, SMALL, VARIANTS, Adapter, bytes_of, configs, max_kept, poison

__all__ = [
    "CASES", "COMPILED", "DEFAULTS", "LONGEST", "LOSSY", "ON_THE_HOST", "SAME", "SCORED", "SMALL", "SUBJECTS",
    "VARIANTS", "Adapter", "arguments", "bytes_of", "configs", "max_kept", "parts", "poison", "replay",
]

CASES = (PagedCase, SegmentCase, SparsityCase, FormatsCase, QuantizedCase, BytesCase)
ON_THE_HOST = ("calibrate",)
SCORED = False
#: Section 5.1, "hyperparameters", has tau, group and block, and "R and E thoughts to 4-bits, T to 2"; section 3.3.2 a
#: "minimum retention of 4 tokens"; section 3.1.3 "averaging sparsity", where C.2 averages scores; the budget is k in
#: the tables.
DEFAULTS = {
    "budget": 1024, "tau": 128, "group": 16, "block": 8, "retention": (64, 32, 16, 8, 4),
    "formats": {"R": "nvfp4", "E": "nvfp4", "T": "ternary"}, "sparsity_of": "heads", "sparsity_threshold": 0.01,
    "edges": None, "max_tokens": 32768, "scale": None,
}
SAME = ("group", "sparsity_of")
SUBJECTS = (
    thinkv_thoughts.SPARSITY, thinkv_eviction.REPRESENTATIVES, thinkv_paging.ATTENTION, *thinkv_formats.SUBJECTS,
)


def replay(case: Any, module: Any) -> Iterator[str]:
    """See the package."""
    judge = {PagedCase: thinkv_paging, SegmentCase: thinkv_eviction, SparsityCase: thinkv_thoughts}
    yield from judge.get(type(case), thinkv_formats).replay(case, module)


def paged_cache(device: torch.device) -> Any:
    """A paged cache of the optimized side on which every operation has run."""
    from ....optimized import thinkv

    case = PagedCase(
        batch=tiny.BATCH, key_value_heads=tiny.KEY_VALUE_HEADS, head_dim=tiny.HEAD_DIM, device=str(device),
        tokens=tiny.SLOTS, evictions=1, seed=1,
    )
    cache = case.cache(thinkv)
    cache.dequantized()
    return cache


def parts(module: Any) -> dict[str, Any]:
    """See the package: the paged cache, with two tokens in the buffer of each row."""
    def sizes(device: torch.device) -> dict[str, Any]:
        return {
            "config": config_of(FORMATS[0], tokens=8), "batch": tiny.BATCH, "key_value_heads": tiny.KEY_VALUE_HEADS,
            "head_dim": tiny.HEAD_DIM, "dtype": torch.float32, "device": device,
        }

    def both(device: torch.device, *numbers: Any) -> torch.Tensor:
        return torch.tensor(numbers, device=device)

    def method(name: str, device: torch.device) -> tuple[Any, Any, dict[str, Any]]:
        cache = module.PagedCache(**sizes(device))
        _, key, value = tiny.token(device, seed=1)
        for position in range(2):
            cache.append(key, value, both(device, position, position))
        good = {
            "append": {"key": key, "value": value, "positions": both(device, 2, 2)},
            "flush": {"rows": both(device, True, True), "thought": both(device, 0, 2), "segment": both(device, 0, 1)},
            "evict": {"tokens": cache.occupied.clone()}, "release": {"rows": both(device, True, False)},
            "reorder": {"index": both(device, 1, 0)},
        }
        return getattr(cache, name), cache, good[name]

    names = ("append", "flush", "evict", "release", "reorder")
    methods = {f"PagedCache.{name}": partial(method, name) for name in names}
    return {"PagedCache": lambda device: (module.PagedCache, None, sizes(device)), **methods}


def arguments(device: torch.device) -> dict[str, Any]:
    """See the package."""
    x = torch.randn(
        tiny.BATCH, tiny.KEY_VALUE_HEADS, tiny.SLOTS, tiny.HEAD_DIM, generator=torch.Generator().manual_seed(7)
    ).to(device)
    q = quantize(x, "nvfp4", axis=-1, tensor_scale=True)
    def rows(*numbers: Any) -> torch.Tensor:
        return torch.tensor(numbers, device=device)

    # Three modes in each of four layers.
    sparsity = torch.cat([torch.linspace(at - 0.05, at + 0.05, 20) for at in (0.1, 0.5, 0.9)]).repeat(4, 1)
    slots = torch.arange(tiny.SLOTS, device=device).view(1, 2, -1).repeat(tiny.BATCH, 1, 1)
    return {
        "x": x, "fmt": "nvfp4", "axis": -2, "group": 4, "tensor_scale": True, "q": q, "dtype": torch.float32,
        "codes": q.codes, "bits": 4, "packed": q.codes, "unpack.size": 2 * tiny.HEAD_DIM, "cache": paged_cache(device),
        "threshold": 0.5, "sparsity_of": "mean", "sparsity": rows(0.1, 0.4, 0.8), "edges": (0.2, 0.5),
        "traces": [sparsity.to(device)],
        "anneal.size": rows([3, 2], [3, 3]), "level": rows([0, 1], [0, 0]), "thought": rows([0, 2], [1, 2]),
        "current": rows(1, 1), "trajectory_change": rows(True, False), "live": rows(5, 6), "retention": (2, 1),
        "key_segment": x[0], "slots": slots, "select_representatives.keep": 2,
        "segment_representatives.keep": rows([2, 3], [1, 3]),
    }
