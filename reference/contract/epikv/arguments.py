"""Checks of the arguments of EpiKV's scores and state, for both sides. See `contract.arguments`."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import Sizes
from ..arguments import (
    check_choice,
    check_config,
    check_dtype,
    check_integer,
    check_like,
    check_mask,
    check_no_grad,
    check_product,
    check_shape,
    check_state_tensor,
    check_tensor,
)
from ..ranks import ProcessGroup, check_process_group, digest, gathered
from .config import SPREADS, EpiKVConfig


def check_scorer(
    config: object, *, batch: object, hidden_size: object, key_value_heads: object, head_dim: object
) -> EpiKVConfig:
    """The config and the sizes of an `EpiKVScorer`. Returns the config."""
    checked = check_config(config, EpiKVConfig)
    sizes = {"batch": batch, "hidden_size": hidden_size, "key_value_heads": key_value_heads, "head_dim": head_dim}
    rows, hidden, heads, channels = (check_integer(name, value, minimum=1) for name, value in sizes.items())
    check_product(batch=rows, slots=checked.slots)
    check_product(batch=rows, layers=max(1, sum(checked.layers)), window=checked.window)
    check_product(batch=rows, layers=max(1, sum(checked.layers)), hidden_size=hidden)
    check_product(batch=rows, key_value_heads=heads, head_dim=channels)
    return checked


def check_hidden_pair(hidden: object, previous: object) -> None:
    """hidden and previous [..., C]: floating, with the same shape, dtype and device."""
    for name, tensor in (("hidden", hidden), ("previous", previous)):
        dims = max(tensor.dim(), 1) if isinstance(tensor, Tensor) else 1
        check_dtype(f"{name}.dtype", check_tensor(name, tensor, dims=dims, layout="[..., C]").dtype)
    assert isinstance(hidden, Tensor)
    assert isinstance(previous, Tensor)
    check_shape("previous", previous, tuple(hidden.shape), "hidden's [..., C]")
    check_like("previous", previous, hidden, "hidden")


def check_series(name: str, series: object, occupied: object, *, layers: bool = True) -> Tensor:
    """Return one number per token: [B, T] floating, or [B, L, T] with a layer axis; occupied [B, T] bool or None."""
    dims = 3 if layers and isinstance(series, Tensor) and series.dim() == 3 else 2
    checked = check_tensor(name, series, dims=dims, layout="[B, T] or [B, L, T]" if layers else "[B, T]")
    check_dtype(f"{name}.dtype", checked.dtype)
    if occupied is not None:
        check_mask("occupied", occupied, (checked.shape[0], checked.shape[-1]), "[B, T]", checked, name)
    return checked


def check_vectors(name: str, tensor: object, occupied: object = None) -> Tensor:
    """Return keys or values [B, Hkv, T, D] floating; occupied [B, T] bool or None."""
    checked = check_tensor(name, tensor, dims=4, layout="[B, Hkv, T, D]")
    check_dtype(f"{name}.dtype", checked.dtype)
    if occupied is not None:
        check_mask("occupied", occupied, (checked.shape[0], checked.shape[2]), "[B, T]", checked, name)
    return checked


def check_lag(key: object, value: object, chunk: object, spread: object, occupied: object) -> int:
    """The arguments of `lag_kv`. Returns the number of tokens in a chunk, at most T: longer chunks change nothing."""
    key = check_vectors("key", key, occupied)
    value = check_vectors("value", value)
    check_shape("value", value, tuple(key.shape), "key's [B, Hkv, T, D]")
    check_like("value", value, key, "key")
    check_choice("spread", spread, SPREADS)
    return min(check_integer("chunk", chunk, minimum=1), key.shape[2])


def check_selection(score: object, budget: object, prompt: object, recent: object, occupied: object) -> Tensor:
    """The arguments of `select`. Returns the scores."""
    checked = check_series("score", score, occupied, layers=False)
    budget = check_integer("budget", budget, minimum=0)
    prompt = check_integer("prompt", prompt, minimum=0)
    recent = check_integer("recent", recent, minimum=0)
    if prompt + recent > budget:
        raise ValueError(f"prompt + recent must be at most the budget {budget}, got {prompt} + {recent}")
    if prompt > checked.shape[1]:
        raise ValueError(f"prompt must be at most T = {checked.shape[1]}, got {prompt}")
    return checked


def check_hidden_states(
    config: EpiKVConfig, hidden: tuple[object, object], *, batch: int, tokens: int | None, hidden_size: int,
    dtype: torch.dtype, device: torch.device,
) -> tuple[Tensor, Tensor] | None:
    """Return hidden_a and hidden_b with a layer axis: [B, L, T, C] for a prompt of T = `tokens`, [B, L, C] for a step.

    `tokens` is None for a step. A band of one layer may come without the layer axis. An empty band must be None and is
    returned with L = 0. Returns None for policies that read no hidden states; both must then be None.
    """
    if not config.reads_hidden:
        if any(tensor is not None for tensor in hidden):
            raise ValueError(f"hidden_a and hidden_b must be left out: policy {config.policy!r} reads none")
        return None
    time = () if tokens is None else (tokens,)
    letters = "C" if tokens is None else "T, C"
    found: list[Tensor] = []
    for name, tensor, count in zip(("hidden_a", "hidden_b"), hidden, config.layers, strict=True):
        if count == 0:
            if tensor is not None:
                raise ValueError(f"{name} must be left out: policy {config.policy!r} reads one band alone")
            found.append(found[0][:, :0])
            continue
        layout = f"[B, {count}, {letters}]" + (f" or [B, {letters}]" if count == 1 else "")
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{name} must be a torch.Tensor {layout} for policy {config.policy!r}, got {type(tensor).__name__}"
            )
        wide = tensor[:, None] if count == 1 and tensor.dim() == len(time) + 2 else tensor
        checked = check_tensor(name, wide, dims=len(time) + 3, layout=layout)
        check_shape(name, checked, (batch, count, *time, hidden_size), layout)
        check_state_tensor(name, checked, dtype, device)
        found.append(checked)
    return found[0], found[1]


def check_prompt_fits(config: EpiKVConfig, tokens: int) -> None:
    """ValueError if a prompt whose longest row has `tokens` tokens does not fit beside the recent tokens."""
    if not config.keep_prompt:
        return
    if not config.count_prompt:
        if tokens > config.max_prompt:
            raise ValueError(f"max_prompt must be at least the prompt's {tokens} tokens, got {config.max_prompt}")
    elif tokens + config.newest > config.budget:
        raise ValueError(
            f"budget must be at least prompt + recent = {tokens} + {config.newest}, got {config.budget}: the prompt "
            "is kept whole (keep_prompt=False evicts its tokens like all others, count_prompt=False gives it slots of "
            "its own)"
        )


def check_ranks(process_group: ProcessGroup | None, config: EpiKVConfig, sizes: Sizes, dtype: torch.dtype) -> int:
    """Check the process group of a state with this rank's heads. Returns the size of a hidden state, which belongs to
    the heads of all ranks. ValueError for a policy whose scores depend on heads."""
    if process_group is not None and (config.reads_attention or not config.reads_hidden):
        raise ValueError(
            f"process_group needs a policy that scores by hidden states alone, which all ranks have, got "
            f"{config.policy!r}"
        )
    check_process_group(
        process_group, config=config, batch=sizes.batch, query_heads_per_key_value_head=sizes.group,
        head_dim=sizes.head_dim, dtype=dtype,
    )
    if config.hidden_size is not None:
        return config.hidden_size
    counts = [sizes.query_heads] if process_group is None else gathered(sizes.query_heads, process_group)
    return int(sum(counts)) * sizes.head_dim


def check_scores(process_group: ProcessGroup | None, positions: Tensor, score: Tensor) -> None:
    """Check that all ranks scored a prompt alike: they have the same hidden states."""
    if process_group is not None:
        check_process_group(process_group, positions=digest(positions), score=digest(score))


class HiddenInputs:
    """The checks of the hidden states that a state receives. shared: the state's scorer has another owner."""

    def __init__(
        self, config: EpiKVConfig, batch: int, hidden_size: int, dtype: torch.dtype, device: torch.device, *,
        shared: bool,
    ) -> None:
        self._config, self._batch, self._hidden_size = config, batch, hidden_size
        self._dtype, self._device, self._shared = dtype, device, shared

    def check(self, hidden_a: object, hidden_b: object, tokens: int | None) -> tuple[Tensor, Tensor] | None:
        """The hidden states of a prompt of `tokens` tokens, or of a step (None), as `check_hidden_states` returns them.
        """
        if self._shared:
            if hidden_a is not None or hidden_b is not None:
                raise ValueError("hidden_a and hidden_b must be left out: the shared scorer has them from its owner")
            return None
        found = check_hidden_states(
            self._config, (hidden_a, hidden_b), batch=self._batch, tokens=tokens, hidden_size=self._hidden_size,
            dtype=self._dtype, device=self._device,
        )
        if found is not None:
            check_no_grad(hidden_a=found[0], hidden_b=found[1])
        return found
