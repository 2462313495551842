"""Real shells complete our command lines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.needs import Need

from btrfs_ublk.base.capabilities import Program
from btrfs_ublk.device.state import devices_directory

_BASH = """
eval "$(btrfs-ublk completion bash)"
read -ra COMP_WORDS <<<"$LINE"
[[ $LINE == *' ' ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
function=$(complete -p btrfs-ublk | sed 's/.*-F \\([^ ]*\\).*/\\1/')
compopt() { :; }
"$function" btrfs-ublk
printf '%s\\n' "${COMPREPLY[@]}"
"""
#: What zsh's own completion would be given to show.
_ZSH = """
autoload -Uz compinit && compinit -u -D
eval "$(btrfs-ublk completion zsh)"
[[ -n $_comps[btrfs-ublk] ]] || exit 9
words=(${=LINE})
[[ $LINE == *' ' ]] && words+=("")
CURRENT=$#words
_describe() { print -rl -- ${(P)3%%:*}; }
compadd() { print -rl -- ${(P)@[-1]}; }
$_comps[btrfs-ublk]
"""
_FISH = """
btrfs-ublk completion fish | source
complete --do-complete "$LINE"
"""
_SHELLS = {
    "bash": ["bash", "--norc", "-c", _BASH],
    "zsh": ["zsh", "-f", "-c", _ZSH],
    "fish": ["fish", "--no-config", "-c", _FISH],
}


@pytest.fixture(params=_SHELLS)
def shell(request: pytest.FixtureRequest, need: Need) -> str:
    name: str = request.param
    need(Program(name, name), Program("sed", "sed"))
    return name


def complete(shell: str, line: str) -> set[str]:
    """The words that the shell offers; without descriptions."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        _SHELLS[shell],
        env=os.environ | {"LINE": line, "PATH": path, "TERM": "dumb"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return {text.partition("\t")[0].strip() for text in done.stdout.split("\n")} - {""}


def test_names_that_there_are(shell: str) -> None:
    directory = devices_directory(make=True)
    made = [directory / name for name in ("first-one", "second")]
    for path in made:
        path.mkdir(mode=0o700)
    try:
        assert complete(shell, "btrfs-ublk device status ") == {"first-one", "second"}
    finally:
        for path in made:
            path.rmdir()
