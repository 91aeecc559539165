"""LongFlow on the GPU: two launches per decode step, and nothing returns to the host.

The first writes the new token and runs split-KV attention with all G query heads of a KV head in one program and an
online softmax, and keeps the logits, log2 ||v||_1 added: norms are made anew from the values at hand, by tensor cores,
in less time than stored ones could be read. Splits are merged and logits become log scores as soon as all programs of a
KV head are done, where there are many heads, else in the second launch. That one picks the slot.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..reference._validate import (
    capturing, check_all_finite, check_dtype, check_flag, check_integer, check_next_slot, check_reorder, check_tensor,
    resolve_device, resolve_scale,
)
from ..reference._validate_attention import check_attention, check_prompt, check_slot_mask, check_step, state_sizes
from ..reference.contract import Sizes
from ..reference.longflow import CompressResult, DecodeResult, LongFlowConfig
from ._attention import causal_attention
from ._launch import (
    DTYPES, GROUP_ROWS, INTERPRETED, MAX_SPLITS, PTX, check_kernel_device, check_kernel_sizes, check_launchable,
    discards, early_rows, fused, key_block, launches_early, mask_unit, on_device_of, padded_head_dim, padded_slots,
    split_slots, stride_unit,
)
from ._longflow_kernels import attend_kernel
from ._longflow_scores import choose_kernel, score_kernel
from ._numerics import LOG2_E
from .baselines.snapkv import choose, gather_tokens

__all__ = [
    "CompressResult", "DecodeResult", "LongFlowConfig", "LongFlowState", "compress_prefill", "decode_attention",
]


def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, *,
    scale: float | None = None, per_head: bool = False, protected: Tensor | None = None, check_finite: bool = False,
) -> DecodeResult:
    """Attention of one new query over the occupied slots, with every slot's LongFlowScore and the next victim.

    query [B, Hq, D]; key, value [B, Hkv, S, D], any strides; occupied [B, S] bool ([B, Hkv, S] with per_head);
    protected like occupied, default none; scale defaults to D ** -0.5. float32, float16 or bfloat16; D from 16 to
    256; up to 16 query heads per KV head. Results and semantics: `kvtwin.reference.longflow.decode_attention`.
    TypeError, ValueError for arguments that do not fit, for inputs that require grad, and for CPU tensors outside
    Triton's interpreter.
    """
    sizes = check_attention(query, key, value)
    check_flag("per_head", per_head)
    check_flag("check_finite", check_finite)
    check_slot_mask("occupied", occupied, sizes, per_head, key)
    if protected is not None:
        check_slot_mask("protected", protected, sizes, per_head, key)
    scale = resolve_scale(scale, sizes.head_dim)
    check_launchable(query=query, key=key, value=value)
    check_kernel_sizes(sizes)
    if check_finite:
        hidden = ~(occupied if per_head else occupied[:, None])[..., None]
        check_all_finite(query=query, key=key.masked_fill(hidden, 0), value=value.masked_fill(hidden, 0))
    return DecodeResult(*_decode(query, key, value, occupied, protected, scale, per_head))


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
    kept = choose(
        query_window, key, value, budget,
        kernel_size=kernel_size, occupied=occupied, protected=protected, shared_heads=True, scale=scale,
    )
    return CompressResult(gather_tokens(key, kept), gather_tokens(value, kept), kept)


class LongFlowState:
    """A LongFlow cache: preallocated buffers of `budget` slots, updated in place; a step fits in a CUDA graph.

    key, value [B, Hkv, S, D] with S = budget; occupied [B, S] bool and positions [B, S] int64 (the token in each slot,
    counted from 0 with padding included; -1 = free); next_slot [B] int64, writable; score [B, S] float32, the last
    step's. With config.per_head these four are [B, Hkv, S] and [B, Hkv]. What unoccupied slots hold is unspecified.
    """

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
        check_kernel_sizes(self.sizes)
        self.dtype = check_dtype("dtype", dtype, DTYPES)
        self.device = resolve_device(device)
        check_kernel_device("device", self.device)
        self.scale = resolve_scale(config.scale, head_dim)

        @torch.inference_mode(False)  # else a state made in inference mode could not be used outside of it
        def buffer(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        heads, slots = key_value_heads, config.budget
        rows = (batch, heads) if config.per_head else (batch,)
        self.key = buffer(batch, heads, slots, head_dim, dtype=dtype)
        self.value = buffer(batch, heads, slots, head_dim, dtype=dtype)
        self.occupied = buffer(*rows, slots, dtype=torch.bool)
        self.positions = buffer(*rows, slots, dtype=torch.int64)
        self._next_slot = buffer(*rows, dtype=torch.int64)
        self.score = buffer(*rows, slots, dtype=torch.float32)
        self._sink_end = buffer(batch, dtype=torch.int64)                       # positions below this are sinks
        self._seen = buffer(1, dtype=torch.int64)                               # on the device: graphs replay it
        with torch.inference_mode(False):
            self._scratch = _scratch(self.sizes, self.key, config.per_head)
        self.reset()

    @property
    def tokens_seen(self) -> int:
        """Tokens that came in since the last reset, padding included. Reading it synchronises with the GPU."""
        return int(self._seen.item())

    @property
    def next_slot(self) -> Tensor:
        """Where the next token will be written. Assigning checks the values and copies them; in-place writes are not
        checked, and a token written to a slot that is not there is lost."""
        return self._next_slot

    @next_slot.setter
    def next_slot(self, value: Tensor) -> None:
        self._next_slot.copy_(check_next_slot(value, self._next_slot, self.config.budget))

    def reset(self) -> None:
        """Forget every token."""
        self.occupied.zero_()
        self.positions.fill_(-1)
        self._next_slot.zero_()
        self.score.fill_(-torch.inf)
        self._sink_end.fill_(self.config.sinks)
        self._seen.zero_()
        arrivals = self._scratch[2]
        arrivals.zero_()                                                        # should a launch have been cut short

    def prefill(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None = None) -> Tensor:
        """The prompt: full causal attention, then at most budget - 1 of its tokens stay, so that a step finds room.

        query [B, Hq, T, D]; key, value [B, Hkv, T, D]; occupied [B, T] bool, False for padding, default all True.
        Returns [B, Hq, T, D]; padding gives zeros. RuntimeError when the state already holds tokens.
        """
        total = check_prompt(
            query, key, value, occupied, sizes=self.sizes, dtype=self.dtype, device=self.device
        )
        check_launchable(query=query, key=key, value=value)
        # Asked of the device: a graph's replays are steps that the host does not see.
        if not capturing(self.device) and self.tokens_seen:
            raise RuntimeError("prefill needs an empty state: call reset() first")
        if occupied is None:
            occupied = torch.ones(self.sizes.batch, total, dtype=torch.bool, device=self.device)
        if self.config.check_finite:
            hidden = ~occupied[:, None, :, None]
            check_all_finite(
                query=query.masked_fill(hidden, 0), key=key.masked_fill(hidden, 0), value=value.masked_fill(hidden, 0)
            )
        output = causal_attention(query, key, value, occupied, self.scale)
        self._set_sinks(occupied)
        kept = self._choose(query, key, value, occupied)
        count = kept.shape[1]
        self.key[:, :, :count] = gather_tokens(key, kept)
        self.value[:, :, :count] = gather_tokens(value, kept)
        kept = kept[:, None] if self.config.per_head else kept
        self.positions[..., :count] = kept
        self.occupied[..., :count] = kept >= 0
        index = torch.arange(self.config.budget, device=self.device)
        self._next_slot.copy_(index.where(~self.occupied, self.config.budget).amin(-1))
        self._seen.fill_(total)
        return output

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One token: written into `next_slot`, attended to together with the rest, then the next slot is chosen.

        query [B, Hq, D]; key, value [B, Hkv, D]. Returns the attention output [B, Hq, D]. No host synchronisation.
        """
        check_step(query, key, value, sizes=self.sizes, dtype=self.dtype, device=self.device)
        check_launchable(query=query, key=key, value=value)
        if self.config.check_finite:
            check_all_finite(query=query, key=key, value=value)
        output: Tensor = _step(
            query, key, value, self.key, self.value, self.occupied, self.positions, self._next_slot, self.score,
            self._sink_end, self._seen, *self._scratch, self.scale, self.config.per_head, self.config.protect_newest,
        )
        return output

    def reorder(self, index: Tensor) -> None:
        """Row b becomes what row index[b] was (beam search). index [B] int64."""
        index = check_reorder(index, self.sizes.batch, self.device)
        for tensor in (
            self.key, self.value, self.occupied, self.positions, self._next_slot, self.score, self._sink_end,
        ):
            tensor.copy_(tensor.index_select(0, index))

    def _choose(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor) -> Tensor:
        """Which prompt tokens stay, one choice for all heads: [B, min(T, budget - 1)] int64, -1 where there is none."""
        total, target = key.shape[2], self.config.budget - 1
        token = torch.arange(total, device=self.device)
        if total <= target:
            return token.where(occupied, -1)
        return choose(
            query[:, :, -self.config.window:], key, value, target,
            kernel_size=self.config.kernel_size, occupied=occupied,
            protected=token < self._sink_end[:, None], shared_heads=True, scale=self.scale,
        )

    def _set_sinks(self, occupied: Tensor) -> None:
        """The row's n-th token ends its sinks; tokens that the prompt lacks are those that follow it."""
        sinks, total = self.config.sinks, occupied.shape[1]
        rank = occupied.cumsum(1)                                               # tokens up to and including each
        before = (rank < sinks).sum(1)                                          # positions before the n-th token
        missing = (sinks - rank[:, -1]).clamp_min(0)
        end = torch.where(missing > 0, total + missing, before + 1)
        self._sink_end.copy_(end if sinks else torch.zeros_like(end))


