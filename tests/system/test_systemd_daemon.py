"""The daemon as a service of systemd, which is process 1 of namespaces of its own."""

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from killable import soon
from support.devices import description_file, reading
from support.installed import install_units
from support.needs import Need
from support.processes import free_ports
from support.registry import REGISTRY
from support.sites import write_configuration
from support.snapshotter import Place, connected, place, pull, root  # noqa: F401
from support.web_servers import NGINX, ranged, response, scripted_server

from btrfs_ublk.base.process import run
from btrfs_ublk.device.state import RUN_VARIABLE
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.kernel import loop
from btrfs_ublk.ops.site_cache.config import Node, SiteCache
from btrfs_ublk.server import PatternSegment
from btrfs_ublk.units import MIB
from btrfs_ublk.volume.store import volume_directories

SYSTEMD = Path("/lib/systemd/systemd")
CGROUPS = "/sys/fs/cgroup"
#: Units that all others depend on by default. Nothing else of this machine is started.
TARGETS = ("sysinit", "basic", "sockets", "shutdown", "local-fs", "multi-user")
SERVICE = "btrfs-ublk.service"
TIMEOUT_S = 60.0

pytestmark = [
    pytest.mark.device,
    pytest.mark.fuse,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not SYSTEMD.exists(), reason="no systemd"),
]


class Host:
    """A host whose process 1 is systemd. It has its own processes and /run."""

    def __init__(self, pid: int, directory: Path) -> None:
        self.pid = pid
        self.run = Path(f"/proc/{pid}/root/run/btrfs-ublk")
        self.description = description_file(directory)
        (directory / "one.json").write_text(self.description.read_text())
        #: Variables that name where commands of this host keep what they have.
        self.settings = list[str]()

    def call(self, *words: str | Path) -> str:
        """Run a command there, and return what it prints."""
        return run(
            ["nsenter", "--target", str(self.pid), "--mount", "--pid", *words],
            timeout_s=TIMEOUT_S,
            # That of the tests names another run directory.
            env={"PATH": os.environ["PATH"]},
        ).stdout

    def device(self, *words: str | Path) -> str:
        return self.call(sys.executable, "-m", "btrfs_ublk.cli.main", "device", *words)

    def up(self, name: str = "one") -> Path:
        """Make a device; return it."""
        words = ("up", name, self.description, "--front-end", "fuse")
        return Path(self.device(*words).strip())

    def state(self, name: str = "one") -> dict[str, Any]:
        path = self.run / "devices" / name / "state.json"
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def shown(self, key: str) -> int:
        """Return a number that systemd knows of the daemon."""
        return int(self.call("systemctl", "show", "--value", "-P", key, SERVICE))

    def wait(self, condition: Callable[[], bool]) -> None:
        try:
            soon(lambda: condition() or None, "the condition is not met")
        except BtrfsUblkError as error:
            raise AssertionError(self.words()) from error

    def wait_for_another(self, before: dict[str, Any]) -> dict[str, Any]:
        """Wait until systemd's daemon supervises with a server other than before."""

        def is_another() -> bool:
            now = self.state()
            return (
                now["status"] == "serving"
                and now["server"] != before["server"]
                and now["supervisor"]["pid"] == self.shown("MainPID")
                and self.shown("NFileDescriptorStore") == 1
            )

        self.wait(is_another)
        return self.state()

    def words(self) -> str:
        """Return what the daemon and the device said."""
        logs = [self.run / "daemon/log", *self.run.glob("devices/*/log")]
        return "\n".join(log.read_text() for log in logs if log.exists())


def _cgroup(stack: ExitStack) -> list[Path]:
    """Make a control group, in each hierarchy that systemd uses."""
    top = Path(CGROUPS)
    names = ["systemd", "unified", "pids", "memory"]
    tops = [top / name for name in names if (top / name).is_dir()] or [top]
    made = []
    for each in tops:
        group = each / f"btrfs-ublk-{secrets.token_hex(4)}"
        group.mkdir()
        stack.callback(_remove_groups, group)
        made.append(group)
    return made


