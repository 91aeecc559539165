"""The base class of every method's state: arguments of the constructor, of a prompt and of a step, and beam search."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from ._rows import Rows
from .contract.arguments import check_dtype, check_no_grad, resolve_device, resolve_scale
from .contract.attention import check_prompt, check_step, state_sizes
from .contract.interruption import Reorderable


class State(Rows, Reorderable):
    """The cache of `batch` sequences in one layer.

    A subclass allocates its tensors in `_allocate` and lists their names, see `Rows`. Its constructor checks the
    config, calls this one, sets what else it needs and ends with `reset()`.

    A state has no backward: `prefill` and `step` refuse inputs that require grad unless gradients are disabled.
    """

    config: Any                                 # subclasses declare the config's class
    _of_all_rows: ClassVar[tuple[str, ...]] = ("_seen",)

    def __init__(
        self, config: Any, *, slots: int, batch: int, query_heads: int, key_value_heads: int, head_dim: int,
        dtype: torch.dtype, device: torch.device | str,
    ) -> None:
        self.config = config
        self.sizes = state_sizes(
            batch=batch, query_heads=query_heads, key_value_heads=key_value_heads, slots=slots, head_dim=head_dim
        )
        self.dtype = check_dtype("dtype", dtype)
        self.device = resolve_device(device)
        self.scale = resolve_scale(config.scale, head_dim)

    @property
    def tokens_seen(self) -> int:
        """The number of tokens since the last reset, padding included."""
        return self._seen

    @torch.inference_mode(False)  # tensors allocated in inference mode could not be updated outside of it
    def reset(self) -> None:
        """Forget every token."""
        self._interrupted = "reset"
        self._seen = 0
        self._allocate()
        self._end_change()

    @property
    def _num_rows(self) -> int:
        return self.sizes.batch

    def _allocate(self) -> None:
        """Allocate an empty cache."""
        raise NotImplementedError

    def _check_prompt(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None) -> Tensor:
        """Check that no change was interrupted, and the arguments of `prefill`. Returns occupied [B, T], by default all
        True."""
        self._check_whole()
        total = check_prompt(query, key, value, occupied, sizes=self.sizes, dtype=self.dtype, device=self.device)
        check_no_grad(query=query, key=key, value=value)
        if occupied is None:
            return torch.ones(self.sizes.batch, total, dtype=torch.bool, device=self.device)
        return occupied

    def _check_empty(self, instead: str = "") -> None:
        """RuntimeError if the state holds tokens."""
        if self._seen:
            raise RuntimeError(f"prefill needs an empty state: call reset() first{instead}")

    def _check_step(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Check that no change was interrupted, and the arguments of `step`."""
        self._check_whole()
        check_step(query, key, value, sizes=self.sizes, dtype=self.dtype, device=self.device)
        check_no_grad(query=query, key=key, value=value)
