"""Large cases of functions: each size by construction, inside of what is declared."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.conformance import Capabilities, capabilities, stats
from kvtwin.conformance.judge import sizes, subjects
from kvtwin.conformance.judge.compare import Mismatch
from kvtwin.conformance.lab.implementations import longflow

SIZED = [one for one in subjects.every() if not isinstance(one, subjects.StateSubject) and one.sized]


def drawn(subject: subjects.Subject, declared: Capabilities = Capabilities()) -> list[Any]:  # noqa: B008
    found: list[Any] = []

    @settings(max_examples=1, database=None, derandomize=True)
    @given(data=st.data())
    def draw(data: Any) -> None:
        found[:] = sizes.cases(subject, data)

    with capabilities.use(declared):
        draw()
    return found


@pytest.mark.parametrize("subject", SIZED, ids=str)
def test_every_size_is_a_case(subject, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # as on a CPU
    assert [stats.slots_of(case) for case in drawn(subject)] == list(sizes.SIZES)
    assert {case.group for case in drawn(subject)} == set(sizes.GROUPS)


def test_sizes_that_are_not_declared_are_left_out(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # as on a CPU
    declared = Capabilities(max_slots=300, slots_multiple_of=16, groups=(8,), kv_heads=(2,), head_dims=(64,))
    found = drawn(SIZED[[str(one) for one in SIZED].index("longflow.decode_attention")], declared)
    assert [case.slots for case in found] == [32, 48, 64, 80, 128, 144, 256, 272]
    assert {(case.group, case.key_value_heads, case.head_dim) for case in found} == {(8, 2, 64)}


class WrongBeyond(longflow.Decode):
    """The last slots beyond 2,048 are left out."""

    def __call__(self, query: Any, key: Any, value: Any, occupied: Any, **options: Any) -> Any:
        seen = occupied & (torch.arange(occupied.shape[-1]) < 2048)
        return super().__call__(query, key, value, seen, **options)


def test_a_function_that_reads_2048_slots_is_wrong(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # as on a CPU
    subject = next(one for one in SIZED if str(one) == "longflow.decode_attention")
    module = types.SimpleNamespace(decode_attention=WrongBeyond())
    wrong = []
    for case in drawn(subject):
        try:
            subject.check(module, case, "output")
        except Mismatch:
            wrong.append(case.slots)
    assert wrong == [2049, 4097]
