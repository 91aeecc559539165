"""Where the heads that do not look for themselves keep their tokens: few on the GPU, all in the host's memory.

The pool on the GPU has places for two sets of chosen tokens, the one in use and the next one, and two runs of `stride`
slots for the newest tokens. At an anticipation, behind the computation: the newest tokens join the bank; tokens that
are chosen again keep their places; the others come into places that the set in use has not. The next step waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from ...reference.contract import Sizes
from .._launch import INTERPRETED, on_device_of, padded_head_dim
from ._offload_kernels import fetch_kernel, store_kernel
from ._transfers import transfers_for

#: Tokens per unit of work, and programs that share the units: enough for the wire, few enough to leave the GPU free.
BLOCK = 32
PROGRAMS = 1 if INTERPRETED else 64


class Offload:
    """Pool and bank of one layer. `places` [B, N_r, capacity] int64: the pool's slots of what is chosen, -1 for none.

    members [3, Hkv] as in `_attend_kernels`. The bank is made when the first token comes (`open`), and goes with the
    last one (`close`).
    """

    def __init__(
        self, sizes: Sizes, members: Tensor, lookers: int, capacity: int, stride: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.sizes, self.lookers, self.capacity, self.stride = sizes, lookers, capacity, stride
        self.dtype, self.device = dtype, device
        self.heads = sizes.key_value_heads - lookers
        self.first_new = 2 * capacity                       # the first of the slots for new tokens
        pool = (sizes.batch, max(self.heads, 1), 2 * (capacity + stride), sizes.head_dim)
        with torch.inference_mode(False):
            self.key, self.value = (torch.zeros(pool, dtype=dtype, device=device) for _ in range(2))
            self.members, self.clusters = (members[row, lookers:].contiguous() for row in (0, 2))
            self.all_members = torch.arange(max(self.heads, 1), dtype=torch.int32, device=device)
            self.places, self.tokens = (
                torch.full((sizes.batch, lookers, capacity), -1, dtype=torch.int64, device=device) for _ in range(2)
            )
            self.slot_of = torch.full(
                (sizes.batch, lookers, sizes.slots + 1), -1, dtype=torch.int32, device=device
            )                                               # where a chosen token lies; one entry more, for none
        self.bank: tuple[Tensor, Tensor] | None = None
        self.transfers = transfers_for(device)

    def open(self) -> None:
        """The bank. MemoryError if there is no memory for it; then everything is as it was."""
        if self.bank is not None:
            return
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

    def close(self) -> None:
        """Forget every token; the bank's memory is free."""
        self.transfers.wait()
        self.bank = None
        self.transfers.release()
        for tensor in (self.key, self.value):
            tensor.zero_()
        for tensor in (self.places, self.tokens, self.slot_of):
            tensor.fill_(-1)

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
                BLOCK=BLOCK, num_warps=4,
            )

    def fill(self, key: Tensor, value: Tensor, chosen: Tensor) -> None:
        """The prompt [B, Hkv, T, D] goes to the bank, what was chosen of it into the pool."""
        self.store(key, value, 0, self.members)
        self.transfers.submit(lambda: self._take(chosen, key.shape[2], 0))

    def exchange(self, chosen: Tensor, since: int, seen: int, run: int) -> None:
        """After an anticipation: the newest tokens, `since` to `seen`, which lie in a run of slots (0 or 1), join the
        bank; what is chosen comes in."""
        recent = self.first_new + run * self.stride

        def job() -> None:
            new = slice(recent, recent + seen - since)
            self.store(self.key[:, :, new], self.value[:, :, new], since, self.all_members)
            self._take(chosen, since, recent)

        self.transfers.submit(job)

    def _take(self, chosen: Tensor, since: int, recent: int) -> None:
        """Places for all that is chosen, and the tokens that are not there yet, from `since` on out of the pool."""
        slots, capacity = self.sizes.slots, self.capacity
        index, old = (tokens.where(tokens >= 0, slots).clamp_max(slots) for tokens in (chosen, self.tokens))
        there = self.slot_of.gather(-1, index).long()
        wanted = (chosen >= 0) & (there < 0)
        used = torch.zeros(*chosen.shape[:2], 2 * capacity + 1, dtype=torch.uint8, device=self.device)
        used.scatter_(-1, self.places.where(self.places >= 0, 2 * capacity), 1)
        free = used[..., :-1].sort(dim=-1, stable=True).indices                         # places not in use come first
        number = (wanted.long().cumsum(-1) - 1).clamp_min(0)
        places = torch.where(wanted, free.gather(-1, number), there)
        self.slot_of.scatter_(-1, old, -1)
        self.slot_of.scatter_(-1, index, places.int())
        self.slot_of[..., slots] = -1
        self.places.copy_(places)
        self.tokens.copy_(chosen)
        if not self.heads:
            return
        assert self.bank is not None
        units = self.sizes.batch * self.heads * triton.cdiv(capacity, BLOCK)
        with on_device_of(self.key):
            fetch_kernel[(min(PROGRAMS, units),)](
                *self.bank, self.key, self.value, chosen, places, wanted, self.clusters, *self.bank[0].stride()[:2],
                *self.key.stride()[:2], since, recent, capacity, self.lookers, self.heads, units,
                HEAD_DIM=self.sizes.head_dim, D_PAD=padded_head_dim(self.sizes.head_dim), BLOCK=BLOCK, num_warps=4,
            )

    def everything(self, since: int, seen: int, run: int) -> tuple[Tensor, Tensor]:
        """All keys and values [B, F, S, D], on the device; zeros where no token is. For whoever wants to look."""
        self.transfers.wait()
        shape = (self.sizes.batch, max(self.heads, 1), self.sizes.slots, self.sizes.head_dim)
        found = [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2)]
        recent = self.first_new + run * self.stride
        for whole, bank, pool in zip(found, self.bank or (), (self.key, self.value), strict=False):
            whole[:, :, :since] = bank[:, :, :since].to(self.device)
            whole[:, :, since:seen] = pool[:, :, recent:recent + seen - since]
        return found[0], found[1]

    def reorder(self, index: Tensor) -> None:
        """Row b becomes what row index[b] was."""
        self.transfers.wait()
        for tensor in (self.key, self.value, self.places, self.tokens, self.slot_of):
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
        return sum(tensor.untyped_storage().nbytes() for tensor in self.bank or ())
