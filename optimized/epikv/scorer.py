"""EpiKV's decisions on the GPU: one launch per step for all rows, one `EpiKVScorer` for all layers of a model."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...reference.contract.arguments import capturing, check_dtype, check_next_slot, resolve_device
from ...reference.contract.epikv.arguments import check_prompt_fits, check_scorer
from ...reference.contract.epikv.config import EpiKVConfig
from ...reference.contract.epikv.scorer import ScorerInputs
from ...reference.contract.interruption import Reorderable
from .._common.launch import DTYPES, check_kernel_device
from .._common.state import Buffers, Changeable, Rows, Seen, take_rows
from . import _admit_kernel as admit_kernel
from . import _score_kernels as score_kernels
from . import _step_kernels as step_kernels
from ._hybrids import Attention
from ._step_kernels import FIRST, LAST
from .scores import Order, difference, kv_variance, lag_kv, order_of, rolling_of, select


class EpiKVScorer(Rows, Buffers, Changeable, Reorderable):
    """Positions and scores of S = config.slots slots per row, and the slot that the next token takes.

    Preallocated and updated in place, so a step can be captured in a CUDA graph. Attributes and semantics: the
    reference's `EpiKVScorer`. The next slot is the one with the lowest `rank`, an integer per slot that combines score
    and age; a step reads nothing else of size S. attention: the statistics of the hybrids, None for other policies.
    """

    _rows = (
        "occupied", "positions", "score", "_rank", "_next_slot", "_tokens", "_seen", "_recents", "_previous", "_values",
        "attention",
    )

    def __init__(
        self, config: EpiKVConfig, *, batch: int, hidden_size: int, key_value_heads: int, head_dim: int,
        dtype: torch.dtype, device: torch.device | str,
    ) -> None:
        self.config = check_scorer(
            config, batch=batch, hidden_size=hidden_size, key_value_heads=key_value_heads, head_dim=head_dim
        )
        self.batch, self.hidden_size = batch, hidden_size
        self.dtype = check_dtype("dtype", dtype, DTYPES)
        self.device = resolve_device(device)
        self._host = Seen()
        self._inputs = ScorerInputs(
            self.config, batch, hidden_size, key_value_heads, head_dim, self.dtype, self.device
        )
        check_kernel_device("device", self.device)
        layers, slots = sum(config.layers), config.slots
        self.occupied = self._buffer(batch, slots, dtype=torch.bool)
        self.positions = self._buffer(batch, slots, dtype=torch.int64)
        self.score = self._buffer(batch, slots, dtype=torch.float32)
        self._rank = self._buffer(batch, slots, dtype=torch.int64)
        self._next_slot = self._buffer(batch, dtype=torch.int64)
        self._tokens = self._buffer(batch, dtype=torch.int64)
        self._seen = self._buffer(batch, dtype=torch.int64)           # on the device: graphs update it
        self._recents = self._buffer(batch, max(1, config.newest - 1), dtype=torch.int64)
        self._previous = self._buffer(batch, max(1, layers), hidden_size if layers else 1, dtype=dtype)
        self._values = self._buffer(batch, max(1, layers), config.window, dtype=torch.float32)
        lag = config.policy == "lag_kv"
        heads, channels = (key_value_heads, head_dim) if lag else (1, 1)
        self._ranges = self._buffer(4, batch, 2, heads, channels, dtype=torch.float32)
        self.attention: Any = Attention(config, batch, self._buffer) if config.reads_attention else None
        self.reset()

    @property
    def tokens_seen(self) -> int:
        """Tokens received since the last reset, padding included. Reading it synchronizes with the GPU."""
        return int(self._seen[0].item())

    @property
    def next_slot(self) -> Tensor:
        """The slot that the next token is written into. Assigning checks and copies the values; choose another slot
        among those that may be overwritten."""
        return self._next_slot

    @next_slot.setter
    def next_slot(self, value: Tensor) -> None:
        self._next_slot.copy_(check_next_slot(value, self._next_slot, self.config.slots))

    def reset(self) -> None:
        """Forget every token."""
        self._start_reset()
        self.occupied.zero_()
        self.positions.fill_(-1)
        self.score.fill_(-torch.inf)
        self._rank.copy_(self._free_ranks(self._next_slot.new_full((self.batch,), self.config.budget)))
        self._recents.fill_(-1)
        for tensor in (self._next_slot, self._tokens, self._seen, self._previous, self._values, self._ranges):
            tensor.zero_()
        if self.attention is not None:
            self.attention.reset()
        self._end_change()

    @property
    def _num_rows(self) -> int:
        return self.batch

    def _take(self, source: Any, index: Tensor) -> None:
        super()._take(source, index)
        take_rows(self._ranges.movedim(1, 0), source._ranges.movedim(1, 0), index)
        self._host.may_replay |= source._host.may_replay

    # A prompt --------------------------------------------------------------------------------------------------------

    def prefill(
        self, occupied: Tensor, hidden: tuple[Tensor, Tensor] | None, key: Tensor, value: Tensor,
        received: Tensor | None = None,
    ) -> None:
        """Score a prompt and assign its slots: occupied [B, T]; hidden [B, L, T, C] of both bands, or None; key, value
        [B, Hkv, T, D]; received [B, T]: the attention that its tokens received, for policies that add it."""
        self._inputs.check_prefill(occupied, hidden, key, value, received)
        self.check_prompt(occupied)
        self._prefill(occupied, hidden, key, value, received, padded=True)

    def _prefill(
        self, occupied: Tensor, hidden: tuple[Tensor, Tensor] | None, key: Tensor, value: Tensor,
        received: Tensor | None, *, padded: bool,
    ) -> None:
        """`prefill` without checks, which would wait for the attention. padded=False: every token is occupied."""
        self._start_change("prefill")
        config = self.config
        if hidden is not None:
            prompt = _prompt_of(occupied, padded)
            layers = [*hidden[0].unbind(1), *hidden[1].unbind(1)]
            changes = torch.stack([self._observe(n, h, prompt) for n, h in enumerate(layers)], 1)
            self._remember(0, changes, prompt.order)
            rolling = rolling_of(changes, prompt.order, config.window, zscore=config.policy != "hs_variance")
            scores = difference(*rolling.split(config.layers, 1))
        else:
            scores = self._observe_vectors(key, value, occupied, padded)
        self._admit(occupied, None if config.keep_prompt else scores, received, padded=padded)
        self._end_change()

    def check_prompt(self, occupied: Tensor, *, padded: bool = True) -> None:
        """ValueError for a prompt that does not fit; RuntimeError if the scorer holds tokens. padded=False: every token
        is occupied. Synchronizes if something has changed the scorer since it was reset, and for a padded prompt that
        the scorer keeps."""
        self._inputs.check_mask(occupied)
        if capturing(self.device):
            return
        if not self._host.reset_last and self.tokens_seen:
            raise RuntimeError("prefill needs an empty state: call reset() first")
        if self.config.keep_prompt:                                                     # any other prompt fits
            check_prompt_fits(self.config, int(occupied.sum(-1).max()) if padded else occupied.shape[1])

    def observe(self, layer: int, hidden: Tensor, occupied: Tensor) -> Tensor:
        """The changes [B, T] of a layer's outputs for a prompt, [B, T, C]: 0 for a row's first token and for padding.
        layer: its number among the layers of band A, followed by band B. Only the last hidden state is stored."""
        self._inputs.check_observe(layer, hidden, occupied)
        self._start_change("observe")
        prompt = _prompt_of(occupied, padded=True)
        change = self._observe(layer, hidden, prompt)
        self._remember(layer, change[:, None], prompt.order)
        self._end_change()
        return change

    def _observe(self, layer: int, hidden: Tensor, prompt: _Prompt) -> Tensor:
        """The changes [B, T] of a layer's outputs. Stores the last hidden state."""
        change: Tensor = score_kernels.change(hidden, hidden, prompt.before)
        if prompt.last is None:
            self._previous[:, layer] = hidden[:, -1]
        else:
            newest = hidden.take_along_dim(prompt.last.clamp_min(0)[:, None, None], 1)[:, 0]
            self._previous[:, layer] = newest.masked_fill(prompt.last[:, None] < 0, 0)
        return change

    def admit(self, occupied: Tensor, scores: Tensor | None, received: Tensor | None = None) -> None:
        """Assign slots to the prompt tokens that `select` keeps, in their order. scores [B, T], or None to keep the
        whole prompt; received [B, T] is added to them."""
        self._inputs.check_admit(occupied, scores, received)
        self.check_prompt(occupied)
        self._start_change("admit")
        self._admit(occupied, scores, received)
        self._end_change()

    def _admit(
        self, occupied: Tensor, scores: Tensor | None, received: Tensor | None, *, padded: bool = True
    ) -> None:
        config, total = self.config, occupied.shape[1]
        if scores is None:
            kept = torch.arange(total, device=self.device).where(occupied, total).sort(-1).values
            kept = kept.where(kept < total, -1)[:, :config.slots]
        else:
            whole = scores if received is None else received + scores
            mask = occupied if padded else None
            kept = select(whole, config.budget, prompt=0, recent=config.newest, occupied=mask)
        if self.attention is None:
            received = None                                                             # not part of the scores
        scores, received = (None if one is None else one.float() for one in (scores, received))
        if self.attention is not None:
            # Clamped at both ends: kept is arbitrary if kernels are compiled but not launched.
            frozen, given = (
                None if one is None else one.gather(1, kept.clamp(0, total - 1)) for one in (scores, received)
            )
            frozen = torch.full_like(kept, torch.inf, dtype=torch.float32) if frozen is None else frozen
            self.attention.admit(kept, frozen.masked_fill(kept < 0, -torch.inf), given)
        admit_kernel.admit(
            kept, scores, received, occupied.sum(1) if padded else None, self.occupied, self.positions, self.score,
            self._rank, self._next_slot, self._tokens, self._seen, self._recents, total, config.budget, config.newest,
            scores is None and not config.count_prompt,
        )

    def _free_ranks(self, usable_slots: Tensor) -> Tensor:
        """Ranks of free slots, [B, S]: ascending, and LAST from usable_slots [B] on, which a row may not use."""
        index = torch.arange(self.config.slots, device=self.device)
        return (index + FIRST).where(index < usable_slots[:, None], LAST)

    def _remember(self, layer: int, values: Tensor, order: Order) -> None:
        """Store the last `window` of the values [B, L, T] of L layers from `layer` on, in a ring indexed by their
        number."""
        window, (_, layers, total) = self.config.window, values.shape
        ordered = torch.nn.functional.pad(order.apply(values), (window, 0))[:, :, -window:]
        number = (total - window - order.first)[:, None] + torch.arange(window, device=values.device)
        place = (number % window)[:, None].expand(ordered.shape)
        self._values[:, layer:layer + layers].scatter_(2, place, ordered)

    def _observe_vectors(self, key: Tensor, value: Tensor, occupied: Tensor, padded: bool) -> Tensor:
        config = self.config
        if config.policy == "lag_kv":
            self._remember_ranges(key, value, occupied)
            return lag_kv(key, value, chunk=config.chunk, spread=config.spread, occupied=occupied)
        variance = kv_variance(key if config.policy == "kv_key" else value).masked_fill(~occupied, 0)
        order = order_of(occupied) if padded else Order(None, self._tokens.new_zeros(self.batch), occupied)
        self._remember(0, variance[:, None], order)
        return rolling_of(variance[:, None], order, config.window, zscore=False)[:, 0]

    def _remember_ranges(self, key: Tensor, value: Tensor, occupied: Tensor) -> None:
        """Store the ranges of the current chunk and of the one before it."""
        chunk = self.config.chunk
        number = occupied.cumsum(1) - 1                                                 # of each token in its row
        current = (number[:, -1:] // chunk).clamp_min(0)
        for back in (0, 1):
            mask = (occupied & (number // chunk == current - back))[:, None, :, None]
            empty = ~mask.any(2)
            for side, tensor in enumerate((key, value)):
                low = tensor.float().masked_fill(~mask, torch.inf).amin(2).masked_fill(empty, 0)
                high = tensor.float().masked_fill(~mask, -torch.inf).amax(2).masked_fill(empty, 0)
                self._ranges[2 * back, :, side] = low
                self._ranges[2 * back + 1, :, side] = high

    # A step ----------------------------------------------------------------------------------------------------------

    def step(
        self, hidden: tuple[Tensor, Tensor] | None = None, key: Tensor | None = None, value: Tensor | None = None
    ) -> None:
        """Score the token in `next_slot` and choose the next slot: hidden [B, L, C] of both bands, or None; key, value
        [B, Hkv, D] if the policy reads them. One launch, two for a hybrid; does not synchronize with the host."""
        self._inputs.check_step(hidden, key, value)
        self._start_change("step")
        config = self.config
        one, other = (None, None) if hidden is None else hidden
        if hidden is not None:
            key = value = None
        step_kernels.step(
            one, other, key, value, self._previous, self._values, self.occupied, self.positions,
            self.score if self.attention is None or config.edges is not None else self.attention.frozen,
            self._rank, self._next_slot, self._tokens, self._seen, self._recents, self._ranges,
            config.policy, config.window, config.chunk, config.newest, config.spread == "variance",
        )
        if self.attention is not None:
            self.attention.choose(self)
        self._end_change()


class _Prompt(NamedTuple):
    """Where a prompt's tokens are."""

    before: Tensor                                  # [B, T] int64: the token before each, -1 for none and for padding
    last: Tensor | None                             # [B] int64: a row's last token, -1 for none; None: the last one
    order: Order                                    # of the tokens that follow another one


def _prompt_of(occupied: Tensor, padded: bool) -> _Prompt:
    """padded=False: every token is occupied."""
    batch, total = occupied.shape
    index = torch.arange(total, device=occupied.device)
    if not padded:
        before = (index - 1).repeat(batch, 1)
        return _Prompt(before, None, Order(None, index.new_ones(batch), before >= 0))
    last = index.where(occupied, -1).cummax(1).values                                   # itself, or the last before it
    before = torch.cat((torch.full_like(last[:, :1], -1), last[:, :-1]), 1).masked_fill(~occupied, -1)
    return _Prompt(before, last[:, -1], order_of(before >= 0))
