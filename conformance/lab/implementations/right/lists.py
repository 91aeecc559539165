"""StreamingLLM's state with a Python list of tokens per KV head, in the order of their arrival."""

from __future__ import annotations

import types
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .... import Capabilities

CAPABILITIES = Capabilities(
    max_batch=4, max_slots=512, slot_order="any", options={"inv_freq": (None,)}, validates_arguments=False
)


class Token(NamedTuple):
    position: int
    key: Tensor
    value: Tensor


class Lists:
    """It has as many slots as its longest list has tokens."""

    def __init__(
        self, config: Any, *, batch: int, query_heads: int, key_value_heads: int, head_dim: int, dtype: torch.dtype,
        device: Any,
    ) -> None:
        self.config = config
        self._sizes, self._dtype, self._device = (batch, key_value_heads, head_dim), dtype, device
        self._scale = head_dim**-0.5 if config.scale is None else config.scale
        self.reset()

    def reset(self) -> None:
        batch, heads, _ = self._sizes
        self._tokens: list[list[list[Token]]] = [[[] for _ in range(heads)] for _ in range(batch)]
        self.tokens_seen = 0

    def reorder(self, index: Tensor) -> None:
        self._tokens = [[list(tokens) for tokens in self._tokens[row]] for row in index.tolist()]

    @property
    def positions(self) -> Tensor:
        slots = max((len(tokens) for heads in self._tokens for tokens in heads), default=0)
        return torch.tensor([
            [[token.position for token in tokens] + [-1] * (slots - len(tokens)) for tokens in heads]
            for heads in self._tokens
        ], dtype=torch.int64, device=self._device)

    @property
    def occupied(self) -> Tensor:
        return self.positions >= 0

    @property
    def score(self) -> Tensor:
        return torch.where(self.occupied, 0.0, -torch.inf)

    @property
    def key(self) -> Tensor:
        return self._stacked("key")

    @property
    def value(self) -> Tensor:
        return self._stacked("value")

    def _stacked(self, name: str) -> Tensor:
        shape = self.positions.shape
        made = torch.zeros(*shape, self._sizes[2], dtype=self._dtype, device=self._device)
        for row, heads in enumerate(self._tokens):
            for head, tokens in enumerate(heads):
                for slot, token in enumerate(tokens):
                    made[row, head, slot] = getattr(token, name)
        return made

    def prefill(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None = None) -> Tensor:
        return self.append_block(query, key, value, occupied)

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.append_block(query[:, :, None], key[:, :, None], value[:, :, None])[:, :, 0]

    def append_block(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None = None) -> Tensor:
        output, size = torch.zeros_like(query), self.config.block_size
        for row, heads in enumerate(self._tokens):
            real = [True] * key.shape[2] if occupied is None else occupied[row].tolist()
            for head, tokens in enumerate(heads):
                for start in range(0, key.shape[2], size):
                    for index in range(start, min(start + size, key.shape[2])):
                        if real[index]:
                            # Copies: the caller may write into its tensors again.
                            token = (tensor[row, head, index].clone() for tensor in (key, value))
                            tokens.append(Token(self.tokens_seen + index, *token))
                            self._attend(output, query, row, head, index)
                    self._evict(tokens)
        self.tokens_seen += key.shape[2]
        return output

    def _attend(self, output: Tensor, query: Tensor, row: int, head: int, index: int) -> None:
        tokens = self._tokens[row][head]
        keys, values = (torch.stack([getattr(token, name).double() for token in tokens]) for name in ("key", "value"))
        group = query.shape[1] // self._sizes[1]
        for member in range(head * group, (head + 1) * group):
            weight = (keys @ query[row, member, index].double() * self._scale).softmax(0)
            output[row, member, index] = (weight @ values).to(output.dtype)

    def _evict(self, tokens: list[Token]) -> None:
        sinks, budget = self.config.sinks, self.config.budget
        if len(tokens) > budget:
            del tokens[sinks:len(tokens) - (budget - sinks)]


streaming_llm = types.SimpleNamespace(StreamingLLMState=Lists)
