"""Checker of SyncKV's clusterings: the similarity of heads, and every clustering that arithmetic may lead to.

k-means makes many decisions, and each depends on the ones before. So the judge follows all of them that float64
arithmetic leaves open: a head may join any center whose distance may be the least. Usually that is one, and the whole
clustering has one right answer. Distances are exact fractions, with the error of an implementation's beside them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....reference import synckv
from ....reference.synckv.heads import ITERATIONS
from ... import stats
from ...cases.synckv_cases import (
    EXTREME_WEIGHTS,
    HEAD_LAYOUTS,
    SIMILARITIES,
    TIED_SIMILARITIES,
    TIED_WEIGHTS,
    WEIGHTS,
    SimilarityCase,
    WeightsCase,
    similarity_cases,
    weights_cases,
)
from ..choices import any_of_equals
from ..compare import assert_dtype, assert_within, fail
from ..fields import Missing, field
from ..subjects import Subject, properties

#: The unit roundoff of float64.
UNIT = Fraction(1, 2**53)
#: The most clusterings of one step that are followed. If there are more, any valid clustering is right.
MOST_OPEN = 64

Labels = tuple[int, ...]
Row = Sequence[Fraction]


class Clusters(NamedTuple):
    """What `cluster_heads` returns, as tensors: labels [Hkv] and representatives [clusters], int64."""

    labels: Any
    representatives: Any


class TooManyOpen(Exception):
    """More clusterings are open than the judge follows."""


def gamma(count: int) -> Fraction:
    return count * UNIT / (1 - count * UNIT)


def distance(row: Row, center: Row, shift: Row) -> tuple[Fraction, Fraction]:
    """The squared distance of a head's row to a center, and its error. shift: the error of each coordinate.

    A difference has the error h_f = shift_f, and one rounding; its square another; a sum of F of them F - 1:
    sum_f (2 |r_f - c_f| h_f + h_f^2) + gamma(F + 3) of the whole.
    """
    apart = [abs(one - other) for one, other in zip(row, center, strict=True)]
    exact = sum((one * one for one in apart), Fraction(0))
    moved = sum((2 * one * off + off * off for one, off in zip(apart, shift, strict=True)), Fraction(0))
    return exact, moved + gamma(len(apart) + 3) * (exact + moved)


@dataclass
class Search:
    """All clusterings that may follow from a similarity. total, decisive: the decisions on the first way through, and
    those that had one right answer."""

    rows: list[list[Fraction]]
    clusters: int
    total: int = 0
    decisive: int = 0

    @classmethod
    def start(cls, similarity: Tensor, clusters: int) -> Search:
        table = [[Fraction(value) for value in row] for row in similarity.double().tolist()]
        top = max(map(max, table))
        return cls([[top - value for value in row] for row in table], clusters)

    @property
    def heads(self) -> range:
        return range(len(self.rows))

    def found(self) -> set[tuple[Labels, Labels]]:
        """All right (labels, representatives). Raises TooManyOpen."""
        open_labels: set[Labels] = set()
        for chosen in self.starts():
            open_labels |= self.assigned([self.rows[head] for head in chosen], first=True)
        for _ in range(ITERATIONS - 1):
            following: set[Labels] = set().union(*(self.assigned(self.centers(labels)) for labels in open_labels))
            self.few(following)
            if following == open_labels:
                break
            open_labels = following
        return {(labels, one) for labels in open_labels for one in self.representatives(labels)}

    def few(self, found: Collection[Any]) -> None:
        if len(found) > MOST_OPEN:
            raise TooManyOpen

    def starts(self) -> list[Labels]:
        """The heads that may be the first centers."""
        starts: list[Labels] = [(0,)]
        while len(starts[0]) < self.clusters:
            longer = []
            for chosen in starts:
                nearest = []
                for head in self.heads:
                    pairs = [self.to_center(head, self.rows[center], center) for center in chosen]
                    nearest.append((min(one - off for one, off in pairs), min(one + off for one, off in pairs)))
                longer += [(*chosen, head) for head in self.largest(nearest, self.heads)]
            starts = longer
            self.few(starts)
        return starts

    def to_center(self, head: int, center: Row, of: int | None = None) -> tuple[Fraction, Fraction]:
        """The distance and its error. of: the head whose row the center is."""
        own = self.rows[head]
        if of is not None and own == self.rows[of]:
            return Fraction(0), Fraction(0)
        members = len(self.rows)
        most = max(map(max, self.rows))
        # max(S) - S is rounded in the row and in the center, which is a mean of at most all heads.
        shift = [UNIT * (one + most) + gamma(members + 2) * most * (of is None) for one in own]
        return distance(own, center, shift)

    def largest(self, ends: Sequence[tuple[Fraction, Fraction]], among: Iterable[int]) -> list[int]:
        """The heads whose number may be the largest, by its ends; of heads with equal rows the first."""
        among = list(among)
        most = max(ends[head][0] for head in among)
        return self.decided(among, [head for head in among if ends[head][1] >= most])

    def decided(self, among: Sequence[int], best: list[int]) -> list[int]:
        if not any_of_equals():
            best = [head for head in best if not any(
                self.rows[other] == self.rows[head] for other in best if other < head
            )]
        if len(among) > 1:
            self.total, self.decisive = self.total + 1, self.decisive + (len(best) == 1)
        return best

    def centers(self, labels: Labels) -> list[list[Fraction]]:
        found = []
        for cluster in range(self.clusters):
            members = [self.rows[head] for head in self.heads if labels[head] == cluster]
            found.append([sum(column, Fraction(0)) / len(members) for column in zip(*members, strict=True)])
        return found

    def assigned(self, centers: Sequence[Row], *, first: bool = False) -> set[Labels]:
        """The labels that may follow from the centers, none of which stays without heads. first: centers are rows of
        heads, so that equal ones are equal in any arithmetic."""
        options: list[list[int]] = []
        pairs = [[self.to_center(head, center) for center in centers] for head in self.heads]
        if first:
            for head, center in product(self.heads, range(self.clusters)):
                if self.rows[head] == list(centers[center]):
                    pairs[head][center] = (Fraction(0), Fraction(0))
        for row in pairs:
            least = min(one + off for one, off in row)
            best = [number for number, (one, off) in enumerate(row) if one - off <= least]
            if first and not any_of_equals():
                best = [one for one in best if not any(centers[other] == centers[one] for other in best if other < one)]
            self.total, self.decisive = self.total + 1, self.decisive + (len(best) == 1)
            options.append(best)
        count = 1
        for best in options:
            count *= len(best)
        if count > MOST_OPEN:
            raise TooManyOpen
        found: set[Labels] = set()
        for labels in product(*options):
            found |= self.filled(list(labels), pairs, 0)
        return found

    def filled(self, labels: list[int], pairs: list[list[tuple[Fraction, Fraction]]], cluster: int) -> set[Labels]:
        """The same with a head in each cluster from `cluster` on: the farthest from its own center, of those that are
        not alone."""
        while cluster < self.clusters and cluster in labels:
            cluster += 1
        if cluster == self.clusters:
            return {tuple(labels)}
        ends = [(one - off, one + off) for one, off in (pairs[head][labels[head]] for head in self.heads)]
        found: set[Labels] = set()
        for head in self.largest(ends, [one for one in self.heads if labels.count(labels[one]) > 1]):
            found |= self.filled([*labels[:head], cluster, *labels[head + 1:]], pairs, cluster + 1)
        return found

    def representatives(self, labels: Labels) -> set[Labels]:
        """The heads that may be the nearest to their cluster's mean. Two heads are equally near."""
        options = []
        for cluster, center in enumerate(self.centers(labels)):
            members = [head for head in self.heads if labels[head] == cluster]
            if len(members) <= 2 and not any_of_equals():
                options.append(members[:1])
                continue
            ends = [(Fraction(0), Fraction(0))] * len(self.rows)
            for head in members:
                one, off = self.to_center(head, center)
                ends[head] = (-one - off, -one + off)
            options.append(self.largest(ends, members))
        return set(product(*options))


