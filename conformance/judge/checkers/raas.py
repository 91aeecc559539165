"""Checker of RaaS: which timestamps a weight near alpha leaves open, or a bound of a page near another one, and configs
to draw."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ...cases import draws
from .. import block_model
from ..bounds import DIVISION, FLUSH, SLACK, UNIT, Interval, gamma, log_weight_error
from ..choices import Verdict
from ..compare import fail
from ..compare_by_age import assert_kept_by_age_right
from ..fields import field
from ..mismatch import JudgeError
from ..variants import BLOCKS, INTERVALS, variant
from . import blocks, h2o
from .blocks import Chunk
from .blocks import max_kept as max_kept

REQUIRED = {"alpha": 0.02}
SMALL = {**blocks.SMALL, "alpha": 0.1}
DEFAULTS = {"recent": 0, "sinks": 0, "interval": 1, "page_size": None, "block_size": 128, "softcap": None,
            "scale": None}
TRACE = {"alpha": 0.05}
#: The fixture model's tokens are bytes, of which a key-value pair has eight.
FORMS = {"pages": {"alpha": None, "page_size": 8, "interval": 8}}
#: Pages of two tokens.
PAGES = {"alpha": None, "page_size": 2, "interval": 2}
LAWS = ({"interval": 3, "block_size": 5, "recent": 2, "sinks": 1}, PAGES)
VARIANTS = (
    *BLOCKS, *INTERVALS,
    variant("protected", {"sinks": 2, "recent": 1, "alpha": 0.2}, turns=((3, 2),)),
    variant("the-oldest-leaves", {"alpha": 0.0, "interval": 2}, steps=9),
    variant("a-weight-of-exactly-alpha", {"alpha": 1.0}, content="one_alone", padding="none", turns=((4, 2),)),
    variant("pages", PAGES, steps=11),
    variant("pages-with-sinks-and-a-longer-interval", {**PAGES, "sinks": 2, "recent": 1, "interval": 3},
            budget=10, prompt=20, steps=11, turns=((2, 3),)),
    variant("pages-of-one", {"alpha": None, "page_size": 1, "interval": 2}, padding="random", steps=9),
)
GROUPINGS = ({"interval": 3}, PAGES)
COMPILED = ({"softcap": 2.0},)
#: See the package.
CACHES: dict[str, dict[str, Any]] = {
    "small": {"budget": 6, "block_size": 4, "alpha": 0.1},
    "the prompt protected": {"budget": 6, "block_size": 4, "alpha": 0.2, "sinks": 3, "recent": 1},
    "the oldest leaves": {"budget": 4, "block_size": 3, "alpha": 0.0},
    "once in four tokens": {"budget": 4, "block_size": 3, "alpha": 0.05, "interval": 4},
    "pages": {**PAGES, "budget": 6, "block_size": 4},
    "pages and sinks": {"budget": 10, "block_size": 4, "alpha": None, "page_size": 3, "interval": 4, "sinks": 2},
}
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"budget": 4, "alpha": None}, TypeError, "alpha must be a float"),
    ({"budget": 4, "alpha": -0.1}, ValueError, "alpha must be from 0 to 1"),
    ({"budget": 4, "alpha": 0.1, "recent": 3, "sinks": 2}, ValueError, "must be at most budget = 4, got 3 [+] 2"),
    ({"budget": 4, "alpha": 0.1, "page_size": 2, "interval": 2}, ValueError, "alpha must be None with a page_size"),
    ({**PAGES, "budget": 4, "page_size": 5}, ValueError, "page_size must be at most budget = 4, got 5"),
    ({**PAGES, "budget": 4, "interval": 1}, ValueError, "interval must be at least page_size = 2, got 1"),
    ({**PAGES, "budget": 5, "sinks": 1, "recent": 3}, ValueError, "budget // page_size = 2 pages, got 1 and 3 tokens"),
    ({**PAGES, "budget": 4, "sinks": 1.0}, TypeError, "sinks must be an int"),
    ({**PAGES, "budget": 4, "recent": -1}, ValueError, "recent must be at least 0"),
]
NUMBERS: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
    ("alpha", (True, "0.1", None, torch.tensor(0.1)), TypeError, "alpha must be a float"),
    ("alpha", (-0.1, 1.5, float("nan"), float("inf")), ValueError, "alpha must be from 0 to 1, got"),
    ("recent", blocks.NOT_INTEGERS, TypeError, "recent must be an int"),
    ("recent", (-1,), ValueError, "recent must be at least 0"),
    ("recent", (5,), ValueError, "recent must be at most budget = 4, got 5"),
    ("sinks", blocks.NOT_INTEGERS, TypeError, "sinks must be an int"),
    ("sinks", (-1,), ValueError, "sinks must be at least 0"),
    ("sinks", (5,), ValueError, r"recent \+ sinks must be at most budget = 4, got 0 \+ 5"),
    ("page_size", (True, 2.0, "3", torch.tensor(3)), TypeError, "page_size must be an int"),
    ("page_size", (0, -1), ValueError, "page_size must be at least 1"),
    *blocks.INTERVAL_NUMBERS,
]
#: From a weight that few tokens have to one that all have. With a high one, few timestamps are equal.
ALPHAS = (0.1, 0.2, 0.05, 0.02, 0.4, 0.0, 1.0)
HIGH = (0.4, 1.0)
SUBJECTS = ()


@st.composite
def configs(draw: st.DrawFn, most: int, window: int) -> dict[str, Any]:
    """See the package. Some of them have pages of 1 to 4 tokens."""
    config = draw(h2o.protecting(blocks.block_configs(most)))
    recent, alpha = config["recent"] or 0, draw(st.sampled_from(draws.plain_among(ALPHAS, HIGH)))
    config = {**config, "recent": recent, "alpha": alpha, "interval": draw(blocks.INTERVALS)}
    if not draw(st.booleans()):
        return config
    size = draw(st.integers(1, min(4, config["budget"])))
    pages = config["budget"] // size
    sinks = draw(st.integers(0, min(2 * size, (pages - 1) // 2 * size)))
    recent = draw(st.integers(0, min(2 * size, (pages - -(-sinks // size) - 1) // 2 * size)))
    interval = size + draw(st.sampled_from((0, 0, 1, size)))
    return {**config, "alpha": None, "page_size": size, "sinks": sinks, "recent": recent, "interval": interval}


# Tokens --------------------------------------------------------------------------------------------------------------


def weight_error(chunk: Chunk) -> Tensor:
    """|computed - true| of mean_h a_hij, [B, Hkv, Q, capacity + Q].

    A weight has the relative error `log_weight_error`. It passes through at most G additions, the division by G and two
    products with powers of two. Weights, factors of splits, products and sums below FLUSH may flush to zero.

    A token that is alone has a weight of exactly 1: its logit is a sum of zeros, and the exponentials of all others,
    below e^-120, are zero in float32. The exponential of 0, the logarithm of 1 and a quotient by 1 are exact in any
    arithmetic, as is the mean of up to 16 ones.
    """
    below, above = log_weight_error(chunk.attention, chunk.allowed)
    relative = torch.maximum(torch.expm1(above.clamp_max(300)), -torch.expm1(below))
    heads = chunk.attention.key_value_heads
    sums = gamma(chunk.group + 2 + 2 * DIVISION / UNIT)
    error = chunk.attention.weight * (relative + sums * (1 + relative)) + 4 * FLUSH
    near = chunk.attention.logit > -120
    alone = near & (near.sum(-1, keepdim=True) == 1) & (chunk.attention.dot == 0)
    return error.masked_fill(~chunk.attention.seen | alone, 0).unflatten(1, (heads, -1)).mean(2) * SLACK


def alpha_error(alpha: float) -> float:
    """|computed - true| of alpha, which is rounded once to float32."""
    return 0.0 if float(torch.tensor(alpha)) == alpha else UNIT * alpha * SLACK


def renewals(chunk: Chunk, alpha: float) -> Interval:
    """The last query, by position, that renews each token: the earliest and the latest that computed weights allow.
    [B, Hkv, S] float64; -1 for none.

    A weight is never negative, so that an alpha of 0 leaves nothing open.
    """
    heads, count = chunk.attention.key_value_heads, chunk.before["query"].shape[2]
    weight = chunk.attention.weight.unflatten(1, (heads, -1)).mean(2)                         # [B, Hkv, Q, S]
    seen = chunk.attention.seen.unflatten(1, (heads, -1)).any(2)
    error = weight_error(chunk) + alpha_error(alpha)
    first = chunk.reference.tokens_seen - count
    position = torch.arange(first, first + count, device=weight.device, dtype=torch.float64)[:, None]

    def last(renewed: Tensor) -> Tensor:
        found = position.where(seen & renewed, -1).amax(2)
        return torch.nn.functional.pad(found, (0, chunk.slots - found.shape[-1]), value=-1)

    return Interval(last((weight - error >= alpha) | (alpha == 0)), last(weight + error >= alpha))


# Pages ---------------------------------------------------------------------------------------------------------------


def bound_interval(query: Tensor, low: Tensor, high: Tensor) -> Interval:
    """Interval of the computed bounds of pages: query [B, Hq, D]; low, high [B, Hkv, pages, D] -> [B, Hkv, pages]. All
    float64. Bounds are averaged over the group; a sum has the same order.

    Minima and maxima are exact, and the greater one of two rounded products is the rounded greater product. It passes
    through at most D + G - 2 additions, and a division by G. Products and sums below FLUSH may flush to zero. Products
    with zero are exact.
    """
    _, heads, _, head_dim = low.shape
    group = query.shape[1] // heads
    ask = query.unflatten(1, (heads, group))[:, :, :, None]                               # [B, Hkv, G, 1, D]
    product = torch.maximum(ask * low[:, :, None], ask * high[:, :, None])                # [B, Hkv, G, pages, D]
    total = product.sum(-1).mean(2)
    sums = gamma(head_dim + group - 1 + DIVISION / UNIT)
    error = product.abs().sum(-1).mean(2) * sums + 2 * FLUSH * (product != 0).sum(-1).sum(2)
    return Interval(total - error * SLACK, total + error * SLACK)


class Pages:
    """The pages before a chunk's eviction. Each is represented by the lowest slot of its tokens.

    page [B, Hkv, S] int64: the number of a token's page, -1 in free slots; slot: the slot that represents it; is_one:
    the slots that represent a page; complete: the tokens of complete pages.
    """

    def __init__(self, chunk: Chunk) -> None:
        config, before = chunk.reference.config, chunk.before
        self.occupied = before["occupied"]
        self.page = (before["_index"] // config.page_size).where(self.occupied, -1)
        same = (self.page[..., :, None] == self.page[..., None, :]) & self.occupied[..., None, :]
        self.slot = same.to(torch.int8).argmax(-1)
        self.is_one = self.occupied & (self.slot == torch.arange(chunk.slots, device=self.slot.device))
        incomplete = (chunk.reference._valid_seen // config.page_size)[:, None, None]
        self.complete = self.occupied & (self.page < incomplete)

    def reduce(self, tensor: Tensor, how: str, start: float) -> Tensor:
        """The least ("amin") or the greatest ("amax") element of each page, in the slot that represents it."""
        shape = *self.slot.shape, *[1] * (tensor.dim() - 3)
        tensor = tensor.where(self.occupied.view(shape), start)
        return torch.full_like(tensor, start).scatter_reduce(2, self.slot.view(shape).expand_as(tensor), tensor, how)

    def spread(self, tensor: Tensor) -> Tensor:
        """From the slot that represents a page to all of its tokens, [B, Hkv, S]."""
        return tensor.gather(-1, self.slot)


def page_renewals(chunk: Chunk, pages: Pages) -> Interval:
    """The last query, by position, that renews each page: the earliest and the latest that computed bounds allow.
    [B, Hkv, S] float64, in the slots that represent pages; -1 for none.

    Pages with the same range in every channel have equal bounds in any arithmetic, as have those whose products are all
    zero; the oldest of them is first.
    """
    reference, before = chunk.reference, chunk.before
    config, query = reference.config, before["query"] * (-1 if reference.scale < 0 else 1)
    low, high = pages.reduce(before["key"], "amin", math.inf), pages.reduce(before["key"], "amax", -math.inf)
    candidate = pages.is_one & pages.complete
    # From here on, the last axis has one slot of each complete page, and others behind them where a head has fewer.
    slot = (~candidate).to(torch.int8).argsort(dim=-1, stable=True)[..., :int(candidate.sum(-1).max())]
    number_of, candidate = pages.page.gather(-1, slot), candidate.gather(-1, slot)
    low, high = (
        end.gather(2, slot[..., None].expand(-1, -1, -1, end.shape[3])).where(candidate[..., None], 0.0)
        for end in (low, high)
    )
    alike = (low[..., :, None, :] == low[..., None, :, :]) & (high[..., :, None, :] == high[..., None, :, :])
    alike = alike.all(-1)                                                                 # [B, Hkv, pages, pages]
    older = number_of[..., None, :] < number_of[..., :, None]                             # of pages i, j: j is older
    own = before["_index"][:, :, config.capacity:] // config.page_size                    # [B, Hkv, Q or more]
    first = reference.tokens_seen - query.shape[2]
    found = [torch.full(slot.shape, -1.0, dtype=torch.float64, device=slot.device) for _ in range(2)]
    for number in range(query.shape[2]):
        bound = bound_interval(query[:, :, number], low, high)
        zero = (bound.low == 0) & (bound.high == 0)
        tie = alike | (zero[..., :, None] & zero[..., None, :])
        rivals = candidate & (number_of < own[:, :, number, None]) & before["valid"][:, number, None, None]
        for last, mine, theirs in zip(found, bound, reversed(bound), strict=True):
            # The first time, as many rivals as possible are ahead; the second time, only those that are for certain.
            ahead = torch.where(tie, older, theirs[..., None, :] > mine[..., :, None])
            renewed = rivals & ((ahead & rivals[..., None, :]).sum(-1) < config.page_budget // 2)
            last.masked_fill_(renewed, first + number)
    nothing = torch.full_like(before["score"], -1.0, dtype=torch.float64)
    return Interval(*(nothing.scatter(-1, slot, last) for last in found))


class Model(block_model.Head):
    """A token's score is the number of the last query that gave it at least alpha, its own one at the least. With
    pages, it is that of the last query that renewed its page, or of the page's last token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.index: dict[int, int] = {}  # of each token by position, padding not counted

    def observe(self, number: int, group: list[block_model.Vector]) -> None:
        if self.config.page_size is not None:
            self.renew_pages(number, group)
            return
        weights = self.weights(group, number)
        for token in self.tokens:
            if token.position == number or weights.get(token.position, -1.0) >= self.config.alpha:
                token.score = float(number)

    def pages(self) -> dict[int, list[block_model.Token]]:
        """The tokens of each page that have asked."""
        found: dict[int, list[block_model.Token]] = {}
        for token in self.tokens:
            if token.position in self.index:
                found.setdefault(self.index[token.position] // self.config.page_size, []).append(token)
        return found

    def renew_pages(self, number: int, group: list[block_model.Vector]) -> None:
        self.index[number] = len(self.index)
        pages = self.pages()
        own = pages.pop(self.index[number] // self.config.page_size)

        def bound(page: int) -> float:
            ranges = [(min(c), max(c)) for c in zip(*(token.key for token in pages[page]), strict=True)]
            sign = -1 if self.scale < 0 else 1
            return math.fsum(
                max(sign * q * low, sign * q * high)
                for query in group for q, (low, high) in zip(query, ranges, strict=True)
            )

        best = sorted(pages, key=lambda page: (-bound(page), page))[:self.config.budget // self.config.page_size // 2]
        for token in [*own, *(token for page in best for token in pages[page])]:
            token.score = float(number)

    def _victims(self) -> list[block_model.Token]:
        size = self.config.page_size
        if size is None:
            return super()._victims()
        pages = {page: tokens for page, tokens in self.pages().items() if len(tokens) == size}
        first, newest = -(-self.config.sinks // size), (len(self.index) - self.config.recent) // size
        by_time = sorted((page for page in pages if first <= page < newest), key=lambda p: (pages[p][0].score, p))
        return [token for page in by_time[:len(pages) - self.config.budget // size] for token in pages[page]]

    def rank(self, token: block_model.Token) -> Any:
        return token.score, token.position

    def protected(self, positions: list[int]) -> set[int]:
        ordered, recent = sorted(positions), self.config.recent
        return {*ordered[:self.config.sinks], *ordered[len(ordered) - min(recent, len(ordered)):]}


class Adapter(blocks.Adapter):
    """Ranks are the timestamps, whole numbers. They are exact unless a weight is so near alpha, or a page's bound so
    near that of another one, that either side of it is right; then the timestamp lies in an interval until a query
    renews the token or page for certain. Positions decide between equal ones."""

    def score_error(self, chunk: Chunk) -> Tensor:
        time, own = chunk.before["score"].double(), chunk.before["positions"].double()
        occupied = chunk.before["occupied"]
        if chunk.reference.config.page_size is None:
            found = renewals(chunk, chunk.reference.config.alpha)
        else:
            pages = Pages(chunk)
            found = Interval(*(pages.spread(end) for end in page_renewals(chunk, pages)))
            own = pages.spread(pages.reduce(own, "amax", -1.0))
        first = chunk.reference.tokens_seen - chunk.before["query"].shape[2]
        renewed = (time >= first) & (time > own)
        wrong = occupied & ((time < found.low) | (renewed & (time > found.high)))
        if bool(wrong.any()):
            at = tuple(wrong.nonzero()[0].tolist())
            raise JudgeError(f"the reference has time {time[at]} in {at}, expected {found.low[at]} to {found.high[at]}")
        # Not renewed for certain: as early as before, and if that is not known, as early as the token itself.
        before = torch.where(time >= first, own, time - chunk.previous_error)
        low = torch.maximum(torch.where(found.low >= 0, found.low, before), own)
        high = torch.where(found.high >= 0, torch.maximum(found.high, own), time + chunk.previous_error)
        error = torch.maximum(high - time, time - low).clamp_min(0)
        return error.masked_fill(~occupied, 0)

    def rank_interval(self, chunk: Chunk, error: Tensor) -> Interval:
        rank = chunk.before["rank"].double()
        return Interval(rank - error * 2**31, rank + error * 2**31)

    def ties(self, chunk: Chunk) -> Tensor:
        return blocks.no_ties(chunk)

    def _judge_kept(self, kept: Tensor, expected: Tensor, chunk: Chunk, error: Tensor, when: str) -> Verdict:
        """Whole pages are kept or evicted. The incomplete page stays, and the budget counts the others."""
        config, before = chunk.reference.config, chunk.before
        if config.page_size is None:
            return super()._judge_kept(kept, expected, chunk, error, when)
        pages = Pages(chunk)
        for broken, why in (
            (pages.complete & (kept != kept.gather(-1, pages.slot)), "a page is evicted in part"),
            (before["occupied"] & ~pages.complete & ~kept, "the incomplete page must be kept"),
        ):
            if bool(broken.any()):
                at = tuple(broken.nonzero()[0].tolist())
                fail(f"tokens kept {when}: {why}: number {int(pages.page[at])} of head {at[:2]}")
        return assert_kept_by_age_right(
            kept & pages.complete, expected & pages.complete, self.rank_interval(chunk, error),
            occupied=pages.complete, protected=before["protected"] & pages.complete, age=before["positions"],
            budget=config.page_budget * config.page_size, over_budget=chunk.over_budget, tie=self.ties(chunk),
            what=f"tokens kept {when}",
        )

    def _judge(self, tested: Any, reference: Any, dtype: torch.dtype, when: str) -> Tensor:
        """Also check that no timestamp is before its token or after the newest one, and that the tokens of a page have
        the same one."""
        bound = super()._judge(tested, reference, dtype, when)
        beyond = (tested.score < reference.positions) | (tested.score >= reference.tokens_seen)
        if bool((beyond & reference.occupied).any()):
            with field("score"):
                fail(f"score {when}: timestamps must be from the token's position to the newest one: {tested.score}")
        size = reference.config.page_size
        if size is not None:
            page = (reference._index // size).where(reference.occupied, -1)
            same = (page[..., :, None] == page[..., None, :]) & reference.occupied[..., None]
            score = tested.score.where(reference.occupied, 0)
            if bool((same & (score[..., :, None] != score[..., None, :])).any()):
                with field("score"):
                    fail(f"score {when}: the tokens of a page must have the same timestamp: {tested.score}")
        return bound

    def resume(self, tested: Any, reference: Any) -> None:
        if reference.config.page_size is not None:
            reference._index = tested._token_index.long().masked_fill(~reference.occupied, -1)
            reference._valid_seen = tested._valid_seen[:, 0].long()
