"""The figures in ThinKV's text and tables, recomputed exactly (claims TK-1, TK-15 to TK-17, TK-19, TK-21, TK-22).

The size of a model's cache follows from its layers and heads, as in its published configuration. A test named
..._rejects_... shows that a slightly changed statement fails, so the claim's own test is not empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch

from kvtwin.reference.contract.thinkv.config import ThinKVConfig
from kvtwin.reference.contract.thinkv.types import BITS

pytestmark = pytest.mark.kind("claims")

GB, GIB = 10**9, 2**30
SCALE_BITS = Fraction(8, 16)                                                           # of E4M3, per element


@dataclass(frozen=True)
class Model:
    """A model: layers that cache all tokens, layers that cache a window, KV heads and head_dim of each, parameters."""

    layers: int
    heads: int
    head_dim: int
    parameters: int
    windowed: int = 0
    window: int = 0

    @property
    def per_layer(self) -> int:
        """Bytes of a token's key and value in a layer, with 16 bits per element."""
        return 2 * self.heads * self.head_dim * 2

    def cache(self, tokens: int, batch: int = 1) -> int:
        held = self.layers * tokens + self.windowed * min(tokens, self.window)
        return batch * self.per_layer * held


LLAMA_8B = Model(32, 8, 128, 8_030_000_000)
GPT_OSS_20B = Model(12, 8, 64, 20_900_000_000, windowed=12, window=128)
GPT_OSS_20B_WHOLE = Model(24, 8, 64, 20_900_000_000)


def rounded(number: Fraction | float, digits: int = 0) -> Fraction:
    scale = Fraction(10) ** digits
    return round(Fraction(number) * scale) / scale


# ---- TK-1: the example of the introduction ---------------------------------------------------------------------------


@pytest.mark.claim("TK-1a")
def test_32_sequences_of_32k_tokens_are_50_gb_if_every_layer_keeps_all():
    assert GPT_OSS_20B_WHOLE.cache(1) == 49_152
    for tokens, gigabytes in ((32_768, "51.5"), (32_000, "50.3")):
        size = Fraction(GPT_OSS_20B_WHOLE.cache(tokens, 32), GB)
        assert rounded(size, 1) == Fraction(gigabytes)
        assert rounded(size, -1) == 50


@pytest.mark.claim("TK-1a")
def test_32_sequences_reject_16_of_them_and_other_numbers_of_heads():
    assert rounded(Fraction(GPT_OSS_20B_WHOLE.cache(32_768, 16), GB), -1) != 50
    assert rounded(Fraction(Model(24, 64, 64, 1).cache(32_768, 32), GB), -1) != 50     # query heads


@pytest.mark.claim("TK-1b")
def test_with_its_windows_the_example_fits_80_gb():
    """Half of the layers attend to 128 tokens."""
    size = Fraction(GPT_OSS_20B.cache(32_768, 32), GB)
    assert rounded(size, 1) == Fraction("25.9")
    weights = Fraction(2 * GPT_OSS_20B.parameters, GB)
    assert rounded(weights, 1) == Fraction("41.8")                                     # "40 GB": 16 bits each
    assert size + weights < 80
    assert Fraction(GPT_OSS_20B_WHOLE.cache(32_768, 32), GB) + weights > 80


@pytest.mark.claim("TK-1b")
def test_windows_reject_a_quarter_of_the_layers_and_twice_the_batch():
    weights = 2 * GPT_OSS_20B.parameters
    assert Model(18, 8, 64, 1, windowed=6, window=128).cache(32_768, 32) + weights > 80 * GB
    assert GPT_OSS_20B.cache(32_768, 64) + weights > 80 * GB


# ---- TK-15: bits -----------------------------------------------------------------------------------------------------


def payload(transition: Fraction) -> Fraction:
    """Bits per element of R4E4T2 if a share `transition` of the tokens is T."""
    formats = ThinKVConfig().formats
    assert BITS[formats["R"]] == BITS[formats["E"]]
    return (1 - transition) * BITS[formats["R"]] + transition * BITS[formats["T"]]


def measured(fmt: str, axis: int, twins, device) -> Fraction:
    """Bits per element of 64 tokens after `quantize` and `pack`."""
    module = twins.optimized.thinkv
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    q = module.quantize(x, fmt, axis=axis)
    return Fraction(8 * (module.pack(q.codes, BITS[fmt]).nbytes + q.scales.nbytes), x.numel())


