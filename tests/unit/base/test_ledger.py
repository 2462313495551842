"""The ledger: what is on disk at each moment, and who may touch it."""

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.devices import abandon, enter

from btrfs_ublk.base import ledger as module
from btrfs_ublk.base.dead_ledgers import AbandonedLedger, abandoned_ledgers
from btrfs_ublk.base.ledger import Entry, Ledger, remover, state_directory
from btrfs_ublk.errors import BtrfsUblkError, LeftoverError
from btrfs_ublk.volume.down import KeptLedger, collect_kept


@pytest.fixture
def things(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A kind whose things are names in this list; "stuck" ones cannot be removed."""
    present: list[str] = []
    monkeypatch.setattr(module, "_kinds", {})

    @remover("thing")
    def remove(entry: Entry) -> bool:
        name = entry.details["name"]
        if name.startswith("stuck"):
            raise LeftoverError(f"{name} is stuck")
        if name not in present:
            return False
        present.remove(name)
        return True

    @remover("file", survives_reboot=True)
    def remove_file(entry: Entry) -> bool:
        return remove(entry)

    @remover("device", reuses_places=True)
    def remove_device(entry: Entry) -> bool:
        return remove(entry)

    return present


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(tmp_path)
    yield ledger
    ledger.close()


def lines(ledger: Ledger) -> list[str]:
    """The kind of each record: version, enter, amend, strike."""
    text = ledger.path.read_text()
    return [next(iter(json.loads(line))) for line in text.splitlines()]


def only(directory: Path) -> AbandonedLedger:
    with closing(abandoned_ledgers(directory)) as found:
        return next(found)


def test_a_copied_descriptor_keeps_no_kept_ledger_locked(
    tmp_path: Path, things: list[str]
) -> None:
    """A command that another thread starts has one until it has called execve(2)."""
    ledger = KeptLedger(tmp_path)
    ledger.enter("thing", name="a")
    things.append("a")
    copy = os.dup(ledger.fileno())
    ledger.leave()
    assert [outcome.result for outcome in collect_kept(tmp_path)] == ["removed"]
    os.close(copy)


def test_a_thing_is_entered_first_and_struck_out_last(
    ledger: Ledger, things: list[str]
) -> None:
    with ledger.holding("thing", name="a") as entry:
        assert lines(ledger) == ["version", "enter"]
        assert len(entry.tag) == 16 and int(entry.tag, 16) >= 0
        things.append("a")
        ledger.amend(entry, more=1)
    assert things == []
    assert lines(ledger) == ["version", "enter", "amend", "strike"]
    assert ledger.entries() == []


def test_an_error_is_not_hidden_by_a_failing_cleanup(
    ledger: Ledger, things: list[str]
) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        with ledger.holding("thing", name="stuck"):
            1 / 0
    assert any("stuck is stuck" in note for note in caught.value.__notes__)
    assert [entry.details["name"] for entry in ledger.entries()] == ["stuck"]


def test_a_full_disk_leaves_no_half_line(
    ledger: Ledger, things: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = ledger.enter("thing", name="a")
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, data[:10]))
        with pytest.raises(BtrfsUblkError, match="the ledger cannot be written"):
            ledger.enter("thing", name="b")
        with pytest.raises(BtrfsUblkError, match="the ledger cannot be written"):
            ledger.strike(entry)
    assert lines(ledger) == ["version", "enter"]
    assert ledger.entries() == [entry]
    ledger.strike(entry)
    assert lines(ledger) == ["version", "enter", "strike"]


def test_sweeping_goes_backwards_and_keeps_what_is_stuck(
    tmp_path: Path, things: list[str]
) -> None:
    things += ["a", "c"]
    path = abandon(
        tmp_path,
        *(enter(1, "a"), enter(2, "stuck"), enter(3, "gone"), enter(4, "c")),
        *({"strike": 4}, enter(5, "c")),
    )
    outcomes = only_sweep(tmp_path)
    assert outcomes == [
        ("c", "removed"),
        ("gone", "gone"),
        ("stuck", "left"),
        ("a", "removed"),
    ]
    assert things == []
    # The next one sees only what is left.
    assert path.exists() and only_sweep(tmp_path) == [("stuck", "left")]


def test_what_a_stuck_thing_stands_on_is_left(
    tmp_path: Path, things: list[str]
) -> None:
    """Also what that stands on in turn; the rest is removed."""
    things += ["a", "b", "c", "beside"]
    abandon(
        tmp_path,
        enter(1, "a", path="/a"),
        enter(2, "beside", path="/a-b"),
        enter(3, "b", path="/b", on=["none", "/a/sub/file"]),
        enter(4, "stuck", on="/b"),
        enter(5, "c", on="/b"),
    )
    outcomes = only_sweep(tmp_path)
    assert outcomes == [
        ("c", "removed"),
        ("stuck", "left"),
        ("b", "left"),
        ("beside", "removed"),
        ("a", "left"),
    ]
    assert things == ["a", "b"]


def test_a_device_number_is_used_again(ledger: Ledger, things: list[str]) -> None:
    """The next one may have the number before the one that had it is struck out."""
    things += ["before", "next", "on it"]
    with ledger.holding("device", name="next", path="/dev/loop0"):
        ledger.enter("device", name="before", path="/dev/loop0")
    assert things == ["before", "on it"]
    with pytest.raises(LeftoverError, match="uses it: device name=on it"):
        with ledger.holding("device", name="x", path="/dev/loop1"):
            details = {"path": "/dev/loop2", "backing_file": "/dev/loop1"}
            ledger.enter("device", name="on it", **details)


def only_sweep(directory: Path) -> list[tuple[str, str]]:
    with closing(abandoned_ledgers(directory)) as found:
        return [
            (outcome.entry.details["name"], outcome.result)
            for ledger in found
            for outcome in ledger.sweep()
        ]


def test_a_torn_last_line_does_not_swallow_a_strike(
    tmp_path: Path, things: list[str]
) -> None:
    things.append("a")
    abandon(tmp_path, enter(1, "stuck"), enter(2, "a"), tail='{"ent')
    assert only_sweep(tmp_path) == [("a", "removed"), ("stuck", "left")]
    assert only_sweep(tmp_path) == [("stuck", "left")]


def test_a_damaged_ledger_is_kept(tmp_path: Path, things: list[str]) -> None:
    path = abandon(tmp_path, enter(1, "a"))
    path.write_text(path.read_text() + "not json\n[]\n7\n" + '{"strike":9}\n')
    assert only(tmp_path).damaged_lines == 4
    assert only_sweep(tmp_path) == [("a", "gone")]
    assert path.exists()


def test_an_unknown_kind_is_left(tmp_path: Path, things: list[str]) -> None:
    abandon(tmp_path, enter(1, "a", kind="spaceship"))
    assert only_sweep(tmp_path) == [("a", "left")]


@pytest.mark.parametrize(
    "header",
    [
        '{"version":2,"boot_id":"some boot","pid":1}\n',
        '{"version":1,"pid":1}\n',
        '{"versi\n',
        "[]\n",
        "",
    ],
)
def test_a_ledger_that_is_not_understood_is_left_as_it_is(
    tmp_path: Path, things: list[str], header: str
) -> None:
    things.append("a")
    path = abandon(tmp_path, enter(1, "a"), enter(2, "gone"))
    path.write_text(header + path.read_text().partition("\n")[2])
    before = path.read_text()
    assert only(tmp_path).damaged_lines > 0
    assert only_sweep(tmp_path) == [("gone", "left"), ("a", "left")]
    assert things == ["a"] and path.read_text() == before


def test_a_reboot_takes_kernel_things_with_it(
    tmp_path: Path, things: list[str]
) -> None:
    things += ["a", "stuck-file"]
    path = abandon(tmp_path, enter(1, "a"), enter(2, "stuck-file", kind="file"))
    path.write_text(path.read_text().replace(module.boot_id(), "another boot"))
    assert only_sweep(tmp_path) == [("stuck-file", "left"), ("a", "gone")]
    assert "a" in things


def test_a_forked_child_owns_nothing(ledger: Ledger, things: list[str]) -> None:
    """It neither undoes its parent's things nor keeps the parent's lock."""
    things.append("a")
    context = multiprocessing.get_context("fork")
    ready, go = context.Event(), context.Event()

    def child() -> None:
        problems = [] if not ledger.is_ours else ["ours"]
        ready.set()
        go.wait(30)
        try:
            ledger.enter("thing", name="b")
        except BtrfsUblkError:
            pass
        else:
            problems.append("entered")
        os._exit(len(problems))

    with ledger.holding("thing", name="a"):
        process = context.Process(target=child)
        process.start()
        assert ready.wait(30)
        # The parent's lock goes with the parent's descriptor, not with the child's.
        os.close(ledger.fileno())
        ledger._fd = os.open(ledger.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        assert only(ledger.path.parent).entries
        go.set()
        process.join(30)
        assert process.exitcode == 0
    assert things == []


def test_an_unhandled_error_still_sweeps_at_exit(tmp_path: Path) -> None:
    script = (
        "from btrfs_ublk.base.ledger import process_ledger, remover\n"
        "remover('thing')(lambda entry: print('swept') or True)\n"
        "process_ledger().enter('thing')\n"
        "1 / 0\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "BTRFS_UBLK_STATE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "swept\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", [0o777, 0o720])
def test_a_state_directory_that_others_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    tmp_path.chmod(mode)
    monkeypatch.setenv("BTRFS_UBLK_STATE_DIR", str(tmp_path))
    with pytest.raises(BtrfsUblkError, match="writable for others"):
        state_directory()


def test_a_symbolic_link_as_state_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.setenv("BTRFS_UBLK_STATE_DIR", str(tmp_path / "link"))
    with pytest.raises(BtrfsUblkError, match="link is not a directory"):
        state_directory()
