"""Signatures as people write them, with defaults and types resolved."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from re import Match, sub
from textwrap import fill
from types import GenericAlias, UnionType
from typing import Any, ForwardRef, Literal, Union, get_args, get_origin

from btrfs_ublk import api
from btrfs_ublk.base.paths import OptionalPath, StrPath

_COLUMNS = 88


def signature(head: str, function: Callable[..., object]) -> str:
    """Return the signature of a function, method or class, with a line for each
    parameter if one line is too long. ``head`` is the text before the parenthesis.
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
    """Return the signature as one line of any length."""
    *parameters, end = _parts(function)
    return f"{head}({', '.join(parameters)}{end}"


def returned_by(function: Callable[..., object]) -> str:
    """Return its return type, also of a property's getter."""
    return _annotation(inspect.signature(function).return_annotation, function)


def value_text(value: Any) -> str:
    """Format a default, or a constant."""
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
    """Yield each parameter, then the parenthesis and the return type."""
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
    """Return the annotation, with names that are not in the API written out."""
    if isinstance(hint, ForwardRef):  # of a named tuple
        hint = hint.__forward_arg__
    text = hint if isinstance(hint, str) else inspect.formatannotation(hint)
    names = vars(sys.modules[function.__module__])

    def written_out(match: Match[str]) -> str:
        value = names.get(match[0])
        if value is OptionalPath:
            return f"{_type(StrPath)} | None"
        told = match[0] in api.__all__ or inspect.isclass(value)
        return match[0] if told else _type(value) or match[0]

    # NB: strings in annotations have single quotes.
    return sub(r"\b[A-Z]\w*", written_out, text.replace("'", '"'))


def _type(value: object) -> str | None:
    """Write a type out; None if its name says more."""
    parts = get_args(value) if get_origin(value) in (Union, UnionType) else (value,)
    if all(get_origin(x) is Literal for x in parts):
        choices = [choice for part in parts for choice in get_args(part)]
        return f"Literal[{', '.join(map(value_text, choices))}]"
    if all(inspect.isclass(x) or isinstance(x, GenericAlias) for x in parts):
        written = " | ".join(map(inspect.formatannotation, parts))
        return sub(r"\b(\w+\.)+", "", written)
    return None
