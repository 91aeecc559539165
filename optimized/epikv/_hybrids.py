"""The attention statistics of EpiKV's hybrids, in buffers that a CUDA graph can replay. Semantics:
`kvtwin.reference.epikv.hybrids`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...reference.contract.epikv.config import EpiKVConfig
from ...reference.contract.thinkv.types import Thought
from .._common.state import Rows
from . import _entropy_kernel as entropy_kernel
from . import _hybrid_kernels as kernels


class Attention(Rows):
    """For "attn_x_hs": aggregate, frozen and received [B, S] float32. For "segment_hs": thoughts [B, S], thought and
    decoded [B] int64, sparsity [B] float32: that, or the relative entropy, summed over the layers so far. With
    "attn_x_hs", `frozen` is the score by hidden states; otherwise the scorer's own `score` is."""

    _rows = ("aggregate", "frozen", "received", "thoughts", "thought", "decoded", "sparsity")

    def __init__(self, config: EpiKVConfig, batch: int, buffer: Callable[..., Tensor]) -> None:
        self._config, slots = config, config.slots
        self._num_layers = 0
        by_weight, self._by_entropy = config.edges is None, config.segments_by == "entropy"
        self.frozen = buffer(batch, slots if by_weight else 1, dtype=torch.float32)
        self.aggregate, self.received = torch.zeros_like(self.frozen), torch.zeros_like(self.frozen)
        self.thoughts = buffer(batch, 1 if by_weight else slots, dtype=torch.int64)
        self.thought, self.decoded = buffer(batch, dtype=torch.int64), buffer(batch, dtype=torch.int64)
        self.sparsity = buffer(batch, dtype=torch.float32)

    def reset(self) -> None:
        """Forget every token."""
        for tensor in (self.aggregate, self.received, self.decoded, self.sparsity):
            tensor.zero_()
        self.frozen.fill_(-torch.inf)
        self.thoughts.fill_(-1)
        self.thought.fill_(int(Thought.REASONING))
        self._num_layers = 0

    def admit(self, kept: Tensor, frozen: Tensor, received: Tensor | None) -> None:
        """The prompt tokens `kept` [B, N] take slots 0 to N - 1, with their scores `frozen` and `received` [B, N]."""
        count = kept.shape[1]
        if self._config.edges is not None:
            self.thoughts[:, :count] = torch.where(kept < 0, -1, int(Thought.REASONING))
            return
        self.frozen[:, :count] = frozen
        if received is not None:
            self.aggregate[:, :count] = received.masked_fill(kept < 0, 0)

    def record(
        self, logits: Tensor, normalisers: Tensor, occupied: Tensor, slot: Tensor, key_value_heads: int
    ) -> None:
        """Record a layer's attention at a step; the new token is in `slot` [B]. Layers are counted on the host, since
        the CUDA graph of a step captures all of them."""
        config, first = self._config, self._num_layers == 0
        self._num_layers += 1
        if config.edges is None:
            kernels.receive(logits, normalisers, self.received, first)
        elif self._by_entropy:
            entropy_kernel.add_entropy(
                logits, normalisers, occupied, slot, self.decoded, self.sparsity, config.tau, first
            )
        else:
            kernels.add_sparsity(
                logits, normalisers, occupied, slot, self.decoded, self.sparsity, key_value_heads, config.tau,
                config.sparsity_threshold, first,
            )

    def choose(self, scorer: Any) -> None:
        """Choose the next slot, after the new token was scored by its hidden states."""
        config, layers = self._config, self._num_layers
        self._num_layers = 0
        if config.edges is None:
            kernels.choose_by_weight(
                self.received, self.aggregate, self.frozen, scorer.score, scorer.occupied, scorer.positions,
                scorer._rank, scorer._seen, scorer.next_slot, layers,
            )
        else:
            kernels.choose_by_thought(
                self.sparsity, self.thoughts, self.thought, self.decoded, scorer.occupied, scorer.positions,
                scorer._rank, scorer._seen, scorer.next_slot, layers, config.tau, *config.edges,
                self._by_entropy,
            )
