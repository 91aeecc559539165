"""kvpress itself: the parts of its presses that are right, and an example for each difference from our reference.

docs/how-to/kvpress.md lists the differences and their causes. These tests compare the list with kvpress: if one fails
after an upgrade, an entry and a line of adapters/kvpress.xfails may be removed. They need the extra ``kvpress``, and
are skipped without it.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtwin.conformance import discovery
from kvtwin.conformance.cases.case import WindowCase
from kvtwin.conformance.cases.key_cases import ANCHORS, CONTENTS, SIMILARITIES, KeyCase, key_cases
from kvtwin.conformance.cases.strategies import TRACE_CONTENTS, window_cases
from kvtwin.conformance.harness.impl import Twins
from kvtwin.conformance.judge.checkers import keydiff as keydiff_judge
from kvtwin.conformance.judge.checkers import snapkv as judge
from kvtwin.fixtures.load import load_trace
from kvtwin.reference import keydiff
from kvtwin.reference.baselines import snapkv

if importlib.util.find_spec("kvpress") is None:
    pytest.skip("needs the extra kvpress", allow_module_level=True)

theirs = Twins("kvtwin.conformance.adapters.kvpress").optimized

OURS = {pair.name: pair.reference for pair in discovery.methods()}


def needs(method: str) -> pytest.MarkDecorator:
    """Skips a test if kvtwin does not have this method."""
    return pytest.mark.skipif(method not in OURS, reason=f"kvtwin has no method {method} to compare with")


# Contents without tokens that tie by construction. In ties, topk decides for kvpress.
APART = ("ordinary", "zero_values", "integers", "near_ties")


def prompts(contents: tuple[str, ...]) -> st.SearchStrategy[WindowCase]:
    """float32 prompts that kvpress accepts, with a budget for the window."""

    def taken(case: WindowCase) -> WindowCase:
        window = min(case.observers, case.tokens - 1)
        return replace(
            case, dtype=torch.float32, scale=None, occupancy="none", protect="none", observers=window,
            budget=min(max(case.budget, window), case.tokens),
        )

    return window_cases(tokens=(2, 40), content=contents).map(taken)


def keys(contents: tuple[str, ...]) -> st.SearchStrategy[KeyCase]:
    """float32 keys that kvpress accepts."""
    cases = key_cases(
        content=contents, anchor=ANCHORS[:1], similarity=SIMILARITIES[:1], occupancy=("none",),
        layout=("contiguous", "transposed", "sliced"),  # the others repeat tokens
    )
    return cases.map(lambda case: replace(case, dtype=torch.float32, protect="none", recent=0))


def aimed(*channels: int | None, heads: int = 1, head_dim: int = 16, length: float = 16.0) -> torch.Tensor:
    """Vectors [1, heads, len(channels), D], each along one channel or zero, distributed over the heads in turn."""
    made = torch.zeros(1, heads, len(channels) // heads, head_dim)
    for place, channel in enumerate(channels):
        if channel is not None:
            made[0, place // made.shape[2], place % made.shape[2], channel] = length
    return made


# Right results -------------------------------------------------------------------------------------------------------


@given(case=prompts(TRACE_CONTENTS))
def test_snapkv_scores_are_right_in_float32(case):
    judge.assert_score_right(theirs.baselines.snapkv.window_score(**case.score_inputs), case, shared_heads=False)


@given(case=prompts(APART))
def test_snapkv_choices_are_right_in_float32(case):
    judge.assert_compress_right(theirs.baselines.snapkv.compress(**case.snapkv_inputs), case, shared_heads=False)


@given(case=keys(tuple(content for content in CONTENTS if content != "sizes")))
def test_keydiff_scores_are_right_in_float32(case):
    keydiff_judge.assert_score_right(theirs.keydiff.score(**case.score_inputs), case)


@given(case=keys(("ordinary", "collinear", "integers", "outliers", "near_ties")))
def test_keydiff_choices_are_right_in_float32(case):
    keydiff_judge.assert_evict_right(theirs.keydiff.evict(**case.inputs), case)


@needs("tova")
@given(case=prompts(TRACE_CONTENTS))
def test_tova_scores_are_right_in_float32_as_a_mean_over_all_heads(case):
    """This is SnapKV's shared score with a window of 1 and no pool."""
    case = WindowCase.of(case.query_window[:, :, -1:], case.key, case.value, budget=1, kernel_size=1)
    received = theirs.baselines.tova.attend(case.query_window, case.key, case.value, case.mask).received
    received[..., -1] = torch.inf
    for head in range(case.key_value_heads):
        judge.assert_score_right(received[:, head], case, shared_heads=True)


