"""The base class of states with Triton kernels that keep every token, for the methods of other packages.

A method subclasses `GrowingState`, sets `Config`, and the operation of a step in `_step`, which `operation` makes of a
function: see the docstrings.
"""

from ._common.growing_state import GrowingState as GrowingState
from ._common.operation import operation as operation
