"""ThinKV's thought types on the GPU, classified by the sparsity of a decode step's attention."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2

import torch
import triton
from torch import Tensor

from ...reference.contract import Sizes
from ...reference.contract.arguments import resolve_scale
from ...reference.contract.thinkv.arguments import (
    check_edges,
    check_numbers,
    check_sparsity,
    check_traces,
    too_few_layers,
)
from ...reference.contract.thinkv.types import Thresholds
from .._common.launch import (
    SMALL_TILES,
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
from ._calibration import MODES, average, modes
from ._thoughts_kernels import classify_kernel, count_kernel, denominators_kernel, mean_count_kernel, share_kernel

__all__ = ["attention_sparsity", "calibrate", "classify"]


def attention_sparsity(
    query: Tensor, key: Tensor, occupied: Tensor, *, threshold: float = 0.01, scale: float | None = None,
    sparsity_of: str = "heads",
) -> Tensor:
    """The share of the tokens that a decode step does not attend to, over all KV heads (ThinKV section 3.1.2, C.2).

    query [B, Hq, D]; key [B, Hkv, S, D]; occupied [B, S] bool; 0 < threshold < 1; scale defaults to D ** -0.5;
    sparsity_of: "heads" averages the shares of the KV heads, "mean" their weights. Any strides; float32, float16 or
    bfloat16; D from 16 to 256; up to 16 query heads per KV head. Returns [B] float32, 0 for a row without tokens.
    Semantics: `kvtwin.reference.thinkv.attention_sparsity`. TypeError or ValueError for invalid arguments, for inputs
    that require grad, and for CPU tensors outside Triton's interpreter.
    """
    sizes = check_sparsity(query, key, occupied, threshold, sparsity_of)
    check_launchable(query=query, key=key, occupied=occupied)
    check_kernel_sizes(sizes)
    result: Tensor = _attention_sparsity(
        query, key, occupied, threshold, resolve_scale(scale, sizes.head_dim), sparsity_of == "mean"
    )
    return result


def classify(sparsity: Tensor, edges: tuple[float, float]) -> Tensor:
    """The thought type for a sparsity: [...] -> [...] int64. edges: (theta_1, theta_2), ascending.

    float32, float16 or bfloat16. Semantics: `kvtwin.reference.thinkv.classify`. TypeError or ValueError for invalid
    arguments, for inputs that require grad, and for CPU tensors outside Triton's interpreter.
    """
    low, high = check_edges(edges)
    sparsity = check_numbers("sparsity", sparsity)
    check_launchable(sparsity=sparsity)
    result: Tensor = _classify(sparsity, low, high)
    return result


def calibrate(
    traces: Sequence[Tensor], *, layers: int = 4, grid: int = 513, bandwidth: float | None = None
) -> Thresholds:
    """The layers whose sparsity separates the thought types, and the edges between the types (ThinKV 3.1.3, D.1).

    traces: for each prompt, the sparsity of its decode steps, [all layers, steps] floating, from 0 to 1, on any device.
    Densities are estimated on that device; the result is returned to the host. Arguments, result and errors:
    `kvtwin.reference.thinkv.calibrate`. Unlike the reference, this needs no other package.
    """
    traces = check_traces(traces, layers, grid, bandwidth)
    found = [modes(trace.detach(), grid, bandwidth) for trace in traces]
    counts = torch.stack([count.cpu() for count, _ in found])                           # [prompts, all layers]
    votes = (counts == MODES).sum(0)
    ranked = votes.sort(descending=True, stable=True).indices[:layers]
    if int(votes[ranked[-1]]) == 0:
        raise too_few_layers(counts.tolist(), layers, MODES)
    chosen = ranked.sort().values
    return Thresholds(tuple(chosen.tolist()), average(found, chosen))


# Operations ----------------------------------------------------------------------------------------------------------


@operation("kvtwin::thinkv_attention_sparsity", mutates_args=())
def _attention_sparsity(
    query: Tensor, key: Tensor, occupied: Tensor, threshold: float, scale: float, of_mean: bool
) -> Tensor:
    batch, heads, slots, head_dim = key.shape
    sizes = Sizes(batch, query.shape[1], heads, slots, head_dim)
    block = key_block(head_dim, key.element_size(), slots)
    splits, split_size = split_slots(sizes, block, key.device)
    row_maxima = torch.empty(2, batch * sizes.query_heads, splits, dtype=torch.float32, device=key.device)
    counts = torch.empty(batch, heads * splits, 2, dtype=torch.int32, device=key.device)
    pooled = torch.empty(batch, heads, slots, dtype=torch.float32, device=key.device) if of_mean else row_maxima
    sparsity = torch.empty(batch, dtype=torch.float32, device=key.device)
    unit = stride_unit(key)
    layout = (
        *query.stride(), *(stride // unit for stride in key.stride()[:3]), key.stride(3), *occupied.stride(),
    )
    shape = {
        "GROUP": sizes.group, "HEAD_DIM": head_dim, "D_PAD": padded_head_dim(head_dim), "BLOCK": block, "UNIT": unit,
        "ROWS": group_rows(sizes.group, query.dtype),
    }
    log2_e = 1.4426950408889634
    with on_device_of(key):
        denominators_kernel[(batch * heads * splits,)](
            query, key, occupied, row_maxima[0], row_maxima[1], scale * log2_e, slots, split_size, splits, heads,
            *layout, **shape, num_warps=4,
        )
        count_kernel[(batch * heads * splits,)](
            query, key, occupied, row_maxima[0], row_maxima[1], counts, pooled, scale * log2_e, log2(threshold), slots,
            split_size, splits, heads, *layout, **shape, SPLITS=triton.next_power_of_2(splits), OF_MEAN=of_mean,
            num_warps=4,
        )
        if of_mean:
            sums = torch.empty(batch, heads, dtype=torch.float32, device=key.device)
            counts = torch.empty(batch, 1, 2, dtype=torch.int32, device=key.device)
            mean_count_kernel[(batch,)](pooled, sums, counts, threshold, heads, slots, BLOCK=256, num_warps=4)
        share_kernel[(batch,)](
            counts, sparsity, counts.shape[1], BLOCK=1 if SMALL_TILES else 256, num_warps=4
        )
    return sparsity


@_attention_sparsity.register_fake
def _(query: Tensor) -> Tensor:
    return query.new_empty(query.shape[:1], dtype=torch.float32)


@operation("kvtwin::thinkv_classify", mutates_args=())
def _classify(sparsity: Tensor, low: float, high: float) -> Tensor:
    sparsity = sparsity.contiguous()
    thought = torch.empty(sparsity.shape, dtype=torch.int64, device=sparsity.device)
    with on_device_of(sparsity):
        classify_kernel[(triton.cdiv(sparsity.numel(), 256),)](
            sparsity, thought, low, high, sparsity.numel(), BLOCK=256, num_warps=4
        )
    return thought


@_classify.register_fake
def _(sparsity: Tensor) -> Tensor:
    return sparsity.new_empty(sparsity.shape, dtype=torch.int64)
