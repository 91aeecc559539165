"""EpiKV's state in cases that drawn traces rarely reach: caches of several tiles, kept prompts, rows that start
late."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.judge.checkers.epikv import BY_ENTROPY, SEGMENTS, Adapter, extras
from kvtwin.conformance.judge.compare import assert_same
from kvtwin.conformance.judge.lockstep import Lockstep, pair
from kvtwin.reference.contract.epikv.config import EpiKVConfig

pytestmark = pytest.mark.kind("equivalence")


def both(twins: Any, device: torch.device, heads: int = 1, queries: int = 2, **config: Any) -> Lockstep:
    return pair(
        "epikv", twins.optimized.epikv, config=config, batch=2, query_heads=queries, key_value_heads=heads, head_dim=16,
        dtype=torch.float32, device=device,
    )


def drawn(seed: int, device: torch.device, *time: int, heads: int = 1, queries: int = 2) -> list[Tensor]:
    """The same numbers on every device. With few tokens, other numbers may make too many choices ambiguous."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, count, *time, 16, generator=generator).to(device) for count in (queries, heads, heads)]


@pytest.mark.property("state")
@pytest.mark.parametrize("policy", ["kv_val", "attn_x_hs"])
def test_attention_over_several_tiles_and_splits(policy, twins, device):
    """A cache of three tiles, split between two programs, with logits that rise from tile to tile."""
    run = both(twins, device, heads=2, budget=46, policy=policy, keep_prompt=False)
    query, key, value = drawn(1, device, 44, heads=2)
    key = key + torch.arange(44, device=device)[:, None] / 16 * query[:, :1].mean(2, keepdim=True)
    run.prefill(query, key, value)
    for step in range(3):
        run.step(*drawn(2 + step, device, heads=2))
    assert int(run.tested.occupied.sum()) == 92


@pytest.mark.property("state")
@pytest.mark.parametrize(
    "options",
    [{"budget": 9}, {"budget": 4, "count_prompt": False, "max_prompt": 6}, {"budget": 9, "policy": "lag_kv"}],
    ids=("counts", "beside", "ties"),
)
def test_a_kept_prompt(options, twins, device):
    """All of its tokens are kept and score +inf. The others compete for the rest of the budget, or for the whole budget
    if the prompt is not counted. This holds even if the others score +inf as well, as in a first chunk."""
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


@pytest.mark.property("bad_input")
@pytest.mark.parametrize("options", [{"budget": 8}, {"budget": 4, "count_prompt": False, "max_prompt": 6}])
def test_every_row_of_a_kept_prompt_must_fit(options, twins, device):
    """Rows of 4 and 9 tokens."""
    occupied = torch.arange(9, device=device) >= torch.tensor([[5], [0]], device=device)
    run = both(twins, device, window=4, policy="kv_val", **options)
    for state in (run.tested, run.reference):
        with pytest.raises(ValueError, match=r"(prompt \+ recent = |prompt's )9"):
            state.prefill(*(tensor.to(state.dtype) for tensor in drawn(3, device, 9)), occupied)


@pytest.mark.property("state")
def test_a_row_that_begins_with_its_first_step(twins, device):
    """The prompt of the row is all padding. Its first token has no previous one and scores 0, whatever its hidden
    state."""
    run = both(twins, device, budget=4, window=3, keep_prompt=False)
    occupied = torch.tensor([[True] * 3, [False] * 3], device=device)
    run.prefill(*drawn(30, device, 3), occupied)
    run.step(*drawn(31, device))
    row = run.tested.positions[1]
    assert row.sort().values.tolist() == [-1, -1, -1, 3]
    assert float(run.tested.score[1][row == 3]) == 0
    for step in range(5):
        run.step(*drawn(32 + step, device))


@pytest.mark.property("state")
@pytest.mark.parametrize("policy", ["band_adaptive", "lag_kv"])
def test_a_longer_run_with_reset_and_beams(policy, twins, device):
    bands = {"bands": (1, 2)} if policy == "band_adaptive" else {}
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


