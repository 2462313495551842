"""Signatures as people write them, with what defaults and types stand for."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from re import Match, sub
from textwrap import fill
from types import GenericAlias, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from btrfs_ublk import api

_COLUMNS = 88


def signature(head: str, function: Callable[..., object]) -> str:
    """Of a function, method or class; with a line for each parameter where one line is
    too long. ``head`` is what stands before the parenthesis.
    """
    line = one_line(head, function)
    if max(map(len, line.splitlines())) <= _COLUMNS:
        return line
    *parameters, end = _parts(function)
    folded = [
        fill(f"{x},", _COLUMNS, initial_indent=" " * 4, subsequent_indent=" " * 8)
        for x in parameters
    ]
    return "\n".join([f"{head}(", *folded, end])


def one_line(head: str, function: Callable[..., object]) -> str:
    """The same, however long that is."""
    *parameters, end = _parts(function)
    return f"{head}({', '.join(parameters)}{end}"


def returned_by(function: Callable[..., object]) -> str:
    """The type of what it returns, as a property's getter."""
    return _annotation(inspect.signature(function).return_annotation, function)


def value_text(value: Any) -> str:
    """A default, or a constant."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if inspect.isfunction(value):
        return "..."
    if type(value) is int and value >= 1 << 20 and value.bit_count() == 1:
        return f"1 << {value.bit_length() - 1}"
    if is_dataclass(value) and not isinstance(value, type) and value == type(value)():
        return f"{type(value).__name__}()"
    return repr(value)


def _parts(function: Callable[..., object]) -> Iterator[str]:
    """Each parameter; then the parenthesis, and what is returned."""
    found = inspect.signature(function)
    factories = {}
    if inspect.isclass(function) and is_dataclass(function):
        factories = {x.name: x.default_factory for x in fields(function)}
    starred = False
    for name, parameter in found.parameters.items():
        if name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        text = f"{name}: {_annotation(parameter.annotation, function)}"
        factory = factories.get(name, MISSING)
        if factory is not MISSING:
            text += f" = {value_text(factory())}"
        elif parameter.default is not parameter.empty:
            text += f" = {value_text(parameter.default)}"
        yield text
    yield ")" if inspect.isclass(function) else f") -> {returned_by(function)}"


def _annotation(hint: object, function: Callable[..., object]) -> str:
    """As it is written, but for names of types that the API does not have."""
    text = hint if isinstance(hint, str) else inspect.formatannotation(hint)
    names = vars(sys.modules[function.__module__])

    def written_out(match: Match[str]) -> str:
        value = names.get(match[0])
        told = match[0] in api.__all__ or inspect.isclass(value)
        return match[0] if told else _type(value) or match[0]

    # NB: Python keeps annotations with quotes of its own.
    return sub(r"\b[A-Z]\w*", written_out, text.replace("'", '"'))


def _type(value: object) -> str | None:
    """None for what says more by its name."""
    parts = get_args(value) if get_origin(value) in (Union, UnionType) else (value,)
    if all(get_origin(x) is Literal for x in parts):
        choices = [choice for part in parts for choice in get_args(part)]
        return f"Literal[{', '.join(map(value_text, choices))}]"
    if isinstance(value, GenericAlias):
        return str(value)
    if all(map(inspect.isclass, parts)):
        return " | ".join(x.__name__ for x in parts)
    return None
