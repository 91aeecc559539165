"""LongFlow's decode step in plain PyTorch: a right one, and subclasses that are wrong in one step."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

INF = torch.inf


class Decode:
    """`decode_attention` in float64, right. Subclasses override one method."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, *, scale: float | None = None,
        per_head: bool = False, protected: Tensor | None = None, check_finite: bool = False,
    ) -> Any:
        heads, head_dim = key.shape[1], key.shape[3]
        held = occupied if occupied.dim() == 3 else occupied[:, None].expand(-1, heads, -1)       # [B, Hkv, S]
        k, v = self.read(key, value, held)
        logit = self.logits(query.double(), k) * (head_dim**-0.5 if scale is None else scale)     # [B, Hkv, G, S]
        logit = logit.masked_fill(~held[:, :, None], -INF)
        weight, output = self.attend(logit, v, query.dtype)
        output = output.flatten(1, 2).to(query.dtype)
        size = v.abs().contiguous().mean(-1)[:, :, None]
        score, rank = self.scores(logit, weight, size, (2,) if per_head else (1, 2))
        held = held if per_head else held[:, 0]
        spared = torch.zeros_like(held) if protected is None else protected
        return output, self.shown(score, held, spared, query.dtype), self.choose(rank, held, spared)

    def read(self, key: Tensor, value: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values with zeros in free slots."""
        free = ~held[..., None]
        return key.double().masked_fill(free, 0), value.double().masked_fill(free, 0)

    def logits(self, query: Tensor, key: Tensor) -> Tensor:
        # Not a matrix product: the order in which BLAS adds may depend on the slot, and equal keys must tie. So may the
        # order of a sum over channels that are not next to each other in memory.
        return (query.unflatten(1, (key.shape[1], -1))[:, :, :, None] * key[:, :, None]).contiguous().sum(-1)

    def attend(self, logit: Tensor, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Weights [B, Hkv, G, S] and outputs [B, Hkv, G, D]. dtype: the inputs'."""
        weight = self.softmax(logit)
        return weight, torch.einsum("bhgs,bhsd->bhgd", weight, value)

    def softmax(self, logit: Tensor) -> Tensor:
        top = logit.amax(-1, keepdim=True)
        weight = (logit - top.masked_fill(top == -INF, 0)).exp()
        total = weight.sum(-1, keepdim=True)
        return weight / total.masked_fill(total == 0, 1)

    def scores(self, logit: Tensor, weight: Tensor, size: Tensor, heads: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """The linear score, and a logarithm that orders tokens even if their weights underflow."""
        normaliser = logit.logsumexp(-1, keepdim=True)
        log_weight = logit - normaliser.masked_fill(normaliser == -INF, 0)
        return (weight * size).mean(heads), (log_weight + size.log()).logsumexp(heads)

    def shown(self, score: Tensor, held: Tensor, spared: Tensor, dtype: torch.dtype) -> Tensor:
        return score.float().masked_fill(spared, INF).masked_fill(~held, -INF)

    def choose(self, rank: Tensor, held: Tensor, spared: Tensor) -> Tensor:
        """The lowest free slot, or the lowest of the unprotected slots with the lowest rank, or 0."""
        slots = rank.shape[-1]
        index = torch.arange(slots, device=rank.device).expand(rank.shape)
        candidate = held & ~spared
        # Rounded, since the last bits of sums and logarithms depend on the slot: torch adds and takes logarithms of
        # several slots at a time, and of the last slots one by one.
        lowest = self.lowest(rank.float().masked_fill(~candidate, INF), candidate, index)
        chosen = torch.where(candidate.any(-1), lowest, 0)
        return torch.where((~held).any(-1), index.where(~held, slots).amin(-1), chosen)

    def lowest(self, rank: Tensor, candidate: Tensor, index: Tensor) -> Tensor:
        least = candidate & (rank == rank.amin(-1, keepdim=True))
        return index.where(least, rank.shape[-1]).amin(-1)


# Wrong ones -----------------------------------------------------------------------------------------------------------


class NoRunningMaximum(Decode):
    def softmax(self, logit: Tensor) -> Tensor:
        weight = logit.float().exp()
        total = weight.sum(-1, keepdim=True)
        return (weight / total.masked_fill(total == 0, 1)).double()


class RoundedScores(Decode):
    """Scores have the type of the inputs."""

    def shown(self, score: Tensor, held: Tensor, spared: Tensor, dtype: torch.dtype) -> Tensor:
        return super().shown(score.to(dtype), held, spared, dtype)


class FreeSlotsScoreZero(Decode):
    """A free slot wins because its score is 0, so only if no token's score is 0, and not the lowest free slot."""

    def choose(self, rank: Tensor, held: Tensor, spared: Tensor) -> Tensor:
        score = rank.exp().masked_fill(~held, 0).masked_fill(spared & held, INF)
        return score.flip(-1).argmin(-1).neg() + rank.shape[-1] - 1 if not bool(held.all()) else super().choose(
            rank, held, spared
        )


class FreeSlotsAreRead(Decode):
    """0 times what lies in a free slot, which is NaN if that is NaN or infinite."""

    def read(self, key: Tensor, value: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
        return key.double().masked_fill(~held[..., None], 0), value.double()


class TiesByChance(Decode):
    """As with float atomics that race for the minimum: another one of equal tokens each time."""

    def __init__(self) -> None:
        self.calls = itertools.count()

    def lowest(self, rank: Tensor, candidate: Tensor, index: Tensor) -> Tensor:
        least = candidate & (rank == rank.amin(-1, keepdim=True))
        order = torch.rand(index.shape, generator=torch.Generator().manual_seed(next(self.calls)))
        return order.masked_fill(~least, 2).argmin(-1)


class SummedInAnyOrder(Decode):
    """As with float atomics in the sum over heads: the last bits differ from call to call."""

    def __init__(self) -> None:
        self.calls = itertools.count()

    def shown(self, score: Tensor, held: Tensor, spared: Tensor, dtype: torch.dtype) -> Tensor:
        return super().shown(score * (1 + 2.0**-22 * (next(self.calls) % 2)), held, spared, dtype)


class NoMaskInTheLastTile(Decode):
    """The mask is applied to whole tiles of 4 slots alone."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, **options: Any) -> Any:
        last = (key.shape[2] - 1) // 4 * 4
        seen = occupied.clone()
        seen[..., last:] = True
        output, score, _ = super().__call__(query, key, value, seen, **options)
        return output, score, super().__call__(query, key, value, occupied, **options)[2]


class LastSlotIsNeverChosen(Decode):
    def lowest(self, rank: Tensor, candidate: Tensor, index: Tensor) -> Tensor:
        last = (index == rank.shape[-1] - 1) & (candidate.sum(-1, keepdim=True) > 1)
        return super().lowest(rank.masked_fill(last, INF), candidate & ~last, index)


class WrongHeadsInOddGroups(Decode):
    """Query head h reads KV head h modulo Hkv if Hq / Hkv is odd."""

    def logits(self, query: Tensor, key: Tensor) -> Tensor:
        group = query.shape[1] // key.shape[1]
        if group % 2 == 0:
            return super().logits(query, key)
        return (query.unflatten(1, (group, -1)).transpose(1, 2)[:, :, :, None] * key[:, :, None]).sum(-1)


class KeysStridesForValues(Decode):
    def read(self, key: Tensor, value: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
        room = value.untyped_storage().nbytes() // value.element_size() - value.storage_offset()
        last = sum((size - 1) * stride for size, stride in zip(key.shape, key.stride(), strict=True))
        if last < room:
            value = value.as_strided(key.shape, key.stride())
        return super().read(key, value, held)


class RightForContiguousTensors(Decode):
    def read(self, key: Tensor, value: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
        key, value = (
            tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride())
            if tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size() else tensor
            for tensor in (key, value)
        )
        return super().read(key, value, held)


class OneResultBuffer(Decode):
    """The output of every call is a view of one buffer."""

    def __init__(self) -> None:
        self.buffer = torch.empty(0)

    def __call__(self, *args: Any, **options: Any) -> Any:
        output, score, slot = super().__call__(*args, **options)
        if self.buffer.shape != output.shape or self.buffer.dtype != output.dtype:
            self.buffer = torch.empty_like(output)
        return self.buffer.copy_(output), score, slot


class InputsAreChanged(Decode):
    """Logits are scaled in the query's memory."""

    def __call__(self, query: Tensor, *args: Any, **options: Any) -> Any:
        result = super().__call__(query, *args, **options)
        if query.is_contiguous():
            query.mul_(1.5)
        return result


class RememberedByAddress(Decode):
    """The value's norms are cached by the tensor's address."""

    def __init__(self) -> None:
        self.known: dict[Any, Any] = {}

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, **options: Any) -> Any:
        place = (query.data_ptr(), key.data_ptr(), value.data_ptr(), occupied.data_ptr(), key.shape, query.shape,
                 str(options))
        if place not in self.known:
            result = super().__call__(query, key, value, occupied, **options)
            self.known[place] = (result, (query, key, value, occupied))
        return self.known[place][0]


class RightOnce(Decode):
    """Scratch memory for a shape is cleared when it is allocated, not before each call."""

    def __init__(self) -> None:
        self.scratch: dict[Any, Tensor] = {}

    def scores(self, logit: Tensor, weight: Tensor, size: Tensor, heads: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        score, rank = super().scores(logit, weight, size, heads)
        total = self.scratch.setdefault(tuple(score.shape), torch.zeros_like(score))
        return total.add_(score).clone(), rank


# Right ones, written differently --------------------------------------------------------------------------------------


class Fused(Decode):
    """PyTorch's fused attention for the output, eager scores."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, **options: Any) -> Any:
        _, score, slot = super().__call__(query, key, value, occupied, **options)
        held = occupied if occupied.dim() == 3 else occupied[:, None].expand(-1, key.shape[1], -1)
        group = query.shape[1] // key.shape[1]
        mask = held.repeat_interleave(group, 1)[:, :, None]
        k, v = (tensor.masked_fill(~held[..., None], 0).float().repeat_interleave(group, 1) for tensor in (key, value))
        # A copy: on a GPU, the fused kernels refuse an address or a stride of an axis of length 1 that is not aligned.
        aligned = query.float()[:, :, None].clone(memory_format=torch.contiguous_format)
        output = torch.nn.functional.scaled_dot_product_attention(
            aligned, k.contiguous(), v.contiguous(), attn_mask=mask, scale=options.get("scale"),
        )
        empty = ~mask.any(-1, keepdim=True)
        return {"output": output.masked_fill(empty, 0)[:, :, 0].to(query.dtype), "score": score, "slot": slot}


class SlotsFirst(Decode):
    """Keys and values are transposed to [S, B, Hkv, D] first."""

    def read(self, key: Tensor, value: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
        free = ~held.permute(2, 0, 1)[..., None]
        slots_first = [tensor.permute(2, 0, 1, 3).contiguous().double().masked_fill(free, 0) for tensor in (key, value)]
        return slots_first[0].permute(1, 2, 0, 3), slots_first[1].permute(1, 2, 0, 3)


class AnyOfEquals(Decode):
    """topk, which promises no order among ties, and 0 for a free slot's score."""

    def shown(self, score: Tensor, held: Tensor, spared: Tensor, dtype: torch.dtype) -> Tensor:
        return score.float().masked_fill(spared, INF).masked_fill(~held, 0)

    def lowest(self, rank: Tensor, candidate: Tensor, index: Tensor) -> Tensor:
        least = candidate & (rank == rank.amin(-1, keepdim=True))
        return index.masked_fill(~least, -1).amax(-1)