@pytest.mark.property("state")
@pytest.mark.slow_on_cpu
@pytest.mark.parametrize("options", [
    {"policy": "band_adaptive", "bands": (2, 1)}, {"policy": "lag_kv"}, {"policy": "attn_x_hs"},
    {"policy": "segment_hs", **SEGMENTS, "edges": (0.55, 0.7)}, {"policy": "segment_hs", **BY_ENTROPY},
    {"policy": "kv_key", "budget": 4, "keep_prompt": True, "count_prompt": False, "max_prompt": 21},
], ids=lambda options: options.get("segments_by", options["policy"]))
def test_rows_of_other_ages_in_another_order_and_after_a_reset(options, twins, device):
    """Rows with padding in other places keep other tokens in other slots. Then they change places. After a reset both
    get other prompts, and after another one none. In the interpreter, 18 slots are three pieces of a kernel's loops."""
    config = {"budget": 18, "recent": 3, "window": 4, "chunk": 3, "keep_prompt": False, **options}
    run = both(twins, device, heads=2, queries=4, **config)

    def tokens(seed: int, *time: int) -> list[Tensor]:
        return drawn(seed, device, *time, heads=2, queries=4)

    occupied = torch.ones(2, 21, dtype=torch.bool, device=device)
    occupied[1, [0, 2, 4, 5, 11]] = False
    run.prefill(*tokens(90, 21), occupied)
    for step in range(8):
        if step in (1, 3, 4, 6):
            run.reorder(torch.tensor([1, 0], device=device))
        run.step(*tokens(91 + step))
    run.reset()
    run.prefill(*tokens(110, 3), torch.tensor([[False, True, False], [True] * 3], device=device))
    run.step(*tokens(111))
    run.reset()
    for step in range(6):
        run.step(*tokens(112 + step))


@pytest.mark.property("state")
def test_attention_over_several_tiles_of_each_split(twins, device):
    run = both(twins, device, budget=330, policy="kv_val", keep_prompt=False)
    run.prefill(*drawn(130, device, 335))
    run.step(*drawn(131, device))


@pytest.mark.property("state")
def test_the_paper_s_budgets_and_windows(twins, device):
    """Defaults: a window of 64 values and a recency of K / 4. The hidden size differs from the size of the heads."""
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


@pytest.mark.property("state")
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("options", [
    {"policy": "attn_x_hs"}, {"policy": "segment_hs", **SEGMENTS}, {"policy": "segment_hs", **BY_ENTROPY},
], ids=("attn_x_hs", "segment_hs", "entropy"))
def test_hybrids_of_attention_and_hidden_states(options, keep, twins, device):
    """Eviction from the prompt, steps, a reorder and a reset. A kept prompt scores +inf."""
    kept = {"count_prompt": False, "max_prompt": 9} if keep else {"keep_prompt": False}
    run = both(twins, device, heads=2, budget=6, recent=2, window=5, **kept, **options)
    occupied = torch.tensor([[True] * 9, [False] * 2 + [True] * 7], device=device)
    run.prefill(*drawn(80, device, 9, heads=2), occupied)
    for step in range(12):
        run.step(*drawn(81 + step, device, heads=2))
    run.reorder(torch.tensor([1, 1], device=device))
    run.step(*drawn(93, device, heads=2))
    assert run.summary.decisive >= 4
    run.reset()
    run.step(*drawn(94, device, heads=2))
    run.step(*drawn(95, device, heads=2))


def shared(twins: Any, side: str, device: torch.device, **options: Any) -> tuple[Any, list[Any]]:
    """A scorer and the states of two layers."""
    module = getattr(twins, side).epikv
    config = EpiKVConfig(recent=1, keep_prompt=False, hidden_size=16, **options)
    sizes = {"batch": 1, "key_value_heads": 1, "head_dim": 16, "dtype": torch.float32, "device": device}
    scorer = module.EpiKVScorer(config, hidden_size=16, **sizes)
    return scorer, [module.EpiKVState(config, query_heads=2, scorer=scorer, **sizes) for _ in range(2)]


