"""Storage of heads that are not R-heads: all tokens in the host's memory (bank), the needed ones on the GPU (pool).

The pool has places for two sets of selected tokens, the current one and the next one, and two runs of `stride` slots
for the newest tokens. After an anticipation, in parallel with the computation, the newest tokens are copied to the
bank. Tokens that are selected again keep their places; the others are fetched into places that the current set does not
use. The next step waits for this exchange.

The device decides what to transfer, so an exchange can be captured; its launches return at once if none is due.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
from torch import Tensor

from ...reference.contract import Sizes
from ...reference.contract.arguments import capturing
from .._common.launch import INTERPRETED, on_device_of, padded_head_dim
from .._common.state import Rows, take_rows
from ._offload_kernels import append_kernel, assign_kernel, fetch_kernel, store_kernel
from ._transfers import transfers_for

#: Tokens per unit of work, programs that share the units, and their warps. They saturate the link (a unit is 32 KB at a
#: head_dim of 128; some 100 KB must be in flight) but no more, so that the concurrent computation loses few
#: multiprocessors and its requests wait behind few others. If at most SHARE tenths of a list are fetched, FEW programs
#: do it: slower, but hidden behind the computation, which they disturb less.
BLOCK = 64
PROGRAMS, FEW, WARPS = 1 if INTERPRETED else 8, 6, 8
SHARE = 3
#: Entries of a list that are processed at a time.
CHUNK = 2048


class Offload(Rows):
    """Pool and bank of one layer. `places` [B, lists, capacity] int64: the slots in the pool of the selected tokens,
    negative for none. There is a list per cluster, or one for all.

    members [3, Hkv] and counters as in `_attend_kernels`; due: a flag on the device, whether an exchange is due. The
    bank is allocated at the first token (`open`) and freed by `close`.
    """

    #: Attributes with memory that the kernels of a step find by its addresses in `banks`: a graph is right for another.
    by_address = ("bank",)
    _rows = ("key", "value", "tokens", "places", "free_places", "entry_of")

    def __init__(
        self, sizes: Sizes, members: Tensor, counters: Tensor, due: Tensor, representative_heads: int, lists: int,
        capacity: int, stride: int, dtype: torch.dtype, device: torch.device,
    ) -> None:
        self.sizes, self.lists, self.capacity, self.stride = sizes, lists, capacity, stride
        self.dtype, self.device = dtype, device
        self.heads = sizes.key_value_heads - representative_heads
        self.first_new = 2 * capacity                       # the first slot for new tokens
        pool = (sizes.batch, max(self.heads, 1), 2 * (capacity + stride), sizes.head_dim)
        with torch.inference_mode(False):
            self.key, self.value = (torch.zeros(pool, dtype=dtype, device=device) for _ in range(2))
            self.members, self.list_indices = (members[row, representative_heads:].contiguous() for row in (0, 2))
            self.counters, self.due = counters, due
            self.always = torch.ones(1, dtype=torch.int32, device=device)
            # See assign_kernel. The last four are its scratch.
            shape = (sizes.batch, lists, capacity)
            self.tokens, self.places, self.free_places, self.next_places, self.fetch_tokens, self.fetch_places = (
                torch.empty(shape, dtype=torch.int64, device=device) for _ in range(6)
            )
            self.entry_of = torch.empty((*shape[:2], sizes.slots), dtype=torch.int32, device=device)
            self.kept = torch.zeros(shape, dtype=torch.int32, device=device)
            self.fetch_counts = torch.zeros(shape[:2], dtype=torch.int32, device=device)
            self.banks = torch.zeros(2, dtype=torch.int64, device=device)       # addresses, 0 = no bank
        self.empty()
        self.bank: tuple[Tensor, Tensor] | None = None
        self.transfers = transfers_for(device)

    def open(self) -> None:
        """Allocate the bank. MemoryError if there is no memory for it; the state is then unchanged."""
        if self.bank is not None:
            return
        if capturing(self.device):
            raise RuntimeError(
                "offload=True must allocate host memory before a graph is captured: call prefill() or step() first"
            )
        shape = (self.sizes.batch, max(self.heads, 1), self.sizes.slots, self.sizes.head_dim)
        try:
            with torch.inference_mode(False):
                bank = (self.transfers.allocate(shape, self.dtype), self.transfers.allocate(shape, self.dtype))
        except MemoryError as error:
            self.transfers.release()
            size = 2 * self.dtype.itemsize * shape[0] * shape[1] * shape[2] * shape[3]
            raise MemoryError(
                f"offload=True needs {size} bytes of the host's memory per layer, and the allocation failed "
                f"({error}); the state is as it was: lower max_tokens or the batch, or free memory, and try again"
            ) from error
        for place, tensor in enumerate(bank):
            self.banks[place].fill_(tensor.data_ptr())
        self.bank = bank  # last: without its addresses there is no bank

    def close(self) -> None:
        """Forget every token and free the bank."""
        self.transfers.wait()
        self.banks.zero_()
        self.bank = None
        self.transfers.release()
        for tensor in (self.key, self.value):
            tensor.zero_()
        self.empty()

    def empty(self) -> None:
        """Empty the pool: entry i of the set has place i and no token."""
        place = torch.arange(self.capacity, device=self.device)
        self.tokens.fill_(-1)
        self.entry_of.fill_(-1)
        self.places.copy_((-1 - place).expand(self.places.shape))
        self.free_places.copy_((place + self.capacity).expand(self.free_places.shape))

    def store(self, key: Tensor, value: Tensor, first: int, members: Tensor) -> None:
        """Copy key, value [B, H, T, D] of the heads `members` to the bank, from slot `first` on."""
        count = key.shape[2]
        if not count or not self.heads:
            return
        assert self.bank is not None
        units = self.sizes.batch * self.heads * triton.cdiv(count, BLOCK)
        with on_device_of(key):
            store_kernel[(min(PROGRAMS, units),)](
                key, value, *self.bank, members, *key.stride(), *value.stride(), *self.bank[0].stride()[:2], first,
                count, self.heads, units, HEAD_DIM=self.sizes.head_dim, D_PAD=padded_head_dim(self.sizes.head_dim),
                BLOCK=BLOCK, num_warps=WARPS,
            )

    def fill(self, key: Tensor, value: Tensor, chosen: Tensor) -> None:
        """Copy the prompt [B, Hkv, T, D], which must be all tokens seen so far, to the bank, and its selected tokens
        to the pool."""
        self.store(key, value, 0, self.members)
        self.transfers.submit(lambda: self.take(chosen, self.always))

    def exchange(self, chosen: Tensor) -> None:
        """After an anticipation step, copy the newest tokens to the bank and fetch the selected ones; else a no-op."""

        def job() -> None:
            self._append()
            self.take(chosen, self.due)

        self.transfers.submit(job)

    def _append(self) -> None:
        if not self.heads:
            return
        blocks = triton.cdiv(self.stride, BLOCK)
        units = self.sizes.batch * self.heads * blocks
        strides = self._bank_strides()
        with on_device_of(self.key):
            append_kernel[(min(PROGRAMS, units),)](
                self.due, self.counters, self.banks, self.key, self.value, *strides, *self.key.stride()[:2], blocks,
                self.heads, units, HEAD_DIM=self.sizes.head_dim, D_PAD=padded_head_dim(self.sizes.head_dim),
                BLOCK=BLOCK, num_warps=WARPS,
            )

    def take(self, chosen: Tensor, due: Tensor) -> None:
        """If `due`, assign places to all selected tokens and fetch those that are not in the pool yet."""
        batch, lists, head_dim = self.sizes.batch, self.lists, self.sizes.head_dim
        with on_device_of(self.key):
            assign_kernel[(batch * lists,)](
                due, chosen, self.tokens, self.places, self.free_places, self.entry_of, self.kept, self.next_places,
                self.fetch_tokens, self.fetch_places, self.fetch_counts, self.sizes.slots, self.capacity,
                CHUNK=min(CHUNK, 256) if self.capacity <= 256 else CHUNK, num_warps=8,
            )
            if not self.heads:
                return
            units = batch * self.heads * triton.cdiv(self.capacity, BLOCK)
            fetch_kernel[(min(PROGRAMS, units),)](
                due, self.counters, self.banks, self.key, self.value, self.fetch_tokens, self.fetch_places,
                self.fetch_counts, self.list_indices, *self._bank_strides(), *self.key.stride()[:2], self.capacity,
                batch, lists, self.heads, FEW, LISTS=triton.next_power_of_2(batch * lists), HEAD_DIM=head_dim,
                D_PAD=padded_head_dim(head_dim), BLOCK=BLOCK, SHARE=SHARE, num_warps=WARPS,
            )

    def _bank_strides(self) -> tuple[int, int]:
        """Strides of rows and heads. The bank is contiguous, whatever allocated it."""
        head = self.sizes.slots * self.sizes.head_dim
        return max(self.heads, 1) * head, head

    def everything(self) -> tuple[Tensor, Tensor]:
        """All keys and values [B, F, S, D] on the device, with zeros in unoccupied slots. Reads the counters on the
        host."""
        self.transfers.wait()
        seen, _, since, recent, *_ = self.counters.tolist()
        shape = (self.sizes.batch, max(self.heads, 1), self.sizes.slots, self.sizes.head_dim)
        found = [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2)]
        for whole, bank, pool in zip(found, self.bank or (), (self.key, self.value), strict=False):
            whole[:, :, :since] = bank[:, :, :since].to(self.device)
            whole[:, :, since:seen] = pool[:, :, recent:recent + seen - since]
        return found[0], found[1]

    def _take(self, source: Any, index: Tensor) -> None:
        source.transfers.wait()
        if source.bank is not None:
            self.open()
        super()._take(source, index)
        if source.bank is not None:
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
            take_rows(self.bank, source.bank, index.cpu())

    def __deepcopy__(self, memo: object) -> Offload:
        raise NotImplementedError(
            "a state with offload=True cannot be copied: it has pinned memory, and transfers may be pending"
        )

    def tensors(self) -> Iterator[Tensor]:
        """The tensors on the device."""
        yield from (value for value in vars(self).values() if isinstance(value, Tensor))

    @property
    def host_bytes(self) -> int:
        """The size in bytes of the bank."""
        return sum(self.transfers.taken(tensor) for tensor in self.bank or ())
