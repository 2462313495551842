"""What making images refuses, and what registries say that makes no sense."""

import logging
from pathlib import Path
from typing import Any

import pytest
from support.web_servers import response, scripted_server

from btrfs_ublk.image.access import RegistryAccess, RegistryError
from btrfs_ublk.image.connection import Connection
from btrfs_ublk.volume import VolumeDefinition
from btrfs_ublk.volume.image import refuse_other_access


def test_no_secret_of_a_url_is_logged_or_said(caplog: pytest.LogCaptureFixture) -> None:
    """A registry refers to a store by a signed URL, and the store does not answer."""

    def registry(_: str) -> bytes:
        store = "http://us3r:p4ss@127.0.0.1:1/blob?sig=s1gned"
        return response(f"307 There\nLocation: {store}")

    access = RegistryAccess(insecure=True)
    with caplog.at_level(logging.DEBUG, "btrfs_ublk"):
        with scripted_server(registry) as server:
            host = f"127.0.0.1:{server.port}"
            with Connection(host, "some/image", access) as connection:
                with pytest.raises(RegistryError) as failed:
                    connection.request("GET", "x", what="look", ok=(200,), tries=2)
    assert "try 1 failed: " in caplog.text and "Connection refused" in caplog.text
    assert "cannot look: " in failed.value.message
    for secret in ("us3r", "p4ss", "s1gned"):
        assert secret not in caplog.text + str(failed.value)


def test_no_secret_of_a_url_without_tls_is_said() -> None:
    with Connection("registry.example.org", "image", RegistryAccess()) as connection:
        with pytest.raises(RegistryError, match="without TLS") as refused:
            url = "http://us3r:p4ss@store.example.org/blob?sig=s1gned"
            connection.request("GET", url, what="look", ok=(200,))
    assert "store.example.org/blob" in refused.value.message
    for secret in ("us3r", "p4ss", "s1gned"):
        assert secret not in refused.value.message


def test_how_a_registry_is_asked_stays(tmp_path: Path) -> None:
    """The mirror in the map has it, so another value would be without effect."""
    ca = tmp_path / "ca.pem"
    ca.touch()
    name = "registry.example.org/app:1"
    plain = VolumeDefinition(image=name)
    own = VolumeDefinition(image=name, image_ca_file=ca)
    source: dict[str, Any] = {"kind": "oci", "registry": "registry.example.org"}
    assert refuse_other_access(source, plain) is None
    assert refuse_other_access(source | {"ca_file": str(ca)}, own) is None
    refusal = refuse_other_access(source, own)
    assert refusal == f"was made with image_ca_file off, and not with {ca}"
    refusal = refuse_other_access(source | {"insecure": True}, plain)
    assert refusal == "was made with image_insecure on, and not with off"
    # It was never asked.
    assert refuse_other_access({"kind": "file", "path": "/data"}, own) is None
    assert refuse_other_access(None, own) is None
