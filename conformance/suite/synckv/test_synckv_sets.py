"""SyncKV's index sets under test: those that the prompt's last token chooses, and those of an anticipation."""

from __future__ import annotations

import dataclasses
import math
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings

from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.cases.layouts import MIXED
from kvtwin.conformance.cases.synckv_cases import SetsCase, sets_cases
from kvtwin.conformance.judge.checkers import synckv as judge
from kvtwin.conformance.judge.compare import assert_same

pytestmark = pytest.mark.kind("equivalence")

SIDES = pytest.mark.parametrize("side", ("reference", "optimized"))
some = settings(max_examples=max(at_least(4), settings().max_examples // 3))
few = settings(max_examples=max(2, settings().max_examples // 8))


def module_of(twins, side):
    return getattr(twins, side).synckv


def aimed(logits, device, *, group: int = 1):
    """query, key and occupied that have these logits [rows][group][tokens], in float32 with scale 1: one row with one
    KV head per list."""
    table = torch.tensor(logits, dtype=torch.float32)
    table = table[:, None] if table.dim() == 2 else table
    rows, group, tokens = table.shape
    query = torch.zeros(rows, group, 16)
    query[:, range(group), range(group)] = 1
    key = torch.zeros(rows, 1, tokens, 16)
    key[:, 0, :, :group] = table.transpose(1, 2)
    occupied = torch.ones(rows, tokens, dtype=torch.bool)
    return {"query": query.to(device), "key": key.to(device), "occupied": occupied.to(device), "scale": 1.0}


def initial(twins, side, *, k: int, rho: float = 0.5, **inputs):
    """`initial_sets` with the budget split by `split_budget`."""
    return module_of(twins, side).initial_sets(**inputs, **dict(zip(
        ("k_static", "k_dynamic"), module_of(twins, side).split_budget(k, rho), strict=True
    )))


def sets(result):
    return [result.static[:, 0].tolist(), result.dynamic[:, 0].tolist()]


# Against float64 -----------------------------------------------------------------------------------------------------


@given(case=sets_cases())
@some
def test_initial_sets_are_what_float64_would_choose(case, twins):
    """For any shape, dtype, layout, mask and content, with poisoned free slots."""
    judge.assert_initial_right(twins.optimized.synckv.initial_sets(**case.inputs), case)


@given(case=sets_cases())
@some
def test_anticipation_is_what_float64_would_choose(case, twins):
    judge.assert_anticipation_right(twins.optimized.synckv.anticipate(**case.step_inputs), case)


@pytest.mark.property("layouts")
@given(case=sets_cases(layout=(MIXED,), content=("ordinary",), slots=(12, 20)))
@settings(max_examples=2)
def test_sets_of_arguments_with_different_strides(case, twins):
    """Two rows and two heads, since strides of an axis of length 1 do not matter, and free slots."""
    case = dataclasses.replace(case, batch=2, key_value_heads=2, occupancy="random", k=5)
    judge.assert_initial_right(twins.optimized.synckv.initial_sets(**case.inputs), case)
    judge.assert_anticipation_right(twins.optimized.synckv.anticipate(**case.step_inputs), case)


@pytest.mark.property("decisions")
@pytest.mark.parametrize("seed", range(2))
def test_sets_of_groups_whose_heads_weigh_differently(seed, twins, device):
    """Logits with a standard deviation of 4 over several tiles, so that the heads of a group have different
    denominators."""
    case = SetsCase(group=5, slots=46, occupancy="random", scale=1.0, seed=seed, k=9, taken=4, device=str(device))
    judge.assert_anticipation_right(twins.optimized.synckv.anticipate(**case.step_inputs), case)


@given(case=sets_cases(content=("ordinary", "duplicates"), slots=(8, 48)))
@few
def test_sets_of_the_reference_in_float32_are_right_too(case, twins):
    def single(inputs):
        return {name: value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
                for name, value in inputs.items()}

    judge.assert_initial_right(twins.reference.synckv.initial_sets(**single(case.inputs)), case)
    judge.assert_anticipation_right(twins.reference.synckv.anticipate(**single(case.step_inputs)), case)


@pytest.mark.property("layouts")
@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (1, 2), (2, 1)])
def test_sets_of_keys_beyond_two_to_the_31_elements(batch, heads, twins, device):
    """The last slot, head or row."""
    case = SetsCase(
        batch=batch, key_value_heads=heads, slots=5, k=2, dtype=torch.bfloat16, layout="far", seed=1, device=str(device)
    )
    judge.assert_anticipation_right(twins.optimized.synckv.anticipate(**case.step_inputs), case)


# Exact results -------------------------------------------------------------------------------------------------------


@pytest.mark.property("decisions")
@SIDES
def test_every_order_of_three_tokens(side, twins, device):
    """All rankings with k = 2. The best token is static, the second one dynamic. An anticipation with that static set
    and k_dynamic = 3 chooses the other two, and ends with -1."""
    ranks = list(permutations(range(3)))
    # The token of rank 0 has the highest logit.
    inputs = aimed([[-float(rank.index(token)) for token in range(3)] for rank in ranks], device)
    found = initial(twins, side, **inputs, k=2, rho=0.5)
    assert sets(found) == [[[rank[0]] for rank in ranks], [[rank[1]] for rank in ranks]]
    again = module_of(twins, side).anticipate(**inputs, static=found.static, k_dynamic=3)
    assert again[:, 0].tolist() == [[*sorted(rank[1:]), -1] for rank in ranks]


@pytest.mark.property("ties")
@SIDES
def test_equal_tokens_go_by_the_lowest_index(side, twins, device):
    """70 equal tokens: more than one program or tile processes."""
    inputs = aimed([[1.0] * 70], device)
    found = initial(twins, side, **inputs, k=41, rho=0.9)
    assert sets(found) == [[list(range(37))], [list(range(37, 41))]]
    chosen = module_of(twins, side).anticipate(**inputs, static=found.dynamic, k_dynamic=39)
    assert chosen[0, 0].tolist() == [*range(37), 41, 42]


@pytest.mark.property("free_slots")
@SIDES
def test_sets_end_with_minus_one_where_tokens_are_few(side, twins, device):
    """With no token, one token, and three of five. The static part is filled first. Free slots hold NaN."""
    inputs = aimed([[3.0, 1.0, 4.0, 1.5, 9.0]] * 3, device)
    inputs["occupied"] = torch.tensor([[0, 0, 0, 0, 0], [0, 1, 0, 0, 0], [1, 0, 1, 1, 0]], device=device).bool()
    inputs["key"] = inputs["key"].masked_fill(~inputs["occupied"][:, None, :, None], math.nan)
    found = initial(twins, side, **inputs, k=7, rho=0.25)
    assert sets(found) == [
        [[-1, -1], [1, -1], [0, 2]], [[-1] * 5, [-1] * 5, [3, -1, -1, -1, -1]]
    ]
    assert module_of(twins, side).anticipate(**inputs, static=found.static, k_dynamic=2)[:, 0].tolist() == [
        [-1, -1], [-1, -1], [3, -1]
    ]


@pytest.mark.property("decisions")
@SIDES
@pytest.mark.parametrize(("rho", "static", "dynamic"), [(0.0, [], [0, 2]), (1.0, [0, 2], [])])
def test_one_of_the_sets_may_be_empty(side, rho, static, dynamic, twins, device):
    inputs = aimed([[3.0, 1.0, 4.0]], device)
    found = initial(twins, side, **inputs, k=2, rho=rho)
    assert sets(found) == [[static], [dynamic]]
    assert module_of(twins, side).anticipate(**inputs, static=found.static, k_dynamic=0).shape == (1, 1, 0)


@pytest.mark.property("decisions")
@SIDES
def test_a_group_chooses_by_its_largest_weight(side, twins, device):
    """The largest weight, not the largest logit: the second head's logits are all larger, but its weight is spread over
    four tokens. The mean, or logits, or free slots with a logit of 0 would choose other tokens."""
    first = [-40.0, -41.0, -70.0, -70.0, -70.0, -70.0, math.nan]
    second = [60.0, 20.0, 100.0, 100.0, 100.0, 100.0, math.nan]
    inputs = aimed([[first, second]], device)
    inputs["occupied"][:, 6] = False
    # Log-weights: -0.31 and -1.31 for the first head, -1.39 four times for the second.
    assert sets(initial(twins, side, **inputs, k=3, rho=0.67)) == [[[0, 1, 2]], [[]]]
    assert sets(initial(twins, side, **inputs, k=2, rho=0.5)) == [[[0]], [[1]]]


@pytest.mark.property("extreme_numbers")
@SIDES
def test_weights_that_vanish_are_still_ranked(side, twins, device):
    """64 logits over a range of 200: half of the weights are 0 in float32."""
    logits = torch.linspace(-100, 100, 64)[torch.randperm(64, generator=torch.Generator().manual_seed(1))]
    assert int((logits.softmax(-1) > 0).sum()) < 40
    found = initial(twins, side, **aimed([logits.tolist()], device), k=48)
    expected = set(logits.argsort(descending=True)[:48].tolist())
    assert set(found.static.flatten().tolist() + found.dynamic.flatten().tolist()) == expected


@pytest.mark.property("decisions")
@SIDES
def test_eq_6_as_printed_chooses_static_tokens_again(side, twins, device):
    inputs = aimed([[5.0, 4.0, 3.0, 2.0]], device)
    static = torch.tensor([[[0, 1]]], device=device)
    call = module_of(twins, side).anticipate
    assert call(**inputs, static=static, k_dynamic=2, exclude_static=False).tolist() == [[[0, 1]]]
    assert call(**inputs, static=static, k_dynamic=2).tolist() == [[[2, 3]]]


@given(case=sets_cases(slots=(2, 40)))
@few
def test_sets_of_a_row_do_not_depend_on_other_rows(case, twins):
    """The sets do not change in a second launch, or when every other row has opposite logits."""
    call = twins.optimized.synckv.anticipate
    plain = call(**case.step_inputs)
    assert_same(call(**case.step_inputs), plain, what="dynamic, again")
    others = case.query.clone()
    others[:-1] = -others[:-1]
    assert_same(call(**{**case.step_inputs, "query": others})[-1:], plain[-1:], what="dynamic of the row that stayed")


@SIDES
def test_the_first_set_is_the_split_of_the_k_best(side, twins, device):
    """Eq. 4: static and dynamic together equal the static set for k_static = k."""
    generator = torch.Generator().manual_seed(4)
    query, key = torch.randn(1, 4, 32, generator=generator), torch.randn(1, 2, 30, 32, generator=generator)
    inputs = {"query": query.to(device), "key": key.to(device),
              "occupied": torch.ones(1, 30, dtype=torch.bool, device=device)}
    whole = initial(twins, side, **inputs, k=11, rho=1.0).static
    parts = initial(twins, side, **inputs, k=11, rho=0.3)
    assert parts.static.shape[-1] == 4
    assert_same(torch.cat(parts, -1).sort(-1).values, whole, what="static and dynamic")


# Budgets -------------------------------------------------------------------------------------------------------------


@pytest.mark.property("decisions")
@SIDES
def test_budgets_are_exact(side, twins):
    """For every rho of two decimals, against integers: ceil(hundredths k / 100), and the rest."""
    split = module_of(twins, side).split_budget
    for hundredths in range(101):
        for k in (*range(1, 24), 100, 999, 131072):
            static = -(-hundredths * k // 100)
            assert split(k, hundredths / 100) == (static, k - static), (k, hundredths)


@pytest.mark.property("decisions")
@SIDES
@pytest.mark.parametrize(("k", "rho", "static"), [
    (10, 0.9, 9), (10, 0.1, 1), (3, 0, 0), (3, 1, 3), (7, 1e-20, 1), (10**9, 1e-9, 1), (10**9 + 1, 1e-9, 2),
    (3, 1 / 3, 1), (3, 2 / 3, 2), (10**17, 0.1 + 0.2, 30000000000000004),
])
def test_a_ratio_is_the_decimal_number_that_it_prints_as(side, k, rho, static, twins):
    assert module_of(twins, side).split_budget(k, rho) == (static, k - static)
