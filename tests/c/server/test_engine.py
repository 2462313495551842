"""The engine, through engine-shell in a sanitizer build: descriptions and splitting."""

import errno
import os
import random
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.paths import TESTS
from support.sanitized_build import run_sanitized
from support.shells import BLOCK, EngineShell, describe, refusal

pytestmark = pytest.mark.data


def pattern_bytes(offset: int, length: int, base: int = 0) -> bytes:
    return b"".join(
        ((offset + at + base) % 2**64).to_bytes(8, "little")
        for at in range(0, length, 8)
    )


@dataclass
class Model:
    """What the address space must hold: bytes, and which blocks fail or take writes."""

    content: bytearray
    failing: set[int]
    writable: set[int]

    def blocks(self, offset: int, length: int) -> range:
        return range(offset // BLOCK, (offset + length) // BLOCK)


kinds = st.sampled_from(["file", "writable", "memset", "zero", "pattern", "error"])
layouts = st.lists(st.tuples(kinds, st.integers(1, 6)), min_size=1, max_size=8)
requests = st.lists(
    st.tuples(
        st.sampled_from(["read", "read", "write", "discard", "zero", "flush"]),
        st.integers(0, 48),
        st.integers(1, 24),
        st.integers(0, 255),
    ),
    min_size=1,
    max_size=12,
)


def build_model(
    layout: list[tuple[str, int]], directory: Path, seed: int
) -> tuple[dict[str, Any], Model]:
    content = bytearray()
    model = Model(content, set(), set())
    segments = []
    source = random.Random(seed)
    for index, (kind, blocks) in enumerate(layout):
        offset, length = len(content), blocks * BLOCK
        own = set(model.blocks(offset, length))
        segment: dict[str, Any] = {"kind": kind, "length": length}
        if kind in ("file", "writable"):
            path = directory / f"segment-{index}"
            before = source.randrange(3) * BLOCK
            path.write_bytes(source.randbytes(before + length))
            segment |= {"kind": "file", "path": str(path), "file_offset": before}
            content += path.read_bytes()[before:]
            if kind == "writable":
                segment["writable"] = True
                model.writable |= own
        elif kind == "memset":
            segment["byte"] = index + 1
            content += bytes([index + 1]) * length
        elif kind == "pattern":
            segment["base"] = -index
            content += pattern_bytes(offset, length, -index)
        else:
            content += bytes(length)
            if kind == "error":
                model.failing |= own
        segments.append(segment)
    return describe(*segments, read_only=False), model


def check_request(
    shell: EngineShell, model: Model, op: str, offset: int, length: int, byte: int
) -> None:
    touched = set(model.blocks(offset, length))
    inside = offset + length <= len(model.content)
    if op == "flush":
        assert shell.request("flush") == b""
        return
    line = f"{op} {offset} {length}" + (f" {byte}" if op == "write" else "")
    answer = shell.request(line)
    if op == "read":
        if not inside or touched & model.failing:
            assert answer == errno.EIO
        else:
            assert answer == model.content[offset : offset + length]
        return
    if inside and touched <= model.writable:
        assert answer == b""
        fill = byte if op == "write" else 0
        model.content[offset : offset + length] = bytes([fill]) * length
        return
    assert isinstance(answer, int)
    # A request that fails half way may have changed the blocks before the failure.
    for block in sorted(touched):
        if not inside or block not in model.writable:
            break
        fill = byte if op == "write" else 0
        model.content[block * BLOCK : (block + 1) * BLOCK] = bytes([fill]) * BLOCK


@settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(layout=layouts, requests=requests, seed=st.integers(0, 2**32))
def test_requests_match_the_model(
    sanitized_build: Path,
    layout: list[tuple[str, int]],
    requests: list[tuple[str, int, int, int]],
    seed: int,
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        description, model = build_model(layout, Path(directory), seed)
        with EngineShell(sanitized_build, description) as shell:
            for op, block, blocks, byte in requests:
                check_request(shell, model, op, block * BLOCK, blocks * BLOCK, byte)


def test_a_buffer_that_need_not_be_filled_again_holds_what_it_should(
    sanitized_build: Path, tmp_path: Path
) -> None:
    """Reads of one byte repeated, among all that writes to the same buffer."""
    kinds = ["memset", "file", "zero", "memset", "writable", "pattern", "zero", "zero"]
    dice = random.Random(5)
    description, model = build_model([(kind, 3) for kind in kinds], tmp_path, 5)
    # A byte that two segments have in common.
    description["segments"][3]["byte"] = description["segments"][0]["byte"]
    model.content[9 * BLOCK : 12 * BLOCK] = model.content[: 3 * BLOCK]
    with EngineShell(sanitized_build, description) as shell:
        for _ in range(2000):
            offset = dice.randrange(0, 24)
            length = dice.randrange(1, min(8, 25 - offset))
            op = dice.choice(["read", "read", "read", "write"])
            check_request(
                shell, model, op, offset * BLOCK, length * BLOCK, dice.randrange(256)
            )


PUNCH_HOLE_KEEP_SIZE = "fallocate-3"
ZERO_RANGE_KEEP_SIZE = "fallocate-17"


@pytest.mark.parametrize("in_memory", [False, True])
def test_what_has_to_be_durable_is(
    sanitized_build: Path, tmp_path: Path, in_memory: bool
) -> None:
    """FUA, flush, discard and zeroes, as they reach the files of segments."""
    disk = tmp_path if _is_on_disk(tmp_path) else TESTS
    with tempfile.TemporaryDirectory(dir="/dev/shm" if in_memory else disk) as where:
        kinds = ["file", "zero", "writable", "writable"]
        description, model = build_model([(kind, 4) for kind in kinds], Path(where), 1)
        first, second = 8 * BLOCK, 12 * BLOCK
        with EngineShell(sanitized_build, description) as shell:

            def asked(request: str) -> list[str]:
                assert shell.request(request) == b"", request
                return shell.asked()

            assert asked(f"write {first} {BLOCK} 1") == ["write"]
            assert asked(f"fua {first} {BLOCK} 2") == ["write-dsync"]
            # Each file that it reaches.
            over_both = f"fua {second - BLOCK} {2 * BLOCK} 3"
            assert asked(over_both) == ["write-dsync"] * 2
            assert shell.request(f"read {first} {BLOCK}") == bytes([2]) * BLOCK
            shell.asked()
            # Nothing that cannot be written has anything to flush.
            assert asked("flush") == ["fdatasync"] * 2
            assert asked(f"discard {first} {BLOCK}") == [PUNCH_HOLE_KEEP_SIZE]
            assert asked(f"zero {first} {BLOCK}") == [PUNCH_HOLE_KEEP_SIZE]
            keeping = shell.request(f"zero-keep {first} {BLOCK}")
            # tmpfs has no such thing.
            assert keeping == (errno.EOPNOTSUPP if in_memory else b"")
            assert shell.asked() == [ZERO_RANGE_KEEP_SIZE]
            for request in ("discard", "zero", "zero-keep"):
                assert shell.request(f"{request} 0 {BLOCK}") == errno.EROFS
                refused = shell.request(f"{request} {4 * BLOCK} {BLOCK}")
                assert refused == errno.EOPNOTSUPP
            for request in ("write", "fua"):
                assert shell.request(f"{request} 0 {BLOCK} 1") == errno.EROFS
            assert shell.asked() == []


def _is_on_disk(path: Path) -> bool:
    """Whether the engine reads files there by io_uring."""
    name = subprocess.run(
        ["stat", "--file-system", "--format=%T", path], capture_output=True, text=True
    ).stdout
    return name.strip() not in ("tmpfs", "ramfs")


def test_a_file_that_shrinks_gives_eio_never_zeroes(
    sanitized_build: Path, tmp_path: Path
) -> None:
    path = tmp_path / "shrinking"
    path.write_bytes(b"x" * 4 * BLOCK)
    description = describe({"kind": "file", "length": 4 * BLOCK, "path": str(path)})
    with EngineShell(sanitized_build, description) as shell:
        assert shell.request(f"read 0 {4 * BLOCK}") == b"x" * 4 * BLOCK
        os.truncate(path, BLOCK + 100)
        assert shell.request(f"read 0 {BLOCK}") == b"x" * BLOCK
        assert shell.request(f"read 0 {2 * BLOCK}") == errno.EIO
        assert shell.request(f"read {2 * BLOCK} {BLOCK}") == errno.EIO


ZERO = {"kind": "zero", "length": BLOCK}
BAD_DESCRIPTIONS: dict[str, tuple[Any, str]] = {
    "not an object": ([], "must be a JSON object"),
    "no version": ({"size": BLOCK, "segments": []}, '"version" is missing'),
    "version of the future": (describe(ZERO, version=2), "version 2"),
    "negative size": (describe(ZERO, size=-BLOCK), "must not be negative"),
    "size over 63 bits": (describe(ZERO, size=2**63), "not valid JSON"),
    "unknown key": (describe(ZERO, colour="red"), 'unknown key "colour"'),
    "unknown kind": (describe({"kind": "nfs", "length": BLOCK}), "known kinds: "),
    "overlap": (describe(ZERO, ZERO | {"offset": 0}), "must not overlap"),
    "gap": (describe(ZERO, ZERO | {"offset": 2 * BLOCK}), "nothing covers the range"),
    "short of the end": (describe(ZERO, size=2 * BLOCK), "to the device's end at 8192"),
    "over the end": (describe(ZERO, ZERO, size=BLOCK), "the device at 4096"),
    "byte out of range": (
        describe({"kind": "memset", "length": BLOCK, "byte": 256}),
        "it must be 0 to 255",
    ),
}


@pytest.mark.parametrize("case", BAD_DESCRIPTIONS)
def test_a_bad_description_is_refused(sanitized_build: Path, case: str) -> None:
    description, message = BAD_DESCRIPTIONS[case]
    assert message in refusal(EngineShell, sanitized_build, description, statuses=[2])


@pytest.mark.parametrize(
    "text", ["", "{", '{"version": 1, "version": 1}', "\x00", "[" * 5000]
)
def test_what_is_not_json_is_refused(
    sanitized_build: Path, tmp_path: Path, text: str
) -> None:
    path = tmp_path / "description.json"
    path.write_text(text)
    program = sanitized_build / "csrc/tests/engine-shell"
    assert b"not valid JSON" in run_sanitized(program, path, statuses=[2]).stderr


def test_files_that_cannot_be_served_are_refused(
    sanitized_build: Path, tmp_path: Path
) -> None:
    small = tmp_path / "small"
    small.write_bytes(bytes(BLOCK - 1))
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path, message in (
        (tmp_path / "missing", "No such file"),
        (small, "has 4095 bytes, the segment needs 4096"),
        (fifo, "neither a regular file nor a block device"),
        (tmp_path, "neither a regular file nor a block device"),
    ):
        segment: dict[str, Any] = {"kind": "file", "length": BLOCK, "path": str(path)}
        statuses = [2 if path == small else 1]
        assert message in refusal(
            EngineShell, sanitized_build, describe(segment), statuses=statuses
        )
    segment["writable"], segment["path"] = True, str(small)  # type: ignore[assignment]
    said = refusal(EngineShell, sanitized_build, describe(segment))
    assert "the device is read-only" in said
