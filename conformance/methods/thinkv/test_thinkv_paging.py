"""ThinKV's paged cache: the twins store the same bits in the same places, and attention agrees with float64:
what only our own sides promise.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from kvtwin.conformance.cases.paged_cases import FORMATS, PagedCase, empty, numbers, paged_cases, put
from kvtwin.conformance.judge.checkers.thinkv_paging import (
    arithmetic,
    assert_attention_right,
    attention_error,
    attention_of,
    widen_logits,
)
from kvtwin.conformance.judge.compare import assert_same, assert_within
from kvtwin.conformance.suite.thinkv.test_thinkv_paging import D
from kvtwin.reference.thinkv.paging import in_order

pytestmark = [pytest.mark.first, pytest.mark.main]


@given(case=paged_cases())
@settings(max_examples=max(20, settings().max_examples))
def test_reference_is_within_its_own_bound(case, twins):
    """Even in low precision: the judge's bound holds for any correct arithmetic."""
    result = twins.reference.thinkv.decode_attention(case.query, case.cache(twins.reference.thinkv), scale=case.scale)
    assert_attention_right(result, case.cache(twins.reference.thinkv, torch.float64), case.query, scale=case.scale)


@pytest.mark.parametrize("formats", (FORMATS[0], FORMATS[-1]))
def test_bound_is_not_loose(formats, twins, device):
    """For ordinary float32 data with D = 16, errors exceed 1/100 of the bound."""
    case = PagedCase(batch=2, group=2, head_dim=D, tokens=8, formats=formats, seed=3, device=str(device))
    result = twins.optimized.thinkv.decode_attention(case.query, case.cache(twins.optimized.thinkv))
    truth = case.cache(twins.reference.thinkv, torch.float64)
    allowed, attention = arithmetic(truth, case.dtype), attention_of(truth, case.query)
    bound = attention_error(widen_logits(attention, case.query, in_order(truth, torch.float64)[0], allowed), allowed)
    used = assert_within(result.output, attention.output[:, :, 0], bound[:, :, 0], what="output")
    assert used > 0.01


@pytest.mark.parametrize("what", ("append", "blocks", "thought", "segment"))
def test_overflow_corrupts_nothing(what, twins, device):
    """The optimized side does not ask the device. It sets `overflow`, and leaves the row and its neighbours
    unchanged."""
    cache = empty(twins.optimized.thinkv, device, batch=2, tokens=4)
    put(cache, 0, 4)
    if what == "blocks":
        for first in (4, 8):                                                       # the type's pool has 4 blocks of 2
            put(cache, first, 0, thought=0)
            put(cache, first, 4)
        before = [x.clone() for x in (cache.positions, cache.physical, *cache.codes())]
        assert cache.overflow.tolist() == [False, False]
        put(cache, 12, 0, thought=0)
        assert cache.overflow.tolist() == [True, True]
        assert cache.buffered.tolist() == [4, 4]
    else:
        before = [x.clone() for x in (cache.positions, cache.physical, *cache.codes())]
        if what == "append":
            cache.append(torch.ones(2, 1, D, device=device), torch.ones(2, 1, D, device=device),
                         numbers(4, -1, device=device))
        else:
            wrong = numbers(3 if what == "thought" else 99, 1, device=device)
            right = numbers(1, 1, device=device)
            cache.flush(numbers(True, False, device=device), *((wrong, right) if what == "thought" else (right, wrong)))
        assert cache.overflow.tolist() == [True, False]
    for one, other in zip((cache.positions, cache.physical, *cache.codes()), before, strict=True):
        assert_same(one, other, what="contents of the cache")
