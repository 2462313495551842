"""WEBrick, the web server of Ruby."""

from pathlib import Path

from support.peer import Debian, Peer, Web

_PROGRAM = """
require "webrick"
WEBrick::HTTPServer.new(
  BindAddress: "127.0.0.1", Port: ARGV[0].to_i, DocumentRoot: ARGV[1]
).start
"""


def _argv(peer: Peer) -> list[str | Path]:
    return ["ruby", "-e", _PROGRAM, str(peer.port), peer.files]


PEER = Web(
    name="WEBrick",
    package=Debian(
        "ruby-webrick",
        "/usr/share/rubygems-integration/all/gems/webrick-1.8.1/lib/webrick.rb",
    ),
    argv=_argv,
)
