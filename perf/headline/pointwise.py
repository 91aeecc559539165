"""The operations between a decoder's products, in one launch each: at batch 1, launches limit the speed of a step.

All methods and peers share them. With torch's operators a rotation takes three launches, and each of the others two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def rotate(heads: Tensor, count: int, cosine: Tensor, sine: Tensor) -> None:
    """Rotate the first `count` heads in place: heads [B, T, H, D], contiguous; cosine and sine [T, D / 2] float32."""
    batch, total, all_heads, head_dim = heads.shape
    _rotate_kernel[(batch * total,)](
        heads, cosine, sine, total, all_heads, count, HEADS=triton.next_power_of_2(count), HALF=head_dim // 2,
    )


@triton.jit(do_not_specialize=["total"])
def _rotate_kernel(
    heads, cosine, sine, total, all_heads, count, HEADS: tl.constexpr, HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    h, d = tl.arange(0, HEADS), tl.arange(0, HALF)
    mask = (h < count)[:, None]
    first = heads + (token * all_heads + h)[:, None] * (2 * HALF) + d[None, :]
    a, b = tl.load(first, mask=mask).to(tl.float32), tl.load(first + HALF, mask=mask).to(tl.float32)
    c = tl.load(cosine + token % total * HALF + d)[None, :]
    s = tl.load(sine + token % total * HALF + d)[None, :]
    tl.store(first, a * c - b * s, mask=mask)
    tl.store(first + HALF, b * c + a * s, mask=mask)


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * wide, where x [N, 2 * width] is the concatenation of gate and wide."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    _swiglu_kernel[(rows, triton.cdiv(width, 1024))](x, out, width, BLOCK=1024)
    return out


@triton.jit
def _swiglu_kernel(x, out, width, BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + row * 2 * width + i, mask=i < width).to(tl.float32)
    wide = tl.load(x + row * 2 * width + width + i, mask=i < width).to(tl.float32)
    tl.store(out + row * width + i, gate / (1 + tl.exp(-gate)) * wide, mask=i < width)


def put(keys: Tensor, values: Tensor, place: Tensor, key: Tensor, value: Tensor) -> None:
    """Write a token's key and value [B, Hkv, D] to slot `place` [1] of keys and values [B, Hkv, S, D]."""
    batch, heads, head_dim = key.shape
    _put_kernel[(batch * heads,)](
        keys, values, place, key, value, heads, *keys.stride()[:3], *values.stride()[:3], *key.stride()[:2],
        *value.stride()[:2], HEAD_DIM=head_dim,
    )


@triton.jit
def _put_kernel(
    keys, values, place, key, value, heads, keys_b, keys_h, keys_s, values_b, values_h, values_s, key_b, key_h,
    value_b, value_h, HEAD_DIM: tl.constexpr,
):
    flat, d = tl.program_id(0).to(tl.int64), tl.arange(0, HEAD_DIM)
    b, h, slot = flat // heads, flat % heads, tl.load(place)
    tl.store(keys + b * keys_b + h * keys_h + slot * keys_s + d, tl.load(key + b * key_b + h * key_h + d))
    tl.store(values + b * values_b + h * values_h + slot * values_s + d, tl.load(value + b * value_b + h * value_h + d))
