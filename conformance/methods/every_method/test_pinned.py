"""Numbers from the papers and from the methods' authors, typed here and in the checkers. Both sides and the judge take
them from the same configs, so no comparison of the two would notice a wrong one."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields

import pytest
import torch

from kvtwin.conformance import discovery
from kvtwin.conformance.judge import checkers
from kvtwin.reference.baselines.h2o import H2OConfig
from kvtwin.reference.baselines.vatp import VATPConfig
from kvtwin.reference.contract.epikv.config import band_layers
from kvtwin.reference.epikv import EpiKVConfig
from kvtwin.reference.synckv import split_budget
from kvtwin.reference.thinkv import ThinKVConfig

pytestmark = pytest.mark.kind("equivalence")
SIDES = pytest.mark.parametrize("side", ("reference", "optimized"))


@pytest.mark.parametrize("method", discovery.with_state(), ids=str)
def test_defaults_of_configs_and_functions(method: discovery.Pair) -> None:
    """The checker has them (`DEFAULTS`, `SAME`)."""
    assert method.config is not None
    needed = {field.name: 64 for field in fields(method.config) if field.default is MISSING is field.default_factory}
    needed |= checkers.required(method.name)
    config = method.config(**needed)
    found = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in needed}
    defaults = checkers.ask(method.name, "DEFAULTS", None)
    assert found == defaults, f"DEFAULTS of conformance/judge/checkers/{method.name}.py"
    for side in (method.reference, method.optimized):
        for name in method.exports:
            function = getattr(side, name)
            if not inspect.isfunction(function):
                continue
            for parameter in inspect.signature(function).parameters.values():
                if parameter.name in checkers.ask(method.name, "SAME", ()) and parameter.default is not parameter.empty:
                    assert parameter.default == defaults[parameter.name], (name, parameter.name)


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
