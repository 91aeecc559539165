"""TOVA's state in plain PyTorch, with its tokens in order of arrival: it drops the evicted and appends the new ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

INF = torch.inf


class AppendingTOVA:
    """`TOVAState`, right with slot_order = "any". It has as many slots as its fullest head has tokens."""

    def __init__(
        self, config: Any, *, batch: int, query_heads: int, key_value_heads: int, head_dim: int, dtype: torch.dtype,
        device: Any,
    ) -> None:
        self.config = config
        self._sizes, self._dtype, self._device = (batch, key_value_heads, 0, head_dim), dtype, device
        self._scale = head_dim**-0.5 if config.scale is None else config.scale
        self.reset()

    def reset(self) -> None:
        self.key = torch.zeros(self._sizes, dtype=self._dtype, device=self._device)
        self.value = torch.zeros_like(self.key)
        self.positions = torch.zeros(self._sizes[:3], dtype=torch.int64, device=self._device)
        self.score = torch.zeros(self._sizes[:3], device=self._device)
        self.tokens_seen = 0

    @property
    def occupied(self) -> Tensor:
        return self.positions >= 0

    def reorder(self, index: Tensor) -> None:
        for name in ("key", "value", "positions", "score"):
            setattr(self, name, getattr(self, name)[index])

    def prefill(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None = None) -> Tensor:
        return self.append_block(query, key, value, occupied)

    def append_block(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None = None) -> Tensor:
        real = torch.ones_like(key[:, 0, :, 0], dtype=torch.bool) if occupied is None else occupied
        size = self.config.block_size
        blocks = zip(*(tensor.split(size, 2) for tensor in (query, key, value)), real.split(size, 1), strict=True)
        return torch.cat([self._append(*block) for block in blocks], 2)

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        real = torch.ones(len(key), 1, dtype=torch.bool, device=key.device)
        return self._append(query[:, :, None], key[:, :, None], value[:, :, None], real)[:, :, 0]

    def _append(self, query: Tensor, key: Tensor, value: Tensor, real: Tensor) -> Tensor:
        heads, count = key.shape[1], key.shape[2]
        index = torch.arange(count, device=key.device)
        new = (index + self.tokens_seen).where(real, -1)[:, None].expand(-1, heads, -1)           # [B, Hkv, Q]
        self.key, self.value = torch.cat((self.key, key), 2), torch.cat((self.value, value), 2)
        self.positions = torch.cat((self.positions, new), 2)
        self.score = torch.cat((self.score, torch.zeros_like(new, dtype=torch.float32)), 2)
        self.tokens_seen += count

        held = self.occupied
        k, v = (tensor.double().masked_fill(~held[..., None], 0) for tensor in (self.key, self.value))
        logit = (query.double().unflatten(1, (heads, -1))[..., None, :] * k[:, :, None, None]).sum(-1) * self._scale
        sees = (held[:, :, None] & (self.positions[:, :, None] <= new[..., None]))[:, :, None]    # [B, Hkv, 1, Q, n]
        logit = logit.masked_fill(~sees, -INF)                                                    # [B, Hkv, G, Q, n]
        weight = logit.softmax(-1).masked_fill(~sees, 0)
        output = torch.einsum("bkgqn,bknd->bkgqd", weight, v).flatten(1, 2).to(query.dtype)

        newest = index.where(real, -1).amax(1)
        row = torch.arange(len(key), device=key.device)
        observed = logit[row, :, :, newest]                                                       # [B, Hkv, G, n]
        rank = observed.log_softmax(-1).logsumexp(2)
        seen = (newest >= 0)[:, None, None]
        self.score = torch.where(seen, weight[row, :, :, newest].mean(2).float(), self.score)
        self._drop(rank)
        return output

    def _drop(self, rank: Tensor) -> None:
        """Drop the tokens with the lowest rank of each head, down to the budget, and close the gaps."""
        held = self.occupied
        place = rank.masked_fill(~held, INF).sort(dim=-1, stable=True).indices.argsort(-1)
        keep = held & (place >= held.sum(-1, keepdim=True) - self.config.budget)
        first = (~keep).long().sort(dim=-1, stable=True).indices[..., :int(keep.sum(-1).max())]
        self.positions = self.positions.where(keep, -1).gather(-1, first)
        self.score = self.score.masked_fill(~keep, -INF).gather(-1, first)
        self.key, self.value = (tensor.take_along_dim(first[..., None], 2) for tensor in (self.key, self.value))


class DropsTheOldest(AppendingTOVA):
    """Wrong: it evicts by age."""

    def _drop(self, rank: Tensor) -> None:
        super()._drop(self.positions.double())
