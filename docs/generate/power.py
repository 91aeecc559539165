"""The page of planted faults and false alarms, from conformance/lab/mutation/power.json."""

from __future__ import annotations

import json
from typing import Any

from .markdown import escape, markdown_table
from .stored import read

DEVICES = {"cpu": "on a CPU", "cuda": "on a GPU"}
ABOUT = """# Planted faults and false alarms

How often `kvtwin verify` finds a fault that somebody planted, and how often it calls a right implementation wrong.
`python -m kvtwin.conformance.lab.mutation.power` measures both; each seed draws other cases and other faults.
"""
FAULTS = """## Planted faults

Each is a right implementation with one fault (`conformance/lab/implementations/faults.py`). A rate is that of rows,
elements or launches with the fault. Of the seeds, the table has the number with which the verdict was *wrong*, the
exact 95 % interval of the probability, and the properties that were wrong first. A verdict on a CPU reaches some of
them by luck alone, or not at all: these are *out of reach*, with the reason.
"""
ALARMS = """## False alarms

Implementations in other styles (`conformance/lab/implementations/right`), each right by the bounds and by the
conventions that it declares. An alarm is any verdict but *right*.
"""


def interval(found: int, of: int) -> tuple[float, float]:
    """The exact (Clopper-Pearson) 95 % interval of a probability."""
    from scipy import stats

    low, high = stats.binomtest(found, of).proportion_ci(confidence_level=0.95, method="exact")
    return float(low), float(high)


def power_page(devices: dict[str, Any] | None = None) -> str:
    """devices: the counts of power.json by device; by default the stored ones."""
    devices = json.loads(read("conformance/lab/mutation/power.json"))["devices"] if devices is None else devices
    return "\n".join([ABOUT, *machines(devices), "", FAULTS, faults(devices), "", ALARMS, *alarms(devices)])


def machines(devices: dict[str, Any]) -> list[str]:
    lines = []
    for device, title in DEVICES.items():
        if device in devices:
            versions = ", ".join(f"{name} {version}" for name, version in devices[device]["versions"].items())
            lines.append(f"- {title}: {escape(devices[device]['machine'])} ({versions})")
        else:
            lines.append(f"- {title}: not measured")
    return lines


def faults(devices: dict[str, Any]) -> str:
    from kvtwin.conformance.lab.implementations.faults import FAULTS as planted

    rows = []
    for name, fault in planted.items():
        row = [f"`{name}`", f"`{fault.method}.{fault.function}`", escape(fault.what)]
        for device in DEVICES:
            one = devices.get(device, {}).get("faults", {}).get(name)
            row.append(_found(one) + (f"; out of reach: {fault.blind[device]}" if device in fault.blind else ""))
        rows.append(row)
    return markdown_table(["fault", "in", "what", *(f"found {title}" for title in DEVICES.values())], rows)


def _found(one: dict[str, Any] | None) -> str:
    if one is None:
        return "not measured"
    low, high = interval(one["wrong"], one["seeds"])
    where = ", ".join(name.replace("_", " ") for name in one["properties"])
    return f"{one['wrong']} of {one['seeds']} ({low:.0%} to {high:.0%})" + (f", {where}" if where else "")


def alarms(devices: dict[str, Any]) -> list[str]:
    from kvtwin.conformance.lab.implementations.right import RIGHT as right

    rows, totals = [], []
    for module, style in right.items():
        for method in style.methods:
            row = [f"`{module}`", method, escape(style.what)]
            for device in DEVICES:
                one = devices.get(device, {}).get("right", {}).get(f"{method} {module}")
                row.append("not measured" if one is None else f"{one['seeds'] - one['right']} of {one['seeds']}")
            rows.append(row)
    for device, title in DEVICES.items():
        found = devices.get(device, {}).get("right", {}).values()
        verdicts, wrong = sum(one["seeds"] for one in found), sum(one["seeds"] - one["right"] for one in found)
        if verdicts:
            totals.append(
                f"{title[0].upper()}{title[1:]}, {len(found)} implementations have {verdicts:,} verdicts, and {wrong} "
                f"of them are false alarms: with 95 % confidence, fewer than {interval(wrong, verdicts)[1]:.2%}.\n"
            )
    columns = ["module", "method", "style", *(f"alarms {title}" for title in DEVICES.values())]
    return [*totals, markdown_table(columns, rows), ""]
