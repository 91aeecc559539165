"""Where the heads that do not look for themselves keep their tokens: few on the GPU, all in the host's memory.

The pool on the GPU has places for two sets of chosen tokens, the one in use and the next one, and two runs of `stride`
slots for the newest tokens. At an anticipation, behind the computation: the newest tokens join the bank; tokens that
are chosen again keep their places; the others come into places that the set in use has not. The next step waits for it.

What travels the device says: launches of an exchange may be captured, and return at once where none is due.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from ...reference.contract import Sizes, capturing
from .._common.launch import INTERPRETED, on_device_of, padded_head_dim
from ._offload_kernels import append_kernel, assign_kernel, fetch_kernel, store_kernel
from ._transfers import transfers_for

#: Tokens per unit of work, and programs that share the units, with how many warps: enough for the wire (32 KB each at a
#: head_dim of 128, of which some 100 KB must be under way), and no more: few multiprocessors are taken from those that
#: compute meanwhile, and few requests wait in their way. Where no more than SHARE tenths of a list are fetched, FEW
#: programs do it: slower, but behind the computation that does not show, and what they disturb does.
BLOCK = 64
PROGRAMS, FEW, WARPS = 1 if INTERPRETED else 8, 6, 8
SHARE = 3
#: Entries of a list that are looked at at a time.
CHUNK = 2048


class Offload:
    """Pool and bank of one layer. `places` [B, N_r, capacity] int64: the pool's slots of what is chosen, negative for
    none.

    members [3, Hkv] and counters as in `_attend_kernels`; due: the device's flag of an exchange. The bank is made when
    the first token comes (`open`), and goes with the last one (`close`).
    """

    def __init__(
        self, sizes: Sizes, members: Tensor, counters: Tensor, due: Tensor, lookers: int, capacity: int, stride: int,
        dtype: torch.dtype, device: torch.device,
    ) -> None:
        self.sizes, self.lookers, self.capacity, self.stride = sizes, lookers, capacity, stride
        self.dtype, self.device = dtype, device
        self.heads = sizes.key_value_heads - lookers
        self.first_new = 2 * capacity                       # the first of the slots for new tokens
        pool = (sizes.batch, max(self.heads, 1), 2 * (capacity + stride), sizes.head_dim)
        with torch.inference_mode(False):
            self.key, self.value = (torch.zeros(pool, dtype=dtype, device=device) for _ in range(2))
            self.members, self.clusters = (members[row, lookers:].contiguous() for row in (0, 2))
            self.counters, self.due = counters, due
            self.always = torch.ones(1, dtype=torch.int32, device=device)
            # See assign_kernel. The last four are its scratch.
            lists = (sizes.batch, lookers, capacity)
            self.tokens, self.places, self.spare, self.following, self.arriving, self.landing = (
                torch.empty(lists, dtype=torch.int64, device=device) for _ in range(6)
            )
            self.entry_of = torch.empty((*lists[:2], sizes.slots), dtype=torch.int32, device=device)
            self.stays = torch.zeros(lists, dtype=torch.int32, device=device)
            self.arrivals = torch.zeros(lists[:2], dtype=torch.int32, device=device)
            self.banks = torch.zeros(2, dtype=torch.int64, device=device)       # where they lie, 0: nowhere
        self.empty()
        self.bank: tuple[Tensor, Tensor] | None = None
        self.transfers = transfers_for(device)

    def open(self) -> None:
        """The bank. MemoryError if there is no memory for it; then everything is as it was."""
        if self.bank is not None:
            return
        if capturing(self.device):
            raise RuntimeError(
                "offload=True needs its bank before a graph is captured: give the state a prompt or a step first"
            )
        shape = (self.sizes.batch, max(self.heads, 1), self.sizes.slots, self.sizes.head_dim)
        try:
            with torch.inference_mode(False):
                self.bank = (self.transfers.allocate(shape, self.dtype), self.transfers.allocate(shape, self.dtype))
        except MemoryError as error:
            self.transfers.release()
            size = 2 * self.dtype.itemsize * shape[0] * shape[1] * shape[2] * shape[3]
            raise MemoryError(
                f"offload=True needs {size} bytes of the host's memory for the bank of a layer, which cannot be had "
                f"({error}): the state is as it was; lower max_tokens or the batch, or free memory, and try again"
            ) from error
        for place, tensor in enumerate(self.bank):
            self.banks[place].fill_(tensor.data_ptr())

    def close(self) -> None:
        """Forget every token; the bank's memory is free."""
        self.transfers.wait()
        self.banks.zero_()
        self.bank = None
        self.transfers.release()
        for tensor in (self.key, self.value):
            tensor.zero_()
        self.empty()

    def empty(self) -> None:
        """No token is in the pool: entry i of a set has place i, if none."""
        place = torch.arange(self.capacity, device=self.device)
        self.tokens.fill_(-1)
        self.entry_of.fill_(-1)
        self.places.copy_((-1 - place).expand(self.places.shape))
        self.spare.copy_((place + self.capacity).expand(self.spare.shape))

    def store(self, key: Tensor, value: Tensor, first: int, members: Tensor) -> None:
        """key, value [B, H, T, D] of the heads `members` into the bank's slots from `first` on."""
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
        """The prompt [B, Hkv, T, D], which is all that the counters know of, goes to the bank, what was chosen of it
        into the pool."""
        self.store(key, value, 0, self.members)
        self.transfers.submit(lambda: self.take(chosen, self.always))

    def exchange(self, chosen: Tensor) -> None:
        """After a step: if it was an anticipation, the newest tokens join the bank, and what is chosen comes in."""

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
        """If `due`: places for all that is chosen, and the tokens that are not there yet."""
        batch, lookers, head_dim = self.sizes.batch, self.lookers, self.sizes.head_dim
        with on_device_of(self.key):
            assign_kernel[(batch * lookers,)](
                due, chosen, self.tokens, self.places, self.spare, self.entry_of, self.stays, self.following,
                self.arriving, self.landing, self.arrivals, self.sizes.slots, self.capacity,
                CHUNK=256 if self.capacity <= 256 else CHUNK, num_warps=8,
            )
            if not self.heads:
                return
            units = batch * self.heads * triton.cdiv(self.capacity, BLOCK)
            fetch_kernel[(min(PROGRAMS, units),)](
                due, self.counters, self.banks, self.key, self.value, self.arriving, self.landing, self.arrivals,
                self.clusters, *self._bank_strides(), *self.key.stride()[:2], self.capacity, batch, lookers,
                self.heads, FEW, LISTS=triton.next_power_of_2(batch * lookers), HEAD_DIM=head_dim,
                D_PAD=padded_head_dim(head_dim), BLOCK=BLOCK, SHARE=SHARE, num_warps=WARPS,
            )

    def _bank_strides(self) -> tuple[int, int]:
        """Of rows and heads. The bank is contiguous, whoever made it."""
        head = self.sizes.slots * self.sizes.head_dim
        return max(self.heads, 1) * head, head

    def everything(self) -> tuple[Tensor, Tensor]:
        """All keys and values [B, F, S, D], on the device; zeros where no token is. For whoever wants to look: it
        reads the counters."""
        self.transfers.wait()
        seen, _, since, recent, *_ = self.counters.tolist()
        shape = (self.sizes.batch, max(self.heads, 1), self.sizes.slots, self.sizes.head_dim)
        found = [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2)]
        for whole, bank, pool in zip(found, self.bank or (), (self.key, self.value), strict=False):
            whole[:, :, :since] = bank[:, :, :since].to(self.device)
            whole[:, :, since:seen] = pool[:, :, recent:recent + seen - since]
        return found[0], found[1]

    def reorder(self, index: Tensor) -> None:
        """Row b becomes what row index[b] was."""
        self.transfers.wait()
        for tensor in (self.key, self.value, self.tokens, self.places, self.spare, self.entry_of):
            tensor.copy_(tensor.index_select(0, index))
        if self.bank is not None:
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
            rows = index.cpu()
            for tensor in self.bank:
                tensor.copy_(tensor.index_select(0, rows))

    def __deepcopy__(self, memo: object) -> Offload:
        raise NotImplementedError(
            "a state with offload=True cannot be copied: its bank is pinned, and tokens may be on their way to it"
        )

    def tensors(self) -> Iterator[Tensor]:
        """What lies on the GPU."""
        yield from (value for value in vars(self).values() if isinstance(value, Tensor))

    @property
    def host_bytes(self) -> int:
        """What the bank takes of the host's memory."""
        return sum(self.transfers.taken(tensor) for tensor in self.bank or ())
