"""The figures in Quest's text, tables and captions, recomputed in rational numbers (claims QU-3b and QU-5 to QU-10)."""

from __future__ import annotations

from fractions import Fraction

import pytest

pytestmark = pytest.mark.kind("claims")

LAYERS, FULL_LAYERS, PAGE = 32, 2, 16
SPEEDUP = Fraction("7.03")                                                              # of self-attention
# Figure 10: ms per token by length, of FlashInfer, then of Quest by budget.
LENGTHS = (32768, 16384, 8192)
FP16 = {"full": "36.8 26.6 21.6", 4096: "22.4 20.7 19.8", 2048: "21.2 19.4 18.6", 1024: "20.7 18.9 18.1",
        512: "20.3 18.5 17.7"}  # fmt: skip
AWQ = {"full": "29.6 19.4 14.4", 4096: "14.6 12.9 12.4", 2048: "13.3 11.6 11.1", 1024: "12.8 11.0 10.5",
       512: "12.4 10.6 10.2"}  # fmt: skip
# Figure 11: tokens on average; the budgets and microseconds of TOVA and of Quest for lossless accuracy.
LOSSLESS = """
MultiFieldQA  8154  8192 1024 222.0  64.6
NarrativeQA  24723 14336 5120 357.5 187.2
TriviaQA     14101 10240  512 274.3  60.4
GovReport    11984 10240 1024 272.4  71.3
HotpotQA     15370  5120 1024 143.1  77.7
Qasper        5819  5120  512 141.9  43.2
"""
DATASETS = {name: tuple(map(Fraction, cells)) for name, *cells in map(str.split, LOSSLESS.strip().splitlines())}
# Section 4.2.3: one over the share of the cache.
STATED = {"Qasper": 6, "HotpotQA": 6, "GovReport": 5, "TriviaQA": 10, "NarrativeQA": 5, "MultiFieldQA": 6}
# Table 1: percent by budget, of 10,000 and of 100,000 tokens.
PASSKEYS = {10_000: {32: 65, 64: 99, 128: 99, 256: 99, 512: 100},
            100_000: {256: 88, 512: 92, 1024: 96, 2048: 100, 4096: 100}}  # fmt: skip


def milliseconds(figure: dict, which: str | int, length: int) -> Fraction:
    return Fraction(figure[which].split()[LENGTHS.index(length)])


def share_read(page_size: int, pages: int, tokens: int) -> Fraction:
    """The share of the bytes of full attention that Quest loads (section 3.5)."""
    return Fraction(1, page_size) + Fraction(pages * page_size, tokens)


def cache_bytes(length: int) -> int:
    """Of keys and values of Llama 7B, in float16."""
    return 2 * LAYERS * length * 32 * 128 * 2


@pytest.mark.claim("QU-3b")
def test_4k_tokens_and_not_pages_are_an_eighth():
    assert share_read(PAGE, 4096 // PAGE, 65536) == Fraction(1, 8)
    assert share_read(PAGE, 4096, 65536) == Fraction(17, 16)


@pytest.mark.claim("QU-5")
def test_a_cache_of_32k_tokens_has_16_gib():
    assert cache_bytes(32 * 1024) == 16 * 2**30
    assert cache_bytes(32) == 16 * 2**20


@pytest.mark.claim("QU-6")
def test_end_to_end_speedups_are_those_of_the_figure():
    for figure, said in ((FP16, "1.74"), (AWQ, "2.23")):
        full, ours = (milliseconds(figure, which, 32768) for which in ("full", 2048))
        assert round(full / ours, 2) == Fraction(said) != round(full / milliseconds(figure, 1024, 32768), 2)
        assert all(
            milliseconds(figure, budget, length) < milliseconds(figure, "full", length)
            for budget in (512, 1024, 2048, 4096) for length in LENGTHS
        )


@pytest.mark.claim("QU-6")
def test_the_speedup_of_attention_is_within_the_bytes():
    assert SPEEDUP <= 1 / share_read(PAGE, 2048 // PAGE, 32768) == 8
    assert not 1 / share_read(PAGE, 4096 // PAGE, 32768) >= SPEEDUP


def attention_share(faster_layers: int) -> Fraction:
    """The share of attention in a step without Quest, from the times of figure 10 and the speedup of attention."""
    full, ours = (milliseconds(FP16, which, 32768) for which in ("full", 2048))
    return (full - ours) / (1 - 1 / SPEEDUP) / Fraction(faster_layers, LAYERS) / full


@pytest.mark.claim("QU-7")
def test_attention_takes_53_percent_if_two_layers_are_not_faster():
    assert round(100 * attention_share(LAYERS - FULL_LAYERS), 1) == Fraction("52.7")
    assert round(100 * attention_share(LAYERS), 1) == Fraction("49.4")


@pytest.mark.claim("QU-8")
def test_figure_11_has_the_ratios_of_the_text():
    faster = {name: theirs / ours for name, (*_, theirs, ours) in DATASETS.items()}
    assert (round(faster["GovReport"], 2), round(faster["TriviaQA"], 2)) == (Fraction("3.82"), Fraction("4.54"))
    assert max(faster, key=faster.__getitem__) == "TriviaQA"
    assert DATASETS["NarrativeQA"][1:3] == (14 * 1024, 5 * 1024)


def share_of_cache(name: str, full_layers: int) -> Fraction:
    """With Quest's budget for lossless accuracy and full caches in some layers."""
    length, _, budget, *_ = DATASETS[name]
    return (full_layers + (LAYERS - full_layers) * budget / length) / LAYERS


@pytest.mark.claim("QU-9")
def test_shares_of_the_cache_are_not_those_of_the_text():
    found = {name: 1 / share_of_cache(name, FULL_LAYERS) for name in STATED}
    assert [str(round(float(one), 1)) for one in found.values()] == ["6.9", "8.0", "7.0", "10.4", "3.9", "5.5"]
    assert [name for name in STATED if round(found[name]) == STATED[name]] == ["TriviaQA", "MultiFieldQA"]
    assert [name for name in STATED if round(found[name]) < STATED[name]] == ["NarrativeQA"]
    without = {name: 1 / share_of_cache(name, 0) for name in STATED}
    assert round(without["NarrativeQA"]) == STATED["NarrativeQA"] and without["TriviaQA"] > 2 * STATED["TriviaQA"]


@pytest.mark.claim("QU-10")
def test_one_percent_of_the_tokens_retrieves_nearly_all_passkeys():
    for length, budget in ((10_000, 64), (100_000, 1024)):
        assert Fraction(1, 200) < Fraction(budget, length) < Fraction(11, 1000)
        assert PASSKEYS[length][budget] >= 95
        assert min(of for of, found in PASSKEYS[length].items() if found == 100) > budget
