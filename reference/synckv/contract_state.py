"""The arguments of SyncKV's state, checked for both sides. No mathematics."""

from __future__ import annotations

from .contract import HeadClusters, SyncKVConfig


def check_room(seen: int, more: int, most: int) -> None:
    """ValueError where a state would see more tokens than it has room for."""
    if seen + more > most:
        raise ValueError(f"max_tokens must be at least the {seen + more} tokens that come, got {most}")


def check_config(config: object) -> None:
    if not isinstance(config, SyncKVConfig):
        raise TypeError(f"config must be a SyncKVConfig, got {type(config).__name__}")


def resolve_clusters(head_clusters: object, clusters: int, heads: int) -> HeadClusters:
    """A layer's clusters, checked against its heads; None: runs of neighbours of about one length, the first of each
    its representative, which is what one can say of a model that was not looked at."""
    if head_clusters is None:
        if clusters > heads:
            raise ValueError(f"clusters must be at most the {heads} KV heads, got {clusters}")
        labels = [head * clusters // heads for head in range(heads)]
        return HeadClusters(tuple(labels), tuple(labels.index(cluster) for cluster in range(clusters)))
    if not isinstance(head_clusters, HeadClusters):
        raise TypeError(f"head_clusters must be HeadClusters or None, got {type(head_clusters).__name__}")
    if len(head_clusters.labels) != heads:
        raise ValueError(f"head_clusters must be of the {heads} KV heads, got {len(head_clusters.labels)} labels")
    if len(head_clusters.representatives) != clusters:
        raise ValueError(
            f"head_clusters must have the config's {clusters} clusters, got {len(head_clusters.representatives)}"
        )
    return head_clusters
