"""scripts/torture, and most campaigns in a short form."""

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from call_events import CALL_EVENTS
from support.cgroups import MEMORY_GROUPS
from support.containers import BUSYBOX, CONTAINERD, RUNC
from support.needs import Need
from support.paths import PROJECT
from support.registry import REGISTRY

from btrfs_ublk.base.capabilities import FUSE, LOOP, ROOT, Capability
from btrfs_ublk.bench.origin import NGINX

TORTURE = PROJECT / "scripts/torture"
TIMEOUT_S = 280


def torture(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TORTURE, *words], capture_output=True, text=True, timeout=TIMEOUT_S
    )


def test_all_campaigns_are_listed() -> None:
    lines = torture("--list").stdout.splitlines()
    names = [line.split()[0] for line in lines]
    assert set(SHORT) <= set(names) and "fuzz" in names
    assert all(len(line.split()) > 3 for line in lines)


def test_usage() -> None:
    done = torture("nothing")
    assert done.returncode == 2 and "there are: bad-inputs, " in done.stderr
    assert torture().returncode == 2
    for name in ("images", "power"):
        assert "--rounds" in torture(name, "--help").stdout


@dataclass(frozen=True)
class Short:
    """A short form of a campaign."""

    needs: Sequence[Capability]
    words: Sequence[str]
    rounds: int
    #: Of each round, where it chooses them.
    kinds: Sequence[str] = ()
    #: These must not be 0 in any round.
    counts: Sequence[str] = field(default=())


SHORT = {
    "bad-inputs": Short(
        [FUSE], ["--", "remove d", "map digest big -o small", "b device up x dir"], 4
    ),
    "containers": Short(
        [FUSE, REGISTRY, CONTAINERD, RUNC, BUSYBOX],
        ["--seed=5", "--containers=3", "--writers=1", "--rounds=4"],
        4,
        ["snapshotter + servers", "daemon + containerd", "all get STOP", "upgrade"],
        ["operations"],
    ),
    "faults": Short(
        [FUSE, LOOP, NGINX, REGISTRY],
        ["--source=http", "--duration=2", "--deadline=5", "--rounds=2"],
        2,
        ["names", "rotting disk"],
        ["reads", "healed_reads"],
    ),
    "images": Short(
        [FUSE, REGISTRY],
        ["--seed=5", "--rounds=4"],
        4,
        ["pull", "fork + commit", "registry during up", "daemon gets TERM"],
        ["operations"],
    ),
    # As far as they are quick; all others are for longer campaigns.
    "leaks": Short(
        [FUSE, CALL_EVENTS, REGISTRY],
        ["--seed=5", "--rounds=16"]
        + [f"--kind={x}" for x in ("volume up, new", "device up", "image build")],
        16,
    ),
    "load": Short(
        [FUSE, MEMORY_GROUPS],
        ["--devices=4", "--readers=16", "--clients=200", "--length=2"],
        6,
        counts=["reads"],
    ),
    "power": Short(
        [FUSE, REGISTRY], ["--seed=3", "--steps=13", "--rounds=6", "--up-every=3"], 6
    ),
    "promises": Short(
        [FUSE, LOOP, REGISTRY],
        ["--images=2", "--commits=3", "--reading=5", "--rounds=3"],
        3,
        ["credentials", "boot", "commits"],
    ),
}


@pytest.mark.device
@pytest.mark.fuse
@pytest.mark.data
@pytest.mark.parametrize("name", SHORT)
def test_short_forms(sparse_path: Path, need: Need, name: str) -> None:
    short, output = SHORT[name], sparse_path / "results.json"
    need(ROOT, *short.needs)
    if name == "faults":
        pytest.importorskip("pyroute2", reason="pyroute2 makes networks")
    words = [*(f"--kind={kind}" for kind in short.kinds), "-o", str(output)]
    done = torture(name, "--parent", sparse_path, *words, *short.words)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"{name}: {short.rounds} rounds.* 0 failures", done.stderr)
    rounds = json.loads(output.read_text())["results"]
    assert [each["kind"] for each in rounds if short.kinds] == [*short.kinds]
    assert all(each[count] for each in rounds for count in short.counts)
