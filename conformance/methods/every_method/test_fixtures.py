"""The fixtures: the model is a Llama, its files agree with the manifest, and its traces can be recorded again."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtwin.fixtures import decoder, load, record, tasks

pytestmark = pytest.mark.whole

# transformers imports triton and emits warnings, so it runs in a separate process.
HUGGING_FACE = """
import sys
import torch
from kvtwin.fixtures import load, tasks
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama

def norm(self, x):  # Hugging Face computes norms in float32 always; so that float64 can be compared, in float64
    return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon))

modeling_llama.LlamaRMSNorm.forward = norm
ours = load.load_model()
theirs = LlamaForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float64)
position = torch.arange(300)[None]
rotary = theirs.model.rotary_emb(torch.ones(1, dtype=torch.float64), position)
cos, sin = (torch.cat((table[:300], table[:300]), -1)[None] for table in (ours.cos, ours.sin))
theirs.model.rotary_emb.forward = lambda x, position_ids: (cos.to(x.dtype), sin.to(x.dtype))
tokens = torch.frombuffer(bytearray(b"\\0" + load.load_text("alice")[:299]), dtype=torch.uint8).long()[None]
with torch.no_grad():
    logits = theirs(tokens).logits
torch.save((rotary, logits), sys.argv[2])
"""


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the fixtures' data in a temporary folder, from which everything is loaded during the test."""
    for name in (*record.DATA_FOLDERS, load.MANIFEST):
        source = record.FOLDER / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    monkeypatch.setattr(load, "ROOT", tmp_path)
    monkeypatch.setattr(record, "FOLDER", tmp_path)
    return tmp_path


def _flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def _tamper(copy: Path, name: str, tensor: str) -> None:
    """Change one number of a trace, and update the manifest to agree with the file."""
    trace = load.load_trace(name)
    trace.tensors[tensor].view(-1)[0] += 1
    record.write_trace(name, trace)
    record.write_manifest()


# The model


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers (the extra hf)")
def test_hugging_face_llama_gives_the_same_logits(tmp_path: Path) -> None:
    model, result = record.FOLDER / "model", tmp_path / "theirs.pt"
    subprocess.run([sys.executable, "-W", "ignore", "-c", HUGGING_FACE, model, result], check=True)
    rotary, theirs = torch.load(result, weights_only=True)
    tokens = torch.frombuffer(bytearray(b"\0" + load.load_text("alice")[:299]), dtype=torch.uint8).long()[None]
    exact, rough = load.load_model(torch.float64)(tokens), load.load_model(torch.float32)(tokens)
    # The same computation in float64, with sums in another order, as on another machine.
    assert (theirs - exact).abs().max() <= record.machine_error(exact, rough)

    # Their rotary tables against ours. Their float32 frequencies are a float32 power and a reciprocal, with errors of
    # at most 2 ulp and 1/2 ulp. The product rounds once more. cos and sin have slopes up to 1 and an error of at most
    # an ulp of 1.
    ours = load.load_model()
    frequency = 10000.0 ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32)
    angle = torch.arange(300, dtype=torch.float64)[:, None] * frequency
    for table, mine in zip(rotary, (ours.cos, ours.sin), strict=True):
        error = (table[0, :, :16].double() - mine[:300].double()).abs()
        assert (error <= angle * 8 * 2.0**-24 + 2.0**-23).all()


def test_decoding_step_by_step_is_the_same_as_one_pass() -> None:
    tokens = torch.frombuffer(bytearray(b"\0" + load.load_text("alice")[:47]), dtype=torch.uint8).long()[None]
    model = load.load_model(torch.float64)
    exact, rough = model(tokens), load.load_model(torch.float32)(tokens)
    cache = decoder.FullCache()
    parts = [model(tokens[:, :40], attend=cache)]
    parts += [model(tokens[:, at : at + 1], start=at, attend=cache) for at in range(40, 48)]
    assert (torch.cat(parts, 1) - exact).abs().max() <= record.machine_error(exact, rough)


def test_positions_past_the_last_are_refused() -> None:
    with pytest.raises(ValueError, match="reach position 4096; the last position is 4095"):
        load.load_model()(torch.zeros(1, 1, dtype=torch.int64), start=4096)


