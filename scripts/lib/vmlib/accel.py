"""Whether KVM really works here: a device node alone proves nothing.

Nested and restricted hypervisors offer /dev/kvm and then fail on a stock kernel's
first instructions.  So the kernel is booted once, and the verdict is kept: for ever
when it has booted, else for an hour, as the machine may only have been busy.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from . import cache, children, initramfs
from .kernel import Kernel
from .machine import QEMU, Machine, qemu_argv

_PROBE_LIMIT_S = 15.0
_FAILURE_KEPT_S = 3600.0
_ALIVE = "kvm-probe: alive"


def kvm_works(kernel: Kernel) -> bool:
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return False
    verdict = cache.cache_dir() / f"kvm-{_situation(kernel)}.json"
    with cache.locked("kvm"):
        if (known := _known(verdict)) is not None:
            return known
        print(f"vm: trying KVM, at most {_PROBE_LIMIT_S:.0f} s ...", file=sys.stderr)
        works = _boots(kernel)
        text = "KVM works" if works else "KVM fails; software emulation it is"
        print(f"vm: {text}", file=sys.stderr)
        verdict.write_text(json.dumps({"works": works}), encoding="utf-8")
        return works


def _known(verdict: Path) -> bool | None:
    """What was found out before; None: nothing that still counts."""
    if not verdict.exists():
        return None
    works = bool(json.loads(verdict.read_text(encoding="utf-8"))["works"])
    age_s = time.time() - verdict.stat().st_mtime
    return works if works or 0 <= age_s < _FAILURE_KEPT_S else None


def _situation(kernel: Kernel) -> str:
    """Changes when the verdict may: another host kernel, CPU, QEMU or guest."""
    cpu = [
        line
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ][:1]
    qemu = os.stat(shutil.which(QEMU) or "/").st_mtime_ns
    parts = (os.uname().release, os.uname().version, *cpu, str(qemu), kernel.release)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _boots(kernel: Kernel) -> bool:
    with tempfile.TemporaryDirectory(prefix="btrfs-ublk-kvm-") as directory:
        path = Path(directory)
        machine = Machine(
            kernel=kernel,
            initramfs=path / "initramfs",
            memory="512M",
            cpus=2,
            kvm=True,
            icount=False,
            console=path / "console.log",
        )
        probe = f"echo {_ALIVE} >/dev/console; poweroff -f"
        initramfs.build(
            machine.initramfs, kernel=kernel, files={"probe": probe.encode()}
        )
        with open(path / "qemu.log", "wb") as log:
            qemu = children.spawn(qemu_argv(machine), log=log.fileno())
            try:
                qemu.wait(_PROBE_LIMIT_S)
            except subprocess.TimeoutExpired:
                pass
            finally:
                children.stop(qemu)
        return machine.console.exists() and _ALIVE.encode() in (
            machine.console.read_bytes()
        )
