"""EpiKV on the GPU: the keys and values of one layer. A step has two launches: attention, which writes the token, and
scores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...reference.contract.arguments import check_config
from ...reference.contract.epikv.arguments import HiddenInputs, check_ranks, check_scores
from ...reference.contract.epikv.config import EpiKVConfig
from ...reference.contract.ranks import ProcessGroup, Shared, check_process_group, digest
from .._common.block_cache import kernels
from .._common.launch import check_launchable
from .._common.prompts import prompt_selection
from .._common.state import State
from . import _attend_kernels
from .scorer import EpiKVScorer


class EpiKVState(State):
    """An EpiKV cache: preallocated buffers of S slots, updated in place. Steps can be captured in CUDA graphs.

    key, value [B, Hkv, S, D] with S = config.slots. occupied [B, S] bool, positions [B, S] int64, score [B, S],
    next_slot [B] int64 (writable) and tokens_seen belong to the `EpiKVScorer`. scorer: a scorer that several layers
    share; its owner calls its `admit` before the prompt, its `step` after all layers attended, and its `reorder`. By
    default the state has a scorer of its own and calls these. With a hybrid policy, the attention of all layers that
    share a scorer is averaged, a step has two more launches, and each layer stores a step's logits: 4 bytes per query
    head and slot.
    process_group: see `kvtwin.reference.epikv.EpiKVState`.
    """

    config: EpiKVConfig
    _rows = ("key", "value")

    def __init__(
        self, config: EpiKVConfig, *, batch: int, query_heads: int, key_value_heads: int, head_dim: int,
        dtype: torch.dtype, device: torch.device | str, scorer: Any = None, process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            check_config(config, EpiKVConfig), slots=config.slots, batch=batch, query_heads=query_heads,
            key_value_heads=key_value_heads, head_dim=head_dim, dtype=dtype, device=device,
        )
        hidden_size = check_ranks(process_group, config, self.sizes, dtype)
        self._ranks = Shared(process_group)
        self._shared = scorer is not None
        self._inputs = HiddenInputs(config, batch, hidden_size, self.dtype, self.device, shared=self._shared)
        self.scorer = scorer if scorer is not None else EpiKVScorer(
            config, batch=batch, hidden_size=hidden_size, key_value_heads=key_value_heads, head_dim=head_dim,
            dtype=dtype, device=device,
        )
        self.key, self.value = (
            self._buffer(batch, key_value_heads, config.slots, head_dim, dtype=dtype) for _ in range(2)
        )
        shape = (batch, query_heads, config.slots if config.reads_attention else 0)
        self._weights = tuple(self._buffer(*size, dtype=torch.float32) for size in (shape, (*shape[:2], 2)))
        with torch.inference_mode(False):
            self._scratch = _attend_kernels.scratch(self.sizes, self.key)

    @property
    def occupied(self) -> Tensor:
        """The slots that hold a token, [B, S] bool."""
        return self.scorer.occupied

    @property
    def positions(self) -> Tensor:
        """The position of the token in each slot, [B, S] int64, -1 = free."""
        return self.scorer.positions

    @property
    def score(self) -> Tensor:
        """The score of the token in each slot, [B, S]: +inf for a kept prompt, -inf where unoccupied."""
        return self.scorer.score

    @property
    def thoughts(self) -> Tensor | None:
        """The thought type of the token in each slot, [B, S] int64, -1 = free. None unless policy is "segment_hs"."""
        return None if self.config.edges is None else self.scorer.attention.thoughts

    @property
    def tokens_seen(self) -> int:
        """Tokens received since the last reset, padding included. Reading it synchronizes with the GPU."""
        return self.scorer.tokens_seen

    @property
    def next_slot(self) -> Tensor:
        """The slot that the next token is written into. Assigning checks and copies the values."""
        return self.scorer.next_slot

    @next_slot.setter
    def next_slot(self, value: Tensor) -> None:
        self.scorer.next_slot = value

    def reset(self) -> None:
        """Forget every token. A shared scorer is left as it is."""
        self._start_reset()
        self._scratch[1].zero_()                                # in case a launch was interrupted
        if not self._shared:
            self.scorer.reset()
        self._end_change()

    def _check_whole(self) -> None:
        super()._check_whole()
        self.scorer._check_whole()

    @property
    def _takes_a_step(self) -> bool:
        return super()._takes_a_step and self.scorer._interrupted is None

    def prefill(
        self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None = None,
        hidden_a: Tensor | None = None, hidden_b: Tensor | None = None,
    ) -> Tensor:
        """Full causal attention of the prompt; then the tokens that `select` keeps, or all (keep_prompt), take slots.

        query [B, Hq, T, D]; key, value [B, Hkv, T, D]; occupied [B, T] bool, False for padding, by default all True;
        hidden_a, hidden_b [B, L, T, C], or [B, T, C] for one layer: the outputs of the layers of both bands, for
        policies that read them. Returns [B, Hq, T, D], zeros for padding. RuntimeError if the state holds tokens;
        ValueError for a prompt that does not fit.
        """
        padded = occupied is not None
        occupied = self._check_prompt(query, key, value, occupied)
        total = occupied.shape[1]
        hidden = self._inputs.check(hidden_a, hidden_b, total)
        check_launchable(hidden_a=hidden_a, hidden_b=hidden_b)
        if not self._shared:
            self.scorer.check_prompt(occupied, padded=padded)
        if self._ranks.process_group is not None:
            check_process_group(self._ranks.process_group, tokens=total, occupied=digest(occupied))
        self._start_change("prefill")
        received = None
        if self.config.policy == "attn_x_hs" and not self.config.keep_prompt:
            found, softmax_parts = kernels.attend(query, key, value, occupied, self.scale)
            output: Tensor = found
            received = kernels.received(query, key, occupied, softmax_parts, self.scale, mean=False).mean(1)
        else:
            output = self._attend_prompt(query, key, value, occupied, padded=padded)
        if not self._shared:
            self.scorer._prefill(occupied, hidden, key, value, received, padded=padded)
        check_scores(self._ranks.process_group, self.positions, self.score)
        prompt_selection.copy(key, value, self.positions[:, :total], self.key, self.value)
        self._end_change()
        return output

    def step(
        self, query: Tensor, key: Tensor, value: Tensor, hidden_a: Tensor | None = None, hidden_b: Tensor | None = None
    ) -> Tensor:
        """Write a token into `next_slot`, attend to it and to the cached tokens, score it and select the next slot.

        query [B, Hq, D]; key, value [B, Hkv, D]; hidden_a, hidden_b [B, L, C], or [B, C] for one layer, for policies
        that read them. Returns the attention output [B, Hq, D]. Does not synchronize with the host.
        """
        self._check_step(query, key, value)
        hidden = self._inputs.check(hidden_a, hidden_b, None)
        check_launchable(hidden_a=hidden_a, hidden_b=hidden_b)
        self._start_change("step")
        output: Tensor = _attend_kernels.attend(
            query, key, value, self.key, self.value, self.occupied, self.next_slot, *self._scratch, self.scale,
            *self._weights,
        )
        if self.config.reads_attention:
            self.scorer.attention.record(
                *self._weights, self.occupied, self.next_slot, self.sizes.key_value_heads
            )
        if not self._shared:
            self.scorer.step(hidden, key, value)
        self._end_change()
        return output

    def _take(self, source: Any, index: Tensor) -> None:
        """A shared scorer is left as it is."""
        super()._take(source, index)
        if not self._shared:
            self.scorer._take_rows(source.scorer, index)
