"""The base class of block caches with Triton kernels, for the methods of other packages.

A method subclasses `BlockState`, sets `Config` and implements `_update(block)`, which updates `score` and returns
(rank, protected): see the docstring of `BlockState`. `check_launchable` raises TypeError or ValueError
for tensors that no kernel takes: float64, tensors that require grad, and CPU tensors outside of Triton's interpreter.
"""

from ._common.block_cache.state import Block as Block
from ._common.block_cache.state import BlockState as BlockState
from ._common.block_cache.state import Policy as Policy
from ._common.launch import check_launchable as check_launchable
