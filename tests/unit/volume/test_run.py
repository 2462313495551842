"""What the config of an image says of a command, and whom it means by a user."""

from pathlib import Path

import pytest

from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.volume.run import RunSettings, User, find_user

PASSWD = "root:x:0:0::/root:/bin/sh\napp:x:10:20::/srv:/bin/sh\nbroken\nx:y:z:a::/:\n"
GROUP = "staff:x:30:app\nmore:x:31:other,app\nothers:x:40:application\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", User(0, 0, (0,), "/root")),
        ("app", User(10, 20, (20, 30, 31), "/srv")),
        ("10", User(10, 20, (20, 30, 31), "/srv")),
        ("app:others", User(10, 40, (40,), "/srv")),
        ("app:7", User(10, 7, (7,), "/srv")),
        ("99", User(99, 0, (0,), "/")),
        ("99:staff", User(99, 30, (30,), "/")),
    ],
)
def test_users_are_those_of_the_image(tmp_path: Path, text: str, found: User) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text(PASSWD)
    (tmp_path / "etc/group").write_text(GROUP)
    assert find_user(text, tmp_path) == found


@pytest.mark.parametrize("text", ["nobody", "app:nobody", "x", "4294967296", "-1"])
def test_users_that_are_not_there(tmp_path: Path, text: str) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text(PASSWD)
    with pytest.raises(BtrfsUblkError, match=f"user '{text}' is not in its"):
        find_user(text, tmp_path)


def test_settings_of_a_config() -> None:
    settings = RunSettings.parse({"Env": ["A=b=c", "B"], "Cmd": ["x"], "User": None})
    assert settings.variables == {"A": "b=c", "B": ""}
    assert (settings.command, settings.directory, settings.user) == (("x",), "/", "")
    assert RunSettings.parse(None).command == ()
    settings = RunSettings.parse({"Entrypoint": ["x", "y"], "Cmd": ["z"]})
    assert settings.command == ("x", "y", "z")
