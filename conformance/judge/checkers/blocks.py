"""Shared checker of block caches: the states of KeyDiff and of every baseline.

`Adapter` feeds a prompt in the chunks that the block cache uses, and checks after each chunk what was evicted. A
method's checker subclasses it and bounds the computed scores and ranks. The block cache's own rules are checked
exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from ....reference import attention as eager
from ...cases import draws, tiny
from ...cases.block_cases import LAYOUTS, AttendCase, attend_cases
from ...cases.case import Case
from ...cases.contents import OCCUPANCIES
from ...cases.fp8_cases import Fp8AttendCase, fp8_attend_cases, fp8_variants
from ...cases.oracle import Attention, attend, oracle, upcast_all
from .. import bounds, lockstep
from ..bounds import DIVISION, EXP, FLUSH, LOG, SLACK, UNIT, Arithmetic, Interval, arithmetic, gamma, log_weight_error
from ..choices import Verdict
from ..compare import assert_dtype, assert_same, assert_within, fail
from ..compare_by_age import assert_kept_by_age_right
from ..fields import field
from ..fp8_subjects import Fp8Subject
from ..subjects import EXTREME, Subject, properties
from ..ties import tie_classes

#: The cases of a method with an `attend`: see the package.
ATTEND_CASES: tuple[type[Case], ...] = (AttendCase, Fp8AttendCase)
#: Options that allow small budgets, for the laws: see the package.
SMALL = {"block_size": 6}
#: Values that an option of whole numbers refuses.
NOT_INTEGERS: tuple[Any, ...] = (True, 2.0, "3", None, torch.tensor(3))


@dataclass(frozen=True)
class Chunk:
    """A chunk of Q tokens in the reference, after scores were updated and before tokens were evicted.

    before: the reference's `_before`: key, value, occupied, positions, score, rank, protected [B, Hkv, S, ...], all
    float64; query [B, Hq, Q, D] upcast; valid [B, Q]. previous_error [B, Hkv, S]: the error bound of each token's score
    before this chunk, 0 for new tokens. reference: the state, which has evicted tokens since.
    """

    reference: Any
    before: dict[str, Tensor]
    dtype: torch.dtype
    previous_error: Tensor
    allowed: Arithmetic

    @property
    def slots(self) -> int:
        """S = capacity + block_size."""
        return self.before["key"].shape[2]

    @property
    def group(self) -> int:
        """G."""
        return self.reference.sizes.group

    @cached_property
    def attention(self) -> Attention:
        """Exact attention of the chunk's queries over the cache and the chunk: slots 0 to capacity + Q - 1."""
        end = self.reference.config.capacity + self.before["query"].shape[2]
        query, key, value = (self.before[name].to(self.dtype) for name in ("query", "key", "value"))
        return attend(
            query, key[:, :, :end], value[:, :, :end], self.before["occupied"][..., :end],
            scale=lockstep.scale_of(self.reference), causal=True, **lockstep.changes_of(self.reference),
        )

    @cached_property
    def over_budget(self) -> Tensor:
        """The heads that must evict, [B, Hkv] bool."""
        return self.before["occupied"].sum(-1) > self.reference.config.capacity

    def wide(self, tensor: Tensor) -> Tensor:
        """[..., capacity + Q] padded with zeros to [..., S]."""
        return functional.pad(tensor, (0, self.slots - tensor.shape[-1]))

    def exact_ranks(self) -> Interval:
        """Ranks that involve no rounding."""
        return Interval(self.before["rank"].double(), self.before["rank"].double())