PRINTED = ("3.4", "3.5", "3.6", "3.8", "3.9")                                          # in tables 1, 3, E.6, E.7


@pytest.mark.claim("TK-15a")
def test_printed_precisions_are_shares_of_transitions_without_scales(twins, device):
    shares = {bits: (4 - Fraction(bits)) / 2 for bits in PRINTED}
    assert [float(share) for share in shares.values()] == [0.3, 0.25, 0.2, 0.1, 0.05]
    for bits, share in shares.items():
        assert payload(share) == Fraction(bits)
    # The share of an 8-bit scale per element of a group of 16.
    for axis in (-1, -2):
        for fmt in ("nvfp4", "ternary"):
            assert measured(fmt, axis, twins, device) == BITS[fmt] + SCALE_BITS
    assert [float(payload(shares[bits]) + SCALE_BITS) for bits in ("3.4", "3.9")] == [3.9, 4.4]


@pytest.mark.claim("TK-15a")
def test_printed_precisions_reject_scales_in_them(twins, device):
    """With scales, the smallest possible value, for T tokens only, is 2.5, and 3.4 would need more transitions than
    observed."""
    share = {bits: (4 + SCALE_BITS - Fraction(bits)) / 2 for bits in PRINTED}
    assert share["3.4"] > Fraction(1, 2)
    assert measured("nvfp4", -1, twins, device) != 4
    assert measured("fp8", -1, twins, device) < 8 + SCALE_BITS                         # one scale of 32 bits per chunk


def compression(tokens: int, budget: int, bits: Fraction) -> Fraction:
    return Fraction(tokens, budget) * 16 / bits


@pytest.mark.claim("TK-15b")
def test_24_times_leaves_the_scales_out():
    bits = Fraction("3.9")
    assert rounded(compression(1500, 256, bits)) == 24
    assert rounded(compression(1500, 256, bits + SCALE_BITS), 1) == Fraction("21.3")


@pytest.mark.claim("TK-15b")
def test_24_times_rejects_all_tokens_at_4_bits_and_scales():
    assert rounded(compression(1500, 256, Fraction("4.4"))) != 24
    assert rounded(compression(1500, 256, Fraction(4))) != 24


LENGTHS = {"AIME": 9020, "LiveCodeBench": 14_166, "MATH-500": 2468}
RANGES = {"AIME": ("2.8", "3.1"), "LiveCodeBench": ("1.8", "2.0"), "MATH-500": ("10.1", "11.4")}


@pytest.mark.claim("TK-15c")
def test_a_budget_of_1024_is_under_5_percent_of_long_outputs_only():
    """At the average lengths, with scales."""
    for name, length in LENGTHS.items():
        shares = [100 / compression(length, 1024, Fraction(bits) + SCALE_BITS) for bits in ("3.4", "3.9")]
        assert tuple(rounded(share, 1) for share in shares) == tuple(map(Fraction, RANGES[name]))
        assert (max(shares) < 5) == (name != "MATH-500")
    # MATH-500 would need less than 2 bits per element.
    assert Fraction(5, 100) * 16 * Fraction(LENGTHS["MATH-500"], 1024) < 2


@pytest.mark.claim("TK-15c")
def test_5_percent_of_math_500_are_506_tokens():
    """At 3.9 bits without scales, which is inside the sweep of section 5.2, from 64 to 4096 tokens."""
    most = Fraction(5, 100) * LENGTHS["MATH-500"] * 16 / Fraction("3.9")
    assert int(most) == 506 and 64 < most < 4096
    assert 1 / compression(LENGTHS["MATH-500"], 506, Fraction("3.9")) < Fraction(5, 100)
    assert not 1 / compression(LENGTHS["MATH-500"], 507, Fraction("3.9")) < Fraction(5, 100)


@pytest.mark.claim("TK-15c")
def test_a_budget_of_1024_rejects_3_percent_everywhere():
    assert 100 / compression(LENGTHS["AIME"], 1024, Fraction("4.4")) > 3
    assert 100 / compression(LENGTHS["LiveCodeBench"], 1024, Fraction("4.4")) < 2


# ---- TK-16, TK-17: table 2 -------------------------------------------------------------------------------------------

