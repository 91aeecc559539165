"""The soak runs each test that draws once per seed, continues after an interruption, and finds tests that luck
decides."""

from __future__ import annotations

import json

import pytest
from hypothesis import settings

from kvtwin.conformance.lab import soak

pytest_plugins = ["pytester"]

TESTS = """
from hypothesis import given, settings, strategies as st
from kvtwin.conformance import stats

SEEN = {seen!r}
once = settings(max_examples=1, derandomize=False, database=None)

@once
@given(number=st.integers(0, 2**62))
def test_right(twins, number):
    with open(SEEN, "a") as file:
        file.write(f"{{number}}\\n")

@once
@given(number=st.integers(0, 7))
def test_right_by_luck(twins, number):
    assert number != 3

@once
@given(number=st.integers(0, 7))
def test_undecided_by_luck(twins, number):
    stats.decisions(10, 4 if number in (0, 3) else 10)

def test_that_draws_nothing(twins):
    raise AssertionError("not for the soak")
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Soak the tests above with some seeds. Returns the records by the names of the tests."""
    pytester.makepyfile(test_mine=TESTS.format(seen=str(pytester.path / "seen")))
    results = pytester.path / "out.jsonl"
    monkeypatch.setenv(soak.RESULTS, str(results))

    def soaked(seeds: int, *arguments: str):
        monkeypatch.setenv(soak.SEEDS, f"1:{seeds}")
        profile = ("--hypothesis-profile", settings.get_current_profile_name())
        plugins = ("-p", "no:cacheprovider", "-p", "kvtwin.conformance.lab.soak")
        pytester.runpytest_inprocess(*plugins, *profile, "--kv-device", "auto", *arguments)
        return {record["nodeid"].split("::")[1]: record for record in soak.read(results)}

    return soaked


def test_each_seed_draws_other_cases_and_luck_is_found(run, pytester):
    records = run(40)
    assert set(records) == {"test_right", "test_right_by_luck", "test_undecided_by_luck"}
    assert records["test_right"]["failures"] == []
    numbers = (pytester.path / "seen").read_text().split()
    assert len(numbers) == 80, "a test with one example, which is always the simplest, must draw two"
    assert len(set(numbers)) == 41
    assert records["test_right_by_luck"]["failures"][0].startswith("seed ")
    # It draws until it has enough decisions, and then it is right for every seed.
    assert records["test_undecided_by_luck"]["failures"] == []
    assert records["test_undecided_by_luck"]["plain_rounds"] > 0
    expected = (
        "3 tests that draw, under 0 seeds or more each: 80 runs without a false alarm, 1 tests with one; 1 tests drew "
        "plain cases under some seed"
    )
    assert soak.summary(list(records.values()))[0].startswith(expected)


def test_runs_of_other_seeds_add_up(run, pytester):
    run(2, "-k", "test_right and not luck")
    run(3, "-k", "test_right and not luck")
    records = soak.read(pytester.path / "out.jsonl")
    assert [record["count"] for record in records] == [2, 3]
    assert soak.summary(records)[0].startswith("1 tests that draw, under 5 seeds or more each: 5 runs without")


def test_it_goes_on_where_it_was_stopped(run, pytester):
    assert set(run(2, "-k", "test_right and not luck")) == {"test_right"}
    results = pytester.path / "out.jsonl"
    with results.open("a") as file:
        file.write('{"nodeid": "cut of\n')  # as after a run that is killed while it writes
    assert len(run(2)) == 3
    names = [record["nodeid"] for record in soak.read(results)]
    assert len(names) == len(set(names)) == 3, "finished tests must not run again"
    assert len((pytester.path / "seen").read_text().split()) == 4


def test_a_test_with_a_false_alarm_runs_again_and_its_last_record_counts(run, pytester):
    assert run(40)["test_right_by_luck"]["failures"]
    path = pytester.path / "test_mine.py"
    path.write_text(path.read_text().replace("assert number != 3", "pass"))
    assert run(40)["test_right_by_luck"]["failures"] == []
    assert len((pytester.path / "seen").read_text().split()) == 80, "test_right must not run again"


def test_a_file_with_a_false_alarm_is_no_success(tmp_path, monkeypatch):
    results = tmp_path / "out.jsonl"
    record = {"nodeid": "a", "first": 1, "count": 2, "seconds": 1.0, "plain_rounds": 0, "failures": []}
    for name in (soak.SEEDS, soak.RESULTS):
        monkeypatch.setenv(name, "")  # main sets them
    monkeypatch.setattr(soak.pytest, "main", lambda arguments: pytest.ExitCode.NO_TESTS_COLLECTED)
    results.write_text(json.dumps(record) + "\n")
    assert soak.main(["--results", str(results)]) == 0
    results.write_text(json.dumps({**record, "failures": ["seed 1: wrong"]}) + "\n")
    assert soak.main(["--results", str(results)]) == 1


@pytest.mark.parametrize("seeds", ["0", "-3", "many"])
def test_a_wrong_number_of_seeds_is_refused(tmp_path, seeds, capsys):
    with pytest.raises(SystemExit, match="2"):
        soak.main([f"--seeds={seeds}"])
    assert "--seeds" in capsys.readouterr().err


def test_a_record_adds_up():
    record = soak.Record("a", 1, 2)
    with soak.stats.collect() as counted:
        record.add(counted)
        assert record.shares == [], "nothing must be recorded"
        soak.stats.decisions(0, 0)
        record.add(counted)
        soak.stats.decisions(4, 3)
        record.add(counted)
        soak.stats.decisions(4, 4)
        record.add(counted)
    assert (record.shares, record.least_decisions, record.undecided) == ([0.75, 0.875], 0, 1)
    assert json.loads(json.dumps(vars(record)))["nodeid"] == "a"
