"""numba's compiler with types: the library has none, and an untyped decorator would hide those of what it decorates."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])


def jit(function: F) -> F:
    """Compile at the first call; the machine code is kept beside the source for the next process."""
    return cast(F, numba.njit(cache=True)(function))
