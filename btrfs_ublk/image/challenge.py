"""What a registry wants to be asked with: WWW-Authenticate (RFC 9110, 11.6).

The same rules as for block servers (csrc/lazy/mirror/challenge.c);
tests/support/tables/challenges.json has cases for both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urljoin

_SCHEME = re.compile(r"[A-Za-z0-9+.-]+:")
_SPACE = re.compile(r"[ \t,]*")
_NAME = re.compile(r"([^ \t,=]*)")
_EQUALS = re.compile(r"[ \t]*=[ \t]*")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_PLAIN = re.compile(r"[^ \t,]*")


@dataclass(frozen=True)
class Challenge:
    """What a registry takes: tokens, which ``realm`` gives, or a password (``basic``).
    The realm is a URL; None where tokens are wanted that nobody gives."""

    bearer: bool = False
    realm: str | None = None
    service: str | None = None
    scope: str | None = None
    basic: bool = False

    @property
    def wants_token(self) -> bool:
        return self.realm is not None or (self.bearer and not self.basic)


def parse_challenges(text: str, base: str) -> Challenge:
    """Return what the headers of a refusal say, joined by commas. A realm may be
    relative to ``base``, the URL that was refused."""
    schemes: list[tuple[str, dict[str, str]]] = []
    for name, value in _words(text):
        if value is None:
            schemes.append((name, {}))
        elif schemes:
            schemes[-1][1].setdefault(name, value)
    tokens = [given for name, given in schemes if name == "bearer"]
    given = next((x for x in tokens if "realm" in x), tokens[-1] if tokens else {})
    realm = given.get("realm")
    return Challenge(
        bearer=bool(tokens),
        realm=None if realm is None else _resolved(base, realm),
        service=given.get("service"),
        scope=given.get("scope"),
        basic=any(name == "basic" for name, _ in schemes),
    )


def _resolved(base: str, realm: str) -> str:
    if _SCHEME.match(realm):
        return realm
    try:
        return urljoin(base, realm)
    except ValueError:  # such as "//[bad"
        return ""


def _words(text: str) -> Iterator[tuple[str, str | None]]:
    """Yield each scheme with None, and each parameter with its value, up to what is not
    valid."""
    at = 0
    while True:
        at = _end(_SPACE, text, at)
        if at == len(text):
            return
        name, at = text[at : (end := _end(_NAME, text, at))].lower(), end
        equals = _EQUALS.match(text, at)
        if not equals:
            yield name, None
            continue
        at = equals.end()
        if not text.startswith('"', at):
            value, at = text[at : (end := _end(_PLAIN, text, at))], end
            yield name, value
            continue
        quoted = _QUOTED.match(text, at)
        if not quoted:
            return
        yield name, re.sub(r"\\(.)", r"\1", quoted[1], flags=re.DOTALL)
        at = quoted.end()


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at
