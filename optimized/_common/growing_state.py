"""The base class of states that keep every token: KIVI, PM-KVQ and Quest. Steps are launched without any reading."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from ...reference.contract.arguments import check_config, check_room
from .operation import Operation
from .state import State


class GrowingState(State):
    """The cache of `batch` sequences in one layer, with room for S = config.max_tokens tokens, which all stay.

    Attributes and errors as in the reference. float32, float16 or bfloat16; D from 16 to 256; up to 16 query heads per
    KV head. TypeError or ValueError for other arguments, and for CPU tensors outside Triton's interpreter.

    A subclass names its config's class in `Config` and the operation of a step in `_step`, makes buffers in
    `_allocate`, and fills them in `_store_prompt`. `_clear` resets those that need it.
    """

    Config: ClassVar[type[Any]]
    config: Any                                 # of the subclass's Config
    #: Appends a token and attends: of its query, key and value, then `_arguments`.
    _step: ClassVar[Operation]
    _rows: ClassVar[tuple[str, ...]] = ("_count", "positions")
    _of_all_rows: ClassVar[tuple[str, ...]] = (*State._of_all_rows, "_counters", "_prepared")
    #: Of all rows: the tokens seen, and what else a step counts.
    _num_counters: ClassVar[int] = 2

    def __init__(
        self, config: Any, *, batch: int, query_heads: int, key_value_heads: int, head_dim: int,
        dtype: torch.dtype, device: torch.device | str,
    ) -> None:
        config = check_config(config, self.Config)
        super().__init__(
            config, slots=config.max_tokens, batch=batch, query_heads=query_heads, key_value_heads=key_value_heads,
            head_dim=head_dim, dtype=dtype, device=device,
        )
        self._count = self._buffer(batch, dtype=torch.int64)
        self._counters = self._buffer(self._num_counters, dtype=torch.int64)
        self.positions = self._buffer(batch, config.max_tokens, dtype=torch.int64)
        shares = batch * query_heads * self._allocate()
        self._partial = self._buffer(shares, head_dim, dtype=torch.float32)
        self._row_maxima, self._weight_sums = (self._buffer(shares, dtype=torch.float32) for _ in range(2))
        self._arguments = self._step.arguments_after("new_value", self._named())
        self.reset()

    def _allocate(self) -> int:
        """Check the sizes, and make the method's buffers. Returns how many programs share the attention of a query."""
        raise NotImplementedError

    def _named(self) -> dict[str, Any]:
        """The arguments of `_step`, by name, which are the same at every step."""
        return {
            "count": self._count, "counters": self._counters, "positions": self.positions, "partial": self._partial,
            "row_maxima": self._row_maxima, "weight_sums": self._weight_sums, "scale": self.scale,
        }

    def _clear(self) -> None:
        """Reset the method's buffers."""

    def _store_prompt(self, key: Tensor, value: Tensor, place: Tensor, padded: bool) -> None:
        """Store a prompt [B, Hkv, T, D], of which row b has `_count[b]` tokens, first in place[b]."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget every token."""
        self._start_reset()
        self._count.zero_()
        self._counters.zero_()
        self.positions.fill_(-1)
        self._clear()
        self._counted, self._prepared, self._behind = 0, 0, False
        self._end_change()

    @property
    def tokens_seen(self) -> int:
        """Tokens received, padding included. Reads the device, since the host does not see replays of a graph."""
        seen = int(self._counters[0])
        if self._behind:
            self._counted, self._prepared, self._behind = seen, 0, False
        return seen

    @classmethod
    def _compiles(cls, config: Any) -> bool:
        return True

    @property
    def _seen(self) -> Tensor:  # type: ignore[override]
        return self._counters[:1]

    #: Tokens of compiled passes that the host has prepared since it counted last.
    _prepared = 0

    def _expect(self, count: int) -> None:
        """ValueError if a compiled pass of `count` tokens has no room. Synchronizes with the GPU only near the end."""
        self._prepared += count
        if self._counted + self._prepared + 1 >= self.config.max_tokens:        # the first pass was not prepared
            check_room(self.tokens_seen, count, self.config.max_tokens)

    @property
    def occupied(self) -> Tensor:
        return self.positions >= 0

    def prefill(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None = None) -> Tensor:
        """Full causal attention of the prompt; then its tokens take their slots.

        query [B, Hq, T, D]; key, value [B, Hkv, T, D]; occupied [B, T] bool, False for padding, by default all True.
        Returns [B, Hq, T, D], zeros for padding, which takes no slot. RuntimeError if the state holds tokens;
        ValueError for more than config.max_tokens tokens.
        """
        padded = occupied is not None
        occupied = self._check_prompt(query, key, value, occupied)
        total = occupied.shape[1]
        self._check_empty()
        check_room(0, total, self.config.max_tokens)
        self._start_change("prefill")
        output = self._attend_prompt(query, key, value, occupied, padded=padded)
        place = slot = torch.arange(total, device=self.device).expand(occupied.shape)
        if padded:
            place = (~occupied).to(torch.int8).argsort(stable=True, dim=1)    # the tokens of each row, then its padding
        self._count.copy_(occupied.sum(1))
        self._store_prompt(key, value, place.contiguous(), padded)
        self.positions[:, :total].copy_(place.masked_fill(slot >= self._count[:, None], -1))
        self._counters.fill_(total)
        self._counted = total
        self._end_change()
        return output

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Append a token and attend.

        query [B, Hq, D]; key, value [B, Hkv, D]. Returns the attention output [B, Hq, D]. Does not synchronize with the
        host, but once after compiled steps. ValueError beyond config.max_tokens tokens, counted by the host; in replays
        of a graph, further tokens are dropped; in compiled steps, which `generate` prepares, it is an assertion on the
        device.
        """
        self._check_step(query, key, value)
        compiled, most = torch.compiler.is_compiling(), self.config.max_tokens
        if compiled:
            torch._assert_async(self._counters[0] < most, f"max_tokens={most} is too small")
        else:
            check_room(self._counted_now, 1, most)
        self._start_change("step")
        output: Tensor = self._step(query, key, value, *self._arguments)
        if compiled:
            self._behind = True
        else:
            self._counted += 1
        self._end_change()
        return output
