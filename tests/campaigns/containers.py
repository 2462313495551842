"""Kills what serves containers, at random: no process in a container may notice.

``python tests/campaigns/containers.py --help``; `scripts/torture` gives it mounts and
processes of its own. A containerd has pods of a sealed image, which arrives from a
registry on loopback when it is read; the snapshotter is ours. Containers verify files
of the image all the time, and in some of them a process changes files and syncs nothing
(shadowed_writer.py). In each round the snapshotter, the daemon, the block servers or
containerd are killed, or two of them at once, or are stopped and go on, or get TERM, in
half of the rounds while pods come and go; what systemd would start again is started
again. Or all that serves is replaced by that of another build, as after an upgrade.
Then a new container is started, the files are compared, and no process of a container
may be another one. After some rounds all pods and images are removed, and nothing may
be left: no file, mount, subvolume, loop device or process. All random choices follow
from --seed.
"""

import hashlib
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from itertools import combinations, cycle, permutations
from pathlib import Path
from typing import Any

import campaign
import click
import grpc
import psutil
from campaign import Run, by_kind, summed, timed
from killable import Signal, have_all_supervised, serving, signal_at_once, soon
from shadow import Writer, shadowed_writer
from support.containers import (
    BUSYBOX,
    CONFIGURATION,
    CONTAINERD,
    RUNC,
    Cri,
    Host,
    connected,
)
from support.devices import new_btrfs
from support.lazy_images import Image, Place
from support.processes import stop
from support.registry import REGISTRY, registry_server
from support.verified_reads import drop_pages

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, ROOT
from btrfs_ublk.base.entry import run_command
from btrfs_ublk.base.process import ProcessIdentity
from btrfs_ublk.base.process import run as run_program
from btrfs_ublk.bench.report import Document, Result, Table
from btrfs_ublk.bench.study import Column
from btrfs_ublk.device import show_device
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.kernel.temporary import loops_below
from btrfs_ublk.units import GIB, KIB, MIB
from btrfs_ublk.volume import list_volumes

_FILES, _FILE_BYTES = 16, 256 * KIB
_LAZY_BYTES = 2 * MIB
_PER_POD = 5
#: What systemd waits before it starts one again (RestartSec= of their units).
_RESTART_S = {"snapshotter": 0.1, "containerd": 5.0}
_LONGEST_WORK_S = 0.5
_PAUSE_S = 0.1
_TIMEOUT_S = 60.0
#: What a container does: it verifies files of the image, and counts its turns.
_VERIFY = """
while :; do
  sha256sum -c -s /sums 2>> /problems || echo wrong >> /problems
  echo >> /turns
  sleep 1
done
"""


_ROLES = ("snapshotter", "daemon", "servers", "containerd")
#: Nothing is killed: another build of the package takes the place of all that runs.
UPGRADE = "upgrade"
#: What is killed at once, or gets another signal (killable.signal_at_once()).
KINDS: dict[str, Sequence[str]] = {
    **{role: [role] for role in _ROLES},
    **{" + ".join(pair): pair for pair in combinations(_ROLES, 2)},
    **{f"{role} gets STOP": [f"STOP {role}"] for role in _ROLES},
    **{f"{role} gets TERM": [f"TERM {role}"] for role in _ROLES},
    "all get STOP": [f"STOP {role}" for role in _ROLES],
    **{
        f"{first}, {second} gets STOP": [first, f"STOP {second}"]
        for first, second in permutations(("snapshotter", "servers", "containerd"), 2)
    },
    UPGRADE: (),
}
#: A new container may take as long after what was killed is started again.
LONGEST_S = 5


@contextmanager
def _named_errors() -> Iterator[None]:
    """Raise BtrfsUblkError for all that a round may end with."""
    try:
        yield
    except (grpc.RpcError, grpc.FutureTimeoutError, AssertionError, OSError) as error:
        said = error.details() if isinstance(error, grpc.Call) else str(error)
        raise BtrfsUblkError(said or type(error).__name__) from error


class Container:
    """A container that is to live on, and its root directory as the host sees it."""

    def __init__(self, cri: Cri, pod: str, image: Image, name: str) -> None:
        self.id = cri.run(pod, image.name, name, "/bin/sh", "-c", _VERIFY)
        self.process = ProcessIdentity.of(int(cri.info(self.id)["pid"]))
        self.root = Path(f"/proc/{self.process.pid}/root")

    def turns(self) -> int:
        with suppress(FileNotFoundError):
            return (self.root / "turns").stat().st_size
        return 0

    def problems(self) -> Iterator[str]:
        if not self.process.is_alive():
            yield f"container {self.id[:12]} has ended"
            return
        with suppress(FileNotFoundError):
            if said := (self.root / "problems").read_text():
                yield f"container {self.id[:12]}: {said.splitlines()[:3]}"

    def drop_pages(self) -> None:
        """Have it read the image's files from the block device again."""
        drop_pages(self.root / "data")


