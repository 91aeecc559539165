"""KeyDiff's state, block by block: any block size, the peak memory, and a sum that is carried over many steps."""

from __future__ import annotations

import pytest
import torch

from kvtwin.conformance.cases.key_cases import KeyCase, fill
from kvtwin.conformance.cases.state_trace import StateTrace
from kvtwin.conformance.judge import lockstep
from kvtwin.conformance.judge.checkers import keydiff as judge
from kvtwin.conformance.judge.compare import assert_within
from kvtwin.reference import keydiff
from kvtwin.reference.keydiff import KeyDiffConfig

pytestmark = [
    pytest.mark.kind("equivalence"),
    pytest.mark.filterwarnings("ignore:overflow encountered"),  # see test_keydiff.py
]

SIDES = pytest.mark.parametrize("side", ("reference", "optimized"))
HEAD_DIM = 16


def tokens(device, count: int, *, seed: int, content: str = "ordinary", heads: int = 1, dtype=torch.float32):
    """query, key and value of `count` tokens in one row: [1, H, T, D]."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (1, heads, count, HEAD_DIM)
    return [fill(name, generator, shape, dtype) for name in ("ordinary", content, "ordinary")]


def made(module, device, *, heads: int = 1, dtype=torch.float32, batch: int = 1, **config):
    return module.KeyDiffState(
        KeyDiffConfig(**config), batch=batch, query_heads=heads, key_value_heads=heads, head_dim=HEAD_DIM, dtype=dtype,
        device=device,
    )


def both(twins, device, *, heads: int = 1, dtype=torch.float32, batch: int = 1, **config) -> lockstep.Lockstep:
    return lockstep.pair(
        "keydiff", twins.optimized.keydiff, config=config, batch=batch, query_heads=heads, key_value_heads=heads,
        head_dim=HEAD_DIM, dtype=dtype, device=device,
    )


def held(state) -> torch.Tensor:
    """The positions of the tokens in a state, ascending: [B, Hkv, budget]."""
    return state.positions[..., :state.config.budget].sort(-1).values


# Steps ---------------------------------------------------------------------------------------------------------------


@pytest.mark.property("state")
@pytest.mark.slow_on_cpu
@pytest.mark.parametrize(
    ("refresh", "content"), [(1, "ordinary"), (7, "turning"), (7, "collinear"), (1000, "collinear")]
)
def test_a_carried_sum_keeps_to_its_bound_over_many_steps(refresh, content, twins, device):
    """Scores and evictions stay right over several refreshes, and over as many steps without any (refresh 1000)."""
    gpu = device.type == "cuda"
    budget, steps = (100, 330) if gpu else (8, 24 if refresh > 1 else 8)
    run = both(twins, device, budget=budget, block_size=16, refresh=refresh, recent=2)
    total = budget + 5 + steps
    query, key, value = tokens(device, total, seed=refresh, content="collinear" if content == "turning" else content)
    if content == "turning":
        # The keys change direction. A sum from which evicted keys are not subtracted would keep the old direction.
        key[:, :, total // 2:] = key[:, :, total // 2:].roll(1, -1)
    run.prefill(*(part[:, :, :budget + 5] for part in (query, key, value)))
    for token in range(budget + 5, total):
        run.step(query[:, :, token], key[:, :, token], value[:, :, token])
    assert run.summary.steps == steps
    assert run.summary.decisive > steps // 2, "most choices must be decisive"


@pytest.mark.property("state")
@SIDES
def test_recent_tokens_stay_for_as_long_as_they_are_recent(side, twins, device):
    """All keys but one are similar, so only recency protects the newest."""
    state = made(getattr(twins, side).keydiff, device, budget=5, block_size=3, recent=3)
    query, key, value = tokens(device, 16, seed=4)
    key = key[:, :, :1] + 0.01 * key
    key[:, :, 3] *= -1
    state.prefill(*(part[:, :, :7] for part in (query, key, value)))
    for token in range(7, 16):
        state.step(query[:, :, token], key[:, :, token], value[:, :, token])
        present = set(held(state)[0, 0].tolist())
        assert {token, token - 1, token - 2} <= present, f"the newest three must be kept after token {token}: {present}"
        assert 3 in present, "the dissimilar key must be kept"


@pytest.mark.property("state")
@SIDES
@pytest.mark.parametrize(("budget", "recent"), [(7, 5), (40, 1), (40, 33), (6, 6)])
def test_an_odd_number_of_recent_tokens_stays(budget, recent, side, twins, device):
    """All keys are equal. A step evicts the token in the lowest slot unless it is recent. After enough steps, that is
    the oldest of the recent tokens."""
    state, steps = made(getattr(twins, side).keydiff, device, budget=budget, block_size=64, recent=recent), recent + 2
    query, key, value = tokens(device, budget + 4 + steps, seed=7)
    key = key[:, :, :1].expand(key.shape)
    state.prefill(*(part[:, :, :budget + 4] for part in (query, key, value)))
    for token in range(budget + 4, budget + 4 + steps):
        state.step(query[:, :, token], key[:, :, token], value[:, :, token])
        present = held(state)[0, 0].tolist()
        assert len(present) == budget
        assert set(range(token + 1 - recent, token + 1)) <= set(present)


@pytest.mark.property("ties", slots="fixed")
@SIDES
def test_evicts_equal_keys_by_slot(side, twins, device):
    """With equal keys, the lowest slot is evicted each time, and the newest token takes its place."""
    state = made(getattr(twins, side).keydiff, device, budget=3, block_size=2)
    query, key, value = tokens(device, 9, seed=5)
    key = key[:, :, :1].expand(key.shape)
    state.prefill(*(part[:, :, :3] for part in (query, key, value)))
    assert state.positions[0, 0].tolist() == [0, 1, 2, -1, -1]
    for token in range(3, 6):
        state.step(query[:, :, token], key[:, :, token], value[:, :, token])
        assert state.positions[0, 0].tolist() == [token, 1, 2, -1, -1]
    state.append_block(*(part[:, :, 6:8] for part in (query, key, value)))
    assert state.positions[0, 0].tolist() == [6, 7, 2, -1, -1]


@pytest.mark.property("accuracy")
@SIDES
def test_scores_move_with_their_tokens(side, twins, device):
    """`score` is that of the tokens before the eviction. Free slots have no score."""
    state = made(getattr(twins, side).keydiff, device, budget=6, block_size=20)
    query, key, value = tokens(device, 17, seed=6)
    state.prefill(query, key, value)
    case, place = KeyCase.of(key), state.positions[..., :6]
    error = judge.score_error(judge.keys_of(case), case.similarity)
    truth = keydiff.score(key.double())
    assert_within(state.score[..., :6], truth.gather(-1, place), error.gather(-1, place), what="scores of kept tokens")
    assert bool((state.score[..., 6:] == -torch.inf).all())


@pytest.mark.property("state")
def test_keydiff_state_keeps_step_over_many_evictions(twins, device):
    """A long trace, in which slots are reused many times."""
    gpu = device.type == "cuda"
    config = {"budget": 60 if gpu else 6, "block_size": 32 if gpu else 8, "recent": 2, "refresh": 5}
    trace = StateTrace(
        batch=2, key_value_heads=1, group=2, head_dim=HEAD_DIM, dtype=torch.float16, seed=1, device=str(device),
        method="keydiff", config=tuple(config.items()), prompt=150 if gpu else 13, padding="left_padding",
        steps=600 if gpu else 14,
    )
    summary = lockstep.run(trace, twins.optimized.keydiff)
    assert summary.steps == trace.steps
    assert summary.decisive > trace.steps, "most choices must be decisive"
