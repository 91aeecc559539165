"""The frame of KeyDiff and the attention baselines on the GPU: preallocated slots, blocks in, the cache cut in place.

Twin of the reference's frame; nothing here returns to the host. A method says what it aggregates and how it ranks:

- `_update(block) -> (rank, protected)`: brings `score` up to date for all occupied slots below block.end, those of the
  new block included, and says who goes first. rank [B, Hkv, end] float32, lowest first, ties to the lowest slot, or
  None: the oldest first; protected [B, Hkv, end] bool, which stay whatever their rank, or None. A method whose capacity
  is more than its budget overrides `_evict` instead, and `_finish_step`.
- `_rule`: how a decode step ranks, one of `step.RULES`. With the default, "nothing", a step's token takes slot
  `budget`, then `_update` ranks as for any block. With "append" it takes the first free slot, and `_window` (counts,
  window_query, window_positions of `step.step`) is brought up to date. With others the step does it all, and
  leaves in `score` what `_update` would; `_offset` is the random generator's.
- `_sinks`, `_recent`: how many of the oldest and of the newest tokens of each head are protected as well. No more than
  `budget` tokens may be protected in all.
- `_carried`: a float32 [B, Hkv, S] buffer of the method's own that moves with the tokens, or None. With
  `_carries_magnitude` a new token's is set to ||v||_1 before `_update`; else `_update` sets it.
- `_allocate()` makes the method's buffers; `_buffers()` returns those that belong to rows, which `reorder` permutes
  (first axis B; `_carried` is not among them); `_clear()` forgets what is in them.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ....reference._validate import check_config, check_reorder, check_tensor
from ....reference._validate_attention import check_attention, check_prompt, check_slot_mask, check_step
from ....reference.blocks import BlockConfig
from ....reference.contract import Sizes
from ..launch import check_kernel_sizes, check_launchable
from ..state import State
from . import ops as ops
from .kernels import attend
from .step import scratch
from .step import step as block_step


class Block(NamedTuple):
    """Q tokens that just came into slots capacity to end - 1, and how their queries attended.

    query [B, Hq, Q, D]; real [B, Q] bool, False for padding; positions [Q] int64; end = capacity + Q; parts
    [2, B, Hq, Q] float32: see `kernels.Attended`; None at a decode step.
    """

    query: Tensor
    real: Tensor
    positions: Tensor
    end: int
    parts: Tensor | None


class BlockState(State):
    """A cache of capacity + block_size slots per KV head: the first `capacity` hold tokens, the others the block at
    hand.

    key, value [B, Hkv, S, D] with S = capacity + block_size, where capacity is the config's: the budget, unless
    evictions are less often; occupied and positions [B, Hkv, S] bool and int64 (the token in each slot, counted from 0
    with padding included; -1 = free); score [B, Hkv, S] float32, what the method carries of each token or ranked it by
    last, -inf in free slots. Between calls tokens sit in the first slots, without gaps, in `capacity` of them at most.
    All of them are updated in place, and a step fits in a CUDA graph. float32, float16 or bfloat16; D from 16 to 256;
    up to 16 query heads per KV head. TypeError, ValueError for anything else, and for CPU tensors outside Triton's
    interpreter.
    """

    Config: ClassVar[type[BlockConfig]]
    config: Any  # of the subclass's Config
    _carries_magnitude: ClassVar[bool] = False
    _rule: ClassVar[str] = "nothing"

    def __init__(
        self, config: Any, *, batch: int, query_heads: int, key_value_heads: int, head_dim: int,
        dtype: torch.dtype, device: torch.device | str,
    ) -> None:
        super().__init__(
            check_config(config, self.Config), slots=config.capacity + config.block_size, batch=batch,
            query_heads=query_heads, key_value_heads=key_value_heads, head_dim=head_dim, dtype=dtype, device=device,
        )
        rows = (batch, key_value_heads, self.sizes.slots)
        self.key = self._buffer(*rows, head_dim, dtype=dtype)
        self.value = self._buffer(*rows, head_dim, dtype=dtype)
        self.occupied = self._buffer(*rows, dtype=torch.bool)
        self.positions = self._buffer(*rows, dtype=torch.int64)
        self._score = self._buffer(*rows, dtype=torch.float32)
        self._seen = self._buffer(1, dtype=torch.int64)                         # on the device: graphs replay it
        self._ordinals = self._buffer(*rows, dtype=torch.int32)                 # numbers of tokens, padding left out
        self._held = self._buffer(batch, key_value_heads, dtype=torch.int32)    # real tokens that the row has seen
        self._carried: Tensor | None = None
        self._window: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
        self._sinks = self._recent = self._offset = 0
        self._allocate()
        self._scratch = scratch(self.sizes, config.capacity, dtype, self.device, self._rule)
        self.reset()

    @property
    def score(self) -> Tensor:
        return self._score

    @property
    def tokens_seen(self) -> int:
        """Tokens that came in since the last reset, padding included. Reading it synchronises with the GPU."""
        return int(self._seen.item())

    def reset(self) -> None:
        """Forget every token."""
        self.occupied.zero_()
        self.positions.fill_(-1)
        self._score.fill_(-torch.inf)
        self._seen.zero_()
        self._held.zero_()
        self._scratch.arrivals.zero_()                                          # should a launch have been cut short
        self._clear()

    def prefill(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None = None) -> Tensor:
        """The prompt: `append_block` on an empty state. RuntimeError when the state already holds tokens."""
        check_prompt(query, key, value, occupied, sizes=self.sizes, dtype=self.dtype, device=self.device)
        # Asked of the device: a graph's replays are steps that the host does not see.
        self._check_empty(", or append_block()")
        return self.append_block(query, key, value, occupied)

    def append_block(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None = None) -> Tensor:
        """Any number of tokens, at most block_size at a time: attention to what is held and among themselves, eviction.

        query [B, Hq, T, D]; key, value [B, Hkv, T, D]; occupied [B, T] bool, False for padding, default all True.
        Returns [B, Hq, T, D]; padding gives zeros and enters no slot.
        """
        total = check_prompt(query, key, value, occupied, sizes=self.sizes, dtype=self.dtype, device=self.device)
        check_launchable(query=query, key=key, value=value)
        if occupied is None:
            occupied = torch.ones(self.sizes.batch, total, dtype=torch.bool, device=self.device)
        size = self.config.block_size
        if total <= size:
            return self._append(query, key, value, occupied)
        blocks = zip(*(t.split(size, 2) for t in (query, key, value)), occupied.split(size, 1), strict=True)
        return torch.cat([self._append(*block) for block in blocks], 2)

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """A block of one token: query [B, Hq, D]; key, value [B, Hkv, D]. Returns the attention output [B, Hq, D].
        No host synchronisation."""
        check_step(query, key, value, sizes=self.sizes, dtype=self.dtype, device=self.device)
        check_launchable(query=query, key=key, value=value)
        output = block_step(
            query, key, value, self.key, self.value, self.occupied, self.positions, self._score, self._ordinals,
            self._carried if self._carries_magnitude else None, self._held, self._seen, *self._scratch,
            *self._window, self.scale, self.config.capacity, self._rule, self._sinks, self._recent, self._offset,
        )
        self._finish_step(query)
        return output

    def reorder(self, index: Tensor) -> None:
        """Row b becomes what row index[b] was (beam search). index [B] int64."""
        index = check_reorder(index, self.sizes.batch, self.device)
        carried = [] if self._carried is None else [self._carried]
        for tensor in (
            self.key, self.value, self.occupied, self.positions, self._score, self._ordinals, self._held, *carried,
            *self._buffers(),
        ):
            tensor.copy_(tensor.index_select(0, index))

    # What methods define ---------------------------------------------------------------------------------------------

    def _allocate(self) -> None:
        """Buffers of the method's own, by `_buffer`."""

    def _buffers(self) -> tuple[Tensor, ...]:
        return ()

    def _clear(self) -> None:
        pass

    def _update(self, block: Block) -> tuple[Tensor | None, Tensor | None]:
        raise NotImplementedError

    # One block -------------------------------------------------------------------------------------------------------

    def _append(self, query: Tensor, key: Tensor, value: Tensor, real: Tensor) -> Tensor:
        """A block of Q <= block_size tokens; real [B, Q] bool. Returns [B, Hq, Q, D]."""
        capacity, count = self.config.capacity, query.shape[2]
        end = capacity + count
        positions = self._seen + torch.arange(count, device=self.device)
        ops.arrive(
            key, value, real, self.key, self.value, self.occupied, self.positions, self._score, self._ordinals,
            self._carried if self._carries_magnitude else None, self._held, self._seen, capacity,
        )
        self._seen += count
        self._held += real.sum(-1, keepdim=True)
        output, parts = attend(
            query, self.key[:, :, :end], self.value[:, :, :end], self.occupied[:, :, :end], self.scale
        )
        self._evict(Block(query, real, positions, end, parts), count)
        return output

    def _finish_step(self, query: Tensor) -> None:
        """What is left to do after a step's kernels."""
        if self._rule == "nothing":
            real = torch.ones(self.sizes.batch, 1, dtype=torch.bool, device=self.device)
            self._evict(Block(query[:, :, None], real, self._seen - 1, self.config.capacity + 1, None), 1)

    def _evict(self, block: Block, count: int) -> None:
        """The block is in its slots: update and rank, choose, settle."""
        budget = self.config.budget
        rank, protected = self._update(block)
        destination = ops.choose(
            rank, protected, self.occupied, self._ordinals, self._held, budget, count, self._sinks, self._recent
        )
        ops.settle(
            destination, self.key, self.value, self.occupied, self.positions, self._score, self._ordinals,
            self._carried, budget,
        )


