"""``python -m kvtwin.conformance.lab.faults TOOL``: launch a kernel with an error that a sanitizer's tool must find."""

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl

THREADS = 128

#: Each thread writes its number to shared memory, and reads what a thread of another warp wrote, without a barrier.
RACE = """{
    .shared .align 4 .b32 box[128];
    .reg .u32 thread, here, there;
    mov.u32 thread, %tid.x;
    mov.u32 here, box;
    shl.b32 there, thread, 2;
    add.u32 here, here, there;
    st.shared.u32 [here], $1;
    xor.b32 there, thread, 64;
    shl.b32 there, there, 2;
    mov.u32 here, box;
    add.u32 here, here, there;
    ld.shared.u32 $0, [here];
}"""
#: A barrier for the first three threads of a warp, executed by all of them.
BARRIER = "bar.warp.sync 0x7; mov.u32 $0, $1;"


@triton.jit
def fault_memcheck(out, size):
    tl.store(out + size, 1)                                            # behind the last element


@triton.jit
def fault_initcheck(out, unwritten, THREADS: tl.constexpr):
    lane = tl.arange(0, THREADS)
    tl.store(out + lane, tl.load(unwritten + lane))


@triton.jit
def fault_inline(out, THREADS: tl.constexpr, CODE: tl.constexpr):
    lane = tl.arange(0, THREADS)
    found = tl.inline_asm_elementwise(CODE, "=r,r", [lane], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(out + lane, found)


def main(tool: str) -> int:
    out = torch.zeros(THREADS, dtype=torch.int32, device="cuda")
    if tool == "memcheck":
        fault_memcheck[1,](out, THREADS)
    elif tool == "initcheck":
        fault_initcheck[1,](out, torch.empty_like(out), THREADS)
    elif tool == "racecheck":
        fault_inline[1,](out, THREADS, RACE, num_warps=THREADS // 32)
    elif tool == "synccheck":
        fault_inline[1,](out, THREADS, BARRIER, num_warps=THREADS // 32)
    else:
        raise ValueError(f"tool must be memcheck, initcheck, racecheck or synccheck, got {tool!r}")
    torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
