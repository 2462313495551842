"""A site for faults.py: two nodes with data behind names and TLS, and the host that
reads them, in network namespaces of their own.

Node "one" is a web server, and the front of a registry that wants tokens and of an S3
store; "two" is another web server. All of them have the same object.
"""

from __future__ import annotations

import base64
import ctypes
import datetime
import json
import shutil
import socket
import socketserver
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import trustme
from support.processes import ending_with_us
from support.registry import PASSWORD, USER, registry_server
from support.s3_server import ACCESS_KEY, BUCKET, SECRET_KEY, s3_server
from support.sites import Machine, Network
from support.waiting import wait_until

from btrfs_ublk.base.process import run

REPOSITORY = "campaign/data"
_CLONE_NEWNS = 0x00020000
_TIMEOUT_S = 60
#: One process, so that a kill leaves none. It comes back on the same ports.
_NGINX = """
daemon off; master_process off; user root; worker_rlimit_nofile 4096;
pid {root}/nginx.pid; error_log {root}/error.log warn;
events {{ worker_connections 1024; }}
http {{
    access_log off; keepalive_requests 1000000;
    client_body_temp_path {root}/tmp; proxy_temp_path {root}/tmp;
    fastcgi_temp_path {root}/tmp; uwsgi_temp_path {root}/tmp;
    scgi_temp_path {root}/tmp;
    proxy_http_version 1.1; proxy_max_temp_file_size 0;
    proxy_set_header Host $http_host;
    server {{
        listen 80; listen 443 ssl http2;
        ssl_certificate {root}/server.pem; ssl_certificate_key {root}/server.pem;
        root {files};
{locations}
    }}
}}
"""
_libc = ctypes.CDLL(None, use_errno=True)


class Names(socketserver.ThreadingUDPServer):
    """A name server on port 53 of loopback; ``addresses``, and the ``mode`` for
    ``name``, may be changed at any time."""

    daemon_threads = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.addresses: dict[str, str] = {}
        self.mode: Literal["answers", "fails", "silent"] = "answers"
        super().__init__(("127.0.0.1", 53), _Query)
        threading.Thread(
            target=self.serve_forever, args=(0.05,), name="names", daemon=True
        ).start()


class _Query(socketserver.BaseRequestHandler):
    server: Names

    def handle(self) -> None:
        query, answers = self.request
        labels, at = [], 12  # RFC 1035, 4.1
        while query[at]:
            labels.append(query[at + 1 : at + 1 + query[at]].decode())
            at += 1 + query[at]
        question = query[12 : at + 5]
        name = ".".join(labels).lower()
        mode = self.server.mode if name == self.server.name else "answers"
        if mode == "silent":
            return
        address = self.server.addresses.get(name)
        record, code = b"", 0 if address else 3
        if mode == "fails":
            code = 2
        elif address and question[-4:] == b"\0\1\0\1":  # its address, of one second
            record = b"\xc0\x0c\0\1\0\1\0\0\0\1\0\4" + socket.inet_aton(address)
        head = query[:2] + bytes((0x81, 0x80 | code, 0, 1, 0, bool(record), 0, 0, 0, 0))
        answers.sendto(head + question + record, self.client_address)


