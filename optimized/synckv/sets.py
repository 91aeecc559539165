"""SyncKV's index sets on the GPU: log-weights of the R-heads, and the tokens that they select."""

from __future__ import annotations

from decimal import Decimal
from math import e, log2

import torch
import triton
from torch import Tensor

from ...reference.contract import Sizes
from ...reference.contract.arguments import resolve_scale
from ...reference.contract.synckv.arguments import check_anticipation, check_budget, check_initial
from ...reference.contract.synckv.types import SyncKVSetsResult
from .._common.launch import (
    check_kernel_sizes,
    check_launchable,
    group_rows,
    key_block,
    on_device_of,
    padded_head_dim,
    split_slots,
    stride_unit,
)
from .._common.operation import operation
from ._score_kernels import logits_kernel, pool_kernel
from ._select import chunk_size, select

__all__ = ["anticipate", "initial_sets", "split_budget"]

#: Slots per program of `pool_kernel`.
POOL = 256


def split_budget(k: int, rho: float) -> tuple[int, int]:
    """(k_static, k_dynamic), with sum k. Semantics and errors: `kvtwin.reference.synckv.split_budget`."""
    check_budget(k, rho)
    _, digits, exponent = Decimal(str(rho)).as_tuple()
    assert isinstance(exponent, int)
    numerator = int("".join(map(str, digits))) * k
    static = -(-numerator // 10**-exponent) if exponent < 0 else numerator * 10**exponent
    return static, k - static


def initial_sets(
    query: Tensor, key: Tensor, occupied: Tensor, k_static: int, k_dynamic: int, *, scale: float | None = None
) -> SyncKVSetsResult:
    """The tokens with the largest weights from the last prompt token, for each R-head, in two parts (SyncKV eq. 3, 4).

    query [B, N_r G, D]; key [B, N_r, S, D]; occupied [B, S] bool; scale defaults to D ** -0.5. Any strides; float32,
    float16 or bfloat16; D from 16 to 256; up to 16 query heads per KV head. Semantics:
    `kvtwin.reference.synckv.initial_sets`. TypeError or ValueError for invalid arguments, for inputs that require grad,
    and for CPU tensors outside Triton's interpreter.
    """
    sizes = check_initial(query, key, occupied, k_static, k_dynamic)
    weight = _weights(query, key, occupied, scale, sizes)
    static = select(weight, occupied, _nothing(key), k_static)
    return SyncKVSetsResult(static, select(weight, occupied, static, k_dynamic))


def anticipate(
    query: Tensor, key: Tensor, occupied: Tensor, static: Tensor, k_dynamic: int, *, exclude_static: bool = True,
    scale: float | None = None,
) -> Tensor:
    """The k_dynamic tokens with the largest weights from a decode step, for each R-head (SyncKV eq. 5 and 6).

    query, key, occupied, scale and errors as in `initial_sets`; static [B, N_r, k_static] int64, -1 for none. Returns
    [B, N_r, k_dynamic] int64, ascending, -1 at the end. Semantics: `kvtwin.reference.synckv.anticipate`.
    The check that static is below S synchronizes with the host. It is skipped during CUDA graph capture and
    torch.compile, where other numbers count as -1.
    """
    sizes = check_anticipation(query, key, occupied, static, k_dynamic, exclude_static)
    weight = _weights(query, key, occupied, scale, sizes)
    chosen: Tensor = select(weight, occupied, static if exclude_static else _nothing(key), k_dynamic)
    return chosen


def _weights(query: Tensor, key: Tensor, occupied: Tensor, scale: float | None, sizes: Sizes) -> Tensor:
    check_launchable(query=query, key=key, occupied=occupied)
    check_kernel_sizes(sizes)
    weight: Tensor = log_weights(query, key, occupied, resolve_scale(scale, sizes.head_dim))
    return weight


def _nothing(key: Tensor) -> Tensor:
    """An empty set of taken tokens."""
    return key.new_empty((*key.shape[:2], 0), dtype=torch.int64)


# Operations ----------------------------------------------------------------------------------------------------------


@operation("kvtwin::synckv_log_weights", mutates_args=())
def log_weights(query: Tensor, key: Tensor, occupied: Tensor, scale: float, members: Tensor | None = None) -> Tensor:
    """log2 of the largest weight in each group, [B, N_r, S] float32; -inf in unoccupied slots.

    members [N_r] int32: the KV heads that take part, by default all.
    """
    batch, stored, slots, head_dim = key.shape
    group, heads = query.shape[1] // stored, stored if members is None else members.shape[0]
    sizes = Sizes(batch, heads * group, heads, slots, head_dim)
    block = key_block(head_dim, key.element_size(), slots)
    splits, split_size = split_slots(sizes, block, key.device)
    batch_heads = batch * heads
    logits = torch.empty(batch_heads, sizes.group, slots, dtype=torch.float32, device=key.device)
    row_maxima = torch.empty(2, batch_heads * sizes.group, splits, dtype=torch.float32, device=key.device)
    weight = torch.empty(batch, heads, slots, dtype=torch.float32, device=key.device)
    chunk = min(POOL, chunk_size())
    chunks = triton.cdiv(slots, chunk)
    unit = stride_unit(key)
    layout = (
        *query.stride(), *(stride // unit for stride in key.stride()[:3]), key.stride(3), *occupied.stride(),
    )
    shape = {"GROUP": sizes.group, "ROWS": group_rows(sizes.group, query.dtype)}
    with on_device_of(key):
        logits_kernel[(batch_heads * splits,)](
            query, key, occupied, members, logits, row_maxima[0], row_maxima[1], scale * log2(e), slots, split_size,
            splits, heads, *layout,
            **shape, HEAD_DIM=head_dim, D_PAD=padded_head_dim(head_dim), BLOCK=block, UNIT=unit, num_warps=4,
        )
        pool_kernel[(batch_heads * chunks,)](
            logits, row_maxima[0], row_maxima[1], weight, slots, splits, chunks, **shape,
            SPLITS=triton.next_power_of_2(splits), CHUNK=chunk, num_warps=4,
        )
    return weight


@log_weights.register_fake
def _(key: Tensor, members: Tensor | None) -> Tensor:
    heads = key.shape[1] if members is None else members.shape[0]
    return key.new_empty((key.shape[0], heads, key.shape[2]), dtype=torch.float32)