def judge_clusters(actual: Clusters, case: SimilarityCase) -> None:
    """actual: what `cluster_heads(**case.inputs)` returns."""
    search = Search.start(case.tensor("similarity"), case.clusters)
    right: set[tuple[Labels, Labels]] | None = None
    try:
        right = search.found()
    except TooManyOpen:
        search.decisive = 0
    labels = None
    with field("labels"):
        labels = _numbers(actual.labels, case.heads, case.clusters, "labels")
        if set(labels) != set(range(case.clusters)):
            fail(f"labels: expected each of {case.clusters} clusters, got {labels}")
        among = sorted({one for one, _ in right}) if right is not None else [labels]
        if labels not in among:
            fail(f"labels: expected {_shown(among)}, got {labels}")
        stats.decisions(search.total, search.decisive)
    with field("representatives"):
        found = _numbers(actual.representatives, case.clusters, case.heads, "representatives")
        fitting = sorted({one for of, one in right or () if labels in (None, of)} or {one for _, one in right or ()})
        if right is not None and found not in fitting:
            fail(f"representatives: expected {_shown(fitting)}, got {found}")
        if right is None and labels is not None and [labels[head] for head in found] != list(range(case.clusters)):
            fail(f"representatives: expected a head of each cluster of {labels}, got {found}")
        stats.decisions(case.clusters, case.clusters if right is not None and len(fitting) == 1 else 0)