#: As in _launch, but twice as many: the fewer KV heads are under way, the fewer logits must stay in the cache.
PROGRAMS = 32

#: Registers of a thread of 16-bit caches where three programs are to fit on a multiprocessor, as shared memory lets
#: them. Left to itself the compiler takes 118 or 206, by the shape, or spills to stay below 128.
REGISTERS = 168

#: Slots per program where a second launch finishes scores.
SCORE_BLOCK = 32 if INTERPRETED else 256


class _Work(NamedTuple):
    """How a step is cut into programs: tiles of `block` slots; of a batch's first `early` rows each KV head's slots
    among `splits` programs, `split_size` to each, of the others among `late_splits`."""

    block: int
    early: int
    splits: int
    split_size: int
    late_splits: int
    late_size: int


def _cut(sizes: Sizes, key: Tensor) -> _Work:
    block = key_block(sizes.head_dim, key.element_size(), sizes.slots)
    splits, size = split_slots(sizes, block, key.device, PROGRAMS)
    if not fused(sizes, key.device) or size < 2 * block or 2 * splits > MAX_SPLITS:
        return _Work(block, 0, splits, size, splits, size)
    finer = triton.cdiv(size, 2 * block) * block
    late_splits = triton.cdiv(sizes.slots, finer)
    return _Work(block, early_rows(sizes, late_splits, key.device), splits, size, late_splits, finer)


