"""Caches in pages, for functions of other packages: `Pages`, and the checks of what belongs to them."""

from __future__ import annotations

from torch import Tensor

from .contract import Pages as Pages
from .contract.arguments import check_flag, resolve_scale
from .contract.attention import check_slot_mask
from .contract.pages import check_paged
from .contract.scales import FP8, check_scales


def check_paged_attention(
    query: Tensor, pages: Pages, occupied: Tensor, *, scale: float | None = None, per_head: bool = False,
    protected: Tensor | None = None, key_scale: Tensor | None = None, value_scale: Tensor | None = None,
    check_elements: bool = False,
) -> float:
    """Check the arguments of attention of one query over pages, FP8 or not, and return the factor on query . key.

    query [B, Hq, D]; pages of B rows; occupied [B, S] bool, or [B, Hkv, S] with per_head, with S up to the slots of the
    block table's pages; protected like occupied, or None; scale: None for D ** -0.5; key_scale, value_scale: float32,
    [] or [Hkv], or None, for FP8 caches only. Entries of the block table and elements of scales are checked if they are
    on the CPU, or with check_elements, which synchronizes with the GPU. TypeError or ValueError for anything else.
    """
    check_flag("per_head", per_head)
    check_flag("check_elements", check_elements)
    sizes, pages = check_paged(query, pages, occupied, per_head=per_head, check_entries=check_elements, stored=FP8)
    if protected is not None:
        check_slot_mask("protected", protected, sizes, per_head, pages.key_cache, "key_cache")
    check_scales(
        key_scale, value_scale, key=pages.key_cache, heads=sizes.key_value_heads, of="key_cache",
        check_values=check_elements,
    )
    return resolve_scale(scale, sizes.head_dim)
