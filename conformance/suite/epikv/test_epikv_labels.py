"""Counterfactual labels and the study of layers: their arithmetic, and that a new run reproduces the stored results."""

from __future__ import annotations

import json
from importlib import resources

import pytest
import torch

from kvtwin.fixtures import counterfactual as labels
from kvtwin.fixtures.load import load_model, load_trace

pytestmark = pytest.mark.kind("golden")


def test_a_token_is_important_if_any_window_that_contains_it_is():
    assert labels.starts(80, 32, 16) == [0, 16, 32, 48]
    found = labels.labels_of([False, True, False, False], 87, 32, 16)
    assert found[:16].tolist() == [0] * 16
    assert found[16:48].tolist() == [1] * 32
    assert found[48:80].tolist() == [0] * 32
    assert found[80:].tolist() == [-1] * 7
    assert labels.labels_of([], 31, 32, 16).tolist() == [-1] * 31


def test_ranks_and_their_correlation():
    assert labels.ranks(torch.tensor([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1.0, 3.5, 2.0]
    x = torch.arange(10.0)
    assert labels.spearman(x, x.exp()) == 1                             # multiples of 1/2, and the root of a square
    assert labels.spearman(x, -x.square()) == -1
    assert labels.spearman(x, torch.ones(10)) == 0
    mixed = torch.tensor([1.0, 0, 1, 0, 1, 0, 1, 0, 1, 0])
    found = labels.spearman(x, mixed)
    # Ranks are 3 and 8, five times each, with the mean 5.5. The sums are exact; on both sides a root and a quotient
    # are rounded.
    assert abs(found + 12.5 / (82.5 * 62.5) ** 0.5) <= 5 * 2.0**-53 * abs(found)


def test_an_answer_is_what_greedy_generation_gives():
    model = load_model()
    context = torch.tensor([list(b"\0kqz=471\nufo=902\n?kqz="), list(b"\0kqz=123\nufo=902\n?kqz=")])
    grown = context
    with torch.no_grad():
        for _ in range(3):
            grown = torch.cat((grown, model(grown)[:, -1].argmax(-1, keepdim=True)), 1)
    for right in (grown[0, -3:], grown[1, -3:], torch.tensor(list(b"902"))):
        expected = [row[-3:].tolist() == right.tolist() for row in grown]
        assert labels.answered(model, context, right).tolist() == expected


def test_the_changes_are_those_of_all_layers():
    """The output of layer l is the input of layer l + 1, and that of the last layer is the input of the norm."""
    model = load_model()
    tokens = torch.tensor([0, 65, 66, 67])
    seen = []
    with torch.no_grad():
        model(tokens[None], observe=lambda layer, x, *rest: seen.append(x[0]))
    found = labels.changes(model, tokens)
    assert found.shape == (8, 3)
    assert torch.equal(found[2], (seen[3][1:] - seen[3][:-1]).square().sum(-1).sqrt())
    assert bool((found > 0).all())


@pytest.mark.slow
def test_occluding_the_pair_changes_the_answer():
    """Stored labels: nearly every trace has important tokens, but few. The first documents are labelled again and must
    equal the stored ones."""
    stored, result = load_trace(labels.NAME), json.loads(
        resources.files("kvtwin.fixtures").joinpath("bands.json").read_text(encoding="utf-8")
    )
    found = [tensor for name, tensor in stored.tensors.items() if name.endswith(".labels")]
    assert len(found) == result["traces"] > 20
    assert sum(bool((label == 1).any()) for label in found) > 0.9 * len(found)
    assert 0 < result["important"] < 0.5
    first, _ = labels.study(load_model(), labels.Plan(documents=2))
    assert first
    for name, tensor in first.items():
        assert torch.equal(stored.tensors[name], tensor), name
    pytest.importorskip("matplotlib", reason="needs the extra plots")
    assert resources.files("kvtwin.fixtures").joinpath("bands.svg").read_text(encoding="utf-8") == labels.svg(result)
