"""LongFlow's state in plain PyTorch: a right one, and subclasses that are wrong in one step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .longflow import Decode

INF = torch.inf


def attention_weights(query: Tensor, key: Tensor, held: Tensor, scale: float) -> Tensor:
    """Causal weights of the last Q tokens, 0 for padding: query [B, Hq, Q, D], key [B, Hkv, T, D], held [B, T] ->
    [B, Hkv, G, Q, T] float64."""
    tokens, count = key.shape[2], query.shape[2]
    grouped = query.double().unflatten(1, (key.shape[1], -1))
    # Not a matrix product: equal keys must tie.
    logit = (grouped[..., None, :] * key.double()[:, :, None, None]).sum(-1) * scale
    sees = torch.ones(count, tokens, dtype=torch.bool).tril(tokens - count).to(key.device)
    sees = (sees & held[:, None] & held[:, tokens - count:, None])[:, None, None]                 # [B, 1, 1, Q, T]
    return logit.masked_fill(~sees, -INF).softmax(-1).masked_fill(~sees, 0)


class LongFlow:
    """`LongFlowState`, right. Subclasses override one method."""

    HELD: tuple[str, ...] = ("key", "value", "positions", "score", "next_slot", "_sinks_end")

    def __init__(
        self, config: Any, *, batch: int, query_heads: int, key_value_heads: int, head_dim: int, dtype: torch.dtype,
        device: Any,
    ) -> None:
        self.config = config
        self._sizes, self._dtype, self._device = (batch, key_value_heads, config.budget, head_dim), dtype, device
        self._scale = head_dim**-0.5 if config.scale is None else config.scale
        self._decode = Decode()
        self.tokens_seen = 0
        self._clear()

    def _clear(self) -> None:
        batch, heads, slots, head_dim = self._sizes
        rows = (batch, heads) if self.config.per_head else (batch,)
        self.key = torch.zeros(batch, heads, slots, head_dim, dtype=self._dtype, device=self._device)
        self.value = torch.zeros_like(self.key)
        self.positions = torch.full((*rows, slots), -1, device=self._device)
        self.score = torch.full((*rows, slots), -INF, device=self._device)
        self.next_slot = torch.zeros(rows, dtype=torch.int64, device=self._device)
        self._sinks_end = torch.full((batch,), self.config.sinks, device=self._device)

    @property
    def occupied(self) -> Tensor:
        return self.positions >= 0

    def reset(self) -> None:
        self.tokens_seen = 0
        self._clear()

    def reorder(self, index: Tensor) -> None:
        for name in self.HELD:
            setattr(self, name, getattr(self, name)[index])

    def prefill(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None = None) -> Tensor:
        tokens, room = key.shape[2], self.config.budget - 1
        held = torch.ones_like(key[:, 0, :, 0], dtype=torch.bool) if occupied is None else occupied
        query, key, value = (tensor.masked_fill(~held[:, None, :, None], 0) for tensor in (query, key, value))
        weight = attention_weights(query, key, held, self._scale)
        output = torch.einsum("bkgqt,bktd->bkgqd", weight, value.double()).flatten(1, 2).to(query.dtype)

        counted = held.long().cumsum(1)
        present = counted[:, -1]
        last = ((counted < self.config.sinks) & (counted < present[:, None])).sum(1) + 1
        last = last if self.config.sinks else torch.zeros_like(last)
        self._sinks_end = torch.where(present < self.config.sinks, tokens + self.config.sinks - present, last)
        if tokens <= room:
            kept = torch.arange(tokens, device=key.device).where(held, -1)
        else:
            kept = self._kept(weight[:, :, :, -self.config.window:], held, room)                  # [B, N]
        at = kept.clamp_min(0)[:, None, :, None].expand(-1, key.shape[1], -1, key.shape[3])
        self.key[:, :, :kept.shape[1]], self.value[:, :, :kept.shape[1]] = key.gather(2, at), value.gather(2, at)
        self.positions[..., :kept.shape[1]] = kept[:, None] if self.config.per_head else kept
        self.next_slot = (~self.occupied).long().argmax(-1)
        self.tokens_seen = tokens
        return output

    def _kept(self, weight: Tensor, held: Tensor, room: int) -> Tensor:
        """SnapKV's choice by the weights [B, Hkv, G, W, T] of the window: ascending [B, room], -1 for none."""
        window, tokens = weight.shape[3], weight.shape[4]
        observers = held[:, -window:].sum(1).clamp_min(1)
        received = (weight.sum(3) / observers[:, None, None, None]).mean(2).mean(1)               # [B, T]
        score = torch.full_like(received, INF)
        if tokens > window:
            width = self.config.kernel_size
            score[:, :-window] = functional.avg_pool1d(received[:, :-window], width, stride=1, padding=width // 2)
        turn = score.sort(dim=1, stable=True).indices.argsort(1)                                  # ties by index
        token = torch.arange(tokens, device=score.device)
        turn = turn + 2 * tokens * (held & (token < self._sinks_end[:, None])) - 2 * tokens * ~held
        kept = turn.topk(room, dim=1).indices
        kept = kept.where(held.gather(1, kept), tokens).sort(1).values
        return kept.where(kept < tokens, -1)

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        slots = torch.arange(self.config.budget, device=key.device)
        here = slots == self.next_slot[..., None]                                                 # [B, S], [B, Hkv, S]
        wide = (here if self.config.per_head else here[:, None])[..., None]
        self.key = torch.where(wide, key[:, :, None], self.key)
        self.value = torch.where(wide, value[:, :, None], self.value)
        self.positions = torch.where(here, self.tokens_seen, self.positions)
        spared = self.occupied & (self.positions < self._sinks_end.view(-1, *[1] * (here.dim() - 1)))
        if self.config.protect_newest:
            spared = spared | here
        output, self.score, self.next_slot = self._decode(
            query, self.key, self.value, self.occupied, scale=self._scale, per_head=self.config.per_head,
            protected=spared,
        )
        self.tokens_seen += 1
        return output


class LastSlotFirst:
    """Right, with the convention slot_order = "any": LongFlow with its slots in the reverse order."""

    def __init__(self, config: Any, **sizes: Any) -> None:
        self._state = LongFlow(config, **sizes)

    occupied = property(lambda self: self._state.occupied.flip(-1))
    positions = property(lambda self: self._state.positions.flip(-1))
    score = property(lambda self: self._state.score.flip(-1))
    key = property(lambda self: self._state.key.flip(2))
    value = property(lambda self: self._state.value.flip(2))
    next_slot = property(lambda self: self._state.positions.shape[-1] - 1 - self._state.next_slot)
    config = property(lambda self: self._state.config)
    tokens_seen = property(lambda self: self._state.tokens_seen)

    def prefill(self, *prompt: Any, **more: Any) -> Tensor:
        return self._state.prefill(*prompt, **more)

    def step(self, *token: Any, **more: Any) -> Tensor:
        return self._state.step(*token, **more)

    def reset(self) -> None:
        self._state.reset()

    def reorder(self, index: Tensor) -> None:
        self._state.reorder(index)


class OneRow(LongFlow):
    """Right, for a batch of 1."""

    def __init__(self, config: Any, *, batch: int, **sizes: Any) -> None:
        assert batch == 1, f"expected a batch of 1, got {batch}"
        super().__init__(config, batch=batch, **sizes)


class NoneForScores(LongFlow):
    """Right, with None for the scores."""

    score: Any = property(lambda self: None, lambda self, value: None)
    HELD = tuple(name for name in LongFlow.HELD if name != "score")


class WithoutScores:
    """Right, with no attribute for scores, keys and values, and no order of rows."""

    def __init__(self, config: Any, **sizes: Any) -> None:
        self._state = LongFlow(config, **sizes)

    occupied = property(lambda self: self._state.occupied)
    positions = property(lambda self: self._state.positions)
    next_slot = property(lambda self: self._state.next_slot)
    tokens_seen = property(lambda self: self._state.tokens_seen)
    prefill, step, reset = LastSlotFirst.prefill, LastSlotFirst.step, LastSlotFirst.reset


# Wrong ones -----------------------------------------------------------------------------------------------------------


class CountsOnAfterReset(LongFlow):
    """reset() empties the slots, but new tokens get the positions after the old ones."""

    def reset(self) -> None:
        self._clear()


class WithoutPositions(WithoutScores):
    """It does not say which tokens it holds."""

    @property
    def positions(self) -> Tensor:
        raise AttributeError("positions")


class IgnoresReorder(LongFlow):
    def reorder(self, index: Tensor) -> None:
        pass


class ScalesTheQuery(LongFlow):
    """A step scales the caller's query in place."""

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = super().step(query, key, value)
        query.mul_(self._scale)
        return output


class SecondBestAtTimes(LongFlow):
    """Every fourth step, once all slots are full, it names the slot with the second lowest score."""

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = super().step(query, key, value)
        if self.tokens_seen % 4 == 0 and bool(self.occupied.all()):
            self.next_slot = self.score.topk(2, dim=-1, largest=False).indices[..., 1]
        return output