def look(scorer: Any, layers: list[Any], token: int, targets: list[int | None]) -> None:
    """A step in which each layer attends to one token only, or to all equally (None). Hidden states do not change."""
    device = scorer.score.device
    key = 100 * torch.eye(16, device=device)
    for layer, target in zip(layers, targets, strict=True):
        query = torch.zeros(16, device=device) if target is None else key[target]
        layer.step(query.expand(1, 2, 16), key[token].expand(1, 1, 16), key[token].expand(1, 1, 16))
    hidden = torch.ones(1, 1, 16, device=device)
    scorer.step((hidden, hidden if scorer.config.edges else hidden[:, :0]))


@pytest.mark.property("state")
@pytest.mark.parametrize("side", ["reference", "optimized"])
def test_layers_that_share_a_scorer_count_equally(side, twins, device):
    """Weights are 0 or 1 and z-scores are 0, so that sums are exact. One layer attends to token 0, the other to
    token 1."""
    scorer, layers = shared(twins, side, device, budget=4, policy="attn_x_hs")
    for token in range(4):
        look(scorer, layers, token, [0, min(1, token)])
    scores = dict(zip(scorer.positions[0].tolist(), scorer.score[0].tolist(), strict=True))
    assert scores == {0: 2.5, 1: 1.5, 2: 0, 3: 0}
    for token, victim in ((4, 2), (5, 3)):
        assert int(scorer.positions[0, scorer.next_slot]) == victim
        look(scorer, layers, token, [token, token])
        assert float(scorer.score[0][scorer.positions[0] == token]) == 1, "it starts with the weight of its own query"
    assert int(scorer.positions[0, scorer.next_slot]) == 4, "the oldest of equal scores, except the newest token"


@pytest.mark.property("state")
@pytest.mark.parametrize("side", ["reference", "optimized"])
def test_layers_that_share_a_scorer_classify_thoughts_together(side, twins, device):
    """The sparsity of one layer is (n - 1) / n, as it attends to one token, and that of the other is 0. Their mean sets
    the thought type where a segment begins. Eviction goes by thought type first, then by score, then by age."""
    scorer, layers = shared(
        twins, side, device, budget=6, policy="segment_hs", tau=2, edges=(0.3, 0.39), sparsity_threshold=0.5
    )
    for token in range(6):
        look(scorer, layers, token, [0, None])
    thoughts = dict(zip(scorer.positions[0].tolist(), layers[0].thoughts[0].tolist(), strict=True))
    assert thoughts == {0: 1, 1: 1, 2: 2, 3: 2, 4: 0, 5: 0}, "0, then 1/3, then 2/5"
    assert int(scorer.positions[0, scorer.next_slot]) == 4


@pytest.mark.property("state")
@pytest.mark.parametrize("side", ["reference", "optimized"])
def test_layers_that_share_a_scorer_classify_thoughts_by_their_mean_entropy(side, twins, device):
    """A layer that attends to one token has the entropy 0, and one that attends to all equally has 1, the largest. The
    lower their mean where a segment begins, the sooner its tokens are evicted. A token alone has no entropy."""
    scorer, layers = shared(
        twins, side, device, budget=8, policy="segment_hs", tau=2, edges=(0.3, 0.7), segments_by="entropy"
    )
    for token, targets in enumerate([(None, None), (None, None), (None, None), (0, 0), (0, None), (0, 0), (1, 1)]):
        look(scorer, layers, token, list(targets))
    thoughts = dict(zip(scorer.positions[0].tolist(), layers[0].thoughts[0].tolist(), strict=True))
    assert thoughts == {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2, 6: 0, -1: -1}
    look(scorer, layers, 7, [None, None])
    assert int(scorer.positions[0, scorer.next_slot]) == 0
    look(scorer, layers, 8, [None, None])
    look(scorer, layers, 9, [None, None])
    assert int(scorer.positions[0, scorer.next_slot]) == 6, "the transitions 0, 1 and 6 first, then executions"


