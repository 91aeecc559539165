"""Causal attention of a whole prompt, used by every method's prefill."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...reference.contract import Sizes
from .launch import INTERPRETED, SMALL_TILES, key_block, on_device_of, padded_head_dim, stride_unit
from .numerics import dot, logit_factors, multiply, round_output, round_to, tanh
from .operation import operation
from .softmax import begin, weigh_tile


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, scale: float, softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Causal attention of a prompt to itself. Padding neither attends nor is attended to.

    query [B, Hq, T, D]; key, value [B, Hkv, T, D], any strides; occupied [B, T] bool. softcap: of the logits.
    sink_logits [Hq], contiguous: those of attention sinks. Returns [B, Hq, T, D] in query's dtype, zeros where
    unoccupied.
    """
    output: Tensor = _causal_attention(query, key, value, occupied, scale, softcap, sink_logits)
    return output


@operation("kvtwin::causal_attention", mutates_args=())
def _causal_attention(
    query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, scale: float, softcap: float | None,
    sink_logits: Tensor | None,
) -> Tensor:
    batch, query_heads, total, head_dim = query.shape
    sizes = Sizes(batch, query_heads, key.shape[1], total, head_dim)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    block = min(64, key_block(head_dim, query.element_size(), total))
    wide = not SMALL_TILES and query.element_size() == 2 and padded_head_dim(head_dim) <= 128
    query_block = block if SMALL_TILES else 128 if wide else 64
    # Float32 operands are in registers, and wide loads would leave too few.
    unit = stride_unit(query, key, value) if wide or INTERPRETED else 1
    with on_device_of(query):
        _causal_kernel[(batch * query_heads, triton.cdiv(total, query_block))](
            query, key, value, occupied, output, sink_logits,
            *logit_factors(scale, softcap), total, query_heads,
            *(stride for tensor in (query, key, value) for stride in _divided(tensor, unit)),
            *occupied.stride(), *output.stride(),
            GROUP=sizes.group, HEAD_DIM=head_dim, D_PAD=padded_head_dim(head_dim),
            QUERY_BLOCK=query_block, BLOCK=block, UNIT=unit, num_warps=8 if wide else 4, num_stages=3 if wide else 2,
        )
    return output


def _divided(tensor: Tensor, unit: int) -> tuple[int, ...]:
    """Strides as the kernels take them: see `stride_unit`."""
    *outer, channels = tensor.stride()
    return (*(stride // unit for stride in outer), channels)


@_causal_attention.register_fake
def _(query: Tensor) -> Tensor:
    return query.new_empty(query.shape)


@triton.jit(do_not_specialize=[
    "total", "query_heads", "query_b", "query_h", "query_t", "key_b", "key_h", "key_t", "value_b", "value_h",
    "value_t", "occupied_b", "occupied_t", "output_b", "output_h", "output_t",
])
def _causal_kernel(
    query, key, value, occupied, output, sink_logits,
    scale, softcap, total, query_heads,
    query_b, query_h, query_t, query_d, key_b, key_h, key_t, key_d, value_b, value_h, value_t, value_d,
    occupied_b, occupied_t, output_b, output_h, output_t, output_d,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, QUERY_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
):
    """One program: QUERY_BLOCK queries of one head over all keys up to the last of them. scale, softcap: see
    `logit_factors`. Strides of query, key and value are divided by UNIT, except that of the channels."""
    row = tl.program_id(0).to(tl.int64)
    # The last queries have the most keys. They start first, so that no program runs alone at the end.
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * QUERY_BLOCK
    b, h = row // query_heads, row % query_heads
    g = h // GROUP
    query += (b * query_b + h * query_h) * UNIT
    key += (b * key_b + g * key_h) * UNIT
    value += (b * value_b + g * value_h) * UNIT
    d = tl.arange(0, D_PAD).to(tl.int64)
    in_head = d < HEAD_DIM
    t = first + tl.arange(0, QUERY_BLOCK)
    attends = tl.load(occupied + b * occupied_b + t.to(tl.int64) * occupied_t, mask=t < total, other=0) != 0
    q = tl.load(
        query + t.to(tl.int64)[:, None] * (query_t * UNIT) + d[None, :] * query_d,
        mask=attends[:, None] & in_head[None, :], other=0.0,
    )
    row_max, weight_sum = begin(sink_logits, h + t * 0, attends, QUERY_BLOCK)
    acc = tl.zeros([QUERY_BLOCK, D_PAD], tl.float32)
    for start in range(0, tl.minimum(first + QUERY_BLOCK, total), BLOCK):
        s = start + tl.arange(0, BLOCK)
        s64 = s.to(tl.int64)
        seen = tl.load(occupied + b * occupied_b + s64 * occupied_t, mask=s < total, other=0) != 0
        tile = seen[:, None] & in_head[None, :]
        k = tl.load(key + s64[:, None] * (key_t * UNIT) + d[None, :] * key_d, mask=tile, other=0.0)
        logit = dot(q, tl.trans(k)) * scale
        if softcap is not None:
            logit = multiply(tanh(logit), softcap)
        logit = tl.where(seen[None, :] & (s[None, :] <= t[:, None]), logit, float("-inf"))
        p, row_max, weight_sum, rescale = weigh_tile(logit, row_max, weight_sum)
        v = tl.load(value + s64[:, None] * (value_t * UNIT) + d[None, :] * value_d, mask=tile, other=0.0)
        acc = acc * rescale[:, None] + dot(round_to(p, v.dtype), v)
    acc = tl.where(attends[:, None], acc / tl.where(attends, weight_sum, 1.0)[:, None], 0.0)
    tl.store(
        output + b * output_b + h * output_h + t.to(tl.int64)[:, None] * output_t + d[None, :] * output_d,
        round_output(acc, output.dtype.element_ty), mask=(t < total)[:, None] & in_head[None, :],
    )
