"""``python -m kvtwin.conformance.harness.fresh [MODULE]``: the process that judge/fresh.py starts.

It reads a line of JSON per call, a case and its subject, makes the inputs from the case's seed, calls the function of
the implementation MODULE (default: kvtwin.optimized) and answers with a digest of each field of the result.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

import torch

from ..cases import saved
from ..judge.fresh import digests


def release() -> None:
    """Leave the GPU's memory to the process that waits for the answer."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def main(implementation: str | None) -> None:
    answers = os.fdopen(os.dup(1), "w")  # what the implementation prints goes elsewhere
    os.dup2(2, 1)
    from .. import registry
    from ..judge import subjects
    from ..judge.calls import returned_tensors
    from .impl import Twins

    registry.every()
    side, every = Twins(implementation).optimized, {str(one): one for one in subjects.every()}
    for line in sys.stdin:
        fields = json.loads(line)
        subject = every[fields.pop("subject")]
        try:
            case = saved.from_description(fields)
            found: dict[str, Any] = digests(returned_tensors(subject, subject.module(side), subject.inputs(case)))
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        release()
        answers.write(json.dumps(found) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
