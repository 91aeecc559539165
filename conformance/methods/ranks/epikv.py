"""What the tests of EpiKV run on each rank, besides those of all states."""

from __future__ import annotations

from typing import Any

import torch

from . import states


def new_state(group: Any, side: str, device: str, **config: Any) -> Any:
    method = states.side_of(side, "epikv")
    options = {"budget": 4, "window": 3, "keep_prompt": False, **config}
    return method.EpiKVState(method.EpiKVConfig(**options), process_group=group, device=device, **states.SIZES)


def refuses(group: Any, side: str, device: str, config: dict[str, Any], on_rank_1: dict[str, Any]) -> str:
    """What the constructor says to this config, which differs on rank 1."""
    try:
        new_state(group, side, device, **config, **(on_rank_1 if group.rank() == 1 else {}))
    except ValueError as error:
        return str(error)
    return ""


def scores(group: Any, side: str, device: str, on_rank_1: float) -> tuple[str, str]:
    """What prefill says if the hidden states of rank 1 differ by a factor, and what the state says of a step then."""
    state = new_state(group, side, device)
    generator = torch.Generator().manual_seed(1)
    query, key = (torch.randn(2, heads, 9, 16, generator=generator).to(device) for heads in (2, 1))
    size = 2 * group.size() * 16                                                        # of the heads of all ranks
    hidden = torch.randn(2, 9, size, generator=generator).to(device)
    wrong = torch.linspace(1, on_rank_1 if group.rank() == 1 else 1, 9, device=device)[:, None]
    said = ["", ""]
    try:
        state.prefill(query, key, key, None, hidden * wrong, hidden.flip(1))
    except ValueError as error:
        said[0] = str(error)
    try:
        state.step(query[:, :, 0], key[:, :, 0], key[:, :, 0], hidden[:, 0], hidden[:, 1])
    except RuntimeError as error:
        said[1] = str(error)
    return said[0], said[1]
