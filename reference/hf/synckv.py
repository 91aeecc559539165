"""SyncKV's cache for transformers, on the eager reference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from ..synckv.contract import HeadClusters
from ..synckv.heads import cluster_heads, head_similarity
from ..synckv.sets import log_weights
from ..synckv.state import SyncKVState
from .plug_synckv import SyncCache, layer_similarities


class SyncKVCache(SyncCache):
    """A SyncKV cache for `generate`, in float64 to bfloat16: no token is evicted, but most heads attend to few.

        model.set_attn_implementation("kvtwin")
        clusters = head_clusters(model, texts, k=64)
        cache = SyncKVCache(model.config, k=1024, head_clusters=clusters, max_tokens=32768)
        model.generate(ids, past_key_values=cache)

    k: tokens that a head attends to which does not look for itself, beside the newest ones. head_clusters: of each
    layer of the model its clusters, as `head_clusters` finds them and `HeadClusters.save` keeps them; None: heads in
    `clusters` runs, as `resolve_clusters` says, of a model that was not looked at. The other options are
    SyncKVConfig's: rho, stride, phase, clusters, exclude_static, max_tokens, offload. spread=True: layer i has the
    phase i mod stride, so that layers anticipate by turns. Each layer's `cache.layers[i].state` is a `SyncKVState`.

    The first forward pass is the prompt, which R-heads choose from; all later tokens are decode steps, one at a time,
    be they a further chunk of the prompt. ValueError beyond max_tokens, and for clusters of other layers or heads.
    Other arguments, padding and errors: `StateCache`.
    """

    State = SyncKVState


def head_clusters(
    model: Any, texts: Iterable[Tensor | Mapping[str, Tensor]], *, k: int, clusters: int = 2, steps: int = 64
) -> tuple[HeadClusters, ...]:
    """A model's clusters (SyncKV B.1), first layer first, for models all of whose layers have full attention.

    texts: input ids [B, T] or the model's keyword arguments, on its device; the last `steps` tokens of each are looked
    at, with the k tokens that they attend to most. See `plug_synckv.layer_similarities`, which keeps no attention.
    """
    found = layer_similarities(
        model, texts, k=k, steps=steps, log_weights=log_weights, head_similarity=head_similarity
    )
    return tuple(cluster_heads(similarity, clusters) for similarity in found)
