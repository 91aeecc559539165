"""Work that runs on a GPU at the same time as a prompt's attention.

cuDNN's kernel is one program on each multiprocessor, with all of its shared memory, until the end. So only what starts
before it can run beside it, and it should take few multiprocessors: the attention starts on the others. If kernels of
both streams are ready, the GPU starts those of this stream first, since it has a high priority.
"""

from __future__ import annotations

import torch

from ...reference.contract.arguments import capturing

#: One stream per device.
_streams: dict[torch.device, torch.cuda.Stream] = {}


def fork(device: torch.device) -> torch.cuda.Stream | None:
    """A stream whose work begins behind what was launched so far, for `graph.on` and `graph.join`. None if all work has
    to be on the current stream: on the CPU, in a CUDA graph's capture and under torch.compile.

    What its work reads and writes must be allocated before `fork`, and must not be freed before `join`. Memory that the
    work allocates must not be used outside.
    """
    if device.type != "cuda" or torch.compiler.is_compiling() or capturing(device):
        return None
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device, priority=-1)
    _streams[device].wait_stream(torch.cuda.current_stream(device))
    return _streams[device]
