"""Signatures of images as cosign makes them with a key (its "simple signing" format).

They are in the same repository, by the tag sha256-HEX.sig of the signed manifest. A
signature counts when a key of ours made it and its payload names that manifest.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa

from btrfs_ublk.base.log import log
from btrfs_ublk.errors import UsageError, why_unread
from btrfs_ublk.image.access import RegistryError
from btrfs_ublk.image.documents import descriptors, parse_document
from btrfs_ublk.image.repository import Repository

_PAYLOAD = "application/vnd.dev.cosign.simplesigning.v1+json"
_SIGNATURE = "dev.cosignproject.cosign/signature"
_TYPE = "cosign container image signature"
_MAX_SIGNATURES = 100
_MAX_PAYLOAD_BYTES = 1 << 20

PublicKey = ec.EllipticCurvePublicKey | rsa.RSAPublicKey | ed25519.Ed25519PublicKey


def read_key(path: Path) -> PublicKey:
    """Read a public key (PEM), as ``cosign generate-key-pair`` makes. Raises
    UsageError."""
    try:
        key = serialization.load_pem_public_key(path.read_bytes())
    except OSError as error:
        raise UsageError(f"public key {path}: {why_unread(error)}") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UsageError(f"{path} is no public key in PEM: {error}") from error
    if not isinstance(key, PublicKey):
        raise UsageError(
            f"{path} is a key of another kind", hint="use ECDSA, RSA or Ed25519"
        )
    return key


def is_made_by(key: PublicKey, signature: bytes, payload: bytes) -> bool:
    """Whether the key made the signature of the payload, with SHA-256."""
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


def signer_of(repository: Repository, digest: str, keys: Sequence[Path]) -> Path | None:
    """Return the key of ``keys`` by which a manifest is signed, or None. Raises
    UsageError for a key that cannot be read, RegistryError."""
    loaded = [(path, read_key(path)) for path in keys]
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
            if is_made_by(key, signature, payload):
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
