"""The base classes of states that keep every token: KIVI, PM-KVQ and Quest."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from .attention import attention_weights, causal_attention, weighted_values
from .contract.arguments import check_config, check_room
from .state import State


class GrowingState(State):
    """The cache of `batch` sequences in one layer, with room for S = config.max_tokens tokens, which all stay.

    Token i of a row, padding not counted, is in slot i. A prompt attends to its keys and values as they come, a step to
    those in the cache. A subclass names its config's class in `Config`, and adds what it needs to the methods with an
    underscore.

    Readable: occupied [B, S] bool; positions [B, S] int64, counted with padding, -1 = no token; key, value
    [B, Hkv, S, D].
    """

    Config: ClassVar[type[Any]]
    config: Any                                 # of the subclass's Config
    _per_slot: ClassVar[tuple[str, ...]] = ("_key", "_value", "positions")
    _per_row: ClassVar[tuple[str, ...]] = ("_count",)

    def __init__(
        self, config: Any, *, batch: int, query_heads: int, key_value_heads: int, head_dim: int,
        dtype: torch.dtype, device: torch.device | str,
    ) -> None:
        config = check_config(config, self.Config)
        super().__init__(
            config, slots=config.max_tokens, batch=batch, query_heads=query_heads, key_value_heads=key_value_heads,
            head_dim=head_dim, dtype=dtype, device=device,
        )
        self._set_up()
        self.reset()

    def _set_up(self) -> None:
        """What the constructor does once: checks of the sizes, and attributes that outlast a reset."""

    def _allocate(self) -> None:
        batch, _, _, slots, head_dim = self.sizes
        self._key, self._value = (self._zeros(slots, head_dim, self._stored_as) for _ in range(2))
        self.positions = torch.full((batch, slots), -1, dtype=torch.int64, device=self.device)
        self._count = torch.zeros(batch, dtype=torch.int64, device=self.device)

    @property
    def _stored_as(self) -> torch.dtype:
        """The dtype in which `_key` and `_value` are stored, and in which a step attends."""
        return self.dtype

    def _zeros(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        batch, heads = self.sizes.batch, self.sizes.key_value_heads
        return torch.zeros(batch, heads, rows, columns, dtype=dtype, device=self.device)

    @property
    def occupied(self) -> Tensor:
        return self.positions >= 0

    @property
    def key(self) -> Tensor:
        return self._key.to(self.dtype)

    @property
    def value(self) -> Tensor:
        return self._value.to(self.dtype)

    def prefill(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None = None) -> Tensor:
        """Full causal attention of the prompt; then its tokens take their slots.

        query [B, Hq, T, D]; key, value [B, Hkv, T, D]; occupied [B, T] bool, False for padding, by default all True.
        Returns [B, Hq, T, D], zeros for padding, which takes no slot. RuntimeError if the state holds tokens;
        ValueError for more than config.max_tokens tokens; TypeError or ValueError for other invalid arguments.
        """
        occupied = self._check_prompt(query, key, value, occupied)
        self._check_empty()
        total = occupied.shape[1]
        check_room(0, total, self.config.max_tokens)
        self._start_change("prefill")
        output = causal_attention(query, key, value, occupied, scale=self.scale)
        self._store_prompt(key, value, occupied)
        self._grow(occupied.sum(1), total)
        self._end_change()
        return output

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Append a token and attend.

        query [B, Hq, D]; key, value [B, Hkv, D]. Returns the attention output [B, Hq, D]. ValueError beyond
        config.max_tokens tokens; TypeError or ValueError for other invalid arguments.
        """
        self._check_step(query, key, value)
        check_room(self._seen, 1, self.config.max_tokens)
        self._start_change("step")
        row = torch.arange(self.sizes.batch, device=self.device)
        self._key[row, :, self._count] = key.to(self._key.dtype)
        self._value[row, :, self._count] = value.to(self._key.dtype)
        self.positions[row, self._count] = self._seen
        output = self._attend(query)
        self._grow(self._count + 1, self._seen + 1)
        self._end_change()
        return output

    def _store_prompt(self, key: Tensor, value: Tensor, occupied: Tensor) -> None:
        """Put the tokens of a prompt into their slots."""
        for row in range(self.sizes.batch):
            tokens = occupied[row].nonzero()[:, 0]
            self._key[row, :, :len(tokens)] = key[row, :, tokens].to(self._key.dtype)
            self._value[row, :, :len(tokens)] = value[row, :, tokens].to(self._key.dtype)
            self.positions[row, :len(tokens)] = tokens

    def _attend(self, query: Tensor) -> Tensor:
        """The attention of a step, whose token is in its slot already but not counted."""
        key, value, occupied = self._used()
        weight = attention_weights(query.to(key.dtype), key, occupied, scale=self.scale)
        return weighted_values(weight, value, occupied).to(query.dtype)

    def _used(self) -> tuple[Tensor, Tensor, Tensor]:
        """Key and value [B, Hkv, n, D] and occupied [B, n] of the slots that a step may read: in n steps, or with a
        prompt of as many tokens, no row gets more than n."""
        end = self._seen + 1
        return self._key[:, :, :end], self._value[:, :, :end], self.positions[:, :end] >= 0

    def _grow(self, count: Tensor, seen: int) -> None:
        """Count tokens that are in their slots already: the rows have `count` [B] of them, of `seen` with padding."""
        self._count, self._seen = count, seen


class QuantizedState(GrowingState):
    """A growing state that quantizes tokens: `_key` and `_value` have the numbers that their codes stand for."""

    _per_slot: ClassVar[tuple[str, ...]] = (
        *GrowingState._per_slot, "_key_codes", "_key_scale", "_key_minimum", "_value_codes", "_value_scale",
        "_value_minimum",
    )

    @property
    def _stored_as(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32
