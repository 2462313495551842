"""Import the names that a package offers when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module

from btrfs_ublk.base.signals import deferred


def exporter(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """Make the ``__getattr__`` of a package. ``modules`` has, for each of its modules,
    the names in it that the package offers, separated by spaces.

    The package has the same imports under ``TYPE_CHECKING``; a test compares them.
    """
    homes = {name: home for home, names in modules.items() for name in names.split()}

    def getattr_of_package(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # When a signal raises within an import, Python turns that into other errors.
        with deferred():
            value = getattr(import_module(f"{package}.{homes[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return getattr_of_package
