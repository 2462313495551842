"""The surface for other programs: names, types, paths."""

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator
from typing import Any, get_args, get_type_hints

import pytest

import btrfs_ublk
from btrfs_ublk import api
from btrfs_ublk.base.ledger import Entry, Ledger
from btrfs_ublk.base.paths import OptionalPath
from btrfs_ublk.content.maps import Ask
from btrfs_ublk.device import DeviceSpec, DeviceState

#: All names that other programs have.
OFFERED = {name: getattr(api, name) for name in api.__all__}


def test_all_is_documented_and_no_module_is_in_its_way() -> None:
    assert btrfs_ublk.__all__ == api.__all__ == sorted(api.__all__)
    assert set(api.__all__) <= set(dir(btrfs_ublk))
    modules = {module.name for module in pkgutil.iter_modules(btrfs_ublk.__path__)}
    assert not modules & set(api.__all__)
    for name in api.__all__:
        thing = getattr(btrfs_ublk, name)
        assert thing is getattr(importlib.import_module("btrfs_ublk.api"), name)
        assert thing.__doc__, f"{name} has no docstring"
    with pytest.raises(AttributeError, match="nonsense"):
        btrfs_ublk.nonsense  # type: ignore[attr-defined]


def functions() -> Iterator[tuple[str, Callable[..., object]]]:
    """All that can be called, methods as well."""
    for name, thing in OFFERED.items():
        if inspect.isfunction(thing):
            yield name, thing
        members = inspect.getmembers_static(thing) if inspect.isclass(thing) else []
        for key, member in members:
            if isinstance(member, property):
                member = member.fget
            function = getattr(member, "__func__", member)  # of a class method
            if inspect.isfunction(function) and (key == "__init__" or key[0] != "_"):
                yield f"{name}.{key}", function


def hints_of(thing: Any) -> dict[str, Any]:
    # NB: at run time array.array has no parameters, and what is only imported for type
    # checkers is not there; it has to be among what is offered.
    there = vars(sys.modules[thing.__module__])
    lacking = {name: each for name, each in OFFERED.items() if name not in there}
    hints = get_type_hints(thing, localns={**lacking, "array": list})
    return {name: hint for name, hint in hints.items() if not name.startswith("_")}


def test_what_it_takes_and_returns_can_be_named() -> None:
    """Of functions, methods and attributes, whatever their types are made of."""
    # Who has a ledger of his own, or makes a Mount or a MapClient, is no other program;
    # what a device's files hold is for people to read, and changes with versions.
    ours = (Ledger, Entry, Ask, DeviceSpec, DeviceState, OptionalPath)
    known = {*map(id, OFFERED.values()), *map(id, ours)}
    hints = {where: hints_of(function) for where, function in functions()}
    for name, thing in OFFERED.items():
        if inspect.isclass(thing):
            hints[name] = hints_of(thing)
    missing = {
        f"{kind.__qualname__}, of {where}"
        for where, found in hints.items()
        for hint in found.values()
        for kind in classes_in(hint)
        if kind.__module__.startswith("btrfs_ublk.") and id(kind) not in known
    }
    assert missing == set()


def classes_in(hint: Any) -> list[type]:
    """Those that a type is made of."""
    parts = hint if isinstance(hint, list) else get_args(hint)
    inner = [kind for part in parts for kind in classes_in(part)]
    return [hint, *inner] if inspect.isclass(hint) else inner
