"""Ways to read, by fio, and their names: "randread-psync", "randread-uring-d64-j2"."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from btrfs_ublk.errors import UsageError
from btrfs_ublk.units import KIB, MIB

_MOST = 256  # of jobs, and a depth


@dataclass(frozen=True)
class Workload:
    """``jobs`` processes read, each with ``depth`` requests in flight."""

    name: str
    pattern: str
    block_bytes: int
    engine: str
    depth: int = 1
    jobs: int = 1

    @property
    def is_mapped(self) -> bool:
        """Through the page cache, also where all else reads past it."""
        return self.engine == "mmap"

    def argv(
        self,
        path: Path,
        *,
        size_bytes: int,
        direct: bool,
        ramp_s: float,
        runtime_s: float,
        output: Path,
    ) -> list[str | Path]:
        """The call of fio, which reads the first ``size_bytes``, for a time; what it
        does during ``ramp_s`` is left out of the results, which go to ``output``.
        """
        return [
            *("fio", "--name=read", f"--filename={path}", "--readonly"),
            *(f"--rw={self.pattern}", f"--bs={self.block_bytes}", "--norandommap"),
            *(f"--size={size_bytes}", f"--ioengine={self.engine}"),
            *(f"--iodepth={self.depth}", f"--numjobs={self.jobs}"),
            *(f"--direct={int(direct and not self.is_mapped)}", "--time_based"),
            *(
                f"--ramp_time={ramp_s * 1e3:.0f}ms",
                f"--runtime={runtime_s * 1e3:.0f}ms",
            ),
            *("--output-format=json+", f"--output={output}", "--eta=never"),
        ]


_BASES = {
    "randread-psync": Workload("", "randread", 4 * KIB, "psync"),
    "randread-uring": Workload("", "randread", 4 * KIB, "io_uring", depth=16),
    "randread-mmap": Workload("", "randread", 4 * KIB, "mmap"),
    "seqread-4k": Workload("", "read", 4 * KIB, "psync"),
    "seqread-1m": Workload("", "read", MIB, "psync"),
}
#: What an option of a name sets, and the engines that have it.
_DEPTH_ENGINES = ("io_uring",)
NAMES = ", ".join(f"{name}[-dN]" if "uring" in name else name for name in _BASES)
HINT = f"known: {NAMES}; each with -jN for N jobs"


def parse_workload(name: str) -> Workload:
    """Raises UsageError for a name that means nothing."""
    match = re.fullmatch(r"(\w+-\w+?)(?:-d([0-9]{1,3}))?(?:-j([0-9]{1,3}))?", name)
    base = _BASES.get(match[1]) if match else None
    if match is None or base is None:
        raise UsageError(f"there is no workload {name!r}", hint=HINT)
    depth, jobs = int(match[2] or base.depth), int(match[3] or base.jobs)
    if not (1 <= depth <= _MOST and 1 <= jobs <= _MOST):
        raise UsageError(f"workload {name!r}: depth and jobs are 1 to {_MOST}")
    if match[2] and base.engine not in _DEPTH_ENGINES:
        raise UsageError(f"workload {name!r}: {base.engine} has no depth", hint=HINT)
    return replace(base, name=name, depth=depth, jobs=jobs)
