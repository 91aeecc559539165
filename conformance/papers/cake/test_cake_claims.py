"""What CAKE's ledger states: the end of a cascade, the total of budgets and of memory, and what preferences decide.

A test named ..._rejects_... shows that a slightly changed statement fails, so that the test of the claim is not empty.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.judge.compare import assert_same
from kvtwin.reference.baselines import cake_prompt as rules

pytestmark = pytest.mark.kind("claims")

WINDOW = 2


@pytest.fixture(params=["reference", "optimized"])
def cake(request, twins) -> Any:
    return getattr(twins, request.param).baselines.cake


def log_of(preferences: list[list[float]], device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor(preferences, dtype=torch.float64, device=device).log()


def granted(cake: Any, preferences: list[float], prefix: int, total: int, device: torch.device) -> list[int]:
    """The budgets of one row."""
    found = cake.budgets(log_of([preferences], device), torch.tensor([prefix], device=device), total)
    return [int(one) for one in found[0]]


# The cascade ---------------------------------------------------------------------------------------------------------


def cascades() -> list[tuple[list[Tensor], Tensor, Tensor, int]]:
    """Arguments of `cascade`: five layers, with equal scores among them."""
    made = []
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        scores = [torch.randint(6, (2, 2, 20), generator=generator).double() for _ in range(5)]
        for score in scores:
            score[..., 20 - WINDOW:] = torch.inf
        log = torch.randn(2, 5, generator=generator, dtype=torch.float64)
        made.append((scores, log, torch.tensor([20 - WINDOW] * 2), 25))
    return made


def budgets_over_time(log: Tensor, prefix: Tensor, total: int) -> list[list[Tensor]]:
    """Of each layer, its budgets [B] after its own prompt and those that follow."""
    count = log.shape[1]
    after = [rules.budgets(log[:, :last + 1], prefix, total) for last in range(count)]
    return [[after[last][:, layer] for last in range(layer, count)] for layer in range(count)]


@pytest.mark.claim("CK-1")
def test_the_cascade_ends_with_the_best_tokens_of_the_smallest_budget():
    for scores, *rest in cascades():
        for score, of_layer, holds in zip(scores, budgets_over_time(*rest), rules.cascade(scores, *rest), strict=True):
            smallest = torch.stack(of_layer).amin(0)
            assert_same(holds, rules.kept(score, smallest), what="tokens")


@pytest.mark.claim("CK-1")
def test_the_cascade_rejects_the_last_budget():
    """A budget that grows again brings no token back."""
    log, prefix, score = log_of([[6.0, 1.0, 1.0]]), torch.tensor([8]), torch.arange(10.0)[None, None]
    score = score.masked_fill(score >= 8, torch.inf)
    holds = rules.cascade([score] * 3, log, prefix, 6)[1]
    last = rules.budgets(log, prefix, 6)[:, 1]
    assert holds.sum() == WINDOW and rules.kept(score, last).sum() == WINDOW + 1


# Totals --------------------------------------------------------------------------------------------------------------


def many() -> list[tuple[list[float], int, int]]:
    """Preferences, tokens before the window, and totals."""
    return [
        (list(preferences), prefix, total)
        for preferences in itertools.product((1.0, 2.0, 5.0, 9.0), repeat=3)
        for prefix in (3, 4, 8, 30) for total in (5, 12, 31)
    ]


@pytest.mark.claim("CK-2a")
def test_budgets_add_up_to_the_total_at_most(cake, device):
    for preferences, prefix, total in many()[::1 if device.type == "cpu" else 7]:
        found = granted(cake, preferences, prefix, total, device)
        assert sum(found) <= total and min(found) >= 0 and max(found) <= prefix


@pytest.mark.claim("CK-2a")
def test_the_total_rejects_rounded_shares():
    """17 equal layers and a total of 10: each share is 0.59. Rounded up, it makes 17, and one pass takes none away,
    since no layer has more than one token."""
    wanted, prefix = torch.ones(1, 17, dtype=torch.int64), torch.tensor([30])
    assert rules.divide(wanted, prefix, 10).sum() == 17
    assert rules.divide(torch.zeros_like(wanted), prefix, 10).sum() == 10


def prompts(cake: Any, device: torch.device, count: int, layers: int = 3) -> list[int]:
    """The most tokens per KV head that all layers hold while the last of them gets its prompt, and after it."""
    config = cake.CAKEConfig(6, window=WINDOW, kernel_size=1)
    cascade = cake.CAKECascade(config, layers=layers, batch=1, device=device)
    states, held = [], []
    for layer in range(layers):
        states.append(cake.CAKEState(
            config, batch=1, query_heads=2, key_value_heads=1, head_dim=16, dtype=torch.float32, device=device,
            cascade=cascade, layer=layer,
        ))
        before = sum(int(state.occupied.sum()) for state in states)
        generator = torch.Generator().manual_seed(layer)
        tokens = [torch.randn(1, heads, count, 16, generator=generator).to(device) for heads in (2, 1, 1)]
        states[-1].prefill(tokens[0] * (0.2, 1.0, 0.5)[layer], *tokens[1:])
        held += [before + count, sum(int(state.occupied.sum()) for state in states)]
    return held


@pytest.mark.claim("CK-2b")
def test_layers_hold_the_total_and_one_prompt_at_most(cake, device):
    held = prompts(cake, device, 24)
    most = 3 * 4 + 3 * WINDOW
    assert max(held) <= most + 24 and max(held[1::2]) == held[-1] == most


@pytest.mark.claim("CK-2b")
def test_the_memory_rejects_short_prompts(cake, device):
    assert prompts(cake, device, 8)[-1] == 24 > 3 * 4 + 3 * WINDOW


@pytest.mark.claim("CK-3")
def test_one_pass_can_leave_a_part_of_the_total(cake, device):
    assert granted(cake, [2.0, 1.0, 5.0], 4, 12, device) == [4, 3, 4]


@pytest.mark.claim("CK-3")
def test_the_rest_rejects_prompts_of_the_total(cake, device):
    """If no budget reaches the prompt's tokens, nothing is left."""
    for preferences, _, total in many()[::5]:
        assert sum(granted(cake, preferences, total + 1, total, device)) == total