@pytest.mark.property("state")
@pytest.mark.parametrize("queries", [1, 5])
def test_the_entropy_of_many_heads_and_tokens(queries, twins, device):
    """Each query head has attention of its own, from even to a single token. In the interpreter, 5 heads and 21 slots
    are three pieces each, the last of which is not full."""
    made = {"policy": "segment_hs", **BY_ENTROPY, "tau": 1, "edges": (0.63, 0.68) if queries > 1 else (0.3, 0.7)}
    run = both(twins, device, queries=queries, budget=21, recent=2, window=5, keep_prompt=False, **made)
    sizes = torch.arange(queries, device=device)[:, None]
    query, key, value = drawn(140, device, 17, queries=queries)
    run.prefill(query, key, value)
    for step in range(12):
        query, key, value = drawn(141 + step, device, queries=queries)
        run.step(query * (sizes if queries > 1 else 4 * (step % 3)), key, value)
    thoughts = run.tested.thoughts[run.tested.positions >= 17]
    assert set(thoughts.tolist()) == {0, 1, 2}


@pytest.mark.property("state")
@pytest.mark.parametrize("side", ["reference", "optimized"])
@pytest.mark.parametrize("options", [
    {"policy": "attn_x_hs"}, {"policy": "segment_hs", "tau": 1, "edges": (0.3, 0.39), "sparsity_threshold": 0.5},
], ids=("attn_x_hs", "segment_hs"))
def test_reset_discards_an_incomplete_step(options, side, twins, device):
    """Reset after one of two layers has done its step. The next sequence gives the same results as a new scorer."""
    (used, layers), (fresh, others) = (shared(twins, side, device, budget=4, **options) for _ in range(2))
    for token in range(3):
        look(used, layers, token, [0, None])
    key = 100 * torch.eye(16, device=device)[0]
    layers[0].step(key.expand(1, 2, 16), *[key.expand(1, 1, 16)] * 2)
    for layer in layers:
        layer.reset()
    used.reset()
    for token in range(6):
        for scorer, states in ((used, layers), (fresh, others)):
            look(scorer, states, token, [max(0, token - 1), None])
        for name in ("positions", "score", "next_slot"):
            assert torch.equal(getattr(used, name), getattr(fresh, name)), f"{name} after token {token}"
        if layers[0].thoughts is not None:
            assert torch.equal(layers[0].thoughts, others[0].thoughts), f"thoughts after token {token}"


@pytest.mark.parametrize("policy", ["kv_val", "attn_x_hs"])
@pytest.mark.parametrize("dtype", [
    pytest.param(torch.float32, marks=pytest.mark.property("state")), torch.float64, torch.bfloat16
])
def test_received_attention_is_part_of_the_score_of_hybrids_alone(policy, dtype, twins, device):
    """Both add it to choose a prompt's tokens. Scores are multiples of 1/4, which every dtype adds exactly."""
    generator = torch.Generator().manual_seed(8)
    scores, received = (torch.randint(-8, 9, (2, 12), generator=generator).div(4).to(device, dtype) for _ in range(2))
    occupied = torch.arange(12, device=device) >= torch.tensor([[0], [3]], device=device)
    found = []
    for side in (twins.reference.epikv, twins.optimized.epikv):
        config = side.EpiKVConfig(budget=6, window=4, policy=policy, keep_prompt=False)
        scorer = side.EpiKVScorer(
            config, batch=2, hidden_size=8, key_value_heads=1, head_dim=16, dtype=torch.float32, device=device
        )
        scorer.admit(occupied, scores, received)
        found.append(scorer)
    for name in ("positions", "occupied", "next_slot"):
        assert_same(getattr(found[1], name), getattr(found[0], name), what=name)
    assert_same(found[1].score, found[0].score.float(), what="score")
