"""Which front end is chosen, where nobody names one."""

import pytest

from btrfs_ublk.server import choose_front_end, front_ends


def test_kernels_that_a_killed_ublk_server_may_crash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class There:
        path = cure = "any"

        def probe(self) -> None:
            pass

    for name in ("UBLK", "FUSE", "LOOP"):
        monkeypatch.setattr(front_ends, name, There())
    monkeypatch.setattr(front_ends, "require", lambda *capabilities: None)
    for release, may_crash in (
        ("6.6.99", False),
        ("6.7", True),
        ("6.12.95+deb13-cloud-amd64", True),
        ("6.14.5", True),
        ("6.14.6", False),
        ("what is this", False),
    ):
        monkeypatch.setattr("platform.release", lambda release=release: release)
        assert choose_front_end().name == ("fuse" if may_crash else "ublk"), release
        assert choose_front_end("ublk").name == "ublk"
