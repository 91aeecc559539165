"""SnapKV: `SnapKVCluster.update_kv` beside `snapkv.compress`."""

from __future__ import annotations

from collections.abc import Iterator

from .....reference.baselines import snapkv
from ..checkout import Checkout, Project
from ..comparison import Comparison, Count, at_positions, held
from ..inputs import double, repeated, tokens


def compare(checkout: Checkout) -> Iterator[Comparison]:
    cluster = checkout.load("snapkv.monkeypatch.snapkv_utils", bare=("snapkv", "snapkv.monkeypatch")).SnapKVCluster
    for group in (1, 4):
        plain, under = Count(), Count()
        for seed, (total, budget, window, width) in enumerate(
            (total, budget, window, width)
            for total in (70, 129) for budget, window in ((24, 8), (48, 32)) for width in (5, 7) for _ in range(2)
        ):
            query, key, value = tokens(seed, total, heads=2, query_heads=2 * group)
            keys, values = repeated(key, group), repeated(value, group)
            with double():
                theirs, _ = cluster(window, budget, width).update_kv(keys, query, values, None, group)
            kept = held(theirs, keys)                                              # [B, Hq, T]
            ours = snapkv.compress(query[:, :, -window:], key, value, budget, kernel_size=width).kept
            plain.add(kept, repeated(at_positions(ours, total), group))
            each = snapkv.compress(query[:, :, -window:], keys, values, budget, kernel_size=width).kept
            under.add(kept, at_positions(each, total))
        if group == 1:
            yield Comparison("prompt tokens kept, one query head per KV head", "decisions", plain)
        else:
            yield Comparison(
                f"prompt tokens kept, {group} query heads per KV head", "decisions", plain, ("snapkv.heads",), under,
                "keys and values repeated for each query head",
            )


PROJECT = Project(
    "https://github.com/FasterDecoding/SnapKV", "e216ddc84c5bd210378cbdbbba12ba02102aa640",
    ("snapkv/monkeypatch/snapkv_utils.py",), compare,
)
