"""What a command reads of an image: the trace of a run in a fork."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from btrfs_ublk.content import TraceWriter
from btrfs_ublk.content.trace import Recording, Trace
from btrfs_ublk.device import device_map
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.volume.begin import up_volume
from btrfs_ublk.volume.definition import VolumeDefinition
from btrfs_ublk.volume.down import down_volume, remove_volume
from btrfs_ublk.volume.run import run_in_image


def trace_run(image: str, words: Sequence[str], work: Path) -> Trace:
    """Run a command in a fork of an image, and return what it has read of the image.
    ``work`` is a directory for all that is made. All children of this process are ended
    with the command. Raises BtrfsUblkError, also when the command fails."""
    name, base = f"trace-{os.urandom(4).hex()}", work / "volumes"
    path = work / "trace"
    with ExitStack() as stack:
        up_volume(name, VolumeDefinition(image=image, mount=work / "mnt"), base=base)
        stack.callback(remove_volume, name, base=base)
        stack.callback(down_volume, name, base=base)
        client = device_map(name)
        with path.open("w") as file:
            recording = Recording(client, client.trace_start(), TraceWriter(file))
            status = run_in_image(name, words, base=base)
            recording.finish()
    if status:
        raise BtrfsUblkError(
            f"{shlex.join(words)} ends with exit status {status} in the image",
            hint="name a command that ends by itself when what a start needs is read",
        )
    return Trace.load(path)
