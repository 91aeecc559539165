"""Checks of the arguments of SyncKV's functions and state, for both sides. See `contract.arguments`."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import Sizes
from ..arguments import (
    capturing,
    check_device,
    check_dtype,
    check_flag,
    check_indices,
    check_integer,
    check_mask,
    check_product,
    check_ratio,
    check_strided,
    check_tensor,
)
from ..attention import check_attention
from .types import HeadClusters


def check_budget(k: object, rho: object) -> None:
    """The arguments of `split_budget`."""
    check_integer("k", k, minimum=1)
    check_ratio("rho", rho)


def check_selection(query: object, key: object, occupied: object) -> Sizes:
    """query [B, N_r G, D], key [B, N_r, S, D] of the R-heads and occupied [B, S] bool. Returns the sizes."""
    sizes = check_attention(query, key, key)
    assert isinstance(key, Tensor)
    check_mask("occupied", occupied, (sizes.batch, sizes.slots), "[B, S]", key, "key")
    return sizes


def check_initial(query: object, key: object, occupied: object, k_static: object, k_dynamic: object) -> Sizes:
    """The arguments of `initial_sets`. Returns the sizes."""
    sizes = check_selection(query, key, occupied)
    static = check_integer("k_static", k_static, minimum=0)
    dynamic = check_integer("k_dynamic", k_dynamic, minimum=0)
    for name, count in (("k_static", static), ("k_dynamic", dynamic)):
        check_product(batch=sizes.batch, heads=sizes.key_value_heads, **{name: count})
    return sizes


def check_anticipation(
    query: object, key: object, occupied: object, static: object, k_dynamic: object, exclude_static: object
) -> Sizes:
    """The arguments of `anticipate`. Returns the sizes. Reads the elements of static (one synchronization) unless a
    CUDA graph is being captured or torch.compile is tracing."""
    sizes = check_selection(query, key, occupied)
    assert isinstance(key, Tensor)
    layout = "[B, N_r, k_static]"
    if not isinstance(static, Tensor):
        raise TypeError(f"static must be a torch.Tensor {layout}, got {type(static).__name__}")
    check_strided("static", static)
    check_dtype("static.dtype", static.dtype, (torch.int64,))
    if static.dim() != 3 or static.shape[:2] != key.shape[:2]:
        raise ValueError(f"static must be {layout} with key's {tuple(key.shape[:2])}, got {tuple(static.shape)}")
    check_device("static", static, key.device, "key")
    dynamic = check_integer("k_dynamic", k_dynamic, minimum=0)
    check_product(batch=sizes.batch, heads=sizes.key_value_heads, k_dynamic=dynamic)
    check_flag("exclude_static", exclude_static)
    check_indices("static", static, sizes.slots)
    return sizes


def check_sets(first: object, second: object) -> None:
    """The arguments of `overlap`. Reads the elements (one synchronization) unless compiled or captured."""
    for name, value in (("first", first), ("second", second)):
        dims = value.dim() if isinstance(value, Tensor) else 1
        value = check_tensor(name, value, dims=max(dims, 1), layout="[..., N]")
        check_dtype(f"{name}.dtype", value.dtype, (torch.int64,))
    assert isinstance(first, Tensor) and isinstance(second, Tensor)
    if first.shape[:-1] != second.shape[:-1]:
        raise ValueError(
            f"second must have first's leading dimensions {tuple(first.shape[:-1])}, got {tuple(second.shape)}"
        )
    check_device("second", second, first.device, "first")
    if torch.compiler.is_compiling() or capturing(first.device):
        return
    for name, value in (("first", first), ("second", second)):
        ordered = value.sort(-1).values
        if bool((ordered[..., :1] < -1).any()):
            raise ValueError(f"{name} must hold token indices, or -1 for none, got {int(value.min())}")
        if bool((ordered[..., -1] < 0).any()):
            raise ValueError(f"{name} must hold at least one token in each set: the overlap of empty sets is undefined")
        if bool(((ordered.diff(dim=-1) == 0) & (ordered[..., 1:] >= 0)).any()):
            raise ValueError(f"{name} must hold distinct tokens in each set, got one twice")


def check_heads_attention(attention: object, k: object, occupied: object) -> None:
    """The arguments of `head_similarity`. Reads `occupied` (one synchronization) unless compiled or captured."""
    attention = check_tensor("attention", attention, dims=3, layout="[steps, Hkv, n]")
    check_dtype("attention.dtype", attention.dtype)
    check_integer("k", k, minimum=1)
    if occupied is None:
        return
    steps, _, tokens = attention.shape
    check_mask("occupied", occupied, (steps, tokens), "[steps, n]", attention, "attention")
    assert isinstance(occupied, Tensor)
    if not (torch.compiler.is_compiling() or capturing(attention.device)) and not bool(occupied.any(-1).all()):
        raise ValueError("occupied must hold at least one token at each step: the overlap of empty sets is undefined")


def check_similarity(similarity: object, clusters: object) -> int:
    """The arguments of `cluster_heads`. Reads the elements. Returns `clusters`."""
    similarity = check_tensor("similarity", similarity, dims=2, layout="[Hkv, Hkv]")
    check_dtype("similarity.dtype", similarity.dtype)
    heads = similarity.shape[0]
    if similarity.shape[1] != heads:
        raise ValueError(f"similarity must be [Hkv, Hkv], got {tuple(similarity.shape)}")
    if not bool(similarity.isfinite().all()):
        raise ValueError("similarity must be finite, got NaN or infinity")
    if not torch.equal(similarity, similarity.T):
        raise ValueError("similarity must be symmetric, got a matrix that differs from its transpose")
    if check_integer("clusters", clusters, minimum=1) > heads:
        raise ValueError(f"clusters must be at most the {heads} heads of similarity, got {clusters}")
    assert isinstance(clusters, int)
    return clusters


def resolve_clusters(head_clusters: object, clusters: int, heads: int) -> HeadClusters:
    """Return a layer's clusters of `heads` KV heads.

    None gives `clusters` runs of neighboring heads of nearly equal length, each represented by its first head: a
    default for models without measured similarities.
    """
    if head_clusters is None:
        if clusters > heads:
            raise ValueError(f"clusters must be at most the {heads} KV heads, got {clusters}")
        labels = [head * clusters // heads for head in range(heads)]
        return HeadClusters(tuple(labels), tuple(labels.index(cluster) for cluster in range(clusters)))
    if not isinstance(head_clusters, HeadClusters):
        raise TypeError(f"head_clusters must be HeadClusters or None, got {type(head_clusters).__name__}")
    if len(head_clusters.labels) != heads:
        raise ValueError(
            f"head_clusters needs one label per KV head: expected {heads}, got {len(head_clusters.labels)}"
        )
    if len(head_clusters.representatives) != clusters:
        raise ValueError(
            f"head_clusters must have the config's {clusters} clusters, got {len(head_clusters.representatives)}"
        )
    return head_clusters
