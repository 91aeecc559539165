"""LongFlow: one attention pass per decode step yields the output, every token's importance, and the slot to overwrite.

Paper: "LongFlow: Efficient KV Cache Compression for Reasoning Models". Importance of token i (eq. 6):
LongFlowScore(t_i) = ||a_i v_i||_1, here divided by head_dim and averaged over the query heads that share the slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .attention import INF, accumulate_dtype, causal_attention, logits, per_kv_head, per_query_head, softmax
from .attention import weighted_values, zero_unoccupied
from .baselines.snapkv import CompressResult, compress, gather_tokens
from .contract import (
    MethodConfig, check_all_finite, check_attention, check_dtype, check_flag, check_integer, check_next_slot,
    check_prompt, check_reorder, check_slot_mask, check_step, check_tensor, resolve_device, resolve_scale,
    state_sizes,
)
from .selection import victims

__all__ = [
    "CompressResult", "DecodeResult", "LongFlowConfig", "LongFlowState", "compress_prefill", "decode_attention",
]


class DecodeResult(NamedTuple):
    """One decode step over a cache of slots.

    output: [B, Hq, D] in query's dtype. score: [B, S] (or [B, Hkv, S] per head) float32 (float64 for float64), higher
    = keep, unoccupied -inf, protected +inf. slot: [B] (or [B, Hkv]) int64, the next slot to overwrite.
    """

    output: Tensor
    score: Tensor
    slot: Tensor


@dataclass(frozen=True)
class LongFlowConfig(MethodConfig):
    """How a LongFlow cache evicts.

    budget: slots per row; the new token counts, so min(budget, t + 1) tokens are alive after step t (section 4.1).
    per_head: every KV head evicts for itself; otherwise one slot per sequence and layer, as the released code does.
    protect_newest: the token just written cannot be the next victim (eq. 3: i < t); False is the released behaviour.
    sinks: that many first tokens of a row are never evicted, an int >= 0.
    window, kernel_size: SnapKV's observation window and (odd) pool width, for prompts over budget - 1 tokens.
    check_finite: raise ValueError on NaN or infinity in the inputs; costs a synchronisation, refused in CUDA graphs.
    scale: the factor on query . key, default head_dim ** -0.5.
    Raises TypeError or ValueError for anything else, and where the protected tokens would fill the budget.
    """

    per_head: bool = False
    protect_newest: bool = True
    sinks: int = 0
    window: int = 32
    kernel_size: int = 5
    check_finite: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("per_head", "protect_newest", "check_finite"):
            check_flag(name, getattr(self, name))
        check_integer("sinks", self.sinks, minimum=0)
        check_integer("window", self.window, minimum=1)
        if check_integer("kernel_size", self.kernel_size, minimum=1) % 2 == 0:
            raise ValueError(f"kernel_size must be odd, so that the pool has a centre, got {self.kernel_size}")
        # With a budget of 1 the newest is the only token there is, and is overwritten.
        held = self.sinks + (self.protect_newest and self.budget > 1)
        if held >= self.budget:
            raise ValueError(
                f"budget must exceed the protected tokens (sinks + protect_newest = {held}), got {self.budget}"
            )


def log_score(
    query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, *, scale: float, per_head: bool = False
) -> Tensor:
    """log of the summed LongFlowScore: logsumexp_h(s_hj - lse_h + log ||v_j||_1), the order of eviction.

    Sums over all query heads, or over each KV head's group with per_head: [B, S] or [B, Hkv, S]. It does not underflow
    where eq. 6 does. -inf for zero values and unoccupied slots.
    """
    logit = logits(query, key, occupied, scale=scale)                                   # [B, Hq, S]
    magnitude = zero_unoccupied(value, occupied).to(logit.dtype).abs().sum(-1)          # [B, Hkv, S]  ||v_j||_1
    log_weight = logit - logit.logsumexp(-1, keepdim=True)                              # [B, Hq, S]   log a_hj
    log_contribution = log_weight + per_query_head(magnitude.log(), query.shape[1])     # [B, Hq, S]   log ||a v||_1
    batch, key_value_heads, slots, _ = key.shape
    heads = log_contribution.view(batch, key_value_heads if per_head else 1, -1, slots)
    summed = heads.logsumexp(2)
    mask = per_kv_head(occupied)
    summed = summed.masked_fill(~mask, -INF)
    return summed if per_head else summed[:, 0]


def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, *,
    scale: float | None = None, per_head: bool = False, protected: Tensor | None = None, check_finite: bool = False,
) -> DecodeResult:
    """Attention of one new query over the occupied slots, with every slot's LongFlowScore and the next victim.

    query [B, Hq, D]; key, value [B, Hkv, S, D], any strides; occupied [B, S] bool ([B, Hkv, S] with per_head);
    protected like occupied, default none; scale defaults to D ** -0.5.
    output: eq. 1 over occupied slots; zeros in a row without any. score: eq. 6 / D, the mean over the query heads.
    slot: the lowest unoccupied index if there is one, else the unprotected slot of the lowest *log* score (the linear
    one underflows into false ties), ties to the lowest index; the lowest index where all are protected.
    Non-finite numbers in occupied slots propagate as IEEE has it, and the slot stays in range (a NaN score ranks
    lowest); check_finite=True raises ValueError instead. TypeError, ValueError for arguments that do not fit.
    """
    sizes = check_attention(query, key, value)
    check_flag("per_head", per_head)
    check_flag("check_finite", check_finite)
    check_slot_mask("occupied", occupied, sizes, per_head, key)
    if protected is not None:
        check_slot_mask("protected", protected, sizes, per_head, key)
    scale = resolve_scale(scale, sizes.head_dim)
    if check_finite:
        check_all_finite(query=query, key=zero_unoccupied(key, occupied), value=zero_unoccupied(value, occupied))

    weight = softmax(logits(query, key, occupied, scale=scale))                         # [B, Hq, S]   eq. 1
    output = weighted_values(weight, value, occupied).to(query.dtype)                   # [B, Hq, D]   eq. 1
    magnitude = zero_unoccupied(value, occupied).to(weight.dtype).abs().mean(-1)        # [B, Hkv, S]  ||v_j||_1 / D
    contribution = weight * per_query_head(magnitude, sizes.query_heads)                # [B, Hq, S]   eq. 6
    heads = sizes.key_value_heads if per_head else 1
    score = contribution.view(sizes.batch, heads, -1, sizes.slots).mean(2)
    score = score if per_head else score[:, 0]
    score = score.masked_fill(~occupied, -INF)
    if protected is not None:
        score = score.masked_fill(protected & occupied, INF)
    rank = log_score(query, key, value, occupied, scale=scale, per_head=per_head)
    return DecodeResult(output, score, _next_slot(rank, occupied, protected))


def compress_prefill(
    query_window: Tensor, key: Tensor, value: Tensor, budget: int, *,
    window: int = 32, kernel_size: int = 5, occupied: Tensor | None = None, protected: Tensor | None = None,
    scale: float | None = None,
) -> CompressResult:
    """A long prompt cut to `budget` tokens by SnapKV, one choice for all heads (LongFlow section 4.1).

    query_window [B, Hq, W, D], the last W <= window queries of the prompt; key, value [B, Hkv, T, D]; occupied and
    protected [B, T] bool. budget 0 keeps nothing. See `baselines.snapkv.compress`.
    """
    check_integer("window", window, minimum=1)
    check_tensor("query_window", query_window, dims=4, layout="[B, Hq, W, D]")
    if query_window.shape[2] > window:
        raise ValueError(
            f"query_window must be [B, Hq, W, D] with W <= window = {window}, got {tuple(query_window.shape)}"
        )
    return compress(
        query_window, key, value, budget,
        kernel_size=kernel_size, occupied=occupied, protected=protected, shared_heads=True, scale=scale,
    )


def _next_slot(rank: Tensor, occupied: Tensor, protected: Tensor | None) -> Tensor:
    """Free slots first, then the unprotected by rank, then the protected: an explicit rule on the masks, since a rank
    of -inf may be a real token's. Free and protected slots go by index alone, whatever their ranks."""
    slots = rank.shape[-1]
    index = torch.arange(slots, device=rank.device).expand(rank.shape)
    turn = torch.empty_like(index).scatter(-1, victims(rank, slots), index)             # 0 goes first
    if protected is not None:
        turn = torch.where(protected, index + slots, turn)
    turn = torch.where(occupied, turn, index - slots)
    return victims(turn, 1)[..., 0]


