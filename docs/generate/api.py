"""The page of the judge's API: what `kvtwin.conformance.api` exports."""

from __future__ import annotations

from .methods import entry

#: Headings, and the names below them.
GROUPS = {
    "Cases": (
        "Case", "DecodeCase", "WindowCase", "AttendCase", "KeyCase", "StateTrace", "load", "decode_cases",
        "window_cases", "attend_cases", "key_cases", "state_traces", "flashinfer_cases",
        "PagedLayout", "PagedView", "paged_views", "PagedDecodeCase", "PagedFp8Case", "paged_decode_cases",
        "paged_fp8_cases",
    ),
    "The truth and its bounds": (
        "attend", "Attention", "upcast", "Arithmetic", "arithmetic", "gamma", "output_error", "log_weight_error",
        "Interval", "tie_classes",
    ),
    "Comparisons": (
        "assert_within", "assert_same", "assert_dtype", "assert_eviction_right", "assert_kept_right", "Verdict",
        "Mismatch", "NotProvided", "JudgeError", "Stats", "collect",
    ),
    "Whole checks": ("judge", "judge_paged", "lockstep", "Lockstep", "Summary", "Capabilities", "use_interpreter"),
    "Subjects of a method in your own package": ("paged_subjects", "field"),
}


def api_page() -> str:
    """Every public name, with its signature and docstring."""
    from kvtwin.conformance import Method, api

    listed = [name for names in GROUPS.values() for name in names]
    assert sorted(listed) == sorted(api.__all__), "GROUPS must have the names in kvtwin.conformance.api.__all__"
    parts = [
        "# The judge's API\n", "`from kvtwin.conformance import api`; see [Use the judge in your own tests]"
        "(../../how-to/own-tests.md).\n",
    ]
    for heading, names in GROUPS.items():
        parts += [f"## {heading}\n", *(entry(getattr(api, name), name) for name in names)]
    parts += ["## `kvtwin.conformance.Method`\n", entry(Method, "Method")]
    return "\n".join(part.rstrip() + "\n" for part in parts)
