"""Where `captured` captures nothing: the bits of plain steps, and one warning that says why."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers: python -m pip install 'kvtwin[hf]'")

from transformers import DynamicCache

import kvtwin.reference.hf
from kvtwin.conformance.cases.graphs import capture
from kvtwin.conformance.methods.support import stand_in
from kvtwin.conformance.methods.support.captured_cases import assert_logits, decode, feed, h2o, made
from kvtwin.conformance.methods.support.tiny_models import VOCABULARY
from kvtwin.optimized import hf
from kvtwin.optimized.hf import captured
from kvtwin.reference.hf.cache_adapter import ARGUMENT

pytestmark = [pytest.mark.kind("bad_input"), pytest.mark.usefixtures("graphs"), pytest.mark.whole]


def asks(model: Any) -> None:
    """The rotation depends on the number of tokens, on the host."""
    inner = model.model
    forward, rotate = inner.forward, inner.rotary_emb.forward

    def noted(*args: Any, **kwargs: Any) -> Any:
        inner.kept = [kwargs[ARGUMENT]]
        return forward(*args, **kwargs)

    inner.forward = noted
    inner.rotary_emb.forward = lambda x, position_ids: rotate(x, position_ids + inner.kept[0].get_seq_length())


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "gradients are enabled": torch.enable_grad,
    "autocast is enabled": lambda: torch.autocast("cuda" if torch.cuda.is_available() else "cpu"),
}


@pytest.mark.parametrize(("reason", "change"), [
    ("gradients are enabled", lambda model: [weight.requires_grad_(False) for weight in model.parameters()]),
    ("evaluation mode", lambda model: model.model.layers[0].train()),
    ("have forward hooks", lambda model: model.model.layers[0].register_forward_hook(lambda *_: None)),
    ("hooks of accelerate", lambda model: setattr(model.model.layers[0], "_hf_hook", None)),
    ("must be on one device", lambda model: model.model.register_buffer("other", torch.empty(1, device="meta"))),
    ("computes with the number of tokens", asks),
])
def test_models_without_graphs_run_as_before(reason, change, model, device):
    other = made("qwen3", device)
    change(other)
    change(model)
    inside = CONTEXTS.get(reason, torch.no_grad)

    def run(model: Any) -> list[Tensor]:
        cache, ids = h2o(model), torch.tensor([[5]], device=model.device)
        logits = [feed(model, cache, [[3, 1, 4]])]
        with inside():
            return logits + [model(ids, **{ARGUMENT: cache}).logits.detach() for _ in range(4)]

    expected = run(other)
    with captured(model) as steps, pytest.warns(UserWarning, match=reason) as caught:
        assert_logits(run(model), expected)
    assert len(caught) == 1
    assert (steps.replays, steps.eager) == (0, 4)


@pytest.mark.parametrize(("reason", "family", "make"), [
    ("a DynamicCache is no cache of", "qwen3", lambda model: DynamicCache(config=model.config)),
    ("reference", "qwen3", lambda model: kvtwin.reference.hf.H2OCache(model.config, budget=6, block_size=4)),
    ("LongFlow.* cannot|check_finite", "qwen3", lambda model: hf.LongFlowCache(
        model.config, budget=6, check_finite=True)),
    ("DynamicSlidingWindowLayer", "qwen2", h2o),
])
def test_caches_without_graphs_run_as_before(reason, family, make, device):
    options = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1} if family == "qwen2" else {}
    model = made(family, device, **options)
    expected = decode(model, make(model), 4)
    with captured(model) as steps, pytest.warns(UserWarning, match=reason) as caught:
        assert_logits(decode(model, make(model), 4), expected)
    assert len(caught) == 1
    assert steps.replays == 0


def test_inside_of_another_capture_the_pass_is_part_of_it(model, device):
    cache = h2o(model)
    with captured(model) as steps:
        decode(model, cache, 4)
        ids = torch.tensor([[5]], device=device)
        inside = stand_in.capturing() if device.type == "cpu" else capture(torch.cuda.CUDAGraph())
        with torch.no_grad(), pytest.warns(UserWarning, match="another graph is being captured"), inside:
            model(ids, **cache.argument)
        assert steps.replays == 3


def test_a_model_is_captured_once(model, device):
    other = made("llama", device)
    with captured(model), captured(other):
        with pytest.raises(RuntimeError, match="active already"), captured(model):
            pass
        decode(other, h2o(other), 3)
    with pytest.raises(TypeError, match="model must be a transformers model, got str"), captured("model"):
        pass


def test_the_cpu_has_no_graphs(monkeypatch, device):
    """Beside a GPU, kernels take no tensors of the CPU, but the reference does."""
    monkeypatch.undo()                                              # the stand-in
    model = made("llama", torch.device("cpu"))
    interpreted = device.type == "cpu"
    cache = h2o(model) if interpreted else kvtwin.reference.hf.H2OCache(model.config, budget=6, block_size=4)
    says = "on cpu, and only a CUDA device has graphs" if interpreted else "reference"
    with captured(model) as steps, pytest.warns(UserWarning, match=says):
        decode(model, cache, 3)
    assert steps.replays == 0


def test_arguments_that_change_at_each_step(model):
    """Each is a kind of its own: none is captured, and the table of kinds does not grow."""
    cache = h2o(model)
    feed(model, cache, [[3, 1, 4]])
    with captured(model) as steps:
        for step in range(40):
            with pytest.warns(UserWarning, match="arguments change from") if step == 16 else nullcontext():
                feed(model, cache, [[step % VOCABULARY]], logits_to_keep=step)
        assert len(steps._caches[cache].steps) <= 16
    assert steps.replays == 0
