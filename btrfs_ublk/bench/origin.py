"""A web server of one directory for benchmarks: nginx on loopback."""

import os
import pwd
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from btrfs_ublk.base.capabilities import Program
from btrfs_ublk.base.process import spawn

NGINX = Program("nginx", package="nginx")

_CONFIGURATION = """
daemon off;
# NB: without a master, it crashes on inherited sockets.
user {user};
worker_processes 1;
pid {root}/nginx.pid;
error_log stderr warn;
worker_rlimit_nofile 4096;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    sendfile on;
    client_body_temp_path {root};
    proxy_temp_path {root};
    fastcgi_temp_path {root};
    uwsgi_temp_path {root};
    scgi_temp_path {root};
    keepalive_requests 100000000;
    default_type application/octet-stream;
    server {{
        listen 127.0.0.1:{port} backlog=256;
        root {directory};
        autoindex on;
        location = /status {{ stub_status; }}
    }}
}}
"""


@contextmanager
def origin(root: Path, directory: Path) -> Iterator[tuple[str, int]]:
    """Serve ``directory``; yields host and port. ``root`` is for nginx' own files.

    The socket is bound here and inherited as in an upgrade of nginx, so that it answers
    from the start.
    """
    with ExitStack() as stack:
        listener = stack.enter_context(
            socket.create_server(("127.0.0.1", 0), backlog=256)
        )
        host, port = listener.getsockname()
        configuration = root / "nginx.conf"
        configuration.write_text(
            _CONFIGURATION.format(
                user=pwd.getpwuid(os.geteuid()).pw_name,
                root=root,
                port=port,
                directory=directory,
            ),
            encoding="utf-8",
        )
        stack.enter_context(
            spawn(
                ["nginx", "-e", "stderr", "-c", configuration],
                env={**os.environ, "NGINX": f"{listener.fileno()};"},
                keep_open_fds=[listener.fileno()],
            )
        )
        yield host, port
