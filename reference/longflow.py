"""LongFlow: one attention pass per decode step computes the output, the score of each token and the slot to overwrite.

Paper: "LongFlow: Efficient KV Cache Compression for Reasoning Models". The score of token i (eq. 6) is
LongFlowScore(t_i) = ||a_i v_i||_1, here divided by head_dim and averaged over the query heads that share the slot.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._fp8 import dequantized
from ._pages import read_slots, write_slots
from ._ranks import of_all_ranks
from .attention import (
    INF,
    accumulate_dtype,
    causal_attention,
    logits,
    logsumexp_in_order,
    per_kv_head,
    per_query_head,
    softmax,
    sum_in_order,
    weighted_values,
    with_sinks,
    zero_unoccupied,
)
from .contract import MethodConfig, Pages
from .contract.arguments import (
    check_all_finite,
    check_config,
    check_flag,
    check_integer,
    check_kernel_size,
    check_next_slot,
    check_softcap,
    check_tensor,
    resolve_scale,
)
from .contract.attention import check_attention, check_sink_logits, check_slot_mask
from .contract.pages import check_own_pages, check_paged
from .contract.ranks import ProcessGroup, Shared, check_process_group, digest
from .contract.results import CompressResult
from .contract.scales import FP8, check_scales
from .prompt_compression import compress_prompt
from .selection import gather_tokens, order, victims
from .state import State

__all__ = [
    "CompressResult", "DecodeResult", "LongFlowConfig", "LongFlowState", "Pages", "compress_prefill",
    "decode_attention", "paged_decode_attention",
]


class DecodeResult(NamedTuple):
    """The result of one decode step.

    output: [B, Hq, D] in query's dtype. score: [B, S], or [B, Hkv, S] per head, float32 (float64 for float64 inputs):
    higher = keep, -inf for unoccupied slots, +inf for protected ones. slot: [B] or [B, Hkv] int64, the next slot to
    overwrite.
    """

    output: Tensor
    score: Tensor
    slot: Tensor


@dataclass(frozen=True)
class LongFlowConfig(MethodConfig):
    """Configuration of a LongFlow cache.

    budget: the number of slots per row. The new token takes one, so min(budget, t + 1) tokens are cached after step t
    (section 4.1).
    per_head: each KV head evicts for itself. Otherwise one slot per sequence and layer is evicted, as in the released
    code.
    protect_newest: the token of the current step cannot be evicted next (eq. 3: i < t). False as in the released code.
    sinks: the number of first tokens of a row that are never evicted, an int >= 0.
    window, kernel_size: SnapKV's observation window and pool width (odd), for prompts of more than budget - 1 tokens.
    prefix_alone: SnapKV's softmax runs over the tokens before the window alone, as in the released code. Otherwise over
    all tokens, as in SnapKV's.
    check_finite: raise ValueError for NaN or infinity in the inputs. This synchronizes with the GPU, and CUDA graph
    capture raises ValueError.
    softcap: every logit x = scale * query . key becomes softcap * tanh(x / softcap), before the mask; None: no cap.
    Weights and scores, also of prompts, are computed from the capped logits.
    scale: the factor on query . key, by default head_dim ** -0.5.
    Raises TypeError or ValueError for invalid arguments, and ValueError if the protected tokens fill the budget.
    """

    per_head: bool = False
    protect_newest: bool = True
    sinks: int = 0
    window: int = 32
    kernel_size: int = 5
    prefix_alone: bool = False
    check_finite: bool = False
    softcap: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_softcap("softcap", self.softcap)
        for name in ("per_head", "protect_newest", "prefix_alone", "check_finite"):
            check_flag(name, getattr(self, name))
        check_integer("sinks", self.sinks, minimum=0)
        check_integer("window", self.window, minimum=1)
        check_kernel_size(self.kernel_size)
        # With a budget of 1 the newest token is the only one and is overwritten.
        protected = self.sinks + (self.protect_newest and self.budget > 1)
        if protected >= self.budget:
            raise ValueError(
                f"budget must exceed the protected tokens (sinks + protect_newest = {protected}), got {self.budget}"
            )


def log_score(
    query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, *, scale: float, per_head: bool = False,
    process_group: ProcessGroup | None = None, softcap: float | None = None, sink_logits: Tensor | None = None,
) -> Tensor:
    """The logarithm of the summed LongFlowScore, logsumexp_h(s_hj - lse_h + log ||v_j||_1), by which tokens are
    evicted.

    Arguments as in `decode_attention`. The sum is over all query heads: [B, S]; with per_head over the query heads
    of each KV head: [B, Hkv, S]. process_group: the sum is over the heads of its ranks, too. Unlike eq. 6 it does
    not underflow. softcap: of the logits s. sink_logits: lse_h includes the sink's. -inf for zero values and
    unoccupied slots.
    """
    logit = logits(query, key, occupied, scale=scale, softcap=softcap)                  # [B, Hq, S]
    magnitude = zero_unoccupied(value, occupied).to(logit.dtype).abs().sum(-1)          # [B, Hkv, S]  ||v_j||_1
    lse = with_sinks(logit, sink_logits).logsumexp(-1, keepdim=True)                    # [B, Hq, 1]
    log_weight = logit - lse                                                            # [B, Hq, S]   log a_hj
    log_contribution = log_weight + per_query_head(magnitude.log(), query.shape[1])     # [B, Hq, S]   log ||a v||_1
    batch, key_value_heads, slots, _ = key.shape
    heads = log_contribution.view(batch, key_value_heads if per_head else 1, -1, slots)
    summed = logsumexp_in_order(of_all_ranks(heads, 2, process_group), 2)
    mask = per_kv_head(occupied)
    summed = summed.masked_fill(~mask, -INF)
    return summed if per_head else summed[:, 0]


def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, *,
    scale: float | None = None, per_head: bool = False, protected: Tensor | None = None, check_finite: bool = False,
    key_scale: Tensor | None = None, value_scale: Tensor | None = None,
) -> DecodeResult:
    """Attention of one query over the occupied slots, with the score of each slot and the slot to overwrite next.

    query [B, Hq, D]; key, value [B, Hkv, S, D], any strides; occupied [B, S] bool, or [B, Hkv, S] with per_head;
    protected like occupied, by default none; scale defaults to D ** -0.5.
    output: eq. 1 over the occupied slots, zeros for a row without tokens. score: eq. 6 / D, averaged over the query
    heads. slot: the lowest unoccupied slot if there is one; otherwise the unprotected slot with the lowest *logarithm*
    of the score, since the score itself underflows and creates ties; ties go to the lowest index. If all slots are
    protected, the lowest index.
    key and value may both be torch.float8_e4m3fn or torch.float8_e5m2, with a query of any other dtype, which the
    output also has. Keys are then key * key_scale, and values value * value_scale. Scales: float32, [] or one per KV
    head [Hkv], above 0; None is 1. They are checked if they are on the CPU, or with check_finite=True. Outputs must
    fit in query's dtype.
    NaN and infinity in occupied slots propagate by IEEE rules; a NaN score ranks lowest, so that slot stays in range.
    With check_finite=True they raise ValueError. TypeError or ValueError for invalid arguments.
    """
    sizes = check_attention(query, key, value, stored=FP8)
    check_flag("per_head", per_head)
    check_flag("check_finite", check_finite)
    check_slot_mask("occupied", occupied, sizes, per_head, key)
    if protected is not None:
        check_slot_mask("protected", protected, sizes, per_head, key)
    scale = resolve_scale(scale, sizes.head_dim)
    check_scales(key_scale, value_scale, key=key, heads=sizes.key_value_heads, check_values=check_finite)
    dtype = accumulate_dtype(query)
    key, value = dequantized(key, key_scale, dtype), dequantized(value, value_scale, dtype)
    if check_finite:
        check_all_finite(query=query, key=zero_unoccupied(key, occupied), value=zero_unoccupied(value, occupied))
    return _decode(query, key, value, occupied, scale, per_head, protected, None)


def paged_decode_attention(
    query: Tensor, pages: Pages, occupied: Tensor, *,
    scale: float | None = None, per_head: bool = False, protected: Tensor | None = None, check_finite: bool = False,
    key_scale: Tensor | None = None, value_scale: Tensor | None = None,
) -> DecodeResult:
    """`decode_attention` over slots in pages, which rows may share.

    query [B, Hq, D]; occupied [B, S] bool, or [B, Hkv, S] with per_head, with S up to the slots of the block table's
    pages; protected like occupied. Both caches may be FP8. Results and other arguments: `decode_attention`. Pages of
    the block table are checked if it is on the CPU, or with check_finite=True. TypeError or ValueError for invalid
    arguments.
    """
    check_flag("per_head", per_head)
    check_flag("check_finite", check_finite)
    sizes, pages = check_paged(query, pages, occupied, per_head=per_head, check_entries=check_finite, stored=FP8)
    check_scales(
        key_scale, value_scale, key=pages.key_cache, heads=sizes.key_value_heads, of="key_cache",
        check_values=check_finite,
    )
    key, value = (
        read_slots(cache, pages.block_table, sizes.slots) for cache in (pages.key_cache, pages.value_cache)
    )
    return decode_attention(
        query, key, value, occupied, scale=scale, per_head=per_head, protected=protected, check_finite=check_finite,
        key_scale=key_scale, value_scale=value_scale,
    )


def _decode(
    query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, scale: float, per_head: bool,
    protected: Tensor | None, process_group: ProcessGroup | None, softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> DecodeResult:
    logit = logits(query, key, occupied, scale=scale, softcap=softcap)
    weight = softmax(logit, sink_logits)                                                # [B, Hq, S]   eq. 1
    output = weighted_values(weight, value, occupied).to(query.dtype)                   # [B, Hq, D]   eq. 1
    magnitude = zero_unoccupied(value, occupied).to(weight.dtype).abs().mean(-1)        # [B, Hkv, S]  ||v_j||_1 / D
    contribution = weight * per_query_head(magnitude, query.shape[1])                   # [B, Hq, S]   eq. 6
    heads = contribution.view(query.shape[0], key.shape[1] if per_head else 1, -1, key.shape[2])
    heads = of_all_ranks(heads, 2, process_group)
    score = sum_in_order(heads, 2) / heads.shape[2]
    score = score if per_head else score[:, 0]
    score = score.masked_fill(~occupied, -INF)
    if protected is not None:
        score = score.masked_fill(protected & occupied, INF)
    rank = log_score(
        query, key, value, occupied, scale=scale, per_head=per_head, process_group=process_group, softcap=softcap,
        sink_logits=sink_logits,
    )
    return DecodeResult(output, score, _next_slot(rank, occupied, protected))


def compress_prefill(
    query_window: Tensor, key: Tensor, value: Tensor, budget: int, *,
    window: int = 32, kernel_size: int = 5, occupied: Tensor | None = None, protected: Tensor | None = None,
    scale: float | None = None, process_group: ProcessGroup | None = None, prefix_alone: bool = False,
) -> CompressResult:
    """Reduce a prompt to `budget` tokens with SnapKV, the same tokens for all heads (LongFlow section 4.1).

    query_window [B, Hq, W, D], the last W <= window queries of the prompt; key, value [B, Hkv, T, D]; occupied and
    protected [B, T] bool; a budget of 0 keeps no token. process_group: the ranks that hold the other heads.
    prefix_alone: the softmax runs over the tokens before the window alone, as in the released code. Result and errors:
    `baselines.snapkv.compress`.
    """
    check_integer("window", window, minimum=1)
    check_flag("prefix_alone", prefix_alone)
    check_tensor("query_window", query_window, dims=4, layout="[B, Hq, W, D]")
    if query_window.shape[2] > window:
        raise ValueError(
            f"query_window must be [B, Hq, W, D] with W <= window = {window}, got {tuple(query_window.shape)}"
        )
    return compress_prompt(
        query_window, key, value, budget,
        kernel_size=kernel_size, occupied=occupied, protected=protected, shared_heads=True, scale=scale,
        process_group=process_group, prefix_alone=prefix_alone,
    )


def _next_slot(rank: Tensor, occupied: Tensor, protected: Tensor | None) -> Tensor:
    """The slot to overwrite: the lowest free slot, else the lowest rank among unprotected slots, else the lowest slot.

    The masks decide between these classes, not special ranks, since a token's rank may be -inf.
    """
    slots = rank.shape[-1]
    index = torch.arange(slots, device=rank.device).expand(rank.shape)
    turn = order(rank)                                                                  # the lowest turn goes first
    if protected is not None:
        turn = torch.where(protected, index + slots, turn)
    turn = torch.where(occupied, turn, index - slots)
    return victims(turn, 1)[..., 0]


class LongFlowState(State):
    """A LongFlow cache: a static buffer of `budget` slots, one of which is overwritten at every step (section 3.4).

    key, value [B, Hkv, S, D] with S = budget; occupied [B, S] bool; positions [B, S] int64: the position of the token
    in each slot, counted from 0 with padding included, -1 = free; score [B, S], of the last step; next_slot [B] int64,
    writable. With config.per_head the last four are [B, Hkv, S] and [B, Hkv].

    process_group: the ranks that share the heads of these sequences. Each has a state of its query heads and of their
    KV heads, which other ranks may hold, too. The score of a token is over the query heads of all ranks, and all ranks
    evict the same tokens. With config.per_head, only prompts are compressed together, and ranks must hold different KV
    heads. All ranks of the group construct their states and call `prefill`, `step`, `reorder` and `reset` in the same
    order, with the same prompts' masks. After an error in the middle of a call, a state is unusable until `reset()`.
    TypeError if it is no process group of this rank; ValueError if the ranks' configs or sizes differ.

    pages: the state holds its tokens there, in the pages that the block table lists, instead of in tensors of its own,
    and `key` and `value` are copies. No two rows, and no two states, may have the same page. Pages may be moved between
    two calls, with the block table changed in place. ValueError for too few pages, a page of two rows, caches that
    overlap, and caches with another number of KV heads or another head_dim.

    sink_logits: the logits of attention sinks (gpt-oss), a contiguous tensor [Hq] of a floating type, which is not
    copied. Weights are e^s_j / (e^sink + sum_i e^s_i), and scores are computed from these. The compression of a prompt
    with config.prefix_alone, a softmax of its own, has no sinks. TypeError or ValueError for others.
    """

    config: LongFlowConfig
    _per_slot = ("key", "value", "occupied", "positions", "score")
    _per_row = ("_next_slot", "_sink_end")
    _next_slot: Tensor

    def __init__(
        self, config: LongFlowConfig, *, batch: int, query_heads: int, key_value_heads: int, head_dim: int,
        dtype: torch.dtype, device: torch.device | str, process_group: ProcessGroup | None = None,
        sink_logits: Tensor | None = None, pages: Pages | None = None,
    ) -> None:
        super().__init__(
            check_config(config, LongFlowConfig), slots=config.budget, batch=batch, query_heads=query_heads,
            key_value_heads=key_value_heads, head_dim=head_dim, dtype=dtype, device=device,
        )
        if pages is not None:
            check_own_pages(pages, sizes=self.sizes, dtype=self.dtype, device=self.device)
        self._pages = pages
        check_process_group(
            process_group, config=config, batch=batch, query_heads_per_key_value_head=self.sizes.group,
            head_dim=head_dim, dtype=dtype,
        )
        self._shared = Shared(process_group)
        self.sink_logits = check_sink_logits(sink_logits, self.sizes, self.device)
        self.reset()

    @property
    def pages(self) -> Pages | None:
        return self._pages

    @property
    def _changes(self) -> dict[str, Any]:
        """What changes the model's attention."""
        return {"softcap": self.config.softcap, "sink_logits": self.sink_logits}

    @property
    def key(self) -> Tensor:
        """[B, Hkv, S, D], a copy if the state has pages. Unspecified in unoccupied slots."""
        return self._key if self.pages is None else self._read(self.pages.key_cache)

    @key.setter
    def key(self, value: Tensor) -> None:
        if self.pages is None:
            self._key = value
        else:
            write_slots(self.pages.key_cache, self.pages.block_table, value)

    @property
    def value(self) -> Tensor:
        """Like `key`."""
        return self._value if self.pages is None else self._read(self.pages.value_cache)

    @value.setter
    def value(self, value: Tensor) -> None:
        if self.pages is None:
            self._value = value
        else:
            write_slots(self.pages.value_cache, self.pages.block_table, value)

    def _read(self, cache: Tensor) -> Tensor:
        assert self.pages is not None
        return read_slots(cache, self.pages.block_table, self.config.budget)

    @property
    def next_slot(self) -> Tensor:
        """The slot that the next token is written into. Assigning checks and copies the values."""
        return self._next_slot

    @next_slot.setter
    def next_slot(self, value: Tensor) -> None:
        self._next_slot = check_next_slot(value, self._next_slot, self.config.budget).clone()

    def _allocate(self) -> None:
        batch, _, heads, slots, head_dim = self.sizes
        rows = (batch, heads) if self.config.per_head else (batch,)
        if self.pages is None:
            self.key = torch.zeros(batch, heads, slots, head_dim, dtype=self.dtype, device=self.device)
            self.value = torch.zeros_like(self.key)
        self.occupied = torch.zeros(*rows, slots, dtype=torch.bool, device=self.device)
        self.positions = torch.full((*rows, slots), -1, dtype=torch.int64, device=self.device)
        self._next_slot = torch.zeros(rows, dtype=torch.int64, device=self.device)
        score_dtype = accumulate_dtype(torch.empty(0, dtype=self.dtype))
        self.score = torch.full((*rows, slots), -INF, dtype=score_dtype, device=self.device)
        # Tokens at positions below this are sinks. It accounts for each row's padding.
        self._sink_end = torch.full((batch,), self.config.sinks, dtype=torch.int64, device=self.device)

    def prefill(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None = None) -> Tensor:
        """Full causal attention of the prompt; then at most budget - 1 of its tokens are kept, so that a slot is free.

        query [B, Hq, T, D]; key, value [B, Hkv, T, D]; occupied [B, T] bool, False for padding, by default all True.
        Returns [B, Hq, T, D], zeros for padding. RuntimeError if the state holds tokens; TypeError or ValueError for
        invalid arguments.
        """
        occupied = self._check_prompt(query, key, value, occupied)
        self._check_empty()
        if self.config.check_finite:
            query_, key_, value_ = (zero_unoccupied(tensor, occupied) for tensor in (query, key, value))
            check_all_finite(query=query_, key=key_, value=value_)
        if self._shared.process_group is not None:
            check_process_group(self._shared.process_group, tokens=key.shape[2], occupied=digest(occupied))
            self._start_change("prefill")                                               # another rank may fail
        output = causal_attention(query, key, value, occupied, scale=self.scale, **self._changes)
        self._sink_end = self._end_of_sinks(occupied)
        kept = self._select_prompt_tokens(query, key, value, occupied)                  # [B, N], -1 = none
        count = kept.shape[1]
        self._fill(gather_tokens(key, kept), gather_tokens(value, kept))
        kept = kept[:, None] if self.config.per_head else kept
        self.positions[..., :count] = kept
        self.occupied[..., :count] = kept >= 0
        self._next_slot = victims(self.occupied.long(), 1)[..., 0]                      # the first free slot
        self._seen = key.shape[2]
        self._end_change()
        return output

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write a token into `next_slot`, attend to it and to the cached tokens, and select the next slot.

        query [B, Hq, D]; key, value [B, Hkv, D]. Returns the attention output [B, Hq, D]. TypeError or ValueError for
        invalid arguments.
        """
        self._check_step(query, key, value)
        if self.config.check_finite:
            check_all_finite(query=query, key=key, value=value)
        if self._shared.process_group is not None:
            self._start_change("step")                                                  # another rank may fail
        slot = self._next_slot[..., None]                                               # [B, 1] or [B, Hkv, 1]
        place = per_kv_head(slot)[..., None].expand(-1, self.sizes.key_value_heads, -1, self.sizes.head_dim)
        if self.pages is None:
            self.key.scatter_(2, place, key[:, :, None])
            self.value.scatter_(2, place, value[:, :, None])
        else:
            self.key = self.key.scatter(2, place, key[:, :, None])
            self.value = self.value.scatter(2, place, value[:, :, None])
        self.occupied.scatter_(-1, slot, True)
        self.positions.scatter_(-1, slot, self._seen)
        result = _decode(
            query, self.key, self.value, self.occupied, self.scale, self.config.per_head, self._protected(),
            None if self.config.per_head else self._shared.process_group, **self._changes,
        )
        self._seen += 1
        self.score, self._next_slot = result.score, result.slot
        self._end_change()
        return result.output

    def _fill(self, key: Tensor, value: Tensor) -> None:
        """Write tokens [B, Hkv, N, D] into the first N slots."""
        if self.pages is None:
            self.key[:, :, :key.shape[2]], self.value[:, :, :key.shape[2]] = key, value
        else:
            write_slots(self.pages.key_cache, self.pages.block_table, key)
            write_slots(self.pages.value_cache, self.pages.block_table, value)

    def _select_prompt_tokens(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor) -> Tensor:
        """The prompt tokens to keep, the same for all heads: [B, min(T, budget - 1)], -1 where there is none."""
        total = key.shape[2]
        token = torch.arange(total, device=key.device)
        if total <= self.config.budget - 1:
            return token.where(occupied, -1)
        observers = query[:, :, -self.config.window:]
        observers = observers.masked_fill(~occupied[:, None, -observers.shape[2]:, None], 0)
        return compress_prompt(
            observers, key, value, self.config.budget - 1, kernel_size=self.config.kernel_size, occupied=occupied,
            protected=occupied & (token < self._sink_end[:, None]), shared_heads=True, scale=self.scale,
            process_group=self._shared.process_group, prefix_alone=self.config.prefix_alone,
            softcap=self.config.softcap, sink_logits=None if self.config.prefix_alone else self.sink_logits,
        ).kept

    def _end_of_sinks(self, occupied: Tensor) -> Tensor:
        """The end of each row's sinks, [B] int64. If the prompt has too few tokens, the next ones become sinks."""
        sinks, total = self.config.sinks, occupied.shape[1]
        is_sink = occupied & (occupied.long().cumsum(1) <= sinks)
        token = torch.arange(1, total + 1, device=occupied.device)
        last = (token * is_sink).max(1).values
        missing = sinks - is_sink.sum(1)
        return torch.where(missing > 0, total + missing, last)

    def _protected(self) -> Tensor:
        """The tokens that cannot be evicted next, [B, S] or [B, Hkv, S] bool."""
        sink_end = self._sink_end.view(-1, *[1] * (self.positions.dim() - 1))
        protected = self.occupied & (self.positions < sink_end)
        return protected | (self.positions == self._seen) if self.config.protect_newest else protected
