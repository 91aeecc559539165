"""Algorithm 1 as printed: softmax without a maximum, masks, line 34, the loop (claims LF-12 to 14, 16, 20, 22).

claim_math.algorithm_one is the printed algorithm, in torch's float32 on the CPU. The tests assert its errors. The twins
must be right on the same inputs, within the bounds of bounds.py. (The kernel that the released model imports subtracts
a running maximum; the ledger says where it differs.)
"""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.conformance import stats
from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.cases.oracle import attend
from kvtwin.conformance.judge.bounds import arithmetic, output_error
from kvtwin.conformance.judge.checkers.longflow import log_score_interval
from kvtwin.conformance.papers.claim_math import (
    algorithm_one,
    attention,
    caches,
    lowest,
    many,
    norm1,
    one_head,
    softmax,
    vector,
)

pytestmark = pytest.mark.kind("claims")

INF = math.inf
few = settings(max_examples=max(at_least(5), settings().max_examples // 4))

# One value per slot, with norms 12, 10, 5, 2, 8, 3, 9, 7 in 16 channels of alternating signs. The norms are far apart,
# so that only slot 3 can be the victim of eight equal logits.
NORMS = (12, 10, 5, 2, 8, 3, 9, 7)
VALUES = torch.tensor([[(-1.0) ** d * norm / 16 for d in range(16)] for norm in NORMS])


@pytest.fixture(scope="module", params=["reference", "optimized"])
def longflow(request, twins):
    return getattr(twins, request.param).longflow


def printed(logits: list[float], values: torch.Tensor = VALUES, mask: list[bool] | None = None, **options):
    chosen = None if mask is None else torch.tensor(mask)
    return algorithm_one(torch.tensor(logits), values[: len(logits)], chosen, **options)


def right_victims(case: dict) -> list[int]:
    """The slots that float32 arithmetic may choose: those for which no other slot's score is certainly lower."""
    rank = log_score_interval(attend(**case), arithmetic(torch.float32), per_head=False)
    return (rank.low[0] <= rank.high[0].min()).nonzero()[:, 0].tolist()


def output_is_right(output: torch.Tensor, case: dict) -> bool:
    truth = attend(**case)
    bound = output_error(truth, arithmetic(torch.float32))[:, :, 0]
    return bool(((output.double() - truth.output[:, :, 0]).abs() <= bound).all())


# ---- LF-12: softmax without a running maximum ------------------------------------------------------------------------

# Logits, and a factor for the values, that break Algorithm 1 in different ways.
BREAKING = {
    "one of 89": ([0.0, 1.0, 89.0, 2.0], 1.0),
    "eight of 87": ([87.0] * 8, 0.25),
    "one of 88.5": ([88.5, 0.0, 0.0, 0.0], 16.0),
    "all below -104": ([-105.0, -120.0, -110.0, -130.0], 1.0),
}


def broken(name: str):
    logits, factor = BREAKING[name]
    return printed(logits, factor * VALUES)


@pytest.mark.claim("LF-12a")
def test_algorithm_1_gives_nan_for_a_logit_of_89():
    output, score, victim = broken("one of 89")
    assert output.isnan().all() and score[2].isnan()
    assert victim == 2                                                                 # argmin returns the NaN


@pytest.mark.claim("LF-12a")
def test_algorithm_1_silently_gives_zeros_for_eight_logits_of_87():
    """Each exponential and each contribution is finite, but their sum overflows: finite / inf."""
    output, score, victim = broken("eight of 87")
    assert not output.any() and not score.any()
    assert victim == 0                                                                 # slot 3 has the smallest value


@pytest.mark.claim("LF-12a")
def test_algorithm_1_gives_infinity_for_a_large_value():
    output, _, _ = broken("one of 88.5")
    assert output.isinf().all()


@pytest.mark.claim("LF-12a")
def test_algorithm_1_divides_zero_by_zero_for_low_logits():
    output, score, victim = broken("all below -104")
    assert output.isnan().all() and score.isnan().all() and victim == 0


@pytest.mark.claim("LF-12a")
def test_algorithm_1_is_not_invariant_to_a_shift():
    logits = [0.0, 1.0, -1.0, 2.0]
    output, _, victim = printed(logits)
    assert output.isfinite().all() and victim == 2
    shifted, _, other = printed([logit + 100 for logit in logits])
    assert shifted.isnan().all() and other != victim


@pytest.mark.claim("LF-12a")
def test_algorithm_1_rejects_failing_below_the_limit():
    """exp(s) is finite in float32 up to s = log(largest number), and the sum of n equal logits up to log n less.
    (Logits near 88 are 2^-17 apart, and exp has an error of some units in 2^24. So the tested logits, at least 0.001
    away from the limit, are clearly below or above it.)"""
    limit = math.log(torch.finfo(torch.float32).max)
    assert 88.7 < limit < 88.8
    assert printed([0.0, 1.0, 88.7, 2.0])[0].isfinite().all()
    assert not printed([0.0, 1.0, 88.8, 2.0])[0].isfinite().all()
    below, above = (printed([limit - math.log(8) + step] * 8, VALUES / 16) for step in (-1e-3, 1e-3))
    assert below[0].all() and below[2] == 3
    assert not above[0].any()


@pytest.mark.claim("LF-12b")
@pytest.mark.parametrize("name", BREAKING)
def test_twins_survive_what_breaks_algorithm_1(longflow, device, name):
    logits, factor = BREAKING[name]
    case = one_head(logits, factor * VALUES[: len(logits)], device)
    result = longflow.decode_attention(**case)
    assert output_is_right(result.output, case)
    assert result.slot.tolist() == right_victims(case)                                 # only one slot is right
    assert not output_is_right(result.output * 0.99, case)


@pytest.mark.claim("LF-12b")
@pytest.mark.parametrize("shift", [-1000.0, -100.0, 100.0, 1000.0])
def test_twins_are_invariant_to_a_shift(longflow, device, shift):
    logits = [0.0, 1.0, -1.0, 2.0, 5.0, 7.0]
    plain = longflow.decode_attention(**one_head(logits, VALUES[:6], device))
    case = one_head([logit + shift for logit in logits], VALUES[:6], device)
    shifted = longflow.decode_attention(**case)
    assert plain.slot.tolist() == shifted.slot.tolist() == [2] == right_victims(case)
    assert output_is_right(shifted.output, case) and output_is_right(plain.output, case)


@pytest.mark.claim("LF-12b")
@few
@given(st.lists(st.integers(-80_000, 80_000), min_size=2, max_size=8))
def test_twins_choose_right_up_to_logits_of_ten_thousand(longflow, device, eighths):
    """Logits are multiples of 1/8 up to 1e4, which are exact in float32. All but a few log scores differ by more than
    the bound."""
    case = one_head([eighth / 8 for eighth in eighths], VALUES[: len(eighths)], device)
    result = longflow.decode_attention(**case)
    right = right_victims(case)
    stats.decisions(1, len(right) == 1)
    assert result.slot.item() in right
    assert result.output.isfinite().all() and output_is_right(result.output, case)


# ---- LF-13: the mask -------------------------------------------------------------------------------------------------


@pytest.mark.claim("LF-13a")
def test_algorithm_1_mask_works_for_finite_free_slots_among_tokens_with_scores():
    mask = [True, False, True, False]
    output, score, victim = printed([1.0, 50.0, 2.0, 3.0], mask=mask)
    unmasked, _, _ = printed([1.0, 2.0], VALUES[[0, 2]])
    assert torch.equal(output, unmasked)
    assert score[1] == score[3] == 0 and victim == 1                                   # the first free slot


@pytest.mark.claim("LF-13a")
def test_algorithm_1_mask_rejects_null_values_padding_nan_and_empty_rows():
    null = VALUES.clone()
    null[0] = 0
    assert printed([9.0, 0.0], null, [True, False])[2] == 0                         # a token, although slot 1 is free
    # A slot that is masked as padding, not because it is free, is chosen too.
    assert printed([0.0, 1.0, 2.0], mask=[False, True, True])[2] == 0
    poisoned = VALUES.clone()
    poisoned[1] = math.nan
    assert printed([1.0, 50.0, 2.0], poisoned, [True, False, True])[0].isnan().all()
    assert printed([1.0, 2.0], mask=[False, False])[0].isnan().all()


@pytest.mark.claim("LF-13b")
@few
@given(mask=st.lists(st.booleans(), min_size=2, max_size=8), poison=st.sampled_from([math.nan, INF, -INF, 1e30]))
def test_twins_mask_whatever_lies_in_free_slots(longflow, device, mask, poison):
    case = one_head([float(j % 3) for j in range(len(mask))], VALUES[: len(mask)], device)
    case["occupied"][0] = torch.tensor(mask)
    clean = longflow.decode_attention(**case)
    free = ~case["occupied"][:, None, :, None]
    poisoned = {name: case[name].masked_fill(free, poison) for name in ("key", "value")}
    result = longflow.decode_attention(**{**case, **poisoned})
    assert all(torch.equal(a, b) for a, b in zip(result, clean, strict=True))          # bitwise equal
    assert clean.output.isfinite().all() and (clean.score[~case["occupied"]] == -INF).all()
    if not all(mask):
        assert result.slot.tolist() == [mask.index(False)]
    if not any(mask):
        assert not result.output.any()


@pytest.mark.claim("LF-13b")
def test_twins_mask_rejects_poison_in_occupied_slots_and_takes_free_slots_first(longflow, device):
    case = one_head([0.0, 1.0, 2.0], VALUES[:3], device)
    poisoned = case["value"].clone()
    poisoned[0, 0, 1] = math.nan
    assert longflow.decode_attention(**{**case, "value": poisoned}).output.isnan().any()
    null = VALUES[:3].clone()
    null[0] = 0
    case = one_head([0.0, 1.0, 2.0], null, device)
    assert longflow.decode_attention(**case).slot.tolist() == [0]                      # the zero value, if none is free
    case["occupied"][0, 2] = False
    assert longflow.decode_attention(**case).slot.tolist() == [2]


# ---- LF-14: line 34 --------------------------------------------------------------------------------------------------


@pytest.mark.claim("LF-14a")
@many
@given(caches())
def test_normalising_keeps_the_victim(cache):
    mass, values = cache
    products = [m * norm1(v) for m, v in zip(mass, values, strict=True)]
    scores = [w * norm1(v) for w, v in zip(softmax(mass), values, strict=True)]
    assert lowest(products) == lowest(scores)
    if len(set(products)) > 1:
        assert lowest(products) != lowest(-product for product in products)            # a negative factor would not


# Rounding to float32 is a step function. If S has a larger mantissa than l, the quotients S / l of N neighbouring S
# have only N / m distinct values, where 1 <= m < 2 is the mantissa of l: quotients of neighbours are 1 / m of a step
# apart.
NEIGHBOURS = (torch.tensor(1.5).view(torch.int32) + torch.arange(4096, dtype=torch.int32)).view(torch.float32)


def first_merged(bits: list[int]) -> int:
    return next(j for j, (a, b) in enumerate(pairwise(bits)) if a == b)


@pytest.mark.claim("LF-14b")
@pytest.mark.parametrize(
    ("total", "mantissa"), [(320.0, Fraction(5, 4)), (332.5, Fraction(665, 512)), (3.0, Fraction(3, 2))]
)
def test_line_34_merges_neighbouring_scores(total, mantissa):
    quotient = NEIGHBOURS / torch.tensor(total)
    bits = quotient.view(torch.int32).tolist()
    steps = Fraction(len(bits) - 1) / mantissa
    assert len(set(bits)) == bits[-1] - bits[0] + 1                                    # each value in between occurs
    assert abs(bits[-1] - bits[0] - steps) < 1                                         # rounding at both ends
    merged = first_merged(bits)
    pair = NEIGHBOURS[[merged + 1, merged]]
    assert pair.argmin() == 1 and (pair / total).argmin() == 0


@pytest.mark.claim("LF-14b")
def test_line_34_rejects_merging_for_powers_of_two():
    assert len(set((NEIGHBOURS / 256.0).tolist())) == len(NEIGHBOURS)


@pytest.mark.claim("LF-14b")
def test_line_34_makes_algorithm_1_evict_the_wrong_token():
    """The scores of slots 0 and 1 are exp(0) times neighbouring numbers. The masses below give l = 320."""
    total = torch.tensor(320.0)
    bits = (NEIGHBOURS / total).view(torch.int32).tolist()
    merged = first_merged(bits)
    values = torch.tensor([[NEIGHBOURS[merged + 1]], [NEIGHBOURS[merged]], *[[9.0]] * 318])
    logits = [0.0] * 320
    assert printed(logits, values)[2] == 0
    assert printed(logits, values, normalise=False)[2] == 1


@pytest.mark.claim("LF-14c")
@pytest.mark.parametrize("factor", [2.0**-20, 1.0, 3.0, 2.0**20])
def test_twins_victim_survives_scaling_all_values(longflow, device, factor):
    case = one_head([0.5, -1.0, 2.0, 1.5, 0.0, 0.25, 3.0, 1.0], factor * VALUES, device)
    assert longflow.decode_attention(**case).slot.tolist() == right_victims(case) == [1]
    case["value"][0, 0, 1] *= 2                                                   # scaling only one value may change it
    assert longflow.decode_attention(**case).slot.tolist() == right_victims(case) == [5]


# ---- LF-16: line 11 --------------------------------------------------------------------------------------------------


def visits(starts: list[int], block: int, tokens: range) -> Counter[int]:
    """The number of times that blocks [j, j + block) read each token (line 13)."""
    return Counter(index for start in starts for index in range(start, start + block) if index in tokens)


@pytest.mark.claim("LF-16a")
@pytest.mark.parametrize("block", [2, 3, 16, 64])
def test_printed_loop_reads_a_token_twice(block):
    count = 3 * block + 1
    printed = [1, *range(block, count, block)]                                         # 1, B, 2B, ...
    for first in (0, 1):                                                               # tokens counted from 0 or from 1
        seen = visits(printed, block, range(first, first + count))
        assert seen[block] == 2
        assert seen[0] == 0                                                            # the first, if counted from 0
        assert all(seen[index] == 1 for index in range(block + 1, count))
    overlapping = [1, *range(block, count, block - 1)]                                 # another reading: steps of B - 1
    assert visits(overlapping, block, range(1, count + 1))[block] == 2


@pytest.mark.claim("LF-16a")
def test_printed_loop_changes_the_output():
    mass, values = vector(1, 1, 1, 1), [vector(x) for x in (8, 4, 2, 1)]
    seen = visits([1, 2], 2, range(4))
    twice = [m * seen[j] for j, m in enumerate(mass)]
    assert attention(twice, values) == vector(Fraction(9, 4)) != attention(mass, values)


@pytest.mark.claim("LF-16b")
@given(block=st.integers(1, 70), count=st.integers(1, 200))
def test_loop_from_zero_reads_every_token_once(block, count):
    tokens = range(count)
    assert visits(list(range(0, count, block)), block, tokens) == Counter(tokens)
    if count > 1:
        assert visits(list(range(1, count, block)), block, tokens) != Counter(tokens)


# ---- LF-20: which tokens are attended to -----------------------------------------------------------------------------


@pytest.mark.claim("LF-20a")
@pytest.mark.parametrize("t", [2, 7])
def test_equations_and_kernel_attend_to_different_tokens(longflow, device, t):
    """At step t, eq. 4 sums over j = 0..t. D.1, which is written for step t + 1, sums over j = 1..t, so at step t over
    j = 1..t - 1. Algorithm 1 has t - 1 rows. That is read, not computed. The test is about the states, which do what
    eq. 4 and figure 2 say: they write the current token and attend to all."""
    sets = {"eq. 4": range(t + 1), "D.1 and Algorithm 1": range(1, t), "the history": range(t)}
    logits = [float(j) for j in range(t + 1)]
    cases = {name: one_head([logits[j] for j in rows], VALUES[list(rows)], device) for name, rows in sets.items()}
    state = longflow.LongFlowState(
        longflow.LongFlowConfig(budget=t + 1, scale=1.0), batch=1, query_heads=1, key_value_heads=1, head_dim=16,
        dtype=torch.float32, device=device,
    )
    whole = cases["eq. 4"]
    for j in range(t + 1):
        output = state.step(whole["query"], whole["key"][:, :, j], whole["value"][:, :, j])
    assert [name for name, case in cases.items() if output_is_right(output, case)] == ["eq. 4"]


@pytest.mark.claim("LF-20b")
def test_twins_attend_to_the_newest_token(longflow, device):
    config = longflow.LongFlowConfig(budget=3)
    state = longflow.LongFlowState(
        config, batch=1, query_heads=1, key_value_heads=1, head_dim=16, dtype=torch.float32, device=device
    )
    query = torch.zeros(1, 1, 16, device=device)                                       # logits of 0: equal weights
    for step in range(5):
        output = state.step(query, query, VALUES[step][None, None].to(device))
        alive = state.positions[0].sort().values
        alive = alive[alive >= 0].cpu()
        assert alive[-1] == step
        case = one_head([0.0] * len(alive), VALUES[alive], device)
        assert output_is_right(output, case)
        if step:
            stale = one_head([0.0] * (len(alive) - 1), VALUES[alive[:-1]], device)
            assert not output_is_right(output, stale)                                  # without the newest


# ---- LF-22: one pass -------------------------------------------------------------------------------------------------


class Read:
    """A tensor that counts how often each row is read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.reads = tensor, Counter()

    def __getitem__(self, rows: slice) -> torch.Tensor:
        self.reads.update(range(len(self.tensor))[rows])
        return self.tensor[rows]

    def __getattr__(self, name: str):
        return getattr(self.tensor, name)


@pytest.mark.claim("LF-22")
@pytest.mark.parametrize("block", [1, 3, 4, 8])
def test_algorithm_1_reads_each_key_and_value_once(block):
    """The output and the evicted token are those of attention that computes all logits before the softmax."""
    logits, values = Read(torch.tensor([0.5, -1.0, 2.0, 1.5, 0.0, 0.25, 3.0, 1.0])), Read(VALUES)
    output, _, victim = algorithm_one(logits, values, block=block)
    assert logits.reads == values.reads == Counter(range(8))
    case = one_head(logits.tensor.tolist(), VALUES, torch.device("cpu"))
    assert output_is_right(output[None, None], case)
    assert right_victims(case) == [victim] == [1]


@pytest.mark.claim("LF-22")
def test_one_pass_rejects_a_running_maximum_without_rescaling():
    """Scores with the maximum so far, stored and not rescaled, choose another token. So a pass with a running maximum
    needs more than Algorithm 1 stores, or, as in the released kernel, a second pass."""
    logits = torch.arange(8.0)
    stored = (logits - logits.cummax(0).values).exp() * VALUES.abs().sum(1)
    case = one_head(logits.tolist(), VALUES, torch.device("cpu"))
    assert int(stored.argmin()) == 3 and right_victims(case) == [0] == [printed(logits.tolist())[2]]