def test_model_recalls_and_eviction_hurts() -> None:
    """The figures in the last line of the log, and a new measurement of a small sample."""
    final = json.loads(load.load_bytes("model/training_log.jsonl").splitlines()[-1])
    assert final["final"] and final["weights"] == "bfloat16"
    assert final["recall"] >= 0.95
    assert final["recall_streaming_llm"] <= 0.5
    model = load.load_model()
    documents = tasks.held_out_recall(4, seed=2, ask_from=0.8, ask_share=1.0)
    streaming = decoder.masked_attention(tasks.streaming_mask(1024, 128))
    assert sum(len(document.queries) for document in documents) >= 40
    assert tasks.recall_accuracy(model, documents) >= 0.9  # a sample of about 50 queries, so less than 95 % is required
    assert tasks.recall_accuracy(lambda tokens: model(tokens, attend=streaming), documents) <= 0.5


# The files


def test_texts_are_ascii_and_everything_is_small() -> None:
    paths = load.manifest()
    texts = [path for path in paths if path.endswith(".txt")]
    assert sorted(texts) == sorted(f"texts/{name}.txt" for name in (*tasks.TRAINING_TEXTS, tasks.HELD_OUT_TEXT))
    assert all(load.load_bytes(path).isascii() for path in texts)
    assert sum(len(load.load_bytes(path)) for path in paths) < 25e6
    assert len(load.load_bytes("model/model.safetensors")) < 8e6


@pytest.mark.parametrize(
    ("path", "use"),
    [
        ("texts/alice.txt", lambda: load.load_text("alice")),
        ("model/model.safetensors", load.load_model),
        ("model/config.json", load.load_model),
        ("traces/capture.safetensors", lambda: load.load_trace("capture")),
        ("traces/longflow.safetensors", lambda: load.load_trace("longflow")),
    ],
)
def test_a_flipped_bit_or_a_missing_file_is_an_error(path: str, use, copy: Path) -> None:
    use()
    _flip(copy / path, -2)
    with pytest.raises(load.FixtureError, match=f"{path} was changed: its sha256 is"):
        use()
    assert record.check(None, False) == [f"MANIFEST.json: {path} was changed"]
    (copy / path).unlink()
    with pytest.raises(load.FixtureError, match=f"{path} is in MANIFEST.json, but the file is missing"):
        use()


def test_unknown_names_and_a_missing_manifest_are_errors(copy: Path) -> None:
    with pytest.raises(load.FixtureError, match=r"texts/nothing\.txt is not in MANIFEST\.json; it lists .*alice"):
        load.load_text("nothing")
    with pytest.raises(load.FixtureError, match="not in MANIFEST"):
        load.load_text("../decoder.py")
    with pytest.raises(load.FixtureError, match="not a trace file"):
        load.parse_trace(b"anything else")
    (copy / load.MANIFEST).unlink()
    with pytest.raises(load.FixtureError, match=r"MANIFEST\.json is missing"):
        load.load_text("alice")


# The traces


