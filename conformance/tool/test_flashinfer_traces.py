"""Cases from trace sets of FlashInfer-Bench."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import kvtwin.reference
from kvtwin.conformance import api

NAME = "gqa_paged_decode_h4_kv2_d16_ps4"
TABLE = {
    "kv_indptr": torch.tensor([0, 2, 2, 5], dtype=torch.int32),
    "kv_indices": torch.tensor([7, 3, 0, 3, 9], dtype=torch.int32),
    "kv_last_page_len": torch.tensor([3, 1, 4], dtype=torch.int32),
}
LENGTHS = (7, 0, 12)


def definition(page_size=4, dtype="bfloat16", **axes):
    constants = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16, "page_size": page_size, **axes}
    inputs = {name: {"dtype": dtype} for name in ("q", "k_cache", "v_cache")}
    inputs |= {name: {"dtype": "int32"} for name in TABLE if page_size > 1 or name != "kv_last_page_len"}
    return {
        "op_type": "gqa_paged", "axes": {name: {"type": "const", "value": value} for name, value in constants.items()},
        "inputs": inputs,
    }


def write(folder: Path, defined, tensors=None, **inputs) -> Path:
    """A trace set of one workload. Tensors are stored, the others are random."""
    tensors = TABLE if tensors is None else tensors
    for kind, text in (("definitions", json.dumps(defined)), ("workloads", "")):
        (folder / kind / "gqa_paged").mkdir(parents=True, exist_ok=True)
        suffix = "json" if kind == "definitions" else "jsonl"
        (folder / kind / "gqa_paged" / f"{NAME}.{suffix}").write_text(text)
    save_file(tensors, folder / "blob.safetensors")
    given = {name: {"type": "random"} for name in ("q", "k_cache", "v_cache")}
    given |= {name: {"type": "safetensors", "path": "./blob.safetensors", "tensor_key": name} for name in tensors}
    line = {"definition": NAME, "workload": {"uuid": "1", "axes": {}, "inputs": {**given, **inputs}}}
    (folder / "workloads" / "gqa_paged" / f"{NAME}.jsonl").write_text(json.dumps(line) + "\n")
    return folder


def test_rows_are_the_sequences(tmp_path):
    """Pages of four tokens; page 3 belongs to two sequences."""
    generator = torch.Generator().manual_seed(1)
    cache = {
        "q": torch.randn(3, 4, 16, generator=generator).bfloat16(),
        "k_cache": torch.randn(10, 4, 2, 16, generator=generator).bfloat16(),
        "v_cache": torch.randn(10, 4, 2, 16, generator=generator).bfloat16(),
    }
    (case,) = api.flashinfer_cases(write(tmp_path, definition(), TABLE | cache), NAME)
    assert (case.query.shape, case.key.shape, case.dtype) == ((3, 4, 16), (3, 2, 12, 16), torch.bfloat16)
    assert case.occupied.sum(1).tolist() == list(LENGTHS)
    for row, pages in ((0, [7, 3]), (2, [0, 3, 9])):
        for mine, name in ((case.key, "k_cache"), (case.value, "v_cache")):
            tokens = cache[name][pages].flatten(0, 1)[:LENGTHS[row]]
            assert torch.equal(mine[row, :, :LENGTHS[row]], tokens.transpose(0, 1))
    assert api.judge(case, kvtwin.reference) == ["decode_attention: right"]


@pytest.mark.parametrize("last", [0, 9])
def test_an_empty_sequence_has_no_last_page(last, tmp_path):
    table = TABLE | {"kv_last_page_len": torch.tensor([3, last, 4])}
    (case,) = api.flashinfer_cases(write(tmp_path, definition(), table), NAME)
    assert case.occupied.sum(1).tolist() == list(LENGTHS)


def test_files_outside_of_the_folder_are_not_read(tmp_path):
    query = {"q": torch.zeros(3, 4, 16).bfloat16()}
    inputs = {"q": {"type": "safetensors", "path": "../blob.safetensors", "tensor_key": "q"}}
    folder = write(tmp_path / "set", definition(), TABLE, **inputs)
    save_file(query, tmp_path / "blob.safetensors")
    with pytest.raises(ValueError, match="must be a file in"):
        list(api.flashinfer_cases(folder, NAME))


def test_random_inputs_follow_from_the_seed_and_the_line(tmp_path):
    folder = write(tmp_path, definition(), sm_scale={"type": "scalar", "value": 0.25})
    path = folder / "workloads" / "gqa_paged" / f"{NAME}.jsonl"
    path.write_text(2 * path.read_text())
    one, second = api.flashinfer_cases(folder, NAME, seed=1)
    assert not torch.equal(one.key, second.key)
    again, other = (next(api.flashinfer_cases(folder, NAME, seed=seed)) for seed in (1, 2))
    assert one.scale == 0.25
    assert torch.equal(one.key, again.key)
    assert not torch.equal(one.key, other.key)
    assert api.judge(one, kvtwin.reference) == ["decode_attention: right"]


def test_pages_of_one_token_have_no_last_page(tmp_path):
    table = {"kv_indptr": torch.tensor([0, 3]), "kv_indices": torch.tensor([9_000_000, 2, 5])}
    (case,) = api.flashinfer_cases(write(tmp_path, definition(page_size=1), table), NAME)
    assert case.key.shape == (1, 2, 3, 16)
    assert case.occupied.all()


@pytest.mark.parametrize(("defined", "tensors", "inputs", "says"), [
    (definition(num_qo_heads=3), {}, {}, "num_qo_heads must be a multiple of num_kv_heads = 2, got 3"),
    (definition(head_dim=None), {}, {}, "axis head_dim must be a positive constant, got None"),
    (definition(dtype="float8_e4m3fn"), {}, {}, "one dtype of float32, float16, bfloat16"),
    ({"axes": {}, "inputs": {"q": {}}}, {}, {}, "must define decode attention over pages"),
    ([], {}, {}, "must be a JSON object, got list"),
    (definition(), {}, {"q": {"type": "url"}}, "input q must be random or safetensors, got 'url'"),
    (definition(), {}, {"kv_indptr": {"type": "random"}}, "kv_indptr must be a tensor of integers"),
    (definition(), {}, {"sm_scale": {"type": "scalar", "value": "x"}}, "sm_scale must be a number, got 'x'"),
    (definition(), {"kv_indptr": torch.tensor([0, 6])}, {}, "kv_indptr must ascend from 0 to at most 5"),
    (definition(), {"kv_indptr": torch.tensor([0, 2, 1, 5])}, {}, "kv_indptr must ascend"),
    (definition(), {"kv_indices": torch.tensor([0, 1, -1, 2, 3])}, {}, "kv_indices must be at least 0, got -1"),
    (definition(), {"kv_last_page_len": torch.tensor([5, 1, 1])}, {}, "from 1 to page_size = 4"),
    (definition(), {"kv_indptr": torch.tensor([0, 0]), "kv_last_page_len": torch.tensor([1])}, {}, "no sequence has a"),
    (definition(), {"k_cache": torch.zeros(10, 4, 2, 15).bfloat16()}, {}, "k_cache must be torch.bfloat16"),
    (definition(), {"v_cache": torch.zeros(9, 4, 2, 16).bfloat16()}, {}, "pages of v_cache, which has 9, got 9"),
    (definition(), {"v_cache": torch.zeros(10, 4, 2, 16)}, {}, "v_cache must be torch.bfloat16"),
    (definition(), {}, {"q": {"type": "safetensors", "path": "../q", "tensor_key": "q"}}, "must be a file in"),
    (definition(), {}, {"q": {"type": "safetensors", "path": "blob.safetensors", "tensor_key": "x"}}, "cannot be read"),
])
def test_what_does_not_fit_is_refused(defined, tensors, inputs, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        list(api.flashinfer_cases(write(tmp_path, defined, TABLE | tensors, **inputs), NAME))


def test_unknown_definitions_and_missing_workloads_are_refused(tmp_path):
    with pytest.raises(ValueError, match="definition must be a name in .*, got 'other'"):
        list(api.flashinfer_cases(write(tmp_path, definition()), "other"))
    (tmp_path / "workloads" / "gqa_paged" / f"{NAME}.jsonl").write_text('{"workload": 3}')
    with pytest.raises(ValueError, match="line 1 must have a workload with inputs"):
        list(api.flashinfer_cases(tmp_path, NAME))
    (tmp_path / "workloads" / "gqa_paged" / f"{NAME}.jsonl").unlink()
    with pytest.raises(ValueError, match="definition must have workloads in"):
        list(api.flashinfer_cases(tmp_path, NAME))
