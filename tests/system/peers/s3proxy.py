"""S3Proxy, with a file system behind it."""

from pathlib import Path

from support.peer import Maven, Peer, Store
from support.s3_server import ACCESS_KEY, SECRET_KEY

_CONFIGURATION = """
s3proxy.endpoint=http://127.0.0.1:{port}
s3proxy.authorization=aws-v4
s3proxy.identity={key}
s3proxy.credential={secret}
jclouds.provider=filesystem-nio2
jclouds.identity=none
jclouds.credential=none
jclouds.filesystem.basedir={root}/files
"""


def _argv(peer: Peer) -> list[str | Path]:
    path = peer.root / "s3proxy.conf"
    text = _CONFIGURATION.format(
        port=peer.port, root=peer.root, key=ACCESS_KEY, secret=SECRET_KEY
    )
    path.write_text(text)
    program = peer.package.program()
    return ["java", "-Xmx256m", "-jar", program, "--properties", path]


PEER = Store(
    name="S3Proxy",
    package=Maven(
        "org.gaul:s3proxy", "2.6.0", "s3proxy-2.6.0-jar-with-dependencies.jar"
    ),
    argv=_argv,
)
