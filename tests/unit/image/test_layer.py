"""The layer that a commit writes."""

import io
import os
import socket
import tarfile
from pathlib import Path

import pytest

from btrfs_ublk.image.layer import changes_of_overlay, write_layer

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes whiteouts")


@as_root
def test_the_upper_directory_of_an_overlay_as_a_layer(tmp_path: Path) -> None:
    upper = Path(os.path.join(tmp_path, "upper"))
    (upper / "opaque/in").mkdir(parents=True)
    (upper / "opaque/in/file").write_text("x")
    os.mknod(upper / "gone", 0o20000, 0)
    os.mknod(upper / "opaque/gone-too", 0o20000, 0)
    (upper / "!first").write_text("sorted before whiteouts by its bytes")
    os.setxattr(upper / "opaque", "trusted.overlay.opaque", b"y")
    os.setxattr(upper / "opaque/in", "trusted.overlay.origin", b"something")
    with socket.socket(socket.AF_UNIX) as left_out:
        left_out.bind(str(upper / "s"))
    changes = changes_of_overlay(upper)
    assert changes.removed == {b"gone", b"opaque/gone-too"}
    tars = []
    for _ in range(2):
        out = io.BytesIO()
        assert write_layer(upper, changes, out) == 1
        tars.append(out.getvalue())
    assert tars[0] == tars[1]
    with tarfile.open(fileobj=io.BytesIO(tars[0])) as tar:
        found = tar.getmembers()
    assert [each.name for each in found] == [
        *(".", ".wh.gone", "!first", "opaque"),
        *("opaque/.wh..wh..opq", "opaque/.wh.gone-too", "opaque/in", "opaque/in/file"),
    ]
    assert not any("overlay" in key for each in found for key in each.pax_headers)
