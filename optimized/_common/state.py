"""The base class of every state: arguments of the constructor, buffers, and the number of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...reference.contract.arguments import capturing, check_dtype, resolve_device, resolve_scale
from ...reference.contract.attention import check_prompt, check_step, state_sizes
from ...reference.contract.interruption import Interruptible, Reorderable, note_change
from .launch import DTYPES, check_kernel_device, check_kernel_sizes, check_launchable
from .library_attention import attend_prompt


class Buffers:
    """What holds tensors on one device that are updated in place."""

    device: torch.device

    @torch.inference_mode(False)  # buffers allocated in inference mode could not be updated outside of it
    def _buffer(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _tensors(self) -> tuple[Tensor, ...]:
        """All tensors that this holds, alone, in tuples, or in other objects of this class."""
        found: list[Tensor] = []
        for value in vars(self).values():
            for one in value if isinstance(value, tuple) else (value,):
                if isinstance(one, Tensor):
                    found.append(one)
                elif isinstance(one, Buffers):
                    found += one._tensors()
        return tuple(found)


class Rows:
    """What has attributes with a row per sequence, whose names a subclass lists in `_rows`."""

    #: Tensors [B, ...], tuples of them, objects that exchange their own rows, or None.
    _rows: ClassVar[tuple[str, ...]] = ()
    #: What all rows share: tensors, and numbers that the host has.
    _of_all_rows: ClassVar[tuple[str, ...]] = ()

    def _take(self, source: Any, index: Tensor) -> None:
        """See `Reorderable._take_rows`. In place."""
        for name in self._rows:
            take_rows(getattr(self, name), getattr(source, name), index)
        for name in self._of_all_rows if source is not self else ():
            held, other = getattr(self, name), getattr(source, name)
            if isinstance(held, Tensor):
                held.copy_(other)
            else:
                setattr(self, name, other)


def take_rows(held: Any, source: Any, index: Tensor) -> None:
    """Replace row b of what an attribute holds by row index[b] of `source`, in place. held, source: see `Rows`."""
    if isinstance(held, Tensor):
        held.copy_(source.index_select(0, index))
    elif isinstance(held, tuple):
        for part, other in zip(held, source, strict=True):
            take_rows(part, other, index)
    elif isinstance(held, Reorderable):
        held._take_rows(source, index)
    elif held is not None:
        held._take(source, index)


@dataclass
class Seen:
    """What the host has seen. A shallow copy of a state, which has the same buffers, shares it."""

    reset_last: bool = False                    # nothing has changed the state since a reset
    may_replay: bool = False                    # a CUDA graph may change the state, which the host does not see


class Changeable(Interruptible):
    """An `Interruptible` on a device that remembers on the host whether it has changed since a reset."""

    device: torch.device
    _host: Seen                                 # set by the constructor

    def _expect_replays(self) -> None:
        """From here on, a step launches what any step may need, as a step in a CUDA graph does. The results are the
        same."""
        self._host.may_replay = True

    @property
    def _captured(self) -> bool:
        """Whether the host may not know which steps there were."""
        return self._host.may_replay

    def _start_change(self, what: str) -> None:
        super()._start_change(what)
        self._note_change()

    def _start_reset(self) -> None:
        """As `_start_change`, but also after an interrupted change."""
        self._interrupted = "reset"
        self._note_change()

    def _end_change(self) -> None:
        was_reset = self._interrupted == "reset"
        super()._end_change()
        self._note_change()
        self._host.reset_last = was_reset and not self._host.may_replay

    def _note_change(self) -> None:
        """Every method that changes the state calls this or `_start_change`: otherwise a prompt overwrites tokens."""
        self._host.reset_last = False
        compiling = torch.compiler.is_compiling()
        if compiling or capturing(self.device):
            self._host.may_replay = True
        if not compiling:
            note_change()


class State(Rows, Buffers, Changeable, Reorderable):
    """The cache of `batch` sequences in one layer.

    The constructor of a subclass checks the config, calls this one, allocates its buffers and ends with `reset()`.
    TypeError, ValueError for arguments that the kernels cannot take.
    """

    config: Any                                 # subclasses declare the config's class
    _of_all_rows: ClassVar[tuple[str, ...]] = ("_prompt_kernel", "_counted", "_behind")
    _prompt_kernel: str | None = None

    def __init__(
        self, config: Any, *, slots: int, batch: int, query_heads: int, key_value_heads: int, head_dim: int,
        dtype: torch.dtype, device: torch.device | str,
    ) -> None:
        self.config = config
        self.sizes = state_sizes(
            batch=batch, query_heads=query_heads, key_value_heads=key_value_heads, slots=slots, head_dim=head_dim
        )
        check_kernel_sizes(self.sizes)
        self.dtype = check_dtype("dtype", dtype, DTYPES)
        self.device = resolve_device(device)
        self._host = Seen()
        check_kernel_device("device", self.device)
        self.scale = resolve_scale(config.scale, head_dim)

    #: The number of tokens since the last reset, [1] int64, in states whose steps can be compiled.
    _seen: Tensor

    @classmethod
    def _compiles(cls, config: Any) -> bool:
        """Whether a compiler can take the steps of a state with this config: all that differs from step to step is in
        tensors that stay, and the host decides nothing."""
        return False

    #: Tokens that the host has counted, in states with room for config.max_tokens. The others leave it at 0.
    _counted = 0
    #: Whether compiled steps have added tokens that the host has not counted.
    _behind = False

    @property
    def _counted_now(self) -> int:
        """`_counted`, which after compiled steps is read from the device."""
        return self.tokens_seen if self._behind else self._counted

    def _expect(self, count: int) -> None:
        """What the host does before a compiled pass of `count` tokens, if it knows of one."""

    @property
    def _takes_a_step(self) -> bool:
        """Whether a step would raise no error, whatever its arguments: no change was interrupted, and there is room.
        Reads no tensor, except after compiled steps."""
        counted = self._counted_now
        return self._interrupted is None and counted < getattr(self.config, "max_tokens", counted + 1)

    @property
    def _num_rows(self) -> int:
        return self.sizes.batch

    def _take(self, source: Any, index: Tensor) -> None:
        super()._take(source, index)
        self._host.may_replay |= source._host.may_replay

    @property
    def tokens_seen(self) -> int:
        """The number of tokens since the last reset, padding included. Reading it synchronises with the GPU."""
        raise NotImplementedError

    @property
    def prompt_kernel(self) -> str | None:
        """The kernel of the last prompt's attention: "cudnn", "flash" (both of PyTorch) or "kvtwin"; None before the
        first prompt."""
        return self._prompt_kernel

    def _check_prompt(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None) -> Tensor:
        """Check that no change was interrupted, and the arguments of `prefill`. Returns occupied [B, T], by default all
        True."""
        self._check_whole()
        total = check_prompt(query, key, value, occupied, sizes=self.sizes, dtype=self.dtype, device=self.device)
        check_launchable(query=query, key=key, value=value)
        if occupied is None:
            return torch.ones(self.sizes.batch, total, dtype=torch.bool, device=self.device)
        return occupied

    def _attend_prompt(
        self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, *, padded: bool, **changes: Any
    ) -> Tensor:
        """Causal attention of a whole prompt: see `library_attention.attend_prompt`."""
        output, self._prompt_kernel = attend_prompt(query, key, value, occupied, self.scale, padded=padded, **changes)
        return output

    def _check_step(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Check that no change was interrupted, and the arguments of `step`."""
        self._check_whole()
        tokens, (batch, query_heads, heads, _, head_dim) = (query, key, value), self.sizes
        # What a model passes, at little cost. For all else, the checks below find what is wrong, if anything is.
        if all(
            type(one) is Tensor and one.dtype is self.dtype and one.device == self.device
            and one.layout is torch.strided and not one.requires_grad for one in tokens
        ) and query.shape == (batch, query_heads, head_dim) and key.shape == value.shape == (batch, heads, head_dim):
            return
        check_step(query, key, value, sizes=self.sizes, dtype=self.dtype, device=self.device)
        check_launchable(query=query, key=key, value=value)

    def _check_empty(self, instead: str = "") -> None:
        """RuntimeError if the state holds tokens. Does nothing during a capture. Synchronises with the GPU unless
        nothing has changed the state since it was reset or constructed."""
        if not (self._host.reset_last or capturing(self.device)) and self.tokens_seen:
            raise RuntimeError(f"prefill needs an empty state: call reset() first{instead}")
