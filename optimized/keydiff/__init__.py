"""KeyDiff on the GPU: keys are read twice, once for the sum of normalized keys and once for the ranks against it.

Selection is a radix search on the bits of the ranks, and the kept tokens are gathered in order, all on the device. A
decode step updates the sum incrementally. It ranks the keys in one pass and overwrites the evicted token.
"""

from ...reference.contract import Pages
from ...reference.keydiff import EvictResult, KeyDiffConfig, PagedEvictResult
from .paged import paged_evict, paged_score
from .scores import evict, pairwise_score, score
from .state import KeyDiffState

__all__ = [
    "EvictResult", "KeyDiffConfig", "KeyDiffState", "PagedEvictResult", "Pages", "evict", "paged_evict", "paged_score",
    "pairwise_score", "score",
]
