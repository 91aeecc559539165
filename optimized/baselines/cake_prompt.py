"""CAKE's rules for a prompt on the GPU: what the window observes, the budgets of the layers, and what a layer keeps."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from ...reference.baselines.cake import ObserveResult
from ...reference.contract import Sizes
from ...reference.contract.arguments import resolve_scale
from ...reference.contract.cake import check_budgets, check_log_preference, check_observe
from .._common.launch import (
    INTERPRETED,
    MAX_SPLITS,
    RESIDENT,
    SMALL_TILES,
    check_kernel_sizes,
    check_launchable,
    key_block,
    multiprocessors,
    on_device_of,
    padded_head_dim,
)
from .._common.numerics import LOG2_E
from .._common.operation import operation
from .cake_kernels import normaliser_kernel, observe_kernel

#: Window queries of a tile, at most.
QUERIES = 16 if SMALL_TILES else 64
#: The ranks of tokens that stay whatever the budget is, and of tokens that are not there.
WINDOW, MISSING = -1, 2**31 - 1
_MISSING = tl.constexpr(MISSING)


def observe(
    query_window: Tensor, key: Tensor, occupied: Tensor | None = None, *,
    gamma: float = 200.0, kernel_size: int = 5, scale: float | None = None,
) -> ObserveResult:
    """Indicators and the two parts of the preference, float32, from two passes over the keys.

    query_window [B, Hq, W, D], key [B, Hkv, T, D], any strides; occupied [B, T] bool, by default all. Semantics: the
    reference's `observe`, in float32, float16 or bfloat16; up to 16 query heads per KV head. TypeError or ValueError
    for invalid arguments, for inputs that require grad, and for CPU tensors outside Triton's interpreter.
    """
    occupied, sizes = check_observe(query_window, key, occupied, gamma, kernel_size)
    check_launchable(query_window=query_window, key=key)
    check_kernel_sizes(sizes)
    scale = resolve_scale(scale, sizes.head_dim)
    return ObserveResult(*_observe(query_window, key, occupied, float(gamma), kernel_size, scale))


def log_preference(
    dispersion: Tensor, shift: Tensor, *, tau1: float = 1.0, tau2: float = 1.0, whole_batch: bool = False
) -> Tensor:
    """The logarithm of a layer's preference, [B] float64. Semantics and errors: the reference's `log_preference`."""
    check_log_preference(dispersion, shift, tau1, tau2, whole_batch)
    parts = torch.stack([dispersion, shift]).double()
    if whole_batch:
        parts = parts.sum(1, keepdim=True).expand_as(parts)
    logarithm = parts.clamp_min(0).log()
    return logarithm[0] / tau1 + logarithm[1] / tau2


def budgets(log_preferences: Tensor, prefix: Tensor, total: int) -> Tensor:
    """The prefix tokens that each of the layers so far keeps, [B, layers] int64, without a synchronisation. Semantics
    and errors: the reference's `budgets`."""
    check_budgets(log_preferences, prefix, total)
    preference = log_preferences.double().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    highest = preference.amax(1, keepdim=True)
    preference = preference - highest.where(highest > -torch.inf, 0)
    weight = preference.exp().where(highest > -torch.inf, 1)
    wanted = (weight / weight.sum(1, keepdim=True) * total).long()
    most = prefix[:, None]
    budget = torch.minimum(wanted, most)
    budget = budget + _evenly((wanted - budget).sum(1, keepdim=True), wanted < most)
    missing = total - budget.sum(1, keepdim=True)
    budget = budget + _evenly(missing, (budget < most).where(missing > 0, budget > 1))
    return torch.minimum(budget, most).clamp_min(0)


def _evenly(amount: Tensor, mask: Tensor) -> Tensor:
    """amount [B, 1], positive or negative, in equal parts for the layers of mask [B, layers]. The first ones get the
    remainder, one each."""
    each = amount.abs().expand(mask.shape)
    count = mask.sum(1, keepdim=True).clamp_min(1)
    number = mask.cumsum(1) - 1
    part = each // count + (number < each % count)
    return (part * amount.sign()).where(mask, 0)


def ranks_of(score: Tensor) -> Tensor:
    """The rank of each token before the window, 0 for the best: score [B, Hkv, T] float32, as of `observe` ->
    [B, Hkv, T] int32, WINDOW for the window and MISSING for tokens that the layer does not have. Of equal scores, the
    lowest index has the last rank."""
    index = torch.arange(score.shape[-1], device=score.device)
    # One unique integer per token that orders by score (float32 bits made sortable), then index.
    bits = (score.masked_fill(score.isnan(), -torch.inf) + 0.0).contiguous().view(torch.int32)
    code = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32) + index
    best_first = code.argsort(-1, descending=True)
    in_window = score == torch.inf
    rank = torch.empty_like(bits).scatter_(-1, best_first, index.to(torch.int32).expand(score.shape))
    rank = rank - in_window.sum(-1, keepdim=True, dtype=torch.int32)
    return rank.masked_fill(in_window, WINDOW).masked_fill(score == -torch.inf, MISSING)


