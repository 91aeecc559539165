"""What the layers of a model share while their caches get a prompt, for both sides of CAKE. It has no mathematics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import MethodConfig
from .arguments import check_config, check_integer, resolve_device
from .cake import check_indicator, check_preference
from .interruption import Reorderable


@dataclass(frozen=True, kw_only=True)
class _Options:
    window: int = 32
    kernel_size: int = 5
    gamma: float = 200.0
    tau1: float = 1.0
    tau2: float = 1.0
    whole_batch: bool = False


@dataclass(frozen=True)
class CAKEConfig(_Options, MethodConfig):
    """Configuration of a CAKE cache.

    budget: the tokens that a layer holds on average, more than `window`. window: the number of last tokens that observe
    a prompt, and that every layer keeps. kernel_size: the width of the average pool along the other tokens, odd. gamma:
    the weight of the variance in a token's indicator, finite, at least 0. tau1, tau2: the temperatures of dispersion
    and shift in a layer's preference, finite, at least 1e-6. whole_batch: the rows of a batch share the preferences of
    the layers, as in the authors' code; by default each row has its own. scale: the factor on query . key, by default
    head_dim ** -0.5. Raises TypeError or ValueError for invalid arguments.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if check_integer("window", self.window, minimum=1) >= self.budget:
            raise ValueError(f"budget must be above window = {self.window}, got {self.budget}")
        check_indicator(self.gamma, self.kernel_size)
        check_preference(self.tau1, self.tau2, self.whole_batch)

    @classmethod
    def defaults_for(cls, budget: int, given: Mapping[str, Any]) -> dict[str, Any]:
        """Half of a budget that the authors' window does not fit."""
        return {} if budget > 32 else {"window": max(1, budget // 2)}

    @property
    def prefix_budget(self) -> int:
        """The tokens outside of the window that a layer holds on average."""
        return self.budget - self.window


class Cascade(Reorderable, ABC):
    """The preferences and budgets of `layers` layers, whose caches get a prompt one after the other.

    The prompt of layer l gives it a preference, and new budgets to the layers 0 to l, which evict at once. Layer 0
    begins a new prompt. After the prompt of the last layer the budgets stay. `reorder` leaves the states as they are,
    which have their own.

    config: a CAKEConfig, that of all states. Readable: log_preferences [B, layers] float64, -inf before a layer's
    prompt; budgets [B, layers] int64, the tokens outside of the window that each layer of a row keeps, before its
    prompt config.budget - config.window. TypeError or ValueError for invalid arguments.
    """

    def __init__(self, config: CAKEConfig, *, layers: int, batch: int, device: torch.device | str) -> None:
        self.config = check_config(config, CAKEConfig)
        self.layers = check_integer("layers", layers, minimum=1)
        self.batch = check_integer("batch", batch, minimum=1)
        self.device = resolve_device(device)
        self.reset()

    @torch.inference_mode(False)  # tensors allocated in inference mode could not be updated outside of it
    def reset(self) -> None:
        """Forget the preferences, as before the first prompt. The states keep their tokens."""
        shape = (self.batch, self.layers)
        self.log_preferences = torch.full(shape, -torch.inf, dtype=torch.float64, device=self.device)
        self.budgets = torch.full(shape, self.config.prefix_budget, dtype=torch.int64, device=self.device)
        self._states: list[Any] = []        # of the layers that have their prompt, until the last one has it
        self._end_change()

    @property
    def _num_rows(self) -> int:
        return self.batch

    @torch.inference_mode(False)
    def _take(self, source: Any, index: Tensor) -> None:
        self.log_preferences = source.log_preferences.index_select(0, index)
        self.budgets = source.budgets.index_select(0, index)

    def check(self, layer: int, tokens: int) -> None:
        """Check that `layer` may get a prompt of so many tokens now. ValueError if other layers must come first, or had
        other prompts; RuntimeError if one of them changed since."""
        self._check_whole()
        if layer == 0:
            return
        if layer != len(self._states):
            raise ValueError(f"layer {layer} gets its prompt after layer {layer - 1}, but {len(self._states)} have it")
        for earlier, state in enumerate(self._states):
            if state.tokens_seen != state.prompt_tokens:
                raise RuntimeError(f"layer {earlier} changed before layer {layer} had the prompt: reset() all layers")
            if state.prompt_tokens != tokens:
                raise ValueError(
                    f"layer {layer} must get the {state.prompt_tokens} tokens of layer {earlier}'s prompt, got {tokens}"
                )

    def admit(self, state: Any, layer: int, log_preference: Tensor, occupied: Tensor) -> None:
        """Take a layer's preference [B] after its prompt, occupied [B, T], and let the layers so far evict.

        state: has `evict(budget [B])`, and calls this from its `prefill`. A row with at most budget + window tokens
        keeps them all, and its layers have equal budgets.
        """
        self._start_change("prefill")
        if layer == 0:
            self._states = []
            self.log_preferences.fill_(-torch.inf)
            self.budgets.fill_(self.config.prefix_budget)
        self._states.append(state)
        self.log_preferences[:, layer] = log_preference
        prefix = occupied[:, :max(0, occupied.shape[1] - self.config.window)].sum(1)
        short = occupied.sum(1) <= self.config.budget + self.config.window
        self.budgets[:, :layer + 1] = self._grant(layer + 1, prefix, short)
        for number, each in enumerate(self._states):
            each.evict(self.budgets[:, number])
        if layer == self.layers - 1:
            self._states = []               # without a cycle of cascade and states
        self._end_change()

    def _grant(self, count: int, prefix: Tensor, short: Tensor) -> Tensor:
        """The budgets of the first `count` layers, [B, count]; prefix [B], the tokens before the window; short [B], the
        rows that keep them all."""
        granted = self._share(self.log_preferences[:, :count], prefix, self.layers * self.config.prefix_budget)
        return granted.masked_fill(short[:, None], self.config.prefix_budget)

    @abstractmethod
    def _share(self, log_preferences: Tensor, prefix: Tensor, total: int) -> Tensor:
        """`budgets` of the side."""
