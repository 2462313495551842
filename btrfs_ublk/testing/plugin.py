"""The pytest plugin ``btrfs_ublk``: options, the marker, and its fixtures' modules.

docs/how-to/pytest-fixtures.md explains its use.
"""

from __future__ import annotations

import pytest

from btrfs_ublk.testing import settings
from btrfs_ublk.testing.lifetime import end_of_session
from btrfs_ublk.testing.requirements import check_item

#: pytest loads these with this module.
pytest_plugins = [
    "btrfs_ublk.testing.contents_fixtures",
    "btrfs_ublk.testing.device_fixtures",
    "btrfs_ublk.testing.loop_fixtures",
    "btrfs_ublk.testing.range_server_fixtures",
    "btrfs_ublk.testing.seed_fixtures",
    "btrfs_ublk.testing.volume_fixtures",
]

_MARKER = (
    'btrfs_ublk(front_end="auto", requires=()): uses btrfs-ublk, with this front end '
    "(auto, ublk, fuse), where the machine has these capabilities (root, btrfs, loop, "
    "fuse, ublk, btrfs-progs); every test that uses a fixture of it has this marker"
)
_PREFIX = "btrfs_ublk_"


def pytest_addoption(parser: pytest.Parser) -> None:
    settings.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)
    settings.read(config)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        names = getattr(item, "fixturenames", ())
        if any(name.startswith(_PREFIX) for name in names):
            item.add_marker(pytest.mark.btrfs_ublk)


@pytest.hookimpl(tryfirst=True)  # before any fixture is made
def pytest_runtest_setup(item: pytest.Item) -> None:
    check_item(item)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    end_of_session(config)
