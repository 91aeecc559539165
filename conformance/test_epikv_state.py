"""EpiKV's state where drawn traces seldom get: caches of several tiles, prompts that are kept, rows that begin late."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.judges.epikv import SEGMENTS, Adapter, extras
from kvtwin.conformance.lockstep import Lockstep, pair
from kvtwin.reference.epikv.contract import EpiKVConfig

pytestmark = pytest.mark.kind("equivalence")


def both(twins: Any, device: torch.device, heads: int = 1, **config: Any) -> Lockstep:
    return pair(
        "epikv", twins.optimized.epikv, config=config, batch=2, query_heads=2, key_value_heads=heads, head_dim=16,
        dtype=torch.float32, device=device,
    )


def drawn(seed: int, device: torch.device, *time: int, heads: int = 1) -> list[Tensor]:
    """The same numbers on every device: decisions on few tokens may be too close to call on others."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, count, *time, 16, generator=generator).to(device) for count in (2, heads, heads)]


@pytest.mark.parametrize("policy", ["kv_val", "attn_x_hs"])
def test_attention_over_several_tiles_and_splits(policy, twins, device):
    """A cache of three tiles for two programs, with logits that rise from tile to tile."""
    run = both(twins, device, heads=2, budget=46, policy=policy, keep_prompt=False)
    query, key, value = drawn(1, device, 44, heads=2)
    key = key + torch.arange(44, device=device)[:, None] / 16 * query[:, :1].mean(2, keepdim=True)
    run.prefill(query, key, value)
    for step in range(3):
        run.step(*drawn(2 + step, device, heads=2))
    assert int(run.tested.occupied.sum()) == 92


@pytest.mark.parametrize(
    "options",
    [{"budget": 9}, {"budget": 4, "count_prompt": False, "max_prompt": 6}, {"budget": 9, "policy": "lag_kv"}],
    ids=("counts", "beside", "ties"),
)
def test_a_kept_prompt(options, twins, device):
    """It stays whole and scores +inf; what is left of the budget, or a budget beside it, is fought for. Also where all
    others score +inf as well, as in a first chunk."""
    run = both(twins, device, window=4, **options)
    occupied = torch.tensor([[True] * 5, [False] * 2 + [True] * 3], device=device)
    run.prefill(*drawn(3, device, 5), occupied)
    for step in range(7):
        run.step(*drawn(4 + step, device))
        positions = run.tested.positions
        assert bool(((positions[0][:, None] == torch.arange(5, device=device)).sum(0) == 1).all())
        most = 9 if run.tested.config.count_prompt else 9 - 2 * torch.arange(2, device=device)
        assert bool((run.tested.occupied.sum(1) <= most).all())
        assert bool((run.tested.score[(positions >= 0) & (positions < 5)] == torch.inf).all())
    assert run.tested.tokens_seen == 12


def test_a_row_that_begins_with_its_first_step(twins, device):
    """All padding: its first token has nothing before it, and scores 0 whatever its hidden state."""
    run = both(twins, device, budget=4, window=3, keep_prompt=False)
    occupied = torch.tensor([[True] * 3, [False] * 3], device=device)
    run.prefill(*drawn(30, device, 3), occupied)
    run.step(*drawn(31, device))
    row = run.tested.positions[1]
    assert row.sort().values.tolist() == [-1, -1, -1, 3]
    assert float(run.tested.score[1][row == 3]) == 0
    for step in range(5):
        run.step(*drawn(32 + step, device))


@pytest.mark.parametrize("policy", ["band_adaptive", "lag_kv"])
def test_a_longer_run_with_reset_and_beams(policy, twins, device):
    bands = {"bands": (2, 1)} if policy == "band_adaptive" else {}
    run = both(twins, device, budget=6, recent=3, policy=policy, window=3, chunk=3, keep_prompt=False, **bands)
    run.prefill(*drawn(40, device, 7))
    for step in range(5):
        run.step(*drawn(41 + step, device))
    run.reorder(torch.tensor([1, 1], device=device))
    for step in range(3):
        run.step(*drawn(50 + step, device))
    run.reset()
    for step in range(3):
        run.step(*drawn(60 + step, device))


def test_the_paper_s_budgets_and_windows(twins, device):
    """Defaults: 64 values, recency of a quarter; hidden states of another size than the heads'."""
    config = EpiKVConfig(16, hidden_size=40)
    sizes = {"batch": 1, "query_heads": 1, "key_value_heads": 1, "head_dim": 16, "device": device}
    run = Lockstep(
        twins.optimized.epikv.EpiKVState(config, dtype=torch.bfloat16, **sizes),
        twins.reference.epikv.EpiKVState(config, dtype=torch.float64, **sizes), Adapter(),
    )
    tokens = [tensor[:1, :1].bfloat16() for tensor in drawn(70, device, 30)]
    assert extras(run.tested, *tokens)["hidden_a"].shape == (1, 1, 30, 40)
    run.prefill(*(tensor[:, :, :8] for tensor in tokens))
    for step in range(8, 26):
        run.step(*(tensor[:, :, step] for tensor in tokens))
    assert run.tested.config.newest == 4


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("options", [{"policy": "attn_x_hs"}, {"policy": "segment_hs", **SEGMENTS}],
                         ids=("attn_x_hs", "segment_hs"))
def test_hybrids_of_attention_and_hidden_states(options, keep, twins, device):
    """Over eviction from the prompt on, steps, other rows, and a fresh start; a prompt that is kept scores +inf."""
    kept = {"count_prompt": False, "max_prompt": 9} if keep else {"keep_prompt": False}
    run = both(twins, device, heads=2, budget=6, recent=2, window=5, **kept, **options)
    occupied = torch.tensor([[True] * 9, [False] * 2 + [True] * 7], device=device)
    run.prefill(*drawn(80, device, 9, heads=2), occupied)
    for step in range(9):
        run.step(*drawn(81 + step, device, heads=2))
    run.reorder(torch.tensor([1, 1], device=device))
    run.step(*drawn(90, device, heads=2))
    assert run.summary.decisive >= 4
    run.reset()
    run.step(*drawn(91, device, heads=2))
    run.step(*drawn(92, device, heads=2))
