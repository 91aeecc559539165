"""SyncKV's state on the GPU: two launches per step for all heads, and an anticipation when one is due.

The reference's state describes the order of events. Everything is preallocated and updated in place. Counters are on
the device, so a captured step can be replayed as any step: it contains the launches of an anticipation, which return at
once if none is due. A state that was never captured omits launches that would be idle, since it also counts its steps
on the host. With config.offload, a captured exchange is a branch of the graph: see `join`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...reference.contract.arguments import capturing, check_config, check_room
from ...reference.contract.ranks import (
    ProcessGroup,
    Shared,
    check_heads,
    check_process_group,
    digest,
    heads_of_ranks,
)
from ...reference.contract.synckv.arguments import resolve_clusters
from ...reference.contract.synckv.types import HeadClusters, SyncKVConfig
from .._common.prompts import prompt_selection
from .._common.state import State, take_rows
from . import _step
from ._attend_kernels import SEEN
from ._offload import Offload
from ._ranks import Representatives
from ._select import select
from .sets import log_weights, split_budget

__all__ = ["SyncKVConfig", "SyncKVState"]


class SyncKVState(State):
    """The SyncKV cache of `batch` sequences in one layer (SyncKV section 4). Attributes as in the reference.

    float32, float16 or bfloat16; D from 16 to 256; up to 16 query heads per KV head. TypeError or ValueError for other
    arguments, and for CPU tensors outside Triton's interpreter. process_group, replicas: see
    `kvtwin.reference.synckv.SyncKVState`.
    """

    config: SyncKVConfig
    _rows = ("_offload", "_key", "_value", "occupied", "_static", "_fixed", "_chosen")
    _of_all_rows = (*State._of_all_rows, "_counters", "_due", "_steps")

    def __init__(
        self, config: SyncKVConfig, head_clusters: HeadClusters | None = None, *, batch: int, query_heads: int,
        key_value_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str,
        process_group: ProcessGroup | None = None, replicas: int = 1,
    ) -> None:
        super().__init__(
            check_config(config, SyncKVConfig), slots=config.max_tokens, batch=batch, query_heads=query_heads,
            key_value_heads=key_value_heads, head_dim=head_dim, dtype=dtype, device=device,
        )
        # Before a list of as many heads, which would take forever if their keys do not fit into memory.
        torch.empty(batch, key_value_heads, config.max_tokens, head_dim, dtype=dtype, device=self.device)
        check_heads(
            process_group, replicas, key_value_heads, config=config, head_clusters=head_clusters, batch=batch,
            query_heads_per_key_value_head=self.sizes.group, head_dim=head_dim, dtype=dtype,
        )
        first, total = heads_of_ranks(process_group, replicas, key_value_heads)
        self.head_clusters = resolve_clusters(head_clusters, config.clusters, total)
        own = range(first, first + key_value_heads)
        # Each R-head's list is needed on all ranks; its logits are where its keys are.
        representative_heads = sum(head in own for head in self.head_clusters.representatives)
        self._representative_heads, clusters, slots = representative_heads, config.clusters, config.max_tokens
        self._shared = Shared(process_group)
        self._representatives: Representatives | None = None
        if process_group is not None:
            self._representatives = Representatives(
                process_group, self.head_clusters, first, key_value_heads, replicas, self.device
            )
        fixed, free = split_budget(config.k, config.rho)
        self._fixed_count, self._count = min(fixed, slots), min(config.k if config.exclude_static else free, slots)
        # Includes the static set, or comes after it.
        capacity = self._count if config.exclude_static else self._fixed_count + self._count
        stored = representative_heads if config.offload else key_value_heads
        self._key, self._value = (self._buffer(batch, stored, slots, head_dim, dtype=dtype) for _ in range(2))
        self.occupied = self._buffer(batch, slots, dtype=torch.bool)
        self._static = self._buffer(batch, clusters, self._fixed_count, dtype=torch.int64)
        self._fixed = self._buffer(batch, clusters, slots, dtype=torch.bool)
        self._chosen = self._buffer(batch, clusters, max(capacity, 1), dtype=torch.int64)
        self._counters = self._buffer(6, dtype=torch.int64)
        self._due = self._buffer(1, dtype=torch.int32)
        # With union_clusters, one list for all heads: what follows `_chosen` in this class uses `_listed`.
        self._unites = config.union_clusters and clusters > 1
        self._listed = self._chosen
        if self._unites:
            width = min(clusters * self._chosen.shape[2], slots)
            self._listed = self._buffer(batch, 1, width, dtype=torch.int64)
            self._marks = self._buffer(batch, slots, dtype=torch.int32)
            self._always = self._buffer(1, dtype=torch.int32)
        self._members, self._entries = self._table(first)
        self._splits = _step.splits_of(
            self.sizes, representative_heads, self._listed.shape[2] + min(config.stride, slots), dtype.itemsize,
            self.device
        )
        num_partials = batch * self.sizes.group * (
            representative_heads * self._splits[0] + (key_value_heads - representative_heads) * self._splits[1]
        )
        self._logits = self._buffer(batch * representative_heads, self.sizes.group, slots, dtype=torch.float32)
        counted = representative_heads if self._representatives is None else 0
        self._histograms = self._buffer(batch, counted, 4, 256, dtype=torch.int32)
        self._partial = self._buffer(num_partials, head_dim, dtype=torch.float32)
        self._row_maxima, self._sums = (self._buffer(num_partials, dtype=torch.float32) for _ in range(2))
        self._offload: Offload | None = None
        if config.offload:
            self._offload = Offload(
                self.sizes, self._members, self._counters, self._due, representative_heads, self._listed.shape[1],
                self._listed.shape[2], min(config.stride, slots), dtype, self.device,
            )
        self.reset()

    @torch.inference_mode(False)
    def _table(self, first: int) -> tuple[Tensor, Tensor]:
        """`members`, and its inverse: the entry of each head. first: the number of the first head of this rank."""
        labels = self.head_clusters.labels[first:first + self.sizes.key_value_heads]
        representatives = [
            head - first for head in self.head_clusters.representatives if 0 <= head - first < len(labels)
        ]
        heads = [*representatives, *(head for head in range(len(labels)) if head not in representatives)]
        stored_at = heads
        if self.config.offload:
            stored_at = [*range(len(representatives)), *range(len(heads) - len(representatives))]
        rows = [heads, stored_at, [0 if self._unites else labels[head] for head in heads]]
        entries = [heads.index(head) for head in range(len(labels))]
        members, inverse = (torch.tensor(table, dtype=torch.int32, device=self.device) for table in (rows, entries))
        return members, inverse

    def reset(self) -> None:
        """Forget every token."""
        self._start_reset()
        for tensor in (
            self._key, self._value, self.occupied, self._fixed, self._counters, self._due, self._histograms,
        ):
            tensor.zero_()
        self._static.fill_(-1)
        self._chosen.fill_(-1)
        if self._unites:
            self._listed.fill_(-1)
            self._marks.zero_()
            self._always.fill_(1)
        if self._offload is not None:
            self._offload.close()
        self._begin(0)
        self._end_change()

    def _begin(self, tokens: int) -> None:
        """Set the counters after a prompt."""
        first_new = tokens if self._offload is None else self._offload.first_new
        self._counted, self._steps = tokens, self.config.phase
        # tokens, steps, tokens, first_new, tokens, first_new
        self._counters.fill_(tokens)
        self._counters[1].fill_(self._steps)
        if first_new != tokens:
            self._counters[3::2].fill_(first_new)

    @property
    def tokens_seen(self) -> int:
        """Tokens received, padding included. Reads the device, since the host does not see replays of a graph."""
        return int(self._counters[SEEN.value])

    @property
    def key(self) -> Tensor:
        """[B, Hkv, S, D]. With offload, a copy gathered from the host, for inspection."""
        return self._key if self._offload is None else self._gathered(0)

    @property
    def value(self) -> Tensor:
        return self._value if self._offload is None else self._gathered(1)

    def _gathered(self, which: int) -> Tensor:
        assert self._offload is not None
        found = self._offload.everything()[which]
        other_heads = self.sizes.key_value_heads - self._representative_heads
        both = torch.cat(((self._key, self._value)[which], found[:, :other_heads]), 1)
        return both.index_select(1, self._entries)

    @property
    def positions(self) -> Tensor:
        slot = torch.arange(self.sizes.slots, device=self.device)
        return torch.where(self.occupied, slot, -1)

    @property
    def static(self) -> Tensor:
        return self._static

    @property
    def chosen(self) -> Tensor:
        last = torch.iinfo(torch.int64).max
        ordered = self._chosen.masked_fill(self._chosen < 0, last).sort(-1).values
        return ordered.masked_fill(ordered == last, -1)[..., :min(self.config.k, self.sizes.slots)]

    def prefill(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None = None) -> Tensor:
        """Full causal attention of the prompt; then each R-head selects its sets by the weights of the row's last
        token.

        query [B, Hq, T, D]; key, value [B, Hkv, T, D]; occupied [B, T] bool, False for padding, by default all True.
        Returns [B, Hq, T, D], zeros for padding. RuntimeError if the state holds tokens; ValueError for more than
        config.max_tokens tokens.
        """
        padded = occupied is not None
        occupied = self._check_prompt(query, key, value, occupied)
        total = occupied.shape[1]
        self._check_empty()
        check_room(0, total, self.config.max_tokens)
        if self._representatives is not None:
            check_process_group(self._shared.process_group, tokens=total, occupied=digest(occupied))
        if self._offload is not None and capturing(self.device):
            raise RuntimeError("prefill with offload=True cannot be captured: it allocates host memory")
        self._open()
        self._start_change("prefill")
        output = self._attend_prompt(query, key, value, occupied, padded=padded)
        if self._offload is None:
            prompt_selection.copy(key, value, None, self._key, self._value)
        else:
            stored_heads = self._members[0, :self._representative_heads]
            self._key[:, :, :total].copy_(key[:, stored_heads])
            self._value[:, :, :total].copy_(value[:, stored_heads])
        self.occupied[:, :total].copy_(occupied)
        self._choose_first(query, key, occupied, padded)
        if self._unites:
            _step.unite(self._always, self._chosen, self._listed, self._marks)
        self._begin(total)
        if self._offload is not None:
            self._offload.fill(key, value, self._listed)
            self._settle()
        self._end_change()
        return output

    def _open(self) -> None:
        """Before any change: allocate the bank if there is none, and wait for pending transfers."""
        if self._offload is None:
            return
        if torch.compiler.is_compiling():
            raise RuntimeError("offload=True cannot be compiled: its transfers run on a separate stream")
        self._offload.open()
        self._offload.transfers.wait()

    def _settle(self) -> None:
        """Wait for transfers, since replays of a graph do not wait for earlier launches on another stream."""
        if self._captured and not capturing(self.device):
            self.join()

    def join(self) -> None:
        """Order everything that is launched after this call behind the transfers. Steps do this themselves. A capture
        of steps with offload must end with it; otherwise CUDA refuses the capture."""
        if self._offload is not None:
            self._offload.transfers.wait()

    def _choose_first(self, query: Tensor, key: Tensor, occupied: Tensor, padded: bool) -> None:
        """Select the sets after a prompt (eq. 3 and 4)."""
        batch, _, total, _ = key.shape
        newest = query[:, :, -1]
        if padded:
            last = torch.where(occupied, torch.arange(total, device=self.device), 0).amax(1)
            newest = query.take_along_dim(last[:, None, None, None], 2)[:, :, 0]
        weight = key.new_empty(batch, 0, total, dtype=torch.float32)
        if self._representative_heads:
            heads = self._members[0, :self._representative_heads]
            weight = log_weights(newest, key, occupied, self.scale, heads)
        if self._representatives is not None:
            weight = self._representatives.largest(weight)
        nothing = self._static[..., :0]
        static = select(weight, occupied, nothing, self._fixed_count)
        self._static.copy_(static)
        # `static` is arbitrary if kernels are compiled but not launched.
        slots = self.sizes.slots
        if padded:
            mask = torch.zeros(*self._fixed.shape[:2], slots + 1, dtype=torch.bool, device=self.device)
            mask.scatter_(-1, static.where(static >= 0, slots).clamp_max(slots), True)
            self._fixed.copy_(mask[..., :-1])
        else:
            # A prompt with fewer tokens than the static set leaves -1 in it; all its tokens are static, also the first.
            self._fixed.zero_().scatter_(-1, static.clamp(0, slots - 1), True)
        if self._count:
            taken = nothing if self.config.exclude_static else static
            self._chosen[..., self._chosen.shape[-1] - self._count:].copy_(select(weight, occupied, taken, self._count))
        if not self.config.exclude_static and self._fixed_count:
            self._chosen[..., :self._fixed_count].copy_(static)

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Append a token. R-heads attend to all tokens, the other heads to the selected and the newest ones.

        query [B, Hq, D]; key, value [B, Hkv, D]. Returns the attention output [B, Hq, D]. Does not synchronize with the
        host. ValueError beyond config.max_tokens tokens, counted by the host; in replays of a graph, further tokens are
        dropped. With offload: MemoryError if there is no host memory at the first token; RuntimeError for a first token
        during the capture of a graph (see also `join`), and under torch.compile.
        """
        self._check_step(query, key, value)
        check_room(self._counted, 1, self.config.max_tokens)
        self._open()
        self._start_change("step")
        config, (dense_splits, list_splits, size), away = self.config, self._splits, self._offload
        pool_key, pool_value, listed, pool = None, None, self._listed, 0
        if away is not None:
            pool_key, pool_value, listed, pool = away.key, away.value, away.places, away.first_new
        if not self._representative_heads:                      # only R-heads mark the token's slot
            last = self._counters[:1].clamp_max(self.sizes.slots - 1)
            self.occupied.scatter_(1, last.expand(self.sizes.batch, 1), True)
        output: Tensor = _step.attend(
            query, key, value, self._key, self._value, pool_key, pool_value, self.occupied, listed, self._members,
            self._entries, self._counters, self._due, self._logits, self._partial, self._row_maxima, self._sums,
            self.scale, config.stride, dense_splits, list_splits, size, pool,
        )
        self._counted, self._steps = self._counted + 1, self._steps + 1
        if self._count and (self._captured or self._steps % config.stride == 0):
            if self._representatives is None:
                _step.anticipate(
                    self._due, self._logits, self._row_maxima, self._sums, self.occupied, self._fixed,
                    self._histograms, self._chosen, dense_splits, self._count, config.exclude_static,
                )
            else:
                codes = _step.codes(
                    self._due, self._logits, self._row_maxima, self._sums, self.occupied, dense_splits
                )
                _step.choose(
                    self._due, self._representatives.largest(codes), self._fixed, self._chosen, self._count,
                    config.exclude_static,
                )
            if self._unites:
                _step.unite(self._due, self._chosen, self._listed, self._marks)
        if away is not None and (self._captured or self._steps % config.stride == 0):
            away.exchange(self._listed)
            self._settle()
        self._end_change()
        return output

    def gpu_bytes(self) -> int:
        """The size in bytes of the tensors on the state's device: keys and values, tables, and scratch."""
        attributes = [*vars(self).values(), *(() if self._offload is None else self._offload.tensors())]
        storages = [tensor.untyped_storage() for tensor in attributes if isinstance(tensor, Tensor)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def host_bytes(self) -> int:
        """The size in bytes of the bank in the host's memory: 0 without offload, and before the first token."""
        return 0 if self._offload is None else self._offload.host_bytes

    def _take(self, source: Any, index: Tensor) -> None:
        super()._take(source, index)
        if self._unites:                                        # otherwise, `_listed` is `_chosen`
            take_rows(self._listed, source._listed, index)
