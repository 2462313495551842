"""Remove secrets from URLs that are shown: logins, and signatures in queries."""

from __future__ import annotations

import re
from typing import Any

REDACTED = "[redacted]"

_URL = r"\b[a-z][a-z0-9+.-]*:\\?/\\?/"
#: They match the parts of https://user:password@host/path?query#fragment.
_RULES = [
    (re.compile(rf"(?i)({_URL})[^\s/?#\"'<>]*@"), rf"\1{REDACTED}@"),
    # NB: a text that was redacted before stays as it is.
    (
        re.compile(rf"(?i)({_URL}[^\s?#\"'<>]*[?#])(?!\[redacted\])[^\s\"'<>]+"),
        rf"\1{REDACTED}",
    ),
]


def shown_text(text: str) -> str:
    """Return a text without logins, queries and fragments of URLs in it."""
    if "://" in text or r":\/\/" in text:
        for pattern, instead in _RULES:
            text = pattern.sub(instead, text)
    return text


def shown_value(value: Any) -> Any:
    """Do the same in all texts of a value that JSON can hold."""
    match value:
        case str():
            return shown_text(value)
        case dict():
            return {name: shown_value(below) for name, below in value.items()}
        case list() | tuple():
            return [shown_value(each) for each in value]
    return value
