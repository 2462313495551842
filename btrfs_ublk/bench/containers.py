"""What containerd's calls of snapshots cost with ours, beside its own snapshotters.

``scripts/isolate python -m btrfs_ublk.bench.containers --help``
"""

import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from btrfs_ublk.base.capabilities import BTRFS, LOOP, ROOT, Program
from btrfs_ublk.base.entry import run_command
from btrfs_ublk.base.process import Argument
from btrfs_ublk.base.process import run as run_program
from btrfs_ublk.base.process import spawn
from btrfs_ublk.bench.disk import new_disk
from btrfs_ublk.bench.report import Document, Result, Table
from btrfs_ublk.bench.stats import grouped, quantile
from btrfs_ublk.bench.study import LOAD, Column, Run, study, table
from btrfs_ublk.kernel.temporary import tempdir

CONTAINERD = Program("containerd", package="containerd")
OVERLAYFS, OURS = "overlayfs", "btrfs-ublk"
#: containerd's own "btrfs" is part of its process.
_SUBJECTS = (OVERLAYFS, "btrfs", OURS)
CALLS = ("Prepare", "Mounts", "Stat", "Commit", "Remove")
#: Their times together have a goal.
_TOGETHER = ("Prepare", "Stat", "Commit")
_NAMESPACE = (("containerd-namespace", "default"),)
#: containerd collects what nothing else refers to.
_KEPT = {"containerd.io/gc.root": "now"}
_LAYERS, _TIMEOUT_S, _POLL_S = 3, 120.0, 0.05
_CONFIGURATION = """
version = 2
root = "{work}/ext4/root"
state = "{work}/state"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
  address = "{work}/containerd.sock"
[plugins."io.containerd.snapshotter.v1.btrfs"]
  root_path = "{work}/btrfs/containerd"
"""


class _Caller:
    """Makes the calls of one snapshotter, and notes how long they take."""

    def __init__(self, subject: str, channel: Any) -> None:
        self._channel, self._subject = channel, subject
        self._numbers, self.parent = count(), ""

    def round(self, *, keep: bool = False) -> Result:
        """Make a layer upon ``parent``; with ``keep``, it is the next one's parent.
        The result has the milliseconds that each call took."""
        result: Result = {"subject": self._subject}
        number = next(self._numbers)
        key, name = f"{self._subject} {number}", f"{self._subject} layer {number}"
        asked: dict[str, dict[str, Any]] = {
            "Prepare": {"key": key, "parent": self.parent, "labels": _KEPT},
            "Mounts": {"key": key},
            "Stat": {"key": key},
            "Commit": {"name": name, "key": key, "labels": _KEPT},
            "Remove": {"key": name},
        }
        for each in CALLS[:-1] if keep else CALLS:
            start_s = time.perf_counter()
            call(self._channel, each, self._subject, **asked[each])
            result[each] = (time.perf_counter() - start_s) * 1e3
        result["together"] = sum(result[each] for each in _TOGETHER)
        if keep:
            self.parent = name
        return result


def call(channel: Any, name: str, snapshotter: str, /, **fields: Any) -> Any:
    """Make a call of the snapshots API, and return its answer."""
    from btrfs_ublk.containers import messages

    request, response = (messages.CLASSES[x] for x in messages.CALLS[name])
    method = channel.unary_unary(
        f"/{messages.SERVICE}/{name}",
        request_serializer=request.SerializeToString,
        response_deserializer=response.FromString,
    )
    asked = request(snapshotter=snapshotter, **fields)
    return method(asked, timeout=_TIMEOUT_S, metadata=_NAMESPACE)


@contextmanager
def _bed(parent: Path) -> Iterator[Any]:
    """Run containerd, whose overlayfs is on an ext4, and our snapshotter on a btrfs
    beside its own, on loop devices of files below ``parent``; yields a channel to it.
    """
    import grpc

    with tempdir(parent=parent) as work, ExitStack() as stack:
        for kind in ("ext4", "btrfs"):
            stack.enter_context(new_disk(kind, work))
        command: list[Argument] = [sys.executable, "-P", "-m", "btrfs_ublk.cli.main"]
        command += ["snapshotter"]
        place: list[Argument] = [
            "--root",
            work / "btrfs/root",
            "--socket",
            work / "ours.sock",
        ]
        said = run_program([*command, "config", *place], timeout_s=_TIMEOUT_S).stdout
        configuration = work / "config.toml"
        configuration.write_text(_CONFIGURATION.format(work=work) + said)
        address = work / "containerd.sock"
        serve = [*command, "serve", *place, "--containerd", address]
        stack.enter_context(spawn(serve))
        _wait_for(work / "ours.sock")
        stack.enter_context(spawn([CONTAINERD.name, "--config", configuration]))
        _wait_for(address)
        channel = stack.enter_context(grpc.insecure_channel(f"unix:{address}"))
        grpc.channel_ready_future(channel).result(timeout=_TIMEOUT_S)
        yield channel


def _wait_for(path: Path) -> None:
    """Wait until somebody listens. Raises TimeoutError."""
    deadline_s = time.monotonic() + _TIMEOUT_S
    while True:
        with socket.socket(socket.AF_UNIX) as asking:
            try:
                return asking.connect(str(path))
            except OSError as error:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"nobody listens at {path}") from error
        time.sleep(_POLL_S)


def tables(document: Document) -> list[Table]:
    results = [
        {
            "subject": each["subject"],
            "call": call,
            "ms": each[key],
            "load": each["load"],
        }
        for each in document["results"]
        for call, key in (*zip(CALLS, CALLS), (" + ".join(_TOGETHER), "together"))
    ]
    by = grouped(results, lambda x: (x["subject"], x["call"]))

    def against(mine: Sequence[Result]) -> float:
        pair = (mine, by[OVERLAYFS, mine[0]["call"]])
        ours, other = (quantile(sorted(x["ms"] for x in some), 0.5) for some in pair)
        return ours / other

    def p99(mine: Sequence[Result]) -> float:
        return quantile(sorted(x["ms"] for x in mine), 0.99)

    calls = list(dict.fromkeys(x["call"] for x in results))
    results.sort(key=lambda x: (calls.index(x["call"]), _SUBJECTS.index(x["subject"])))
    columns = [
        Column("calls", len),
        Column("median", "ms", 2),
        Column("P99", p99, 2),
        Column("times that of overlayfs", against, 2),
        LOAD,
    ]
    names = {"": lambda x: str(x["call"]), " ": lambda x: str(x["subject"])}
    return [table("Calls of the snapshots API, ms", results, names, columns, left=2)]


@study("containers", needs=(ROOT, BTRFS, LOOP, CONTAINERD), repeats=200, in_memory=True)
def command(run: Run) -> None:
    """Make a layer upon three others, ask for it, commit and remove it."""
    said = run_program([CONTAINERD.name, "--version"], timeout_s=_TIMEOUT_S).stdout
    run.document["parameters"]["containerd"] = said.split()[2]
    with _bed(run.parent) as channel:
        callers = [_Caller(subject, channel) for subject in _SUBJECTS]
        for caller in callers:
            for _ in range(_LAYERS):
                caller.round(keep=True)
        for caller in run.drawn(callers, tell=False):
            run.add(caller.round())


if __name__ == "__main__":
    run_command(command, name="python -m btrfs_ublk.bench.containers")
