"""A paged cache of three formats and KV heads that is filled, loses tokens everywhere, and is filled again.

In the interpreter, its table has many chunks, and attention many tiles of each format and chunks of logits.
"""

from __future__ import annotations

import pytest
import torch

from kvtwin.conformance.cases.paged_cases import FORMATS, empty, put
from kvtwin.conformance.judge.checkers.thinkv_paging import (
    assert_attention_right,
    assert_same_contents,
    assert_same_tables,
)

#: Tokens that arrive at a time.
EACH = 8


@pytest.mark.slow_on_cpu
@pytest.mark.kind("equivalence")
@pytest.mark.property("state")
@pytest.mark.parametrize(("dtype", "head_dim", "block", "heads", "count"), [
    (torch.float32, 16, 2, 3, 96), (torch.bfloat16, 64, 8, 1, 312), (torch.float16, 16, 8, 1, 288),
], ids=["blocks", "fragments", "large blocks"])
def test_a_table_of_many_chunks_is_as_float64_would(dtype, head_dim, block, heads, count, twins, device):
    sizes = {
        "heads": heads, "head_dim": head_dim, "block": block, "group": EACH, "tokens": count, "formats": FORMATS[3],
        "tau": 16, "sparsity_threshold": 0.3,
    }
    tested = empty(twins.optimized.thinkv, device, dtype=dtype, **sizes)
    truth = empty(twins.reference.thinkv, device, dtype=torch.float64, **sizes)
    caches = (tested, truth)
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(1, 2 * heads, head_dim, generator=generator).to(device, dtype)

    def fill(first: int, count: int) -> None:
        for start in range(first, first + count, EACH):
            for cache in caches:
                put(cache, start, EACH, thought=start // EACH % 3, segment=start // EACH % 6, dtype=dtype)

    def judge() -> None:
        assert_same_tables(tested, truth)
        assert_attention_right(twins.optimized.thinkv.decode_attention(query, tested), truth, query)

    fill(0, count)
    judge()
    # Three blocks of nine, and every fifth token of the others, in all parts of the table.
    place = torch.arange(tested.positions.shape[1], device=device)
    gone = ((place // (3 * block) % 3 == 1) | (place % 5 == 0))[None]
    last = (tested.positions[0] >= 0).nonzero()[-1]
    for marked in (gone, (place == last)[None]):                        # the second far from the first slots
        for cache in caches:
            cache.evict(marked)
        judge()
    fill(count, count // 3)
    judge()
    assert_same_contents(tested, truth, numbers=False)
