"""Import the names that a package offers when they are first used."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib import import_module

from btrfs_ublk.base.signals import deferred

_IMPORT = re.compile(r"^    from (\S+) import (?:\(([^)]*)\)|(.+))$", re.M)


def exporter(package: str, path: str) -> Callable[[str], object]:
    """Make the ``__getattr__`` of a package, and its ``__all__``: of the names that its
    source, in the file ``path``, imports under ``TYPE_CHECKING``.
    """
    homes: dict[str, str] = {}

    def getattr_of_package(name: str) -> object:
        if not homes:
            with open(path, encoding="utf-8") as file:
                found = _IMPORT.findall(file.read())
            for home, several, one in found:
                names = (several or one).replace(",", " ").split()
                homes.update(dict.fromkeys(names, home))
        if name == "__all__":
            return sorted(homes)
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # When a signal raises within an import, Python turns that into other errors.
        with deferred():
            value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return getattr_of_package
