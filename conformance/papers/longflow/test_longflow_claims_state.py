"""The budget: the tokens in the cache after each step, the possible next victims, and the prompt (claims LF-15, LF-21).

Both twins are tested. Tokens, slots and counts must be exactly right.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.conformance.cases.draws import at_least

pytestmark = pytest.mark.kind("claims")

few = settings(max_examples=max(at_least(3), settings().max_examples // 6))


@pytest.fixture(scope="module", params=["reference", "optimized"])
def longflow(request, twins):
    return getattr(twins, request.param).longflow


def empty_state(longflow, device, **config):
    return longflow.LongFlowState(
        longflow.LongFlowConfig(**config), batch=1, query_heads=1, key_value_heads=1, head_dim=16,
        dtype=torch.float32, device=device,
    )


def step(state, generator: torch.Generator, device, factor: float = 1.0) -> None:
    """One random token; `factor` scales its value."""
    query, key, value = torch.randn(3, 1, 1, 16, generator=generator).to(device)
    state.step(query, key, factor * value)


def alive(state) -> list[int]:
    """The tokens in the cache, oldest first."""
    assert (state.occupied == (state.positions >= 0)).all()
    return sorted(state.positions[state.positions >= 0].tolist())


@pytest.mark.claim("LF-15a")
@few
@given(budget=st.integers(1, 5), protect=st.booleans(), seed=st.integers(0, 2**32 - 1))
def test_budget_holds_at_every_step(longflow, device, budget, protect, seed):
    generator = torch.Generator().manual_seed(seed)
    state = empty_state(longflow, device, budget=budget, protect_newest=protect)
    before: list[int] = []
    for t in range(budget + 2):
        chosen = int(state.next_slot[0])
        step(state, generator, device)
        now = alive(state)
        assert len(now) == len(set(now)) == min(budget, t + 1)
        assert len(now) != min(budget, t) or t >= budget                               # the new token counts
        assert t in now and state.positions[0, chosen] == t                   # in the slot that the previous step chose
        assert set(now) - set(before) == {t} and len(set(before) - set(now)) == (t >= budget)
        before = now


def survivor(longflow, device, *, protect: bool, newest: float) -> bool:
    """Whether the token written at one step is still in the cache after the next. Its value is scaled by `newest`."""
    generator = torch.Generator().manual_seed(0)
    state = empty_state(longflow, device, budget=3, protect_newest=protect)
    for _ in range(3):
        step(state, generator, device)
    step(state, generator, device, factor=newest)
    step(state, generator, device)
    return 3 in alive(state)


@pytest.mark.claim("LF-15b")
def test_newest_token_can_be_the_next_victim(longflow, device):
    assert not survivor(longflow, device, protect=False, newest=0.0)
    assert not survivor(longflow, device, protect=False, newest=1e-6)
    assert survivor(longflow, device, protect=False, newest=1e6)                       # it is not always evicted


@pytest.mark.claim("LF-15c")
@few
@given(budget=st.integers(2, 4), factor=st.sampled_from([0.0, 1e-6, 1.0]), seed=st.integers(0, 2**32 - 1))
def test_protected_newest_token_survives_the_next_step(longflow, device, budget, factor, seed):
    generator = torch.Generator().manual_seed(seed)
    state = empty_state(longflow, device, budget=budget)
    for t in range(budget + 3):
        step(state, generator, device, factor=factor if t % 2 else 1.0)
        assert t == 0 or t - 1 in alive(state)


@pytest.mark.claim("LF-15c")
def test_protection_rejects_a_second_step_and_a_budget_of_one(longflow, device):
    """The newest token is protected for one step only. With a budget of 1 there is nothing else to overwrite."""
    generator = torch.Generator().manual_seed(0)
    state = empty_state(longflow, device, budget=3)
    for t in range(7):
        step(state, generator, device, factor=0.0 if t == 4 else 1.0)
        assert t == 0 or t - 1 in alive(state)
    assert 4 not in alive(state)
    single = empty_state(longflow, device, budget=1)
    for t in range(3):
        step(single, generator, device)
        assert alive(single) == [t]


@pytest.mark.claim("LF-15d")
@pytest.mark.parametrize(("prompt", "kept"), [(2, 2), (3, 3), (4, 3), (7, 3)])
def test_prompt_leaves_room_for_the_first_step(longflow, device, prompt, kept):
    """If a prompt were compressed to the whole budget of 4, the first step would have no slot: 4 + 1 > 4, and no query
    has chosen a victim yet. So budget - 1 tokens are kept."""
    budget = 4
    generator = torch.Generator().manual_seed(0)
    state = empty_state(longflow, device, budget=budget)
    query, key, value = torch.randn(3, 1, 1, prompt, 16, generator=generator).to(device)
    state.prefill(query, key, value)
    stayed = alive(state)
    assert len(stayed) == kept == min(prompt, budget - 1) < budget
    assert not state.occupied[0, int(state.next_slot[0])]
    step(state, generator, device)
    assert alive(state) == [*stayed, prompt]                                           # nothing was evicted


@pytest.mark.claim("LF-15d")
@pytest.mark.parametrize("side", ["reference", "optimized"])
@pytest.mark.parametrize("prompt", [4, 7])
def test_snapkv_to_the_whole_budget_leaves_no_slot_free(twins, side, device, prompt):
    """The words of section 4.1: SnapKV compresses the prompt to the budget of 4, not to budget - 1. It then fills every
    slot, with different tokens, so the first new token has none."""
    query, key, value = torch.randn(3, 1, 1, prompt, 16, generator=torch.Generator().manual_seed(0)).to(device)
    snapkv = getattr(twins, side).baselines.snapkv
    for budget, free in ((4, 0), (3, 1)):
        found = snapkv.compress(query[:, :, -2:], key, value, budget, kernel_size=3)
        kept = [token for token in found.kept.flatten().tolist() if token >= 0]
        assert 4 - len(set(kept)) == 4 - len(kept) == free


# ---- LF-21: the current query ----------------------------------------------------------------------------------------


def choice(longflow, device, queries: torch.Tensor) -> tuple[int, list[float]]:
    """The next victim, and all scores, after six tokens with fixed keys and values and these queries [6, D]."""
    key, value = torch.randn(2, 6, 1, 1, 16, generator=torch.Generator().manual_seed(1)).to(device)
    state = empty_state(longflow, device, budget=6)
    for query, k, v in zip(queries.to(device), key, value, strict=True):
        state.step(query[None, None], k, v)
    return int(state.next_slot[0]), state.score[0].tolist()


@pytest.mark.claim("LF-21")
@few
@given(seed=st.integers(0, 2**32 - 1))
def test_earlier_queries_do_not_change_the_victim(longflow, device, seed):
    queries = torch.ones(6, 16)
    other = 3 * torch.randn(6, 16, generator=torch.Generator().manual_seed(seed))
    other[-1] = queries[-1]
    assert choice(longflow, device, queries) == choice(longflow, device, other)


@pytest.mark.claim("LF-21")
def test_current_query_changes_the_victim(longflow, device):
    queries, other = torch.ones(2, 6, 16)
    other[-1] *= -1
    (first, scores), (second, others) = choice(longflow, device, queries), choice(longflow, device, other)
    assert first != second and scores != others