TOKENS, BUDGET, A100, GH200 = 32_768, 1024, 0, 1
FOOTPRINT = {"FullKV": "100", "R-KV": "5.48", "ThinKV": "2.51", "ThinKV w/o TBQ": "5.78"}
BATCH = {"FullKV": (13, 19), "R-KV": (268, 350), "ThinKV": (711, 938)}
SPEED = {
    "FullKV": ("297.5", "453.9"), "R-KV (seq)": ("1450.5", "2425.8"), "R-KV (ovl)": ("2320.9", "4311.3"),
    "ThinKV": ("8412.2", "10578.5"),
}
ISO = {
    "R-KV (seq)": ("1769.3", "2489.8"), "R-KV (ovl)": ("3539.3", "5318.7"), "ThinKV w/o TBQ": ("5298.4", "8079.9"),
}


def share(method: str) -> Fraction:
    return Fraction(FOOTPRINT[method]) / 100


def full_caches(method: str, device: int) -> Fraction:
    """The number of FullKV sequences whose caches are as large as those of a batch."""
    return BATCH[method][device] * share(method)


@pytest.mark.claim("TK-16a")
def test_quantization_would_save_more_than_there_is_with_32768_tokens():
    """1024 of 32,768 tokens in 16 bits are 3.125 % of FullKV. The rest of the 5.78 % must be tables and metadata, which
    are not quantized. But TBQ saves 3.27 points."""
    whole = Fraction(BUDGET, TOKENS)
    saved = share("ThinKV w/o TBQ") - share("ThinKV")
    assert (100 * whole, 100 * saved) == (Fraction("3.125"), Fraction("3.27"))
    assert saved > whole
    # The size of these tokens with 3.4 bits and scales, and what would remain of the 5.78 %.
    kept = whole * (Fraction("3.4") + SCALE_BITS) / 16
    assert 100 * (share("ThinKV w/o TBQ") - whole + kept) > Fraction("3.4")


