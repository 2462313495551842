"""Traces of first reads: what they name, and that they are whole after a signal."""

import io
import signal
from pathlib import Path
from typing import Any

import pytest
from support.web_servers import ORIGIN_UNIT

from btrfs_ublk.content import Trace, TraceSource, TraceWriter
from btrfs_ublk.errors import UsageError

BLOCK = 4096  # of traces
URL = "https://one@example.org:8443/image?token=s3cret#x"


def description(**keys: Any) -> dict[str, Any]:
    mirror = {"kind": "http", "url": URL, "bearer_token_file": "/secret"}
    return {"size": 5 * ORIGIN_UNIT, "unit": ORIGIN_UNIT, "mirrors": [mirror]} | keys


def write(path: Path, source: TraceSource) -> None:
    with path.open("w") as file:
        writer = TraceWriter(file)
        writer.add([(7, 3, 0), (7, 4, 1), (7, 1, 5), (7, 2, 9)], lambda _: source)
        writer.end(lost=2, seconds=1.5)


def test_traces_name_what_was_read(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    source = TraceSource.describe(description(root="ab"))
    assert source.mirrors == (
        {"kind": "http", "url": "https://example.org:8443/image"},
    )
    write(path, source)
    trace = Trace.load(path)
    assert (trace.units, trace.lost, trace.sources) == (4, 2, {7: source})
    renewed = URL.replace("s3cret", "another")
    mirrors = [{"kind": "file", "path": "/x"}, {"kind": "http", "url": renewed}]
    by_mirror = TraceSource.describe(description(mirrors=mirrors))
    by_root = TraceSource.describe(description(root="ab", mirrors=[]))
    changed = TraceSource.describe(description(root="cd"))
    wanted = [(2, 3 * ORIGIN_UNIT, 2 * ORIGIN_UNIT), (2, ORIGIN_UNIT, 2 * ORIGIN_UNIT)]
    assert trace.extents([(1, changed), (2, by_mirror)]) == (wanted, {})
    assert trace.extents([(1, by_mirror), (2, by_root)]) == (wanted, {})
    assert trace.extents([(1, changed)]) == ([], {7: 4})


def test_units_come_once_where_a_trace_has_blocks(tmp_path: Path) -> None:
    """In the order of their first reads, and none behind the end of the source."""
    path = tmp_path / "trace"
    source = TraceSource.describe(description(root="ab", unit=BLOCK))
    blocks = ORIGIN_UNIT // BLOCK
    reads = [(7, 3 * blocks + 1, 0), (7, blocks, 1), (7, 3 * blocks, 2)]
    reads += [(7, 2 * blocks + at, 3) for at in (1, 2, 5)] + [(7, 99 * blocks, 4)]
    with path.open("w") as file:
        writer = TraceWriter(file)
        writer.add(reads, lambda _: source)
        writer.end(lost=0, seconds=1.5)
    mapped = TraceSource.describe(description(root="ab"))
    wanted = [(2, 3 * ORIGIN_UNIT, ORIGIN_UNIT), (2, ORIGIN_UNIT, 2 * ORIGIN_UNIT)]
    assert Trace.load(path).extents([(2, mapped)]) == (wanted, {})


class Interrupted(io.StringIO):
    """Ctrl-C comes when line ``at`` was written."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._left = at

    def write(self, text: str) -> int:
        written = super().write(text)
        self._left -= 1
        if self._left == -1:
            signal.raise_signal(signal.SIGINT)
        return written


def test_traces_are_whole_after_a_signal(tmp_path: Path) -> None:
    """At each question for a source, and at each line that is written."""
    for at in range(7):
        check_interrupted_trace(tmp_path, at)


def check_interrupted_trace(tmp_path: Path, at: int) -> None:
    reads = [(7, 3, 0), (8, 4, 1), (7, 1, 5)]
    source = TraceSource.describe(description())
    asked = 0

    def describe_once(_: int) -> TraceSource:
        nonlocal asked
        asked += 1
        if asked == at - 4:
            raise KeyboardInterrupt
        return source

    file = Interrupted(at + 1 if at < 5 else -1)  # after the head
    writer = TraceWriter(file)
    with pytest.raises(KeyboardInterrupt):
        writer.add(reads, describe_once)
    writer.add(reads[writer.units :], describe_once)
    writer.end(lost=0, seconds=1.5)
    (tmp_path / "trace").write_text(file.getvalue())
    trace = Trace.load(tmp_path / "trace")
    assert [(run.source, run.unit, run.at_ms) for run in trace.reads] == reads
    assert set(trace.sources) == {7, 8} and trace.lost == 0


def test_refuses_what_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    write(path, TraceSource.describe(description()))
    text = path.read_text()
    path.write_text(text[: text.rindex("[") + 4])
    trace = Trace.load(path)  # cut off
    assert (trace.units, trace.lost) == (2, None)
    for wrong, why in (
        ("", "not a trace"),
        ("{}\n", "not a trace"),
        (text.replace('"version":2', '"version":3'), "of version 3"),
        (text.replace("[7,", "[8,"), "line 3"),
        (text.replace("[7,", "[7,-"), "line 3"),
    ):
        path.write_text(wrong)
        with pytest.raises(UsageError, match=why):
            Trace.load(path)
