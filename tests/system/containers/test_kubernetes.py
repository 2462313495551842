"""The manifest for Kubernetes, and the script that it runs: they parse, and name what
there is. No kubelet runs here."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from support.needs import Need
from support.paths import PROJECT

from btrfs_ublk import __version__
from btrfs_ublk.base.capabilities import Program
from btrfs_ublk.cli.main import command
from btrfs_ublk.image.policy import read_policy

KUBERNETES = PROJECT / "packaging" / "kubernetes"
SCRIPT = KUBERNETES / "install-on-node"


def objects() -> dict[str, Any]:
    text = (KUBERNETES / "btrfs-ublk.yaml").read_text()
    found = {one["kind"]: one for one in yaml.safe_load_all(text)}
    assert list(found) == ["Namespace", "ConfigMap", "DaemonSet"]
    return found


def check(words: list[str]) -> None:
    """Parse a command without running it. Raises click.UsageError."""
    group: click.Command = command
    context: click.Context | None = None
    while isinstance(group, click.Group):
        context = click.Context(group, parent=context, info_name=words[0])
        found = group.get_command(context, words[1])
        assert found is not None, words
        group, words = found, words[1:]
    group.make_context(words[0], words[1:], parent=context)


def test_settings_are_valid(tmp_path: Path) -> None:
    data = objects()["ConfigMap"]["data"]
    (options,) = re.findall(r'^OPTIONS="(.*)"$', data["snapshotter.conf"], re.MULTILINE)
    check(["btrfs-ublk", "snapshotter", "serve", *shlex.split(options)])
    (tmp_path / "images.toml").write_text(data["images.toml"])
    assert len(read_policy(tmp_path / "images.toml").rules) == 1
    with pytest.raises(click.UsageError):
        check(["btrfs-ublk", "snapshotter", "serve", "--no-such"])


def test_the_pod_has_what_the_script_needs() -> None:
    found = objects()
    spec = found["DaemonSet"]["spec"]
    pod = spec["template"]["spec"]
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    assert found["DaemonSet"]["metadata"]["namespace"] == "btrfs-ublk"
    assert pod["hostPID"] and pod["nodeSelector"] == {"btrfs-ublk/enabled": "true"}
    (container,) = pod["containers"]
    assert container["securityContext"]["privileged"]
    assert container["image"].endswith(f":{__version__}")
    (mount,), (volume,) = container["volumeMounts"], pod["volumes"]
    assert mount["name"] == volume["name"]
    assert f"SETTINGS:-{mount['mountPath']}}}" in SCRIPT.read_text()
    assert volume["configMap"]["name"] == found["ConfigMap"]["metadata"]["name"]
    files = set(found["ConfigMap"]["data"])
    assert f"for file in {' '.join(sorted(files, reverse=True))};" in SCRIPT.read_text()
    probe = container["readinessProbe"]["exec"]["command"]
    check(probe[probe.index("btrfs-ublk") :])


#: All programs of a node are this one. It keeps what it was asked to do.
NODE = r"""#!/bin/sh
name=${0##*/}
if [ "$name" = nsenter ]; then
    while [ "$1" != -- ]; do shift; done
    shift
    case $1 in
        dpkg-query) cat "$HERE/installed" 2>/dev/null; exit ;;
        apt-get) exit ;;
        stat) echo btrfs; exit ;;
        ls) echo one; exit ;;
        systemctl | btrfs-ublk) ;;
        *)
            for word; do
                shift
                case $word in /var/* | /etc/*) word=$HERE$word ;; esac
                set -- "$@" "$word"
            done
            [ "$1" != env ] || { echo 1.0 > "$HERE/installed"; exit; }
            exec "$@" ;;
    esac
    echo "$*" >> "$HERE/asked"
    if [ "$2" = "$KILLED_AT" ]; then kill -9 $PPID; fi
elif [ "$name" = dpkg-deb ]; then
    echo 1.0
elif [ "$name" = sleep ]; then
    kill $PPID
fi
"""


def test_a_killed_upgrade_is_applied_by_the_next_pod(tmp_path: Path) -> None:
    for directory in ("bin", "settings", "packages"):
        (tmp_path / directory).mkdir()
    for name in ("nsenter", "dpkg-deb", "sleep"):
        (tmp_path / "bin" / name).write_text(NODE)
        (tmp_path / "bin" / name).chmod(0o755)
    for name in ("snapshotter.conf", "images.toml"):
        (tmp_path / "settings" / name).write_text("settings")
    (tmp_path / "packages" / "btrfs-ublk_1.0.deb").touch()
    applied = ["systemctl restart btrfs-ublk-snapshotter"]
    applied += ["btrfs-ublk device upgrade one"]

    def run_pod(killed_at: str) -> list[str]:
        """Return which commands of those that apply an upgrade were run."""
        (tmp_path / "asked").unlink(missing_ok=True)
        environment = {
            "PATH": f"{tmp_path}/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HERE": str(tmp_path),
            "SETTINGS": str(tmp_path / "settings"),
            "PACKAGES": str(tmp_path / "packages"),
            "KILLED_AT": killed_at,
        }
        subprocess.run([SCRIPT], env=environment, timeout=60, check=False)
        asked = (tmp_path / "asked").read_text().splitlines()
        return [line for line in asked if line in applied]

    assert run_pod(killed_at="enable") == []
    assert run_pod(killed_at="restart") == applied[:1]
    assert run_pod(killed_at="") == applied
    assert run_pod(killed_at="") == []


def test_the_script_names_what_there_is(need: Need) -> None:
    need(Program("shellcheck", "shellcheck"))
    subprocess.run(["shellcheck", SCRIPT], check=True, timeout=60)
    text = SCRIPT.read_text()
    commands = re.findall(r"on_node (btrfs-ublk [a-z -]+)(\"\$device\")?", text)
    assert len(commands) == 3
    for words, argument in commands:
        check(words.split() + (["one"] if argument else []))
    units = {path.name for path in (PROJECT / "btrfs_ublk/systemd").iterdir()}
    for unit in re.findall(r"\bbtrfs-ublk(?:-snapshotter|\.socket)", text):
        assert unit in units or f"{unit}.service" in units
    control = (PROJECT / "packaging" / "debian" / "control").read_text()
    for package in re.findall(r"python3-\w+", text):
        assert package in control
    copied = (KUBERNETES / "Containerfile").read_text()
    assert SCRIPT.name in copied and "/packages/" in copied
