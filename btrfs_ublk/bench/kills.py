"""A device under verified reads and writes, whose server is killed: one round after the
other.
"""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path

from btrfs_ublk.bench.killable import (
    KillableDevice,
    ServerByHand,
    SupervisedDevice,
    kernel_log,
    kill,
    where_it_waits,
)
from btrfs_ublk.bench.report import Result
from btrfs_ublk.bench.verified_reads import (
    NoAnswerError,
    VerifiedReads,
    verified_reads,
)
from btrfs_ublk.bench.written_files import WrittenFiles
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.process import ProcessIdentity
from btrfs_ublk.resources.reflink import clone_file
from btrfs_ublk.resources.tempdir import tempdir
from btrfs_ublk.seed import make_seed
from btrfs_ublk.server import Description, FrontEndName, PatternSegment
from btrfs_ublk.sprout import sprout
from btrfs_ublk.units import TIB
from btrfs_ublk.volume import assert_mapping

RANDOM = "random"
AT_ONCE = "at once"
TWICE = "twice"
STARTING = "starting"
STOPPED = "stopped"
ADOPTED = "adopted"
BOTH = "both"
#: What is said of each in the table's note.
KINDS = {
    RANDOM: "at a random time",
    AT_ONCE: "as soon as reads are answered again after the kill before",
    TWICE: "and so is its successor, as soon as it says that it is ready",
    STARTING: "and so is its successor, within milliseconds of its start",
    STOPPED: "after it was stopped for a while (SIGSTOP)",
    ADOPTED: "after its supervisor was, and another one has adopted it",
    BOTH: "together with the supervisor; then: btrfs-ublk device recover",
}

_VIRTUAL_BYTES = TIB
#: Of a random time, and of a stop.
_LONGEST_WAIT_S = 0.5
_LONGEST_STOP_S = 0.2
_LONGEST_START_S = 0.02
#: A supervisor takes a server that ends sooner for one that cannot serve, and after a
#: few of them in a row it waits before the next.
_SETTLED_S = 2.1
_THREADS = 4


def awkward_kinds(front_end: FrontEndName, *, supervisor: bool) -> list[str]:
    """All that nobody may notice. NB: with both, a FUSE connection ends as well."""
    kinds = [AT_ONCE, TWICE, STARTING, STOPPED]
    if supervisor:
        kinds += [ADOPTED, BOTH] if front_end == "ublk" else [ADOPTED]
    return kinds


def plan(rounds: int, awkward: Sequence[str]) -> list[str]:
    """The kind of each round: every other one is at a random time, and the others are
    the ``awkward`` ones in turn.
    """
    pairs = cycle(kind for other in awkward for kind in (RANDOM, other))
    return list(islice(pairs, rounds))


@dataclass
class Trial:
    """A device under load."""

    device: KillableDevice
    reads: Sequence[VerifiedReads]
    writes: WrittenFiles | None
    chances: random.Random
    deadline_s: float
    _ready_s: float = field(default_factory=time.monotonic)

    def round(self, kind: str) -> Result:
        """Kill it, in a way of KINDS, and wait until all readers are served again.

        Raises NoAnswerError when they are not.
        """
        device, chances = self.device, self.chances
        if kind != AT_ONCE:
            self._settle()
            time.sleep(chances.uniform(0, _LONGEST_WAIT_S))
        if kind == ADOPTED:
            device.kill_supervisor()
            device.recover()
        server, kills = device.server(), 1
        if kind == STOPPED:
            os.kill(server.pid, signal.SIGSTOP)
            time.sleep(chances.uniform(0, _LONGEST_STOP_S))
        begin_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        if kind == BOTH:
            self._kill_both(server)
        else:
            kill(server)
        if kind in (TWICE, STARTING):
            server, kills = device.next_server(server), 2
            if kind == TWICE:
                device.wait_ready()
            else:
                time.sleep(chances.uniform(0, _LONGEST_START_S))
            kill(server)
        # Nothing that is read from now on comes from the dead.
        for each in self.reads:
            each.mark()
        if kind == BOTH:
            device.recover()
        device.next_server(server)
        device.wait_ready()
        self._ready_s = time.monotonic()
        ready_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        served = [each.wait_served(timeout_s=self.deadline_s) for each in self.reads]
        if self.writes:
            self.writes.check()
        first_ns = min(event["at_ns"] for event in served)
        return {
            "what": "round",
            "kind": kind,
            "kills": kills,
            "ready_s": (ready_ns - begin_ns) / 1e9,
            "recovery_s": (first_ns - begin_ns) / 1e9,
            "faults": sum(
                event["wrong_bytes"] + event["errors"] + event["hung"]
                for event in served
            ),
        }

    def _settle(self) -> None:
        if self.device.has_supervisor:
            age_s = time.monotonic() - self._ready_s
            time.sleep(max(0.0, _SETTLED_S - age_s))

    def _kill_both(self, server: ProcessIdentity) -> None:
        if self.chances.random() < 0.5:
            self.device.kill_supervisor()
            kill(server)
        else:
            # The successor may be there already, and it is the last one that counts.
            os.kill(server.pid, signal.SIGKILL)
            self.device.kill_supervisor()
            server.wait(timeout_s=self.deadline_s)

    def describe(self) -> str:
        """Where everything hangs."""
        waits = [where_it_waits(each.pid) for each in self.reads]
        return "\n".join([self.device.describe(), *waits, kernel_log()])


