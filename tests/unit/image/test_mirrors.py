"""Mirrors of registries, from containerd's hosts.toml."""

from pathlib import Path

import pytest
from support.images import sealed_image
from support.registry import Registry, registry_fixture
from support.web_servers import response, scripted_server

from btrfs_ublk.errors import UsageError
from btrfs_ublk.image.access import RegistryAccess, RegistryMirror, registry_mirrors
from btrfs_ublk.image.layout import Layout
from btrfs_ublk.image.policy import Policy, Rule
from btrfs_ublk.image.pull import pull_image
from btrfs_ublk.image.reference import Reference
from btrfs_ublk.image.store import ImageStore
from btrfs_ublk.image.transfer import open_repository, push_image

registry = registry_fixture()


@pytest.fixture
def certs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """containerd's directory, named in hosts.toml."""
    monkeypatch.setenv("BTRFS_UBLK_CONFIG_DIR", str(tmp_path))
    directory = tmp_path / "certs.d"
    directory.mkdir()
    (tmp_path / "hosts.toml").write_text(f'containerd = "{directory}"\n')
    return directory


def write(certs: Path, name: str, text: str) -> None:
    (certs / name).mkdir(exist_ok=True)
    (certs / name / "hosts.toml").write_text(text)


def test_what_a_mirror_says_of_itself(certs: Path) -> None:
    write(
        certs,
        "r.example",
        """
server = "https://r.example"
[host."https://b.example/v2/proxy"]
capabilities = ["pull"]
override_path = true
ca = "b.pem"
[host."https://a.example"]
[host."https://push.example"]
capabilities = ["push"]
[host."https://unverified.example"]
skip_verify = true
[host."http://plain.example"]
""",
    )
    assert registry_mirrors("r.example") == (
        RegistryMirror(
            host="b.example",
            path="/v2/proxy",
            namespace="r.example",
            ca_file=certs / "r.example/b.pem",
            resolves=False,
        ),
        RegistryMirror(host="a.example", path="/v2", namespace="r.example"),
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("host = 3", "not tables"),
        ('[host."ftp://m.example"]', "no http or https URL"),
        ('[host."https://m.example"]\ncapabilities = "pull"', "no list"),
        ("[host", "not valid TOML"),
    ],
)
def test_files_that_make_no_sense(certs: Path, text: str, said: str) -> None:
    write(certs, "r.example", text)
    with pytest.raises(UsageError, match=said):
        registry_mirrors("r.example")


def test_an_image_comes_from_a_mirror(
    certs: Path, registry: Registry, tmp_path: Path
) -> None:
    """The registry itself cannot be reached. The first mirror has nothing, and is told
    which registry it is asked about."""
    registry.tokens.anonymous = True
    image = sealed_image(tmp_path / "image")
    layout = Layout.opened(image.name.path)
    access = RegistryAccess(insecure=True)
    stored = Reference(registry.host, "some/app", "1")
    with open_repository(stored, access, writing=True) as repository:
        push_image(layout, layout.find(image.name.tag), stored, repository)
    named = Reference("registry.invalid", "some/app", "1")
    policy = Policy(Path("/nowhere"), (Rule(named.place),))
    with scripted_server(lambda _: response("404 Not Found")) as empty:
        write(
            certs,
            "registry.invalid",
            f'[host."{empty.url("hub")}"]\n[host."http://{registry.host}"]',
        )
        store = ImageStore(tmp_path / "store")
        pulled = pull_image(named, RegistryAccess(), store, policy=policy)
        assert pulled.digest == image.sealed
        asked = [request.split()[1] for request in empty.requests]
    assert asked[0] == "/hub/v2/some/app/manifests/1?ns=registry.invalid"
    assert any("/blobs/" in path for path in asked)
