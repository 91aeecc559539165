"""Right implementations in other styles than kvtwin's: the verdict on each of them must be *right*, whatever the seed.

Each module is an implementation by itself, for example ``kvtwin verify longflow --impl
kvtwin.conformance.lab.implementations.right.split_k``. The command
``python -m kvtwin.conformance.lab.mutation.power`` counts false alarms.

None of them accumulates in float16: the bounds (judge/bounds.py) assume float32 sums, whose unit roundoff is 8,192
times smaller, so such an implementation is wrong by definition.
"""

from __future__ import annotations

from typing import NamedTuple


class Style(NamedTuple):
    """methods: what the module implements; what: how it differs from kvtwin's."""

    methods: tuple[str, ...]
    what: str


#: Module -> what it is.
RIGHT: dict[str, Style] = {
    "eager": Style(("longflow",), "plain eager PyTorch in float32"),
    "in_float64": Style(("longflow",), "float64 throughout"),
    "fused": Style(("longflow",), "PyTorch's fused attention for the output; results as a mapping"),
    "split_k": Style(("longflow",), "chunks of 48 slots, merged by their log-sum-exp"),
    "descending": Style(("longflow",), "online softmax over tiles of 32 slots, from the last to the first"),
    "rounded_weights": Style(("longflow",), "weights rounded to the inputs' dtype before the product with values"),
    "tree_sums": Style(("longflow",), "every sum in float32 by halving, a tree"),
    "reversed_sums": Style(("longflow",), "every sum in float32 one by one, from the last to the first"),
    "any_tie": Style(("longflow",), "matrix products and topk: any of equal tokens, and 0 as a free slot's score"),
    "strided": Style(("longflow",), "slots first; an object with results that are not contiguous"),
    "in_numpy": Style(("longflow", "streaming_llm"), "numpy on the CPU, behind torch"),
    "scripted": Style(("longflow",), "TorchScript"),
    "gathered_pages": Style(("longflow",), "pages and FP8, gathered and multiplied by their scales first"),
    "last_slot_first": Style(("longflow",), 'a state with its slots in reverse, slot_order = "any"'),
    "loops": Style(("keydiff", "snapkv"), "Python loops over rows and heads"),
    "mapped": Style(("longflow",), "torch.vmap over rows and KV heads"),
    "appending": Style(("tova",), 'a state that appends tokens and drops the evicted ones, slot_order = "any"'),
    "unplanted": Style(("longflow", "snapkv"), "what faults are planted in: matrix products in float64"),
    "lists": Style(("streaming_llm",), 'a state of Python lists, one per KV head, slot_order = "any"'),
}
