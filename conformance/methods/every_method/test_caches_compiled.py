"""Decode steps that `generate` compiles: the bits of plain steps, by one graph without breaks, for each cache that says
that it is compileable."""

from __future__ import annotations

import functools
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers: python -m pip install 'kvtwin[hf]'")

from transformers import CompileConfig
from transformers.masking_utils import causal_mask_function

from kvtwin.conformance.judge.compare import assert_same
from kvtwin.conformance.methods.every_method.test_caches_captured import (
    CACHES,
    FIRST,
    assert_equal,
    assert_same_caches,
    generated,
    make,
    shifted,
)
from kvtwin.conformance.methods.support import tiny_models
from kvtwin.conformance.methods.support.captured_cases import feed, h2o, made
from kvtwin.conformance.methods.support.tiny_models import prompts
from kvtwin.optimized import hf
from kvtwin.optimized.hf import captured
from kvtwin.reference.hf import masks

pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.whole]

#: States that allocate by the prompt, decide on the host, or have views among their buffers.
OTHERS = {"ThinKV", "SyncKV", "EpiKV", "CAKE"}
COMPILEABLE = [name for name, (kind, _) in CACHES.items() if kind not in OTHERS]
#: Steps that run in each test of all tests, and those that evict once in so many tokens.
QUICK = ("longflow", "h2o-once-in-four-tokens")

Run = Callable[..., tuple[Tensor, ...]]


@pytest.fixture
def compiled() -> Iterator[Callable[..., tuple[Run, list[object], Any]]]:
    with compiling() as with_backend:
        yield with_backend


@contextmanager
def compiling() -> Iterator[Callable[..., tuple[Run, list[object], Any]]]:
    """compiled(backend) returns `generated` with steps that a backend compiles, the list of graphs, and `single`."""
    from torch._dynamo.backends.registry import lookup_backend

    graphs: list[object] = []

    def with_backend(name: str = "aot_eager") -> tuple[Run, list[object], Any]:
        def backend(graph: Any, inputs: Any) -> Any:
            graphs.append(graph)
            return lookup_backend(name)(graph, inputs)

        config = CompileConfig(backend=backend, fullgraph=True, mode=None)
        config._compile_all_devices = True                          # transformers compiles only on a GPU otherwise

        def single(forward: Any) -> Any:
            """A model's forward method that compiles passes of one token."""
            graph = torch.compile(forward, backend=backend, fullgraph=True)
            return functools.wraps(forward)(
                lambda *args, **given: (graph if given["input_ids"].shape[1] == 1 else forward)(*args, **given)
            )

        def run(*args: Any, **options: Any) -> tuple[Tensor, ...]:
            return generated(*args, compile_config=config, **{"disable_compile": False, **options})

        return run, graphs, single

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")                              # warnings of the compiler do not concern us
        torch.compiler.reset()
        yield with_backend
        torch.compiler.reset()


def counted(cache: Any) -> Any:
    """The cache, whose layers have asked the device how many tokens there are."""
    for layer in cache.layers:
        layer.get_seq_length()
    return cache


def check(name: str, model: Any, run: Run, graphs: list[object], inputs: dict[str, Tensor], new: int) -> None:
    """Two prompts of one cache, and one of another: one graph has all steps."""
    cache, plain = make(name, model), make(name, model)
    assert cache.is_compileable
    for turn in range(3):
        given = shifted(inputs, turn % 2)
        assert_equal(run(model, cache, given, new), generated(model, plain, given, new))
        assert_same_caches(counted(cache), plain)
        if turn == 0:
            cache.reset()
            plain.reset()
        else:
            cache, plain = make(name, model), make(name, model)
    assert len(graphs) == 1, f"expected one graph for all steps, got {len(graphs)}"


@pytest.mark.parametrize("name", [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow_on_cpu if name in FIRST else pytest.mark.slow)
    for name in COMPILEABLE
])
def test_compiled_steps_have_the_bits_of_plain_steps(name, model, device, compiled):
    run, graphs, _ = compiled()
    check(name, model, run, graphs, prompts(9, [0, 2], device), 6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["longflow", "snapkv-once-in-four-tokens", "r_kv-once-in-four-tokens"])
