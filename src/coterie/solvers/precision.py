"""Mixed precision of local steps: a setting of speed, which the guarantee never sees.

Products of a step are computed in the type asked for, parameters and steps stay in float32, and
contributions are clipped, rounded and summed in float64 as ever. Of the short types only bfloat16
is offered: float16 loses small gradients unless losses are scaled.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Literal

import torch

Precision = Literal["float32", "bfloat16"]
_CURRENT: ContextVar[Precision] = ContextVar("precision", default="float32")


@contextmanager
def computed_in(precision: Precision) -> Iterator[None]:
    """Compute the local steps inside this block in such a precision."""
    before = _CURRENT.set(precision)
    try:
        yield
    finally:
        _CURRENT.reset(before)


def current() -> Precision:
    """Return the precision asked for."""
    return _CURRENT.get()


def lowered(device: torch.device) -> AbstractContextManager[object]:
    """Open what makes torch compute products in the current precision on a device."""
    if current() == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, current()))
