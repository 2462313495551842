"""Workloads of fio, and their names: "randread-psync", "randread-uring-d64-j2",
"seqwrite-libaio-j4".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from btrfs_ublk.errors import UsageError
from btrfs_ublk.units import BLOCK_BYTES, KIB, MIB

_MOST = 256  # the most jobs, and the largest depth

_PATTERN = b"btrfublk"
#: The content of every block that fio wrote.
WRITTEN_BLOCK = _PATTERN * (BLOCK_BYTES // len(_PATTERN))


@dataclass(frozen=True)
class Workload:
    """``jobs`` processes read or write, each with ``depth`` requests in flight. With
    ``sync``, each write waits until it is on the medium (O_SYNC).
    """

    name: str
    pattern: str
    block_bytes: int
    engine: str
    depth: int = 1
    jobs: int = 1
    sync: bool = False

    @property
    def is_mapped(self) -> bool:
        """Whether it uses the page cache even if other workloads bypass it."""
        return self.engine == "mmap"

    @property
    def writes(self) -> bool:
        return self.pattern.endswith("write")

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
        """Return the argv of fio, which reads or writes the first ``size_bytes`` for a
        time. What it does during ``ramp_s`` is left out of the results, which go to
        ``output``.
        """
        if self.writes:
            how = [f"--buffer_pattern=0x{_PATTERN.hex()}", "--fallocate=none"]
            how += [f"--sync={int(self.sync)}", "--overwrite=0"]
        else:
            how = ["--readonly"]
        return [
            *("fio", "--name=job", f"--filename={path}", *how),
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


_PATTERNS = {
    "randread": "randread",
    "seqread": "read",
    "randwrite": "randwrite",
    "seqwrite": "write",
}
_BLOCKS = {"4k": 4 * KIB, "1m": MIB}
_ENGINES = {
    "psync": "psync",
    "uring": "io_uring",
    "libaio": "libaio",
    "mmap": "mmap",
    "osync": "psync",
}
#: Engines with several requests in flight, and their default depths.
_DEPTHS = {"uring": 16, "libaio": 16}
_NAME = re.compile(
    rf"({'|'.join(_PATTERNS)})(?:-({'|'.join(_BLOCKS)}))?(?:-({'|'.join(_ENGINES)}))?"
    r"(?:-d([0-9]{1,3}))?(?:-j([0-9]{1,3}))?"
)
NAMES = (
    f"{'|'.join(_PATTERNS)}[-{'|'.join(_BLOCKS)}]-{'|'.join(_ENGINES)}[-dN] "
    "(uring, libaio)"
)
HINT = f"known: {NAMES}; each with -jN for N jobs"


def parse_workload(name: str) -> Workload:
    """Parse a name. Raises UsageError for an invalid one."""
    match = _NAME.fullmatch(name)
    # Block size or engine must be given, so that no default is taken for the only way.
    if match is None or not (match[2] or match[3]):
        raise UsageError(f"there is no workload {name!r}", hint=HINT)
    pattern, block, engine = match[1], match[2] or "4k", match[3] or "psync"
    depth, jobs = int(match[4] or _DEPTHS.get(engine, 1)), int(match[5] or 1)
    if not (1 <= depth <= _MOST and 1 <= jobs <= _MOST):
        raise UsageError(f"workload {name!r}: depth and jobs are 1 to {_MOST}")
    if match[4] and engine not in _DEPTHS:
        raise UsageError(f"workload {name!r}: {engine} has no depth", hint=HINT)
    if engine == "osync" and not pattern.endswith("write"):
        raise UsageError(f"workload {name!r}: osync is for writing", hint=HINT)
    return Workload(
        name,
        _PATTERNS[pattern],
        _BLOCKS[block],
        _ENGINES[engine],
        depth,
        jobs,
        sync=engine == "osync",
    )