def _numbers(value: Any, count: int, below: int, what: str) -> Labels:
    found = tuple(value.tolist())
    if len(found) != count or not all(0 <= one < below for one in found):
        fail(f"{what}: expected {count} numbers from 0 to {below - 1}, got {found}")
    return found


def _shown(among: Sequence[Labels]) -> str:
    return " or ".join(map(str, among[:4])) + (" or others" if len(among) > 4 else "")


class ClusterSubject(Subject):
    """`cluster_heads`, whose result is no tuple of tensors."""

    def result(self, module: Any, inputs: dict[str, Any]) -> Clusters:
        found = super().result(module, inputs)
        device = inputs["similarity"].device
        if isinstance(found, tuple) and len(found) == 2:
            found = dict(zip(Clusters._fields, found, strict=True))
        parts = {name: _part(found, name) for name in Clusters._fields}
        if all(one is None for one in parts.values()):
            raise TypeError(f"cluster_heads returned a {type(found).__name__}; expected labels and representatives")
        return Clusters(*(
            Missing(f"{module}.cluster_heads: {name}") if one is None else torch.as_tensor(one, device=device).long()
            for name, one in parts.items()
        ))


def _part(found: Any, name: str) -> Any:
    return found.get(name) if isinstance(found, Mapping) else getattr(found, name, None)


def judge_similarity(actual: Tensor, case: WeightsCase) -> None:
    """actual: what `head_similarity(**case.inputs)` returns. The tokens of each head follow from the given weights. An
    overlap is rounded once, a mean of `steps` of them `steps` times more, on both sides; a division may be a product.
    """
    with field("similarity"):
        assert_dtype(actual, torch.float64, what="similarity")
        given = {**case.inputs, "attention": case.tensor("attention").double()}
        truth = synckv.head_similarity(**given)
        assert_within(actual, truth, truth * float(2 * gamma(case.batch + 4)), what="similarity")
        pairs = case.batch * case.heads * (case.heads - 1) // 2
        stats.decisions(pairs, pairs)


def subjects() -> Iterator[Subject]:
    yield Subject(
        "head_similarity", weights_cases, judge_similarity, choices=("similarity",), batched=False,
        properties=properties(ordinary=WEIGHTS, tied=TIED_WEIGHTS, extreme=EXTREME_WEIGHTS, masked=("random",) * 4,
                        layout=HEAD_LAYOUTS),
    )  # fmt: skip
    yield ClusterSubject(
        "cluster_heads", similarity_cases, judge_clusters, choices=("labels", "representatives"), sized=None,
        batched=False, properties=properties(ordinary=SIMILARITIES, tied=TIED_SIMILARITIES, layout=HEAD_LAYOUTS),
    )


def replay(case: Any, module: Any) -> Iterator[str]:
    """Judge a saved case again."""
    for one in subjects():
        if type(case) is {"head_similarity": WeightsCase, "cluster_heads": SimilarityCase}[one.name]:
            one.judge(one.call(module, case), case)
            yield f"{one.name}: right"
