"""States of the block frame judged: KeyDiff's and every baseline's. Not a pair's judge, but what these share.

`Adapter` drives a prompt piece by piece, as the frame cuts it, and judges after each piece what it evicted. A method's
judge subclasses it and says where the computed scores and ranks may lie; the frame's own rules are to the letter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from .. import bounds, lockstep
from ...cases import tiny
from ...cases.block_cases import AttendCase
from ..bounds import DIVISION, EXP, FLUSH, LOG, SLACK, UNIT, Arithmetic, Interval, arithmetic, gamma, log_weight_error
from ...cases.case import Case
from ..compare import Verdict, assert_same, assert_within, fail
from ..compare_stays import assert_stays_right
from ..oracle import Attention, attend, oracle, upcast_all
from ..ties import tie_classes

#: What a state's shapes and budgets need, for the laws: see the package.
SMALL = {"block_size": 6}


@dataclass(frozen=True)
class Piece:
    """A block of Q tokens as the reference saw it, after scores were brought up to date and before anything left.

    before: the reference's `_before`: key, value, occupied, positions, score, rank, protected [B, Hkv, S, ...], all
    float64; query [B, Hq, Q, D] upcast; real [B, Q]. carried [B, Hkv, S]: what each held token's score had lost before
    this piece, 0 for the new ones. reference: the state, by now without what it evicted.
    """

    reference: Any
    before: dict[str, Tensor]
    dtype: torch.dtype
    carried: Tensor
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
        """The exact attention of the block's queries over the cache and the block: slots 0 to capacity + Q - 1."""
        end = self.reference.config.capacity + self.before["query"].shape[2]
        query, key, value = (self.before[name].to(self.dtype) for name in ("query", "key", "value"))
        return attend(
            query, key[:, :, :end], value[:, :, :end], self.before["occupied"][..., :end],
            scale=lockstep.scale_of(self.reference), causal=True,
        )

    @cached_property
    def due(self) -> Tensor:
        """Which heads must evict, [B, Hkv]."""
        return self.before["occupied"].sum(-1) > self.reference.config.capacity

    def wide(self, tensor: Tensor) -> Tensor:
        """[..., capacity + Q] with zeros for the slots beyond: [..., S]."""
        return functional.pad(tensor, (0, self.slots - tensor.shape[-1]))

    def exact_ranks(self) -> Interval:
        """Ranks that involve no rounding."""
        return Interval(self.before["rank"].double(), self.before["rank"].double())


