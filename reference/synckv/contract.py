"""What both sides of SyncKV share: config, result types and the checks of arguments. No mathematics."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..contract import (
    Sizes, capturing, check_attention, check_device, check_dtype, check_flag, check_integer, check_mask, check_scale,
    check_strided, check_tensor,
)

#: What a file of clusterings calls itself, and the version of its form.
FORMAT, VERSION = "kvtwin head clusters", 1


@dataclass(frozen=True)
class SyncKVConfig:
    """How a SyncKV cache selects what the heads that do not look for themselves attend to.

    k: tokens that such a head attends to beside the newest ones. rho: the share of them that is chosen once, by the
    prompt's last token, from 0 to 1 (section 4.2; see `split_budget`). stride: decode steps from one anticipation to
    the next, m. phase: step t is one where m divides t + phase; 0, the paper's, up to m - 1. Layers that anticipate at
    different steps share the wire to the host's memory out among them. clusters: representative heads per layer, N_r.
    exclude_static: whether the dynamic set is chosen among the tokens that are not in the static one; eq. 6 to the
    letter does not exclude them. max_tokens: the longest sequence, prompt and decoded tokens, that a state has room
    for. offload: whether heads that do not look for themselves keep their tokens in the host's memory, and only those
    chosen on the GPU (the reference keeps all where it is). scale: the factor on query . key, default head_dim ** -0.5.
    Raises TypeError or ValueError for anything else.
    """

    k: int
    rho: float = 0.5
    stride: int = 5
    clusters: int = 2
    exclude_static: bool = field(default=True, kw_only=True)
    phase: int = field(default=0, kw_only=True)
    max_tokens: int = field(default=32768, kw_only=True)
    offload: bool = field(default=False, kw_only=True)
    scale: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("k", "stride", "clusters", "max_tokens"):
            check_integer(name, getattr(self, name), minimum=1)
        if check_integer("phase", self.phase, minimum=0) >= self.stride:
            raise ValueError(f"phase must be below the stride of {self.stride}, got {self.phase}")
        check_ratio(self.rho)
        check_flag("exclude_static", self.exclude_static)
        check_flag("offload", self.offload)
        check_scale("scale", self.scale)


class SyncKVSetsResult(NamedTuple):
    """What the prompt's last token chooses (eq. 3 and 4): tokens, ascending, then -1 where there are fewer.

    static: [B, N_r, k_static] int64, its best tokens, for good. dynamic: [B, N_r, k_dynamic] int64, the next best,
    until the first anticipation.
    """

    static: Tensor
    dynamic: Tensor


@dataclass(frozen=True)
class HeadClusters:
    """Which KV heads of a layer go together, and which of them looks for all of its cluster.

    labels: of each KV head its cluster, 0 to N_r - 1. representatives: of each cluster one of its heads.
    Raises TypeError or ValueError for clusters without heads and representatives from elsewhere.
    """

    labels: tuple[int, ...]
    representatives: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("labels", "representatives"):
            object.__setattr__(self, name, _numbers(name, getattr(self, name)))
        clusters = len(self.representatives)
        if set(self.labels) != set(range(clusters)):
            raise ValueError(f"labels must name each of {clusters} clusters, and no other, got {self.labels}")
        for cluster, head in enumerate(self.representatives):
            if head >= len(self.labels) or self.labels[head] != cluster:
                raise ValueError(
                    f"representatives[{cluster}] must be a head of cluster {cluster} of {self.labels}, got {head}"
                )

    @staticmethod
    def save(path: str | PathLike[str], layers: Sequence[HeadClusters]) -> None:
        """Write a model's clusterings, first layer first, as JSON."""
        rows = [{"labels": layer.labels, "representatives": layer.representatives} for layer in _layers(layers)]
        document = {"format": FORMAT, "version": VERSION, "layers": rows}
        Path(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | PathLike[str]) -> tuple[HeadClusters, ...]:
        """What `save` wrote. ValueError, naming the file, for anything else."""
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(document, dict) or (document.get("format"), document.get("version")) != (FORMAT, VERSION):
                raise ValueError(f"expected format {FORMAT!r}, version {VERSION}")
            return _layers([HeadClusters(**row) for row in document["layers"]])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} must hold head clusters, got {type(error).__name__}: {error}") from error


def _layers(value: object) -> tuple[HeadClusters, ...]:
    if not isinstance(value, (tuple, list)) or not all(isinstance(layer, HeadClusters) for layer in value):
        raise TypeError(f"layers must be a sequence of HeadClusters, got {value!r}")
    return tuple(value)


def _numbers(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or not value:
        raise TypeError(f"{name} must be a tuple of ints, got {value!r}")
    return tuple(check_integer(f"{name}[{place}]", number, minimum=0) for place, number in enumerate(value))


def check_ratio(rho: object) -> None:
    """The static share: a number from 0 to 1."""
    if isinstance(rho, bool) or not isinstance(rho, (int, float)):
        raise TypeError(f"rho must be a float, got {type(rho).__name__}: {rho!r}")
    if not 0 <= rho <= 1:
        raise ValueError(f"rho must be from 0 to 1, got {rho}")


def check_budget(k: object, rho: object) -> None:
    """The arguments of `split_budget`."""
    check_integer("k", k, minimum=1)
    check_ratio(rho)


def check_selection(query: object, key: object, occupied: object) -> Sizes:
    """query [B, Hq, D], key [B, N_r, S, D] and occupied [B, S] of the representative heads."""
    sizes = check_attention(query, key, key)
    assert isinstance(key, Tensor)
    check_mask("occupied", occupied, (sizes.batch, sizes.slots), "[B, S]", key, "key")
    return sizes


def check_initial(query: object, key: object, occupied: object, k_static: object, k_dynamic: object) -> Sizes:
    """The arguments of `initial_sets`."""
    sizes = check_selection(query, key, occupied)
    check_integer("k_static", k_static, minimum=0)
    check_integer("k_dynamic", k_dynamic, minimum=0)
    return sizes


def check_anticipation(
    query: object, key: object, occupied: object, static: object, k_dynamic: object, exclude_static: object
) -> Sizes:
    """The arguments of `anticipate`."""
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
    check_integer("k_dynamic", k_dynamic, minimum=0)
    check_flag("exclude_static", exclude_static)
    return sizes


def check_sets(first: object, second: object) -> None:
    """The arguments of `overlap`. Reads the values (a synchronisation) unless it is being compiled or captured."""
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
    """The arguments of `head_similarity`. Reads `occupied` (a synchronisation) unless compiled or captured."""
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
    """The arguments of `cluster_heads`. Reads the values. Returns the number of clusters."""
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
