"""Which login is sent for which image, and what a refusal asks for: for block servers
(in C), and for commands."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support import tables
from support.sanitized_build import PROJECT, SANITIZER_ENVIRONMENT

from btrfs_ublk.image.logins import parse_challenges

TABLE = tables.cases("logins")
REFUSALS: Any = tables.cases("challenges")
TIMEOUT_S = 120

#: find(images, config, environment) returns the user of each login, or its error.
Find = Callable[..., list[str | None]]

_IN_PYTHON = """
import json, sys
from pathlib import Path
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.image.logins import find_login
for line in sys.stdin:
    command, registry, repository, *path = line.split()
    try:
        login = find_login(registry, repository, Path(path[0]) if path else None)
        found = {"result": 0, "user": login.user}
    except BtrfsUblkError as error:
        found = {"result": 1, "text": str(error)}
    print(json.dumps(found))
"""


@pytest.fixture(params=["C", "Python"])
def find(request: pytest.FixtureRequest, tmp_path: Path) -> Find:
    argv: list[str | Path] = [sys.executable, "-c", _IN_PYTHON]
    if request.param == "C":
        build = request.getfixturevalue("sanitized_build")
        argv = [build / "csrc/tests/registry-shell"]

    def ask(
        images: Sequence[str],
        config: Path | None = None,
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str | Path] = (),
    ) -> list[str | None]:
        asked = [f"login {x.replace('/', ' ', 1)} {config or ''}" for x in images]
        base = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
        done = subprocess.run(
            [*prefix, *argv],
            input="\n".join([*asked, ""]),
            capture_output=True,
            text=True,
            cwd=PROJECT,
            timeout=TIMEOUT_S,
            env={**base, **SANITIZER_ENVIRONMENT, **(environment or {})},
        )
        assert done.returncode == 0, done.stderr
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        return [x["text"] if x["result"] else x["user"] for x in answers]

    return ask


def write(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def auths(keys: Mapping[str, str]) -> dict[str, Any]:
    logins = {key: {"username": x, "password": f"of {x}"} for key, x in keys.items()}
    return {"auths": logins}


@pytest.mark.parametrize("case", TABLE, ids=[case["why"] for case in TABLE])
def test_the_login_is_that_of_the_repository(
    find: Find, tmp_path: Path, case: dict[str, Any]
) -> None:
    config = write(tmp_path / "config.json", auths(case["auths"]))
    users = case["users"]
    assert dict(zip(users, find(list(users), config), strict=True)) == users


def helper(directory: Path, name: str, script: str) -> None:
    directory.mkdir(exist_ok=True)
    path = directory / f"docker-credential-{name}"
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)


def answering(user: str) -> str:
    return f"""echo '{{"Username": "{user}", "Secret": "x"}}'"""


def test_a_helper_is_that_of_the_repository(find: Find, tmp_path: Path) -> None:
    """The same keys as those of logins; what a helper has not, a login may have."""
    for user in ("a", "any", "store"):
        helper(tmp_path / "bin", user, f"cat >>{tmp_path}/asked; {answering(user)}")
    none = "echo credentials not found in native keychain; exit 1"
    helper(tmp_path / "bin", "none", none)
    environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    content = auths({"registry.example.org": "own"}) | {
        "credHelpers": {
            "registry.example.org/team-a": "a",
            "registry.example.org/team-b": "none",
            "*.example.net": "any",
        }
    }
    users = {
        "registry.example.org/team-a/image": "a",
        "registry.example.org/team-b/image": "own",
        "registry.example.org/image": "own",
        "eu.example.net/image": "any",
        "docker.io/library/debian": None,
    }
    config = write(tmp_path / "config.json", content)
    found = find(list(users), config, environment)
    assert dict(zip(users, found, strict=True)) == users
    config = write(tmp_path / "config.json", content | {"credsStore": "store"})
    users |= {
        "registry.example.org/image": "store",
        "docker.io/library/debian": "store",
    }
    found = find(list(users), config, environment)
    assert dict(zip(users, found, strict=True)) == users
    asked = (tmp_path / "asked").read_text()
    assert asked.endswith(
        "registry.example.orgeu.example.nethttps://index.docker.io/v1/"
    )


@pytest.mark.parametrize("key", ["credsStore", "credHelpers"])
def test_a_helper_that_is_not_installed_has_no_logins(
    find: Find, tmp_path: Path, key: str
) -> None:
    """The file comes from another machine, perhaps; public images need no login."""
    value: object = {"*.example.org": "absent"} if key == "credHelpers" else "absent"
    content = auths({"own.example.org": "own"}) | {key: value}
    config = write(tmp_path / "config.json", content)
    images = ["own.example.org/image", *["registry.example.org/image"] * 30]
    assert find(images, config) == ["own", *[None] * 30]


def test_logins_of_podman_and_docker_are_found(find: Find, tmp_path: Path) -> None:
    """The first file that has one for the image counts; a variable that names one file
    excludes the others."""
    run, home = tmp_path / "run", tmp_path / "home"
    write(run / "containers/auth.json", auths({"a.example.org/team": "runtime"}))
    write(
        home / ".config/containers/auth.json",
        auths({"a.example.org": "kept", "b.example.org": "kept"}),
    )
    write(
        home / ".docker/config.json",
        auths({"b.example.org": "docker", "c.example.org": "docker"}),
    )
    write(tmp_path / "docker/config.json", auths({"a.example.org": "other docker"}))
    named = write(tmp_path / "named.json", auths({"a.example.org": "named"}))
    images = [f"{x}/image" for x in ("a.example.org/team", "a.example.org")]
    images += [f"{x}.example.org/image" for x in "bcd"]
    usual = {"HOME": str(home), "XDG_RUNTIME_DIR": str(run)}
    expected = ["runtime", "kept", "kept", "docker", None]
    assert find(images, None, usual) == expected
    elsewhere = usual | {"XDG_CONFIG_HOME": str(tmp_path / "none")}
    expected = ["runtime", None, "docker", "docker", None]
    assert find(images, None, elsewhere) == expected
    docker = usual | {"DOCKER_CONFIG": str(tmp_path / "docker")}
    assert find(images, None, docker) == ["other docker"] * 2 + [None] * 3
    all_of_them = docker | {"REGISTRY_AUTH_FILE": str(named)}
    assert find(images, None, all_of_them) == ["named"] * 2 + [None] * 3
    absent = docker | {"REGISTRY_AUTH_FILE": str(tmp_path / "absent.json")}
    assert find(images, None, absent) == [None] * 5
    assert find(images, named, usual) == ["named"] * 2 + [None] * 3


def test_a_file_that_others_may_read_is_refused(find: Find, tmp_path: Path) -> None:
    path = write(tmp_path / "containers/auth.json", auths({"a.example.org": "a"}))
    path.chmod(0o644)
    environment = {"XDG_RUNTIME_DIR": str(tmp_path)}
    (found,) = find(["a.example.org/image"], None, environment)
    assert found and "is open to others" in found


def in_c(build: Path, headers: Sequence[str]) -> dict[str, Any]:
    lines = [f"WWW-Authenticate: {x}" for x in headers]
    done = subprocess.run(
        [build / "csrc/tests/registry-shell"],
        input="\n".join(
            [f"refused {REFUSALS['base']}", "HTTP/1.1 401 No", *lines, "", ""]
        ),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, **SANITIZER_ENVIRONMENT},
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.parametrize(
    "case", REFUSALS["cases"], ids=[case["why"] for case in REFUSALS["cases"]]
)
def test_what_a_refusal_asks_for(sanitized_build: Path, case: dict[str, Any]) -> None:
    python = vars(parse_challenges(", ".join(case["headers"]), REFUSALS["base"]))
    for found in (python, in_c(sanitized_build, case["headers"])):
        bearer = [found[key] for key in ("realm", "service", "scope")]
        assert (bearer if found["bearer"] else None) == case["bearer"]
        assert found["basic"] is case["basic"]
