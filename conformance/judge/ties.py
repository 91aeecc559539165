"""Exact ties: tokens that score the same in any arithmetic, because the inputs of their scores are equal.

Two float64 scores that happen to be equal are not a tie: other arithmetic may separate them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def tie_classes(key: Tensor, value: Tensor, occupied: Tensor, *, per_head: bool = False) -> Tensor:
    """Classes of tokens that score the same: [B, S] (or [B, Hkv, S]) int64, the lowest slot of each class.

    Tokens tie if key and value are bitwise equal in every KV head that shares the decision, or if their values are
    zero, which gives a score of 0 for any key. Every unoccupied slot is its own class.
    """
    batch, heads, slots, _ = key.shape
    zero = (value == 0).all(-1)                                                           # [B, Hkv, S]
    bits = torch.cat([_bits(key), _bits(value)], -1)                                      # [B, Hkv, S, 2 D]
    if per_head:
        bits, zero = bits.view(batch * heads, slots, -1), zero.view(batch * heads, slots)
    else:
        bits, zero = bits.transpose(1, 2).reshape(batch, slots, -1), zero.all(1)
    return _classes(bits, zero, occupied.reshape(-1, slots)).view(occupied.shape)


def _bits(tensor: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()]).long()


def _classes(bits: Tensor, zero: Tensor, holds: Tensor) -> Tensor:
    """bits [R, S, n], zero and holds [R, S] -> the lowest equal slot of the row, [R, S]."""
    slots = bits.shape[1]
    index = torch.arange(slots, device=bits.device).expand(zero.shape)
    # Slots with equal hashes are then compared bit by bit.
    factor = torch.arange(1, bits.shape[2] + 1, device=bits.device) * 0x9E3779B97F4A7C1 | 1
    factor = factor * (factor >> 29 ^ factor)
    found = (bits * factor).sum(-1)
    named = holds & ~zero
    lowest = lowest_equal(found.where(named, index))
    same = (bits.gather(1, lowest[..., None].expand(bits.shape)) == bits).all(-1)
    lowest = torch.where(same & named, lowest, index)
    empty = holds & zero
    return torch.where(empty, index.where(empty, slots).amin(-1, keepdim=True), lowest)


def lowest_equal(values: Tensor) -> Tensor:
    """For each of values [..., S], the lowest index in its row of an equal one."""
    ordered, order = values.sort(dim=-1, stable=True)
    return torch.zeros_like(order).scatter(-1, order, order.gather(-1, _first_of_run(ordered)))


def _first_of_run(ordered: Tensor) -> Tensor:
    """For each place of a sorted tensor, the place of the first equal value of its row."""
    begins = torch.ones_like(ordered, dtype=torch.bool)
    begins[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    index = torch.arange(ordered.shape[-1], device=ordered.device).expand(ordered.shape)
    return index.where(begins, 0).cummax(-1).values


def rank_in_class(tie: Tensor, among: Tensor) -> Tensor:
    """How many units of its class, with a lower index and `among` them, each unit has: [..., U] int64, 0 for others."""
    index = torch.arange(tie.shape[-1], device=tie.device)
    name = tie.where(among, tie.shape[-1] + index)                          # others are alone in their class
    ordered, order = name.sort(dim=-1, stable=True)
    return torch.zeros_like(order).scatter(-1, order, index - _first_of_run(ordered))


def members_chosen(tie: Tensor, chosen: Tensor) -> Tensor:
    """For each unit, how many of its class are chosen: [..., U] int64. tie: the lowest member, an index."""
    count = torch.zeros(tie.shape, dtype=torch.int64, device=tie.device).scatter_add(-1, tie, chosen.long())
    return count.gather(-1, tie)


def window_ties(
    key: Tensor, occupied: Tensor, window: int, kernel_size: int, *, shared_heads: bool
) -> Tensor:
    """Classes of prefix tokens that score the same, as `tie_classes`: [B, T] or [B, Hkv, T].

    A pooled score depends on the keys within reach of the pool, not on values. Two tokens tie if these keys are bitwise
    equal, in every head if heads share the score. Outside the prefix and at unoccupied tokens the pool adds 0.
    """
    batch, heads, tokens, _ = key.shape
    shape = (batch, heads, tokens)
    each = tie_classes(key, torch.ones_like(key), occupied[:, None].expand(shape), per_head=True)
    index = torch.arange(tokens, device=key.device)
    nothing = ~occupied[:, None].expand(shape) | (index >= tokens - window)
    names = functional.pad(each.masked_fill(nothing, -1), (kernel_size // 2, kernel_size // 2), value=-1)
    around = names.unfold(-1, kernel_size, 1).contiguous()                               # [B, Hkv, T, kernel_size]
    seen = torch.ones_like(around)
    if not shared_heads:
        return tie_classes(around, seen, occupied[:, None].expand(shape), per_head=True)
    return tie_classes(around, seen, occupied)