def _scratch(sizes: Sizes, key: Tensor, per_head: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Room for what passes between programs: a float32 workspace, cut up by `_launch`; a candidate per block of slots;
    and counters, zero between steps: of each KV head, and of each decision."""
    flats = sizes.batch * sizes.key_value_heads
    decisions = flats if per_head else sizes.batch
    return (
        torch.empty(sum(_cuts(sizes, _cut(sizes, key).late_splits)), dtype=torch.float32, device=key.device),
        torch.empty(decisions, triton.cdiv(sizes.slots, SCORE_BLOCK), dtype=torch.int64, device=key.device),
        torch.zeros(_after(flats) + decisions, dtype=torch.int32, device=key.device),
    )


def _cuts(sizes: Sizes, splits: int) -> list[int]:
    """Sizes of logits, partial accumulators, their maxima and sums, normalisers and ranks in the workspace."""
    heads, flats = sizes.batch * sizes.query_heads, sizes.batch * sizes.key_value_heads
    row = padded_slots(sizes.slots)
    group = triton.next_power_of_2(sizes.group)
    cuts = (
        flats * row * group, heads * splits * sizes.head_dim, heads * splits, heads * splits, heads * 2, flats * row
    )
    return [_after(cut) for cut in cuts]


def _after(count: int) -> int:
    """Where the next piece of scratch may begin: all aligned alike, as Triton compiles anew for another alignment."""
    return triton.cdiv(count, 32) * 32


@torch.library.custom_op("kvtwin::longflow_decode", mutates_args=())
def _decode(
    query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, protected: Tensor | None, scale: float,
    per_head: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, query_heads, head_dim = query.shape
    sizes = Sizes(batch, query_heads, key.shape[1], key.shape[2], head_dim)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    score = torch.empty(occupied.shape, dtype=torch.float32, device=query.device)
    slot = torch.empty(occupied.shape[:-1], dtype=torch.int64, device=query.device)
    _launch(
        sizes, query, key, value, occupied, protected, output, score, slot,
        _scratch(sizes, key, per_head), scale=scale, per_head=per_head,
    )
    return output, score, slot


@_decode.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, protected: Tensor | None, scale: float,
    per_head: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        query.new_empty(query.shape),
        query.new_empty(occupied.shape, dtype=torch.float32),
        query.new_empty(occupied.shape[:-1], dtype=torch.int64),
    )


@torch.library.custom_op(
    "kvtwin::longflow_step",
    mutates_args=(
        "key", "value", "occupied", "positions", "next_slot", "score", "seen", "workspace", "candidates",
        "arrivals",
    ),
)
def _step(
    query: Tensor, new_key: Tensor, new_value: Tensor, key: Tensor, value: Tensor,
    occupied: Tensor, positions: Tensor, next_slot: Tensor, score: Tensor, sink_end: Tensor, seen: Tensor,
    workspace: Tensor, candidates: Tensor, arrivals: Tensor, scale: float, per_head: bool, protect_newest: bool,
) -> Tensor:
    batch, query_heads, head_dim = query.shape
    sizes = Sizes(batch, query_heads, key.shape[1], key.shape[2], head_dim)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    _launch(
        sizes, query, key, value, occupied, None, output, score, next_slot,
        (workspace, candidates, arrivals), scale=scale, per_head=per_head,
        arrival=(new_key, new_value, positions, sink_end, seen), protect_newest=protect_newest,
    )
    return output


@_step.register_fake
def _(
    query: Tensor, new_key: Tensor, new_value: Tensor, key: Tensor, value: Tensor,
    occupied: Tensor, positions: Tensor, next_slot: Tensor, score: Tensor, sink_end: Tensor, seen: Tensor,
    workspace: Tensor, candidates: Tensor, arrivals: Tensor, scale: float, per_head: bool, protect_newest: bool,
) -> Tensor:
    return query.new_empty(query.shape)


def _launch(
    sizes: Sizes, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, protected: Tensor | None,
    output: Tensor, score: Tensor, slot: Tensor,
    scratch: tuple[Tensor, Tensor, Tensor], *, scale: float, per_head: bool,
    arrival: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None = None, protect_newest: bool = False,
) -> None:
    """The two kernels of a step. With `arrival` a new token is written first, into slot `slot`, and the protected
    slots follow from positions; without it the cache stays as it is and `protected` is a mask."""
    batch, _, heads, slots, head_dim = sizes
    group = sizes.group
    group_pad = triton.next_power_of_2(group)
    work = _cut(sizes, key)
    splits = work.late_splits                                                   # which are the more
    at_once = fused(sizes, key.device)
    workspace, candidates, arrivals = scratch
    logits, partial, tops, weight_sums, normalisers, ranks = workspace.split(_cuts(sizes, splits))
    new_key, new_value, positions, sink_end, seen = arrival or (query, query, slot, slot, slot)
    unit, byte_unit = stride_unit(key, value), mask_unit(occupied)
    head_stride = occupied.stride(1) if per_head else 0
    mask = occupied if protected is None else protected
    masks = (
        occupied.stride(0), head_stride, occupied.stride(-1),
        mask.stride(0), mask.stride(1) if per_head else 0, mask.stride(-1),
    )
    discard, dependent = discards(key.device), at_once and launches_early(key.device)
    options = {"GROUP": group, "HEAD_DIM": head_dim, "PER_HEAD": per_head, "ARRIVAL": arrival is not None}
    splitting = {
        "GROUP_PAD": group_pad, "D_PAD": padded_head_dim(head_dim),
        "SPLITS": 8 if splits <= 8 else 16 if splits <= 16 else MAX_SPLITS,
    }
    protection = {"PROTECTED": protected is not None, "PROTECT_NEWEST": protect_newest}
    registers = {"maxnreg": REGISTERS} if PTX and at_once and key.element_size() == 2 else {}
    decisions, blocks = candidates.shape
    # Programs that also finish a KV head are fewer at a time, and so sooner free what must not leave the cache.
    warps = 4 if at_once else 2
    with on_device_of(key):
        attend_kernel[(heads * (work.early * work.splits + (batch - work.early) * splits),)](
            query, key, value, occupied, new_key, new_value, slot, positions, seen,
            logits, partial, tops, weight_sums, ranks, output, arrivals,
            scale * LOG2_E.value, slots, *work[1:], heads,
            *query.stride(), *(stride // unit for stride in key.stride()[:3]), key.stride(3),
            *(stride // unit for stride in value.stride()[:3]), value.stride(3),
            occupied.stride(0) // byte_unit, head_stride // byte_unit, occupied.stride(-1),
            *new_key.stride(), *new_value.stride(),
            ROWS=GROUP_ROWS, BLOCK=work.block, UNIT=unit, MASK_UNIT=byte_unit,
            CHUNK=32 if INTERPRETED else min(1024, 4096 // group_pad), WARPS=warps,
            FUSED=at_once, DISCARD=discard, DEPENDENT=dependent, **options, **splitting,
            num_warps=warps, num_stages=3 if at_once else 2, **registers,
        )
        if at_once:
            row = min(4096, triton.next_power_of_2(padded_slots(slots)))
            choose_kernel[(decisions,)](
                ranks, occupied, mask, positions, sink_end, seen, score, slot, slots, heads, *masks,
                HEADS=1 if per_head else 8, BLOCK=32 if INTERPRETED else row, DISCARD=discard, DEPENDENT=dependent,
                **options, **protection, num_warps=16, **({"launch_pdl": True} if dependent else {}),
            )
        else:
            score_kernel[(decisions * blocks + batch * heads,)](
                logits, partial, tops, weight_sums, normalisers, occupied, mask, positions, sink_end,
                seen, output, score, slot, candidates, arrivals[_after(batch * heads):],
                slots, splits, heads, blocks, *masks,
                HEADS=16, BLOCK=SCORE_BLOCK, **options, **splitting, **protection, num_warps=8,
            )