class Adapter(lockstep.Adapter):
    """Adapter of a block cache. A method's checker overrides:

    - `score_error(chunk)`: [B, Hkv, S], the bound of the computed `score` against `chunk.before["score"]` after the
      chunk. Scores that accumulate add to `chunk.previous_error`, which follows its tokens. Default: 0, for exact
      scores.
    - `rank_interval(chunk, error)`: the interval of the computed rank, around `chunk.before["rank"]`; `error` is the
      result of score_error. Default: exact ranks.
    - `ties(chunk)`: [B, Hkv, S] int64, the lowest slot of each class of tokens that rank the same in any arithmetic
      (see `ties.tie_classes`), so that the slot decides. Default: tokens of equal rank, which suits exact ranks.

    - `attention(chunk)`, if queries and keys are not multiplied as they come.
    - `resume(tested, reference)`, if the method remembers more of its tokens than their scores.

    All of them see the reference before it evicts. Where the tested state's choice differs and is right, the reference
    adopts it (`_adopt`), so that both states have the same history afterwards.
    """

    any_slot_order = True

    def __init__(self, allowed: Arithmetic | None = None) -> None:
        self.allowed = allowed
        self.previous_error: Tensor | None = None
        self._verdicts: list[Verdict] = []
        self._bound: Tensor | None = None

    # Overridden by methods -------------------------------------------------------------------------------------------

    def attention(self, chunk: Chunk) -> Attention:
        """The exact attention of the chunk's queries, for the bound of the output."""
        return chunk.attention

    def score_error(self, chunk: Chunk) -> Tensor:
        return torch.zeros_like(chunk.previous_error)

    def rank_interval(self, chunk: Chunk, error: Tensor) -> Interval:
        return chunk.exact_ranks()

    def ties(self, chunk: Chunk) -> Tensor:
        rank, occupied = chunk.before["rank"], chunk.before["occupied"]
        index = torch.arange(chunk.slots, device=rank.device).expand(rank.shape)
        equal = (rank[..., :, None] == rank[..., None, :]) & occupied[..., None, :]         # [B, Hkv, S, S]
        return torch.where(occupied, index[..., None, :].where(equal, chunk.slots).amin(-1), index)

    # Called by benchmarks --------------------------------------------------------------------------------------------

    def resume(self, tested: Any, reference: Any) -> None:
        """Go on from a tested state of the optimized side that has seen tokens. `reference` already has its keys,
        values, scores, positions and count of tokens; copy what else it remembers."""

    # Called by lockstep ----------------------------------------------------------------------------------------------

    def prefill(self, tested: Any, reference: Any, prompt: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        return self._chunks(tested, reference, prompt, "prefill")

    def append_block(self, tested: Any, reference: Any, block: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        return self._chunks(tested, reference, block, "append_block")

    def after_prompt(self, tested: Any, reference: Any, prompt: dict[str, Tensor]) -> Verdict | None:
        verdicts, self._verdicts = self._verdicts, []
        flat = ([getattr(verdict, name).flatten() for verdict in verdicts] for name in Verdict.__dataclass_fields__)
        return Verdict(*map(torch.cat, flat)) if verdicts else None

    def before_slots(self, tested: Any, reference: Any, token: dict[str, Tensor]) -> Verdict | None:
        self._bound = self._judge(tested, reference, token["query"].dtype, f"at token {reference.tokens_seen - 1}")
        return self.after_prompt(tested, reference, token)

    def after_step(self, tested: Any, reference: Any, query: Tensor) -> tuple[Tensor, Verdict | None]:
        assert self._bound is not None
        return self._bound[:, :, 0], None

    def reorder(self, index: Tensor) -> None:
        if self.previous_error is not None:
            self.previous_error = self.previous_error.index_select(0, index)

    def reset(self) -> None:
        self.previous_error = None

    # One chunk -------------------------------------------------------------------------------------------------------

    def _chunks(
        self, tested: Any, reference: Any, tokens: dict[str, Tensor], first: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Feed `tokens` to both states in chunks of block_size, the first with method `first`, the rest appended."""
        size, outputs = reference.config.block_size, []
        for start in range(0, tokens["key"].shape[2], size):
            chunk = {
                name: _part(tensor, 1 if name == "occupied" else 2, start, size)
                for name, tensor in tokens.items() if tensor is not None
            }
            give = "append_block" if start else first
            output, truth = getattr(tested, give)(**chunk), getattr(reference, give)(**upcast_all(chunk))
            when = f"in the chunk up to token {reference.tokens_seen - 1}"
            outputs.append((output, truth, self._judge(tested, reference, chunk["query"].dtype, when)))
        output, truth, bound = (torch.cat(parts, 2) for parts in zip(*outputs, strict=True))
        return output, truth, bound

    def _judge(self, tested: Any, reference: Any, dtype: torch.dtype, when: str) -> Tensor:
        """Check the kept tokens, their slots and scores after a chunk, and adopt. Returns the bound of the output."""
        before = reference._before
        allowed = self.allowed or arithmetic(dtype)
        previous = torch.zeros_like(before["score"]) if self.previous_error is None else self.previous_error
        chunk = Chunk(reference, before, dtype, previous, allowed)
        error = self.score_error(chunk)
        kept, expected = self._keep_mask(tested, chunk, when), _still_in(reference.positions, before)
        self._verdicts.append(self._judge_kept(kept, expected, chunk, error, when))
        if not torch.equal(kept, expected):
            reference._adopt(tested.positions[..., :reference.config.capacity])
        assert_same(tested.positions, reference.positions, what=f"positions {when}")
        self.previous_error = _follow_tokens(error, before, reference)
        with field("score"):
            assert_dtype(tested.score, torch.float32, what="score")
            assert_within(tested.score, reference.score, self.previous_error, what=f"score {when}")
        return bounds.output_error(self.attention(chunk), allowed)

    def _judge_kept(self, kept: Tensor, expected: Tensor, chunk: Chunk, error: Tensor, when: str) -> Verdict:
        """Check which slots of `chunk.before` were kept, [B, Hkv, S] bool. expected: what the reference kept."""
        before = chunk.before
        return assert_kept_by_age_right(
            kept, expected, self.rank_interval(chunk, error), occupied=before["occupied"],
            protected=before["protected"], age=before["positions"], budget=chunk.reference.config.budget,
            over_budget=chunk.over_budget, tie=self.ties(chunk), what=f"tokens kept {when}",
        )

    @staticmethod
    def _keep_mask(tested: Any, chunk: Chunk, when: str) -> Tensor:
        """Check the form of the tested state's slots. Returns the slots of `chunk.before` that it kept, [B, Hkv, S]."""
        positions, occupied, capacity = tested.positions, tested.occupied, chunk.reference.config.capacity
        shape = tuple(chunk.before["occupied"].shape)
        if positions.dtype != torch.int64 or tuple(positions.shape) != shape or tuple(occupied.shape) != shape:
            fail(f"positions and occupied {when}: expected int64 and bool of shape {shape}, got {positions.dtype} of "
                 f"{tuple(positions.shape)} and {occupied.dtype} of {tuple(occupied.shape)}")
        assert_same(occupied, positions >= 0, what=f"occupied {when}, against positions >= 0")
        if bool(occupied[..., capacity:].any()):
            fail(f"occupied {when}: slots from {capacity} on must be free for the next block")
        kept = _still_in(positions, chunk.before)
        unknown = occupied & ~_still_in(chunk.before["positions"], {"positions": positions, "occupied": occupied})
        if bool(unknown.any()):
            at = tuple(unknown.nonzero()[0].tolist())
            fail(f"positions {when}: slot {at} holds token {positions[at].item()}, which was not in the cache before")
        if bool((kept.sum(-1) != occupied.sum(-1)).any()):
            at = tuple((kept.sum(-1) != occupied.sum(-1)).nonzero()[0].tolist())
            fail(f"positions {when}: head {at} holds a token twice: {positions[at].tolist()}")
        return kept


def _part(tensor: Tensor, axis: int, start: int, size: int) -> Tensor:
    """At most `size` tokens from `start` on, contiguous if the tensor is."""
    part = tensor.narrow(axis, start, min(size, tensor.shape[axis] - start))
    return part.contiguous() if tensor.is_contiguous() else part


def _still_in(positions: Tensor, before: dict[str, Tensor]) -> Tensor:
    """The slots of `before` whose token is among `positions` [B, Hkv, n]: [B, Hkv, S] bool."""
    return (before["positions"][..., :, None] == positions[..., None, :]).any(-1) & before["occupied"]


def _follow_tokens(error: Tensor, before: dict[str, Tensor], reference: Any) -> Tensor:
    """error [B, Hkv, S] by the slots before the eviction, moved to the tokens' slots after it; 0 in free slots."""
    same = reference.positions[..., :, None] == before["positions"][..., None, :]             # [B, Hkv, now, then]
    source = same.to(torch.int8).argmax(-1)
    return error.gather(-1, source).masked_fill(~reference.occupied, 0)


# Bounds --------------------------------------------------------------------------------------------------------------


def received_error(attention: Attention, allowed: Arithmetic) -> Tensor:
    """|computed - true| of sum_i mean_h a_hij over the Q queries i and the G heads h of a KV head: [B, Hkv, S].

    A weight exp(s - lse) has the relative error `log_weight_error`. All terms are nonnegative. Each passes through at
    most Q + G additions, head by head and query by query; or ceil(Q / 16) G + 16, where tiles of R >= 16 rows, the
    queries of one head or of all, are summed before the rows of a tile: ceil(Q / 16) G >= ceil(Q / floor(R / G)) for
    G <= 16, and 16 >= log2(R), since the rows are summed as a tree, or R = 16. Then follow the division by G (or a
    mean's Q G: at most two divisions) and
    two products with powers of two between bases or splits: a relative error of gamma(additions + 2) and 2 DIVISION.
    Weights, factors exp(m - lse) of splits, products and sums below FLUSH may flush to zero: 4 FLUSH per term.
    The scale of FP8 keys is in the errors of the logits, see `logit_error`; that of values has no effect.
    """
    below, above = log_weight_error(attention, allowed)
    relative = torch.maximum(torch.expm1(above.clamp_max(300)), -torch.expm1(below))
    heads, queries = attention.key_value_heads, attention.logit.shape[2]
    group = attention.query_heads // heads
    additions = max(queries + group, math.ceil(queries / 16) * group + 16)
    sums = gamma(additions + 2 + 2 * DIVISION / UNIT)
    error = attention.weight * (relative + sums * (1 + relative)) + 4 * FLUSH
    error = error.masked_fill(~attention.seen, 0).sum(2)                                      # [B, Hq, S]
    return error.unflatten(1, (heads, group)).mean(2) * SLACK


def received_attention(attention: Attention) -> Tensor:
    """sum_i mean_h a_hij: [B, Hkv, S] float64."""
    return attention.weight.sum(2).unflatten(1, (attention.key_value_heads, -1)).mean(2)


def log_sum_interval(attention: Attention, allowed: Arithmetic) -> Interval:
    """Interval of the computed log sum_h a_hj over the G heads of a KV head, for one query (Q = 1): [B, Hkv, S].

    log a_hj has the error `log_weight_error`. In the logsumexp, with a running maximum or in one pass, each head passes
    through at most G + 1 exponentials and products, G additions, a logarithm of a number up to G, and roundings of
    arguments and of a constant that is subtracted (log G): 4 u (|log a_hj| + |X_j|), with X_j the result. The error of
    a head counts in proportion to its share of the sum.
    """
    log_weight = (attention.logit - attention.lse)[:, :, 0]                                   # [B, Hq, S]
    seen, heads = attention.seen[:, :, 0], attention.key_value_heads
    finite = log_weight.masked_fill(~seen, 0)
    below, above = (error[:, :, 0] for error in log_weight_error(attention, allowed))
    rounding = 4 * UNIT * finite.abs()

    def over_group(term: Tensor) -> Tensor:
        return term.masked_fill(~seen, -torch.inf).unflatten(1, (heads, -1)).logsumexp(2)

    group = torch.tensor(float(attention.query_heads // heads))
    total, low, high = (over_group(finite + end) for end in (0, below - rounding, above + rounding))
    common = (group + 1) * (EXP + UNIT) + gamma(group) + LOG * (1 + group.log())
    common = (common + 4 * UNIT * total.abs().masked_fill(total.isinf(), 0)) * SLACK
    return Interval(low - common, high + common)


# Configs, arguments, ties ---------------------------------------------------------------------------------------------


def block_configs(most: int) -> st.SearchStrategy[dict[str, int]]:
    """budget and block_size. On the CPU budgets are small and blocks have 1 to 9 tokens, mostly several: each block
    costs an attention, and decode steps are already blocks of one token."""
    sizes = st.integers(min(4, most), most + 1) | st.integers(1, most + 1)
    return st.fixed_dictionaries({"budget": draws.budgets(most), "block_size": sizes})


def max_kept(state: Any, tokens: int) -> int:
    """See the package: with an interval, a head holds up to `capacity` tokens."""
    return min(state.config.capacity, tokens)


#: Drawn intervals: 1 is the default, the others evict more than one token at a time.
INTERVALS = st.sampled_from((1, 3, 2, 5))
#: What a config with an interval refuses: part of NUMBERS.
INTERVAL_NUMBERS: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
    ("interval", NOT_INTEGERS, TypeError, "interval must be an int"),
    ("interval", (0, -1), ValueError, "interval must be at least 1, got"),
]
#: What a config with an observation window and a pool refuses: part of NUMBERS.
WINDOW_NUMBERS: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
    ("window", NOT_INTEGERS, TypeError, "window must be an int"),
    ("window", (0,), ValueError, "at least 1, got 0"),
    ("kernel_size", NOT_INTEGERS, TypeError, "kernel_size must be an int"),
    ("kernel_size", (0, -1), ValueError, "kernel_size must be at least 1"),
    ("kernel_size", (2, 4), ValueError, "kernel_size must be odd"),
]


def attend_arguments(device: torch.device) -> dict[str, Any]:
    """See the package. The query of `attend` has a time axis."""
    return {"query": tiny.prompt(device, seed=0)[0][:, :, -tiny.WINDOW:]}


def attend_variants(name: str, given: dict[str, Any]) -> list[dict[str, Any]]:
    """See the package: FP8 keys and values of `attend`, with scales and without."""
    return fp8_variants(given) if name == "attend" else []


def resume_window(tested: Any, reference: Any) -> None:
    """`Adapter.resume` of a method that observes a window of queries: a ring buffer on the optimized side, in the order
    of positions in the reference."""
    positions, order = tested._window_positions.sort(-1)
    query = tested._window_query
    reference._window_positions = positions
    reference._window_query = query.gather(2, order[:, None, :, None].expand_as(query)).double()
    given = reference._window_query, reference.key, reference.occupied
    logit = eager.logits(*given, scale=reference.scale, softcap=reference.config.softcap)
    reference._window_logit = logit.unflatten(1, (reference.sizes.key_value_heads, -1)).movedim(-1, 2)


def no_ties(chunk: Chunk) -> Tensor:
    """No ties: every token is its own class."""
    return torch.arange(chunk.slots, device=chunk.previous_error.device).expand(chunk.previous_error.shape)


def equal_keys(chunk: Chunk) -> Tensor:
    """Classes of tokens with bitwise equal keys, which rank the same if only the current queries decide."""
    key = chunk.before["key"]
    return tie_classes(key, torch.ones_like(key), chunk.before["occupied"], per_head=True)


# `attend` ------------------------------------------------------------------------------------------------------------

#: The bound of an AttendCase's `received`, [B, Hkv, S].
AttendError = Callable[[AttendCase, Arithmetic], Tensor]


def assert_attend_right(
    actual: Any, case: AttendCase, reference: Callable[..., Any], error: AttendError, *,
    allowed: Arithmetic | None = None,
) -> None:
    """actual: `attend(**case.inputs)` of the implementation under test; reference: the reference's `attend`."""
    allowed = allowed or arithmetic(case.dtype)
    truth = oracle(reference, case)
    output, got = actual
    with field("output"):
        assert_dtype(output, case.dtype, what="output")
        assert_within(output, truth.output, bounds.output_error(case.attention, allowed), what="output")
    with field("received"):
        assert_dtype(got, torch.float32, what="received")
        assert_within(got, truth.received, error(case, allowed), what="received")


def attend_subjects(method: str, reference: Callable[..., Any], error: AttendError) -> tuple[Subject, ...]:
    """`attend` of a method, also over FP8."""
    kinds: tuple[tuple[type[Subject], Any], ...] = ((Subject, attend_cases), (Fp8Subject, fp8_attend_cases))
    return tuple(
        made(
            "attend", partial(cases, method),
            lambda actual, case: assert_attend_right(actual, case, reference, error), numbers=("output", "received"),
            properties=properties(extreme=EXTREME, masked=OCCUPANCIES[1:], layout=LAYOUTS),
        )
        for made, cases in kinds
    )


def replay_attend(
    case: Case, module: Any, method: str, reference: Callable[..., Any], error: AttendError
) -> Iterator[str]:
    """Replay an AttendCase if it belongs to `method`: part of a checker's `replay`."""
    if isinstance(case, AttendCase) and case.method == method:
        assert_attend_right(module.attend(**case.inputs), case, reference, error)
        yield "attend: right"
