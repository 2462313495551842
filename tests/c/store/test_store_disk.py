"""A map on a disk that is full, or fails: each call that writes to it, in turn."""

import errno
from pathlib import Path
from typing import Any

import pytest
from support.needs import share_of
from support.shells import StoreShell

pytestmark = pytest.mark.data

MEMSET = {"kind": "memset", "size": 1 << 40, "byte": 7}
FILE = {"kind": "file", "path": "/nowhere", "size": 1 << 30, "unit": 4096}
DIGEST = "ab" * 32
#: Enough for several pages of the file.
ROWS: list[list[int | None]] = [[8192 * x, 4096, 0, 0] for x in range(1, 300)]
FOR_EVER = 1 << 30
#: More than change() makes, and how many lie between those that fail in one test.
CALLS, STEP = 80, 7 if share_of(100) >= 100 else 21


def listed() -> dict[str, Any]:
    return FILE | {"size": 4096 * 300, "digests": [DIGEST] * 300}


def batches() -> list[set[int | None]]:
    """What may come to a map at once, by offsets."""
    return [{row[0] for row in ROWS}, {1 << 30}]


def environment(
    build: Path,
    error: int,
    first: int,
    number: int,
    *,
    short: bool,
    slice_bytes: int = 1 << 20,
) -> dict[str, str]:
    return {
        "LD_PRELOAD": str(build / "csrc/tests/fail-writes.so"),
        "ASAN_OPTIONS": "verify_asan_link_order=0:exitcode=99",
        "FAIL_ERRNO": str(error),
        "FAIL_FROM": str(first),
        "FAIL_COUNT": str(number),
        "FAIL_SHORT": "1" if short else "0",
        "STORE_SLICE_BYTES": str(slice_bytes),
    }


def make(build: Path, path: Path) -> None:
    with StoreShell(build, path) as shell:
        assert "added" in shell.add([[0, 4096, 0, 0]], FILE)


def change(shell: StoreShell, error: int) -> bool:
    """Adds and pins. False: something has failed, and left all as it was."""
    steps: list[dict[str, Any]] = [
        {"add": ROWS, "sources": [MEMSET]},
        {"add": [[1 << 30, 4096, 0, 0]], "sources": [listed()]},
        {"pin": [1, 7, DIGEST]},
        {"checkpoint": True},
        {"pin": [1, 8, DIGEST]},
    ]
    good = True
    for step in steps:
        known = shell.list()
        reply = shell.ask(**step)
        # A large request has more memory, and gives it back.
        assert shell.ask(cache_size=True) == {"cache_size": -512}
        if "error" not in reply:
            continue
        good = False
        assert reply["error"] in (errno.errorcode[error], "EIO"), reply
        if reply["error"] == "ENOSPC" and reply["text"]:
            assert "make room" in reply["hint"], reply
        # What a transaction could not do, it has not done.
        assert shell.list() == known
        assert shell.ask(digest=[1, 7])["digest"] in (None, DIGEST)
    return good


@pytest.mark.parametrize(
    ("start", "error", "number", "short", "slice_bytes"),
    [
        (1, errno.ENOSPC, FOR_EVER, False, 1 << 20),
        (2, errno.ENOSPC, 4, True, 1 << 20),
        (3, errno.EIO, 1, False, 1 << 20),
        (4, errno.EIO, FOR_EVER, False, 1 << 20),
        # Requests in several transactions.
        (5, errno.ENOSPC, FOR_EVER, False, 3000),
        (6, errno.ENOSPC, 4, True, 3000),
        (7, errno.EIO, 1, False, 3000),
    ],
)
def test_nothing_half_made_is_left(
    sanitized_build: Path,
    tmp_path: Path,
    start: int,
    error: int,
    number: int,
    short: bool,
    slice_bytes: int,
) -> None:
    """Each of them tries some calls, so that this does not take minutes."""
    for first in range(start, CALLS, STEP):
        path = tmp_path / f"{first}.map"
        make(sanitized_build, path)
        preload = environment(
            sanitized_build, error, first, number, short=short, slice_bytes=slice_bytes
        )
        with StoreShell(sanitized_build, path, preload) as shell:
            if "error" in shell.opened:
                continue  # also said clearly, and nothing happened
            good = change(shell, error)
            after = shell.list()
            shell.kill()
        # Whatever the disk did, the map is what it was said to be. NB: a commit whose
        # sync failed is taken back by writing; a disk that takes nothing any more may
        # keep it. It was not acknowledged, and nobody has read it.
        with StoreShell(sanitized_build, path) as shell:
            found = shell.list()
            more = {row[0] for row in found if row not in after}
            assert found == after or (number == FOR_EVER and more in batches())
            assert all(row in found for row in after)
            assert shell.ask(check=True) == {"ok": True}
            again = shell.add(ROWS, MEMSET)
            assert all(existed for _, existed in again["added"]) or not good
            for unit in (7, 8):
                assert shell.ask(pin=[1, unit, DIGEST]) == {"ok": True}
        for file in tmp_path.iterdir():
            file.unlink()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_map_that_cannot_be_made(
    sanitized_build: Path, tmp_path: Path, error: int
) -> None:
    """Nor does what is left of it keep the next one from being made."""
    path = tmp_path / "it.map"
    for first in range(1, 12, STEP // 7):
        preload = environment(sanitized_build, error, first, FOR_EVER, short=False)
        with StoreShell(sanitized_build, path, preload) as shell:
            if "error" in shell.opened:
                assert shell.opened["error"] in (errno.errorcode[error], "EIO")
        with StoreShell(sanitized_build, path) as shell:
            assert shell.opened["mappings"] == 0, shell.opened
        for file in tmp_path.iterdir():
            file.unlink()
