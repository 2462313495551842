"""Asking for a daemon, where systemd listens on its socket, and not it itself."""

import json
import os
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

from btrfs_ublk.base.process import ProcessIdentity
from btrfs_ublk.supervision.client import DaemonDirectory, have_daemon_supervise


def test_a_daemon_that_dies_before_it_replies_leaves_systemd_its_socket(
    tmp_path: Path,
) -> None:
    place = DaemonDirectory.of_host(make=True)
    served = []
    with ExitStack() as stack:
        listener = stack.enter_context(place.listening_socket())
        inode = os.stat(place.path / "socket").st_ino

        def serve() -> None:
            for answer in (None, {"pid": 7, "start_ticks": 8}):
                connection, _ = listener.accept()
                with connection:
                    served.append(connection.recv(1 << 20))
                    if answer is not None:
                        connection.send(json.dumps(answer).encode())

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with open(tmp_path / "lock", "w") as lock:
            daemon = have_daemon_supervise(tmp_path, lock.fileno(), sys.executable)
        thread.join(60)
    assert daemon == ProcessIdentity(7, 8)
    assert len(served) == 2
    assert os.stat(place.path / "socket").st_ino == inode
    (place.path / "socket").unlink()
