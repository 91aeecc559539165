"""EpiKV's policies, bands of layers and config, which both sides share."""

from __future__ import annotations

from dataclasses import dataclass

from .. import MethodConfig
from ..arguments import check_choice, check_flag, check_integer, check_share
from ..thinkv.arguments import check_edges

#: The layers of bands A and B in the paper's model of 32 layers. Other policies read keys and values only.
BANDS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "epikv": ((10,), (21,)),
    "hs_variance": ((10,), (21,)),
    "band_adaptive": (tuple(range(7, 14)), tuple(range(18, 26))),
    "attn_x_hs": ((10,), ()),
    "segment_hs": ((10,), (21,)),
}
#: The policies of `score`, differences of two bands, and the policies that also read attention weights.
DIFFERENCES = ("epikv", "hs_variance", "band_adaptive")
HYBRIDS = ("attn_x_hs", "segment_hs")
PAPER_LAYERS = 32
POLICIES = (*BANDS, "kv_key", "kv_val", "lag_kv")
#: What "lag_kv" adds up of a key's and a value's channels: see `EpiKVConfig`.
SPREADS = ("deviation", "variance")


@dataclass(frozen=True)
class EpiKVConfig(MethodConfig):
    """Configuration of an EpiKV cache.

    budget: the largest number of tokens that a row holds: prompt, recent and scored tokens together.
    policy: how tokens are scored. "epikv": z-scores of the change of the hidden state in two layers. "hs_variance":
    their rolling means (eq. 2). "band_adaptive": means of z-scores over two bands of layers. "kv_key", "kv_val": the
    rolling mean of the variance of keys or values over their channels. "lag_kv": the spread of key and value,
    normalized by the range of the previous chunk. Two hybrids also read attention weights, see `hybrids`: "attn_x_hs",
    the sum of the weights that a token received plus the z-score of band A; "segment_hs", ThinKV's thought types before
    "epikv".
    recent: the number of newest tokens that are never evicted, at least 1, since a token attends to itself; by default
    min(128, budget // 4).
    window: the length of rolling means and z-scores. chunk: tokens per chunk of "lag_kv". spread: what "lag_kv" adds
    up of key and value, "deviation", as LagKV's code, or "variance", as the paper says.
    keep_prompt: True keeps the whole prompt, and prompt + recent must fit the budget. False scores and evicts its
    tokens like all others.
    count_prompt: False applies the budget to generated tokens only; the prompt, of at most `max_prompt` tokens, has
    slots of its own.
    tau, edges, sparsity_threshold, segments_by: for "segment_hs" only. tau: decode steps per segment. edges: (theta_1,
    theta_2) of the attention sparsity or entropy, required, from `kvtwin.reference.thinkv.calibrate`.
    sparsity_threshold: as in ThinKVConfig. segments_by: "sparsity" classifies segments by the sparsity of attention,
    "entropy" by its entropy (table 1), see `hybrids`.
    bands: the numbers of layers in the two bands, by default the paper's.
    hidden_size: the size of a hidden state, by default query heads times head_dim.
    scale: the factor on query . key, by default head_dim ** -0.5.
    Raises TypeError or ValueError for invalid arguments.
    """

    policy: str = "epikv"
    recent: int | None = None
    window: int = 64
    chunk: int = 128
    spread: str = "deviation"
    keep_prompt: bool = True
    count_prompt: bool = True
    max_prompt: int = 0
    bands: tuple[int, int] | None = None
    hidden_size: int | None = None
    tau: int = 128
    edges: tuple[float, float] | None = None
    sparsity_threshold: float = 0.01
    segments_by: str = "sparsity"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("policy", self.policy, POLICIES)
        for name in ("keep_prompt", "count_prompt"):
            check_flag(name, getattr(self, name))
        check_integer("window", self.window, minimum=1)
        check_integer("chunk", self.chunk, minimum=1)
        check_choice("spread", self.spread, SPREADS)
        if self.policy != "lag_kv" and self.spread != "deviation":
            raise ValueError(f"spread must be left out for policy {self.policy!r}, got {self.spread!r}")
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
        check_choice("segments_by", self.segments_by, ("sparsity", "entropy"))
        if self.policy != "segment_hs":
            if self.segments_by != "sparsity":
                raise ValueError(
                    f"segments_by must be left out for policy {self.policy!r}, which has no segments, got "
                    f"{self.segments_by!r}"
                )
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
        """Whether the policy reads hidden states. Otherwise it reads keys and values."""
        return self.policy in BANDS

    @property
    def reads_attention(self) -> bool:
        """Whether the policy also reads attention weights."""
        return self.policy in HYBRIDS

    @property
    def layers(self) -> tuple[int, int]:
        """The numbers of layers in bands A and B."""
        if not self.reads_hidden:
            return 0, 0
        first, second = BANDS[self.policy]
        return self.bands or (len(first), len(second))

    @property
    def newest(self) -> int:
        """The number of newest tokens that are never evicted."""
        return max(1, min(128, self.budget // 4)) if self.recent is None else self.recent

    @property
    def slots(self) -> int:
        """S, the number of slots per row."""
        return self.budget + self.max_prompt


def band_layers(policy: str, layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The layers of bands A and B in a model of `layers` decoder layers, counted from 0.

    Layer l of the paper's 32 becomes round(l * layers / 32), without duplicates. The hidden state of a layer is its
    output. ValueError for a policy that reads no hidden states.
    """
    check_integer("layers", layers, minimum=1)
    if policy not in BANDS:
        raise ValueError(f"policy must be one that reads hidden states, {', '.join(BANDS)}, got {policy!r}")

    def scaled(band: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted({min(layers - 1, round(number * layers / PAPER_LAYERS)) for number in band}))

    first, second = BANDS[policy]
    return scaled(first), scaled(second)
