"""``@dataclass`` for modules that commands import.

That of the standard library compiles six functions for a class, which takes half a
millisecond. A command imports a hundred such classes, and uses twenty of them for a few
objects. So this one waits until the first object is made, or until somebody asks for
the class's fields, and compiles nothing. Its objects take twice as long to make, and
longer to compare: where there are thousands, take the other.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass  # noqa: F811

_lock = threading.RLock()
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]
#: The options of classes that wait.
_waiting: dict[type, dict[str, Any]] = {}


class _Fields:
    def __get__(self, _object: object, cls: type) -> Any:
        _complete(cls)
        return getattr(cls, "__dataclass_fields__")  # noqa: B009 (mypy knows no such)


def _complete(cls: type) -> None:
    from dataclasses import dataclass as decorate

    given = {"init": False, "repr": False, "eq": False, "frozen": False}
    with _lock:
        for each in reversed(cls.__mro__):
            if (options := _waiting.get(each)) is not None:
                if not each.__doc__:
                    each.__doc__ = each.__name__  # Else it formats a signature.
                before = dict(vars(each))
                try:
                    decorate(**options | given)(each)
                    if "__init__" not in each.__dict__:
                        setattr(each, "__init__", _initialiser(each))  # noqa: B010
                except BaseException:  # a signal's, too: the next try finds all
                    for name, value in before.items():
                        if name == "__dataclass_fields__" or isinstance(value, Field):
                            setattr(each, name, value)
                    raise
                del _waiting[each]


def _initialiser(cls: type) -> Callable[..., None]:
    known = fields(cls)
    names = [each.name for each in known]
    positional = [each.name for each in known if not each.kw_only]
    defaults = {x.name: x.default for x in known if x.default is not MISSING}
    factories: dict[str, Callable[[], Any]] = {
        x.name: x.default_factory for x in known if x.default_factory is not MISSING
    }
    called = f"{cls.__qualname__}.__init__()"

    def __init__(self: Any, /, *values: Any, **keys: Any) -> None:
        if len(values) > len(positional):
            raise TypeError(f"{called} takes {len(positional)} positional arguments")
        for name, value in zip(positional, values, strict=False):
            if name in keys:
                raise TypeError(f"{called} got multiple values for argument {name!r}")
            keys[name] = value
        for name in names:
            if name in keys:
                value = keys.pop(name)
            elif name in defaults:
                value = defaults[name]
            elif name in factories:
                value = factories[name]()
            else:
                raise TypeError(f"{called} missing 1 required argument: {name!r}")
            object.__setattr__(self, name, value)  # It may be a descriptor's.
        for name in keys:
            raise TypeError(f"{called} got an unexpected keyword argument {name!r}")
        if hasattr(self, "__post_init__"):
            self.__post_init__()

    return __init__


def _values(self: Any) -> list[Any]:
    return [getattr(self, each.name) for each in fields(self) if each.compare]


def _repr(self: Any) -> str:
    shown = (each.name for each in fields(self) if each.repr)
    keys = ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)
    return f"{type(self).__qualname__}({keys})"


def _eq(self: Any, other: Any) -> Any:
    if type(self) is not type(other):
        return NotImplemented
    return _values(self) == _values(other)


def _hash(self: Any) -> int:
    return hash(tuple(_values(self)))


def _refuse(self: Any, name: str, *_value: Any) -> None:
    raise FrozenInstanceError(f"cannot change {name!r} of {type(self).__name__}")


def _waiting_dataclass(cls: Any = None, /, **options: Any) -> Any:
    if cls is None:
        return lambda cls: _waiting_dataclass(cls, **options)
    if options.get("slots") or (
        cls.__new__ is not object.__new__ and cls.__new__.__module__ != __name__
    ):
        raise TypeError(f"{cls} needs dataclasses.dataclass")

    # NB: Python looks for __init__ when this has returned. It stays: CPython does not
    # forget that a class had a __new__ of its own.
    def __new__(made: type, /, *_args: Any, **_keys: Any) -> Any:
        if cls in _waiting:
            _complete(cls)
        return object.__new__(made)

    frozen = options.get("frozen", False)
    made: dict[str, Any] = {"__repr__": _repr} if options.get("repr", True) else {}
    if options.get("eq", True):
        made |= {"__eq__": _eq, "__hash__": _hash if frozen else None}
    if frozen:
        made |= {"__setattr__": _refuse, "__delattr__": _refuse}
    for name, function in made.items():
        if cls.__dict__.get(name) is None:
            setattr(cls, name, function)
    cls.__new__, cls.__dataclass_fields__ = __new__, _Fields()
    _waiting[cls] = options
    return cls


if not TYPE_CHECKING:
    dataclass = _waiting_dataclass  # noqa: F811