@operation("kvtwin::cake_keep", mutates_args=())
def keep(
    rank: Tensor, positions: Tensor, budget: Tensor, short: Tensor, slots: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What a layer keeps of tokens with rank, positions [B, Hkv, S], contiguous: ranks below budget [B], or in rows
    that are `short` [B] all. Returns, in the order of the tokens, their indices, -1 for none, positions, ranks and the
    order of slots, [B, Hkv, slots], and how many they are, [B, Hkv] int32."""
    batch, heads, total = rank.shape
    shape, device = (batch, heads, slots), rank.device
    place, kept = (torch.empty(shape, dtype=torch.int64, device=device) for _ in range(2))
    ranks, order = (torch.empty(shape, dtype=torch.int32, device=device) for _ in range(2))
    held = torch.empty(batch, heads, dtype=torch.int32, device=device)
    with on_device_of(rank):
        keep_kernel[(batch * heads,)](
            rank, positions, budget, short, place, kept, ranks, order, held, heads, total, slots,
            CHUNK=16 if SMALL_TILES else 2048, num_warps=8,
        )
    return place, kept, ranks, order, held


@keep.register_fake
def _(rank: Tensor, slots: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    shape = (*rank.shape[:2], slots)
    place, kept = (rank.new_empty(shape, dtype=torch.int64) for _ in range(2))
    return place, kept, rank.new_empty(shape), rank.new_empty(shape), rank.new_empty(rank.shape[:2])


@triton.jit(do_not_specialize=["heads", "total", "slots"])
def keep_kernel(
    rank, positions, budget, short, place, kept, ranks, order, held, heads, total, slots, CHUNK: tl.constexpr
):
    """Program: the tokens of a KV head. See `keep`."""
    row_head = tl.program_id(0).to(tl.int64)
    rank += row_head * total
    positions += row_head * total
    place += row_head * slots
    kept += row_head * slots
    ranks += row_head * slots
    order += row_head * slots
    most, whole = tl.load(budget + row_head // heads), tl.load(short + row_head // heads) != 0
    count = 0
    for start in range(0, total, CHUNK):
        i = start + tl.arange(0, CHUNK)
        r = tl.load(rank + i, mask=i < total, other=_MISSING)
        position = tl.load(positions + i, mask=i < total, other=-1)
        stays = (r < most) | (whole & (position >= 0))
        to = count + tl.cumsum(stays.to(tl.int32), 0) - 1
        inside = stays & (to < slots)
        tl.store(place + to, i.to(tl.int64), mask=inside)
        tl.store(kept + to, position, mask=inside)
        tl.store(ranks + to, r, mask=inside)
        count += tl.sum(stays.to(tl.int32), 0)
    tl.store(held + row_head, count)
    for start in range(0, slots, CHUNK):
        i = start + tl.arange(0, CHUNK)
        free = (i >= count) & (i < slots)
        tl.store(order + i, i, mask=i < slots)
        tl.store(place + i, tl.full([CHUNK], -1, tl.int64), mask=free)
        tl.store(kept + i, tl.full([CHUNK], -1, tl.int64), mask=free)
        tl.store(ranks + i, tl.full([CHUNK], _MISSING, tl.int32), mask=free)


@operation("kvtwin::cake_observe", mutates_args=())
def _observe(
    query_window: Tensor, key: Tensor, occupied: Tensor, gamma: float, kernel_size: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    batch, query_heads, window, head_dim = query_window.shape
    sizes = Sizes(batch, query_heads, key.shape[1], key.shape[2], head_dim)
    total, heads = sizes.slots, sizes.key_value_heads
    prefix = total - window
    score, dispersion, shift = _empty(key)
    score[..., prefix:] = torch.inf
    if prefix:
        block = min(64, key_block(head_dim, key.element_size(), total))
        rows = min(QUERIES, max(16, triton.next_power_of_2(window)))
        tiles, programs = triton.cdiv(total, block), batch * query_heads * triton.cdiv(window, rows)
        wanted = 3 if INTERPRETED else min(
            MAX_SPLITS, triton.cdiv(2 * RESIDENT * multiprocessors(key.device), programs)
        )
        share = triton.cdiv(tiles, min(wanted, tiles))
        splits = triton.cdiv(tiles, share)
        row_maxima, weight_sums = (
            torch.empty(batch, query_heads, window, splits, dtype=torch.float32, device=key.device) for _ in range(2)
        )
        indicator = torch.empty(batch, heads, prefix, dtype=torch.float32, device=key.device)
        parts = torch.empty(2, batch, heads * triton.cdiv(prefix, block), dtype=torch.float32, device=key.device)
        shape = {
            "GROUP": sizes.group, "HEAD_DIM": head_dim, "D_PAD": padded_head_dim(head_dim), "QUERIES": rows,
            "BLOCK": block,
        }
        strides = (*query_window.stride(), *key.stride(), *occupied.stride())
        with on_device_of(key):
            normaliser_kernel[(programs * splits,)](
                query_window, key, occupied, row_maxima, weight_sums, scale * LOG2_E.value, total, window, query_heads,
                *strides, splits, share * block, **shape, num_warps=4,
            )
            observe_kernel[(parts[0].numel(),)](
                query_window, key, occupied, row_maxima, weight_sums, indicator, *parts, scale * LOG2_E.value, gamma,
                total, window, heads, *strides, splits, **shape, SPLITS=triton.next_power_of_2(splits), num_warps=4,
            )
        dispersion, shift = parts.double().sum(-1).float()
        padded = pad(indicator, (kernel_size // 2, kernel_size // 2))
        # Added one by one, whatever the number of threads: tokens with the same neighbours have the same sum, a tie.
        pooled = padded[..., :prefix]
        for offset in range(1, kernel_size):
            pooled = pooled + padded[..., offset:offset + prefix]
        score[..., :prefix] = pooled / kernel_size / sizes.group
    return score.masked_fill_(~occupied[:, None], -torch.inf), dispersion.clone(), shift.clone()


def _empty(key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, total, _ = key.shape
    return (
        key.new_empty((batch, heads, total), dtype=torch.float32), key.new_zeros(batch, dtype=torch.float32),
        key.new_zeros(batch, dtype=torch.float32),
    )


@_observe.register_fake
def _(key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(key)
