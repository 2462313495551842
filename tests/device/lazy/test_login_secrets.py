"""What logins consist of is told to their servers, and to nobody else.

Each secret that a user can give is a canary, and so is each token that a server issues.
Servers accept, refuse, repeat what they were sent, or answer nothing; then all that
commands print, logs, processes, events, metrics and files are searched.
"""

import base64
import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from support.devices import kill_server
from support.needs import Need
from support.volumes import NAME, Place
from support.web_servers import (
    NGINX,
    ScriptedServer,
    response,
    scripted_server,
    web_server,
)

from btrfs_ublk.device import show_device

#: Begins each secret here, so that whatever has one is found.
CANARY = "canary-71c4"
SIZE = 8192
DIGEST = "sha256:" + "ab" * 32


def canary(name: str) -> str:
    return f"{CANARY}-{name}"


def forms(text: bytes) -> list[bytes]:
    """What has a canary in it, as it is or in the base64 of some text."""
    words = re.findall(rb"[A-Za-z0-9+/]{16,}", text)
    # Where it begins in a longer word, one of these four is in step with it.
    steps = [word[at:] for word in words for at in range(4)]
    decoded = [base64.b64decode(step[: len(step) // 4 * 4]) for step in steps]
    return [found for found in (text, *decoded) if CANARY.encode() in found]


def write(path: Path, text: str, mode: int = 0o600) -> str:
    path.touch(mode=mode)
    path.write_text(text)
    return str(path)


def sources(root: Path, server: ScriptedServer) -> dict[str, dict[str, object]]:
    """A source for each kind of secret that a user can give."""
    host = f"127.0.0.1:{server.port}"
    basic = base64.b64encode(f"u:{canary('registry')}".encode()).decode()
    oci: dict[str, object] = {
        "kind": "oci",
        "registry": host,
        "repository": "x/y",
        "digest": DIGEST,
    }
    oci |= {"insecure": True}
    http: dict[str, object] = {"kind": "http", "url": server.url("http")}
    logins = {"auths": {host: {"auth": basic}}}
    identity = {"auths": {host: {"identitytoken": canary("identity")}}}
    ini = (
        f"[default]\naws_access_key_id = {canary('access')}\n"
        f"aws_secret_access_key = {canary('key')}\n"
        f"aws_session_token = {canary('session')}\n"
    )
    pem = f"-----BEGIN PRIVATE KEY-----\n{canary('pem')}\n-----END PRIVATE KEY-----\n"
    return {
        "bearer": http | {"bearer_token_file": write(root / "t", canary("bearer"))},
        "basic": http | {"basic_auth_file": write(root / "b", f"u:{canary('basic')}")},
        "headers": http | {"headers_file": write(root / "h", f"X-Key: {canary('h')}")},
        "signed": {
            "kind": "http",
            "url_file": write(root / "u", server.url(f"x?Signature={canary('query')}")),
        },
        "s3": {
            "kind": "s3",
            "bucket": "bucket",
            "key": "k",
            "endpoint": f"http://{host}",
            "credentials_file": write(root / "aws", ini),
        },
        "registry": oci | {"docker_config": write(root / "d.json", json.dumps(logins))},
        "identity": oci
        | {"docker_config": write(root / "i.json", json.dumps(identity))},
        "helper": oci
        | {
            "docker_config": write(
                root / "h.json", json.dumps({"credHelpers": {host: "canary"}})
            )
        },
        "client-key": {
            "kind": "http",
            "url": f"https://{host}/x",
            "client_cert": write(root / "cert", pem),
            "client_key": write(root / "key", pem),
        },
    }


def token(request: str, server: ScriptedServer) -> bytes | None:
    """What a registry and its token server say before they accept."""
    if request.split()[1].startswith("/token"):
        return response("200 OK", json.dumps({"token": canary("token")}).encode())
    if request.split()[1].startswith("/v2/") and "Authorization" not in request:
        realm = f'Bearer realm="{server.url("token")}",service="s"'
        return response(f"401 Unauthorized\nWWW-Authenticate: {realm}")
    return None


def accepting(request: str, server: ScriptedServer) -> bytes:
    found = re.search(r"(?i)range: bytes=(\d+)-(\d+)", request)
    first, last = (int(found[1]), int(found[2])) if found else (0, SIZE - 1)
    head = f"206 Partial Content\nContent-Range: bytes {first}-{last}/{SIZE}"
    return token(request, server) or response(head, bytes(last - first + 1))


def refusing(request: str, server: ScriptedServer) -> bytes:
    return response("403 Forbidden", request.encode())


def repeating(request: str, server: ScriptedServer) -> bytes:
    """What it was sent is in the place of a range, and in headers."""
    line = request.replace("\r\n", " ")[:900]
    return response(f"206 {line}\nContent-Range: {line}\nETag: {line}", bytes(10))


def wanting_a_token(request: str, server: ScriptedServer) -> bytes:
    """Its token is refused, too."""
    refused = response("401 Unauthorized", request.encode())
    return token(request, server) or refused


def silent(request: str, server: ScriptedServer) -> bytes:
    return b""


def processes() -> bytes:
    """Command lines and environments of all processes of ours."""
    found = b""
    for process in psutil.process_iter():
        try:
            if process.name().startswith("btrfs-ublk"):
                for name in ("cmdline", "environ"):
                    found += Path(f"/proc/{process.pid}/{name}").read_bytes()
        except (psutil.Error, OSError):
            continue
    return found


def all_that_is_told(place: Place) -> list[str]:
    asked = ["volume status", "device status", "map list", "map show", "map stats"]
    words = [[*x.split(), NAME, *["0"] * x.endswith("show")] for x in asked]
    plain = [place.told(*each) for each in (*words, ["metrics"])]
    return plain + [place.told(*each, "--json") for each in words]


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    "answer",
    [
        # One that does all; the others only answer otherwise.
        accepting,
        *(
            pytest.param(x, marks=pytest.mark.thorough)
            for x in (refusing, repeating, wanting_a_token, silent)
        ),
    ],
    ids=lambda answer: str(answer.__name__),
)
def test_nothing_tells_a_login(
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    answer: Callable[[str, ScriptedServer], bytes],
) -> None:
    secret = place.root / "secret"
    secret.mkdir(mode=0o700)
    told_by_helper = json.dumps({"Username": "u", "Secret": canary("helper")})
    write(
        secret / "docker-credential-canary",
        f"#!/bin/sh\necho '{told_by_helper}'",
        0o700,
    )
    monkeypatch.setenv("PATH", f"{secret}:{os.environ['PATH']}")
    server: ScriptedServer
    with scripted_server(lambda request: answer(request, server)) as server:
        made = sources(secret, server)
        files = "".join(
            f"[[file]]\npath = {json.dumps(name)}\nsize = {SIZE}\nsource = {{ "
            + ", ".join(f"{key} = {json.dumps(x)}" for key, x in source.items())
            + " }\n"
            for name, source in made.items()
        )
        definition = place.root / "definition.toml"
        definition.write_text(
            f'size = "1G"\nwritable = "256M"\nmount = "{place.target}"\n'
            f'front_end = "fuse"\ndeadline = 2\n{files}'
        )
        heard = [place.told("volume", "up", NAME, "--file", definition)]
        assert place.state() == "up", heard
        for name in made:
            words = ("map", "verify", NAME, "--ask")
            try:
                assert (place.target / name).read_bytes() == bytes(SIZE)
                assert answer is accepting
            except OSError:
                assert answer is not accepting or name == "client-key"
        heard.append(place.told(*words))
        for name, source in made.items():
            keys = json.dumps(source | {"size": SIZE})
            heard.append(
                place.told("volume", "up", NAME, f"--add-file=b/{name}={keys}")
            )
            heard.append(place.told("map", "add", NAME, "--source", keys))
        seen = processes()
        heard += all_that_is_told(place)
        # The servers were told, or else nothing could have been repeated.
        asked = "".join(server.requests).encode()
        assert {x for x in ("bearer", "query") if canary(x).encode() in asked} == {
            "bearer",
            "query",
        }
        assert forms(asked)
    kill_server(NAME)
    heard.append(place.told("device", "status", NAME))
    device = show_device(NAME)
    texts = {"commands": "".join(heard).encode(), "processes": seen + processes()}
    texts["log"] = device.log.read_bytes()
    for path in (*place.base.rglob("*"), *device.log.parent.rglob("*")):
        if path.is_file() and path.stat().st_size < 1 << 20:
            texts[str(path)] = path.read_bytes()
    for name, text in texts.items():
        assert not forms(text), f"{name} tells {forms(text)[0][:300]!r}"
    for path in secret.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


SECRET = "sentinel-5f1d02"
QUERY = f"?Expires=2&Signature={SECRET}"


@pytest.mark.usefixtures("in_process")
def test_nothing_tells_the_query_of_a_signed_url(place: Place, need: Need) -> None:
    """But definitions, which only root may read."""
    need(NGINX)
    definition = place.root / "definition.toml"
    with web_server(place.root / "web") as server:
        (server.files / "one").write_bytes(bytes(5000))
        url = server.url("files/one") + QUERY
        other = server.url("files/two") + QUERY
        definition.write_text(f"""
            size = "1G"
            writable = "256M"
            mount = "{place.target}"
            front_end = "fuse"
            deadline = 2
            [[file]]
            path = "one"
            url = "{url}"
            """)
        heard = [place.told("volume", "up", NAME, "--file", definition)]
        assert place.state() == "up", heard
        trace = place.root / "trace"
        heard.append(place.told("trace", "record", NAME, "--for=1", "-o", trace))
        heard.append(trace.read_text())
        assert (place.target / "one").read_bytes() == bytes(5000)
        heard += [
            place.told(*words)
            for words in (
                # Refused, as the first has another source, and the second is none.
                ("volume", "up", NAME, f"--add-file=one={other}"),
                ("volume", "up", NAME, f"--add-file=three=ftp://h/{QUERY}"),
                ("volume", "up", NAME, f"--add-file={url}"),
                # Added; it answers with 404.
                ("volume", "up", NAME, f"--add-file=two={other}"),
                ("map", "add", NAME, "--url", url),
                ("map", "add", NAME, "--url", other),
            )
        ]
    # Nobody answers now.
    (place.target / "one").write_bytes(b"")
    heard += all_that_is_told(place)
    heard.append(place.told("map", "verify", NAME, "--ask"))
    kill_server(NAME)
    heard.append(place.told("device", "status", NAME))
    device = show_device(NAME)
    assert device.state.server is not None and device.state.supervisor is not None
    for pid in (device.state.server.pid, device.state.supervisor.pid):
        for name in ("cmdline", "environ"):
            heard.append(Path(f"/proc/{pid}/{name}").read_text(errors="replace"))
    heard.append(device.log.read_text())
    for text in heard:
        assert SECRET not in text
    assert "files/one?[redacted]" in "".join(heard)
    kept = [path for path in place.base.rglob("*") if path.is_file()]
    holding = [
        path
        for path in kept
        if path.stat().st_size < 1 << 20 and SECRET.encode() in path.read_bytes()
    ]
    assert {"definition.toml", "files.json"} <= {path.name for path in holding}
    for path in holding:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