@pytest.mark.parametrize("sinks", [0, 1, 4])
@needs("streaming_llm")
def test_streaming_llm_keeps_what_ours_does(sinks):
    for tokens in range(sinks + 1, 40):
        positions = torch.arange(3, 3 + tokens)
        for budget in range(sinks + 1, tokens + 2):
            kept = theirs.baselines.streaming_llm.keep(positions, budget, sinks=sinks)
            assert torch.equal(kept, OURS["streaming_llm"].keep(positions, budget, sinks=sinks))


# Errors of kvpress ---------------------------------------------------------------------------------------------------


def test_theirs_snapkv_works_in_the_inputs_type():
    """In bfloat16, logits 32.125 and 32 round to the same number, and the token with 53 % of the attention is
    evicted."""
    key = aimed(0, 0, None, None, length=128)
    key[0, 0, 0, 1] = 8
    query = aimed(0, length=1)
    query[..., 1] = 1 / 16
    query, key = query.bfloat16(), key.bfloat16()
    ours = snapkv.window_score(query, key, kernel_size=1)[0, 0, :2]
    assert [round(score, 3) for score in ours.tolist()] == [0.531, 0.469]
    assert theirs.baselines.snapkv.window_score(query, key, kernel_size=1)[0, 0, :2].tolist() == [0.5, 0.5]
    assert snapkv.compress(query, key, key, 2, kernel_size=1).kept.tolist() == [[[0, 3]]]
    assert theirs.baselines.snapkv.compress(query, key, key, 2, kernel_size=1).kept.tolist() == [[[1, 3]]]


def test_theirs_snapkv_overflows_in_float16():
    """query . key = 300 * 300 exceeds 65504 before the division, so all scores are NaN and the window is evicted."""
    query, key = aimed(0, length=300).half(), aimed(0, None, None, None, None, None, length=300).half()
    assert snapkv.compress(query, key, key, 2, kernel_size=1).kept.tolist() == [[[0, 5]]]
    assert theirs.baselines.snapkv.window_score(query, key, kernel_size=1)[0, 0, :5].isnan().all()
    kept = theirs.baselines.snapkv.compress(query, key, key, 1, kernel_size=1).kept
    assert kept.tolist() != [[[5]]], "the window must be kept"


def test_theirs_keydiff_works_in_the_inputs_type():
    """In bfloat16, the only key with another direction has the same score as the others. 2048 keys near one direction
    have only two different scores, and 490 of the 1024 kept tokens are not the best."""
    key = torch.tensor([[1.0, 0], [1, 0], [1, 1 / 16]]).bfloat16()[None, None]
    assert [round(score, 5) for score in keydiff.score(key).flatten().tolist()] == [-0.99978, -0.99978, -0.99913]
    assert keydiff.evict(key, key, 1).kept.tolist() == [[[2]]]
    assert theirs.keydiff.score(key).flatten().tolist() == [-1, -1, -1]
    assert theirs.keydiff.evict(key, key, 1).kept.tolist() == [[[0]]]

    generator = torch.Generator().manual_seed(0)
    near, lead = torch.randn(2048, 128, generator=generator), torch.randn(128, generator=generator)
    key = (0.05 * near + lead).bfloat16()[None, None]
    best = set(keydiff.score(key.double())[0, 0].topk(1024).indices.tolist())
    kept = set(theirs.keydiff.evict(key, key, 1024).kept[0, 0].tolist())
    assert theirs.keydiff.score(key).unique().numel() == 2
    assert len(kept - best) > 400


def test_theirs_keydiff_chooses_otherwise_on_a_real_model():
    """For bfloat16 keys of our model on English text, 52 of the 2048 kept tokens do not have the best scores. For the
    same numbers in float32, 0 do not."""
    capture, wrong = load_trace("capture"), {torch.bfloat16: 0, torch.float32: 0}
    for name, key in capture.tensors.items():
        if name.endswith("key"):
            best = keydiff.evict(key.double(), key.double(), 128).kept
            for dtype in wrong:
                kept = theirs.keydiff.evict(key.to(dtype), key.to(dtype), 128).kept
                wrong[dtype] += int((kept[..., None] != best[..., None, :]).all(-1).sum())
    assert wrong[torch.bfloat16] > 40
    assert wrong[torch.float32] == 0


