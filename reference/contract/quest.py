"""Checks of Quest's arguments, for both sides. See `arguments` for the errors."""

from __future__ import annotations

import torch
from torch import Tensor

from .arguments import (
    check_device,
    check_dtype,
    check_flag,
    check_integer,
    check_like,
    check_product,
    check_shape,
    check_tensor,
)


def check_page_bounds(key: object, page_size: object) -> tuple[Tensor, int]:
    """The arguments of `page_bounds`. A page has at most all tokens, so that a larger one takes no more memory."""
    key = check_tensor("key", key, dims=4, layout="[B, Hkv, T, D]")
    check_dtype("key.dtype", key.dtype)
    return key, min(check_integer("page_size", page_size, minimum=1), key.shape[2])


def check_page_scores(query: object, maximum: object, minimum: object) -> tuple[Tensor, Tensor, Tensor]:
    """The arguments of `page_scores`."""
    query = check_tensor("query", query, dims=3, layout="[B, Hq, D]")
    check_dtype("query.dtype", query.dtype)
    maximum = check_tensor("maximum", maximum, dims=4, layout="[B, Hkv, pages, D]")
    batch, heads, pages, head_dim = maximum.shape
    check_shape("query", query, (batch, query.shape[1], head_dim), "[B, Hq, D] like maximum")
    if not heads or query.shape[1] % heads:
        raise ValueError(f"query's Hq must be a multiple of Hkv = {heads}, got {query.shape[1]}")
    check_like("query", query, maximum, "maximum")
    minimum = check_tensor("minimum", minimum, dims=4, layout="[B, Hkv, pages, D]")
    check_shape("minimum", minimum, (batch, heads, pages, head_dim), "maximum's [B, Hkv, pages, D]")
    check_like("minimum", minimum, maximum, "maximum")
    return query, maximum, minimum


def check_select_pages(
    score: object, count: object, k: object, keep_last: object
) -> tuple[Tensor, Tensor, int, bool]:
    """The arguments of `select_pages`."""
    score = check_tensor("score", score, dims=3, layout="[B, Hq, pages]")
    check_dtype("score.dtype", score.dtype)
    count = check_tensor("count", count, dims=1, layout="[B]")
    check_dtype("count.dtype", count.dtype, (torch.int64,))
    check_shape("count", count, (score.shape[0],), "[B]")
    check_device("count", count, score.device, "score")
    pages = check_integer("k", k, minimum=1)
    check_product(batch=score.shape[0], query_heads=score.shape[1], k=pages)
    return score, count, pages, check_flag("keep_last", keep_last)
