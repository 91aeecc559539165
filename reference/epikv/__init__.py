"""EpiKV: eviction by how much the model's representation changes with a token, without the attention matrix.

Paper: "Epiphany-Aware KV Cache Eviction Without the Attention Matrix" (arXiv 2606.26472).
"""

from .contract import EpiKVConfig
from .scorer import EpiKVScorer
from .scores import hidden_change, kv_variance, lag_kv, rolling_mean, rolling_zscore, score, select
from .state import EpiKVState

__all__ = [
    "EpiKVConfig", "EpiKVScorer", "EpiKVState", "hidden_change", "kv_variance", "lag_kv", "rolling_mean",
    "rolling_zscore", "score", "select",
]
