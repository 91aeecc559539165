"""What both sides of EpiKV share: policies, the config, and checks of arguments. No mathematics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..contract import (
    MethodConfig, check_choice, check_dtype, check_flag, check_integer, check_like, check_mask, check_shape,
    check_tensor,
)
from ..thinkv.contract import check_edges, check_share

#: Layers of the two bands in the paper's model of 32 layers, by policy; the others read keys and values alone.
BANDS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "epikv": ((10,), (21,)),
    "hs_variance": ((10,), (21,)),
    "band_adaptive": (tuple(range(7, 14)), tuple(range(18, 26))),
    "attn_x_hs": ((10,), ()),
    "segment_hs": ((10,), (21,)),
}
#: Those of `score`, which are differences of two bands; those that read attention's weights as well.
DIFFERENCES = ("epikv", "hs_variance", "band_adaptive")
HYBRIDS = ("attn_x_hs", "segment_hs")
PAPER_LAYERS = 32
POLICIES = (*BANDS, "kv_key", "kv_val", "lag_kv")


@dataclass(frozen=True)
class EpiKVConfig(MethodConfig):
    """How an EpiKV cache scores and evicts.

    budget: the most tokens that a row may hold: prompt, recent and scored ones together. policy: what scores a token:
    "epikv" (z-scores of the change of the hidden state in two layers), "hs_variance" (their rolling means, eq. 2),
    "band_adaptive" (means of z-scores over two bands of layers), "kv_key", "kv_val" (rolling mean of the variance of
    keys or values over their channels), "lag_kv" (spread of key and value, normalised by the previous chunk's range),
    or one of the hybrids, which need attention's weights: "attn_x_hs" (the sum of the weights that a token received,
    plus the z-score of band A) and "segment_hs" ("epikv", but that ThinKV's thought types go before it): see `hybrids`.
    recent: that many newest tokens are never evicted, default min(128, budget // 4), and 1 at least, as a token attends
    to itself. window: of rolling means and z-scores. chunk: tokens of "lag_kv"'s chunks.
    keep_prompt: the prompt stays whole, and prompt + recent must fit the budget; False: its tokens are scored like all
    others and compete. count_prompt: False: the budget is for generated tokens alone, beside a prompt of at most
    `max_prompt` tokens, which are memory of their own.
    tau, edges, sparsity_threshold: of "segment_hs" alone: decode steps of a segment; (theta_1, theta_2) of attention's
    sparsity, as `kvtwin.reference.thinkv.calibrate` finds them, which must be given; and ThinKVConfig's.
    bands: how many layers the two bands have, default those of the paper. hidden_size: of a hidden state, default query
    heads times head_dim. scale: the factor on query . key, default head_dim ** -0.5.
    Raises TypeError or ValueError for anything else.
    """

    policy: str = "epikv"
    recent: int | None = None
    window: int = 64
    chunk: int = 128
    keep_prompt: bool = True
    count_prompt: bool = True
    max_prompt: int = 0
    bands: tuple[int, int] | None = None
    hidden_size: int | None = None
    tau: int = 128
    edges: tuple[float, float] | None = None
    sparsity_threshold: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("policy", self.policy, POLICIES)
        for name in ("keep_prompt", "count_prompt"):
            check_flag(name, getattr(self, name))
        check_integer("window", self.window, minimum=1)
        check_integer("chunk", self.chunk, minimum=1)
        check_integer("max_prompt", self.max_prompt, minimum=0)
        if self.recent is not None and check_integer("recent", self.recent, minimum=1) > self.budget:
            raise ValueError(f"recent must be at most the budget {self.budget}, got {self.recent}")
        if self.hidden_size is not None:
            check_integer("hidden_size", self.hidden_size, minimum=1)
        if self.max_prompt and (self.count_prompt or not self.keep_prompt):
            raise ValueError(
                f"max_prompt must be 0 unless count_prompt is False and keep_prompt True, got {self.max_prompt}"
            )
        if not self.count_prompt and not self.keep_prompt:
            raise ValueError("count_prompt must be True where keep_prompt is False: such a prompt is like other tokens")
        self._check_bands()
        self._check_segments()

    def _check_segments(self) -> None:
        check_integer("tau", self.tau, minimum=1)
        check_share("sparsity_threshold", self.sparsity_threshold)
        if self.policy != "segment_hs":
            if self.edges is not None:
                raise ValueError(f"edges must be None for policy {self.policy!r}, which has no segments")
        elif self.edges is None:
            raise ValueError("edges must be given for policy 'segment_hs': (theta_1, theta_2) of ThinKV's thoughts")
        else:
            object.__setattr__(self, "edges", check_edges(self.edges))

    def _check_bands(self) -> None:
        if self.bands is None:
            return
        if not self.reads_hidden:
            raise ValueError(f"bands must be None for policy {self.policy!r}, which reads no hidden states")
        if not isinstance(self.bands, (tuple, list)) or len(self.bands) != 2:
            raise TypeError(f"bands must be two numbers of layers, got {self.bands!r}")
        object.__setattr__(self, "bands", tuple(self.bands))                            # JSON has lists
        paper = tuple(map(len, BANDS[self.policy]))
        for place, number in enumerate(self.bands):
            check_integer(f"bands[{place}]", number, minimum=min(1, paper[place]))
        if self.policy != "band_adaptive" and self.bands != paper:
            raise ValueError(f"bands must be {paper} for policy {self.policy!r}, got {self.bands}")

    @property
    def reads_hidden(self) -> bool:
        """Whether the policy scores by hidden states; else it does by keys and values."""
        return self.policy in BANDS

    @property
    def reads_attention(self) -> bool:
        """Whether the policy scores by attention's weights too."""
        return self.policy in HYBRIDS

    @property
    def layers(self) -> tuple[int, int]:
        """How many layers the two bands have."""
        if not self.reads_hidden:
            return 0, 0
        first, second = BANDS[self.policy]
        return self.bands or (len(first), len(second))

    @property
    def newest(self) -> int:
        """How many newest tokens stay whatever their scores."""
        return max(1, min(128, self.budget // 4)) if self.recent is None else self.recent

    @property
    def slots(self) -> int:
        return self.budget + self.max_prompt


def band_layers(policy: str, layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of the layers of both bands in a model of `layers` decoder layers, counted from 0: l of 32 becomes
    round(l * layers / 32), each layer once. A layer's hidden state is what it puts out.

    ValueError for a policy that reads no hidden states.
    """
    check_integer("layers", layers, minimum=1)
    if policy not in BANDS:
        raise ValueError(f"policy must be one that reads hidden states, {', '.join(BANDS)}, got {policy!r}")

    def scaled(band: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted({min(layers - 1, round(number * layers / PAPER_LAYERS)) for number in band}))

    first, second = BANDS[policy]
    return scaled(first), scaled(second)


def check_hidden_pair(hidden: object, previous: object) -> None:
    """hidden and previous [..., C], floating, alike."""
    for name, tensor in (("hidden", hidden), ("previous", previous)):
        dims = max(tensor.dim(), 1) if isinstance(tensor, Tensor) else 1
        check_dtype(f"{name}.dtype", check_tensor(name, tensor, dims=dims, layout="[..., C]").dtype)
    assert isinstance(hidden, Tensor)
    assert isinstance(previous, Tensor)
    check_shape("previous", previous, tuple(hidden.shape), "hidden's [..., C]")
    check_like("previous", previous, hidden, "hidden")


def check_series(name: str, series: object, occupied: object, *, layers: bool = True) -> Tensor:
    """A number per token: [B, T], or with a layer axis [B, L, T]; occupied [B, T] bool or None."""
    dims = 3 if layers and isinstance(series, Tensor) and series.dim() == 3 else 2
    checked = check_tensor(name, series, dims=dims, layout="[B, T] or [B, L, T]" if layers else "[B, T]")
    check_dtype(f"{name}.dtype", checked.dtype)
    if occupied is not None:
        check_mask("occupied", occupied, (checked.shape[0], checked.shape[-1]), "[B, T]", checked, name)
    return checked


def check_vectors(name: str, tensor: object, occupied: object = None) -> Tensor:
    """Keys or values [B, Hkv, T, D], floating; occupied [B, T] bool or None."""
    checked = check_tensor(name, tensor, dims=4, layout="[B, Hkv, T, D]")
    check_dtype(f"{name}.dtype", checked.dtype)
    if occupied is not None:
        check_mask("occupied", occupied, (checked.shape[0], checked.shape[2]), "[B, T]", checked, name)
    return checked


def check_selection(score: object, budget: object, prompt: object, recent: object, occupied: object) -> Tensor:
    """The arguments of `select`."""
    checked = check_series("score", score, occupied, layers=False)
    budget = check_integer("budget", budget, minimum=0)
    prompt = check_integer("prompt", prompt, minimum=0)
    recent = check_integer("recent", recent, minimum=0)
    if prompt + recent > budget:
        raise ValueError(f"prompt + recent must be at most the budget {budget}, got {prompt} + {recent}")
    if prompt > checked.shape[1]:
        raise ValueError(f"prompt must be at most T = {checked.shape[1]}, got {prompt}")
    return checked


def check_hidden_states(
    config: EpiKVConfig, hidden: tuple[object, object], *, batch: int, tokens: int | None, hidden_size: int,
    dtype: torch.dtype, device: torch.device,
) -> tuple[Tensor, Tensor] | None:
    """hidden_a and hidden_b of a prompt of `tokens` tokens, or of one token (None), with a layer axis: [B, L, T, C] or
    [B, L, C]. Without that axis they are taken for a band of one layer; a band of none comes as None, and leaves as one
    of L = 0. None for policies that read none of them."""
    if not config.reads_hidden:
        if any(tensor is not None for tensor in hidden):
            raise ValueError(f"hidden_a and hidden_b must be left out: policy {config.policy!r} reads none")
        return None
    time = () if tokens is None else (tokens,)
    letters = "C" if tokens is None else "T, C"
    found: list[Tensor] = []
    for name, tensor, count in zip(("hidden_a", "hidden_b"), hidden, config.layers, strict=True):
        if count == 0:
            if tensor is not None:
                raise ValueError(f"{name} must be left out: policy {config.policy!r} reads one band alone")
            found.append(found[0][:, :0])
            continue
        layout = f"[B, {count}, {letters}]" + (f" or [B, {letters}]" if count == 1 else "")
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{name} must be a torch.Tensor {layout} for policy {config.policy!r}, got {type(tensor).__name__}"
            )
        wide = tensor[:, None] if count == 1 and tensor.dim() == len(time) + 2 else tensor
        checked = check_tensor(name, wide, dims=len(time) + 3, layout=layout)
        check_shape(name, checked, (batch, count, *time, hidden_size), layout)
        if checked.dtype != dtype:
            raise TypeError(f"{name} must have the state's dtype {dtype}, got {checked.dtype}")
        if checked.device != device:
            raise ValueError(f"{name} must be on the state's device {device}, got {checked.device}")
        found.append(checked)
    return found[0], found[1]


def check_prompt_fits(config: EpiKVConfig, tokens: int) -> None:
    """ValueError where a prompt, of which the longest row has `tokens` tokens, does not fit beside what must stay."""
    if not config.keep_prompt:
        return
    if not config.count_prompt:
        if tokens > config.max_prompt:
            raise ValueError(f"max_prompt must be at least the prompt's {tokens} tokens, got {config.max_prompt}")
    elif tokens + config.newest > config.budget:
        raise ValueError(
            f"budget must be at least prompt + recent = {tokens} + {config.newest}, got {config.budget}: the prompt "
            "stays whole (keep_prompt=False lets its tokens compete, count_prompt=False gives them room of their own)"
        )
