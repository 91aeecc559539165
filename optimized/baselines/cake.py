"""CAKE on the GPU: a state whose decode step takes three launches, and the cascade that states of several layers share.

A prompt synchronises with the host, since a state allocates what its rows keep. A step does not, so that a captured
step can be replayed as any step. A new prompt of other budgets needs a new capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...reference.baselines.cake import ObserveResult
from ...reference.contract.arguments import check_config, check_integer
from ...reference.contract.cake import check_shared_cascade
from ...reference.contract.cascade import CAKEConfig, Cascade
from .._common.launch import (
    INTERPRETED,
    SMALL_TILES,
    cdiv,
    group_rows,
    key_block,
    next_power_of_2,
    on_device_of,
    padded_head_dim,
    split_slots,
)
from .._common.numerics import LOG2_E
from .._common.operation import operation
from .._common.prompts import prompt_selection
from .._common.state import State
from .cake_kernels import attention_kernel, evict_kernel, merge_kernel
from .cake_prompt import MISSING, budgets, keep, log_preference, observe, ranks_of

__all__ = ["CAKECascade", "CAKEConfig", "CAKEState", "ObserveResult", "budgets", "log_preference", "observe"]

#: Tokens times query heads of a tile of weights; the most tokens that a program ranks at a time.
WEIGHTS, CHUNK = 4096, 8192


class CAKECascade(Cascade):
    __doc__ = Cascade.__doc__

    #: The largest budget of each layer so far, for the sizes of buffers.
    _most: Sequence[int] = ()

    def _share(self, log_preferences: Tensor, prefix: Tensor, total: int) -> Tensor:
        return budgets(log_preferences, prefix, total)

    def _grant(self, count: int, prefix: Tensor, short: Tensor) -> Tensor:
        granted = super()._grant(count, prefix, short)
        self._most = granted.amax(0).tolist()   # one synchronisation for all layers
        return granted


class CAKEState(State):
    """The CAKE cache of `batch` sequences in one layer. Attributes, arguments and errors as in the reference.

    float32, float16 or bfloat16; D from 16 to 256; up to 16 query heads per KV head. A prompt whose rows need as many
    slots as before updates the buffers in place; otherwise it allocates. TypeError or ValueError for other arguments,
    and for CPU tensors outside Triton's interpreter.
    """

    config: CAKEConfig
    _rows = (
        "key", "value", "positions", "_order", "_rank", "_held", "_free", "_seen", "budgets", "_short",
    )
    _of_all_rows = (*State._of_all_rows, "_prompt")

    def __init__(
        self, config: CAKEConfig, *, batch: int, query_heads: int, key_value_heads: int, head_dim: int,
        dtype: torch.dtype, device: torch.device | str, cascade: Any = None, layer: int = 0,
    ) -> None:
        config = check_config(config, CAKEConfig)
        super().__init__(
            config, slots=config.budget + 1, batch=batch, query_heads=query_heads, key_value_heads=key_value_heads,
            head_dim=head_dim, dtype=dtype, device=device,
        )
        self._shared, self.layer = cascade is not None, check_integer("layer", layer, minimum=0)
        if self._shared:
            check_shared_cascade(cascade, CAKECascade, config, self.sizes.batch, self.device)
        self.cascade = cascade if self._shared else CAKECascade(config, layers=1, batch=batch, device=device)
        if self.layer >= self.cascade.layers:
            raise ValueError(f"layer must be below the cascade's {self.cascade.layers} layers, got {layer}")
        batch, heads = self.sizes.batch, self.sizes.key_value_heads
        self.budgets = self._buffer(batch, dtype=torch.int64)
        self._short = self._buffer(batch, dtype=torch.bool)
        self._held, self._free = (self._buffer(batch, heads, dtype=torch.int32) for _ in range(2))
        self._seen = self._buffer(batch, heads, dtype=torch.int64)
        self._allocate(config.budget + 1)
        self.reset()

    def _allocate(self, slots: int) -> None:
        """The buffers of so many slots, with zeros."""
        batch, _, heads, _, head_dim = self.sizes
        self.key, self.value = (self._buffer(batch, heads, slots, head_dim, dtype=self.dtype) for _ in range(2))
        self.positions = self._buffer(batch, heads, slots, dtype=torch.int64)
        self._order = self._buffer(batch, heads, slots, dtype=torch.int32)
        #: See `ranks_of`. The first step that evicts overwrites it with what the tokens receive.
        self._rank = self._buffer(batch, heads, slots, dtype=torch.int32)
        self._allocate_scratch(slots)

    def _allocate_scratch(self, slots: int) -> None:
        """What a step with so many slots needs besides the cache."""
        batch, query_heads, _, _, head_dim = self.sizes
        self.sizes = self.sizes._replace(slots=slots)
        self._logits = self._buffer(batch, query_heads, slots, dtype=torch.float32)
        block = key_block(head_dim, self.dtype.itemsize, slots)
        self._splits, self._share = split_slots(self.sizes, block, self.device)
        parts = batch * query_heads * self._splits
        self._partial = self._buffer(parts, head_dim, dtype=torch.float32)
        self._row_maxima, self._weight_sums = (self._buffer(parts, dtype=torch.float32) for _ in range(2))

    def _take(self, source: Any, index: Tensor) -> None:
        if source.sizes.slots != self.sizes.slots:
            self._allocate(source.sizes.slots)
        super()._take(source, index)

    def reset(self) -> None:
        """Forget every token. A shared cascade stays as it is."""
        self._start_reset()
        if not self._shared:
            self.cascade.reset()
        if self.sizes.slots != self.config.budget + 1:
            self._allocate(self.config.budget + 1)
        self.key.zero_()
        self.value.zero_()
        self.positions.fill_(-1)
        self._rank.fill_(MISSING)
        self.budgets.fill_(self.config.prefix_budget)
        self._short.fill_(True)
        for counter in (self._held, self._free, self._seen):
            counter.zero_()
        self._prompt = 0
        self._end_change()

    @property
    def tokens_seen(self) -> int:
        """Tokens received, padding included. Reads the device, since the host does not see replays of a graph."""
        return int(self._seen[0, 0])

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of the prompt, padding included; 0 without one."""
        return self._prompt

    @property
    def occupied(self) -> Tensor:
        """The slots that hold a token, [B, Hkv, S] bool."""
        return self.positions >= 0

    def prefill(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None = None) -> Tensor:
        """Full causal attention of the prompt; then this layer and those before it evict.

        query [B, Hq, T, D]; key, value [B, Hkv, T, D]; occupied [B, T] bool, False for padding, by default all True.
        Returns [B, Hq, T, D], zeros for padding, which takes no slot. RuntimeError if the state holds tokens, or if a
        layer before it has changed since this prompt; ValueError if such a layer has no prompt yet, or another number
        of tokens; TypeError or ValueError for other invalid arguments.
        """
        padded = occupied is not None
        occupied = self._check_prompt(query, key, value, occupied)
        self._check_empty()
        total, config = occupied.shape[1], self.config
        self.cascade.check(self.layer, total)
        self._start_change("prefill")
        output = self._attend_prompt(query, key, value, occupied, padded=padded)
        window = min(total, config.window)
        found = observe(
            query[:, :, total - window:], key, occupied, gamma=config.gamma, kernel_size=config.kernel_size,
            scale=self.scale,
        )
        preference = log_preference(
            found.dispersion, found.shift, tau1=config.tau1, tau2=config.tau2, whole_batch=config.whole_batch
        )
        positions = torch.arange(total, device=self.device).expand(found.score.shape)
        tokens = occupied.sum(1)
        self._short.copy_(tokens <= config.budget + config.window)
        self._longest = int(tokens.where(self._short, 0).amax())
        self._seen.fill_(total)
        self._prompt = total
        self._arrived = key, value, positions.masked_fill(~occupied[:, None], -1), ranks_of(found.score)
        self.cascade.admit(self, self.layer, preference, occupied)
        self._end_change()
        return output

    @torch.inference_mode(False)  # tensors allocated in inference mode could not be updated outside of it
    @torch.no_grad()              # which the line above would enable
    def evict(self, budget: Tensor) -> None:
        """Keep the best `budget` [B] tokens outside of the window, and set `budgets`. For the cascade, during a prompt.
        """
        key, value, positions, rank = self._arrived or (self.key, self.value, self.positions, self._rank)
        self._arrived = None
        self.budgets.copy_(budget)
        # One more than the most tokens of a row now, or after any later step.
        slots = max(self._longest, self.cascade._most[self.layer] + self.config.window) + 1
        place, positions, rank, order, held = keep(rank, positions, self.budgets, self._short, slots)
        batch, heads, _, head_dim = key.shape
        kept_key, kept_value = (x.new_zeros(batch, heads, slots, head_dim) for x in (key, value))
        prompt_selection.copy(key, value, place.view(batch * heads, slots), kept_key, kept_value)
        kept = {"key": kept_key, "value": kept_value, "positions": positions, "_rank": rank, "_order": order}
        same = slots == self.sizes.slots
        for name, tensor in kept.items():
            if same:
                getattr(self, name).copy_(tensor)
            else:
                setattr(self, name, tensor)
        if not same:
            self._allocate_scratch(slots)
        self._held.copy_(held)
        self._free.copy_(held)

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Append a token, attend to it and to the cached tokens, then evict.

        query [B, Hq, D]; key, value [B, Hkv, D]. Returns the attention output [B, Hq, D]. Does not synchronize with the
        host. TypeError or ValueError for invalid arguments.
        """
        self._check_step(query, key, value)
        self._start_change("step")
        output: Tensor = _step(
            query, key, value, self.key, self.value, self.positions, self._order, self._held, self._free, self._seen,
            self.budgets, self._logits, self._rank.view(torch.float32), self._partial, self._row_maxima,
            self._weight_sums, self.scale, self.config.window, self.config.kernel_size, self._splits, self._share,
        )
        self._end_change()
        return output

    #: The most tokens of a row that a short prompt leaves whole.
    _longest = 0
    #: Keys, values, positions and ranks of a prompt, before its first eviction.
    _arrived: tuple[Tensor, Tensor, Tensor, Tensor] | None = None


@operation(
    "kvtwin::cake_step",
    mutates_args=(
        "key", "value", "positions", "order", "held", "free", "seen", "logits", "received", "partial", "row_maxima",
        "weight_sums",
    ),
)
def _step(
    query: Tensor, new_key: Tensor, new_value: Tensor, key: Tensor, value: Tensor, positions: Tensor, order: Tensor,
    held: Tensor, free: Tensor, seen: Tensor, budget: Tensor, logits: Tensor, received: Tensor, partial: Tensor,
    row_maxima: Tensor, weight_sums: Tensor, scale: float, window: int, kernel_size: int, splits: int, share: int,
) -> Tensor:
    """One step: stores the token, attends, and evicts. `share`: the slots of each of the programs of a KV head."""
    (batch, query_heads, head_dim), (_, heads, slots, _) = query.shape, key.shape
    group = query_heads // heads
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    shape = {"GROUP": group, "HEAD_DIM": head_dim, "D_PAD": padded_head_dim(head_dim)}
    block, rows = key_block(head_dim, query.element_size(), slots), next_power_of_2(group)
    width = next_power_of_2(slots)
    chunk = block if SMALL_TILES else min(max(width, 128), WEIGHTS // rows, 1024)
    most = block if SMALL_TILES else min(max(width, 128), CHUNK)
    tiles, merged = cdiv(slots, chunk), next_power_of_2(query_heads) if INTERPRETED else 1
    with on_device_of(query):
        attention_kernel[(batch * heads * splits,)](
            query, new_key, new_value, key, value, positions, order, held, free, seen, logits, partial, row_maxima,
            weight_sums, scale * LOG2_E.value, heads, splits, slots, share, *query.stride(), *new_key.stride(),
            *new_value.stride(), **shape, ROWS=group_rows(group, query.dtype), BLOCK=block, num_warps=4,
        )
        merge_kernel[(batch * heads * tiles + cdiv(batch * query_heads, merged),)](
            order, held, budget, logits, received, partial, row_maxima, weight_sums, output, batch * heads, heads,
            tiles, splits, slots, window, **shape, ROWS=rows, SPLITS=next_power_of_2(splits), CHUNK=chunk,
            MERGED=merged, num_warps=4,
        )
        evict_kernel[(batch * heads,)](
            positions, order, held, free, seen, budget, received, heads, slots, window, kernel_size, CHUNK=most,
            num_warps=4 if most <= 1024 else 8 if most <= 4096 else 16,
        )
    return output


@_step.register_fake
def _(query: Tensor) -> Tensor:
    return query.new_empty(query.shape)
