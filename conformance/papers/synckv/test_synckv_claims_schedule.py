"""SyncKV's schedule: which set is used at which step, and by which heads (claims SK-5 to SK-7, SK-17).

The states run with keys and queries for which the R-head's best prompt token is known at each step. A test named
..._rejects_... shows that a slightly changed statement fails, so the test of the claim itself is not empty.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.kind("claims")

STEPS = 12
DIM = 16


@pytest.fixture(scope="module", params=["reference", "optimized"])
def synckv(request, twins):
    return getattr(twins, request.param).synckv


def state_of(
    synckv: Any, device: Any, stride: int, labels: tuple[int, ...], representatives: tuple[int, ...], **options: bool
) -> Any:
    """A state that selects one token per cluster, and no static ones."""
    config = synckv.SyncKVConfig(
        1, rho=0.0, stride=stride, clusters=len(representatives), max_tokens=64, scale=1.0, **options
    )
    return synckv.SyncKVState(
        config, synckv.HeadClusters(labels, representatives), batch=1, query_heads=len(labels),
        key_value_heads=len(labels), head_dim=DIM, dtype=torch.float32, device=device,
    )


def queries(heads: int, best: dict[int, int], device: Any) -> torch.Tensor:
    """Queries [1, Hq, D] with which each head of `best` prefers that prompt token. The others attend equally to all."""
    made = torch.zeros(1, heads, DIM)
    for head, token in best.items():
        made[0, head, token] = 20
    return made.to(device)


def prompt(state: Any, heads: int, best: dict[int, int], device: Any) -> None:
    """DIM tokens with unit vectors as keys and values, and these preferences of the last one."""
    tokens = torch.eye(DIM).expand(1, heads, DIM, DIM).contiguous().to(device)
    query = torch.zeros(1, heads, DIM, DIM, device=device)
    query[:, :, -1] = queries(heads, best, device)
    state.prefill(query, tokens, tokens)


def step(state: Any, heads: int, best: dict[int, int], device: Any) -> list[list[int]]:
    """A token with zeros as key and value. Returns the prompt tokens that each head attended to."""
    new = torch.zeros(1, heads, DIM, device=device)
    output = state.step(queries(heads, best, device), new, new)
    return [row.nonzero().flatten().tolist() for row in output[0].cpu()]


# ---- SK-5: the schedule ----------------------------------------------------------------------------------------------


def decoded(synckv: Any, device: Any, stride: int, steps: int = STEPS) -> tuple[list[int], list[int]]:
    """The step that selected the token that the other head uses at step t = 1, 2, ..., and the one that it will use
    next, after step t = 0, 1, ... At step t the R-head prefers token t; the prompt is step 0."""
    state = state_of(synckv, device, stride, (0, 0), (0,))
    prompt(state, 2, {0: 0}, device)
    used, held = [], [int(state.chosen)]
    for t in range(1, steps + 1):
        (token,) = step(state, 2, {0: t}, device)[1]
        used.append(token)
        held.append(int(state.chosen))
    return used, held


@pytest.mark.claim("SK-5a")
@pytest.mark.parametrize("stride", [1, 2, 3, 5])
def test_age_of_the_set_is_from_one_to_m(synckv, device, stride):
    used, _ = decoded(synckv, device, stride)
    for t, selected in enumerate(used, start=1):
        assert selected == stride * ((t - 1) // stride)
        assert 1 <= t - selected <= stride
    assert used[:stride] == [0] * stride


@pytest.mark.claim("SK-5a")
def test_age_rejects_a_set_that_is_used_at_once(synckv, device):
    used, _ = decoded(synckv, device, 5, steps=6)
    assert used != [5 * (t // 5) for t in range(1, 7)]
    assert used[4:] == [0, 5]


@pytest.mark.claim("SK-5b")
@pytest.mark.parametrize("stride", [1, 2, 3, 5])
def test_eq_8_holds_up_to_the_end_of_each_interval(synckv, device, stride):
    """Eq. 8 says K_{D, t+1} = K_{D, t} for suspension steps t in (t_A, t_A + m], and eq. 7 updates at t = t_A + m: at
    all multiples of m, and at each step if m = 1. So eq. 8 holds on the open interval. The set *in use* is constant on
    the half-open one."""
    used, held = decoded(synckv, device, stride)
    broken = [t for t in range(1, STEPS + 1) if held[t] != held[t - 1]]
    assert broken == list(range(stride, STEPS + 1, stride))
    for start in range(0, STEPS - stride + 1, stride):
        assert len(set(used[start:start + stride])) == 1
    assert len(set(used)) == -(-STEPS // stride)


# ---- SK-6, SK-7: Algorithm 1 -----------------------------------------------------------------------------------------


@pytest.mark.claim("SK-6a")
def test_heads_attend_to_the_set_of_their_own_group(synckv, device):
    """Heads 0 and 1 represent groups {0, 2} and {1, 3}, and prefer tokens 3 and 4. Line 23 would give both tokens to
    heads 2 and 3."""
    state = state_of(synckv, device, 1, (0, 1, 0, 1), (0, 1))
    prompt(state, 4, {0: 3, 1: 4}, device)
    found = step(state, 4, {}, device)[2:]
    assert found == [[3], [4]] != [[3, 4], [3, 4]]


@pytest.mark.claim("SK-6a")
@pytest.mark.parametrize(
    ("labels", "best", "expected"),
    [((0, 1, 0, 1), {0: 3, 1: 4}, [[3, 4], [3, 4]]), ((0, 0, 0, 0), {0: 3}, [[3], [3], [3]])],
)
def test_line_23_gives_the_sets_of_all_groups_unless_there_is_one(synckv, device, labels, best, expected):
    """The option of line 23. With one group it is what eq. 7 says."""
    found = []
    for union in (True, False):
        state = state_of(synckv, device, 1, labels, tuple(best), union_clusters=union)
        prompt(state, 4, best, device)
        found.append(step(state, 4, {}, device)[len(best):])
    assert found[0] == expected
    assert (found[0] == found[1]) is (len(best) == 1)


@pytest.mark.claim("SK-17")
@pytest.mark.parametrize("clusters", [1, 2, 3])
def test_each_cluster_has_k_tokens_whatever_their_number(synckv, device, clusters):
    """k = 1. The R-head of cluster g prefers token 3 + g."""
    labels = tuple(head % clusters for head in range(6))
    state = state_of(synckv, device, 1, labels, tuple(range(clusters)))
    prompt(state, 6, {g: 3 + g for g in range(clusters)}, device)
    assert step(state, 6, {}, device)[clusters:] == [[3 + labels[head]] for head in range(clusters, 6)]


@pytest.mark.claim("SK-6b")
def test_line_24_has_as_many_keys_as_tokens_and_fewer_values(twins):
    """Attention refuses it; with the selected keys and values, it is what the state does."""
    attend = twins.reference.longflow.decode_attention
    key, value = torch.randn(2, 1, 1, 9, DIM, generator=torch.Generator().manual_seed(0))
    query, chosen = torch.ones(1, 1, DIM), [2, 5]
    with pytest.raises(ValueError, match="value"):
        attend(query, key, value[:, :, chosen], torch.ones(1, 9, dtype=torch.bool))
    result = attend(query, key[:, :, chosen], value[:, :, chosen], torch.ones(1, 2, dtype=torch.bool))
    assert result.output.shape == (1, 1, DIM)


@pytest.mark.claim("SK-7")
def test_anticipation_may_choose_what_the_bank_does_not_hold(synckv, device):
    """The bank holds a prompt of 4 tokens. At step 1, the R-head attends mostly to the new token."""
    key = torch.zeros(1, 1, 5, 16, device=device)
    key[0, 0, :, 0] = torch.tensor([0.0, 1.0, 2.0, 3.0, 9.0])
    query = torch.zeros(1, 1, 16, device=device)
    query[..., 0] = 1
    occupied = torch.ones(1, 5, dtype=torch.bool, device=device)
    none = torch.full((1, 1, 1), -1, device=device)
    chosen = set(synckv.anticipate(query, key, occupied, static=none, k_dynamic=2, scale=1.0).flatten().tolist())
    assert chosen == {3, 4}
    assert not chosen <= set(range(4))


@pytest.mark.claim("SK-7")
@pytest.mark.parametrize("offload", [False, True])
def test_new_tokens_are_attended_to_and_come_into_the_bank(synckv, device, offload):
    """A prompt of tokens 0 to 3, and one of them chosen at each anticipation, after every second step. The R-head
    prefers token 5 at the first one and token 4 at the second one. Between anticipations, the other head attends to the
    new tokens; after one, only to the chosen one. Token 4 is not attended to at step 3, and comes back at step 5."""
    config = synckv.SyncKVConfig(1, rho=0.0, stride=2, clusters=1, max_tokens=12, scale=1.0, offload=offload)
    state = synckv.SyncKVState(
        config, synckv.HeadClusters((0, 0), (0,)), batch=1, query_heads=2, key_value_heads=2, head_dim=DIM,
        dtype=torch.float32, device=device,
    )
    unit = torch.eye(DIM, device=device)
    tokens = unit[:4].expand(1, 2, 4, DIM).contiguous()
    state.prefill(queries(2, {0: 0}, device)[:, :, None].expand(1, 2, 4, DIM).contiguous(), tokens, tokens)
    found = []
    for place, best in enumerate((5, 5, 4, 4, 4), start=4):
        own = unit[place].expand(1, 2, DIM).contiguous()
        output = state.step(queries(2, {0: best}, device), own, own)
        found.append(output[0, 1].nonzero().flatten().tolist())
    assert found == [[0, 4], [0, 4, 5], [5, 6], [5, 6, 7], [4, 8]]
