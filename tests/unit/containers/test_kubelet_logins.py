"""Logins by the kubelet's plugins: what is asked, and that reads outlive their end."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.kubelet import answer, configuration
from support.registry import USER
from support.web_servers import response, scripted_server

from btrfs_ublk.base.private_dirs import CONFIG_VARIABLE, VOLUMES_VARIABLE
from btrfs_ublk.containers.images import IMAGE_REF, Images, LazyOptions
from btrfs_ublk.containers.kubelet_logins import KubeletLogins, matches, read_plugins
from btrfs_ublk.containers.store import SNAPSHOT_REF, SnapshotStore
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.documents import SEALED_IN
from btrfs_ublk.image.reference import parse_reference
from btrfs_ublk.image.store import IMAGES_VARIABLE


@pytest.mark.parametrize(
    ("pattern", "image", "expected"),
    [
        ("registry.example.org", "registry.example.org/team/app", True),
        ("registry.example.org/team", "registry.example.org/team/app", True),
        ("registry.example.org/other", "registry.example.org/team/app", False),
        ("*.dkr.*.example.org", "12.dkr.east.example.org/app", True),
        ("*.example.org", "a.b.example.org/app", False),
        ("registry.example.org:5000", "registry.example.org/app", False),
        ("127.0.0.1:5000", "127.0.0.1:5000/app", True),
        ("https://registry.example.org", "registry.example.org/app", True),
        ("[bad", "registry.example.org/app", False),
    ],
)
def test_images_of_a_pattern(pattern: str, image: str, expected: bool) -> None:
    assert matches(pattern, image) is expected


def test_a_plugin_is_asked_as_the_kubelet_does(tmp_path: Path) -> None:
    (plugin,) = read_plugins(configuration(tmp_path, "*.example.org/team"), tmp_path)
    usual = tmp_path / "config.json"
    usual.touch(mode=0o600)
    access = RegistryAccess(docker_config=usual)
    usual.write_text("{}")
    logins = KubeletLogins(tmp_path / "logins", [plugin], access)
    try:
        other = parse_reference("registry.example.com/team/app:1")
        assert logins.access(other) == access
        image = parse_reference("registry.example.org/team/app:1")
        with pytest.raises(BtrfsUblkError, match="exited with status 1"):
            logins.access(image)
        answer(tmp_path, "secret", pattern="registry.example.org", duration="1h")
        (tmp_path / "asked").unlink()
        path = logins.access(image).docker_config
        assert path and path.stat().st_mode & 0o777 == 0o600
        auth = {"username": USER, "password": "secret"}
        assert json.loads(path.read_text()) == {"auths": {"registry.example.org": auth}}
        assert json.loads((tmp_path / "asked").read_text()) == {
            "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
            "kind": "CredentialProviderRequest",
            "image": "registry.example.org/team/app",
        }
        (tmp_path / "answer").unlink()
        assert logins.access(image).docker_config == path  # it is not asked again
    finally:
        logins.close()
    # Another process, and no answer: the last login is kept.
    logins = KubeletLogins(tmp_path / "logins", [plugin], access)
    try:
        assert logins.access(image).docker_config == path
        logins.forget(image)
        assert not path.exists()
    finally:
        logins.close()


def test_logins_that_nobody_needs_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in (CONFIG_VARIABLE, VOLUMES_VARIABLE, IMAGES_VARIABLE):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    root = tmp_path / "root"
    logins = root / "logins"
    logins.mkdir(parents=True)
    (logins / f"{'0' * 16}.json").write_text("of an image that there was")
    with scripted_server(lambda _: response("404 Not Found")) as server:
        place = f"127.0.0.1:{server.port}"
        file = configuration(tmp_path, place)
        answer(tmp_path, "secret", pattern=place, duration="1h")
        options = LazyOptions(
            access=RegistryAccess(insecure=True),
            plugins=read_plugins(file, tmp_path),
            repositories=[f"{place}/second"],
        )
        store = SnapshotStore(root / "snapshots.db")
        images = Images(root, store, options, lambda *_: None)
        try:
            images.start()
            assert list(logins.iterdir()) == []
            labels = {
                SNAPSHOT_REF: f"sha256:{'1' * 64}",
                SEALED_IN: f"sha256:{'2' * 64}",
                IMAGE_REF: f"{place}/none:1",
            }
            assert not images.add_layer("key", "", labels)
            assert (tmp_path / "asked").read_text().count("CredentialProvider") == 2
            assert list(logins.iterdir()) == []
            # One that is forgotten while its plugin is asked is not written.
            image = replace(parse_reference(labels[IMAGE_REF]), tag=None)
            path = images._logins._path(image.place)
            images._logins._ask(options.plugins[0], image, path)
            assert list(logins.iterdir()) == []
        finally:
            images.close()
            store.close()
