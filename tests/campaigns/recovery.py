"""Checks that reads survive the death of their server. It is killed again and again, at
random and at awkward moments, while every byte that is read is verified.

``python tests/campaigns/recovery.py --help``
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

import campaign
import click
from killable import (
    KillableDevice,
    ServerByHand,
    SupervisedDevice,
    kernel_log,
    kill,
    where_it_waits,
)
from recovery_tables import (
    ADOPTED,
    AT_ONCE,
    BOTH,
    KINDS,
    RANDOM,
    STARTING,
    STOPPED,
    TWICE,
    faults,
    tables,
)
from verified_reads import NoAnswerError, VerifiedReads, WrittenFiles, verified_reads

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, ROOT, UBLK, Helper, require
from btrfs_ublk.base.entry import run_command
from btrfs_ublk.base.helpers import MKSEED, SERVER, VERIFY_READS
from btrfs_ublk.base.process import ProcessIdentity
from btrfs_ublk.bench import options
from btrfs_ublk.bench.report import Result
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.kernel.reflink import clone_file
from btrfs_ublk.kernel.temporary import tempdir
from btrfs_ublk.seed import make_seed
from btrfs_ublk.server import Description, FrontEndName, PatternSegment
from btrfs_ublk.units import TIB
from btrfs_ublk.volume.sprout import sprout
from btrfs_ublk.volume.temporary import assert_mapping, virtual_file_of

_VIRTUAL_BYTES = TIB
#: The longest random wait, and the longest stop (SIGSTOP).
_LONGEST_WAIT_S = 0.5
_LONGEST_STOP_S = 0.2
_LONGEST_START_S = 0.02
#: A supervisor assumes that a server which ends sooner cannot serve. After a few of
#: them in a row, it waits before it starts the next.
_SETTLED_S = 2.1
_THREADS = 4


def awkward_kinds(front_end: FrontEndName, *, supervisor: bool) -> list[str]:
    """Return the kinds that readers must not notice. NB: BOTH ends FUSE connections."""
    kinds = [AT_ONCE, TWICE, STARTING, STOPPED]
    if supervisor:
        kinds += [ADOPTED, BOTH] if front_end == "ublk" else [ADOPTED]
    return kinds


def plan(rounds: int, awkward: Sequence[str]) -> list[str]:
    """Return the kind of each round. Every other one is at a random time, and the
    others are the ``awkward`` ones in turn.
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
        # Reads that begin from now on are not answered by the dead server.
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
            # The successor may be there already. The last server counts.
            os.kill(server.pid, signal.SIGKILL)
            self.device.kill_supervisor()
            server.wait(timeout_s=self.deadline_s)

    def describe(self) -> str:
        """Describe where each process hangs."""
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
    """Make a device with verified reads: of clones on a mounted sprout, to which files
    are written, too, or, if ``raw``, of the device itself.
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
            virtual = stack.enter_context(virtual_file_of(image, target))
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
            # Have a server, as nothing can be taken down while it waits for one.
            with suppress(BtrfsUblkError):
                device.restore()
            raise


def run_rounds(
    made: Trial, kinds: Sequence[str], *, limit_s: float = math.inf
) -> Iterator[Result]:
    """Return the results of all rounds, then of readers and writer. Ends early after
    ``limit_s`` seconds, or when reads hang, with a result that says so.
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


@click.command(context_settings=campaign.SETTINGS)
@click.option("--rounds", type=campaign.COUNT, default=300)
@click.option(
    "--front-end", type=click.Choice(["ublk", "fuse"]), default="ublk", help="Which."
)
@click.option(
    "--supervisor",
    type=bool,
    default=True,
    is_flag=False,
    flag_value=True,
    help="Devices of `btrfs-ublk device up`, or the helper alone, recovered by hand.",
)
@click.option(
    "--awkward",
    type=click.Choice([kind for kind in KINDS if kind != RANDOM]),
    multiple=True,
    help="Only these besides kills at random times.  [default: all]",
)
@click.option(
    "--raw",
    type=bool,
    default=False,
    is_flag=False,
    flag_value=True,
    help="Read the device, without a file system.",
)
@click.option("--depth", type=click.IntRange(1, 1024), default=64, help="Direct reads.")
@campaign.seed_option
@campaign.deadline_option
@campaign.limit_option
@options.parent_option
@campaign.output_option
def command(
    rounds: int,
    front_end: FrontEndName,
    supervisor: bool,
    awkward: Sequence[str],
    raw: bool,
    depth: int,
    seed: int,
    deadline_s: int,
    limit_s: float,
    parent: Path,
    output: Path | None,
) -> None:
    """Kill the server under verified reads and writes, and see what they notice.

    Fails when any byte is wrong, any read fails, or takes longer than the deadline.
    """
    require(ROOT, BTRFS, LOOP, UBLK if front_end == "ublk" else FUSE)
    require(*map(Helper, (MKSEED, SERVER, VERIFY_READS)))
    possible = awkward_kinds(front_end, supervisor=supervisor)
    for kind in awkward:
        if kind not in possible:
            raise UsageError(
                f"--awkward {kind!r}: not with {front_end}, "
                f"{'a' if supervisor else 'no'} supervisor, and no error seen"
            )
    kinds = plan(rounds, awkward or possible)
    parameters = {
        "front_end": front_end,
        "supervisor": supervisor,
        "raw": raw,
        "rounds": rounds,
        "depth": depth,
        "seed": seed,
    }
    results = campaign.Results(
        "recovery",
        tables,
        parameters=parameters,
        directory=parent,
        output=output,
        faults=faults,
    )
    with (
        trial(
            front_end=front_end,
            supervisor=supervisor,
            raw=raw,
            depth=depth,
            seed=seed,
            deadline_s=deadline_s,
            parent=parent,
        ) as made,
        results,  # shown before all is taken down, which may fail
    ):
        for position, result in enumerate(run_rounds(made, kinds, limit_s=limit_s), 1):
            results.add(result, rounds=result["what"] == "round")
            _tell(result, position)
    results.conclude(seed=seed)


def _tell(result: Result, position: int) -> None:
    if result["what"] == "round":
        faults_text = f", {result['faults']} faults so far" if result["faults"] else ""
        options.progress(
            f"round {position}: {result['kind']}: "
            f"{result['recovery_s'] * 1e3:.0f} ms{faults_text}"
        )
    elif result["what"] == "hang":
        options.progress(f"{result['reason']}\n{result['state']}")


if __name__ == "__main__":
    run_command(command, name="recovery.py")
