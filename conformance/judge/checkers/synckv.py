"""Checker of SyncKV: its functions (synckv_sets.py, synckv_heads.py) and its state (synckv_state.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...cases import tiny
from ...cases.synckv_cases import SetsCase, SimilarityCase, WeightsCase
from . import synckv_heads, synckv_sets
from .synckv_sets import assert_anticipation_right, assert_initial_right, weight_interval
from .synckv_state import BUDGET, COMPILED, EVICTS, GROUPINGS, SMALL, VARIANTS, Adapter, bytes_of, configs, max_kept

__all__ = [
    "BUDGET", "CASES", "COMPILED", "DEFAULTS", "EVICTS", "GROUPINGS", "ON_THE_HOST", "SAME", "SMALL", "SUBJECTS",
    "VARIANTS",
    "Adapter", "arguments", "assert_anticipation_right", "assert_initial_right", "bytes_of", "configs", "max_kept",
    "parts", "replay", "weight_interval",
]

CASES = (SetsCase, WeightsCase, SimilarityCase)
SUBJECTS = (*synckv_sets.SUBJECTS, *synckv_heads.subjects())
ON_THE_HOST = ("cluster_heads", "split_budget")
#: Section 5.1: "N_r to 2", "m was set at 5", "rho 0.5".
DEFAULTS = {
    "clusters": 2, "stride": 5, "rho": 0.5, "exclude_static": True, "union_clusters": False, "phase": 0,
    "max_tokens": 32768, "offload": False, "scale": None,
}
SAME = ("exclude_static",)


def replay(case: Any, module: Any) -> Iterator[str]:
    """See the package."""
    yield from (synckv_sets if isinstance(case, SetsCase) else synckv_heads).replay(case, module)


def parts(module: Any) -> dict[str, Any]:
    """See the package."""
    good = {"labels": (0, 0), "representatives": (0,)}
    return {"HeadClusters": lambda device: (module.HeadClusters, None, good)}


def arguments(device: torch.device) -> dict[str, Any]:
    """See the package."""
    generator = torch.Generator().manual_seed(3)
    attention = torch.rand(tiny.BATCH, tiny.KEY_VALUE_HEADS, tiny.SLOTS, generator=generator).to(device)
    static = torch.tensor([[3], [4]], device=device).expand(tiny.BATCH, tiny.KEY_VALUE_HEADS, 1)
    return {
        "k": 3, "rho": 0.4, "static": static, "k_static": 2, "k_dynamic": 2, "exclude_static": False,
        "first": torch.tensor([[0, 2, 3], [1, 4, -1]], device=device),
        "second": torch.tensor([[2, 5], [1, 0]], device=device),
        "attention": attention, "similarity": torch.eye(3, device=device), "clusters": 2,
    }