def newest(positions: Tensor, count: int) -> Tensor:
    """The `count` newest tokens of each row, bool: positions [..., S] int64, distinct, -1 for none."""
    return _first(positions, count, largest=True)


def oldest(positions: Tensor, count: int) -> Tensor:
    """The `count` oldest tokens of each row, bool: positions as in `newest`."""
    return _first(torch.where(positions < 0, torch.iinfo(torch.int64).max, positions), count, largest=False)


def _first(positions: Tensor, count: int, *, largest: bool) -> Tensor:
    place = positions.topk(min(count, positions.shape[-1]), -1, largest=largest).indices
    held = (positions >= 0) & (positions < torch.iinfo(torch.int64).max)
    return torch.zeros_like(held).scatter(-1, place, True) & held


def check_positions(positions: object) -> Tensor:
    """positions [..., S] int64; -1 where there is no token."""
    if not isinstance(positions, Tensor):
        raise TypeError(f"positions must be a torch.Tensor [..., S], got {type(positions).__name__}")
    check_tensor("positions", positions, dims=max(positions.dim(), 1), layout="[..., S]")
    if positions.dtype != torch.int64:
        raise TypeError(f"positions must have dtype torch.int64, got {positions.dtype}")
    return positions


def check_block(query: object, key: object, value: object, occupied: object) -> Sizes:
    """Validates the arguments of an `attend`: the queries of the last Q of the S slots. Returns the sizes."""
    sizes = check_attention(query, key, value, time="Q")
    assert isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)
    if query.shape[2] > sizes.slots:
        raise ValueError(f"query must be [B, Hq, Q, D] with Q <= S = {sizes.slots}, got {tuple(query.shape)}")
    per_head = isinstance(occupied, Tensor) and occupied.dim() == 3
    check_slot_mask("occupied", occupied, sizes, per_head, key)
    check_launchable(query=query, key=key, value=value)
    check_kernel_sizes(sizes)
    return sizes