def test_theirs_keydiff_divides_by_zero_in_float16():
    """The epsilons of 1e-12 and 1e-8 are 0 in float16. One zero key makes all scores of its head NaN, and so does a
    zero anchor."""
    key = torch.tensor([[0.0, 0], [3, 4], [4, 3]]).half()[None, None]
    assert [round(score, 3) for score in keydiff.score(key).flatten().tolist()] == [0, -0.99, -0.99]
    assert theirs.keydiff.score(key).isnan().all()
    key = torch.tensor([[1.0, 0], [-1, 0]]).half()[None, None]
    assert keydiff.score(key).flatten().tolist() == [0, 0]
    assert theirs.keydiff.score(key).isnan().all()


def test_theirs_keydiff_overflows_in_float16():
    """A key whose norm exceeds 65504 gets the score of a key orthogonal to all others, and is kept."""
    key = torch.tensor([[6e4, 6e4], [1, 0], [0, 1]]).half()[None, None]
    assert [round(score, 3) for score in keydiff.score(key).flatten().tolist()] == [-1, -0.707, -0.707]
    assert theirs.keydiff.score(key)[0, 0, 0] == 0
    assert keydiff.evict(key, key, 1).kept.item() == 2
    assert theirs.keydiff.evict(key, key, 1).kept.item() == 0


def test_theirs_keydiff_shortens_keys_below_its_epsilons():
    """With 1e-12 in the normalisation and 1e-8 in the cosine, two keys of one direction have different scores."""
    key = torch.tensor([[1.0, 0], [1e-10, 0], [0, 1]])[None, None]
    assert [round(score, 3) for score in keydiff.score(key).flatten().tolist()] == [-0.894, -0.894, -0.447]
    assert [round(score, 3) for score in theirs.keydiff.score(key).flatten().tolist()] == [-0.894, -0.009, -0.447]


@needs("tova")
def test_theirs_tova_fails_on_a_single_token():
    query = key = aimed(0)
    assert OURS["tova"].attend(query, key, key, torch.ones(1, 1, dtype=torch.bool)).received.tolist() == [[[1]]]
    with pytest.raises(RuntimeError, match="max"):
        theirs.baselines.tova.attend(query, key, key, torch.ones(1, 1, dtype=torch.bool))


@needs("tova")
def test_theirs_tova_scores_the_newest_token_by_the_whole_batch():
    """It gets the largest score of all rows plus 1, and NaN if another row holds NaN."""
    query, key = aimed(0, heads=1).repeat(2, 1, 1, 1), aimed(0, 0, 1).repeat(2, 1, 1, 1)
    key[1] = torch.nan
    mask = torch.ones(2, 3, dtype=torch.bool)
    sides = (OURS["tova"], theirs.baselines.tova)
    ours, received = (side.attend(query, key, key, mask).received[0, 0] for side in sides)
    assert not ours.isnan().any()
    assert received.isnan().tolist() == [False, False, True]


