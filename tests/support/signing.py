"""Keys that sign images, as cosign does."""

import base64
import json
from collections.abc import Callable

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from support.registry import Registry, registry_fixture

from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.documents import MANIFEST, describe, to_bytes
from btrfs_ublk.image.reference import Reference
from btrfs_ublk.image.transfer import open_repository

Sign = Callable[[bytes], bytes]

PAYLOAD = "application/vnd.dev.cosign.simplesigning.v1+json"


def ec_key() -> tuple[bytes, Sign]:
    key = ec.generate_private_key(ec.SECP256R1())
    return pem(key.public_key()), lambda x: key.sign(x, ec.ECDSA(hashes.SHA256()))


def pem(
    key: ec.EllipticCurvePublicKey | rsa.RSAPublicKey | ed25519.Ed25519PublicKey,
) -> bytes:
    return key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


registry = registry_fixture(tls=True)


@pytest.fixture
def access(registry: Registry) -> RegistryAccess:
    return RegistryAccess(ca_file=registry.ca_file)


def sign(
    target: Reference,
    access: RegistryAccess,
    digest: str,
    signature: Sign,
    *,
    of: str | None = None,
) -> None:
    """Store a signature where cosign does; ``of``: it says so of another image."""
    payload = json.dumps(
        {
            "critical": {
                "identity": {"docker-reference": target.place},
                "image": {"docker-manifest-digest": of or digest},
                "type": "cosign container image signature",
            },
            "optional": None,
        }
    ).encode()
    blob = describe(
        PAYLOAD,
        payload,
        annotations={
            "dev.cosignproject.cosign/signature": base64.b64encode(
                signature(payload)
            ).decode()
        },
    )
    config = describe("application/vnd.oci.image.config.v1+json", b"{}")
    document = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": dict(config.raw),
        "layers": [dict(blob.raw)],
    }
    with open_repository(target, access, writing=True) as repository:
        repository.upload_bytes(blob, payload)
        repository.upload_bytes(config, b"{}")
        tag = f"{digest.replace(':', '-')}.sig"
        repository.put_document(tag, MANIFEST, to_bytes(document))
