"""LongFlow where only one answer is right: ties, norms, NaN, and everything that reset and reorder must include.

Both sides are tested. In other tests the judge orders ties, so only these tests check the reference's own order.
"""

from __future__ import annotations

import pytest
import torch

from kvtwin.conformance.judge.compare import assert_same

pytestmark = [pytest.mark.kind("laws"), pytest.mark.parametrize("side", ("reference", "optimized"))]

NAN = float("nan")
SLOTS, HEAD_DIM = 40, 16


def full_cache(device, seed: int) -> dict[str, torch.Tensor]:
    """Two KV heads with two query heads each, and more slots than a block, all occupied."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(1, 4, HEAD_DIM, generator=generator)
    key, value = torch.randn(2, 1, 2, SLOTS, HEAD_DIM, generator=generator)
    return {
        "query": query.to(device), "key": key.to(device), "value": value.to(device),
        "occupied": torch.ones(1, SLOTS, dtype=torch.bool, device=device),
    }


def mask(device, *slots: int) -> torch.Tensor:
    """A bool mask [1, S], True at these slots."""
    index = torch.arange(SLOTS, device=device)
    return torch.isin(index, torch.tensor(slots, device=device))[None]


@pytest.mark.property("ties")
def test_longflow_takes_the_lowest_of_equal_tokens(side, twins, device):
    decode = getattr(twins, side).longflow.decode_attention
    case = full_cache(device, 0)
    equal = {name: case[name][:, :, :1].expand_as(case[name]) for name in ("key", "value")}
    assert decode(**{**case, **equal}).slot.tolist() == [0]
    assert decode(**{**case, **equal}, protected=mask(device, 0, 1, 2, 4)).slot.tolist() == [3]
    case["value"][:, :, [7, 19, 36]] *= 0
    assert decode(**case).slot.tolist() == [7]
    assert decode(**case, protected=mask(device, 7)).slot.tolist() == [19]
    assert decode(**case, protected=mask(device, 7, 19)).slot.tolist() == [36]


@pytest.mark.parametrize(("heads", "group"), [(1, 5), (2, 3), (3, 4)])
def test_longflow_ranks_equal_tokens_alike_in_the_last_slots(side, heads, group, twins, device):
    """The sum over heads must not depend on the slot. Each of 16 rows has two equal tokens, one in the last slots."""
    decode = getattr(twins, side).longflow.decode_attention
    for slots in (SLOTS + 3, SLOTS + 4):
        generator = torch.Generator().manual_seed(slots)
        query = torch.randn(16, heads * group, HEAD_DIM, generator=generator)
        key, value = torch.randn(2, 16, heads, slots, HEAD_DIM, generator=generator)
        value[:, :, 5] /= 64
        for tensor in (key, value):
            tensor[:, :, -2] = tensor[:, :, 5]
        occupied = torch.ones(16, slots, dtype=torch.bool)
        query, key, value, occupied = (tensor.to(device) for tensor in (query, key, value, occupied))
        assert decode(query, key, value, occupied).slot.tolist() == [5] * 16
        if side == "reference":  # which is also the oracle
            assert decode(query.double(), key.double(), value.double(), occupied).slot.tolist() == [5] * 16


@pytest.mark.property("decisions")
def test_longflow_ranks_by_the_1_norm(side, twins, device):
    """Two tokens have equal keys. The value with a single 1.5 has a smaller 1-norm, but a larger 2-norm, than the value
    with sixteen times 0.1."""
    decode = getattr(twins, side).longflow.decode_attention
    case = full_cache(device, 0)
    case["key"] = case["key"][:, :, :1].expand_as(case["key"])
    case["value"][...] = 1.0
    case["value"][:, :, 5] = 0.1
    case["value"][:, :, 35] = 0.0
    case["value"][:, :, 35, 3] = -1.5
    assert decode(**case).slot.tolist() == [35]
    assert decode(**case, protected=mask(device, 35)).slot.tolist() == [5]


@pytest.mark.parametrize("slot", [7, SLOTS - 1])
@pytest.mark.parametrize("number", [NAN, -NAN], ids=["nan", "minus_nan"])
def test_longflow_evicts_a_token_whose_score_is_nan(number, slot, side, twins, device):
    """A NaN score of either sign ranks lowest, unless the token is protected."""
    decode = getattr(twins, side).longflow.decode_attention
    case = full_cache(device, slot)
    case["value"][0, :, slot] *= 100  # by its score it would be evicted last
    case["value"][0, 1, slot, 3] = number
    result = decode(**case)
    assert bool(result.score[0, slot].isnan())
    assert result.slot.tolist() == [slot]
    finite = {**case, "value": case["value"].nan_to_num(), "protected": mask(device, slot)}
    protected = decode(**case, protected=mask(device, slot)).slot
    assert_same(protected, decode(**finite).slot, what="the slot if the NaN is protected")


def test_longflow_takes_the_lowest_slot_where_all_scores_are_nan(side, twins, device):
    """A NaN in one key makes all weights of its row NaN."""
    decode = getattr(twins, side).longflow.decode_attention
    case = full_cache(device, 0)
    case["key"][0, 0, 20] = NAN
    assert decode(**case).slot.tolist() == [0]
    case["occupied"][0, 9] = False
    assert decode(**case).slot.tolist() == [9], "free slots must be chosen first"


# A state with two rows, of which the second is padded -----------------------------------------------------------------


def a_state(side, twins, device, **config):
    module = getattr(twins, side).longflow
    return module.LongFlowState(
        module.LongFlowConfig(5, sinks=2, **config), batch=2, query_heads=4, key_value_heads=2, head_dim=HEAD_DIM,
        dtype=torch.float32, device=device,
    )


def tokens(device, count: int, seed: int) -> list[tuple[torch.Tensor, ...]]:
    """Some tokens (query, key, value). Every other one has a small value, so it is evicted at once unless protected."""
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for number in range(count):
        query, key, value = (torch.randn(2, heads, HEAD_DIM, generator=generator).to(device) for heads in (4, 2, 2))
        drawn.append((query, key, value * (1.0 if number % 2 else 1e-3)))
    return drawn


def fill(state, device) -> None:
    """A prompt of 8 tokens, of which 5 are padding in the second row, and steps."""
    query, key, value = (torch.stack(part, 2) for part in zip(*tokens(device, 8, seed=1), strict=True))
    occupied = torch.ones(2, 8, dtype=torch.bool, device=device)
    occupied[1, :5] = False
    state.prefill(query, key, value, occupied)
    for token in tokens(device, 3, seed=4):
        state.step(*token)


def shown(state) -> dict[str, torch.Tensor]:
    return {name: getattr(state, name).clone() for name in ("occupied", "positions", "next_slot", "score")}


def assert_goes_on_like(state, other, steps, rows=slice(None)) -> None:
    """Assert that both states are equal, now and after each step. `rows`: the rows of `other` that `state` has."""
    for number in range(len(steps) + 1):
        assert state.tokens_seen == other.tokens_seen
        expected = shown(other)
        for name, ours in shown(state).items():
            assert_same(ours, expected[name][rows], what=f"{name} after {number} steps")
        if number < len(steps):
            output = other.step(*steps[number])
            assert_same(state.step(*(part[rows] for part in steps[number])), output[rows], what=f"output {number}")


@pytest.mark.property("state")
@pytest.mark.parametrize("per_head", [False, True], ids=["shared", "per_head"])
def test_longflow_reset_and_reorder_cover_the_whole_state(per_head, side, twins, device):
    """In a padded row, the sinks end at another position. So reset must clear this position, and reorder must move
    it."""
    later = tokens(device, 5, seed=3)
    state, other = (a_state(side, twins, device, per_head=per_head) for _ in range(2))
    fill(state, device)
    fill(other, device)
    for name, tensor in shown(state).items():
        assert name == "occupied" or bool((tensor[0] != tensor[1]).any()), f"{name} must differ between the rows"
    swap = torch.tensor([1, 0], device=device)
    state.reorder(swap)
    assert_goes_on_like(state, other, later, rows=swap)
    state.reset()
    assert_goes_on_like(state, a_state(side, twins, device, per_head=per_head), later)


@pytest.mark.property("state", slots="fixed")
def test_longflow_fills_free_slots_in_order(side, twins, device):
    """A prompt leaves several slots free, and its padding occupies none. All free slots are filled in order before
    anything is evicted."""
    module = getattr(twins, side).longflow
    state = module.LongFlowState(
        module.LongFlowConfig(7), batch=2, query_heads=4, key_value_heads=2, head_dim=HEAD_DIM, dtype=torch.float32,
        device=device,
    )
    query, key, value = (torch.stack(part, 2) for part in zip(*tokens(device, 4, seed=1), strict=True))
    occupied = torch.tensor([[True, True, True, True], [False, False, True, True]], device=device)
    state.prefill(query, key, value, occupied)
    assert state.occupied.sum(-1).tolist() == [4, 2]
    assert [sorted(row)[-4:] for row in state.positions.tolist()] == [[0, 1, 2, 3], [-1, -1, 2, 3]]
    for number, token in enumerate(tokens(device, 3, seed=2)):
        free = [row.index(False) for row in state.occupied.tolist()]
        assert state.next_slot.tolist() == free
        state.step(*token)
        assert state.positions.gather(1, torch.tensor(free, device=device)[:, None]).tolist() == [[4 + number]] * 2
