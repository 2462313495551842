"""Beside what meson has installed: python3 packaging/install.py DESTDIR

The distribution's metadata (pip and plugins of pytest are found by them), the command,
and what has shells complete it. For packages of distributions: a wheel gets the first
two from meson-python and pip. The Python that runs this has the dependencies.
"""

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

_SOURCE = Path(__file__).resolve().parents[1]
_COMPLETIONS = {
    "bash": "bash-completion/completions/btrfs-ublk",
    "fish": "fish/vendor_completions.d/btrfs-ublk.fish",
    "zsh": "zsh/vendor-completions/_btrfs-ublk",
}


def main(root: Path) -> None:
    project = tomllib.loads((_SOURCE / "pyproject.toml").read_text())["project"]
    # Whatever Python's directory for packages is called here.
    (package,) = root.glob("usr/lib*/python3*/*-packages/btrfs_ublk")
    info = package.with_name(f"btrfs_ublk-{project['version']}.dist-info")
    _write(info / "METADATA", _metadata(project))
    _write(info / "entry_points.txt", _entry_points(project))
    module, _, function = project["scripts"]["btrfs-ublk"].partition(":")
    lines = ["#!/usr/bin/python3", "import sys", "", f"from {module} import {function}"]
    lines += ["", 'if __name__ == "__main__":', f"    sys.exit({function}())"]
    _write(root / "usr/bin/btrfs-ublk", lines, mode=0o755)
    for shell, path in _COMPLETIONS.items():
        command = [sys.executable, "-m", module, "completion", shell]
        script = subprocess.run(
            command,
            check=True,
            env={**os.environ, "PYTHONPATH": str(_SOURCE)},
            stdout=subprocess.PIPE,
            text=True,
        )
        _write(root / "usr/share" / path, script.stdout.splitlines())


def _metadata(project: dict[str, Any]) -> list[str]:
    lines = ["Metadata-Version: 2.1", f"Name: {project['name']}"]
    lines += [f"Version: {project['version']}", f"Summary: {project['description']}"]
    lines += [f"License: {project['license']}"]
    lines += [f"Requires-Python: {project['requires-python']}"]
    lines += [f"Requires-Dist: {wanted}" for wanted in project["dependencies"]]
    for extra in ("containers", "report"):
        lines += [f"Provides-Extra: {extra}"]
        for wanted in project["optional-dependencies"][extra]:
            lines.append(f'Requires-Dist: {wanted}; extra == "{extra}"')
    return lines


def _entry_points(project: dict[str, Any]) -> list[str]:
    lines = []
    for group, points in [
        ("console_scripts", project["scripts"]),
        *project["entry-points"].items(),
    ]:
        lines += [f"[{group}]", *(f"{name} = {what}" for name, what in points.items())]
    return lines


def _write(path: Path, lines: list[str], *, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    path.chmod(mode)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
