"""Layers of what has changed in a snapshot, which a real containerd stores."""

import gzip
import hashlib
import io
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
from support.containers import Host, host, lazy_host, place, state  # noqa: F401
from support.lazy_images import Place, some_layers
from support.snapshotter import TIMEOUT_S, Client, connected, pull

from btrfs_ublk.containers import differ
from btrfs_ublk.containers.messages import CLASSES
from btrfs_ublk.containers.store import RefusedError
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.kernel.btrfs import create_subvolume

pytestmark = [pytest.mark.data, pytest.mark.device]

_NAMESPACE = (("containerd-namespace", "default"),)


def _views(client: Client, *names: str) -> list[Any]:
    return [
        client.call("View", key=f"view of {name}", parent=name).mounts for name in names
    ]


@contextmanager
def _writing(socket: Path, ref: str) -> Iterator[None]:
    """Have somebody else write what is to have that reference."""
    requests: SimpleQueue[Any] = SimpleQueue()
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        write: Any = channel.stream_stream(
            differ.WRITE, CLASSES["WriteContentRequest"].SerializeToString
        )
        answers = write(iter(requests.get, None), metadata=_NAMESPACE)
        requests.put(CLASSES["WriteContentRequest"](action=1, ref=ref, data=b"some"))
        next(answers)
        yield
        requests.put(None)


def _listed(host: Host, digest: str) -> str:  # noqa: F811
    (line,) = (x for x in host.ctr("content", "list").splitlines() if digest in x)
    return line


def _leases(host: Host) -> list[str]:  # noqa: F811
    return [
        line.split()[0]
        for line in host.ctr("leases", "list").splitlines()
        if line.startswith("btrfs-ublk-")
    ]


def _diff(socket: Path, left: Any, right: Any, **fields: Any) -> Any:
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        call: Any = channel.unary_unary(
            f"/{differ.SERVICE}/{differ.CALL}",
            CLASSES["DiffRequest"].SerializeToString,
            CLASSES["DiffResponse"].FromString,
        )
        request = CLASSES["DiffRequest"](left=left, right=right, **fields)
        return call(request, metadata=_NAMESPACE, timeout=TIMEOUT_S).diff


def test_a_layer_has_what_has_changed_and_reads_nothing_else(
    place: Place, lazy_host: Host  # noqa: F811
) -> None:
    host = lazy_host  # noqa: F811
    image = place.push("team/app", *some_layers())
    host.options = ["--ca-file", place.registry.ca_file, "--writable=256M"]
    socket = host.work / "snapshotter.sock"
    with host.snapshotter(), host.containerd(), connected(socket) as client:
        top = pull(client, image)
        tree = client.prepare("one", top)
        (tree / "etc/name").write_text("changed\n")
        (tree / "new").mkdir()
        (tree / "new/file").write_text("new\n")
        (tree / "big").unlink()
        client.commit("changed", "one")
        before = state(host).images[0]["fetched_bytes"]
        left, right = _views(client, top, "changed")

        made = _diff(socket, left, right, ref="a", labels={"who": "a test"})
        assert made.media_type == "application/vnd.oci.image.layer.v1.tar+gzip"
        command = host.ctr_command("content", "get", made.digest)
        data = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
        assert len(data) == made.size
        assert f"sha256:{hashlib.sha256(data).hexdigest()}" == made.digest
        layer = gzip.decompress(data)
        with tarfile.open(fileobj=io.BytesIO(layer)) as tar:
            names = {".", "etc", "etc/name", "new", "new/file", ".wh.big"}
            assert set(tar.getnames()) == names
            file = tar.extractfile("etc/name")
            assert file is not None and file.read() == b"changed\n"
        diff_id = f"sha256:{hashlib.sha256(layer).hexdigest()}"
        known = f"containerd.io/uncompressed={diff_id}"
        assert known in _listed(host, made.digest)
        assert "who=a test" in _listed(host, made.digest)
        leases = _leases(host)
        assert len(leases) == 1
        host.ctr("content", "label", made.digest, "containerd.io/uncompressed=")
        assert known not in _listed(host, made.digest)
        # It is there already, and is kept by this call, too; nothing else was fetched.
        assert _diff(socket, left, right, ref="b") == made
        host.ctr("leases", "delete", "--sync", *leases)
        assert known in _listed(host, made.digest)
        assert "who=a test" in _listed(host, made.digest)
        assert state(host).images[0]["fetched_bytes"] == before < 2_000_000

        request = CLASSES["DiffRequest"](left=left, right=right)
        root = Path(right[0].source).parents[1]
        with pytest.raises(BtrfsUblkError, match="takes no layer") as failed:
            differ.diff(host.work / "nobody.sock", root, request, _NAMESPACE)
        # Who has made the request would repeat it for ever.
        assert not isinstance(failed.value, RefusedError)
        # Wherever nobody waits for it any more: it is compressed, and then sent.
        for number in count():
            asked = count()
            request.ref = f"e{number}"
            try:
                found = differ.diff(
                    host.work / "containerd.sock",
                    root,
                    request,
                    _NAMESPACE,
                    is_wanted=lambda: next(asked) < number,  # noqa: B023
                )
            except RefusedError as error:
                assert "nobody waits" in str(error)
            else:
                assert found.diff == made and number > 2
                break

        active = client.call("Prepare", key="two", parent="changed").mounts
        create_subvolume(client.prepare("three", top), "nested")
        client.commit("with one", "three")
        client.prepare("four", "with one")
        client.commit("upon it", "four")
        with_one, upon_it = _views(client, "with one", "upon it")
        lower = client.info(top).parent
        (below,) = _views(client, lower)
        plain = "application/vnd.oci.image.layer.v1.tar"
        for pair, fields in (
            ((left, active), {}),
            ((below, right), {}),
            ((left, with_one), {}),
            ((with_one, upon_it), {}),
            (([], right), {}),
            ((left, right), {"media_type": plain}),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                _diff(socket, *pair, ref="c", **fields)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        with (
            _writing(host.work / "containerd.sock", "d"),
            pytest.raises(grpc.RpcError, match="locked") as caught,
        ):
            _diff(socket, left, right, ref="d")
        assert (
            caught.value.code() is grpc.StatusCode.UNAVAILABLE
        )  # BuildKit tries again