@pytest.mark.slow
def test_check_passes_and_the_traces_are_whole(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert record.main(["--check"]) == 0
    assert "fixtures are as recorded" in capsys.readouterr().out
    capture = load.load_trace("capture")
    plan = record.plan_of(capture)
    assert plan.text == tasks.HELD_OUT_TEXT
    assert plan.steps >= 256
    for name, tensor in capture.tensors.items():
        if tensor.is_floating_point():
            assert tensor.dtype == torch.bfloat16 and tensor.isfinite().all(), name
    longflow = load.load_trace("longflow")
    cases = longflow.metadata["cases"].values()
    assert len({case["layer"] for case in cases}) >= 2
    assert len({case["config"]["budget"] for case in cases}) >= 2


@pytest.mark.slow
def test_recording_again_changes_nothing(copy: Path) -> None:
    """On one machine, every recording has the same bytes. (Matrix products of another processor may differ in their
    last bits. --check compares the stored data with a new recording within bounds.)"""
    record.record(None, traces_only=False)
    before = record.hashes()
    record.record(None, traces_only=False)
    assert record.hashes() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "problems"),
    [
        ("longflow", {
            "3.64.next_slot": "differs at 1 of", "6.128.kept": "differs at 1 of", "6.64.checksum": "differs by up to 1",
        }),
        ("capture", {"6.key": "differs by up to", "tokens": "differs"}),
    ],
)
def test_check_sees_changed_numbers(
    name: str, problems: dict[str, str], copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for tensor in problems:
        _tamper(copy, name, tensor)
    assert record.main(["--check", *(["--method", name] if name != "capture" else [])]) == 1
    shown = capsys.readouterr().out
    for tensor, problem in problems.items():
        assert f"{name}: {tensor} {problem}" in shown


def test_capture_bound_is_tight() -> None:
    """Real data attains half an ulp, and one ulp is rejected."""
    x = torch.linspace(-3, 3, 10_001, dtype=torch.float64)
    error, allowed = (x.bfloat16().double() - x).abs(), record.rounding_to_bfloat16(x)
    assert (error <= allowed).all()
    assert (error / allowed.clamp_min(torch.finfo(torch.float64).tiny)).max() > 0.95
    ulp = 2 * allowed[1:]
    assert ((x[1:].bfloat16().double() + ulp - x[1:]).abs() > allowed[1:]).float().mean() > 0.95


# The tasks


def _pairs(split: str) -> list[tuple[bytes, bytes]]:
    documents = [
        tasks.recall_document(np.random.default_rng((split == "train", i)), 1024, split, filler=0.0) for i in range(60)
    ]
    text = b"\n".join(document.tokens.tobytes() for document in documents)
    return re.findall(rb"([a-z]{3})=(\d{3})", text)


def test_held_out_pairs_and_operands_never_occur_in_training() -> None:
    train, held_out = _pairs("train"), _pairs("held_out")
    assert len(train) > 3000 and len(held_out) > 3000
    for place in (0, 1):
        assert not {pair[place] for pair in train} & {pair[place] for pair in held_out}
    sums = {}
    for split in ("train", "held_out"):
        document = tasks.arithmetic_document(np.random.default_rng(0), 20_000, split)
        text = document.tokens.tobytes()
        found = re.findall(rb"(\d{3})\+(\d{3}): [^=]*=[^\n]*=(\d+)\n", text)
        assert len(found) > 100 and all(int(a) + int(b) == int(c) for a, b, c in found)
        sums[split] = {found[:2] for found in found}
    assert not sums["train"] & sums["held_out"]


def test_queries_repeat_pairs_from_anywhere_behind() -> None:
    documents = tasks.held_out_recall(100)
    share = []
    for document in documents:
        for query in document.queries:
            asked = document.tokens[query.start - 5 : query.stop].tobytes()
            said = document.tokens[query.source - 4 : query.source + 3].tobytes()
            assert asked == b"?" + said
            assert (document.kinds[query.start : query.stop] == tasks.ANSWER).all()
            share.append(query.source / query.start)
    assert len(share) > 500
    quarters = np.histogram(share, bins=4, range=(0, 1))[0] / len(share)
    # Uniform, except for pairs that were already queried: each quarter has a fair share (5 standard deviations).
    assert (np.abs(quarters - 0.25) < 0.1).all(), quarters


def test_documents_follow_from_the_seed_and_have_their_length() -> None:
    for make in (tasks.recall_document, tasks.arithmetic_document, tasks.text_document):
        for length in (40, 333, 2048):
            one, again, other = (make(np.random.default_rng(seed), length) for seed in (1, 1, 2))
            assert len(one.tokens) == len(one.kinds) == length
            assert one.tokens.tobytes() == again.tokens.tobytes() != other.tokens.tobytes()
    with pytest.raises(ValueError, match="split must be"):
        tasks.words(tasks.KEY_LETTERS, "test")


def test_streaming_mask_is_sinks_and_a_window() -> None:
    mask = tasks.streaming_mask(40, 10, sinks=3)
    for query in range(40):
        seen = mask[query].nonzero().flatten().tolist()
        assert seen == [key for key in range(query + 1) if key < 3 or key > query - 7]
        assert len(seen) <= 10
