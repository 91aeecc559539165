"""Checks of arguments that must fit each other, for both sides: queries, keys, values and masks of one call.

See `arguments` for the errors. No check here reads a tensor's elements.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import Sizes
from .arguments import (
    FLOATING,
    check_device,
    check_dtype,
    check_integer,
    check_like,
    check_mask,
    check_product,
    check_shape,
    check_state_tensor,
    check_tensor,
)


def check_heads(query_heads: int, key_value_heads: int) -> None:
    """Hq is a multiple of Hkv."""
    if query_heads % key_value_heads:
        raise ValueError(
            f"query heads must be a multiple of key/value heads, got Hq = {query_heads} and Hkv = {key_value_heads}"
        )


def check_key_value(
    key: object, value: object, *, steps: str = "S", stored: tuple[torch.dtype, ...] = ()
) -> None:
    """key and value [B, Hkv, S, D]: floating, with the same shape, dtype and device. stored: further dtypes."""
    layout = f"[B, Hkv, {steps}, D]"
    key = check_tensor("key", key, dims=4, layout=layout)
    value = check_tensor("value", value, dims=4, layout=layout)
    check_dtype("key.dtype", key.dtype, FLOATING + stored)
    check_shape("value", value, tuple(key.shape), f"key's {layout}")
    check_like("value", value, key, "key")


def check_attention(
    query: object, key: object, value: object, *, steps: str = "S", time: str | None = None, name: str = "query",
    stored: tuple[torch.dtype, ...] = (),
) -> Sizes:
    """query [B, Hq, D], or [B, Hq, Q, D] if `time` is given, with key and value [B, Hkv, S, D]. Returns the sizes.

    steps, time: the letters that messages use for S and Q. name: the name that messages use for query. stored: dtypes
    that only keys and values may have, which are then not those of the query.
    """
    check_key_value(key, value, steps=steps, stored=stored)
    assert isinstance(key, Tensor)
    layout = "[B, Hq, D]" if time is None else f"[B, Hq, {time}, D]"
    query = check_tensor(name, query, dims=3 if time is None else 4, layout=layout)
    batch, key_value_heads, slots, head_dim = key.shape
    if query.shape[0] != batch or query.shape[-1] != head_dim:
        raise ValueError(
            f"{name} must be {layout} with key's B = {batch} and D = {head_dim}, got {tuple(query.shape)}"
        )
    check_query_like(name, query, key, "key", stored)
    check_heads(query.shape[1], key_value_heads)
    return Sizes(batch, query.shape[1], key_value_heads, slots, head_dim)


def check_query_like(name: str, query: Tensor, key: Tensor, of: str, stored: tuple[torch.dtype, ...]) -> None:
    """A query on key's device, with key's dtype, or with any floating dtype if key's is one of `stored`."""
    if key.dtype in stored:
        check_dtype(f"{name}.dtype", query.dtype)
        check_device(name, query, key.device, of)
    else:
        check_like(name, query, key, of)


def check_slot_mask(
    name: str, mask: object, sizes: Sizes, per_head: bool, like: Tensor, of: str = "key"
) -> None:
    """`occupied` or `protected`: [B, S] bool, or [B, Hkv, S] if each KV head evicts for itself."""
    if per_head:
        expected: tuple[int, ...] = (sizes.batch, sizes.key_value_heads, sizes.slots)
        check_mask(name, mask, expected, "[B, Hkv, S]", like, of)
    else:
        check_mask(name, mask, (sizes.batch, sizes.slots), "[B, S]", like, of)


def check_sink_logits(sink_logits: object, sizes: Sizes, device: torch.device) -> Tensor | None:
    """Return the logits of attention sinks, contiguous, [Hq] of a floating type on the state's device, without their
    gradient; or None."""
    if sink_logits is None:
        return None
    checked = check_tensor("sink_logits", sink_logits, dims=1, layout="[Hq]")
    check_shape("sink_logits", checked, (sizes.query_heads,), "[Hq]")
    check_dtype("sink_logits.dtype", checked.dtype)
    check_device("sink_logits", checked, device, "the state")
    if not checked.is_contiguous():
        raise ValueError(f"sink_logits must be contiguous, got a stride of {checked.stride(0)}")
    return checked.detach()


def state_sizes(*, batch: int, query_heads: int, key_value_heads: int, slots: int, head_dim: int) -> Sizes:
    """The sizes of a state. TypeError or ValueError unless all are ints of at least 1 and Hq is a multiple of Hkv."""
    for name, value in (
        ("batch", batch), ("query_heads", query_heads), ("key_value_heads", key_value_heads), ("head_dim", head_dim),
    ):
        check_integer(name, value, minimum=1)
    check_heads(query_heads, key_value_heads)
    check_product(batch=batch, key_value_heads=key_value_heads, slots=slots, head_dim=head_dim)
    check_product(batch=batch, query_heads=query_heads, head_dim=head_dim)
    return Sizes(batch, query_heads, key_value_heads, slots, head_dim)


def check_step(
    query: object, key: object, value: object, *, sizes: Sizes, dtype: torch.dtype, device: torch.device
) -> None:
    """The token of a decode step: query [B, Hq, D], key and value [B, Hkv, D], with the state's dtype and device."""
    for name, tensor, heads, letter in (
        ("query", query, sizes.query_heads, "Hq"),
        ("key", key, sizes.key_value_heads, "Hkv"),
        ("value", value, sizes.key_value_heads, "Hkv"),
    ):
        layout = f"[B, {letter}, D]"
        checked = check_tensor(name, tensor, dims=3, layout=layout)
        check_shape(name, checked, (sizes.batch, heads, sizes.head_dim), layout)
        check_state_tensor(name, checked, dtype, device)


def check_prompt(
    query: object, key: object, value: object, occupied: object, *,
    sizes: Sizes, dtype: torch.dtype, device: torch.device,
) -> int:
    """A prompt: query [B, Hq, T, D], key and value [B, Hkv, T, D], occupied [B, T] bool or None. Returns T."""
    prompt = check_attention(query, key, value, steps="T", time="T")
    assert isinstance(query, Tensor) and isinstance(key, Tensor)
    if prompt._replace(slots=0) != sizes._replace(slots=0):
        raise ValueError(
            f"query, key and value must have the state's {_described(sizes)}, got {_described(prompt)}"
        )
    if query.shape[2] != prompt.slots:
        raise ValueError(f"query must be [B, Hq, T, D] with key's T = {prompt.slots}, got {tuple(query.shape)}")
    check_state_tensor("key", key, dtype, device)
    if occupied is not None:
        check_mask("occupied", occupied, (sizes.batch, prompt.slots), "[B, T]", key, "key")
    return prompt.slots


def _described(sizes: Sizes) -> str:
    return f"B = {sizes.batch}, Hq = {sizes.query_heads}, Hkv = {sizes.key_value_heads}, D = {sizes.head_dim}"
