"""Find out what the kernel offers to the front ends, and what the server uses."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from btrfs_ublk.base.helpers import SERVER, helper_path
from btrfs_ublk.base.process import run
from btrfs_ublk.errors import BtrfsUblkError

#: The server bounds its own command to the driver to 30 s.
_TIMEOUT_S = 40.0


@dataclass(frozen=True)
class Feature:
    """A feature of a front end. ``offered`` is None if this process cannot find out.
    ``used`` is "always" (if it is offered), "asked" (if an option asks for it) or
    "never"; ``reason`` says why."""

    name: str
    since: str
    offered: bool | None
    used: str
    reason: str


@dataclass(frozen=True)
class FrontEndFeatures:
    """The features of a front end. ``reason`` and ``hint`` are set if this kernel lacks
    it."""

    front_end: str
    available: bool
    features: list[Feature]
    protocol: str | None = None
    reason: str | None = None
    hint: str | None = None


def kernel_features() -> tuple[list[FrontEndFeatures], dict[str, Any]]:
    """Return the features of each front end, and the document that the server printed.
    Makes nothing. Raises CommandError, CapabilityError."""
    text = run([helper_path(SERVER), "--features"], timeout_s=_TIMEOUT_S).stdout
    document: dict[str, Any] = json.loads(text)
    return parse_features(document), document


def parse_features(document: dict[str, Any]) -> list[FrontEndFeatures]:
    """Parse what ``--features`` prints. Raises BtrfsUblkError when it is not valid."""
    try:
        return [
            FrontEndFeatures(
                front_end=name,
                available=bool(about["available"]),
                features=[Feature(**feature) for feature in about["features"]],
                protocol=about.get("protocol"),
                reason=about.get("reason"),
                hint=about.get("hint"),
            )
            for name, about in document.items()
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise BtrfsUblkError(
            f"the output of {SERVER} --features is not understood: {error!r}",
            hint="build package and helpers from one version",
        ) from error
