"""The limits of a benchmark's figures: the roofline, its targets (bars), and the level reached so far.

A target is a fixed limit. A level is what the kernels have reached.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .roofline import Roofline

#: The relative tolerance below a level that was reached before.
SLACK = 0.05

#: In thresholds, the name for the fastest peer of a run.
STRONGEST = "strongest"


@dataclass(frozen=True)
class Figures:
    """The figures of one benchmark. Times are medians of device time in seconds, bandwidths are in bytes per second.

    moves: the minimum number of bytes that the benchmark reads and writes. peers_move: the same for each peer.
    references: slower implementations for comparison, such as the eager reference, which no gate uses.
    """

    seconds: float
    moves: int
    roofline: Roofline
    peers: Mapping[str, float] = field(default_factory=dict)
    peers_move: int = 0
    references: Mapping[str, float] = field(default_factory=dict)

    @property
    def bandwidth(self) -> float:
        return self.moves / self.seconds

    @property
    def share(self) -> float:
        """The share of the copy bandwidth. It can exceed 1 if there are more reads than writes."""
        return self.bandwidth / self.roofline.copy

    @property
    def strongest(self) -> str | None:
        """The name of the fastest peer."""
        return min(self.peers, key=lambda name: self.peers[name]) if self.peers else None

    def ratio(self, peer: str) -> float | None:
        """Our time divided by the peer's, or by that of the fastest peer; None if the peer did not run."""
        theirs = min(self.peers.values(), default=None) if peer == STRONGEST else self.peers.get(peer)
        return None if theirs is None else self.seconds / theirs

    def as_dict(self) -> dict[str, Any]:
        """The figures as plain values for the JSON of a run."""
        return {
            "milliseconds": self.seconds * 1e3,
            "bytes": self.moves,
            "terabytes_per_second": self.bandwidth / 1e12,
            "share_of_copy": self.share,
            "share_of_limit": self.bandwidth / self.roofline.limit,
            "strongest": self.strongest,
            "peers": {
                name: {
                    "milliseconds": seconds * 1e3,
                    "ratio": self.seconds / seconds,
                    "share_of_copy": self.peers_move / seconds / self.roofline.copy,
                }
                for name, seconds in self.peers.items()
            },
            "references": {
                name: {"milliseconds": seconds * 1e3, "ratio": self.seconds / seconds}
                for name, seconds in self.references.items()
            },
        }


@dataclass(frozen=True)
class Gate:
    """One benchmark's thresholds.

    bar_ratio, bar_milliseconds: the target, without slack: at most this multiple of a peer's time; at
    most so long on a machine. held_ratio, held_share: what was reached; more than SLACK worse is a failure.
    """

    bar_ratio: Mapping[str, float] = field(default_factory=dict)
    bar_milliseconds: Mapping[str, float] = field(default_factory=dict)
    held_ratio: Mapping[str, float] = field(default_factory=dict)
    held_share: float | None = None


def load(path: Path) -> dict[str, Gate]:
    """The gates in thresholds/<method>.toml, by benchmark. Raises ValueError if the file is invalid."""
    found = {}
    for name, table in tomllib.loads(path.read_text(encoding="utf-8")).items():
        where = f"{path.name}: {name!r}"
        bar, held = (_table(table, part, where) for part in ("bar", "held"))
        _only(table, ("bar", "held"), where)
        _only(bar, ("ratio", "milliseconds"), f"{where}.bar")
        _only(held, ("ratio", "share"), f"{where}.held")
        share = held.get("share")
        gate = Gate(
            _numbers(bar.get("ratio", {}), f"{where}.bar.ratio"),
            _numbers(bar.get("milliseconds", {}), f"{where}.bar.milliseconds"),
            _numbers(held.get("ratio", {}), f"{where}.held.ratio"),
            None if share is None else _number(share, f"{where}.held.share"),
        )
        if gate == Gate():
            raise ValueError(f"{where} has no threshold")
        found[name] = gate
    return found


def too_fast(figures: Figures) -> list[str]:
    """Complaints about bandwidths above the memory's limit, also of peers. Such a measurement is wrong."""
    limit = figures.roofline.limit
    timed = {"the benchmark": figures.bandwidth}
    timed |= {f"its peer {name}": figures.peers_move / seconds for name, seconds in figures.peers.items()}
    return [
        f"faster than the roofline: {name} would move {bandwidth / 1e12:.3f} TB/s, but the memory's limit is "
        f"{limit / 1e12:.3f} TB/s (work was left out, or the cache was warm)"
        for name, bandwidth in timed.items()
        if bandwidth > limit
    ]


def too_slow(figures: Figures, gate: Gate, machine: str) -> list[str]:
    """Complaints about figures that miss their thresholds. Thresholds in milliseconds apply to one machine only."""
    found = []
    for peer, most in gate.bar_ratio.items():
        ratio = figures.ratio(peer)
        if ratio is None:
            found.append(f"no figure for peer {peer}, with which a target compares")
        elif not ratio <= most:
            found.append(f"takes {ratio:.3f} times as long as {peer}; the target allows {most:g}")
    allowed = gate.bar_milliseconds.get(machine)
    if allowed is not None and not figures.seconds * 1e3 <= allowed:
        found.append(f"takes {figures.seconds * 1e3:.4f} ms; the target allows {allowed:g} ms on {machine}")
    for peer, reached in gate.held_ratio.items():
        ratio = figures.ratio(peer)
        if ratio is None:
            found.append(f"no figure for peer {peer}, which a threshold compares with")
        elif not ratio <= reached * (1 + SLACK):
            found.append(f"takes {ratio:.3f} times as long as {peer}, more than {SLACK:.0%} worse than {reached:g}")
    if gate.held_share is not None and not figures.share >= gate.held_share * (1 - SLACK):
        found.append(
            f"reaches {figures.share:.3f} of the copy bandwidth, more than {SLACK:.0%} below {gate.held_share:g}"
        )
    return found


def _table(table: Any, part: str, where: str) -> dict[str, Any]:
    found = table.get(part, {}) if isinstance(table, dict) else None
    if not isinstance(found, dict):
        raise ValueError(f"{where}: {part} must be a table")
    return found


def _only(table: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    unknown = sorted(set(table) - set(known))
    if unknown:
        raise ValueError(f"{where} accepts {', '.join(known)}; got {', '.join(unknown)}")


def _numbers(table: Any, where: str) -> dict[str, float]:
    if not isinstance(table, dict):
        raise ValueError(f"{where} must be a table of numbers")
    return {name: _number(value, f"{where}.{name}") for name, value in table.items()}


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ValueError(f"{where} must be a positive number, got {value!r}")
    return float(value)
