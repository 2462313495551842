"""Express, which many services of node are made with."""

from pathlib import Path

from support.peer import Npm, Peer, Web

_PROGRAM = """
const express = require(process.argv[1]);
express().use(express.static(process.argv[3])).listen(process.argv[2], "127.0.0.1");
"""


def _argv(peer: Peer) -> list[str | Path]:
    where = [peer.package.program(), str(peer.port), peer.files]
    return ["node", "-e", _PROGRAM, *where]


PEER = Web(
    name="Express",
    package=Npm("express", "5.3.0", "node_modules/express"),
    argv=_argv,
)
