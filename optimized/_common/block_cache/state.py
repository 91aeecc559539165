"""The cache of KeyDiff and the attention baselines on the GPU: preallocated slots, block-wise input, in-place eviction.

Counterpart of the reference's `blocks.py`. `step` and `append_block` do not synchronize with the host. The docstring of
`BlockState` has what a method says.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ....reference.contract import Sizes
from ....reference.contract.arguments import check_config
from ....reference.contract.attention import check_attention, check_sink_logits, check_slot_mask
from ....reference.contract.blocks import BlockConfig
from ....reference.contract.scales import FP8, check_scales
from .. import graph
from ..launch import check_kernel_sizes, check_launchable
from ..library_attention import OWN, library_kernel
from ..state import State
from . import ops as ops
from .compress import thin
from .kernels import attend, counters_of
from .step import CARRYING, scratch
from .step import step as block_step


class Block(NamedTuple):
    """Q tokens that just arrived in slots capacity to end - 1, and the softmaxes of their queries.

    query [B, Hq, Q, D]; valid [B, Q] bool, False for padding; end = capacity + Q; softmax_parts [2, B, Hq, Q] float32:
    see `kernels.Attended`; None at a decode step, and empty if a kernel of PyTorch attended or before the attention.
    """

    query: Tensor
    valid: Tensor
    end: int
    softmax_parts: Tensor | None


class Policy(NamedTuple):
    """What a method says of its evictions besides the ranks, from its config.

    sinks, recent: how many of the oldest and of the newest tokens of each head are kept whatever their rank, at most
    `budget` in all. offset: of the rule "random" that of the generator, of "activate" what is added to age / gap.
    alpha: the weight of "renew" and "activate". by_blocks: a step is a block of one token, by the kernels for blocks.
    """

    sinks: int = 0
    recent: int = 0
    offset: int = 0
    alpha: float = 0.0
    by_blocks: bool = False


class BlockState(State):
    """A cache of capacity + block_size slots per KV head: the first `capacity` hold cached tokens, the others the
    current block.

    key, value [B, Hkv, S, D] with S = capacity + block_size; the config's capacity is its budget, unless the method
    evicts less often. occupied [B, Hkv, S] bool; positions [B, Hkv, S] int64 (the token in each slot, counted from 0
    with padding included; -1 = free); score [B, Hkv, S] float32, the method's aggregate or last rank of each token,
    -inf in free slots. Between calls, tokens are in the first slots without gaps, at most `capacity` of them. All
    buffers are updated in place, and a step can be captured in a CUDA graph. float32, float16 or bfloat16; D from 16 to
    256; up to 16 query heads per KV head. sink_logits: see the reference's `BlockState`. TypeError or ValueError for
    other arguments, and for CPU tensors outside Triton's interpreter.

    A method must say:

    - `Config`: its config's class.
    - `_rule`: how a step ranks, one of `step.RULES`, which are the kernels that there are. By default "nothing": the
      token takes slot `budget`, and `_update` ranks as for any block. "append": it takes the first free slot, and the
      method evicts. The others evict in the step, and leave in `score` what `_update` would.
    - `_update(block)`: updates `score` for all occupied slots below block.end, the new block included, and ranks their
      tokens. Returns rank [B, Hkv, end] float32, or int64 from 0 on, lowest evicted first, ties to the lowest slot, or
      None for the oldest first; and protected [B, Hkv, end] bool, tokens that are kept whatever their rank, or None.

    A method may say:

    - `_make_policy()`: what else decides, see `Policy`.
    - `_carries`: the dtype of `_carried` [B, Hkv, S], a number of each token that moves with it. With "sum", it is
      ||v||_1, by which weights are multiplied; "activate" sets it in steps; otherwise it is the method's own.
    - `_library_attends`: a kernel of PyTorch may attend for a prompt of one block, because the method compares the
      queries and keys as they come and does not read the softmaxes.
    - `_chooses_early`: evictions do not depend on the block's attention, and are chosen beside it: `_prepare` before
      it, `_choose` beside it, `_settle` moves the tokens afterwards. `_early(count)`, if that depends on the block's
      size.
    - `_allocate()`, `_clear()`: make and reset its buffers. `_rows` names those with rows, behind BlockState's.
    - `_evict(block, count)`, `_finish_step(query)`: evictions that ranks do not express, after a block and in a step.
    - `_after(query, valid, count)`: what follows the last block of a prompt, and a shorter last one.
    - `_compared(query, valid, end)`: queries and keys as attention multiplies them, if not as they are stored.
    - `_take_prompt(query, key, value, valid)`: a shorter way for a whole prompt.
    - `_allocate_tokens()`, `_tokens()`: where keys and values are, if not in `key` and `value`.

    If the config's capacity exceeds its budget (an `interval`), `_counts` [B, Hkv] int32 has the tokens of each head,
    and `_update` returns a rank and None. The rule is one of `step.WEIGHING`, which leave in `_ranks` what `_thin`
    evicts by, or "append", or steps are blocks.
    """

    Config: ClassVar[type[BlockConfig]]
    config: Any  # of the subclass's Config
    _rows: ClassVar[tuple[str, ...]] = (
        "key", "value", "occupied", "positions", "_score", "_token_index", "_valid_seen", "_carried", "_counts",
    )
    _of_all_rows: ClassVar[tuple[str, ...]] = (*State._of_all_rows, "_seen")
    _rule: ClassVar[str] = "nothing"
    _carries: ClassVar[torch.dtype | None] = None
    _library_attends: bool = False
    _chooses_early: bool = False

    def __init__(
        self, config: Any, *, batch: int, query_heads: int, key_value_heads: int, head_dim: int,
        dtype: torch.dtype, device: torch.device | str, sink_logits: Tensor | None = None,
    ) -> None:
        super().__init__(
            check_config(config, self.Config), slots=config.capacity + config.block_size, batch=batch,
            query_heads=query_heads, key_value_heads=key_value_heads, head_dim=head_dim, dtype=dtype, device=device,
        )
        self.sink_logits = check_sink_logits(sink_logits, self.sizes, self.device)
        self._policy = self._make_policy()
        rows = (batch, key_value_heads, self.sizes.slots)
        self._allocate_tokens()
        self.occupied = self._buffer(*rows, dtype=torch.bool)
        self.positions = self._buffer(*rows, dtype=torch.int64)
        self._score = self._buffer(*rows, dtype=torch.float32)
        self._seen = self._buffer(1, dtype=torch.int64)                         # on the device: graphs update it
        self._token_index = self._buffer(*rows, dtype=torch.int32)              # index among the row's valid tokens
        self._valid_seen = self._buffer(batch, key_value_heads, dtype=torch.int32)  # valid tokens that the row has seen
        self._carried = None if self._carries is None else self._buffer(*rows, dtype=self._carries)
        self._window: tuple[Tensor | None, Tensor | None] = (None, None)
        self._counts: Tensor | None = None
        self._ranks: Tensor | None = None
        grows = config.capacity > config.budget
        if grows or self._rule == "append":
            self._counts = self._buffer(batch, key_value_heads, dtype=torch.int32)
        if grows and self._rule != "append":
            self._ranks = self._buffer(*rows, dtype=torch.int64 if self._rule == "renew" else torch.float32)
            self._numbers = self._buffer(4, batch * key_value_heads, self.sizes.slots, dtype=torch.int32)
        self._allocate()
        self._scratch = scratch(self.sizes, config.capacity, dtype, self.device, self._rule)
        #: Of the kernels for blocks: zeros between launches.
        self._counters = self._buffer(counters_of(self.sizes, config.block_size), dtype=torch.int32)
        self._arguments = self._arguments_of_steps()
        self.reset()

    @classmethod
    def _compiles(cls, config: Any) -> bool:
        return True

    def _arguments_of_steps(self) -> tuple[Any, ...]:
        """Those that are the same at every step: what `step.step` takes between `value` and `block_table`."""
        policy, (window_query, window_positions) = self._policy, self._window
        return block_step.arguments_after("value", {
            "occupied": self.occupied, "positions": self.positions, "score": self._score,
            "token_index": self._token_index, "carried": self._carried if self._rule in CARRYING else None,
            "valid_seen": self._valid_seen, "seen": self._seen, **self._scratch._asdict(), "counts": self._counts,
            "ranks": self._ranks, "window_query": window_query, "window_positions": window_positions,
            "scale": self.scale, "softcap": self.config.softcap, "budget": self.config.capacity, "rule": self._rule,
            "sinks": policy.sinks, "recent": policy.recent, "offset": policy.offset, "alpha": policy.alpha,
        })

    @property
    def score(self) -> Tensor:
        return self._score

    @property
    def tokens_seen(self) -> int:
        """Tokens received since the last reset, padding included. Reading it synchronizes with the GPU."""
        return int(self._seen.item())

    def reset(self) -> None:
        """Forget every token."""
        self._start_reset()
        self.occupied.zero_()
        self.positions.fill_(-1)
        self._score.fill_(-torch.inf)
        self._seen.zero_()
        self._valid_seen.zero_()
        if self._counts is not None:
            self._counts.zero_()
        self._scratch.completion_counters.zero_()                               # in case a launch was interrupted
        self._counters.zero_()
        self._clear()
        self._end_change()

    def prefill(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None = None) -> Tensor:
        """Process the prompt: `append_block` on an empty state. RuntimeError if the state holds tokens."""
        padded = occupied is not None
        occupied = self._check_prompt(query, key, value, occupied)
        self._check_empty(", or append_block()")
        whole = self._library_attends and occupied.shape[1] <= self.config.block_size and self.config.softcap is None
        whole = whole and self.sink_logits is None                     # PyTorch's kernels have neither
        if whole and not padded and (output := self._take_prompt(query, key, value, occupied)) is not None:
            return output
        self._prompt_kernel = library_kernel(query, key, value, self.scale) if whole else OWN
        if self._prompt_kernel == OWN:
            return self._append_blocks(query, key, value, occupied)
        return self._append_blocks(query, key, value, occupied, padded=padded)

    def append_block(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None = None) -> Tensor:
        """Add any number of tokens in blocks of at most block_size: each block attends to the cache and itself, then
        the cache evicts.

        query [B, Hq, T, D]; key, value [B, Hkv, T, D]; occupied [B, T] bool, False for padding, by default all True.
        Returns [B, Hq, T, D], zeros for padding, which takes no slot.
        """
        return self._append_blocks(query, key, value, self._check_prompt(query, key, value, occupied))

    def _append_blocks(
        self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, *, padded: bool | None = None
    ) -> Tensor:
        """`append_block`, after its checks. With `padded`, the tokens are a prompt of one block, and a kernel of
        PyTorch attends: see `_attend_prompt`."""
        self._start_change("append_block")
        size = self.config.block_size
        if padded is not None:
            end = self._arrive(key, value, occupied)
            output = self._attend_prompt(query, key, value, occupied, padded=padded)
            self._evict(Block(query, occupied, end, query.new_empty(0, dtype=torch.float32)), query.shape[2])
        elif occupied.shape[1] <= size:
            output = self._append(query, key, value, occupied)
        else:
            output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
            prompt = query, key, value, occupied
            full = query.shape[2] // size if graph.worth_a_graph(query, size) else 0
            graph.run_blocks(self, self._append, prompt, output, size, full, self._tensors())
            for start in range(full * size, query.shape[2], size):
                part = slice(start, start + size)
                block = query[:, :, part], key[:, :, part], value[:, :, part], occupied[:, part]
                if start and block[0].shape[2] < size:
                    self._after(query[:, :, :start], occupied[:, :start], size)
                output[:, :, part] = self._append(*block)
        if padded is None:
            self._after(query, occupied, (query.shape[2] - 1) % size + 1)
        self._end_change()
        return output

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Add one token: query [B, Hq, D]; key, value [B, Hkv, D]. Returns the attention output [B, Hq, D]. Does not
        synchronize with the host."""
        self._check_step(query, key, value)
        output: Tensor
        if self._policy.by_blocks:
            self._start_change("step")
            valid = torch.ones(self.sizes.batch, 1, dtype=torch.bool, device=self.device)
            output = self._append(query[:, :, None], key[:, :, None], value[:, :, None], valid)[:, :, 0]
            self._after(query[:, :, None], valid, 1)
        else:
            held_key, held_value, block_table = self._tokens()
            self._start_change("step")
            output = block_step(
                query, key, value, held_key, held_value, *self._arguments, block_table, self.sink_logits
            )
            self._finish_step(query)
        self._end_change()
        return output

    # Defined by methods ----------------------------------------------------------------------------------------------

    def _allocate_tokens(self) -> None:
        """Allocate `key` and `value`."""
        batch, _, heads, slots, head_dim = self.sizes
        self.key, self.value = (self._buffer(batch, heads, slots, head_dim, dtype=self.dtype) for _ in range(2))

    def _tokens(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values as the kernels of a step take them, with a block table if they are in pages."""
        return self.key, self.value, None

    def _make_policy(self) -> Policy:
        return Policy()

    def _allocate(self) -> None:
        """Allocate the method's own buffers with `_buffer`."""

    def _clear(self) -> None:
        pass

    def _update(self, block: Block) -> tuple[Tensor | None, Tensor | None]:
        raise NotImplementedError

    def _compared(self, query: Tensor, valid: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """The queries of a block, in its slots and counted in `_valid_seen` already, and the keys of the slots before
        `end`, as attention multiplies them. Decode steps ask only if they are blocks of one token (`Policy.by_blocks`).
        """
        return query, self.key[:, :, :end]

    def _after(self, query: Tensor, valid: Tensor, count: int) -> None:
        """Complete the blocks of a prompt, which are counted in `_seen`, or those before a last, shorter one. query
        [B, Hq, T, D] and valid [B, T]: theirs; count: the tokens of the last one."""

    def _take_prompt(self, query: Tensor, key: Tensor, value: Tensor, valid: Tensor) -> Tensor | None:
        """Attend to a prompt of one block without padding, and put the tokens that stay into the slots of the empty
        cache. None for a prompt that is to come as a block."""
        return None

    # One block -------------------------------------------------------------------------------------------------------

    def _append(
        self, query: Tensor, key: Tensor, value: Tensor, valid: Tensor, output: Tensor | None = None
    ) -> Tensor:
        """Add a block of Q <= block_size tokens; valid [B, Q] bool. Returns [B, Hq, Q, D], which is `output` if given.
        """
        end, count = self._arrive(key, value, valid), query.shape[2]
        early = self._early(count)
        if early:
            # Before the attention, which would leave it few multiprocessors.
            prepared = self._prepare(Block(query, valid, end, query.new_empty(0, dtype=torch.float32)))
            side = graph.fork()
            with graph.on(side):
                destination = self._choose(prepared, count)
        compared, keys = self._compared(query, valid, end)
        output, softmax_parts = attend(
            compared, keys, self.value[:, :, :end], self.occupied[:, :, :end], self.scale, self._counters,
            output=output, softcap=self.config.softcap, sink_logits=self.sink_logits,
        )
        if early:
            graph.join(side)
            self._settle(destination, count)
        else:
            self._evict(Block(query, valid, end, softmax_parts), count)
        return output

    def _early(self, count: int) -> bool:
        """Whether the evictions of a block of `count` tokens are chosen before its attention."""
        return self._chooses_early and self._ranks is None

    def _arrive(self, key: Tensor, value: Tensor, valid: Tensor) -> int:
        """Put a block of Q tokens into its slots, and count its valid tokens. Returns the end of the slots."""
        capacity, count = self.config.capacity, key.shape[2]
        ops.arrive(
            key, value, valid, self.key, self.value, self.occupied, self.positions, self._score, self._token_index,
            self._carried if self._rule == "sum" else None, self._valid_seen, self._seen, self._counts,
            self._counters, capacity, self._policy.offset if self._rule == "random" else None,
        )
        return capacity + count

    def _finish_step(self, query: Tensor) -> None:
        """Complete a step after its kernels."""
        if self._ranks is not None:
            self._thin(self._ranks, 1, appended=True)
        elif self._rule == "nothing":
            valid = torch.ones(self.sizes.batch, 1, dtype=torch.bool, device=self.device)
            self._evict(Block(query[:, :, None], valid, self.config.capacity + 1, None), 1)

    def _evict(self, block: Block, count: int) -> None:
        """Update scores, choose evictions, and move the kept tokens of a block that is in its slots. Add a block's
        tokens to `_seen`, which a decode step does itself."""
        came = 0 if block.softmax_parts is None else count
        library = block.softmax_parts is not None and not block.softmax_parts.numel()
        rank, protected = self._update(block)
        if self._ranks is not None:
            assert rank is not None and protected is None
            self._thin(rank, count, appended=False)
            return
        ops.evict(
            rank, protected, self.key, self.value, self.occupied, self.positions, self._score, self._token_index,
            self._carried, self._valid_seen, self._seen, self.config.budget, count, came, self._policy.sinks,
            self._policy.recent, library,                              # its kernel does not tell when others may start
        )

    def _prepare(self, block: Block) -> Any:
        """What `_choose` is to know of a block that is in its slots."""
        return self._update(block)

    def _choose(self, prepared: Any, count: int) -> Any:
        """Where `_evict` moves the tokens of a block. Its attention may run at the same time, since it reads what is
        in the slots until the tokens move."""
        rank, protected = prepared
        return ops.choose(
            rank, protected, self.occupied, self._token_index, self._valid_seen, self._seen, self.config.budget, count,
            count, self._policy.sinks, self._policy.recent,
        )

    def _settle(self, chosen: Any, count: int) -> None:
        """Move the tokens of a block as `_choose` found, after its attention."""
        ops.settle(
            chosen, self.key, self.value, self.occupied, self.positions, self._score, self._token_index, self._carried,
            self.config.budget,
        )

    def _thin(self, rank: Tensor, count: int, *, appended: bool) -> None:
        """Evict at intervals: heads that are due, by rank, after `count` tokens."""
        thin(
            rank, self.key, self.value, self.occupied, self.positions, self._score, self._token_index, self._carried,
            self._valid_seen, self._seen, self._counts, self._numbers, self.config.budget, self.config.capacity, count,
            self._policy.sinks, self._policy.recent, appended,
        )


def newest(positions: Tensor, count: int) -> Tensor:
    """Mask of the `count` newest tokens of each row: positions [..., S] int64, distinct, -1 for none."""
    return _first(positions, count, largest=True)


def oldest(positions: Tensor, count: int) -> Tensor:
    """Mask of the `count` oldest tokens of each row: positions as in `newest`."""
    return _first(torch.where(positions < 0, torch.iinfo(torch.int64).max, positions), count, largest=False)


def _first(positions: Tensor, count: int, *, largest: bool) -> Tensor:
    place = positions.topk(min(count, positions.shape[-1]), -1, largest=largest).indices
    exists = (positions >= 0) & (positions < torch.iinfo(torch.int64).max)
    return torch.zeros_like(exists).scatter(-1, place, True) & exists


def check_block(
    query: object, key: object, value: object, occupied: object, key_scale: object, value_scale: object
) -> Sizes:
    """Check the tensors of `attend`, whose queries belong to the last Q of the S slots. Returns the sizes."""
    sizes = check_attention(query, key, value, time="Q", stored=FP8)
    assert isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)
    if query.shape[2] > sizes.slots:
        raise ValueError(f"query must be [B, Hq, Q, D] with Q <= S = {sizes.slots}, got {tuple(query.shape)}")
    per_head = isinstance(occupied, Tensor) and occupied.dim() == 3
    check_slot_mask("occupied", occupied, sizes, per_head, key)
    check_scales(key_scale, value_scale, key=key, heads=sizes.key_value_heads)
    assert isinstance(key_scale, Tensor | None) and isinstance(value_scale, Tensor | None)
    check_launchable(query=query, key_scale=key_scale, value_scale=value_scale)
    check_launchable(FP8, key=key, value=value)
    check_kernel_sizes(sizes)
    return sizes