def test_inductor_generates_code_of_steps(name, device):
    """In a process of its own: what other tests have imported may keep the compiler of C++ from starting."""
    code = f"import sys, torch; from {__name__} import check_inductor as f; f(sys.argv[1], torch.device(sys.argv[2]))"
    ran = subprocess.run([sys.executable, "-c", code, name, str(device)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def check_inductor(name: str, device: torch.device) -> None:
    """Inductor fuses the model's own operations, so that its logits are not bitwise equal. Its tokens are."""
    model, inputs = made("qwen3", device), prompts(9, [0, 2], device)
    cache, plain = make(name, model), make(name, model)
    with compiling() as compiled:
        run, graphs, _ = compiled("inductor")
        expected = generated(model, plain, inputs, 12)
        assert_same(run(model, cache, inputs, 12)[0], expected[0], what="tokens")
    assert_same(cache.layers[0].state.positions, plain.layers[0].state.positions, what="positions")
    assert len(graphs) == 1, f"expected one graph for all steps, got {len(graphs)}"


@pytest.mark.slow_on_cpu
@pytest.mark.parametrize("options", [{"num_beams": 2}, {"do_sample": True}], ids=str)
def test_beams_samples_turns_and_chunks(options, model, device, compiled, monkeypatch):
    """Later turns go on where compiled steps ended, with prompts in chunks and in one piece, which are not compiled.
    (transformers does not compile beam search by itself.)"""
    run, graphs, single = compiled()
    found: list[list[tuple[Tensor, ...]]] = []
    for how in (generated, run):
        if how is run and "num_beams" in options:
            monkeypatch.setattr(model, "forward", single(model.forward))
        cache, given = h2o(model), prompts(7, [0, 2], device)
        found.append([])
        for count, chunk in ((3, 4), (1, None if masks.STARTS_AT_0 else 2), (0, None)):
            torch.manual_seed(1)
            mine = how(model, cache, given, 4, prefill_chunk_size=chunk, **options)
            places = (layer.state.positions for layer in cache.layers)
            found[-1] += [mine, (torch.tensor(cache.get_seq_length()), *places)]
            if not count:
                break
            ids = torch.cat([mine[0], torch.full((2, count), 5, device=device)], 1)
            mask = torch.ones_like(ids)
            mask[:, :7] = given["attention_mask"][:, :7]
            given = {"input_ids": ids, "attention_mask": mask}
    assert len(graphs) == 1
    for mine, other in zip(*found, strict=True):
        assert_equal(mine, other)


def test_a_mask_for_the_constructor_covers_compiled_tokens(model, device, compiled):
    """The mask ends with a token that is padding in a row. After reset(), the prompt is compiled too."""
    graph, found = torch.compile(model.forward, fullgraph=True, backend="eager"), []
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 0]], device=device)
    for forward in (model.forward, graph):
        cache = hf.H2OCache(model.config, budget=6, block_size=4, attention_mask=mask)
        for first in (model.forward, forward):
            cache.reset()
            with torch.no_grad():
                first(torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]], device=device), past_key_values=cache)
                for token in (5, 3, 5):
                    forward(torch.full((2, 1), token, device=device), past_key_values=cache)
            found.append(cache.layers[1].state.positions.clone())
    for positions in found:
        assert_same(positions, found[0], what="positions")


def test_compiled_layers_heed_padding(model, device, compiled):
    """With `layer.compile()`, the mask of any number of tokens is made before the graph, as `generate` makes a
    step's."""
    mask, found = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]], device=device), []
    for compiles in (False, True):
        cache = h2o(model)
        feed(model, cache, [[3, 1, 4], [1, 5, 9]])
        for layer in model.model.layers if compiles else ():
            layer.compile(backend="eager")
        feed(model, cache, [[2, 6], [5, 3]], attention_mask=mask)
        found.append(cache.layers[1].state.positions)
    assert_same(found[1], found[0], what="positions")


def test_a_compiled_step_after_an_interrupted_one_is_refused(compiled):
    """On the CPU even if --kv-device is cuda: after a failed assertion on CUDA, the process cannot use the GPU."""
    if torch.cuda.is_available():
        pytest.skip("kernels take no tensors of the CPU beside a GPU")
    model = made("qwen3", torch.device("cpu"))
    cache = h2o(model)
    feed(model, cache, [[3, 1, 4]])
    graph = torch.compile(model.forward, fullgraph=True, backend="eager")
    with torch.no_grad():
        graph(torch.tensor([[5]]), past_key_values=cache)
        cache.layers[0].state._seen.add_(1)                         # as after an error in the second layer
        with pytest.raises(RuntimeError, match=r"interrupted: call reset\(\)"):
            graph(torch.tensor([[5]]), past_key_values=cache)
        with pytest.raises(RuntimeError, match=r"interrupted: call reset\(\)"):
            model(torch.tensor([[5]]), past_key_values=cache)


