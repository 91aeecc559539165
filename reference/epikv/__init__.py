"""EpiKV: evict the tokens that change the model's hidden state least, without computing attention weights.

Paper: "Epiphany-Aware KV Cache Eviction Without the Attention Matrix" (arXiv 2606.26472).
"""

from ..contract.epikv.config import EpiKVConfig
from .scorer import EpiKVScorer
from .scores import hidden_change, kv_variance, lag_kv, rolling_mean, rolling_zscore, score, select
from .state import EpiKVState

__all__ = [
    "EpiKVConfig", "EpiKVScorer", "EpiKVState", "hidden_change", "kv_variance", "lag_kv", "rolling_mean",
    "rolling_zscore", "score", "select",
]
