"""Stand-ins for ``torchvision`` and ``sgl_kernel``, which SGLang imports on a CPU and does not use there.

``make engines`` puts this module into SGLang's environment, where a ``.pth`` file imports it at every start. Neither
package is installed: one would drag video libraries, the other is built for CUDA.

Invariant: importing, reading an attribute and deriving a class work, so that modules load; using one raises. Nothing
is ever computed by a stand-in, so nothing can be computed wrongly.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

PACKAGES = ("torchvision", "sgl_kernel")


class Absent(type):
    """The class of everything that a stand-in module holds: a class whose attributes are more of its kind."""

    def __getattr__(cls, name: str) -> Any:
        return _absent(f"{cls.__qualname__}.{name}", name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{cls.__qualname__} is a stand-in for a package that this environment leaves out")


def _absent(qualified: str, name: str) -> Any:
    # What Python itself asks for (a class's __wrapped__, a module's __all__) is honestly not there.
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent(name, (), {"__qualname__": qualified})


class StandIn(types.ModuleType):
    """A module that has every name."""

    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        value = _absent(f"{self.__name__}.{name}", name)
        setattr(self, name, value)
        return value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages and all that could be in them; asked last, so that a real package would win."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A package for every name below ``PACKAGES``."""
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """An empty stand-in."""
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is no code."""


def install() -> None:
    """Ask ``Finder`` after all others."""
    sys.meta_path.append(Finder())
