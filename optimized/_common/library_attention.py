"""Causal attention of a whole prompt by the fastest kernel that PyTorch has for it: cuDNN's or flash attention.

They compute the attention of rows without padding. If the padding of a row is before or behind its tokens, they get the
tokens alone, row by row. Everything else takes kvtwin's own kernel (`prompt_attention.py`): float32,
padding between tokens, prompts shorter than MINIMUM_TOKENS, shapes that the library refuses, and calls that must not
synchronise with the host to look for padding, in a CUDA graph's capture or under torch.compile.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ...reference.contract.arguments import readable
from .prompt_attention import causal_attention

#: With fewer tokens, all kernels take about as long as a launch.
MINIMUM_TOKENS = 512
#: cuDNN builds a plan for every new shape, in 44 to 49 ms on an H100's host. From this product of B, Hq, D and T^2 on,
#: about 32 layers save more time than that. Below it, flash attention is faster.
CUDNN_WORK = 2**39
#: Bytes to which the start of every token's channels must be aligned.
ALIGNMENT = 16
OWN = "kvtwin"
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH,
}


def attend_prompt(
    query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, scale: float, *, padded: bool,
    softcap: float | None = None, sink_logits: Tensor | None = None,
) -> tuple[Tensor, str]:
    """Causal attention of a prompt to itself, as `prompt_attention.causal_attention`, and the kernel's name: "cudnn",
    "flash" or "kvtwin".

    query [B, Hq, T, D]; key, value [B, Hkv, T, D]; occupied [B, T] bool. padded=False: every token is occupied. With
    padded=True, the host reads where the tokens of each row begin and end, unless nothing but kvtwin's kernel can run.
    It alone has a softcap and attention sinks.
    """
    if softcap is not None or sink_logits is not None:
        return causal_attention(query, key, value, occupied, scale, softcap, sink_logits), OWN
    name = library_kernel(query, key, value, scale)
    if name == OWN or (padded and not readable(occupied)):
        return causal_attention(query, key, value, occupied, scale), OWN
    if not padded:
        return _attend(name, query, key, value, scale), name
    ranges = token_ranges(occupied)
    if ranges is None:
        return causal_attention(query, key, value, occupied, scale), OWN
    total = query.shape[2]
    if all(found == (0, total) for found in ranges):
        return _attend(name, query, key, value, scale), name
    shortest = min((end - start for start, end in ranges if start < end), default=0)
    name = library_kernel(query, key, value, scale, shortest=shortest)
    if name == OWN:
        return causal_attention(query, key, value, occupied, scale), OWN
    output = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    for row, (start, end) in enumerate(ranges):
        if start < end:
            place = slice(row, row + 1), slice(None), slice(start, end)
            output[place] = _attend(name, query[place], key[place], value[place], scale)
    return output, name


def library_kernel(query: Tensor, key: Tensor, value: Tensor, scale: float, *, shortest: int | None = None) -> str:
    """The kernel for a prompt without gaps: a name of BACKENDS, or "kvtwin". On one machine it depends on dtype, shape,
    strides and scale alone, and on the tokens of the shortest row, by default all."""
    if (
        query.device.type != "cuda" or query.dtype not in (torch.float16, torch.bfloat16) or scale <= 0
        or query.shape[2] < MINIMUM_TOKENS or torch.compiler.is_compiling()
        or not all(map(_aligned, (query, key, value)))
    ):
        return OWN
    arguments = torch.backends.cuda.SDPAParams(query.detach(), key.detach(), value.detach(), None, 0.0, True, True)
    batch, heads, tokens, head_dim = query.shape
    work = batch * heads * head_dim * tokens**2 if shortest is None else heads * head_dim * shortest**2
    if work >= CUDNN_WORK and cudnn_is_chosen(query.device) and torch.backends.cuda.can_use_cudnn_attention(arguments):
        return "cudnn"
    return "flash" if torch.backends.cuda.can_use_flash_attention(arguments) else OWN


@functools.cache
def cudnn_is_chosen(device: torch.device) -> bool:
    """Whether cuDNN's attention may run: on Hopper, with a version that PyTorch prefers to flash attention there.
    Earlier versions may read out of bounds (PyTorch's issue 169849)."""
    version = torch.backends.cudnn.version()
    return torch.cuda.get_device_capability(device) == (9, 0) and version is not None and version > 91500


def token_ranges(occupied: Tensor) -> list[tuple[int, int]] | None:
    """The range of positions with tokens in each row of occupied [B, T]: start and end. None if a row has padding
    between tokens. Synchronises with the GPU once."""
    total = occupied.shape[1]
    position = torch.arange(total, device=occupied.device)
    start = position.where(occupied, total).amin(1)
    end = (position + 1).where(occupied, 0).amax(1)
    found = torch.stack([start, end, occupied.sum(1)], 1).tolist()
    if any(count and end - start != count for start, end, count in found):
        return None
    return [(start, end) for start, end, _ in found]


def _aligned(tensor: Tensor) -> bool:
    """Whether channels are adjacent, and every token's channels start at a multiple of ALIGNMENT bytes."""
    *outer, channels = tensor.stride()
    size = tensor.element_size()
    return channels == 1 and tensor.data_ptr() % ALIGNMENT == 0 and all(
        stride > 0 and stride * size % ALIGNMENT == 0 for stride, count in zip(outer, tensor.shape, strict=False)
        if count > 1
    )


def _attend(name: str, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False), sdpa_kernel(BACKENDS[name]):
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
