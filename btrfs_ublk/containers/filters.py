"""The filters of containerd's List calls (pkg/filters of containerd):

    kind==active,labels."containerd.io/gc.root"~=check.*

A filter is a list of selectors, which all have to match; of several filters, one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from btrfs_ublk.errors import UsageError

#: The value of a path of field names, or None where it is absent.
Lookup = Callable[[Sequence[str]], str | None]
Filter = Callable[[Lookup], bool]

_QUOTED = r'"(?:[^"\\\n]|\\.)*"'
_FIELD = re.compile(rf"[A-Za-z0-9_]+|{_QUOTED}")
_OPERATOR = re.compile(r"==|!=|~=")
#: Regular expressions may also be between | or /, to need no quotes.
_VALUES = {
    "~=": re.compile(rf"{_QUOTED}|\|[^|]*\||/[^/]*/|[^,\"\s]+"),
    "==": (_value := re.compile(rf"{_QUOTED}|[^,\"\s]+")),
    "!=": _value,
}


@dataclass(frozen=True)
class _Selector:
    path: tuple[str, ...]
    operator: str  # "" asks whether the field is there
    value: str

    def matches(self, lookup: Lookup) -> bool:
        found = lookup(self.path)
        match self.operator:
            case "==":
                return found is not None and found == self.value
            case "!=":
                return found != self.value
            case "~=":
                return found is not None and re.search(self.value, found) is not None
        return found is not None


def parse_filters(texts: Sequence[str]) -> Filter:
    """Return what says whether an object matches one of the filters; without filters,
    all do. Raises UsageError."""
    parsed = [_parse(text) for text in texts]
    if not parsed:
        return lambda lookup: True
    return lambda lookup: any(
        all(selector.matches(lookup) for selector in selectors) for selectors in parsed
    )


def lookup_of(fields: Mapping[str, str], labels: Mapping[str, str]) -> Lookup:
    """Return the lookup of an object with these fields and labels."""

    def lookup(path: Sequence[str]) -> str | None:
        if path[0] == "labels" and len(path) > 1:
            # Names of labels have dots, and need not be quoted.
            return labels.get(".".join(path[1:]))
        return fields.get(path[0]) if len(path) == 1 else None

    return lookup


def _parse(text: str) -> list[_Selector]:
    selectors = []
    at = 0

    def refuse(expected: str) -> UsageError:
        return UsageError(
            f"filter {text!r}: expected {expected} at character {at + 1}",
            hint="for example kind==active,labels.name==value",
        )

    def take(pattern: re.Pattern[str], what: str) -> str:
        nonlocal at
        found = pattern.match(text, at)
        if found is None:
            raise refuse(what)
        at = found.end()
        if not found[0].startswith('"'):
            return found[0]
        try:
            return str(json.loads(found[0]))
        except ValueError as error:
            raise refuse("a text that can be unquoted") from error

    while True:
        path = [take(_FIELD, "the name of a field")]
        while text.startswith(".", at):
            at += 1
            path.append(take(_FIELD, "the name of a field"))
        operator, value = "", ""
        if _OPERATOR.match(text, at):
            operator = take(_OPERATOR, "an operator")
            is_delimited = text.startswith(("|", "/"), at) and operator == "~="
            value = take(_VALUES[operator], "a value")
            if is_delimited and len(value) > 1 and value[0] == value[-1]:
                value = value[1:-1]
            if operator == "~=":
                try:
                    re.compile(value)
                except re.error as error:
                    raise UsageError(
                        f"filter {text!r}: {value!r} is no regular expression: {error}",
                        hint="quote what is not meant as an operator by a backslash",
                    ) from error
        selectors.append(_Selector(tuple(path), operator, value))
        if at == len(text):
            return selectors
        if text[at] != ",":
            raise refuse("a comma, or the end")
        at += 1
