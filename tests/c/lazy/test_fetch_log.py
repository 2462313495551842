"""What a server's log says of fetching: lines that programs can read."""

import re
import shlex
import time
from pathlib import Path

from support.shells import FetchShell
from support.web_servers import response, scripted_server

UNIT = 65536
UNITS = 64


def events(log: Path) -> list[dict[str, str]]:
    """All lines; each must be an event."""
    found = []
    for line in log.read_text().splitlines():
        head, _, words = line.partition(": warning: ")
        assert head == "fetch-shell", line
        pairs = [word.partition("=") for word in shlex.split(words)]
        assert all(equals for _, equals, _ in pairs), line
        found.append({key: value for key, _, value in pairs})
    # What the machine lacks is no matter of these tests.
    return [event for event in found if event["event"] != "fetch_process_unconfined"]


def test_events(sanitized_build: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"

    def answer(request: str) -> bytes:
        if "/gone" in request:
            return response('404 Not "Found"')
        time.sleep(1.5)
        return b""

    with scripted_server(answer) as server:
        with FetchShell(sanitized_build, log=log) as shell:
            size = UNIT * UNITS
            keys = {"kind": "http", "size": size, "unit": UNIT}
            gone = shell.add(keys | {"url": server.url("gone?token=s3cret")})
            slow = shell.add(keys | {"url": server.url("slow")})
            assert shell.read(gone, 5 * UNIT, 4096).result == -5
            assert shell.read(slow, 8192, 4096, deadline_s=0.5).result == -5
        host = f"127.0.0.1:{server.port}"
    assert "s3cret" not in log.read_text()
    found = events(log)
    for event in found:
        assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", event["time"])
    first, second, *later = found
    wanted = {"event": "fetch_failed", "source": "0", "unit": "5", "mirror": "0"}
    assert wanted.items() <= first.items()
    assert (first["kind"], first["reason"]) == ("http", "gone")
    assert first["host"].endswith(host) and "404" in first["message"]
    assert {"event": "given_up", "source": "0", "unit": "5"}.items() <= second.items()
    # The attempt has the read's deadline: its failure may be told of before that.
    late = next(event for event in later if event["event"] == "deadline_missed")
    assert late["source"] == "1"
    assert late["message"] == "4096 bytes at 8192 did not come in time"
