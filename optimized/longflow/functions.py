"""LongFlow's functions: one decode step on any cache, and the compression of a prompt."""

from __future__ import annotations

from torch import Tensor

from ...reference.contract import Pages
from ...reference.contract.arguments import check_all_finite, check_flag, check_integer, check_tensor, resolve_scale
from ...reference.contract.attention import check_attention, check_slot_mask
from ...reference.contract.pages import check_paged
from ...reference.contract.ranks import ProcessGroup
from ...reference.contract.scales import FP8, check_scales
from ...reference.longflow import CompressResult, DecodeResult
from .._common.launch import check_kernel_sizes, check_launchable, fp8_codes
from .._common.pages import by_head, read_slots
from .._common.prompts.compression import choose, gather_tokens
from . import _ops


def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, *,
    scale: float | None = None, per_head: bool = False, protected: Tensor | None = None, check_finite: bool = False,
    key_scale: Tensor | None = None, value_scale: Tensor | None = None,
) -> DecodeResult:
    """Attention of one query over the occupied slots, with the score of each slot and the slot to overwrite next.

    query [B, Hq, D]; key, value [B, Hkv, S, D], any strides; occupied [B, S] bool, or [B, Hkv, S] with per_head;
    protected like occupied, by default none; scale defaults to D ** -0.5. float32, float16 or bfloat16; key and value
    also torch.float8_e4m3fn or torch.float8_e5m2, times key_scale and value_scale, float32 [] or [Hkv]. D from 16 to
    256; up to 16 query heads per KV head. Results and semantics: `kvtwin.reference.longflow.decode_attention`.
    TypeError or ValueError for invalid arguments, for inputs that require grad, and for CPU tensors outside Triton's
    interpreter.
    """
    sizes = check_attention(query, key, value, stored=FP8)
    check_flag("per_head", per_head)
    check_flag("check_finite", check_finite)
    check_slot_mask("occupied", occupied, sizes, per_head, key)
    if protected is not None:
        check_slot_mask("protected", protected, sizes, per_head, key)
    scale = resolve_scale(scale, sizes.head_dim)
    check_scales(key_scale, value_scale, key=key, heads=sizes.key_value_heads, check_values=check_finite)
    check_launchable(query=query, key_scale=key_scale, value_scale=value_scale)
    check_launchable(FP8, key=key, value=value)
    check_kernel_sizes(sizes)
    if check_finite:
        _check_finite(query, key, value, occupied, per_head)
    key, value, fp8 = fp8_codes(key, value)
    return DecodeResult(
        *_ops.decode(query, key, value, None, occupied, protected, key_scale, value_scale, scale, per_head, fp8)
    )


def paged_decode_attention(
    query: Tensor, pages: Pages, occupied: Tensor, *,
    scale: float | None = None, per_head: bool = False, protected: Tensor | None = None, check_finite: bool = False,
    key_scale: Tensor | None = None, value_scale: Tensor | None = None,
) -> DecodeResult:
    """`decode_attention` over slots in pages, which rows may share.

    query [B, Hq, D]; occupied [B, S] bool, or [B, Hkv, S] with per_head, with S up to the slots of the block table's
    pages; protected like occupied. Both caches may be FP8. Results and other arguments: `decode_attention`. Pages of
    the block table are checked if it is on the CPU, or with check_finite=True. TypeError or ValueError for invalid
    arguments.
    """
    check_flag("per_head", per_head)
    check_flag("check_finite", check_finite)
    sizes, pages = check_paged(query, pages, occupied, per_head=per_head, check_entries=check_finite, stored=FP8)
    key, value, table = pages
    if protected is not None:
        check_slot_mask("protected", protected, sizes, per_head, key, "key_cache")
    scale = resolve_scale(scale, sizes.head_dim)
    check_scales(
        key_scale, value_scale, key=key, heads=sizes.key_value_heads, of="key_cache", check_values=check_finite
    )
    check_launchable(query=query, key_scale=key_scale, value_scale=value_scale)
    check_launchable(FP8, key_cache=key, value_cache=value)
    check_kernel_sizes(sizes)
    if check_finite:
        held_key, held_value = (read_slots(cache, table, sizes.slots) for cache in (key, value))
        _check_finite(query, held_key, held_value, occupied, per_head)
    key, value, fp8 = fp8_codes(by_head(key), by_head(value))
    return DecodeResult(
        *_ops.decode(query, key, value, table, occupied, protected, key_scale, value_scale, scale, per_head, fp8)
    )


def _check_finite(query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, per_head: bool) -> None:
    """Check key and value [B, Hkv, S, D] in occupied slots alone. FP8 numbers are float16 numbers, too."""
    hidden = ~(occupied if per_head else occupied[:, None])[..., None]
    held = (tensor.half() if tensor.dtype in FP8 else tensor for tensor in (key, value))
    key, value = (tensor.masked_fill(hidden, 0) for tensor in held)
    check_all_finite(query=query, key=key, value=value)


def compress_prefill(
    query_window: Tensor, key: Tensor, value: Tensor, budget: int, *,
    window: int = 32, kernel_size: int = 5, occupied: Tensor | None = None, protected: Tensor | None = None,
    scale: float | None = None, process_group: ProcessGroup | None = None, prefix_alone: bool = False,
) -> CompressResult:
    """Reduce a prompt to `budget` tokens with SnapKV, the same tokens for all heads (LongFlow section 4.1).

    query_window [B, Hq, W, D], the last W <= window queries of the prompt; key, value [B, Hkv, T, D]; occupied and
    protected [B, T] bool; a budget of 0 keeps no token. process_group: the ranks that hold the other heads.
    prefix_alone: the softmax runs over the tokens before the window alone, as in the released code. Result and errors:
    `baselines.snapkv.compress`.
    """
    check_integer("window", window, minimum=1)
    check_flag("prefix_alone", prefix_alone)
    check_tensor("query_window", query_window, dims=4, layout="[B, Hq, W, D]")
    if query_window.shape[2] > window:
        raise ValueError(
            f"query_window must be [B, Hq, W, D] with W <= window = {window}, got {tuple(query_window.shape)}"
        )
    kept = choose(
        query_window, key, value, budget,
        kernel_size=kernel_size, occupied=occupied, protected=protected, shared_heads=True, scale=scale,
        process_group=process_group, prefix_alone=prefix_alone,
    )
    return CompressResult(gather_tokens(key, kept), gather_tokens(value, kept), kept)
