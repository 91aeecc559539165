"""Numbers from the papers and from the methods' authors, typed here. Both sides and the judge take them from the same
configs, so no comparison of the two would notice a wrong one."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest
import torch

from kvtwin.conformance import discovery
from kvtwin.reference.baselines.h2o import H2OConfig
from kvtwin.reference.baselines.vatp import VATPConfig
from kvtwin.reference.epikv import EpiKVConfig
from kvtwin.reference.epikv.contract import band_layers
from kvtwin.reference.synckv import split_budget
from kvtwin.reference.thinkv import ThinKVConfig

pytestmark = pytest.mark.kind("equivalence")
SIDES = pytest.mark.parametrize("side", ("reference", "optimized"))

#: Config -> field -> default, and where it comes from. Sizes without a source are ours: blocks of 128 tokens, one
#: token per eviction, 32,768 tokens at most.
DEFAULTS: dict[str, dict[str, Any]] = {
    "thinkv": {
        "budget": 1024,                                     # k in the tables
        "tau": 128, "group": 16, "block": 8,                # section 5.1, "hyperparameters"
        "retention": (64, 32, 16, 8, 4),                    # section 3.3.2, "minimum retention of 4 tokens"
        "formats": {"R": "nvfp4", "E": "nvfp4", "T": "ternary"},  # section 5.1, "R and E thoughts to 4-bits, T to 2"
        "sparsity_threshold": 0.01, "edges": None, "max_tokens": 32768, "scale": None,
        "sparsity_of": "heads",                             # section 3.1.3, "averaging sparsity"; C.2 averages scores
    },
    "synckv": {
        "rho": 0.5, "stride": 5, "clusters": 2,             # section 5.1, "N_r to 2", "m was set at 5", "rho 0.5"
        "exclude_static": True, "union_clusters": False, "phase": 0, "max_tokens": 32768, "offload": False,
        "scale": None,
    },
    "epikv": {
        "policy": "epikv", "window": 64,                    # section 3.3, eq. 2 and 3
        "tau": 128, "chunk": 128, "recent": None, "keep_prompt": True, "count_prompt": True, "max_prompt": 0,
        "bands": None, "hidden_size": None, "edges": None, "sparsity_threshold": 0.01,
        "segments_by": "sparsity",                          # section 2; table 1 has "segment entropy"
        "scale": None,
    },
    "keydiff": {
        "recent": 0, "anchor": "mean_normalized", "similarity": "cosine",  # eq. 8; the window is an ablation (table 11)
        "block_size": 128, "refresh": 64, "scale": None,
    },
    "longflow": {
        "window": 32, "kernel_size": 5,                     # SnapKV for the prompt (section 4.1), as its authors run it
        "protect_newest": True,                             # eq. 3, i < t
        "per_head": False, "sinks": 0, "check_finite": False, "scale": None,
    },
    "snapkv": {"window": 32, "kernel_size": 5, "interval": 1, "block_size": 128, "scale": None},
    "streaming_llm": {"sinks": 4, "inv_freq": None, "block_size": 128, "scale": None},  # its authors' four sinks
    "h2o": {"recent": None, "sinks": 0, "interval": 1, "block_size": 128, "scale": None},
    "vatp": {"recent": None, "sinks": 1, "interval": 1, "block_size": 128, "scale": None},
    "tova": {"per_head": True, "interval": 1, "block_size": 128, "scale": None},
    "random": {"seed": 0, "block_size": 128, "scale": None},
}
#: Arguments of functions that have the same meaning as a field of the config.
SAME = {
    "epikv": ("window", "chunk", "policy"), "keydiff": ("recent", "anchor", "similarity"),
    "longflow": ("window", "kernel_size", "per_head", "check_finite"), "snapkv": ("kernel_size",),
    "streaming_llm": ("sinks",), "synckv": ("exclude_static",), "thinkv": ("group", "sparsity_of"),
}


@pytest.mark.parametrize("method", discovery.methods(), ids=str)
def test_defaults_of_configs_and_functions(method: discovery.Pair) -> None:
    needed = {"k": 64} if method.name == "synckv" else {} if method.name == "thinkv" else {"budget": 64}
    config = method.config(**needed)
    found = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in needed}
    assert found == DEFAULTS[method.name]
    for side in (method.reference, method.optimized):
        for name in method.exports:
            function = getattr(side, name)
            if not inspect.isfunction(function):
                continue
            for parameter in inspect.signature(function).parameters.values():
                if parameter.name in SAME.get(method.name, ()) and parameter.default is not inspect.Parameter.empty:
                    assert parameter.default == DEFAULTS[method.name][parameter.name], (name, parameter.name)


@pytest.mark.parametrize(("budget", "newest"), [(1, 0), (2, 1), (5, 2), (7, 3), (1024, 512)])
def test_h2o_and_vatp_protect_half_of_the_budget_rounded_down(budget, newest):
    assert H2OConfig(budget).protected == newest
    assert VATPConfig(budget).protected == newest


@SIDES
@pytest.mark.parametrize("method", ["h2o", "vatp"])
def test_an_odd_budget_keeps_more_heavy_hitters_than_newest_tokens(method, side, twins, device):
    """All tokens receive equal weights, so the oldest have the largest sums: of 9 tokens, the 3 oldest and the 2 newest
    stay."""
    module = getattr(getattr(twins, side).baselines, method)
    config, state = (getattr(module, f"{method.upper()}{kind}") for kind in ("Config", "State"))
    made = state(
        config(5, block_size=1), batch=1, query_heads=1, key_value_heads=1, head_dim=16, dtype=torch.float32,
        device=device,
    )
    ones = torch.ones(1, 1, 9, 16, device=device)
    made.prefill(ones, ones, ones)
    assert sorted(made.positions[0, 0, :5].tolist()) == [0, 1, 2, 7, 8]


@pytest.mark.parametrize(("budget", "newest"), [(1, 1), (3, 1), (8, 2), (511, 127), (512, 128), (4096, 128)])
def test_epikv_protects_128_tokens_or_a_quarter_of_the_budget(budget, newest):
    """min(128, K / 4), appendix D."""
    assert EpiKVConfig(budget).newest == newest


def test_epikv_reads_these_layers():
    """Layers 10 and 21 of 32 (eq. 3), and the bands 7 to 13 and 18 to 25."""
    assert band_layers("epikv", 32) == ((10,), (21,))
    assert band_layers("band_adaptive", 32) == (tuple(range(7, 14)), tuple(range(18, 26)))
    assert band_layers("epikv", 64) == ((20,), (42,))


@SIDES
def test_keydiff_takes_the_lower_median_of_an_even_number(side, twins, device):
    """As torch does. The second channel's median is 1, so the key (1, 1) is most like the anchor."""
    key = torch.zeros(1, 1, 4, 16, device=device)
    key[0, 0, :, 0] = 1
    key[0, 0, :, 1] = torch.tensor([0.0, 1.0, 2.0, 10.0], device=device)
    found = getattr(twins, side).keydiff.score(key, anchor="median")[0, 0]
    assert found.argmin() == 1
    assert abs(float(found[1]) + 1) < 1e-6
    assert float(found[2]) > -0.95


def test_synckv_gives_the_odd_token_to_the_static_set():
    assert [split_budget(k, 0.5) for k in (1, 2, 5, 64)] == [(1, 0), (1, 1), (3, 2), (32, 32)]


@SIDES
def test_thinkv_shrinks_a_segment_to_64_32_16_8_and_4_tokens(side, twins, device):
    """One level at each change of trajectory."""
    module, config = getattr(twins, side).thinkv, ThinKVConfig()
    size, level = torch.tensor([[128, 128]], device=device), torch.zeros(1, 2, dtype=torch.int64, device=device)
    seen = []
    for _ in range(6):
        plan = module.anneal(
            size, level, torch.zeros_like(level), torch.ones(1, dtype=torch.int64, device=device),
            torch.ones(1, dtype=torch.bool, device=device), live=size.sum(1), budget=config.budget,
            retention=config.retention,
        )
        size, level = plan.size.clone(), plan.level.clone()
        seen.append(int(size[0, 0]))
    assert seen == [64, 32, 16, 8, 4, 4]
    assert int(size[0, 1]) == 128, "the current segment stays whole"