@pytest.mark.kind("bad_input")
@pytest.mark.parametrize(("mask", "ahead", "wanted"), [
    ([[1, 1, 1, 0]], True, "a compiled step of generate has padding"),
    ([[1, 1, 1]], False, "attention_mask has a wrong number of tokens"),
], ids=["padding", "length"])
def test_a_compiled_step_refuses_a_wrong_mask(mask, ahead, wanted, compiled):
    """On the CPU, as above."""
    if torch.cuda.is_available():
        pytest.skip("kernels take no tensors of the CPU beside a GPU")
    model, given = made("qwen3", torch.device("cpu")), torch.tensor(mask).bool()
    cache = h2o(model)
    feed(model, cache, [[3, 1, 4]])
    if ahead:                                                       # as `generate` does
        given = masks.make_mask(attention_mask=given, mask_function=causal_mask_function, q_length=1, kv_length=1)
    graph = torch.compile(model.forward, fullgraph=True, backend="eager")
    with torch.no_grad(), pytest.raises(RuntimeError, match=wanted):
        graph(torch.tensor([[5]]), attention_mask=given, past_key_values=cache)


def test_room_is_counted_in_compiled_steps_and_behind_them(compiled):
    """On the CPU, as above."""
    if torch.cuda.is_available():
        pytest.skip("kernels take no tensors of the CPU beside a GPU")
    model, token = made("qwen3", torch.device("cpu")), torch.tensor([[5]])
    cache = hf.QuestCache(model.config, budget=4, page_size=2, max_tokens=6)
    graph = torch.compile(model.forward, fullgraph=True, backend="eager")
    with torch.no_grad():
        feed(model, cache, [[3, 1, 4]])
        for forward in (graph, graph, model):
            forward(token, past_key_values=cache)
        assert not any(layer.state._behind for layer in cache.layers), "every plain step would synchronize"
        with pytest.raises(ValueError, match="max_tokens=6 is too small for 7 tokens"):
            model(token, past_key_values=cache)
        cache.reset()
        feed(model, cache, [[3, 1, 4, 1, 5]])
        graph(token, past_key_values=cache)
        assert not cache.layers[0].state._takes_a_step
        with pytest.raises(ValueError, match="max_tokens=6 is too small for 7 tokens"):
            cache.layers[1].state.step(*(torch.zeros(1, heads, 16) for heads in (4, 2, 2)))
        with pytest.raises(RuntimeError, match="max_tokens=6 is too small"):
            graph(token, past_key_values=cache)


def test_generate_is_told_before_a_compiled_step_without_room(model, device, compiled):
    run, graphs, _ = compiled()
    cache = hf.QuestCache(model.config, budget=4, page_size=2, max_tokens=12)
    # An assertion on the device, a RuntimeError, would not say how many there are.
    with pytest.raises((ValueError, RuntimeError), match="max_tokens=12 is too small for 13 tokens"):
        run(model, cache, prompts(9, [0, 2], device), 6)
    assert (cache.get_seq_length(), len(graphs)) == (12, 1)


def test_chunks_of_prompts_are_not_compiled(model, device, compiled, monkeypatch):
    run, _, _ = compiled()
    asked: list[object] = []
    monkeypatch.setattr(model, "get_compiled_call", lambda config: asked.append(config) or model.__call__)
    run(model, h2o(model), prompts(9, [0, 2], device), 2, prefill_chunk_size=4)
    assert len(asked) == 1, "only the steps are to be compiled"


def test_nothing_is_compiled_within_captured(model, device, graphs, compiled):
    run, made_graphs, _ = compiled()
    inputs = prompts(5, [0, 2], device)
    expected, cache = generated(model, h2o(model), inputs, 4), h2o(model)
    with captured(model) as steps:
        assert_equal(run(model, cache, inputs, 4), expected)
        assert not cache.is_compileable, "generate makes a mask for each replay"
    assert cache.is_compileable
    assert (steps.replays, steps.reasons, made_graphs) == (2, [], [])
    assert "get_compiled_call" not in vars(model)


def test_a_step_compiled_by_hand_within_captured_has_no_other_graph(model, device, graphs, compiled):
    cache = h2o(model)
    with captured(model) as steps, torch.no_grad():
        feed(model, cache, [[3, 1, 4]])
        graph = torch.compile(model.forward, fullgraph=True, backend="eager")
        for _ in range(3):
            graph(torch.tensor([[5]], device=device), past_key_values=cache)
    assert (steps.replays, steps.eager, cache.get_seq_length()) == (0, 0, 6)


@pytest.mark.parametrize("name", [name for name in FIRST if name not in COMPILEABLE])
def test_other_caches_do_not_claim_it(name, model):
    assert not make(name, model).is_compileable


def test_checks_of_values_are_not_compileable(model):
    assert not hf.LongFlowCache(model.config, budget=6, check_finite=True).is_compileable
    windows = tiny_models.model("qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=1)
    assert not h2o(windows).is_compileable