@pytest.mark.claim("TK-16a")
def test_quantization_rejects_that_for_shorter_sequences():
    """1024 of 17,800 tokens are 5.75 %, of which quantization could save 3.27 points. At half of the table's length
    they would exceed the total of 5.78 %."""
    assert Fraction(BUDGET, TOKENS // 2) > share("ThinKV w/o TBQ")
    saved = share("ThinKV w/o TBQ") - share("ThinKV")
    assert saved < Fraction(BUDGET, 17_800) * (1 - Fraction("3.9") / 16)


@pytest.mark.claim("TK-16b")
def test_thinkvs_batches_weigh_more_than_those_that_fullkv_can_hold():
    assert [rounded(full_caches("ThinKV", device), 1) for device in (A100, GH200)] == [
        Fraction("17.8"), Fraction("23.5"),
    ]
    for device in (A100, GH200):
        assert full_caches("ThinKV", device) > BATCH["FullKV"][device] + 1
    # R-KV's batch on the GH200 is as large as 19 sequences of FullKV.
    assert rounded(full_caches("R-KV", GH200)) == BATCH["FullKV"][GH200]
    # In bytes on the A100: 4 GiB for a sequence of R1-Llama-8B, and 15 GiB for its weights.
    assert LLAMA_8B.cache(TOKENS) == 4 * GIB
    caches, weights = full_caches("ThinKV", A100) * 4, Fraction(2 * LLAMA_8B.parameters, GIB)
    assert (rounded(caches, 1), rounded(weights)) == (Fraction("71.4"), 15)
    assert caches + weights > Fraction(80 * GB, GIB)
    assert caches + weights > 80


@pytest.mark.claim("TK-16b")
def test_batches_reject_that_for_fullkv_and_r_kv():
    for method in ("FullKV", "R-KV"):
        assert full_caches(method, A100) * 4 + Fraction(2 * LLAMA_8B.parameters, GIB) < Fraction(80 * GB, GIB)
    # ThinKV's batch would fit with 1.8 % of FullKV instead of 2.51 %.
    assert 711 * Fraction("0.018") * 4 + Fraction(2 * LLAMA_8B.parameters, GIB) < Fraction(80 * GB, GIB)


def speedup(table: dict[str, tuple[str, str]], ours: str, theirs: str, device: int) -> Fraction:
    return Fraction(table[ours][device]) / Fraction(table[theirs][device])


@pytest.mark.claim("TK-17a")
def test_speedups_are_the_tables():
    assert rounded(speedup(SPEED, "ThinKV", "R-KV (seq)", A100), 2) == Fraction("5.80")
    assert rounded(speedup(SPEED, "ThinKV", "R-KV (ovl)", A100), 2) == Fraction("3.62")
    for table, ours in ((SPEED, "ThinKV"), (ISO, "ThinKV w/o TBQ")):
        for theirs in ("R-KV (seq)", "R-KV (ovl)"):
            assert speedup(table, ours, theirs, A100) > 1 and speedup(table, ours, theirs, GH200) > 1
    most = {theirs: max(speedup(ISO, "ThinKV w/o TBQ", theirs, device) for device in (A100, GH200))
            for theirs in ("R-KV (seq)", "R-KV (ovl)")}  # fmt: skip
    assert [rounded(number, 2) for number in most.values()] == [Fraction("3.25"), Fraction("1.52")]


@pytest.mark.claim("TK-17a")
def test_speedups_reject_the_other_gpu():
    assert rounded(speedup(SPEED, "ThinKV", "R-KV (seq)", GH200), 2) == Fraction("4.36")
    assert rounded(speedup(SPEED, "ThinKV", "R-KV (ovl)", GH200), 2) == Fraction("2.45")


@pytest.mark.claim("TK-17b")
def test_batches_are_2_7_times_larger():
    ratios = [Fraction(BATCH["ThinKV"][device], BATCH["R-KV"][device]) for device in (A100, GH200)]
    assert [rounded(ratio, 2) for ratio in ratios] == [Fraction("2.65"), Fraction("2.68")]
    assert min(ratios) > 1 and max(ratios) < 3


@pytest.mark.claim("TK-17b")
def test_the_batch_rejects_2_7_and_what_the_footprints_say():
    """The footprints alone would allow 2.18 times as many."""
    assert max(Fraction(938, 350), Fraction(711, 268)) < Fraction("2.7")
    assert rounded(share("R-KV") / share("ThinKV"), 2) == Fraction("2.18")


TIMES = {"ThinKV": ("3.80", "0", "10.30", "40.38", "45.52"), "R-KV": ("10.46", "22.45", "38.65", "28.44")}


@pytest.mark.claim("TK-17c")
def test_shares_of_time_sum_to_100():
    assert [sum(map(Fraction, times)) for times in TIMES.values()] == [100, 100]
    assert sum(map(Fraction, TIMES["ThinKV"][:3])) == Fraction("14.1")                 # refresh and eviction


@pytest.mark.claim("TK-17c")
def test_shares_of_time_reject_a_hundredth_more():
    assert all(sum(map(Fraction, times)) + Fraction("0.01") != 100 for times in TIMES.values())


def samples(accuracy: str, problems: int = 30, most: int = 64) -> int:
    """The smallest number of runs over AIME's 30 problems whose average can be printed as this percentage."""
    for runs in range(1, most):
        total = problems * runs
        right = round(Fraction(accuracy) / 100 * total)
        if rounded(Fraction(100 * right, total), 2) == Fraction(accuracy):
            return runs
    raise AssertionError(f"{accuracy} is not an average of up to {most} runs")


QWQ_AIME = ("73.33", "60.56", "67.86", "70.28")                                        # FullKV, KIVI, PM-KVQ, ThinKV


@pytest.mark.claim("TK-17d")
def test_percentages_of_30_problems_are_averages_of_several_runs():
    """QwQ-32B on AIME, table 1."""
    assert [samples(accuracy) for accuracy in QWQ_AIME] == [1, 6, 14, 12]

    def possible(accuracy: str, runs: int) -> bool:
        solved = round(Fraction(accuracy) / 100 * 30 * runs)
        return rounded(Fraction(100 * solved, 30 * runs), 2) == Fraction(accuracy)

    together = [runs for runs in range(1, 100) if all(possible(accuracy, runs) for accuracy in QWQ_AIME)]
    assert together == [84, 95]


@pytest.mark.claim("TK-17d")
def test_runs_reject_the_other_model():
    """Every figure in the row of R1-Qwen-14B is possible with one run."""
    assert [samples(accuracy) for accuracy in ("53.33", "40.00", "43.33", "50.00")] == [1, 1, 1, 1]


@pytest.mark.claim("TK-17e")
def test_thoughts_are_refreshed_at_one_step_in_128():
    """0.78 %, which table 4 prints as 0.7: truncated, not rounded."""
    share = Fraction(100, ThinKVConfig().tau)
    assert rounded(share, 2) == Fraction("0.78")
    assert int(10 * share) == 7 and rounded(share, 1) == Fraction("0.8") != Fraction("0.7")
    assert int(10 * Fraction(100, 112)) != 7                                           # 112 steps would print as 0.8


# ---- TK-19: accuracy -------------------------------------------------------------------------------------------------

# FullKV and ThinKV, in tables 1 and 3, E.6, E.7, E.8 and E.9.
ACCURACY = {
    "R1-Qwen-14B, AIME": ("53.33", "50.00"), "R1-Qwen-14B, LiveCodeBench": ("47.90", "45.84"),
    "QwQ-32B, AIME": ("73.33", "70.28"), "QwQ-32B, LiveCodeBench": ("55.45", "50.47"),
    "GPT-OSS-20B, LiveCodeBench": ("77.8", "76.4"), "GPT-OSS-120B, high": ("69.4", "67.5"),
    "GPT-OSS-120B, medium": ("61.8", "59.3"), "MobileLLM-R1, GSM8K": ("67.5", "60.1"), "E.8, AIME": ("50", "50"),
    "E.8, LiveCodeBench": ("32.14", "32.14"), "E.9, Llama-8B": ("66.5", "67.9"), "E.9, Phi-14B": ("62.9", "63.8"),
}


@pytest.mark.claim("TK-19")
def test_losses_range_from_nothing_to_74_points():
    lost = {name: Fraction(full) - Fraction(ours) for name, (full, ours) in ACCURACY.items()}
    assert max(lost, key=lambda name: lost[name]) == "MobileLLM-R1, GSM8K"
    assert sorted(lost.values())[-2:] == [Fraction("4.98"), Fraction("7.4")]
    assert sum(points <= 0 for points in lost.values()) == 4
    assert rounded(100 * lost["MobileLLM-R1, GSM8K"] / Fraction("67.5")) == 11


@pytest.mark.claim("TK-21")
def test_thinkv_is_near_r_kv_and_h2o():
    """MobileLLM-R1 on GSM8K against R-KV, at compressions of 24 and 6; LongWriter against H2O."""
    assert Fraction("60.8") - Fraction("60.1") == Fraction("0.7") and Fraction(24, 6) == 4
    ahead = {
        model: Fraction(ACCURACY[f"E.9, {model}"][1]) - Fraction(h2o)
        for model, h2o in {"Llama-8B": "68.1", "Phi-14B": "61.5"}.items()
    }
    assert ahead == {"Llama-8B": Fraction("-0.2"), "Phi-14B": Fraction("2.3")}
    assert not all(points >= 0 for points in ahead.values())


@pytest.mark.claim("TK-22")
def test_higher_effort_is_more_accurate():
    high, medium = (list(map(Fraction, ACCURACY[f"GPT-OSS-120B, {effort}"])) for effort in ("high", "medium"))
    assert [x - y for x, y in zip(high, medium, strict=True)] == [Fraction("7.6"), Fraction("8.2")]
    assert not high[1] - medium[0] >= Fraction("7.6"), "a higher effort does not undo the loss"


# ---- TK-15d, TK-17f: what printed shares imply -----------------------------------------------------------------------


@pytest.mark.claim("TK-15d")
def test_tbq_has_more_transitions_than_thinkv():
    """A share f of tokens with 2 bits, and 4 bits otherwise: 4 - 2 f."""
    shares = {bits: (BITS["nvfp4"] - Fraction(bits)) / (BITS["nvfp4"] - BITS["ternary"]) for bits in ("3.5", "3.8")}
    assert shares == {"3.5": Fraction(1, 4), "3.8": Fraction(1, 10)}
    # With reasoning in FP8 instead, and no transitions at all, no average would be below 4 bits.
    assert min(BITS["fp8"], BITS["nvfp4"]) > max(map(Fraction, shares))


@pytest.mark.claim("TK-17f")
def test_evictions_at_every_step_beyond_the_budget_are_83_percent_of_6000():
    def printed(length: int) -> Fraction:
        return rounded(100 * (1 - Fraction(1024, length)), 2)

    assert [length for length in range(1025, 20_000) if printed(length) == Fraction("82.93")] == [5998, 5999, 6000]
    assert printed(LENGTHS["AIME"]) == Fraction("88.65") != Fraction("82.93")
