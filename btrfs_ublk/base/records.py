"""``@dataclass`` for modules that commands import.

That of the standard library compiles six functions for a class, which takes half a
millisecond. A command imports a hundred such classes and uses twenty. So this one waits
until the first object is made, or until somebody asks for the class's fields.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass  # noqa: F811

_lock = threading.RLock()
#: The options of classes that wait.
_waiting: dict[type, dict[str, Any]] = {}


class _Fields:
    def __get__(self, _object: object, cls: type) -> Any:
        _complete(cls)
        return getattr(cls, "__dataclass_fields__")  # noqa: B009 (mypy knows no such)


def _complete(cls: type) -> None:
    from dataclasses import dataclass as decorate

    with _lock:
        for each in reversed(cls.__mro__):
            if (options := _waiting.get(each)) is not None:
                if not each.__doc__:
                    each.__doc__ = each.__name__  # Else it formats a signature.
                decorate(**options)(each)
                del _waiting[each]


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

    cls.__new__, cls.__dataclass_fields__ = __new__, _Fields()
    _waiting[cls] = options
    return cls


if not TYPE_CHECKING:
    dataclass = _waiting_dataclass  # noqa: F811