@pytest.mark.claim("CK-4")
def test_a_budget_can_grow_when_a_layer_joins(cake, device):
    assert granted(cake, [6.0, 1.0], 8, 6, device) == [6, 0]
    assert granted(cake, [6.0, 1.0, 1.0], 8, 6, device) == [5, 1, 0]


def shares(preferences: list[float]) -> Tensor:
    """Of the total, not truncated: [1, layers]."""
    return log_of([preferences]).softmax(-1)


@pytest.mark.claim("CK-4")
def test_growth_rejects_shares_that_are_not_truncated():
    """A share never grows when a layer joins."""
    for preferences in itertools.product((1.0, 2.0, 6.0, 20.0), repeat=3):
        two, three = (shares(list(preferences[:count])) for count in (2, 3))
        assert bool((three[:, :2] < two).all())


# Preferences ---------------------------------------------------------------------------------------------------------


@pytest.mark.claim("CK-5")
def test_common_factors_of_preferences_cancel(cake, device):
    """Powers of two, whose logarithms are multiples of log(2): shares change by rounding alone."""
    for preferences, prefix, total in ([4.2, 1.3, 7.7], 50, 40), ([0.3, 11.0, 2.6], 12, 30):
        expected = granted(cake, preferences, prefix, total, device)
        for factor in (2.0**-30, 8.0, 2.0**40):
            assert granted(cake, [factor * one for one in preferences], prefix, total, device) == expected


@pytest.mark.claim("CK-5")
def test_the_factors_reject_a_factor_of_a_single_layer(cake, device):
    expected = granted(cake, [4.2, 1.3, 7.7], 50, 40, device)
    assert granted(cake, [4.2, 4 * 1.3, 7.7], 50, 40, device) != expected


def budgets_of_batch(cake: Any, device: torch.device, rows: slice, whole_batch: bool) -> Tensor:
    """The budgets of two layers, for some rows of a batch of two that prefer different layers."""
    config = cake.CAKEConfig(8, window=WINDOW, whole_batch=whole_batch)
    count = len(range(2)[rows])
    cascade = cake.CAKECascade(config, layers=2, batch=count, device=device)
    for layer in range(2):
        generator = torch.Generator().manual_seed(layer)
        query, key, value = (torch.randn(2, heads, 30, 16, generator=generator) for heads in (2, 1, 1))
        query[layer] *= 0.1
        state = cake.CAKEState(
            config, batch=count, query_heads=2, key_value_heads=1, head_dim=16, dtype=torch.float32, device=device,
            cascade=cascade, layer=layer,
        )
        state.prefill(*(tensor[rows].to(device) for tensor in (query, key, value)))
    found: Tensor = cascade.budgets
    return found


@pytest.mark.claim("CK-6")
def test_rows_of_a_batch_have_the_budgets_of_single_rows(cake, device):
    both = budgets_of_batch(cake, device, slice(0, 2), False)
    for row in range(2):
        assert_same(budgets_of_batch(cake, device, slice(row, row + 1), False), both[row:row + 1], what="budgets")


@pytest.mark.claim("CK-6")
def test_rows_reject_sums_over_the_batch(cake, device):
    both = budgets_of_batch(cake, device, slice(0, 2), True)
    alone = [budgets_of_batch(cake, device, slice(row, row + 1), True) for row in range(2)]
    assert_same(both[:1], both[1:], what="budgets")
    assert bool((torch.cat(alone) != both).any(1).all())