def _remove_groups(group: Path) -> None:
    def is_gone() -> bool | None:
        # NB: processes of the namespaces that were killed may take a moment to end.
        with suppress(OSError):
            for path, _, _ in os.walk(group, topdown=False):
                os.rmdir(path)
        return not group.exists() or None

    soon(is_gone, f"{group} is in use")


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    units = tmp_path / "units"
    units.mkdir()
    install_units(units)
    # There is one /etc for all hosts, and one /var.
    ours = {x: y for x, y in os.environ.items() if x.startswith("BTRFS_UBLK_")}
    keep = [f"{x}={y}" for x, y in ours.items() if x != RUN_VARIABLE]
    for unit in units.glob("*.service"):
        text = unit.read_text().replace("/etc/btrfs-ublk", str(tmp_path))
        text = text.replace("[Service]", f"[Service]\nEnvironment={' '.join(keep)}")
        unit.write_text(text)
    (tmp_path / "one.conf").write_text("OPTIONS=--front-end=fuse\n")
    for name in TARGETS:
        (units / f"{name}.target").write_text("[Unit]\nDefaultDependencies=no\n")
    boot = f"""
        for group; do echo $$ > "$group/cgroup.procs"; done
        exec unshare --pid --fork --kill-child --mount --propagation=slave \\
            --mount-proc --ipc --uts --cgroup sh -euc 'mount -t tmpfs none /run
                mkdir -p /run/systemd/system /run/cgroup
                if ! [ -e {CGROUPS}/cgroup.controllers ]; then  # version 1
                    # systemd makes that tmpfs read-only, for all who have it.
                    mount -t tmpfs none /run/cgroup
                    for each in {CGROUPS}/*; do
                        if [ -L $each ]; then
                            cp -P $each /run/cgroup
                        else
                            mkdir /run/cgroup/${{each##*/}}
                            mount --bind $each /run/cgroup/${{each##*/}}
                        fi
                    done
                    mount --move /run/cgroup {CGROUPS}
                fi
                exec env -i container=test SYSTEMD_UNIT_PATH={units} {SYSTEMD} \\
                    --system --unit=basic.target --log-target=console --show-status=no'
        """
    with ExitStack() as stack:
        groups = _cgroup(stack)
        log = stack.enter_context((tmp_path / "systemd.log").open("w"))
        unshare = stack.enter_context(
            subprocess.Popen(
                ["sh", "-euc", boot, "sh", *groups],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        )
        stack.callback(unshare.kill)
        children = Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children")

        def booted() -> int | None:
            assert unshare.poll() is None, (tmp_path / "systemd.log").read_text()
            for pid in children.read_text().split():
                if Path(f"/proc/{pid}/root/run/systemd/private").exists():
                    return int(pid)
            return None

        made = Host(soon(booted, "systemd has not started"), tmp_path)
        made.settings = keep
        stack.push(lambda *_: _detach_all(made, unshare))
        yield made


def _detach_all(host: Host, unshare: subprocess.Popen[bytes]) -> None:
    """End the host, and detach loop devices of what it had not taken down."""
    tags = [json.loads(x.read_text())["tag"] for x in host.run.glob("devices/*/dev*")]
    unshare.kill()
    unshare.wait()
    for tag in tags:
        device = loop.find_by_tag(tag)
        if device is not None:
            loop.detach(device, tag)


def test_a_request_starts_it(host: Host) -> None:
    """It supervises all devices, and systemd stores a descriptor for each."""
    host.call("systemctl", "start", "btrfs-ublk.socket")
    assert host.shown("MainPID") == 0
    host.up()
    host.up("two")
    daemon = host.shown("MainPID")
    assert {host.state(x)["supervisor"]["pid"] for x in ("one", "two")} == {daemon}
    assert host.shown("NFileDescriptorStore") == 2
    # Only systemd starts the next one.
    assert not any(keeper["revives"] for keeper in host.state()["keepers"])
    host.device("down", "two")
    assert host.shown("NFileDescriptorStore") == 1
    host.device("down", "one")
    assert host.shown("NFileDescriptorStore") == 0
    # It waits for the next request, and has not ended in between.
    host.up()
    assert host.shown("MainPID") == daemon


def test_everything_is_killed_at_once(host: Host) -> None:
    """Daemon, server and keeper: only systemd has the FUSE connection then."""
    host.call("systemctl", "start", "btrfs-ublk.socket")
    device = host.up()
    with reading(device) as reads:
        for _ in range(3):
            before = host.state()
            host.call("systemctl", "kill", "--signal=KILL", "--kill-who=all", SERVICE)
            after = host.wait_for_another(before)
            assert after["keepers"] != before["keepers"]
            assert after["device"] == str(device)
            reads.wait_for_reads(20)
        assert (reads.wrong, reads.errors) == (0, [])
    assert host.shown("NRestarts") == 3


def test_it_is_stopped_and_started(host: Host) -> None:
    """Its devices are served meanwhile, and it supervises them again."""
    host.call("systemctl", "start", "btrfs-ublk.socket")
    device = host.up()
    before = host.state()
    with reading(device) as reads:
        host.call("systemctl", "stop", SERVICE)
        assert host.shown("MainPID") == 0
        assert host.state()["supervisor"] is None
        reads.wait_for_reads(20)
        host.call("systemctl", "start", SERVICE)
        host.wait(lambda: host.state()["status"] == "serving")
        assert host.state()["supervisor"]["pid"] == host.shown("MainPID")
        host.wait(lambda: host.shown("NFileDescriptorStore") == 1)
        assert host.state()["server"] == before["server"]
        assert (reads.wrong, reads.errors) == (0, [])


def test_it_replaces_itself(host: Host) -> None:
    """By the program that is installed now: systemd sees the same process."""
    host.call("systemctl", "start", "btrfs-ublk.socket")
    device = host.up()
    daemon = host.shown("MainPID")
    with reading(device) as reads:
        host.call("systemctl", "reload", SERVICE)
        replaced = f"replaced by {sys.executable}"
        host.wait(lambda: replaced in host.words())
        host.wait(lambda: host.shown("NFileDescriptorStore") == 1)
        assert host.shown("MainPID") == daemon
        before = host.state()
        host.call("systemctl", "kill", "--signal=KILL", "--kill-who=all", SERVICE)
        host.wait_for_another(before)
        reads.wait_for_reads(20)
        assert (reads.wrong, reads.errors) == (0, [])


def test_it_takes_over_from_one_that_a_command_started(host: Host) -> None:
    device = host.up()
    before = host.state()
    assert host.shown("MainPID") == 0
    with reading(device) as reads:
        host.call("systemctl", "start", "btrfs-ublk.socket", SERVICE)
        host.wait(lambda: host.state()["supervisor"] != before["supervisor"])
        assert host.state()["supervisor"]["pid"] == host.shown("MainPID")
        host.wait(lambda: host.state()["keepers"] != before["keepers"])
        assert host.state()["server"] == before["server"]
        assert (reads.wrong, reads.errors) == (0, [])


def test_a_device_has_a_unit(host: Host) -> None:
    """A program that uses it keeps it, supervised by the daemon."""
    host.call("systemctl", "start", "btrfs-ublk@one")
    daemon = host.shown("MainPID")
    before = host.state()
    assert before["supervisor"]["pid"] == daemon > 0
    with Path(before["device"]).open("rb", buffering=0) as device:
        host.call("systemctl", "stop", "btrfs-ublk@one")
        show = ("systemctl", "show", "--value", "-P", "ActiveState")
        assert host.call(*show, "btrfs-ublk@one") == "failed\n"
        # It is there already.
        host.call("systemctl", "start", "btrfs-ublk@one")
        assert device.read(8) == bytes(8)
    assert host.state()["server"] == before["server"]
    host.call("systemctl", "stop", "btrfs-ublk@one")
    assert host.device("list", "--json").split() == ["[]"]


def test_everything_is_restarted(
    need: Need,
    place: Place,  # noqa: F811
    root: Path,  # noqa: F811
    host: Host,
    tmp_path: Path,
) -> None:
    """Who reads a device, a volume by a site cache, or a snapshot, only waits."""
    need(NGINX, REGISTRY)
    segment = PatternSegment(offset=0, length=4 * MIB)
    data = segment.content(0, segment.length)
    image = place.push("app", {"data": data})

    def serve(request: str) -> bytes:
        if request.startswith("HEAD "):
            return response('200 OK\nETag: "it"', length=len(data))
        return ranged(request, data, 'ETag: "it"')

    units = ["btrfs-ublk-snapshotter", "btrfs-ublk-volume@two", "btrfs-ublk@one"]
    units += ["btrfs-ublk.socket", SERVICE, "site"]
    socket, mount = root.with_suffix(".sock"), tmp_path / "mnt"
    with ExitStack() as stack:
        origin = stack.enter_context(scripted_server(serve)).url("").rstrip("/")
        port, other = free_ports(2)
        node = Node("127.0.0.1", port, other)
        site = SiteCache(
            nodes=[node],
            this=node,
            directory=tmp_path / "cache",
            max_bytes=1 << 30,
            resolvers=["127.0.0.1"],
            origins=[origin],
            slice_bytes=256 << 10,
        )
        words = write_configuration(tmp_path / "site", site)
        (tmp_path / "units/site.service").write_text(
            f"[Service]\nExecStart=/usr/sbin/{' '.join(map(str, words))}\n"
        )
        (tmp_path / "snapshotter.conf").write_text(
            f"OPTIONS=--root={root} --socket={socket} --writable=256M "
            f"--require-lazy=all --cache-max=1M --ca-file={place.registry.ca_file}\n"
        )
        (tmp_path / "volumes").mkdir()
        (tmp_path / "volumes/two.conf").write_text(
            f"OPTIONS=--mount={mount} --front-end=fuse --cache-max=1M "
            f"--via=http://127.0.0.1:{port} --add-file=data={origin}/data\n"
        )
        host.call("systemctl", "daemon-reload")
        host.call("systemctl", "start", "site", *units[:3])
        with connected(socket) as client:
            snapshot = client.prepare("one", pull(client, image))
        there = Path(f"/proc/{host.pid}/root")
        data_of = [there / str(x)[1:] / "data" for x in (mount, snapshot)]
        device = Path(host.state()["device"])
        with ExitStack() as using:
            for path in (device, *data_of):
                using.enter_context(path.open("rb"))  # so nothing is taken down
            reads = [using.enter_context(reading(device))]
            reads += [using.enter_context(reading(x, segment)) for x in data_of]
            for _ in range(2):
                host.call("systemctl", "restart", *units)
                for each in reads:
                    each.wait_for_reads(20)
            assert [(each.wrong, each.errors) for each in reads] == [(0, [])] * 3
            print(f"longest reads: {[round(each.longest_s, 2) for each in reads]} s")
        with connected(socket) as client:
            client.remove("one")
        host.call("systemctl", "stop", *units[1:3])
        for volume in volume_directories():
            words = [sys.executable, "-m", "btrfs_ublk.command", "volume", "down"]
            host.call("env", *host.settings, *words, volume.name)