@contextmanager
def trial(
    *,
    front_end: FrontEndName,
    supervisor: bool,
    raw: bool,
    depth: int,
    seed: int,
    deadline_s: int,
    parent: Path,
) -> Iterator[Trial]:
    """A device with verified reads of it: of clones on a mounted sprout, which is also
    written to, or, ``raw``, of the device itself.
    """
    with ExitStack() as stack:
        directory = stack.enter_context(tempdir(parent=parent))
        pattern = PatternSegment(offset=0, length=_VIRTUAL_BYTES)
        if raw:
            description = Description(_VIRTUAL_BYTES, [pattern])
        else:
            image = make_seed(
                directory / "seed.img",
                virtual_data_size=_VIRTUAL_BYTES,
                metadata_only=True,
            )
            description = image.description([pattern])
        device: KillableDevice
        if supervisor:
            device = SupervisedDevice(description, front_end=front_end)
        else:
            device = ServerByHand(description, front_end=front_end)
        stack.enter_context(device)
        writes = None
        if raw:
            files = [(device.path, 0), (device.path, 0)]
        else:
            target = directory / "mount"
            target.mkdir()
            stack.enter_context(
                sprout(
                    device.path,
                    target,
                    parent=directory,
                    validate=lambda at: assert_mapping(image, at),
                )
            )
            virtual = target / image.virtual_data.filename
            files = []
            for half in range(2):
                clone, base = target / f"clone{half}", half * _VIRTUAL_BYTES // 2
                clone_file(
                    virtual, clone, source_offset=base, size_bytes=_VIRTUAL_BYTES // 2
                )
                files.append((clone, base))
            (target / "written").mkdir()
            writes = stack.enter_context(
                WrittenFiles(target / "written", seed=seed, deadline_s=deadline_s)
            )
        reads = [
            stack.enter_context(
                verified_reads(
                    path,
                    name=name,
                    threads=threads,
                    depth=depth,
                    base=base,
                    seed=seed,
                    deadline_s=deadline_s,
                )
            )
            for (path, base), (name, threads) in zip(
                files, (("direct", None), ("mmap", _THREADS))
            )
        ]
        try:
            yield Trial(device, reads, writes, random.Random(seed), deadline_s)
        except BaseException:
            # Nothing of this can be taken down while it waits for a server.
            with suppress(BtrfsUblkError):
                device.restore()
            raise


def run_rounds(
    made: Trial, kinds: Sequence[str], *, limit_s: float = math.inf
) -> Iterator[Result]:
    """The result of each round, then those of readers and writer. Ends early, with a
    result that tells of it, when reads hang; and after ``limit_s`` seconds.
    """
    end_s = time.monotonic() + limit_s
    for each in made.reads:
        each.mark()
    try:
        for each in made.reads:
            each.wait_served(timeout_s=made.deadline_s)
        for kind in kinds:
            if time.monotonic() > end_s:
                break
            yield made.round(kind)
    except NoAnswerError as error:
        yield {"what": "hang", "reason": str(error), "state": made.describe()}
        try:
            made.device.restore()
        except BtrfsUblkError as failed:
            yield {"what": "hang", "reason": str(failed), "state": made.describe()}
    for each in made.reads:
        yield {"what": "reader", "name": each.name, **each.finish()}
    if made.writes:
        yield {"what": "writer", **made.writes.report()}
