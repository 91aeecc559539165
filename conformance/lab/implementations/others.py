"""Functions of KeyDiff, SnapKV and StreamingLLM in plain PyTorch, right and wrong, and a wrong state of H2O."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ....reference.baselines.h2o import H2OState

INF = torch.inf


def kept_by(rank: Tensor, occupied: Tensor, count: int) -> Tensor:
    """The `count` tokens [..., S] with the highest rank, the higher index among equals: ascending, then -1."""
    slots = rank.shape[-1]
    # Rounded, so that equal tokens tie although their sums may have been added in another order.
    turn = rank.float().masked_fill(~occupied, -INF).sort(dim=-1, stable=True).indices.argsort(-1)
    turn = turn - 2 * slots * ~occupied
    chosen = turn.sort(dim=-1, descending=True).indices[..., :count]
    chosen = chosen.where(occupied.gather(-1, chosen), slots).sort(-1).values
    return chosen.where(chosen < slots, -1)


def tokens(tensor: Tensor, kept: Tensor) -> Tensor:
    """[B, Hkv, T, D] at kept [B, Hkv, N]; -1 gives zeros."""
    found = tensor.take_along_dim(kept.clamp_min(0)[..., None], 2)
    return found.masked_fill(kept[..., None] < 0, 0)


# KeyDiff --------------------------------------------------------------------------------------------------------------

KEYDIFF = {"anchor": ("mean_normalized",), "similarity": ("cosine",)}  # the options that it declares


class Evict:
    """`evict`, right."""

    def __call__(
        self, key: Tensor, value: Tensor, budget: int, *, occupied: Tensor | None = None, recent: int = 0,
        protected: Tensor | None = None, anchor: str = "mean_normalized", similarity: str = "cosine",
    ) -> Any:
        held = torch.ones_like(key[..., 0], dtype=torch.bool)
        held = held if occupied is None else held & (occupied if occupied.dim() == 3 else occupied[:, None])
        unit = key.double().masked_fill(~held[..., None], 0)
        unit = unit / unit.norm(dim=-1, keepdim=True).clamp_min(1e-300)
        rank = self.dissimilarity((unit * unit.sum(2, keepdim=True)).sum(-1))
        spared = held & (held.flip(-1).cumsum(-1).flip(-1) <= recent)
        if protected is not None:
            spared = spared | held & (protected if protected.dim() == 3 else protected[:, None])
        kept = kept_by(rank.masked_fill(spared, INF), held, min(budget, key.shape[2]))
        return tokens(key, kept), tokens(value, kept), kept, kept >= 0

    def dissimilarity(self, cosine: Tensor) -> Tensor:
        return -cosine


class LosesTheSign(Evict):
    """Wrong: opposite keys count as similar."""

    def dissimilarity(self, cosine: Tensor) -> Tensor:
        return -cosine.abs()


# SnapKV ---------------------------------------------------------------------------------------------------------------


class Compress:
    """`compress`, right."""

    def __call__(
        self, query_window: Tensor, key: Tensor, value: Tensor, budget: int, *, kernel_size: int = 5,
        occupied: Tensor | None = None, protected: Tensor | None = None, shared_heads: bool = False,
        scale: float | None = None,
    ) -> Any:
        heads, length, window = key.shape[1], key.shape[2], query_window.shape[2]
        held = torch.ones_like(key[:, 0, :, 0], dtype=torch.bool) if occupied is None else occupied
        query = query_window.double().unflatten(1, (heads, -1))
        k = key.double().masked_fill(~held[:, None, :, None], 0)
        # Not a matrix product: equal keys must tie.
        logit = (query[..., None, :] * k[:, :, None, None]).sum(-1) * (scale or key.shape[3] ** -0.5)
        sees = torch.ones(window, length, dtype=torch.bool, device=key.device).tril(length - window)
        sees = (sees & held[:, None] & held[:, length - window:, None])[:, None, None]             # [B, 1, 1, W, T]
        weight = logit.masked_fill(~sees, -INF).softmax(-1).masked_fill(~sees, 0)
        observing = held[:, length - window:].sum(1).clamp_min(1)
        received = (weight.sum(3) / observing[:, None, None, None]).mean(2)                        # [B, Hkv, T]
        if shared_heads:
            received = received.mean(1, keepdim=True)
        rank = torch.full_like(received, INF)
        if length > window:
            rank[..., :-window] = self.pooled(received, window, kernel_size)
        held = held[:, None].expand(rank.shape)
        turn = rank.float().masked_fill(~held, -INF).sort(dim=-1, stable=True).indices.argsort(-1)
        turn = turn if protected is None else turn + length * (protected[:, None] & held)
        kept = kept_by(turn, held, min(budget, length))
        wide = kept.expand(-1, heads, -1)
        return tokens(key, wide), tokens(value, wide), kept[:, 0] if shared_heads else kept

    def pooled(self, received: Tensor, window: int, width: int) -> Tensor:
        """The pool of the prefix."""
        return functional.avg_pool1d(received[..., :-window], width, stride=1, padding=width // 2)


class PoolsTheWindow(Compress):
    """Wrong: the pool of the last tokens of the prefix has attention to the window in it."""

    def pooled(self, received: Tensor, window: int, width: int) -> Tensor:
        return functional.avg_pool1d(received, width, stride=1, padding=width // 2)[..., :-window]


class ClearsPadding(Compress):
    """Wrong: it writes zeros to the padding of the caller's keys."""

    def __call__(
        self, query_window: Tensor, key: Tensor, value: Tensor, budget: int, *, occupied: Tensor | None = None,
        **options: Any,
    ) -> Any:
        if occupied is not None:
            key.masked_fill_(~occupied[:, None, :, None], 0)
        return super().__call__(query_window, key, value, budget, occupied=occupied, **options)


# H2O ------------------------------------------------------------------------------------------------------------------


class SumsStayInSlots(H2OState):
    """Wrong: a token that takes the slot of an evicted one goes on with its sum."""

    _per_slot = tuple(name for name in H2OState._per_slot if name != "score")


# StreamingLLM ---------------------------------------------------------------------------------------------------------


class Keep:
    """`keep`, right."""

    def __call__(self, positions: Tensor, budget: int, *, sinks: int = 4) -> Tensor:
        held = positions >= 0
        older = (held[..., None, :] & (positions[..., None, :] < positions[..., None])).sum(-1)
        return held & ((self.place(held, older) < sinks) | (older >= held.sum(-1, keepdim=True) - budget + sinks))

    def place(self, held: Tensor, older: Tensor) -> Tensor:
        """The place of each token, of which the first are sinks."""
        return older


class SinksBySlot(Keep):
    """Wrong: the first slots hold the sinks only until one of them is reused."""

    def place(self, held: Tensor, older: Tensor) -> Tensor:
        return held.cumsum(-1) - 1
