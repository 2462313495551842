"""Who may bring sealed images: rules, and signatures as cosign makes them."""

from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ed25519, padding, rsa
from support import signing
from support.images import sealed_image
from support.registry import Registry
from support.signing import Sign, ec_key, pem, sign

from btrfs_ublk.errors import UsageError
from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.build import BuiltImage
from btrfs_ublk.image.layout import Layout
from btrfs_ublk.image.policy import (
    Policy,
    RefusedImageError,
    Rule,
    read_policy,
    signer_of,
)
from btrfs_ublk.image.pull import pull_image
from btrfs_ublk.image.reference import Reference, parse_reference
from btrfs_ublk.image.store import ImageStore
from btrfs_ublk.image.transfer import open_repository, push_image

access = signing.access  # a fixture
registry = signing.registry  # a fixture


def rsa_key() -> tuple[bytes, Sign]:
    key = rsa.generate_private_key(65537, 2048)
    public = pem(key.public_key())
    return public, lambda x: key.sign(x, padding.PKCS1v15(), hashes.SHA256())


def ed25519_key() -> tuple[bytes, Sign]:
    key = ed25519.Ed25519PrivateKey.generate()
    return pem(key.public_key()), key.sign


def nobody(_keys: object) -> Path | None:
    return None


REFERENCE = parse_reference("registry.example.org/team/app:1")


def test_rules_are_read(tmp_path: Path) -> None:
    path = tmp_path / "images.toml"
    path.write_text('digests = false\n[[allow]]\nfrom = "registry.example.org/team/*"\n'
                    '[[allow]]\nfrom = "*"\nkeys = ["team.pub"]\n')  # fmt: skip
    policy = read_policy(path)
    assert policy == Policy(
        path,
        (Rule("registry.example.org/team/*"), Rule("*", (tmp_path / "team.pub",))),
        digests=False,
    )
    assert policy.allow(REFERENCE, nobody) == (
        f"{path} allows registry.example.org/team/*"
    )
    other = Reference("other.example.org", "app", "1")
    assert policy.allow(other, lambda keys: keys[0]) == (
        f"signed by {tmp_path / 'team.pub'}"
    )
    with pytest.raises(RefusedImageError, match="is not signed by"):
        policy.allow(other, nobody)
    with pytest.raises(RefusedImageError, match="is not signed by"):
        policy.allow(other.at(f"sha256:{'0' * 64}"), nobody)


def test_without_a_file_a_digest_is_needed(tmp_path: Path) -> None:
    policy = read_policy(tmp_path / "images.toml")
    with pytest.raises(RefusedImageError) as refused:
        policy.allow(REFERENCE, nobody)
    assert refused.value.message == (
        "no sealed image may come from registry.example.org/team/app: there is no "
        f"{tmp_path / 'images.toml'}"
    )
    assert refused.value.hint and (
        'with from = "registry.example.org/team/app"' in refused.value.hint
    )
    named = REFERENCE.at(f"sha256:{'0' * 64}")
    assert policy.allow(named, nobody) == "named by its digest"


def test_the_first_rule_that_matches_decides() -> None:
    key = Path("/key")
    policy = Policy(Path("/p"), (Rule(REFERENCE.place, (key,)), Rule("*")))
    with pytest.raises(RefusedImageError, match="is not signed by /key"):
        policy.allow(REFERENCE, nobody)
    assert policy.allow(Reference("b", "c", "1"), nobody) == "/p allows *"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("allow = 1", "allow is a list of tables"),
        ("allowed = []", "key 'allowed' is unknown"),
        ("digests = 1", "digests true or false"),
        ("[[allow]]", "is no rule"),
        ('[[allow]]\nfrom = ""', "is no rule"),
        ('[[allow]]\nfrom = "a"\nkey = "b"', "is no rule"),
        ('[[allow]]\nfrom = "a"\nkeys = "b"', "is no rule"),
        ('[[allow]]\nfrom = "a"\nkeys = []', "has an empty list of keys"),
        ("[[allow", "is not valid TOML"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "images.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=why):
        read_policy(path)


def test_a_file_that_others_may_change_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "images.toml"
    path.write_text("")
    path.chmod(0o666)
    with pytest.raises(UsageError, match="can be changed by others"):
        read_policy(path)


def pushed(
    target: Reference, access: RegistryAccess, path: Path, *, seed: int = 1
) -> BuiltImage:
    image = sealed_image(path, seed=seed)
    layout = Layout.opened(path)
    with open_repository(target, access, writing=True) as repository:
        push_image(layout, layout.find("app"), target, repository)
    return image


@pytest.mark.parametrize("make", [ec_key, rsa_key, ed25519_key])
def test_signed_images_come(
    access: RegistryAccess,
    registry: Registry,
    tmp_path: Path,
    make: Callable[[], tuple[bytes, Sign]],
) -> None:
    target = Reference(registry.host, f"signed/{make.__name__}", "app")
    image = pushed(target, access, tmp_path / "image")
    public, signature = make()
    (tmp_path / "ours.pub").write_bytes(public)
    (tmp_path / "other.pub").write_bytes(make()[0])
    keys = (tmp_path / "other.pub", tmp_path / "ours.pub")
    policy = Policy(tmp_path / "images.toml", (Rule("*", keys),))
    store = ImageStore(tmp_path / "store")
    with pytest.raises(RefusedImageError, match="is not signed by"):
        pull_image(target, access, store, policy=policy)
    sign(target, access, image.digest, signature)
    pulled = pull_image(target, access, store, policy=policy)
    assert pulled.why == f"signed by {tmp_path / 'ours.pub'}"


def test_a_signature_of_the_sealed_image_alone_suffices(
    access: RegistryAccess, registry: Registry, tmp_path: Path
) -> None:
    """Tools that copy images may write the index anew."""
    target = Reference(registry.host, "signed/sealed", "app")
    image = pushed(target, access, tmp_path / "image")
    public, signature = ec_key()
    (tmp_path / "ours.pub").write_bytes(public)
    sign(target, access, image.sealed, signature)
    policy = Policy(tmp_path / "p", (Rule("*", (tmp_path / "ours.pub",)),))
    pull_image(target, access, ImageStore(tmp_path / "store"), policy=policy)


def test_signatures_of_others_do_not_count(
    access: RegistryAccess, registry: Registry, tmp_path: Path
) -> None:
    target = Reference(registry.host, "signed/others", "app")
    image = pushed(target, access, tmp_path / "image")
    public, signature = ec_key()
    (tmp_path / "ours.pub").write_bytes(public)
    keys = [tmp_path / "ours.pub"]
    with open_repository(target, access) as repository:
        sign(target, access, image.digest, ec_key()[1])
        assert signer_of(repository, image.digest, keys) is None
        # Ours, but of another image: somebody has copied it here.
        sign(target, access, image.digest, signature, of=f"sha256:{'0' * 64}")
        assert signer_of(repository, image.digest, keys) is None
        sign(target, access, image.digest, signature)
        assert signer_of(repository, image.digest, keys) == keys[0]
