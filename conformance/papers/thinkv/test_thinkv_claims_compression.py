"""What is compressed, and by how much, in ThinKV's comparisons with other methods (claims TK-23 to TK-25)."""

from __future__ import annotations

from fractions import Fraction

import pytest

from kvtwin.conformance.papers.thinkv.test_thinkv_claims_tables import SCALE_BITS, compression, rounded, share
from kvtwin.reference.contract.thinkv.config import ThinKVConfig
from kvtwin.reference.contract.thinkv.types import BITS

pytestmark = pytest.mark.kind("claims")


@pytest.mark.claim("TK-23")
def test_iso_compression_is_one_of_tokens():
    more = share("ThinKV w/o TBQ") / share("R-KV") - 1
    assert rounded(100 * more, 1) == Fraction("5.5")
    assert not share("ThinKV w/o TBQ") <= share("R-KV")


def mean_of_halved(budget: int, steps: int) -> Fraction:
    """The mean number of tokens, over `budget`, of a cache that is halved whenever it has `budget` tokens."""
    total = held = 0
    for _ in range(steps):
        held += 1
        total += held
        held = held // 2 if held == budget else held
    return Fraction(total, budget * steps)


@pytest.mark.claim("TK-24")
def test_375_of_5_percent_are_12_bits_or_a_budget_that_is_halved():
    bits = BITS[ThinKVConfig().formats["R"]]
    shares = [100 / compression(20, 1, Fraction(width)) for width in (bits, bits + SCALE_BITS, 12)]
    assert [rounded(x, 2) for x in shares] == [Fraction(x) for x in ("1.25", "1.41", "3.75")]
    assert rounded(5 * mean_of_halved(256, 128 * 1000), 2) == Fraction("3.76")         # 3.75 for large budgets
    assert rounded(5 * mean_of_halved(2048, 1024 * 1000), 2) == Fraction("3.75")
    assert BITS["fp8"] / Fraction(16) * 5 == Fraction("2.5")                           # nor 8 bits


@pytest.mark.claim("TK-25")
def test_256_of_1500_tokens_are_a_factor_of_6():
    factor = compression(1500, 256, Fraction(16))
    assert (rounded(factor), rounded(factor, 2)) == (6, Fraction("5.86"))
    assert rounded(compression(1500, 256, 16 + SCALE_BITS), 2) != rounded(factor, 2)   # 16 bits have no scales
    assert rounded(compression(1500, 128, Fraction(16))) != 6
