"""s3rver, which stands in for S3 in tests of others."""

from pathlib import Path

from support.peer import Npm, Peer, Store
from support.s3_server import ACCESS_KEY, SECRET_KEY

# Its command has one login, of fixed names.
_PROGRAM = """
const [, package, port, directory, key, secret] = process.argv;
require(package + "/lib/models/account").DUMMY_ACCOUNT.createKeyPair(key, secret);
new (require(package))({ address: "127.0.0.1", port, directory }).run();
"""


def _argv(peer: Peer) -> list[str | Path]:
    where = [peer.package.program(), str(peer.port), peer.files]
    return ["node", "-e", _PROGRAM, *where, ACCESS_KEY, SECRET_KEY]


PEER = Store(
    name="s3rver",
    package=Npm("s3rver", "3.7.1", "node_modules/s3rver"),
    argv=_argv,
)
