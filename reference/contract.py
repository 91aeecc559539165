"""What both sides of a twin share: the base of the configs and the validation of arguments. No mathematics.

Every check raises TypeError (wrong kind, dtype) or ValueError (wrong shape, device, value) with a message that names
the argument, what was expected and what came. None of them reads a tensor's contents unless it says so, so they cost
no synchronisation with the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

# In float32 it is multiplied by log2(e) before use.
LARGEST_SCALE = torch.finfo(torch.float32).max / 2
FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Sizes(NamedTuple):
    """The sizes of one attention call, in the words of the design: B, Hq, Hkv, S (or T), D."""

    batch: int
    query_heads: int
    key_value_heads: int
    slots: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads per KV head, G."""
        return self.query_heads // self.key_value_heads


@dataclass(frozen=True)
class MethodConfig:
    """Base of every method's config.

    budget: the most tokens that a row of the cache may hold, an int of at least 1.
    scale: the factor on query . key, default head_dim ** -0.5.
    """

    budget: int
    scale: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_integer("budget", self.budget, minimum=1)
        check_scale("scale", self.scale)


def check_integer(name: str, value: object, *, minimum: int | None = None) -> int:
    """`value` as an int. bool is refused: `sinks=True` is a slip, not a count."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}: {value!r}")
    if minimum is not None and value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
    return value


def check_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__}: {value!r}")
    return value


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """One of a few words."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, got {type(value).__name__}: {value!r}")
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    return value


def check_scale(name: str, value: object) -> None:
    """None (meaning D ** -0.5) or a finite number."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a float or None, got {type(value).__name__}: {value!r}")
    # A comparison, since an int may be too large for a float.
    if not abs(value) <= LARGEST_SCALE:
        raise ValueError(f"{name} must be finite in float32, got {value}")


def resolve_scale(scale: float | None, head_dim: int) -> float:
    """The factor on query . key: `scale`, or the customary D ** -0.5."""
    check_scale("scale", scale)
    return head_dim**-0.5 if scale is None else float(scale)


def check_tensor(name: str, value: object, *, dims: int, layout: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor {layout}, got {type(value).__name__}")
    check_strided(name, value)
    if value.dim() != dims:
        raise ValueError(f"{name} must be {layout}, got a tensor of {value.dim()} dimensions: {tuple(value.shape)}")
    if min(value.shape) == 0:
        raise ValueError(f"{name} must be {layout} without empty dimensions, got {tuple(value.shape)}")
    return value


def check_strided(name: str, tensor: torch.Tensor) -> None:
    """Sparse and other packed layouts have no strides for a kernel to walk."""
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a strided tensor, got layout {tensor.layout}")


def check_shape(name: str, value: torch.Tensor, expected: tuple[int, ...], layout: str) -> None:
    if tuple(value.shape) != expected:
        raise ValueError(f"{name} must be {layout} = {expected}, got {tuple(value.shape)}")


def check_device(name: str, value: torch.Tensor, device: torch.device, of: str) -> None:
    if value.device != device:
        raise ValueError(f"{name} must be on {device} like {of}, got {value.device}")


def check_like(name: str, value: torch.Tensor, like: torch.Tensor, of: str) -> None:
    """Same dtype and device as `like`, which the caller knows as `of`."""
    if value.dtype != like.dtype:
        raise TypeError(f"{name} must have {of}'s dtype {like.dtype}, got {value.dtype}")
    check_device(name, value, like.device, of)


def check_dtype(name: str, dtype: object, allowed: tuple[torch.dtype, ...] = FLOATING) -> torch.dtype:
    if not isinstance(dtype, torch.dtype) or dtype not in allowed:
        raise TypeError(f"{name} must be one of {', '.join(map(str, allowed))}, got {dtype}")
    return dtype


def check_mask(name: str, mask: object, expected: tuple[int, ...], layout: str, like: torch.Tensor, of: str) -> None:
    """A bool mask of the given shape on the device of `like`. Numbers are refused: 1.0 - mask is a common slip."""
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor {layout}, got {type(mask).__name__}")
    check_strided(name, mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"{name} must have dtype torch.bool, got {mask.dtype}")
    check_shape(name, mask, expected, layout)
    check_device(name, mask, like.device, of)


def check_heads(query_heads: int, key_value_heads: int) -> None:
    if query_heads % key_value_heads:
        raise ValueError(
            f"query heads must be a multiple of key/value heads, got Hq = {query_heads} and Hkv = {key_value_heads}"
        )


def check_key_value(key: object, value: object, *, steps: str = "S") -> None:
    """key and value [B, Hkv, S, D], floating, of one shape, dtype and device."""
    layout = f"[B, Hkv, {steps}, D]"
    key = check_tensor("key", key, dims=4, layout=layout)
    value = check_tensor("value", value, dims=4, layout=layout)
    check_dtype("key.dtype", key.dtype)
    check_shape("value", value, tuple(key.shape), f"key's {layout}")
    check_like("value", value, key, "key")


def check_attention(
    query: object, key: object, value: object, *, steps: str = "S", time: str | None = None, name: str = "query"
) -> Sizes:
    """query [B, Hq, D], or [B, Hq, `time`, D], against key and value [B, Hkv, S, D]. `name`: the caller's for it."""
    check_key_value(key, value, steps=steps)
    assert isinstance(key, torch.Tensor)
    layout = "[B, Hq, D]" if time is None else f"[B, Hq, {time}, D]"
    query = check_tensor(name, query, dims=3 if time is None else 4, layout=layout)
    batch, key_value_heads, slots, head_dim = key.shape
    if query.shape[0] != batch or query.shape[-1] != head_dim:
        raise ValueError(
            f"{name} must be {layout} with key's B = {batch} and D = {head_dim}, got {tuple(query.shape)}"
        )
    check_like(name, query, key, "key")
    check_heads(query.shape[1], key_value_heads)
    return Sizes(batch, query.shape[1], key_value_heads, slots, head_dim)


