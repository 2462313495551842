"""Types for paths that callers give as strings or as path-like objects."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TypeAlias, overload

StrPath: TypeAlias = str | PathLike[str]


class OptionalPath:
    """An attribute of a dataclass that takes any path and is read as a Path. Its
    default is None."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> None: ...

    @overload
    def __get__(self, instance: object, owner: type) -> Path | None: ...

    def __get__(self, instance: object | None, owner: type) -> Path | None:
        # NB: dataclass() takes the value that it reads from the class as the default.
        return None if instance is None else instance.__dict__[self._name]

    def __set__(self, instance: object, value: StrPath | None) -> None:
        # NB: the default of a field() is the descriptor itself.
        if value is None or isinstance(value, OptionalPath):
            instance.__dict__[self._name] = None
        else:
            instance.__dict__[self._name] = Path(value)

    def __repr__(self) -> str:
        return "None"  # As a default in a signature.
