"""Which image of an index suits a machine, in the order that containerd has (its
package `platforms`: Normalize, Only)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from btrfs_ublk.errors import UsageError

#: Of GOARCH, which indexes have, by uname's and others' names.
_ARCHITECTURES = {
    "x86_64": "amd64",
    "x86-64": "amd64",
    "aarch64": "arm64",
    "i386": "386",
    "i686": "386",
    "loongarch64": "loong64",
}
#: What a CPU needs for the variants of amd64 (x86-64 psABI), as /proc/cpuinfo says it.
_AMD64_FLAGS = {
    2: "cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3",
    3: "abm avx avx2 bmi1 bmi2 f16c fma movbe xsave",
    4: "avx512f avx512bw avx512cd avx512dq avx512vl",
}
_UNKNOWN = "unknown"
_CPUINFO = Path("/proc/cpuinfo")
#: Of an attestation: what it is, in an index; what BuildKit has as its artifact type.
_ATTESTS = "vnd.docker.reference.type"
_ATTESTATION = "application/vnd.docker.attestation.manifest.v1+json"

_Each = TypeVar("_Each")


class Platform(NamedTuple):
    """In one spelling: amd64 has no variant "v1", arm64 no "v8", and arm always one."""

    os: str
    architecture: str
    variant: str = ""

    def __str__(self) -> str:
        return "/".join(part for part in self if part)


def _normal(system: str, architecture: str, variant: str) -> Platform:
    system, variant = system.lower(), variant.lower()
    architecture = architecture.lower()
    architecture = _ARCHITECTURES.get(architecture, architecture)
    if architecture in ("armhf", "armel"):
        variant = "v7" if architecture == "armhf" else "v6"
        architecture = "arm"
    if variant.isdigit() and architecture in ("amd64", "arm", "arm64"):
        variant = f"v{variant}"
    if architecture == "arm" and not variant:
        variant = "v7"
    if (architecture, variant) in (("amd64", "v1"), ("arm64", "v8"), ("386", "v1")):
        variant = ""
    return Platform(system, architecture, variant)


def platform_of(about: Mapping[str, Any]) -> Platform:
    """Return the platform of a descriptor, which has one, or of a config."""
    system, architecture, variant = (
        str(about.get(key, "")) for key in ("os", "architecture", "variant")
    )
    return _normal(system, architecture, variant)


def machine_platform() -> Platform:
    """Return this machine's platform as indexes name it."""
    machine = os.uname().machine
    if arm := re.match("armv([5-8])", machine):
        return Platform("linux", "arm", f"v{arm[1]}")
    found = _normal("linux", machine, "")
    return found._replace(variant=_amd64_variant() if found[1] == "amd64" else "")


def _amd64_variant() -> str:
    try:
        flags = re.search(r"^flags\s*:(.*)$", _CPUINFO.read_text(), re.MULTILINE)
    except OSError:
        flags = None
    there, variant = set(flags[1].split()) if flags else set(), ""
    for level, needed in _AMD64_FLAGS.items():
        if not there.issuperset(needed.split()):
            break
        variant = f"v{level}"
    return variant


def wanted_platforms(text: str | None) -> list[Platform]:
    """Return what OS/ARCHITECTURE[/VARIANT], or this machine (None), can run, best
    first. Raises UsageError."""
    if text is None:
        one = machine_platform()
    else:
        parts = text.split("/")
        if len(parts) not in (2, 3) or not all(parts):
            raise UsageError(
                f"{text!r} is no platform",
                hint="give OS/ARCHITECTURE[/VARIANT], as in linux/arm/v7",
            )
        one = _normal(*parts, *[""] * (3 - len(parts)))
    return [one, *_others(one)]


def _others(one: Platform) -> list[Platform]:
    """Return what else such a machine can run, best first."""
    system, architecture, variant = one
    number = int(variant[1:]) if re.fullmatch("v[0-9]", variant) else 0
    match architecture:
        case "amd64":
            lower = [f"v{level}" for level in range(number - 1, 1, -1)]
            plain = [""] if variant else []
            found = [Platform(system, architecture, x) for x in (*lower, *plain)]
            return [*found, Platform(system, "386")]
        case "arm":
            return [
                Platform(system, architecture, f"v{level}")
                for level in range(number - 1, 4, -1)
            ]
        case "arm64":
            plain = [""] if variant else []
            found = [Platform(system, architecture, x) for x in plain]
            arm = Platform(system, "arm", "v8")
            return [*found, arm, *_others(arm)]
    return []


def is_unknown(about: Mapping[str, Any]) -> bool:
    """Whether this is the platform of what is no image for a machine."""
    return _UNKNOWN in (about.get("os"), about.get("architecture"))


def is_attestation(descriptor: Mapping[str, Any]) -> bool:
    """Whether a manifest says something of an image, as BuildKit has it."""
    annotations = descriptor.get("annotations")
    return (
        isinstance(annotations, dict) and _ATTESTS in annotations
    ) or descriptor.get("artifactType") == _ATTESTATION


def best_platform(
    candidates: Sequence[tuple[Mapping[str, Any], _Each]], wanted: Sequence[Platform]
) -> _Each | None:
    """Return what suits best; each comes with its platform. Those without one are the
    last choice, and of equals the first is taken."""
    found: list[tuple[int, _Each]] = []
    for about, each in candidates:
        if not about:
            found.append((len(wanted), each))
        elif not is_unknown(about) and (platform := platform_of(about)) in wanted:
            found.append((wanted.index(platform), each))
    return min(found, key=lambda pair: pair[0])[1] if found else None
