"""What one host pays for a ring of site caches that has all it reads.

``.venv/bin/python tests/campaigns/fleet_overhead.py --build DIRECTORY`` has a host read
an object of a web server (nginx) directly, and through a warm ring of three, by turns,
all on loopback without limits: the least that an origin can cost. It prints, for one
read in flight and for several, medians of the turns, and the ratio of the ring to the
origin with an interval that covers it in 95 of 100 cases: of the latency of a read, and
of the CPU time of the host's processes. On a busy machine, hosts take fronts for silent
and ask the origin, so the reads of the ring that did so are counted, and the load is
shown: with either, the intervals say nothing. ``--build`` is one without sanitizers,
as of ``meson setup -Dtests=true -Dbuildtype=release build/plain``.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import campaign
import click

PROJECT = Path(__file__).parents[2]
sys.path.insert(0, str(PROJECT / "tests"))

from fleet import NODES, UNIT  # noqa: E402
from support.shells import FetchShell, fetch_shell  # noqa: E402
from support.sites import ring  # noqa: E402
from support.web_servers import web_server  # noqa: E402

from btrfs_ublk.base.entry import run_command  # noqa: E402
from btrfs_ublk.bench.stats import bootstrap_interval  # noqa: E402

WINDOWS = (1, 8)
_COUNTED = ("median ms", "CPU ms")


def _cpu_ns(pid: int) -> int:
    """Return the CPU time of a process and its children so far."""
    found = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += int((task / "schedstat").read_text().split()[0])
        children = (task / "children").read_text().split()
        found += sum(_cpu_ns(int(child)) for child in children)
    return found


def _turn(shell: FetchShell, source: int, data: bytes, window: int) -> dict[str, float]:
    """Read all, and return what a read took."""
    took: list[float] = []
    before = _cpu_ns(shell.pid)
    for first in range(0, len(data), window * UNIT):
        ats = range(first, min(first + window * UNIT, len(data)), UNIT)
        reads = {shell.begin(source, at, UNIT): at for at in ats}
        for number, answer in shell.finish().items():
            at = reads[number]
            if answer.result or answer.data != data[at : at + UNIT]:
                raise AssertionError(f"the read at {at} failed or is wrong")
            took.append(answer.ms)
    cpu_ms = (_cpu_ns(shell.pid) - before) / 1e6 / len(took)
    return dict(zip(_COUNTED, (median(took), cpu_ms), strict=True))


@click.command()
@click.option("--turns", default=15, type=click.IntRange(2), show_default=True)
@click.option("--units", default=64, type=click.IntRange(8), show_default=True)
@click.option(
    "--build",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    required=True,
)
def command(turns: int, units: int, build: Path) -> None:
    """Compare a warm ring with its origin, for one host."""
    data = os.urandom(units * UNIT)
    found: dict[tuple[int, str], list[dict[str, float]]] = {}
    missed = 0
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        web = stack.enter_context(web_server(root / "web"))
        (web.files / "object").write_bytes(data)
        url = web.url("files/object")
        keys: dict[str, Any] = {"origins": [web.url("").rstrip("/")]}
        nodes = stack.enter_context(ring(root, NODES, slice_bytes=UNIT, **keys))
        direct = {"kind": "http", "url": url}
        mirrors = {"direct": direct, "ring": direct | {"via": nodes.urls}}
        # The first turn fills the ring, and does not count.
        for turn in range(turns + 1):
            for window in WINDOWS:
                order = sorted(mirrors, reverse=bool(turn % 2))
                for name in order:
                    with fetch_shell(build, log=root / "log") as shell:
                        mirror = mirrors[name]
                        source = {"size": len(data), "unit": UNIT, "mirrors": [mirror]}
                        number = shell.add(source)
                        asked = {"probe": 1, "source": number, "timeout_ms": 30000}
                        shell.pin(number, shell.ask(asked)["identity"])
                        measured = _turn(shell, number, data, window)
                        hosts = shell.stats()["hosts"]
                    if turn:
                        if name == "ring":
                            missed += hosts[urlsplit(url).netloc]["bytes"] // UNIT
                        found.setdefault((window, name), []).append(measured)
    click.echo("in flight  of a read     direct     ring  ratio  interval")
    for window in WINDOWS:
        for what in _COUNTED:
            values = {
                name: [each[what] for each in found[window, name]] for name in mirrors
            }
            direct_ms, ring_ms = median(values["direct"]), median(values["ring"])
            low, high = bootstrap_interval(
                values["ring"], values["direct"], paired=True
            )
            click.echo(
                f"{window:9}  {what:9}  {direct_ms:9.3f}  {ring_ms:7.3f}"
                f"  {ring_ms / direct_ms:5.2f}  {low:.2f} to {high:.2f}"
            )
    reads = turns * len(WINDOWS) * units
    load = os.getloadavg()[0]
    click.echo(f"load {load:.1f}; the origin was asked for {missed} of {reads} reads")
    campaign.conclude([], rounds=turns)


if __name__ == "__main__":
    run_command(command, name="fleet_overhead.py")