def check_slot_mask(name: str, mask: object, sizes: Sizes, per_head: bool, like: torch.Tensor) -> None:
    """`occupied` or `protected`: [B, S], or [B, Hkv, S] when decisions are taken per head."""
    if per_head:
        expected: tuple[int, ...] = (sizes.batch, sizes.key_value_heads, sizes.slots)
        check_mask(name, mask, expected, "[B, Hkv, S]", like, "key")
    else:
        check_mask(name, mask, (sizes.batch, sizes.slots), "[B, S]", like, "key")


def check_step(
    query: object, key: object, value: object, *, sizes: Sizes, dtype: torch.dtype, device: torch.device
) -> None:
    """The one new token of a decode step, against the state's sizes: query [B, Hq, D], key and value [B, Hkv, D]."""
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
    """A prompt for a state: query [B, Hq, T, D], key and value [B, Hkv, T, D], occupied [B, T] or None. Returns T."""
    prompt = check_attention(query, key, value, steps="T", time="T")
    assert isinstance(query, torch.Tensor) and isinstance(key, torch.Tensor)
    if prompt._replace(slots=0) != sizes._replace(slots=0):
        raise ValueError(
            f"query, key and value must have the state's {_heads(sizes)}, got {_heads(prompt)}"
        )
    if query.shape[2] != prompt.slots:
        raise ValueError(f"query must be [B, Hq, T, D] with key's T = {prompt.slots}, got {tuple(query.shape)}")
    check_state_tensor("key", key, dtype, device)
    if occupied is not None:
        check_mask("occupied", occupied, (sizes.batch, prompt.slots), "[B, T]", key, "key")
    return prompt.slots


def check_state_tensor(name: str, tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must have the state's dtype {dtype}, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on the state's device {device}, got {tensor.device}")


def check_next_slot(value: object, like: torch.Tensor, slots: int) -> torch.Tensor:
    """A choice written into `State.next_slot`: shape, dtype and device of `like`, values in range.

    Reads the values (one synchronisation) unless a graph captures.
    """
    layout = "[B]" if like.dim() == 1 else "[B, Hkv]"
    value = check_tensor("next_slot", value, dims=like.dim(), layout=layout)
    check_shape("next_slot", value, tuple(like.shape), layout)
    check_like("next_slot", value, like, "the state")
    if not capturing(value.device):
        low, high = int(value.min()), int(value.max())
        if low < 0 or high >= slots:
            raise ValueError(f"next_slot must be from 0 to {slots - 1}, got values from {low} to {high}")
    return value


def check_reorder(index: object, batch: int, device: torch.device) -> torch.Tensor:
    """Row numbers for `State.reorder`, [B] int64. Reads their values (one synchronisation) unless a graph captures."""
    index = check_tensor("index", index, dims=1, layout="[B]")
    if index.dtype != torch.int64:
        raise TypeError(f"index must have dtype torch.int64, got {index.dtype}")
    check_shape("index", index, (batch,), "[B]")
    if index.device != device:
        raise ValueError(f"index must be on the state's device {device}, got {index.device}")
    if not capturing(device):
        low, high = int(index.min()), int(index.max())
        if low < 0 or high >= batch:
            raise ValueError(f"index must name rows 0 to {batch - 1}, got values from {low} to {high}")
    return index


def check_all_finite(**tensors: torch.Tensor) -> None:
    """Reads every element (a synchronisation): for those who asked with `check_finite`. ValueError names the one."""
    for name, tensor in tensors.items():
        if capturing(tensor.device):
            raise ValueError("check_finite=True reads the tensors on the host: it cannot be captured in a CUDA graph")
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} holds NaN or infinity, which check_finite=True forbids")


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def state_sizes(
    *, batch: int, query_heads: int, key_value_heads: int, slots: int, head_dim: int
) -> Sizes:
    """The validated sizes of a state."""
    for name, value in (
        ("batch", batch), ("query_heads", query_heads), ("key_value_heads", key_value_heads), ("head_dim", head_dim),
    ):
        check_integer(name, value, minimum=1)
    check_heads(query_heads, key_value_heads)
    return Sizes(batch, query_heads, key_value_heads, slots, head_dim)


def resolve_device(device: object) -> torch.device:
    """The device as tensors on it name it ("cuda" is cuda:0 there, "cpu:0" is cpu). ValueError if it is not there."""
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"device must be a torch.device or a str, got {type(device).__name__}: {device!r}")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device must be one that torch can use here, got {str(device)!r}: {reason}") from error


def _heads(sizes: Sizes) -> str:
    return f"B = {sizes.batch}, Hq = {sizes.query_heads}, Hkv = {sizes.key_value_heads}, D = {sizes.head_dim}"
