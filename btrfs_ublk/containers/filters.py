"""The filters of containerd's List calls (pkg/filters of containerd):

    kind==active,labels."containerd.io/gc.root"~=check.*

A filter is a list of selectors, all of which have to match; of several filters, one.
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

_NAME = re.compile(r"[A-Za-z0-9_]+")
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"')
#: Regular expressions may also stand between these, to need no quotes.
_DELIMITED = re.compile(r"\|[^|]*\||/[^/]*/")
_OPERATOR = re.compile(r"==|!=|~=")
#: What ends a value without quotes.
_BARE = re.compile(r'[^,"\s]+')


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

    def take(pattern: re.Pattern[str]) -> str | None:
        nonlocal at
        found = pattern.match(text, at)
        if found is None:
            return None
        at = found.end()
        return found[0]

    def unquote(quoted: str) -> str:
        try:
            return str(json.loads(quoted))
        except ValueError as error:
            raise refuse("a text that can be unquoted") from error

    def field() -> str:
        if (name := take(_NAME)) is not None:
            return name
        if (quoted := take(_QUOTED)) is not None:
            return unquote(quoted)
        raise refuse("the name of a field")

    while True:
        path = [field()]
        while text.startswith(".", at):
            at += 1
            path.append(field())
        operator = take(_OPERATOR) or ""
        value = ""
        if operator:
            if (quoted := take(_QUOTED)) is not None:
                value = unquote(quoted)
            elif operator == "~=" and (delimited := take(_DELIMITED)) is not None:
                value = delimited[1:-1]
            elif (bare := take(_BARE)) is not None:
                value = bare
            else:
                raise refuse("a value")
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