def test_theirs_scores_do_not_know_the_layers_scale():
    """Gemma 3 27B has a scale of 168 ** -0.5 with a head_dim of 128. If a press gets the layer's attention weights, its
    scores differ from those with the weights that it computes."""
    from kvpress import SnapKVPress
    from transformers.models.gemma3 import modeling_gemma3 as gemma

    config = gemma.Gemma3TextConfig(
        hidden_size=64, head_dim=128, num_attention_heads=1, num_key_value_heads=1, query_pre_attn_scalar=168,
        num_hidden_layers=1, attn_implementation="eager",
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = gemma.Gemma3Attention(config, 0)
        hidden = torch.randn(1, 4, 64)
    turn = torch.ones(1, 4, 128), torch.zeros(1, 4, 128)
    mask = torch.full((1, 1, 4, 4), -torch.inf).triu(1)
    with torch.no_grad():
        weights = layer(hidden, turn, mask)[1]
        key = layer.k_norm(layer.k_proj(hidden).view(1, 4, 1, 128).transpose(1, 2))
        press = SnapKVPress(window_size=1, kernel_size=1)
        computed, given = (
            press.score(layer, hidden, key, key, attentions, {"position_embeddings": turn})
            for attentions in (None, weights)
        )
        query = layer.q_norm(layer.q_proj(hidden).view(1, 4, 1, 128).transpose(1, 2))[:, :, 3:]

    def right(score: torch.Tensor, scale: float) -> bool:
        case = WindowCase.of(query, key, key, budget=1, kernel_size=1, scale=scale)
        truth = snapkv.window_score(query.double(), key.double(), kernel_size=1, scale=scale)
        bound = judge.score_bound(case, shared_heads=False)
        return bool(((score - truth).abs() <= bound)[..., :3].all())

    assert layer.scaling == 168**-0.5
    assert [right(given, scale) for scale in (168**-0.5, 128**-0.5)] == [True, False]
    assert [right(computed, scale) for scale in (168**-0.5, 128**-0.5)] == [False, True]


def test_theirs_padding_takes_part():
    """A press has no argument for padding, so the contents of padding change the scores of the other tokens."""
    query, key = torch.ones(1, 1, 1, 16), torch.zeros(1, 1, 4, 16)
    key[:, :, 1] = 0.25
    real = torch.tensor([[False, True, True, True]])
    for padding, expected in ((0.0, 0.475), (1.0, 0.046)):
        key[:, :, 0] = padding
        assert round(snapkv.window_score(query, key, real, kernel_size=1)[0, 0, 1].item(), 3) == 0.576
        assert round(theirs.baselines.snapkv.window_score(query, key, kernel_size=1)[0, 0, 1].item(), 3) == expected


# Other readings ------------------------------------------------------------------------------------------------------


def test_reading_among_equal_tokens_topk_decides():
    """Of three equal tokens, ours evicts the oldest."""
    query, key = aimed(None), aimed(0, 0, 0)
    assert snapkv.compress(query, key, key, 2, kernel_size=1).kept.tolist() == [[[1, 2]]]
    assert theirs.baselines.snapkv.compress(query, key, key, 2, kernel_size=1).kept.tolist() == [[[0, 2]]]


def test_reading_among_equal_keys_topk_decides_too():
    key = torch.ones(1, 1, 2, 2)
    assert keydiff.evict(key, key, 1).kept.item() == 1
    assert theirs.keydiff.evict(key, key, 1).kept.item() == 0


def test_reading_a_budget_below_the_window_keeps_any_of_it():
    """All tokens of the window have the same score. Ours keeps the newest."""
    query, key = aimed(None, None, None, None), aimed(*[None] * 8)
    assert snapkv.compress(query, key, key, 2).kept.tolist() == [[[6, 7]]]
    assert theirs.baselines.snapkv.compress(query, key, key, 2).kept.tolist() == [[[5, 6]]]


@needs("tova")
def test_reading_tova_shares_one_choice_among_heads_and_keeps_the_newest():
    """The shared choice is also that of TOVA's authors. Keeping the newest token is kvpress's choice, which it
    documents."""
    query, key = aimed(0, 1, heads=2), aimed(0, None, None, None, 1, None, heads=2)
    mask = torch.ones(1, 3, dtype=torch.bool)
    ours, received = (side.attend(query, key, key, mask).received for side in (OURS["tova"], theirs.baselines.tova))
    assert ours.round(decimals=6).tolist() == [[[1, 0, 0], [0, 1, 0]]]
    assert received.round(decimals=6).tolist() == [[[0.5, 0.5, 1.5], [0.5, 0.5, 1.5]]]


def test_reading_a_ratio_is_rounded_down_and_tokens_stay_in_the_order_of_their_scores():
    from kvpress import KnormPress

    key = torch.tensor([3.0, 1, 2, 6, 5, 4]).view(1, 1, 6, 1)
    arguments = (torch.nn.Identity(), None, key, key, None, {})
    arguments[0].head_dim = 1
    assert KnormPress(compression_ratio=1 - 2 / 6).compress(*arguments)[0].flatten().tolist() == [1]
    assert KnormPress(compression_ratio=1 - 2.5 / 6).compress(*arguments)[0].flatten().tolist() == [1, 2]
    assert KnormPress(compression_ratio=0.5).compress(*arguments)[0].flatten().tolist() == [1, 2, 3]


def test_reading_prompts_as_short_as_the_window_or_the_sinks_are_refused():
    from kvpress import SnapKVPress, StreamingLLMPress

    key = torch.zeros(1, 1, 4, 2)
    layer = torch.nn.Identity()
    layer.config = type("Config", (), {"num_attention_heads": 1})
    with pytest.raises(AssertionError, match="should be greater than the window size 4"):
        SnapKVPress(0.5, window_size=4).score(layer, key[0], key, key, None, {})
    with pytest.raises(AssertionError, match="more tokens than n_sink=4"):
        StreamingLLMPress(0.5).score(layer, key[0], key, key, None, {})