class Campaign:
    """A registry with two images, and a host with containers of them."""

    def __init__(
        self,
        run: Run,
        place: Place,
        host: Host,
        *,
        containers: int,
        writers: int,
        modes: Sequence[str],
        deadline_s: int,
        other: Path,
    ) -> None:
        self._builds = [sys.executable, str(other)]
        self._top, self._place, self._host = run.directory, place, host
        self._number, self._writing = containers, writers
        self._modes = cycle(modes)
        self._chances = run.chances
        self._deadline_s = deadline_s
        self._content = self._top / "content"
        self._content.write_bytes(self._chances.randbytes(_LAZY_BYTES))
        self._image, self._pause = self._push()
        self._configure()
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self._containers: list[Container] = []
        self._writers: list[Writer] = []
        self._names = 0

    def _push(self) -> tuple[Image, Image]:
        """Push the images of the containers and of the sandboxes."""
        shell = {"bin/sh": Path("/bin/busybox").read_bytes()}
        data = {
            f"data/{number}": self._chances.randbytes(_FILE_BYTES)
            for number in range(_FILES)
        }
        sums = [f"{hashlib.sha256(x).hexdigest()}  /{name}" for name, x in data.items()]
        upper = {"sums": "\n".join([*sums, ""]).encode()}
        upper |= {"lazy": self._content.read_bytes(), "etc/name": b"app\n"}
        pause = self._place.push(
            "pause", shell, Cmd=["/bin/sh", "-c", "exec sleep 1000000"]
        )
        return self._place.push("app", shell | data, upper), pause

    def _configure(self) -> None:
        registry = self._place.registry
        self._host.trust(registry.host, registry.ca_file)
        self._host.configuration = CONFIGURATION % {"pause": self._pause.name}
        self._options: list[str | Path] = ["--ca-file", registry.ca_file]
        self._options += ["--writable=2G", "--require-lazy=all"]

    @contextmanager
    def bed(self, of_bed: Result) -> Iterator[Callable[[Result], None]]:
        """Have all that serves, and containers of the next mode; at its end, nothing
        may be left."""
        mode = next(self._modes)
        self._host.options = [*self._options, "--mode", mode]
        (self._host.work / "snapshotter.sock").unlink(missing_ok=True)

        def do(result: Result) -> None:
            result |= {"mode": mode, "undisturbed_s": self._undisturbed_s}
            with _named_errors():
                self._round(result["kind"], result)

        with self._serving():
            before = self._before()
            with self._pods():
                yield do
            try:
                with _named_errors():
                    self._compare_leftovers(before, of_bed)
            except BtrfsUblkError as error:
                of_bed["problems"].append(str(error))

    # What serves.

    @contextmanager
    def _serving(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.callback(self._place.take_down)
            stack.enter_context(self._host.namespace())
            try:
                self._start("snapshotter")
                path = self._host.work / "snapshotter.sock"
                self._soon(path.exists, "the snapshotter is not ready")
                self._start("containerd")
                self._soon(self._is_ready, "containerd is not ready")
                yield
            finally:
                for process in reversed(self._started.values()):
                    stop(process)
                self._started.clear()
                self._end_containers()

    def _end_containers(self) -> None:
        """End what an error has left of containers, and their shims."""
        with suppress(psutil.Error):
            for path in self._tasks().glob("*/*/init.pid"):
                psutil.Process(int(path.read_text())).kill()
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                words = process.cmdline()
                if str(self._host.work / "containerd.sock") in words:
                    process.kill()
                    process.wait(self._deadline_s)

    def _end_empty_shims(self) -> int:
        """End the shims of tasks that never ran; return how many there were."""
        found = 0
        for task in self._tasks().glob("*/*"):
            for process in psutil.process_iter():
                with suppress(psutil.Error):
                    if task.name in process.cmdline() and not (
                        (task / "init.pid").exists()
                    ):
                        process.kill()
                        found += 1
        return found

    def _tasks(self) -> Path:
        return self._host.work / "state/io.containerd.runtime.v2.task"

    def _start(self, role: str) -> None:
        start = getattr(self._host, f"start_{role}")
        self._started[role] = start()

    def _is_ready(self) -> bool:
        with suppress(grpc.RpcError, grpc.FutureTimeoutError):
            with self._asking() as cri:
                return cri.is_ready()
        return False

    def _asking(self) -> AbstractContextManager[Cri]:
        return connected(self._host.work / "containerd.sock")

    def _soon(self, condition: Callable[[], object], what: str) -> None:
        end_s = time.monotonic() + self._deadline_s
        while not condition():
            if time.monotonic() > end_s:
                raise BtrfsUblkError(f"{what} after {self._deadline_s} s")
            time.sleep(_PAUSE_S)

    # Pods.

    @contextmanager
    def _pods(self) -> Iterator[None]:
        """Have containers, some of them with writers. All goes at the end, and the
        images."""
        with ExitStack() as stack:
            stack.callback(self._remove_all)
            with self._asking() as cri:
                cri.pull(self._image.name)
                for number in range(self._number):
                    if number % _PER_POD == 0:
                        pod = cri.start_pod(self._new_name())
                    made = Container(cri, pod, self._image, f"container-{number}")
                    self._containers.append(made)
            for each in self._containers[: self._writing]:
                writer = shadowed_writer(
                    each.root / "written",
                    each.root / "lazy",
                    self._content,
                    seed=self._chances.randrange(1 << 32),
                    timeout_s=self._deadline_s,
                )
                self._writers.append(stack.enter_context(writer))
            yield

    def _new_name(self) -> str:
        self._names += 1
        return f"pod-{self._names}"

    def _new_container(self, cri: Cri) -> str:
        pod, name = cri.start_pod(self._new_name()), self._new_name()
        return cri.run(pod, self._image.name, name, "/bin/sh", "-c", _VERIFY)

    def _remove_all(self) -> None:
        self._containers.clear()
        self._writers.clear()
        self._remove_pods(set())
        with self._asking() as cri:
            for image in (self._image, self._pause):
                cri.remove_image(image.name)

    def _remove_pods(self, but: set[str]) -> None:
        """Remove pods as the kubelet does, which tries again when it is refused: a
        containerd that was killed has to learn first what has become of its tasks."""
        end_s = time.monotonic() + self._deadline_s
        while True:
            try:
                with self._asking() as cri:
                    for pod in set(cri.pods()) - but:
                        cri.remove_pod(pod)
                return
            except grpc.RpcError:
                if time.monotonic() > end_s:
                    raise
                time.sleep(_PAUSE_S)

    # A round.

    def _round(self, kind: str, result: Result) -> None:
        with self._asking() as cri:
            pods = set(cri.pods())
        for writer in self._writers:
            writer.ask("go 0")
        time.sleep(self._chances.uniform(0, _LONGEST_WORK_S))
        with self._coming_and_going(result):
            for each in self._containers:
                each.drop_pages()
            time.sleep(self._chances.uniform(0, _LONGEST_WORK_S))
            if kind == UPGRADE:
                self._upgrade()
            else:
                self._signal_and_restart(KINDS[kind], result)
            self._start_new(result)
        self._settle(result)
        self._compare(result)
        self._remove_pods(pods)

    def _signal_and_restart(self, words: Sequence[str], result: Result) -> None:
        """Send signals at once. ``self._restarted_s`` is when the last of those that
        ended was started again by us, or else when all had theirs."""
        _, result["kills"] = signal_at_once(words, self._processes, self._chances)
        signals = [Signal.parse(word) for word in words]
        after_s = {
            one.role: self._chances.uniform(0, _RESTART_S[one.role])
            for one in signals
            if one.role in _RESTART_S and one.number != signal.SIGSTOP
        }
        begin_s = time.monotonic()
        have_all_supervised([volume.name for volume in list_volumes()], words)
        for role in sorted(after_s, key=lambda role: after_s[role]):
            self._started[role].wait(self._deadline_s)
            time.sleep(max(0, begin_s + after_s[role] - time.monotonic()))
            self._start(role)
        self._restarted_s = time.monotonic()

    def _upgrade(self) -> None:
        """Have another build serve all there is, as after an upgrade of the package."""
        self._builds.reverse()
        self._host.python = self._builds[0]
        stop(self._started["snapshotter"])
        self._start("snapshotter")
        for volume in list_volumes():
            argv = [self._host.python, "-P", "-m", "btrfs_ublk.cli.main", "device"]
            run_program([*argv, "upgrade", volume.name], timeout_s=_TIMEOUT_S)
        self._restarted_s = time.monotonic()

    def _processes(self, role: str) -> list[ProcessIdentity]:
        if role in _RESTART_S:
            return [ProcessIdentity.of(self._started[role].pid)]
        return serving([volume.name for volume in list_volumes()], role)

    def _start_new(self, result: Result) -> None:
        """Start a pod as the kubelet does, which tries until one runs, and have a
        container in it read. Note how long that takes from the restart on."""
        failed = 0
        while True:
            try:
                with self._asking() as cri:
                    # NB: a containerd that has started before its snapshotter does not
                    # know its images any more.
                    if not cri.has_image(self._image.name):
                        result["pulled"] = 1
                        cri.pull(self._image.name)
                    new = self._new_container(cri)
                    read = cri.shell(new, "cat /etc/name")
                    result["new_s"] = time.monotonic() - self._restarted_s
                    result["refused"] = failed
                    read += cri.shell(new, "sha256sum -c -s /sums; echo $?")
                if read != "app\n0\n":
                    result["problems"].append(f"a new container reads {read!r}")
                return
            except (grpc.RpcError, grpc.FutureTimeoutError) as error:
                failed += 1
                if time.monotonic() > self._restarted_s + self._deadline_s:
                    said = error.details() if isinstance(error, grpc.Call) else "-"
                    raise BtrfsUblkError(f"no new container starts: {said}") from None
                time.sleep(_PAUSE_S)

    @contextmanager
    def _coming_and_going(self, result: Result) -> Iterator[None]:
        """In half of the rounds, start and remove pods meanwhile."""
        over = threading.Event()
        thread = threading.Thread(target=self._come_and_go, args=[over], daemon=True)
        result["busy"] = self._chances.random() < 0.5
        if result["busy"]:
            thread.start()
        try:
            yield
        finally:
            over.set()
            if result["busy"]:
                thread.join(self._deadline_s)
        if thread.is_alive():
            raise BtrfsUblkError(f"a pod hangs for {self._deadline_s} s")

    def _come_and_go(self, over: threading.Event) -> None:
        number = 0
        while not over.wait(_PAUSE_S):
            number += 1
            with suppress(grpc.RpcError, grpc.FutureTimeoutError):
                with self._asking() as cri, cri.pod(f"{id(over)}-{number}") as pod:
                    name = f"short-{pod}"
                    cri.run(pod, self._image.name, name, "/bin/sh", "-c", _VERIFY)

    def _settle(self, result: Result) -> None:
        """Wait until all that serves is there again, and all containers have read what
        the image has since then."""
        for role, process in self._started.items():
            if process.poll() is not None:
                result["problems"].append(f"{role} has ended: {process.returncode}")
        for volume in list_volumes():
            soon(
                lambda: show_device(volume.name).is_well or None,
                f"device {volume.name} is not well",
            )
        for each in self._containers:
            each.drop_pages()
        before = {each.id: each.turns() for each in self._containers}
        self._soon(
            lambda: all(
                each.turns() > before[each.id] + 1 or not each.process.is_alive()
                for each in self._containers
            ),
            "a container hangs",
        )

    def _compare(self, result: Result) -> None:
        problems = result["problems"]
        result["operations"] = 0
        for writer in self._writers:
            paused = writer.ask("pause")
            result["operations"] += paused["operations"]
            problems += paused["errors"]
            problems += writer.ask("compare")["differences"]
        run_program(
            ["btrfs", "filesystem", "sync", self._containers[0].root],
            timeout_s=_TIMEOUT_S,
            ok_statuses=range(256),  # it does not know overlays
        )
        for writer, each in zip(self._writers, self._containers):
            drop_pages(each.root / "written")
            found = writer.ask("compare")["differences"]
            problems += [f"flushed: {what}" for what in found]
            writer.ask("release")
        result["turns"] = sum(each.turns() for each in self._containers)
        with self._asking() as cri:
            for each in self._containers:
                problems += each.problems()
                said = cri.info(each.id)
                if said.get("pid") != each.process.pid:
                    problems.append(f"containerd says of {each.id[:12]}: {said}")

    # What is left.

    def _before(self) -> Counter[str]:
        """Describe what there is when pods have come and gone, as the first one has
        directories made. Note how long a container takes when nothing is killed."""
        with self._asking() as cri:
            cri.pull(self._image.name)
            self._new_container(cri)
            begin_s = time.monotonic()
            cri.shell(self._new_container(cri), "cat /etc/name")
            self._undisturbed_s = time.monotonic() - begin_s
        self._remove_all()
        self._soon(lambda: not list_volumes(), "images stay")
        return self._there()

    def _compare_leftovers(self, before: Counter[str], result: Result) -> None:
        """NB: a containerd 1.6 that is killed while it starts a task keeps, for good, a
        shim that has none. It ends here, and nothing else may be left then."""
        with suppress(BtrfsUblkError):
            self._soon(lambda: not self._there() - before, "something is left")
        if self._there() - before:
            result["kept"] = self._end_empty_shims()
            stop(self._started["containerd"])
            self._start("containerd")
            self._soon(self._is_ready, "containerd is not ready")
            self._remove_all()
            with suppress(BtrfsUblkError):
                self._soon(lambda: not self._there() - before, "something is left")
        left = sorted(self._there() - before)
        result["problems"] += [f"is left: {each}" for each in left]

    def _there(self) -> Counter[str]:
        """Describe what there is: all processes are of this campaign."""
        found = Counter[str]()
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                words = process.cmdline()
                if "btrfs_ublk.daemon" not in words:  # it ends after a while
                    found[f"process {' '.join(words)[:200]}"] += 1
        for pid in ("self", self._host.pid):
            for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines():
                target = line.split()[4]
                if str(self._top) in target or target.startswith("/run/"):
                    found[f"mount {target}"] += 1
        found += Counter(f"loop device of {file}" for _, file in loops_below(self._top))
        mount = self._host.root.parent
        listed = run_program(
            ["btrfs", "subvolume", "list", mount], timeout_s=_TIMEOUT_S
        ).stdout
        found += Counter(f"subvolume {x.split()[-1]}" for x in listed.splitlines())
        blobs = self._host.work / "root/io.containerd.content.v1.content/blobs"
        places = [self._top / name for name in ("run", "volumes", "images")]
        for place in (*places, self._host.root, self._tasks(), blobs):
            for path in place.rglob("*"):
                if "daemon" not in str(path.relative_to(place)):
                    found[str(path)] += 1
        return found


def tables(document: Document) -> list[Table]:
    """Make a table with a row for each kind of kill."""
    rounds = document["results"]
    columns = [
        *(summed("kills"), summed("operations")),
        timed("undisturbed_s", 0.5, "undisturbed s", 2),
        timed("new_s", 0.5, "new p50 s", 2),
        *(timed("new_s", 0.99, "p99 s", 2), timed("new_s", 1, "max s", 2)),
        Column(
            f"over {LONGEST_S} s",
            lambda its: sum(each.get("new_s", 0) > LONGEST_S for each in its),
        ),
        *(summed("pulled", "pulled again"), summed("kept")),
    ]
    note = (
        "The times are from when containerd or the snapshotter were started again, "
        "or else from the kill, until a container of a new pod has read a file; "
        "undisturbed: before anything is killed. Pulled again: containerd had come up "
        "before the "
        "snapshotter, and did not know its images any more. Kept: shims without a "
        "task, which containerd had just started when it was killed. Operations are "
        "those of processes that change files of containers."
    )
    title = f"Killed beneath {document['parameters']['containers']} containers"
    return [by_kind(title, rounds, columns, note=note)]


@campaign.command(
    "containers",
    click.option(
        "--mode",
        "modes",
        type=click.Choice(["snapshot", "overlay"]),
        multiple=True,
        default=["snapshot", "overlay"],
        help="What containers are, in turn.",
    ),
    click.option("--containers", type=campaign.COUNT, default=20),
    click.option(
        "--writers",
        type=campaign.COUNT,
        default=2,
        help="In how many of them files are changed.",
    ),
    click.option(
        "--session",
        type=campaign.COUNT,
        default=10,
        help="Rounds after which all is removed.",
    ),
    campaign.other_option,
    campaign.deadline_option,
    tables=tables,
    needs=(ROOT, BTRFS, LOOP, FUSE, REGISTRY, CONTAINERD, RUNC, BUSYBOX),
    rounds=100,
    kinds=KINDS,
    recorded=("containers", "writers", "session"),
)
def command(run: Run, session: int, **settings: Any) -> None:
    """Kill what serves containers of containerd, and look whether they notice.

    Fails when a container ends, a byte is wrong or lost, a read or write fails, none
    can be started afterwards, or anything is left after all were removed.
    """
    top, stack = run.directory, run.stack
    for name in ("registry", "work"):
        (top / name).mkdir()
    server = stack.enter_context(registry_server(top / "registry", tls=True))
    mount = stack.enter_context(new_btrfs(top, size_bytes=8 * GIB))
    run_program(["mount", "--make-shared", mount], timeout_s=_TIMEOUT_S)
    place = Place(top, server, RegistryAccess(ca_file=server.ca_file), stack.close)
    place.allow()
    made = Campaign(run, place, Host(top / "work", mount / "root"), **settings)
    run.do_rounds(
        made.bed,
        lambda x: f"{x.get('new_s', 0):.1f} s until a new container",
        session=session,
    )


if __name__ == "__main__":
    run_command(command, name="containers.py")