class Adapter(lockstep.Adapter):
    """A state of the block frame. What a method's judge overrides:

    - `score_error(piece)`: [B, Hkv, S], how far the computed `score` may lie from `piece.before["score"]` once the
      piece is in; what accumulates adds to `piece.carried`, which has travelled with its tokens. Default: 0, for exact
      scores.
    - `rank_interval(piece, error)`: where the computed rank may lie, in the terms of `piece.before["rank"]`; `error` is
      what score_error returned. Default: exact ranks.
    - `ties(piece)`: [B, Hkv, S] int64, the lowest slot of each class of tokens that must rank the same in any
      arithmetic (see `ties.tie_classes`), so that their order is by slot. Default: equal ranks, as fits exact ones.

    All see the reference before it evicted. It is given what the tested state keeps (`_adopt`) wherever that differs
    and is right, so what is compared next has seen the same history.
    """

    def __init__(self, allowed: Arithmetic | None = None) -> None:
        self.allowed = allowed
        self.carried: Tensor | None = None
        self._verdicts: list[Verdict] = []
        self._bound: Tensor | None = None

    # What methods define ---------------------------------------------------------------------------------------------

    def score_error(self, piece: Piece) -> Tensor:
        return torch.zeros_like(piece.carried)

    def rank_interval(self, piece: Piece, error: Tensor) -> Interval:
        return piece.exact_ranks()

    def ties(self, piece: Piece) -> Tensor:
        rank, occupied = piece.before["rank"], piece.before["occupied"]
        index = torch.arange(piece.slots, device=rank.device).expand(rank.shape)
        equal = (rank[..., :, None] == rank[..., None, :]) & occupied[..., None, :]         # [B, Hkv, S, S]
        return torch.where(occupied, index[..., None, :].where(equal, piece.slots).amin(-1), index)

    # What lockstep asks ----------------------------------------------------------------------------------------------

    def prefill(self, tested: Any, reference: Any, prompt: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        return self._pieces(tested, reference, prompt, "prefill")

    def append_block(self, tested: Any, reference: Any, block: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        return self._pieces(tested, reference, block, "append_block")

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
        if self.carried is not None:
            self.carried = self.carried.index_select(0, index)

    def reset(self) -> None:
        self.carried = None

    # One piece -------------------------------------------------------------------------------------------------------

    def _pieces(
        self, tested: Any, reference: Any, tokens: dict[str, Tensor], first: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Give both `tokens` in pieces of block_size, the first one by the method `first`, the others appended."""
        size, outputs = reference.config.block_size, []
        for start in range(0, tokens["key"].shape[2], size):
            piece = {
                name: tensor[:, start:start + size] if name == "occupied" else tensor[:, :, start:start + size]
                for name, tensor in tokens.items() if tensor is not None
            }
            give = "append_block" if start else first
            output, truth = getattr(tested, give)(**piece), getattr(reference, give)(**upcast_all(piece))
            when = f"in the piece up to token {reference.tokens_seen - 1}"
            outputs.append((output, truth, self._judge(tested, reference, piece["query"].dtype, when)))
        output, truth, bound = (torch.cat(parts, 2) for parts in zip(*outputs, strict=True))
        return output, truth, bound

    def _judge(self, tested: Any, reference: Any, dtype: torch.dtype, when: str) -> Tensor:
        """After both took a piece: what stayed, where it lies, and its scores; adopts. The bound of the output."""
        before = reference._before
        allowed = self.allowed or arithmetic(dtype)
        carried = torch.zeros_like(before["score"]) if self.carried is None else self.carried
        piece = Piece(reference, before, dtype, carried, allowed)
        error = self.score_error(piece)
        stays, right = self._stays(tested, piece, when), _holds(reference.positions, before)
        self._verdicts.append(assert_stays_right(
            stays, right, self.rank_interval(piece, error), occupied=before["occupied"], protected=before["protected"],
            age=before["positions"], room=reference.config.budget, crowded=piece.due, tie=self.ties(piece),
            what=f"tokens kept {when}",
        ))
        if not torch.equal(stays, right):
            reference._adopt(tested.positions[..., :reference.config.capacity])
        assert_same(tested.positions, reference.positions, what=f"positions {when}")
        self.carried = _moved(error, before, reference)
        score = tested.score
        if score.dtype != torch.float32:
            fail(f"score must be float32, got {score.dtype}")
        assert_within(score, reference.score, self.carried, what=f"score {when}")
        return bounds.output_error(piece.attention, allowed)

    @staticmethod
    def _stays(tested: Any, piece: Piece, when: str) -> Tensor:
        """Which slots of `piece.before` the tested state kept, [B, Hkv, S], after its form is checked."""
        positions, occupied, capacity = tested.positions, tested.occupied, piece.reference.config.capacity
        shape = tuple(piece.before["occupied"].shape)
        if positions.dtype != torch.int64 or tuple(positions.shape) != shape or tuple(occupied.shape) != shape:
            fail(f"positions and occupied {when}: expected int64 and bool of shape {shape}, got {positions.dtype} of "
                 f"{tuple(positions.shape)} and {occupied.dtype} of {tuple(occupied.shape)}")
        assert_same(occupied, positions >= 0, what=f"occupied {when}, against positions >= 0")
        if bool(occupied[..., capacity:].any()):
            fail(f"occupied {when}: slots from {capacity} on are the next block's and must be free")
        stays = _holds(positions, piece.before)
        strays = occupied & ~_holds(piece.before["positions"], {"positions": positions, "occupied": occupied})
        if bool(strays.any()):
            at = tuple(strays.nonzero()[0].tolist())
            fail(f"positions {when}: slot {at} holds token {positions[at].item()}, which was not there to be kept")
        if bool((stays.sum(-1) != occupied.sum(-1)).any()):
            at = tuple((stays.sum(-1) != occupied.sum(-1)).nonzero()[0].tolist())
            fail(f"positions {when}: head {at} holds a token twice: {positions[at].tolist()}")
        return stays


def _holds(positions: Tensor, before: dict[str, Tensor]) -> Tensor:
    """Which slots of `before` hold a token that is among `positions` [B, Hkv, n]: [B, Hkv, S] bool."""
    return (before["positions"][..., :, None] == positions[..., None, :]).any(-1) & before["occupied"]


def _moved(error: Tensor, before: dict[str, Tensor], reference: Any) -> Tensor:
    """error [B, Hkv, S], by the slots before the eviction, brought to where the tokens now are; 0 where none is."""
    same = reference.positions[..., :, None] == before["positions"][..., None, :]             # [B, Hkv, now, then]
    source = same.to(torch.int8).argmax(-1)
    return error.gather(-1, source).masked_fill(~reference.occupied, 0)


# Bounds --------------------------------------------------------------------------------------------------------------


def received_error(attention: Attention, allowed: Arithmetic) -> Tensor:
    """|computed - true| of sum_i mean_h a_hij over the Q queries i and the G heads h of a KV head: [B, Hkv, S].

    A weight exp(s - lse) carries `log_weight_error` relatively. All terms are nonnegative: each meets at most Q + G
    additions, head by head and query by query; or ceil(Q / 16) G + 16, where tiles of 16 queries or more are added up
    before the queries of a tile are. Then the division by G (or by a mean's Q G: two of them at the most), and two
    products with powers of two between bases or splits: gamma(that many + 2) and 2 DIVISION relatively. Weights,
    factors exp(m - lse) of splits, products and sums below FLUSH may vanish: 4 FLUSH per term.
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


def received(attention: Attention) -> Tensor:
    """sum_i mean_h a_hij: [B, Hkv, S] float64."""
    return attention.weight.sum(2).unflatten(1, (attention.key_value_heads, -1)).mean(2)


def log_sum_interval(attention: Attention, allowed: Arithmetic) -> Interval:
    """Where the computed log sum_h a_hj over the G heads of a KV head may lie, one query (Q = 1): [B, Hkv, S].

    log a_hj carries `log_weight_error`. The logsumexp, by a running maximum or in one: each head meets at most G + 1
    exponentials and products, G additions, a logarithm of at most G, and roundings of arguments and of a constant
    taken off (log G): 4 u (|log a_hj| + |X_j|), X_j the result. Heads count by their shares.
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


def frames(most: int) -> st.SearchStrategy[dict[str, int]]:
    """budget and block_size: on the CPU, where budgets are small, blocks of 1 to 9, mostly of several tokens (each
    costs
    an attention, and decode steps are blocks of one)."""
    sizes = st.integers(min(4, most), most + 1) | st.integers(1, most + 1)
    return st.fixed_dictionaries({"budget": st.integers(1, most), "block_size": sizes})


def attend_arguments(device: torch.device) -> dict[str, Any]:
    """See the package: what `attend` calls query has a time axis."""
    return {"query": tiny.prompt(device, seed=0)[0][:, :, -tiny.WINDOW:]}


def no_ties(piece: Piece) -> Tensor:
    """Every token is a class of its own."""
    return torch.arange(piece.slots, device=piece.carried.device).expand(piece.carried.shape)


def equal_keys(piece: Piece) -> Tensor:
    """Classes of tokens with bitwise equal keys: what ranks by the queries of now alone cannot tell apart."""
    key = piece.before["key"]
    return tie_classes(key, torch.ones_like(key), piece.before["occupied"], per_head=True)


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
    if output.dtype != case.dtype or got.dtype != torch.float32:
        fail(f"output must be {case.dtype} and received float32, got {output.dtype} and {got.dtype}")
    assert_within(output, truth.output, bounds.output_error(case.attention, allowed), what="output")
    assert_within(got, truth.received, error(case, allowed), what="received")


def replay_attend(
    case: Case, module: Any, method: str, reference: Callable[..., Any], error: AttendError
) -> Iterator[str]:
    """What a judge's `replay` does about an AttendCase, if it is the method's own."""
    if isinstance(case, AttendCase) and case.method == method:
        assert_attend_right(module.attend(**case.inputs), case, reference, error)
        yield "attend: right"
