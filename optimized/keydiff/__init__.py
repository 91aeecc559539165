"""KeyDiff on the GPU: keys are read twice, once for the sum of their directions and once for the ranks against it.

Selection is a radix search on the bits of the ranks, and what stays is gathered in order; nothing returns to the host.
At decode the sum is carried along, and one pass over the keys ranks them and puts the newest in the victim's place.
"""

from ...reference.keydiff import EvictResult, KeyDiffConfig
from .scores import evict, pairwise_score, score
from .state import KeyDiffState

__all__ = ["EvictResult", "KeyDiffConfig", "KeyDiffState", "evict", "pairwise_score", "score"]
