"""SyncKV's functions: which tokens a few heads find important, for the heads that are like them.

Paper: "SyncKV: A Syncopated Scheduling Approach to KV Cache Compression for Efficient Long-Context LLM Inference".
Heads here are KV heads; R-heads the representative ones, one per cluster.
"""

from .contract import HeadClusters, SyncKVSetsResult
from .heads import cluster_heads, head_similarity, overlap
from .sets import anticipate, initial_sets, split_budget

__all__ = [
    "HeadClusters", "SyncKVSetsResult", "anticipate", "cluster_heads", "head_similarity", "initial_sets", "overlap",
    "split_budget",
]