class LongFlowState:
    """A LongFlow cache: a static buffer of `budget` slots, of which one is overwritten at every step (section 3.4).

    key, value [B, Hkv, S, D] with S = budget; occupied [B, S] bool and positions [B, S] int64 (the token in each slot,
    counted from 0 with padding included; -1 = free); next_slot [B] int64, writable; score [B, S], the last step's.
    With config.per_head these four are [B, Hkv, S] and [B, Hkv].
    """

    _next_slot: Tensor

    def __init__(
        self, config: LongFlowConfig, *, batch: int, query_heads: int, key_value_heads: int, head_dim: int,
        dtype: torch.dtype, device: torch.device | str,
    ) -> None:
        if not isinstance(config, LongFlowConfig):
            raise TypeError(f"config must be a LongFlowConfig, got {type(config).__name__}")
        self.config = config
        self.sizes = state_sizes(
            batch=batch, query_heads=query_heads, key_value_heads=key_value_heads, slots=config.budget,
            head_dim=head_dim,
        )
        self.dtype = check_dtype("dtype", dtype)
        self.device = resolve_device(device)
        self.scale = resolve_scale(config.scale, head_dim)
        self.reset()

    @property
    def tokens_seen(self) -> int:
        """Tokens that came in since the last reset, padding included."""
        return self._seen

    @property
    def next_slot(self) -> Tensor:
        """Where the next token will be written. Assigning checks the values and copies them."""
        return self._next_slot

    @next_slot.setter
    def next_slot(self, value: Tensor) -> None:
        self._next_slot = check_next_slot(value, self._next_slot, self.config.budget).clone()

    @torch.inference_mode(False)  # else a state that was made in inference mode could not be used outside of it
    def reset(self) -> None:
        """Forget every token."""
        batch, _, heads, slots, head_dim = self.sizes
        rows = (batch, heads) if self.config.per_head else (batch,)
        self.key = torch.zeros(batch, heads, slots, head_dim, dtype=self.dtype, device=self.device)
        self.value = torch.zeros_like(self.key)
        self.occupied = torch.zeros(*rows, slots, dtype=torch.bool, device=self.device)
        self.positions = torch.full((*rows, slots), -1, dtype=torch.int64, device=self.device)
        self._next_slot = torch.zeros(rows, dtype=torch.int64, device=self.device)
        score_dtype = accumulate_dtype(self.key)
        self.score = torch.full((*rows, slots), -INF, dtype=score_dtype, device=self.device)
        # Tokens at positions below this are sinks; a row's own padding does not count.
        self._sink_end = torch.full((batch,), self.config.sinks, dtype=torch.int64, device=self.device)
        self._seen = 0

    def prefill(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None = None) -> Tensor:
        """The prompt: full causal attention, then at most budget - 1 of its tokens stay, so that a step finds room.

        query [B, Hq, T, D]; key, value [B, Hkv, T, D]; occupied [B, T] bool, False for padding, default all True.
        Returns [B, Hq, T, D]; padding gives zeros. RuntimeError when the state already holds tokens.
        """
        total = check_prompt(
            query, key, value, occupied, sizes=self.sizes, dtype=self.dtype, device=self.device
        )
        if self._seen:
            raise RuntimeError("prefill needs an empty state: call reset() first")
        if occupied is None:
            occupied = torch.ones(self.sizes.batch, total, dtype=torch.bool, device=self.device)
        if self.config.check_finite:
            query_, key_, value_ = (zero_unoccupied(tensor, occupied) for tensor in (query, key, value))
            check_all_finite(query=query_, key=key_, value=value_)
        output = causal_attention(query, key, value, occupied, scale=self.scale)
        self._sink_end = self._end_of_sinks(occupied)
        kept = self._choose(query, key, value, occupied)                                # [B, N], -1 = none
        count = kept.shape[1]
        self.key[:, :, :count] = gather_tokens(key, kept)
        self.value[:, :, :count] = gather_tokens(value, kept)
        kept = kept[:, None] if self.config.per_head else kept
        self.positions[..., :count] = kept
        self.occupied[..., :count] = kept >= 0
        self._next_slot = victims(self.occupied.long(), 1)[..., 0]                      # the first free one
        self._seen = total
        return output

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One token: written into `next_slot`, attended to together with the rest, then the next slot is chosen.

        query [B, Hq, D]; key, value [B, Hkv, D]. Returns the attention output [B, Hq, D].
        """
        check_step(query, key, value, sizes=self.sizes, dtype=self.dtype, device=self.device)
        if self.config.check_finite:
            check_all_finite(query=query, key=key, value=value)
        slot = self._next_slot[..., None]                                               # [B, 1] or [B, Hkv, 1]
        place = per_kv_head(slot)[..., None].expand(-1, self.sizes.key_value_heads, -1, self.sizes.head_dim)
        self.key.scatter_(2, place, key[:, :, None])
        self.value.scatter_(2, place, value[:, :, None])
        self.occupied.scatter_(-1, slot, True)
        self.positions.scatter_(-1, slot, self._seen)
        result = decode_attention(
            query, self.key, self.value, self.occupied,
            scale=self.scale, per_head=self.config.per_head, protected=self._protected(),
        )
        self._seen += 1
        self.score, self._next_slot = result.score, result.slot
        return result.output

    def reorder(self, index: Tensor) -> None:
        """Row b becomes what row index[b] was (beam search). index [B] int64."""
        index = check_reorder(index, self.sizes.batch, self.device)
        for name in ("key", "value", "occupied", "positions", "_next_slot", "score", "_sink_end"):
            setattr(self, name, getattr(self, name).index_select(0, index))

    def _choose(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor) -> Tensor:
        """Which prompt tokens stay, one choice for all heads: [B, min(T, budget - 1)], -1 where there is none."""
        total = key.shape[2]
        token = torch.arange(total, device=key.device)
        if total <= self.config.budget - 1:
            return token.where(occupied, -1)
        observers = query[:, :, -self.config.window:]
        observers = observers.masked_fill(~occupied[:, None, -observers.shape[2]:, None], 0)
        return compress_prefill(
            observers, key, value, self.config.budget - 1,
            window=self.config.window, kernel_size=self.config.kernel_size, occupied=occupied,
            protected=occupied & (token < self._sink_end[:, None]), scale=self.scale,
        ).kept

    def _end_of_sinks(self, occupied: Tensor) -> Tensor:
        """One past the position of each row's last sink; sinks that the prompt lacks follow it. [B] int64."""
        sinks, total = self.config.sinks, occupied.shape[1]
        is_sink = occupied & (occupied.long().cumsum(1) <= sinks)
        token = torch.arange(1, total + 1, device=occupied.device)
        last = (token * is_sink).max(1).values
        missing = sinks - is_sink.sum(1)
        return torch.where(missing > 0, total + missing, last)

    def _protected(self) -> Tensor:
        sink_end = self._sink_end.view(-1, *[1] * (self.positions.dim() - 1))
        protected = self.occupied & (self.positions < sink_end)
        return protected | (self.positions == self._seen) if self.config.protect_newest else protected
