"""Checker of Quest: bounds of pages bit for bit, the selection by intervals of the scores, and attention over it.

The reference adopts the pages that the state under test selected, once they are judged, before it attends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ....reference.attention import per_query_head
from ....reference.baselines.quest import page_scores, select_pages
from ...cases import draws, page_cases, tiny
from ...cases.case import DecodeCase
from ...cases.oracle import upcast_all
from ...cases.page_cases import KeyPagesCase, PageBoundsCase, RankedPagesCase
from .. import bounds, lockstep
from ..bounds import FLUSH, SLACK, TINY, UNITS, Interval, arithmetic, gamma
from ..choices import Verdict, undecided
from ..compare import assert_dtype, assert_same, assert_within
from ..fields import field
from ..selections import assert_selected_right
from ..subjects import Subject, properties
from ..ties import lowest_equal, tie_classes
from ..variants import ONE, variant

EVICTS, SCORED = False, False
SMALL: dict[str, Any] = {"page_size": 2, "max_tokens": 160 if torch.cuda.is_available() else 24}
GROUPINGS = ({"page_size": 3, "keep_last": False, "least_pages": 3}, {"page_size": 1, "round_scores": True})
LAWS = ({"keep_last": False},)
#: A budget of all tokens, so that no page is scored.
COMPILED = ({"budget": SMALL["max_tokens"]}, {"keep_last": False, "round_scores": True})
#: quest/utils/controller.py: the CUDA path of the authors' code, where the page budget includes the last page.
DEFAULTS = {
    "page_size": 16, "keep_last": True, "least_pages": 1, "round_scores": False, "max_tokens": 32768, "scale": None,
}
SAME = ("keep_last",)
#: evaluation/quest_attention.py, which measures accuracy: "max(3, ...)", and the last page competes.
AUTHORS = {"keep_last": False, "least_pages": 3}


VARIANTS = (
    variant("pages-of-three", {"page_size": 3, "keep_last": False, "least_pages": 3}, prompt=20),
    variant("pages-of-one", {"page_size": 1, "round_scores": True}, padding="random"),
    variant("rounded-scores", {"round_scores": True, "page_size": 4}, dtype=torch.bfloat16, prompt=24, budget=9),
    variant("scores-that-round-to-equal-ones", {"round_scores": True, "keep_last": False, "page_size": 8},
            dtype=torch.bfloat16, head_dim=256, content="integers", prompt=64, budget=16, padding="none"),
    variant("every-page", budget=64, reorder_at=2),
    variant("last-page-kept", {"page_size": 5, "least_pages": 2}, prompt=33, budget=12, padding="stairs_down"),
    variant("many-pages", {"page_size": 2, "keep_last": False}, **ONE | {"prompt": 140, "steps": 3}, budget=20),
)


def configs(most: int, window: int) -> st.SearchStrategy[dict[str, Any]]:
    """Small pages, so that a trace has several more than it selects; max_tokens covers the longest trace."""
    return st.builds(
        lambda form, **drawn: {**drawn, "page_size": form[0], "keep_last": form[1], "least_pages": form[2]},
        form=st.sampled_from(((2, True, 1), (1, True, 1), (3, True, 2), (2, False, 3), (1, False, 1))),
        budget=draws.budgets(most), round_scores=st.sampled_from((False, False, True)),
        max_tokens=st.just(400 if torch.cuda.is_available() else 36),
    )


def max_kept(state: Any, tokens: int) -> int:
    """All tokens: Quest evicts none."""
    return tokens


def bytes_of(state: Any) -> int:
    """The bytes of the keys and values that a query head attends to, on average, times the KV heads."""
    page = torch.arange(state.maximum.shape[2], device=state.selected.device)
    chosen = (state.selected[..., None] == page).any(2)                                    # [B, Hq, pages]
    tokens = chosen.repeat_interleave(state.config.page_size, -1)[..., :state.occupied.shape[1]]
    held = int((tokens & state.occupied[:, None]).sum()) / chosen.shape[1] * state.key.shape[1]
    return int(2 * held * state.key.shape[3] * state.key.element_size())


def poison(state: Any) -> None:
    """Overwrite all free memory of one of our states with NaN and infinity, and the bounds of pages without tokens."""
    free = ~state.occupied[:, None, :, None]
    state.key.masked_fill_(free, torch.nan)
    state.value.masked_fill_(free, torch.inf)
    if hasattr(state, "_maximum"):
        page = torch.arange(state._maximum.shape[2], device=free.device)
        empty = (page * state.config.page_size >= state._count[:, None])[:, None, :, None]
        for bound in (state._maximum, state._minimum):
            bound.masked_fill_(empty, torch.nan)
        for scratch in (state._scores, state._partial, state._row_maxima, state._weight_sums):
            scratch.fill_(torch.nan)


def score_error(query: Tensor, maximum: Tensor, minimum: Tensor) -> Tensor:
    """The error of each page's score [B, Hq, pages], as `page_scores` computes it in float32 from inputs of a dtype.

    A score is sum_d max(q_d M_d, q_d m_d). Each term is one product: rounding is monotonic, so the larger of two
    rounded products is the rounded larger one. With the product, a term passes through at most D additions, those of
    its own sum and one that joins the sums of positive and of negative q_d; a term of 0 adds without an error. So the
    error is gamma(c (D + 1)) sum_d |max(q_d M_d, q_d m_d)|, and FLUSH for each operation that underflows.
    """
    high, low = (
        query.double()[:, :, None] * per_query_head(bound.double(), query.shape[1]) for bound in (maximum, minimum)
    )
    operations = arithmetic(query.dtype).dot * (query.shape[2] + 1)
    return (gamma(operations) * torch.maximum(high, low).abs().sum(-1) + operations * FLUSH) * SLACK


def score_interval(query: Tensor, maximum: Tensor, minimum: Tensor, *, rounded: bool = False) -> Interval:
    """Interval of each page's score [B, Hq, pages], for query [B, Hq, D] and bounds [B, Hkv, pages, D] in one dtype.

    rounded: the score is rounded to that dtype before pages are compared: u (|e| + error), and TINY. Scores that may
    reach infinity in float16 have no upper end, and its largest number as their lower end at most.
    """
    exact = page_scores(query.double(), maximum.double(), minimum.double())
    error = score_error(query, maximum, minimum).masked_fill(exactly(query, maximum, minimum), 0)
    if not rounded:
        return Interval(exact - error, exact + error)
    sure = (error == 0) & (exact.to(query.dtype).double().abs() < torch.inf)
    error = error + (UNITS[query.dtype] * (exact.abs() + error) + TINY[query.dtype]) * SLACK
    most = torch.finfo(query.dtype).max
    low, high = exact - error, exact + error
    low = low.masked_fill(low <= -most, -torch.inf).clamp_max(most)
    high = high.masked_fill(high >= most, torch.inf).clamp_min(-most)
    nearest = exact.to(query.dtype).double()
    return Interval(*(torch.where(sure, nearest, end) for end in (low, high)))


def exactly(query: Tensor, maximum: Tensor, minimum: Tensor) -> Tensor:
    """The pages whose scores no order of additions rounds, [B, Hq, pages]: sums of whole numbers below 2^24."""
    high, low = (
        query.double()[:, :, None] * per_query_head(bound.double(), query.shape[1]) for bound in (maximum, minimum)
    )
    whole = (query == query.round()).all(-1)[:, :, None] & (high == high.round()).all(-1) & (low == low.round()).all(-1)
    return whole & (torch.maximum(high.abs(), low.abs()).sum(-1) < 2**24)


def page_ties(maximum: Tensor, minimum: Tensor, query_heads: int) -> Tensor:
    """Classes of pages with bitwise equal bounds, which score the same for any query: [B, Hq, pages]."""
    both = torch.cat([maximum, minimum], -1)
    pages = torch.ones(both.shape[:3], dtype=torch.bool, device=both.device)
    return per_query_head(tie_classes(both, torch.ones_like(both), pages, per_head=True), query_heads)


def assert_pages_right(
    selected: Tensor, truth: Tensor, query: Tensor, maximum: Tensor, minimum: Tensor, count: Tensor, *, keep_last: bool,
    rounded: bool,
) -> Verdict:
    """Assert that `selected` [B, Hq, N] has the best of the first count [B] pages. Tensors in the dtype under test."""
    page = torch.arange(maximum.shape[2], device=maximum.device)
    scores, tie = score_interval(query, maximum, minimum, rounded=rounded), page_ties(maximum, minimum, query.shape[1])
    sure = exactly(query, maximum, minimum) & (scores.low == scores.high)
    equal = sure[..., None, :] & sure[..., None] & (scores.low[..., None, :] == scores.low[..., None])
    tie = torch.where(sure, equal.long().argmax(-1), tie)
    shape = (*selected.shape[:2], maximum.shape[2])
    return assert_selected_right(
        selected, truth, scores,
        candidates=(page < count[:, None, None]).expand(shape),
        forced=(page == count[:, None, None] - 1).expand(shape) if keep_last else None,
        tie=tie, what="selected pages",
    )


def attention_case(state: Any, query: Tensor, visible: Tensor, scale: float | None) -> DecodeCase:
    """The attention of a step, where each query head has its own tokens: query [B, Hq, D], visible [B, Hq, S]."""
    heads = query.shape[1]
    key, value = (per_query_head(tensor, heads).to(query.dtype) for tensor in (state.key, state.value))
    return DecodeCase.of(query, key, value, visible, scale=scale, per_head=True)


def output_bound(case: DecodeCase, group: int) -> Tensor:
    """The bound of a step's output [B, Hq, D]. The tiles of 16 tokens that `bounds` assumes may be shared by the query
    heads of a KV head, with tokens of their own each."""
    block = max(1, 16 >> (group - 1).bit_length())
    return bounds.decode_output(case, arithmetic(case.dtype, block=block))


# Functions -----------------------------------------------------------------------------------------------------------


def judge_bounds(result: Any, case: KeyPagesCase) -> None:
    """result: what `page_bounds(**case.inputs)` returns. Numbers of the page, or 0 in place of those below FLUSH."""
    pages = case.key.split(case.page_size, 2)
    for name, found, of_page in zip(result._fields, result, (Tensor.amax, Tensor.amin), strict=True):
        with field(name):
            assert_dtype(found, case.dtype, what=name)
            expected = torch.stack([of_page(page, 2) for page in pages], 2)
            same = tuple(found.shape) == tuple(expected.shape)
            flushed = (found == 0) & (expected.double().abs() < FLUSH) if same else None
            assert_same(found, expected, what=name, where=None if flushed is None else ~flushed)


def judge_scores(actual: Tensor, case: PageBoundsCase) -> None:
    """actual: what `page_scores(**case.inputs)` returns."""
    with field("score"):
        assert_dtype(actual, torch.float32, what="score")
        exact = page_scores(**upcast_all(case.inputs))
        assert_within(actual, exact, score_error(**case.inputs), what="score")


def judge_selected(actual: Tensor, case: RankedPagesCase) -> None:
    """actual: what `select_pages(**case.inputs)` returns. Scores are given, so each decision has one right answer: NaN
    ranks like -inf, and pages with equal scores tie."""
    with field("selected"):
        score, count = case.tensor("score").double().nan_to_num(-torch.inf, torch.inf, -torch.inf), case.tensor("count")
        page = torch.arange(case.slots, device=score.device)
        last = (page == count[:, None, None] - 1).expand(score.shape)
        assert_selected_right(
            actual, select_pages(score, count, k=case.keep, keep_last=case.protect == "last"), Interval(score, score),
            candidates=(page < count[:, None, None]).expand(score.shape),
            forced=last if case.protect == "last" else None,
            tie=lowest_equal(score), what="selected pages",
        )


CASES = (KeyPagesCase, PageBoundsCase, RankedPagesCase)
#: Free memory, and pages that a row does not have, hold NaN, infinity, the largest number, and others, in turns.
SUBJECTS = (
    Subject(
        "page_bounds", page_cases.key_pages_cases, judge_bounds, numbers=("maximum", "minimum"), sized="tokens",
        properties=properties(
            ordinary=page_cases.KEYS, extreme=page_cases.EXTREME_KEYS, mask="last_page", full="full",
            masked=("partial",) * 4, layout=page_cases.LAYOUTS,
        ),
    ),
    Subject(
        "page_scores", page_cases.page_bounds_cases, judge_scores, numbers=("score",), sized="pages",
        properties=properties(ordinary=page_cases.SCORED, extreme=page_cases.EXTREME_SCORED, layout=page_cases.LAYOUTS),
    ),
    Subject(
        "select_pages", page_cases.ranked_pages_cases, judge_selected, choices=("selected",), sized="pages",
        properties=properties(
            ordinary=page_cases.RANKED, tied=page_cases.TIED, extreme=page_cases.EXTREME_RANKED,
            masked=("random", "random", "random", "empty_row"), protect=("none", "last"), layout=page_cases.LAYOUTS,
        ),
    ),
)


def replay(case: Any, module: Any) -> Iterator[str]:
    """See the package."""
    for kind, subject in zip(CASES, SUBJECTS, strict=True):
        if type(case) is kind:
            subject.judge(subject.call(module, case), case)
            yield f"{subject.name}: right"


# The state -----------------------------------------------------------------------------------------------------------


class Adapter(lockstep.Adapter):
    """The lockstep adapter; the module's docstring describes its checks."""

    exact = ("maximum", "minimum", "selected")

    def attach(self, tested: Any, reference: Any) -> None:
        self.verdict, self.dtype = undecided(), tested.key.dtype
        select = reference._select

        def watched(query: Tensor, score: Tensor, count: Tensor) -> Tensor:
            truth, found = select(query, score, count), tested.selected
            config = reference.config
            pages = int(count.max())
            maximum, minimum = (
                bound[:, :, :pages].to(self.dtype) for bound in (reference.maximum, reference.minimum)
            )
            self.verdict = assert_pages_right(
                found, truth, query.to(self.dtype), maximum, minimum, count, keep_last=config.keep_last,
                rounded=config.round_scores,
            )
            adopted: Tensor = found
            return adopted

        reference._select = watched

    def after_step(self, tested: Any, reference: Any, query: Tensor) -> tuple[Tensor, Verdict | None]:
        visible = reference._visible()
        self.bound = output_bound(
            attention_case(reference, query, visible, lockstep.scale_of(reference)), reference.sizes.group
        )
        return self.bound, self.verdict


def arguments(device: torch.device) -> dict[str, Any]:
    """See the package."""
    generator = torch.Generator().manual_seed(11)
    high, low = (
        torch.randn(tiny.BATCH, tiny.KEY_VALUE_HEADS, 5, tiny.HEAD_DIM, generator=generator).to(device)
        for _ in range(2)
    )
    return {
        "page_size": 4, "maximum": torch.maximum(high, low), "minimum": torch.minimum(high, low),
        "score": torch.randn(tiny.BATCH, tiny.QUERY_HEADS, 5, generator=generator).to(device),
        "count": torch.tensor([5, 2], device=device), "k": 3, "keep_last": False,
    }
