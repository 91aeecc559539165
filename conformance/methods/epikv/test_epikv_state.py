"""EpiKV's state in cases that drawn traces rarely reach: caches of several tiles, kept prompts, rows that start late:
what only our own sides promise.
"""

from __future__ import annotations

import math
import random

import pytest
import torch

from kvtwin.reference.contract.epikv.config import EpiKVConfig

pytestmark = pytest.mark.kind("equivalence")


@pytest.mark.kind("laws")
@pytest.mark.parametrize("side", ["reference", "optimized"])
@pytest.mark.parametrize("policy", ["attn_x_hs", "segment_hs", "entropy"])
@pytest.mark.parametrize("seed", [0, 1])
def test_hybrids_keep_what_their_definition_keeps(seed, policy, side, twins, device):
    """The kept tokens are exactly right after every step, ties included. z-scores of windows of 2 are -1, 0 or 1, and
    queries attend to 1, 2 or 4 tokens equally, so nothing is rounded. For thought types, `select` over the whole
    sequence must keep the same tokens. Received attention depends on the tokens that were present, so it is only
    replayed."""
    module, draw, budget = getattr(twins, side).epikv, random.Random(seed), 6
    segments = {"edges": (0.31, 0.57), "tau": 2, "sparsity_threshold": 0.5} if policy == "segment_hs" else {}
    if policy == "entropy":
        policy, segments = "segment_hs", {"edges": (0.31, 0.57), "tau": 2, "segments_by": "entropy"}
    config = EpiKVConfig(
        budget, policy=policy, recent=2, window=2, keep_prompt=False, hidden_size=1, **segments
    )
    state = module.EpiKVState(
        config, batch=1, query_heads=2, key_value_heads=1, head_dim=16, dtype=torch.float32, device=device
    )
    keys = 100 * torch.eye(16, device=device)
    moves = [[draw.randint(0, 2) for _ in range(16)] for _ in range(2 if segments else 1)]
    own, thought, gave, held = [0.0] * 16, [0] * 16, [0.0] * 16, []
    for t in range(16):
        held.append(t)
        looked = draw.sample(held, draw.choice([n for n in (1, 2, 4) if n <= len(held)]))
        hidden = [torch.full((1, 1), float(sum(band[:t + 1])), device=device) for band in moves]
        state.step(keys[looked].sum(0).expand(1, 2, 16), *[keys[t].expand(1, 1, 16)] * 2, *hidden)
        if t > 1:
            signs = [(band[t] > band[t - 1]) - (band[t] < band[t - 1]) for band in moves]
            own[t] = float(signs[0] - sum(signs[1:]))
        if segments:
            share = 1 - len(looked) / len(held)
            if config.segments_by == "entropy":
                share = 0.88 - math.log(len(looked)) / math.log(max(2, len(held)))        # 0.31 + 0.57, in reverse
            thought[t] = thought[t - 1] if t % 2 else 0 if share > 0.57 else 2 if share > 0.31 else 1
            whole = torch.tensor([[10 * thought[n] + own[n] for n in range(t + 1)]], device=device)
            kept = module.select(whole, budget, prompt=0, recent=2)
            assert kept[0].tolist() == held, f"by select, after token {t}"
        else:
            for token in looked:
                gave[token] += 1 / len(looked)
        assert sorted(n for n in state.positions[0].tolist() if n >= 0) == held, f"after token {t}"
        scores = dict(zip(state.positions[0].tolist(), state.score[0].tolist(), strict=True))
        assert all(scores[n] == own[n] + gave[n] for n in held), f"after token {t}: {scores}"
        if len(held) == budget:
            held.remove(min((n for n in held if n < t), key=lambda n: (thought[n], own[n] + gave[n], n)))
    assert not segments or len(set(thought)) == 3


def test_selection_evicts_nan_first(twins, device):
    scores = torch.tensor([[3.0, torch.nan, -torch.inf, 1.0, torch.nan, 2.0]], device=device)
    for side in (twins.reference.epikv, twins.optimized.epikv):
        assert side.select(scores, 4, prompt=0, recent=0).tolist() == [[0, 3, 4, 5]]
        assert side.select(scores, 3, prompt=1, recent=1).tolist() == [[0, 3, 5]]
