"""``kvtwin verify METHOD --impl MODULE --sanitize``: the implementation under a tool of NVIDIA's compute-sanitizer.

The properties' tests of small sizes run in one process, which the tool watches. All torch memory is allocated with
cudaMalloc, so that no tensor lies next to another, and an access beyond an allocation is seen even if what it reads is
thrown away. What the tool finds in PyTorch's and CUDA's own kernels is counted and has no effect.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

TOOLS = ("memcheck", "initcheck", "racecheck", "synccheck")
PROGRAM = "compute-sanitizer"
OPTIONS = (
    "--target-processes", "application-only", "--print-limit", "0", "--report-api-errors", "no", "--show-backtrace",
    "device", "--max-connections", "200",  # of all that run on this machine: with 10, the default, more of them hang
)

#: What the process is told, so that it runs the tests itself, and not in workers of its own.
WATCHED = "KVTWIN_SANITIZED"
TESTS = "test_properties and not launches"
#: Kernels of PyTorch and of the libraries in it, by their namespaces: a stranger's may have any other name.
OTHERS = re.compile(r"\b(at::native|at_cuda_detail|cub|thrust)::")
SHOWN = 5


def findings(log: str) -> Iterator[str]:
    """The findings in the output of compute-sanitizer, whatever their kernel."""
    blocks = re.split(r"^========= (?=\S)", "\n".join(re.findall(r"^=========.*", log, re.M)), flags=re.M)
    for block in blocks[1:]:
        if re.match(r"Invalid|Misaligned|Uninitialized|Race|Error: Race|Warning: Race|Barrier|Divergent", block):
            yield block.replace("=========", "").strip()


def missing() -> str | None:
    """What a run needs and is not there; None if nothing."""
    if shutil.which(PROGRAM) is None:
        return f"{PROGRAM} is not on the PATH; it is part of the CUDA toolkit"
    import torch

    return None if torch.cuda.is_available() else "there is no GPU"


def run(tool: str, arguments: Sequence[str], logs: Path) -> int:
    """Judge with these arguments of the command under a tool. Returns the exit code: 1 if the tool finds something in
    kernels that are not PyTorch's, or a property is wrong; 0 if not, even where these tests cover too little."""
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", WATCHED: tool}
    log = logs / f"verify.{tool}.log"
    logs.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            [PROGRAM, "--tool", tool, *OPTIONS, sys.executable, "-m", "kvtwin.conformance", *arguments],
            env=environment, stdout=file, stderr=subprocess.STDOUT, check=False,
        )
    said = log.read_text(encoding="utf-8", errors="replace")
    print("\n".join(line for line in said.splitlines() if not line.startswith("=========")))
    found = list(findings(said))
    theirs = [text for text in found if not OTHERS.search(text)]
    for text in theirs[:SHOWN]:
        print(f"{tool}: {text}")
    print(f"{tool}: {len(theirs)} findings, {len(found) - len(theirs)} in kernels of PyTorch and CUDA: {log}")
    if re.search(r"^========= (ERROR|RACECHECK) SUMMARY", said, re.M) is None:
        print(f"error: {PROGRAM} did not end", file=sys.stderr)
        return 3
    return 1 if theirs or done.returncode == 1 else 0 if done.returncode == 6 else done.returncode
