"""What the guest is told: the command as a shell script, and its settings."""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

# Exact names, and prefixes that end in "*".
_PASSED_ON = (
    *("BTRFS_UBLK_*", "CI", "TERM", "COLUMNS", "LINES", "LANG", "LC_*", "TZ"),
    *("NO_COLOR", "FORCE_COLOR", "PY_COLORS", "PYTEST_ADDOPTS", "HYPOTHESIS_PROFILE"),
    # NB: not PYTHONDONTWRITEBYTECODE: an emulated CPU would compile the package anew
    # for each command, which is most of the time that a command takes.
)
# Where this machine's programs are; one of another architecture has others.
_OWN_PROGRAMS = ("PATH", "HOME", "VIRTUAL_ENV")


def guest_environment(
    host: Mapping[str, str],
    extra: Mapping[str, str],
    project: Path,
    arch: str = "amd64",
) -> dict[str, str]:
    rules = (*_PASSED_ON, *(_OWN_PROGRAMS if arch == "amd64" else ()))
    passed = {
        name: value
        for name, value in host.items()
        if any(
            name.startswith(rule[:-1]) if rule.endswith("*") else name == rule
            for rule in rules
        )
    }
    return {
        "HOME": "/root",
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "USER": "root",
        "LOGNAME": "root",
        "SHELL": "/bin/sh",
        "BTRFS_UBLK_IN_VM": "1",
        # The guest sees the host's ledgers too, in /var/lib, but not whose they are.
        "BTRFS_UBLK_STATE_DIR": "/run/btrfs-ublk",
        **({} if arch == "amd64" else _build(project, arch)),
        **passed,
        **extra,
    }


def _build(project: Path, arch: str) -> dict[str, str]:
    """The package by its sources, with what scripts/setup has compiled for `arch`."""
    build = project / "build" / arch
    return {
        "PYTHONPATH": str(project),
        "BTRFS_UBLK_HELPERS": str(build / "csrc/tools"),
        # Has no sanitizers: they are this machine's, and slow where CPUs are emulated.
        "BTRFS_UBLK_SANITIZED_BUILD": str(build),
        "PYTEST_PLUGINS": "btrfs_ublk.testing.plugin",  # else known by its installation
        # Packages that were only unpacked have none, and compiling takes a minute.
        "PYTHONPYCACHEPREFIX": str(build / "pycache"),
    }


def command_script(
    argv: Sequence[str], environment: Mapping[str, str], *, cwd: str, project: Path
) -> bytes:
    """A script for /bin/sh that replaces itself by the command."""
    # NB: cd before the environment: PATH must still not matter.
    lines = [f"cd {shlex.quote(cwd)} 2>/dev/null || cd {shlex.quote(str(project))}"]
    exports = [
        shlex.quote(f"{name}={value}") for name, value in sorted(environment.items())
    ]
    words = [shlex.quote(word) for word in argv]
    lines.append(f"exec /usr/bin/env -i {' '.join(exports)} {' '.join(words)}")
    return os.fsencode("\n".join(lines) + "\n")


def guest_config(settings: Mapping[str, str]) -> bytes:
    """Settings as shell assignments."""
    lines = (f"{name}={shlex.quote(value)}\n" for name, value in settings.items())
    return os.fsencode("".join(lines))
