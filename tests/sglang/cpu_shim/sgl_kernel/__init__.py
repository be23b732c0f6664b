"""Stands in for SGLang's compiled kernels, which have no CPU build to install.

On a CPU, SGLang imports many names from this package and computes with torch instead. A name that is called
after all raises, so that nothing is ever computed wrongly here.
"""

from collections.abc import Callable
from typing import Any

__version__ = "0.0.0"


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} was called on a CPU, where only its name exists")

    return missing
