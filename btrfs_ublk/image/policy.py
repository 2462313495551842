"""Who may bring sealed images: /etc/btrfs-ublk/images.toml, and signatures.

The kernel parses the metadata of a sealed image, so an image of a stranger is not even
mounted. Without the file, only images that are named by digest are taken.

Signatures are those that cosign makes with a key (its "simple signing" format). They
are in the image's repository, by the tag sha256-HEX.sig of the signed manifest. One
counts if a key of ours made it, and if its payload names that manifest.
"""

from __future__ import annotations

import base64
import fnmatch
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from btrfs_ublk.base.log import log
from btrfs_ublk.base.private_dirs import (
    CONFIG_DIRECTORY,
    CONFIG_VARIABLE,
    read_trusted_toml,
)
from btrfs_ublk.base.records import dataclass
from btrfs_ublk.errors import BtrfsUblkError, UsageError, why_unread
from btrfs_ublk.image.access import RegistryError
from btrfs_ublk.image.documents import descriptors, parse_document
from btrfs_ublk.image.reference import Reference

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

    from btrfs_ublk.image.repository import Repository

    _PublicKey: TypeAlias = (
        ec.EllipticCurvePublicKey | rsa.RSAPublicKey | ed25519.Ed25519PublicKey
    )

FILE_NAME = "images.toml"
_PAYLOAD = "application/vnd.dev.cosign.simplesigning.v1+json"
_SIGNATURE = "dev.cosignproject.cosign/signature"
_TYPE = "cosign container image signature"
_MAX_SIGNATURES = 100
_MAX_PAYLOAD_BYTES = 1 << 20

#: Returns which of these keys has signed the image, or None.
FindSigner = Callable[[Sequence[Path]], Path | None]


class RefusedImageError(BtrfsUblkError):
    """The policy does not let this image in."""


@dataclass(frozen=True)
class Rule:
    """Repositories, as a pattern like ``registry.example.org/team/*``. Their images
    must be signed by one of the ``keys``, if there are any."""

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
        is_there = self.path.exists()
        why = (
            f"{self.path} does not allow it" if is_there else f"there is no {self.path}"
        )
        hint = (
            "if you trust who writes there (the kernel parses the image), add a table "
            f'[[allow]] with from = "{reference.place}" to that file'
        )
        if self.digests:
            hint += ", or name the image by its digest"
            hint += f", {reference.at(indexed)}" if indexed is not None else ""
        raise RefusedImageError(
            f"no sealed image may come from {reference.place}: {why}", hint=hint
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


def signer_of(repository: Repository, digest: str, keys: Sequence[Path]) -> Path | None:
    """Return the key of ``keys`` by which a manifest is signed, or None. Raises
    UsageError for a key that cannot be read, RegistryError."""
    loaded = [(path, _read_key(path)) for path in keys]
    tag = f"{digest.replace(':', '-')}.sig"
    try:
        document = repository.document(tag)
    except RegistryError as error:
        if error.status == 404:
            return None
        raise
    where = f"signatures {tag} of {repository.place}"
    layers = descriptors(parse_document(document.data, where), "layers", where)
    for one in layers[:_MAX_SIGNATURES]:
        if one.media_type != _PAYLOAD or one.size > _MAX_PAYLOAD_BYTES:
            continue
        try:
            signature = base64.b64decode(
                str(one.annotations.get(_SIGNATURE)), None, True
            )
        except ValueError:
            continue
        payload = repository.get_blob(one)
        for path, key in loaded:
            if _is_made_by(key, signature, payload):
                if _names(payload, digest):
                    return path
                log.warning("%s: one is of another image", where)
    return None


def _names(payload: bytes, digest: str) -> bool:
    try:
        critical = json.loads(payload)["critical"]
        found = critical["image"]["docker-manifest-digest"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
    return bool(critical.get("type") == _TYPE and found == digest)


def _read_key(path: Path) -> _PublicKey:
    # Most rules want no signature, and this takes long to load.
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(path.read_bytes())
    except OSError as error:
        raise UsageError(f"public key {path}: {why_unread(error)}") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UsageError(f"{path} is no public key in PEM: {error}") from error
    if isinstance(
        key, (ec.EllipticCurvePublicKey, rsa.RSAPublicKey, ed25519.Ed25519PublicKey)
    ):
        return key
    raise UsageError(
        f"{path} is a key of another kind", hint="use ECDSA, RSA or Ed25519"
    )


def _is_made_by(key: _PublicKey, signature: bytes, payload: bytes) -> bool:
    """Whether the key made the signature of the payload, with SHA-256."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa

    try:
        match key:
            case ec.EllipticCurvePublicKey():
                key.verify(signature, payload, ec.ECDSA(hashes.SHA256()))
            case rsa.RSAPublicKey():
                key.verify(signature, payload, padding.PKCS1v15(), hashes.SHA256())
            case _:
                key.verify(signature, payload)
    except InvalidSignature:
        return False
    return True
