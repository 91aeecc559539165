"""Cases from traces of FlashInfer-Bench: decode workloads that serving engines recorded.

A trace set is a folder (https://huggingface.co/datasets/flashinfer-ai/flashinfer-trace, Apache 2.0) with
definitions/OP/NAME.json, which gives shapes and dtypes, and workloads/OP/NAME.jsonl, whose lines give sizes and, for
each input, where it comes from: "random", "scalar", or "safetensors", a file in the folder. Recorded workloads have the
block table of a step, and random queries, keys and values.

Only decode attention over pages (op_type gqa_paged, stage decode) becomes a case. Keys and values that the block table
does not refer to are not made, so a case needs no more memory than its tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .case import DecodeCase

OPERATION = "gqa_paged"
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}
#: The inputs of a decode definition, besides `kv_last_page_len`, which is missing where pages hold one token.
TENSORS = ("q", "k_cache", "v_cache", "kv_indptr", "kv_indices")


def flashinfer_cases(
    folder: Path | str, definition: str, *, device: torch.device | str = "cpu", seed: int = 0
) -> Iterator[DecodeCase]:
    """The decode workloads of a definition in a trace set of FlashInfer-Bench, as cases.

    folder: the trace set's folder. definition: a name, such as "gqa_paged_decode_h32_kv8_d128_ps1". seed: with the
    number of its line, that of a workload's random inputs, which are normal numbers. A case has the sequences as rows,
    as many slots as the longest has tokens, and free slots, which hold tokens of other sequences, in the others. Raises
    ValueError, which names the file, if the definition is not of decode attention over pages, or a workload does not
    fit it.
    """
    root = Path(folder)
    path = root / "definitions" / OPERATION / f"{definition}.json"
    if not path.is_file():
        raise ValueError(f"definition must be a name in {path.parent}, got {definition!r}")
    defined = _parsed(path, path.read_text(encoding="utf-8"))
    sizes = _sizes(path, defined)
    workloads = root / "workloads" / OPERATION / f"{definition}.jsonl"
    if not workloads.is_file():
        raise ValueError(f"definition must have workloads in {workloads}")
    for number, line in enumerate(workloads.read_text(encoding="utf-8").splitlines()):
        if line.strip():
            where = f"{workloads}, line {number + 1}"
            workload = _parsed(where, line).get("workload")
            if not isinstance(workload, dict) or not isinstance(workload.get("inputs"), dict):
                raise ValueError(f"{where} must have a workload with inputs")
            generator = torch.Generator(device).manual_seed(seed + number)
            yield _case(root, where, workload, sizes, generator)


def _parsed(where: Path | str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} must be JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{where} must be a JSON object, got {type(found).__name__}")
    return found


def _sizes(path: Path, defined: dict[str, Any]) -> dict[str, Any]:
    """The constant axes of a definition, and the dtype of its keys and values."""
    inputs, axes = defined.get("inputs"), defined.get("axes")
    if not isinstance(inputs, dict) or not isinstance(axes, dict) or "qo_indptr" in inputs or any(
        name not in inputs for name in TENSORS
    ):
        raise ValueError(f"{path} must define decode attention over pages, with the inputs {', '.join(TENSORS)}")
    sizes: dict[str, Any] = {}
    for name in ("num_qo_heads", "num_kv_heads", "head_dim", "page_size"):
        value = axes.get(name, {}).get("value")
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{path}: axis {name} must be a positive constant, got {value!r}")
        sizes[name] = value
    if sizes["num_qo_heads"] % sizes["num_kv_heads"]:
        raise ValueError(
            f"{path}: num_qo_heads must be a multiple of num_kv_heads = {sizes['num_kv_heads']}, got "
            f"{sizes['num_qo_heads']}"
        )
    dtypes = {inputs[name].get("dtype") for name in ("q", "k_cache", "v_cache")}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        raise ValueError(f"{path}: q, k_cache and v_cache must have one dtype of {', '.join(DTYPES)}, got {dtypes}")
    return {**sizes, "dtype": DTYPES[dtypes.pop()], "last_page": "kv_last_page_len" in inputs}


def _case(
    root: Path, where: str, workload: dict[str, Any], sizes: dict[str, Any], generator: torch.Generator
) -> DecodeCase:
    inputs, heads, dim, page_size = workload["inputs"], sizes["num_kv_heads"], sizes["head_dim"], sizes["page_size"]

    def stored(name: str) -> Tensor | None:
        """A tensor from a file of the trace set; None for random numbers."""
        given = inputs.get(name)
        kind = given.get("type") if isinstance(given, dict) else None
        if kind == "random":
            return None
        if kind != "safetensors":
            raise ValueError(f"{where}: input {name} must be random or safetensors, got {kind!r}")
        return _load(root, where, name, given).to(generator.device)

    offsets, indices = _block_table(where, stored("kv_indptr"), stored("kv_indices"))
    batch = len(offsets) - 1
    pages, slot, occupied = _slots(
        where, offsets, indices, stored("kv_last_page_len") if sizes["last_page"] else None, page_size
    )

    def filled(name: str, *shape: int) -> Tensor:
        found = stored(name)
        if found is None:
            return torch.randn(*shape, generator=generator, device=generator.device).to(sizes["dtype"])
        whole = shape if name == "q" else (len(found) if found.dim() else 0, *shape[1:])
        dtype = sizes["dtype"]
        if tuple(found.shape) != whole or found.dtype != dtype:
            raise ValueError(f"{where}: {name} must be {dtype} {whole}, got {found.dtype} {tuple(found.shape)}")
        if name == "q":
            return found
        if int(pages.max()) >= len(found):
            largest = int(pages.max())
            raise ValueError(f"{where}: kv_indices must name pages of {name}, which has {len(found)}, got {largest}")
        return found[pages]

    query = filled("q", batch, sizes["num_qo_heads"], dim)
    key, value = (
        filled(name, len(pages), page_size, heads, dim).flatten(0, 1)[slot].transpose(1, 2).contiguous()
        for name in ("k_cache", "v_cache")
    )
    scale = inputs.get("sm_scale", {}).get("value")
    if scale is not None and not isinstance(scale, int | float):
        raise ValueError(f"{where}: sm_scale must be a number, got {scale!r}")
    return DecodeCase.of(query, key, value, occupied, scale=scale)


def _load(root: Path, where: str, name: str, given: dict[str, Any]) -> Tensor:
    from safetensors import SafetensorError, safe_open

    path = (root / str(given.get("path"))).resolve()
    if not path.is_relative_to(root.resolve()) or not path.is_file():
        raise ValueError(f"{where}: the path of {name} must be a file in {root}, got {given.get('path')!r}")
    try:
        with safe_open(path, "pt") as file:
            found: Tensor = file.get_tensor(given.get("tensor_key"))
    except (SafetensorError, TypeError) as error:
        raise ValueError(f"{where}: {name} cannot be read from {path}: {error}") from None
    return found


def _block_table(where: str, offsets: Tensor | None, indices: Tensor | None) -> tuple[Tensor, Tensor]:
    """kv_indptr [B + 1] and kv_indices [n] as int64."""
    for name, tensor in (("kv_indptr", offsets), ("kv_indices", indices)):
        if tensor is None or tensor.dim() != 1 or tensor.is_floating_point():
            raise ValueError(f"{where}: {name} must be a tensor of integers with one dimension")
    assert offsets is not None and indices is not None
    offsets, indices = offsets.long(), indices.long()
    if len(offsets) < 2 or offsets[0] != 0 or bool((offsets.diff() < 0).any()) or offsets[-1] > len(indices):
        raise ValueError(f"{where}: kv_indptr must ascend from 0 to at most {len(indices)}, got {offsets.tolist()[:8]}")
    if bool((indices < 0).any()):
        raise ValueError(f"{where}: kv_indices must be at least 0, got {int(indices.min())}")
    return offsets, indices


def _slots(
    where: str, offsets: Tensor, indices: Tensor, last_page: Tensor | None, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The pages that the block table refers to, [n]; the place of each slot of the case in these pages, [B, S] int64;
    and occupied [B, S] bool."""
    counts = offsets.diff()                                                                   # pages of each sequence
    last = torch.full_like(counts, page_size) if last_page is None else last_page.long()
    if last.shape != counts.shape or bool(((last < 1) | (last > page_size))[counts > 0].any()):
        raise ValueError(f"{where}: kv_last_page_len must be [{len(counts)}], from 1 to page_size = {page_size}")
    lengths = torch.where(counts > 0, (counts - 1) * page_size + last, 0)
    used = indices[:int(offsets[-1])]
    pages, place = used.unique(return_inverse=True)
    if not len(pages):
        raise ValueError(f"{where}: no sequence has a token")
    token = torch.arange(int(lengths.max()), device=offsets.device)
    occupied = token < lengths[:, None]
    entry = (offsets[:-1, None] + token // page_size).clamp_max(len(used) - 1)                # free slots: other tokens
    return pages, place[entry] * page_size + token % page_size, occupied
