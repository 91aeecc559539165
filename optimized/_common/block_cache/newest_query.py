"""The weights of a block's newest query, without a [Q, S] matrix in memory.

Methods that rank tokens by them import this module; others do not have its operation.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..launch import INTERPRETED, dependent_launch, fp8_format, group_rows, on_device_of
from ..numerics import logit_factors
from ..operation import operation
from .attend_kernels import newest_kernel
from .kernels import PLAIN, Stored, _arguments, _shape, scale_stride


def received_of_newest(
    query: Tensor, key: Tensor, occupied: Tensor, softmax_parts: Tensor, scale: float, stored: Stored = PLAIN,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The newest query's weights, averaged over the group, and the base-2 logarithm of their sum over the group.

    Both [B, Hkv, S] float32; 0 and -inf where unoccupied, and everywhere if all queries are at unoccupied slots. The
    logarithm does not underflow where the weight does. FP8 keys: as in `kernels.attend`.
    """
    weight = torch.empty(key.shape[:3], dtype=torch.float32, device=key.device)
    return weight, _newest(
        query, key, stored.key_scale, occupied, softmax_parts, weight, scale, softcap, False, stored.fp8
    )


def update_by_newest(
    query: Tensor, key: Tensor, occupied: Tensor, softmax_parts: Tensor, score: Tensor, scale: float,
    softcap: float | None,
) -> Tensor:
    """Store the newest query's weights in a state's score [B, Hkv, slots], contiguous, where a slot is occupied and the
    row has a valid query. Returns the logarithms [B, Hkv, S] of `received_of_newest`."""
    log_weight: Tensor = _newest(query, key, None, occupied, softmax_parts, score, scale, softcap, True, None)
    return log_weight


@operation("kvtwin::block_received_of_newest", mutates_args=("weight",))
def _newest(
    query: Tensor, key: Tensor, key_scale: Tensor | None, occupied: Tensor, softmax_parts: Tensor, weight: Tensor,
    scale: float, softcap: float | None, update: bool, fp8: torch.dtype | None,
) -> Tensor:
    log_weight = torch.empty(key.shape[:3], dtype=torch.float32, device=key.device)
    shape = _shape(query, key, key)
    small = key.shape[2] <= 48 if INTERPRETED else query.dtype == torch.float32
    block = 16 if small else 64
    with on_device_of(query):
        newest_kernel[(key.shape[0] * key.shape[1] * triton.cdiv(key.shape[2], block),)](
            query, key, key, key_scale, occupied, softmax_parts, weight, log_weight,
            *logit_factors(scale, softcap), weight.stride(1), scale_stride(key_scale),
            *_arguments(query, key, key, occupied), **shape, ROWS=group_rows(shape["GROUP"], query.dtype),
            BLOCK=block, UPDATE=update, FP8=fp8_format(fp8, key.device), num_warps=4, **dependent_launch(key.device),
        )
    return log_weight


@_newest.register_fake
def _(key: Tensor) -> Tensor:
    return key.new_empty(key.shape[:3], dtype=torch.float32)
