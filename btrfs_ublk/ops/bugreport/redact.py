"""Removes secrets from text: by their form, by the name before them, and by value,
where this machine's secrets are known.

It rather removes too much than too little. Hosts and paths stay.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from configparser import ConfigParser
from configparser import Error as ConfigError
from contextlib import suppress
from pathlib import Path
from typing import Any

from btrfs_ublk.base.urls import REDACTED, shown_text
from btrfs_ublk.image.credentials import usual_paths

#: Parts of the names of secret values.
_SECRET_NAME = (
    r"pass(?:word|wd|phrase)|secret|token|credential|signature|cookie|bearer|private"
    r"|access[_-]?key|api[_-]?key|auth(?:orization|s)?(?![a-z])|x-amz-[a-z-]+"
)
_IS_SECRET_NAME = re.compile(_SECRET_NAME, re.I)
_RULES = [
    # -----BEGIN RSA PRIVATE KEY-----
    (
        re.compile(
            r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]+-----|\Z)", re.S
        ),
        REDACTED,
    ),
    # Authorization: Basic …; all up to the end of the line
    (
        re.compile(
            r"(?im)(\b(?:proxy-)?(?:authorization|cookie|set-cookie|www-authenticate)"
            r"[\"']?\s*[:=]\s*).*$"
        ),
        rf"\1{REDACTED}",
    ),
    (re.compile(r"(?i)\b(bearer|basic)\s+[a-z0-9._~+/=-]{6,}"), rf"\1 {REDACTED}"),
    # http_proxy=user:password@host, as curl takes it
    (re.compile(r"[^\s:/@=\"'<>]+:[^\s/@\"'<>]+@(?=[\w.\[])"), f"{REDACTED}@"),
    # {"text": "{\"password\": \"…\"}"}: quotes within a text
    (
        re.compile(
            rf"(?i)((?:{_SECRET_NAME})[\w.-]*\\+[\"']\s*[:=]\s*\\+[\"']).*?"
            r"(?=\\+[\"'])"
        ),
        rf"\1{REDACTED}",
    ),
    # password=…, "token": "…", AWS_SECRET_ACCESS_KEY=…; --password …
    (
        re.compile(
            rf"(?i)((?:[\w.-]*(?:{_SECRET_NAME})[\w.-]*[\"']?\s*[:=]\s*)"
            rf"|(?:--[\w-]*(?:{_SECRET_NAME})[\w-]*[\"']?,?\s+))"
            r"(\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^\s,;&}\]]+)"
        ),
        rf"\1{REDACTED}",
    ),
    # Key ids of AWS, and tokens in the form of a JWT, anywhere
    (re.compile(r"\b(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{12,}\b"), REDACTED),
    (re.compile(r"\beyJ[\w-]+\.[\w-]+(?:\.[\w-]*)?"), REDACTED),
]
#: Shorter values would also be found within ordinary words.
_LEAST_LENGTH = 6


class Redactor:
    """``secrets``: values to remove wherever they occur."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        # The longest first, since one may be part of another.
        found = {secret for secret in secrets if len(secret) >= _LEAST_LENGTH}
        self._secrets = sorted(found, key=len, reverse=True)

    def text(self, text: str) -> str:
        """Return the text without secrets."""
        for secret in self._secrets:
            text = text.replace(secret, REDACTED)
        text = shown_text(text)
        for pattern, instead in _RULES:
            text = pattern.sub(instead, text)
        return text

    def value(self, value: Any) -> Any:
        """Redact a JSON value. If a name suggests a secret, all text below it is
        removed.
        """
        match value:
            case str():
                return self.text(value)
            case dict():
                return {
                    self.text(str(name)): (
                        _emptied(below)
                        if _IS_SECRET_NAME.search(str(name))
                        else self.value(below)
                    )
                    for name, below in value.items()
                }
            case list() | tuple():
                # In a command line, an option's name precedes its value.
                before = [None, *value]
                return [
                    (
                        REDACTED
                        if isinstance(name, str)
                        and name.startswith("-")
                        and _IS_SECRET_NAME.search(name)
                        and "=" not in name
                        else self.value(each)
                    )
                    for name, each in zip(before, value)
                ]
        return value


def _emptied(value: Any) -> Any:
    """Redact all text of a value. Numbers stay: a count of tokens is no secret."""
    match value:
        case str():
            return REDACTED
        case dict():
            return {name: _emptied(below) for name, below in value.items()}
        case list() | tuple():
            return [_emptied(each) for each in value]
    return value


def known_secrets(environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Yield the secrets in this user's environment and files, which our programs may
    have been given and then have written somewhere.
    """
    for name, value in environment.items():
        if _IS_SECRET_NAME.search(name):
            yield value
        if "@" in value and ("://" in value or name.lower().endswith("_proxy")):
            login = value.rpartition("@")[0].rpartition("//")[2]
            yield login
            yield login.rpartition(":")[2]
    home = Path(environment.get("HOME", "/root"))
    for path in usual_paths({"HOME": str(home), **environment}):
        with suppress(OSError, ValueError, AttributeError):
            yield from _docker_secrets(json.loads(path.read_text()))
    aws = environment.get("AWS_SHARED_CREDENTIALS_FILE", home / ".aws" / "credentials")
    with suppress(OSError, ValueError, ConfigError):
        parser = ConfigParser(interpolation=None)
        parser.read_string(Path(aws).read_text())
        for section in parser.sections():
            yield from parser[section].values()


def _docker_secrets(config: dict[str, Any]) -> Iterator[str]:
    for login in config.get("auths", {}).values():
        for name in ("auth", "password", "identitytoken", "registrytoken"):
            value = login.get(name)
            if isinstance(value, str):
                yield value
        with suppress(binascii.Error, ValueError, TypeError):
            pair = base64.b64decode(login["auth"], validate=True).decode()
            yield pair
            yield pair.partition(":")[2]
