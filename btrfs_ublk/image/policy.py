"""Who may bring sealed images: /etc/btrfs-ublk/images.toml.

The kernel parses the metadata of a sealed image, so an image of a stranger is not even
mounted. Without the file, only images that are named by digest are taken.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from btrfs_ublk.base.private_dirs import (
    CONFIG_DIRECTORY,
    CONFIG_VARIABLE,
    read_trusted_toml,
)
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.image.reference import Reference

FILE_NAME = "images.toml"

#: Returns which of these keys has signed the image, or None.
FindSigner = Callable[[Sequence[Path]], Path | None]


class RefusedImageError(BtrfsUblkError):
    """The policy does not let this image in."""


@dataclass(frozen=True)
class Rule:
    """Repositories, as a pattern like ``registry.example.org/team/*``, and the keys of
    which one must have signed their images; none: that is not needed."""

    source: str
    keys: tuple[Path, ...] = ()

    def matches(self, reference: Reference) -> bool:
        return fnmatch.fnmatchcase(reference.place, self.source)


@dataclass(frozen=True)
class Policy:
    """``path`` is the file. The first rule that matches decides; ``digests`` says
    whether naming a digest suffices."""

    path: Path
    rules: tuple[Rule, ...] = ()
    digests: bool = True

    def allow(
        self,
        reference: Reference,
        find_signer: FindSigner,
        *,
        indexed: str | None = None,
    ) -> str:
        """Return why an image may come. Raises RefusedImageError, which says why it may
        not. ``indexed`` is the digest of an indexed image that refers to the one that
        is named, whose digest says nothing of it."""
        if reference.digest is not None and self.digests and indexed is None:
            return "named by its digest"
        rule = next((rule for rule in self.rules if rule.matches(reference)), None)
        if rule is not None:
            if not rule.keys:
                return f"{self.path} allows {rule.source}"
            signer = find_signer(rule.keys)
            if signer is not None:
                return f"signed by {signer}"
            raise RefusedImageError(
                f"{reference} is not signed by {', '.join(map(str, rule.keys))}, which "
                f"{self.path} wants for it",
                hint=f"sign it: cosign sign --key … {reference}",
            )
        raise RefusedImageError(
            f"no sealed image may come from {reference.place}: "
            + (
                f"{self.path} does not allow it"
                if self.path.exists()
                else f"there is no {self.path}"
            ),
            hint=(
                "the kernel parses it, so allow only whom you trust, by a table "
                f'[[allow]] with from = "{reference.place}"'
                + (
                    f", or name the image by its digest, {reference.at(indexed)}"
                    if self.digests and indexed is not None
                    else ", or name the image by its digest" if self.digests else ""
                )
            ),
        )


def policy_path() -> Path:
    """Return the path of the file, which may be missing."""
    return Path(os.environ.get(CONFIG_VARIABLE) or CONFIG_DIRECTORY, FILE_NAME)


def read_policy(path: Path | None = None) -> Policy:
    """Read the policy; without a file, the default. Raises UsageError."""
    path = path or policy_path()
    keys = read_trusted_toml(path)
    if keys is None:
        return Policy(path)
    unknown = keys.keys() - {"allow", "digests"}
    if unknown:
        raise UsageError(
            f"{path}: key {min(unknown)!r} is unknown", hint="there are: allow, digests"
        )
    rules, digests = keys.get("allow", []), keys.get("digests", True)
    if not isinstance(rules, list) or not isinstance(digests, bool):
        raise UsageError(
            f"{path}: allow is a list of tables, and digests true or false",
            hint="write [[allow]]",
        )
    return Policy(path, tuple(_parse_rule(each, path) for each in rules), digests)


def _parse_rule(value: object, path: Path) -> Rule:
    match value:
        case {"from": str(source), **rest} if source and rest.keys() <= {"keys"}:
            names = rest.get("keys", [])
            if isinstance(names, list) and all(isinstance(x, str) for x in names):
                if "keys" in rest and not names:
                    raise UsageError(f"{path}: {source} has an empty list of keys")
                return Rule(source, tuple(path.parent / name for name in names))
    raise UsageError(
        f"{path}: {value!r} is no rule",
        hint='write from = "REGISTRY/REPOSITORY", and perhaps keys = ["PATH", …]',
    )