class Node:
    """A machine that serves the object until the block ends."""

    def __init__(self, machine: Machine, label: str, root: Path, files: Path) -> None:
        self.machine, self.name = machine, f"{label}.test"
        self.address = machine.address
        self.digest = ""
        self.has_registry = False
        self.s3_port = 0
        self._root, self._files = root, files
        self._running = ExitStack()
        for directory in (root, root / "tmp", root / "registry"):
            directory.mkdir()
        self.replace_authority()
        self.trust()

    def __enter__(self) -> Node:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def replace_authority(self) -> None:
        """Have certificates of another authority, which nobody trusts yet."""
        self._authority = trustme.CA()
        self.certify()

    def certify(self, *, until_s: float = 86400) -> None:
        """Have a certificate that was valid yesterday, and is for so many seconds."""
        now = datetime.datetime.now(datetime.UTC)
        issued = self._authority.issue_cert(
            self.name,
            not_before=now - datetime.timedelta(days=1),
            not_after=now + datetime.timedelta(seconds=until_s),
        )
        issued.private_key_and_cert_chain_pem.write_to_path(self._root / "server.pem")

    @property
    def ca_file(self) -> Path:
        return self._root / "ca.pem"

    def trust(self) -> None:
        """Put the authority into the file that hosts trust."""
        new = self._root / "ca.new"
        self._authority.cert_pem.write_to_path(new)
        new.replace(self.ca_file)

    def start(self) -> None:
        with self.machine.inside(), ExitStack() as stack:
            locations = {}
            if self.has_registry:
                registry = stack.enter_context(
                    registry_server(
                        self._root / "registry", realm=f"https://{self.name}/token"
                    )
                )
                locations = {"v2/": registry.port, "token": registry.tokens.port}
                if not self.digest:
                    data = (self._files / "object").read_bytes()
                    self.digest = registry.push(REPOSITORY, data)
            if self.s3_port:
                locations[f"{BUCKET}/"] = self.s3_port
            self._start_web_server(stack, locations)
            self._running = stack.pop_all()

    def _start_web_server(self, stack: ExitStack, locations: dict[str, int]) -> None:
        lines = (
            f"location /{path} {{ proxy_pass http://127.0.0.1:{port}; }}"
            for path, port in locations.items()
        )
        configuration, errors = self._root / "nginx.conf", self._root / "error.log"
        configuration.write_text(
            _NGINX.format(
                root=self._root, files=self._files, locations="\n".join(lines)
            )
        )
        argv = ["nginx", "-e", errors, "-c", configuration]
        process = stack.enter_context(
            subprocess.Popen(
                ending_with_us(argv, signal="KILL"),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )
        stack.callback(process.kill)

        def listens() -> bool:
            assert process.poll() is None, errors.read_text()
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", 443)) == 0

        wait_until(listens, timeout_s=_TIMEOUT_S)

    def stop(self) -> None:
        """Kill all but the S3 store."""
        self._running.close()

    def move(self) -> None:
        """Take another address, and give up the one of before."""
        before = self.address
        network, _, last = before.rpartition(".")
        self.address = f"{network}.{250 - int(last)}"
        self.machine.readdress(before, self.address)


class Site:
    """The nodes, and their names."""

    def __init__(self, root: Path, one: Node, two: Node, names: Names) -> None:
        self.one, self.two, self.names = one, two, names
        self._root = root

    def publish(self) -> None:
        """Have the names lead to where the nodes are."""
        self.names.addresses = {x.name: x.address for x in (self.one, self.two)}

    def mirror(self, kind: str, *, plain_url: str) -> dict[str, Any]:
        """What node one has; with "plain", at that URL."""
        known = {"ca_file": str(self.one.ca_file), "proxy": "none"}
        name = self.one.name
        if kind == "oci":
            blob = {"registry": name, "repository": REPOSITORY}
            login = str(self._root / "config.json")
            known |= {**blob, "digest": self.one.digest, "docker_config": login}
        elif kind == "s3":
            stored = {"endpoint": f"https://{name}", "bucket": BUCKET, "key": "object"}
            known |= {**stored, "credentials_file": str(self._root / "credentials")}
        elif kind == "http":
            known |= {"url": f"https://{name}/object"}
        else:
            return {"kind": "http", "url": plain_url, "proxy": "none"}
        return {"kind": kind, **known}

    def second_mirror(self) -> dict[str, Any]:
        url = f"https://{self.two.name}/object"
        trusted = str(self.two.ca_file)
        return {"kind": "http", "url": url, "ca_file": trusted, "proxy": "none"}


def _write_secret(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text)


def _write_logins(root: Path, name: str) -> None:
    login = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    _write_secret(root / "config.json", json.dumps({"auths": {name: {"auth": login}}}))
    keys = f"aws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
    _write_secret(root / "credentials", f"[default]\n{keys}")


def _change_etc(root: Path) -> None:
    """Have an /etc of our own, for this process and all that it starts, where names are
    asked of loopback."""
    if _libc.unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    run(["mount", "--make-rprivate", "/"], timeout_s=_TIMEOUT_S)
    etc = root / "host-etc"
    shutil.copytree("/etc", etc, symlinks=True)
    for name, text in {
        "resolv.conf": "nameserver 127.0.0.1\n",
        "nsswitch.conf": "hosts: files dns\n",
    }.items():
        (etc / name).unlink(missing_ok=True)
        (etc / name).write_text(text)
    run(["mount", "--bind", etc, "/etc"], timeout_s=_TIMEOUT_S)


@contextmanager
def site(root: Path, kinds: set[str]) -> Iterator[Site]:
    """Serve the file root/files/object in these ways. This thread is on the host."""
    _change_etc(root)
    with ExitStack() as stack:
        network = stack.enter_context(Network())
        host = network.add()
        one, two = (
            Node(network.add(), label, root / label, root / "files")
            for label in ("one", "two")
        )
        one.has_registry = "oci" in kinds
        if "s3" in kinds:
            (root / "s3").mkdir()
            with one.machine.inside():
                store = stack.enter_context(s3_server(root / "s3"))
                store.put(BUCKET, "object", (root / "files/object").read_bytes())
            one.s3_port = store.port
        _write_logins(root, one.name)
        stack.enter_context(one)
        stack.enter_context(two)
        stack.enter_context(host.inside())
        names = stack.enter_context(Names(one.name))
        stack.callback(names.shutdown)
        made = Site(root, one, two, names)
        made.publish()
        yield made
