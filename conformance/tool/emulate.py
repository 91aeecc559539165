"""Attention and scores in float32 as different machines compute them, to test the bounds.

Every variant is correct arithmetic in the model of bounds.py. Variants differ in the order of sums, in fused
multiply-add, in truncating tensor cores, in the error of an approximate exponential, in blocks, in the type of P, and
in whether the score is the exponential of its logarithm. The code is slow: nothing is vectorised over the summed axis.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...reference.attention import per_kv_head, per_query_head, zero_unoccupied

FLUSH = 2.0**-126
ORDERS = ("sequential", "reversed", "pairwise", "strided")


class Computed(NamedTuple):
    """output [B, Hq, D] in the inputs' dtype; score and log_score (natural) [B, S] or [B, Hkv, S], float32."""

    output: Tensor
    score: Tensor
    log_score: Tensor


@dataclass(frozen=True)
class Machine:
    """One variant of the arithmetic.

    order: of every sum. fused: multiply-add rounds once. truncates: sums round toward zero, as tensor cores may (only
    for 16-bit inputs). lean: the exponential has its full allowed error, +1 or -1, or none beyond rounding, 0. flushes:
    subnormal operands and results flush to zero. block: slots per step of the running maximum, 0 for one pass.
    weight_dtype: the type that P is cast to. logs: the linear score is the exponential of the log score.
    """

    order: str = "sequential"
    fused: bool = False
    truncates: bool = False
    lean: int = 0
    flushes: bool = False
    block: int = 0
    weight_dtype: torch.dtype = torch.float32
    logs: bool = False

    def round(self, exact: Tensor) -> Tensor:
        """float64 -> float32, to nearest, or toward zero."""
        nearest = exact.float()
        if not self.truncates:
            return nearest
        beyond = nearest.double().abs() > exact.abs()
        return torch.where(beyond, torch.nextafter(nearest, torch.zeros_like(nearest)), nearest)

    def flush(self, x: Tensor) -> Tensor:
        return torch.where(x.abs() < FLUSH, 0, x) if self.flushes else x

    def plus(self, left: Tensor, right: Tensor) -> Tensor:
        return self.flush(self.round(left.double() + right.double()) if self.truncates else left + right)

    def times(self, left: Tensor, right: Tensor) -> Tensor:
        return self.flush(self.flush(left) * self.flush(right))

    def product_sum(self, left: Tensor, right: Tensor) -> Tensor:
        """sum_i left[..., i] * right[..., i], float32."""
        left, right = self.flush(left.float()), self.flush(right.float())
        count = max(left.shape[-1], right.shape[-1])
        left, right = left.expand(*left.shape[:-1], count), right.expand(*right.shape[:-1], count)
        if self.fused and self.order in ("sequential", "reversed"):
            total = torch.zeros_like(left[..., 0] * right[..., 0])
            for i in self._indices(count):
                total = self.flush(self.round(total.double() + left[..., i].double() * right[..., i].double()))
            return total
        return self.sum(self.times(left, right))

    def sum(self, terms: Tensor) -> Tensor:
        """Over the last axis."""
        parts = list(terms.unbind(-1))
        if self.order == "pairwise":
            while len(parts) > 1:
                odd = parts[2 * (len(parts) // 2):]
                parts = [self.plus(a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)] + odd
            return parts[0]
        if self.order == "strided":
            # Four accumulators, summed at the end.
            parts = [self._in_turn(parts[lane::4]) for lane in range(min(4, len(parts)))]
        return self._in_turn([parts[i] for i in self._indices(len(parts))])

    def _indices(self, count: int) -> range:
        return range(count - 1, -1, -1) if self.order == "reversed" else range(count)

    def _in_turn(self, parts: list[Tensor]) -> Tensor:
        total = parts[0]
        for part in parts[1:]:
            total = self.plus(total, part)
        return total

    def exp2(self, x: Tensor) -> Tensor:
        """2^x; 1 at 0, 0 below the smallest normal number."""
        exact = torch.exp2(x.double()) * (1 + self.lean * 2.0**-22 * (1 - 2.0**-4) * (x != 0))
        return torch.where(exact < FLUSH, 0, exact).float()

    def logits(
        self, query: Tensor, keys: Tensor, seen: Tensor, scale: float, key_scale: Tensor | None = None
    ) -> Tensor:
        """Base-2 logits [..., S] of query [..., D] against keys [..., S, D]; -inf where not seen. key_scale: a further
        factor, [Hq, 1]."""
        base2 = torch.tensor(scale * math.log2(math.e)).float()
        if key_scale is not None:
            base2 = base2 * key_scale
        return (self.product_sum(query[..., None, :], keys) * base2).masked_fill(~seen, -math.inf)

    def decode(
        self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, *, scale: float, per_head: bool = False,
        key_scale: Tensor | None = None, value_scale: Tensor | None = None,
    ) -> Computed:
        """LongFlow's decode step; arguments as for `decode_attention`. Scales multiply logits, outputs and norms."""
        batch, heads, slots, head_dim = key.shape
        query_heads = query.shape[1]
        mask = per_kv_head(occupied).expand(batch, heads, slots)
        keys, values = (
            per_query_head(zero_unoccupied(tensor.float(), occupied), query_heads) for tensor in (key, value)
        )
        factors = [
            None if one is None else one.expand(heads).repeat_interleave(query_heads // heads)[:, None]
            for one in (key_scale, value_scale)
        ]                                                                                           # [Hq, 1]
        logit = self.logits(query, keys, per_query_head(mask, query_heads), scale, factors[0])      # [B, Hq, S]
        row_max, total, acc = self.softmax(logit, values)
        output, lse = self.quotient(acc, total), row_max + self.log2(total)
        output = (output if factors[1] is None else self.times(output, factors[1])).to(query.dtype)

        size = self.sum(self.flush(zero_unoccupied(value.float(), occupied)).abs())                 # [B, Hkv, S]
        if value_scale is not None:
            size = self.times(size, value_scale.expand(heads)[:, None])
        log_weight = (logit - row_max[..., None]) - self.log2(total)[..., None]
        groups = heads if per_head else 1
        term = (log_weight + per_query_head(size.log2(), query_heads)).view(batch, groups, -1, slots)
        log_score, shared = self.log2_of_sum(term), term.shape[2]
        if self.logs:
            score = self.exp2(log_score) / (shared * head_dim)
        else:
            part = self.times(self.exp2(logit - lse[..., None]), per_query_head(size, query_heads) / head_dim)
            score = self.sum(part.view(batch, groups, shared, slots).transpose(2, 3)) / shared
        is_occupied = per_kv_head(occupied)
        score, log_score = (x.masked_fill(~is_occupied, -math.inf) for x in (score, log_score * math.log(2)))
        return Computed(output, *((score, log_score) if per_head else (score[:, 0], log_score[:, 0])))

    def log2_of_sum(self, term: Tensor) -> Tensor:
        """log2 of the sum of 2^term over axis 2 of [B, groups, heads, S]; with blocks, by a running maximum."""
        peak = term.amax(2)
        empty = peak == -math.inf
        if not self.block:
            shift = peak.masked_fill(empty, 0)
            total = self.sum(self.exp2(term - shift[:, :, None]).transpose(2, 3))
            return (shift + total.log2()).masked_fill(empty, -math.inf)
        row_max, total = torch.full_like(peak, -math.inf), torch.zeros_like(peak)
        for one in term.unbind(2):
            higher = torch.maximum(row_max, one)
            shift = higher.masked_fill(higher == -math.inf, 0)
            total = self.plus(self.times(total, self.exp2(row_max - shift)), self.exp2(one - shift))
            row_max = higher
        return (row_max + total.log2()).masked_fill(empty, -math.inf)

    def causal(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, *, scale: float) -> Tensor:
        """Causal attention of a prompt: [B, Hq, T, D] in query's dtype, zeros at padding."""
        logit, values = self._block(query, key, value, occupied, scale)
        _, total, acc = self.softmax(logit, values)
        return self.quotient(acc, total).to(query.dtype)

    def window_score(
        self, query: Tensor, key: Tensor, occupied: Tensor, *, scale: float, kernel_size: int, shared_heads: bool
    ) -> Tensor:
        """SnapKV's score of the prefix, [B, T - W] or [B, Hkv, T - W]; arguments as for `window_score`."""
        logit, values = self._block(query, key, key, occupied, scale)                               # [B, Hq, W, T]
        row_max, total, _ = self.softmax(logit, values)
        weight = self.exp2(logit - (row_max + self.log2(total))[..., None])
        batch, heads, tokens, _ = key.shape
        window = query.shape[2]
        observers = occupied[:, tokens - window:].sum(-1).clamp_min(1)[:, None, None]
        received = self.sum(weight.transpose(2, 3)) / observers                                     # [B, Hq, T]
        groups = 1 if shared_heads else heads
        received = received.view(batch, groups, -1, tokens)
        received = self.sum(received.transpose(2, 3)) / received.shape[2]
        near = kernel_size // 2
        padded = torch.nn.functional.pad(received[..., :tokens - window], (near, near))
        score = self.sum(padded.unfold(-1, kernel_size, 1)) / kernel_size
        return score[:, 0] if shared_heads else score

    def _block(
        self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Logits [B, Hq, Q, T] of the newest Q tokens' queries, and the values [B, Hq, 1, T, D]."""
        count, total = query.shape[2], key.shape[2]
        index = torch.arange(total, device=key.device)
        seen = (index <= index[total - count:, None]) & occupied[:, None, None]
        seen = seen & occupied[:, None, total - count:, None]
        keys, values = (
            per_query_head(zero_unoccupied(tensor, occupied), query.shape[1]).float()[:, :, None]
            for tensor in (key, value)
        )
        query = query.masked_fill(~occupied[:, None, total - count:, None], 0)
        return self.logits(query, keys, seen, scale), values

    @staticmethod
    def quotient(acc: Tensor, total: Tensor) -> Tensor:
        return torch.where((total == 0)[..., None], 0, acc / total.masked_fill(total == 0, 1)[..., None])

    @staticmethod
    def log2(total: Tensor) -> Tensor:
        return total.masked_fill(total == 0, 1).log2()

    def softmax(self, logit: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Maximum [...], sum of weights [...] and weighted values [..., D] of base-2 logits [..., S]."""
        slots = logit.shape[-1]
        block = self.block or slots
        row_max = torch.full_like(logit[..., 0], -math.inf)
        total, acc = torch.zeros_like(row_max), torch.zeros_like(values[..., 0, :])
        for start in range(0, slots, block):
            part = logit[..., start:start + block]
            new_max = torch.maximum(row_max, part.amax(-1))
            shift = new_max.masked_fill(new_max == -math.inf, 0)
            weight = self.exp2(part - shift[..., None])
            rescale = self.exp2(row_max - shift)
            total = self.plus(self.times(total, rescale), self.sum(weight))
            cast = weight.to(self.weight_dtype).float()
            mixed = self.product_sum(cast[..., None, :], values[..., start:start + block, :].transpose(-1, -2))
            acc = self.plus(self.times(acc, rescale[..., None]), mixed)
            row_max = new_max
        return row_max.masked_fill(row_max == -math.inf, 0), total, acc
