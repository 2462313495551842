"""Sealed images in the snapshotter: asked as containerd asks, with a real registry."""

import json
import os
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from support import snapshotter
from support.devices import fill
from support.lazy_images import BIG, Image, Place, elsewhere, some_layers
from support.processes import ending_with_us
from support.signing import ec_key, sign
from support.snapshotter import EXISTS, Client, ask_for, connected, pull, state
from support.waiting import wait_until

from btrfs_ublk.base.private_dirs import VOLUMES_VARIABLE
from btrfs_ublk.base.process import run
from btrfs_ublk.bench.link import link
from btrfs_ublk.containers.images import IMAGE_REF, MANIFEST_DIGEST
from btrfs_ublk.containers.service import serving
from btrfs_ublk.containers.status import ask
from btrfs_ublk.containers.store import SNAPSHOT_REF
from btrfs_ublk.content import Cache
from btrfs_ublk.device import device_map
from btrfs_ublk.device.state import RUN_VARIABLE
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.image.documents import SEALED_IN
from btrfs_ublk.image.pull import pull_image
from btrfs_ublk.image.reference import parse_reference
from btrfs_ublk.image.store import ImageStore
from btrfs_ublk.image.transfer import open_repository
from btrfs_ublk.kernel.mount import mounted
from btrfs_ublk.ops.monitor.metrics import metrics_text
from btrfs_ublk.units import MIB
from btrfs_ublk.volume import down_volume, list_volumes, remove_volume
from btrfs_ublk.volume.store import volume_directory

place = snapshotter.place  # a fixture
root = snapshotter.root  # a fixture

pytestmark = pytest.mark.device


def served(place: Place, root: Path, **changes: Any) -> AbstractContextManager[Client]:
    return snapshotter.served(root, replace(place.options, **changes))


def drop(client: Client, *names: str) -> None:
    """Remove snapshots as containerd's garbage collection does."""
    for name in names:
        client.remove(name)
    client.call("Cleanup")


def test_an_image_arrives_when_it_is_read(place: Place, root: Path) -> None:
    image = place.push("team/app", *some_layers())
    with served(place, root) as client:
        top = pull(client, image)
        assert set(client.names().values()) == {"committed"}
        (mount,) = client.call("View", key="view", parent=top).mounts
        shown = Path(mount.source)
        assert (shown / "etc/name").read_text() == "upper\n"
        before = state(root).images[0]
        assert before["is_up"] and before["fetched_bytes"] < before["data_bytes"]
        assert (shown / "big").read_bytes() == image.layers[0]["big"]
        assert (shown / "other").read_bytes() == image.layers[1]["other"]
        # What readers have got is written to the cache a little later.
        had = before["fetched_bytes"]
        wait_until(lambda: state(root).images[0]["fetched_bytes"] > had)
        assert state(root).layers == {image.name: {"lazy": 2, "ordinary": 0}}
        # The first layer has what it had before the second.
        lower = client.info(top).parent
        (mount,) = client.call("View", key="lower", parent=lower).mounts
        assert (Path(mount.source) / "etc/name").read_text() == "lower\n"
        assert not (Path(mount.source) / "other").exists()
        # One layer is charged for the cache, in which all of them are.
        # It is filled a little later than readers are answered.
        wait_until(lambda: client.call("Usage", key=top).size >= 2 * BIG)
        assert client.call("Usage", key=top).size < 3 * BIG
        assert client.call("Usage", key=lower).size == 0

        container = client.prepare("container", top)
        (container / "new").write_bytes(b"x" * 5_000_000)
        os.sync()
        assert client.call("Usage", key="container").size >= 5_000_000
        drop(client, "container", "view", "lower", top)
        assert [one.is_up for one in list_volumes()] == [True]
        drop(client, lower)
        assert list_volumes() == [] and ImageStore().images() == []
        assert os.listdir(root / "images") == [] and state(root).images == []


def test_the_cache_of_an_image_has_a_cap(place: Place, root: Path) -> None:
    """Images that were there before get it as well, and lose it."""
    image = place.push("team/app", *some_layers())
    cap = 2 * MIB

    def read_all(client: Client) -> None:
        shown = Path(client.call("Mounts", key="container").mounts[0].source)
        for number, name in enumerate(("big", "other")):
            fd = os.open(shown / name, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            with os.fdopen(fd, "rb") as file:
                assert file.read() == image.layers[number][name]

    def limit() -> int:
        return int(json.loads((cache / "limits").read_text())["max_bytes"])

    with served(place, root, cache_max_bytes=cap) as client:
        client.prepare("container", pull(client, image))
        (volume,) = list_volumes()
        directory = volume_directory(volume.name)
        cache = directory.cache_of(directory.definition())
        assert limit() == cap
        read_all(client)
        wait_until(lambda: Cache(cache).status().cached_bytes <= cap)
    with served(place, root, cache_max_bytes=2 * cap) as client:
        client.call("Mounts", key="container")
        wait_until(lambda: state(root).images[0]["is_up"])
        assert limit() == 2 * cap
    with served(place, root) as client:
        client.call("Mounts", key="container")
        wait_until(lambda: state(root).images[0]["is_up"])
        assert limit() == 0


def test_first_data_come_beside_the_metadata(place: Place, root: Path) -> None:
    """What a kill leaves then is made anew."""
    image = place.push("team/app", *some_layers(), Cmd=["/big"])
    volume = volume_directory(f"snapshotter-{image.sealed[7:23]}")
    socket_ = root.with_suffix(".sock")
    serve = [sys.executable, "-m", "btrfs_ublk.cli.main", "snapshotter", "serve"]
    serve += [f"--root={root}", f"--socket={socket_}", "--writable=256M"]
    serve += [f"--ca-file={place.registry.ca_file}", "--require-lazy"]

    def are_asked_for() -> bool:
        with suppress(BtrfsUblkError):
            first = device_map(volume.name).prefetch_status()
            return first is not None and volume.made().is_pending
        return False

    host, _, port = place.registry.host.partition(":")
    far = link((host, int(port)), round_trip_s=1.5, bytes_per_s=0)
    with far as (address, _), ThreadPoolExecutor(1) as pool:
        place.allow(f"{address}/*")
        there = elsewhere(image, address)
        for is_last in (False, True):
            with subprocess.Popen(ending_with_us(serve)) as process:
                with connected(socket_) as client:
                    asked = pool.submit(pull, client, there)
                    if is_last:
                        container = client.prepare("container", asked.result(60))
                        read = (container / "big").read_bytes()
                    else:
                        wait_until(are_asked_for)
                    process.kill()
                    if not is_last:
                        assert asked.exception(60)
        assert read == image.layers[0]["big"]


def test_what_is_told_of_it(place: Place, root: Path) -> None:
    """By the command, and by the exporter, which asks at the usual socket."""
    image = place.push("team/app", *some_layers())
    address = Path(os.environ[RUN_VARIABLE], "snapshotter.sock")
    with serving(root, address, place.options), connected(address) as client:
        pull(client, image)
        labels = image.labels(0) | {SNAPSHOT_REF: "sha256:" + 64 * "5"}
        assert ask_for(client, "ordinary", "", labels) is None
        client.commit("ordinary layer", "ordinary", labels=labels)
        command = [sys.executable, "-m", "btrfs_ublk.cli.main", "snapshotter"]
        words = run([*command, "status", "--socket", address], timeout_s=60).stdout
        assert f"{image.name}: 2 lazy layers, 1 ordinary\n" in words
        (sealed,) = ask(address).images
        assert f"sealed: {sealed['name']}, volume {sealed['volume']}, up, " in words
        assert "layers that did not arrive lazily (chain-id): 1\n" in words
        told = metrics_text()
        start = "btrfs_ublk_snapshotter"
        of_image = f'{{device="{sealed["volume"]}",image="{sealed["name"]}"}}'
        for line in (
            f'{start}_layers{{kind="lazy",reference="{image.name}"}} 2.0',
            f'{start}_layers{{kind="ordinary",reference="{image.name}"}} 1.0',
            f'{start}_fallbacks_total{{reason="chain-id"}} 1.0',
            f"{start}_is_up{of_image} 1.0",
            f"{start}_failed_reads{of_image} 0.0",
            f"{start}_ready_seconds{of_image} {sealed['ready_s']}",
        ):
            assert line in told.splitlines()
        assert sealed["data_bytes"] > BIG


def test_a_layer_upon_a_lazy_one_is_kept(place: Place, root: Path) -> None:
    image = place.push("team/app", *some_layers())
    with served(place, root) as client:
        top = pull(client, image)
        built = client.prepare("build", top)
        (built / "built").write_text("more")
        (built / "big").unlink()
        client.commit("mine", "build", labels={"a": "b"})
        running = client.prepare("running", "mine")
        (running / "state").write_text("kept")
    with served(place, root) as client:
        again = Path(client.call("Mounts", key="running").mounts[0].source)
        assert again == running
        assert (again / "state").read_text() == "kept"
        assert (again / "built").read_text() == "more"
        assert not (again / "big").exists()
        assert (again / "other").read_bytes() == image.layers[1]["other"]
        names = client.names()
        assert names["mine"] == "committed" and names["running"] == "active"
        drop(client, "running", "mine", top, client.info(top).parent)
    assert list_volumes() == []


def test_two_namespaces_and_two_images_share(place: Place, root: Path) -> None:
    lower, upper = some_layers()
    one = place.push("team/one", lower, upper)
    two = place.push("team/two", lower, {"etc/name": b"another\n"})
    with served(place, root) as client:
        top = pull(client, one)
        assert pull(client, one, who="b") == top
        # As containerd has it when the lower layer is there: only the rest is asked.
        shared = client.info(top).parent
        key = "a/9 top of two"
        assert ask_for(client, key, shared, two.labels(1)) == EXISTS
        container = client.prepare("container", key)
        assert (container / "etc/name").read_text() == "another\n"
        assert (container / "big").read_bytes() == lower["big"]
        assert len(list_volumes()) == 2
        drop(client, "container", key, top, shared)
        assert list_volumes() == []


def plain_labels(image: Image, number: int = 0) -> dict[str, str]:
    """What CRI has containerd say of an image that is not sealed."""
    labels = image.labels(number)
    return {MANIFEST_DIGEST: labels.pop(SEALED_IN), **labels}


def test_an_index_is_found_where_the_image_is(place: Place, root: Path) -> None:
    image = place.push_plain("team/app", *some_layers())
    digest = place.index(image)
    with served(place, root, indexes=True) as client:
        parent = ""
        for number, target in enumerate(image.chain):
            key = f"a/{number}"
            labels = plain_labels(image, number)
            assert ask_for(client, f"{key} {target}", parent, labels) == EXISTS
            (parent,) = client.names(f'labels."{SNAPSHOT_REF}"=={target}')
            assert state(root).images[0]["digest"] == digest
        container = client.prepare("container", parent)
        for files in image.layers:
            name = next(x for x in ("big", "other") if x in files)
            assert (container / name).read_bytes() == files[name]
        assert state(root).layers == {image.name: {"lazy": 2, "ordinary": 0}}
        assert state(root).fallbacks == {}
        drop(client, "container", parent, client.info(parent).parent)
        assert list_volumes() == []
    with served(place, root) as client:  # which does not look for it
        assert ask_for(client, "plain", "", plain_labels(image)) is None


def test_an_index_that_is_not_there_or_may_not_come(place: Place, root: Path) -> None:
    """One that is absent is not looked for again soon, and is no fallback. The digest
    of the image does not let one in."""
    image = place.push_plain("team/app", *some_layers())
    labels = plain_labels(image)
    public, _ = ec_key()
    (place.path / "etc/ours.pub").write_bytes(public)
    with served(place, root, indexes=True) as client:
        assert ask_for(client, "absent", "", labels) is None
        place.index(image)
        assert ask_for(client, "still absent", "", labels) is None
        assert state(root).fallbacks == {}
        away = labels | {IMAGE_REF: "127.0.0.1:1/team/app:1"}
        place.allow("*")
        assert ask_for(client, "away", "", away) is None
        assert state(root).fallbacks == {"registry": 1}
    place.allow("other.example.org/*")
    with served(place, root, indexes=True) as client:
        assert ask_for(client, "not allowed", "", labels) is None
        assert state(root).fallbacks == {}
    place.allow(keys='keys = ["ours.pub"]')
    with served(place, root, indexes=True) as client:
        assert ask_for(client, "not signed", "", labels) is None
        assert state(root).fallbacks == {"refused": 1}
        assert list_volumes() == []


def refusal(client: Client, labels: dict[str, str]) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        client.call("Prepare", key="refused", parent="", labels=labels)
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert list_volumes() == []
    return caught.value.details() or ""


def test_what_cannot_be_opened_is_unpacked_or_refused(place: Place, root: Path) -> None:
    """Each has its reason, and is counted by it."""
    image = place.push("team/app", *some_layers())
    another = place.push("team/another", *some_layers(2))
    labels = image.labels(0)
    public, signature = ec_key()
    (place.path / "etc/ours.pub").write_bytes(public)
    absent = "sha256:" + 64 * "5"
    signed = 'keys = ["ours.pub"]'
    # The reason, the policy's pattern and keys, and the labels.
    cases: list[tuple[str, str, str, dict[str, str]]] = [
        ("refused", "other.example.org/*", "", labels),
        # What pods name by its digest, root has not chosen.
        ("refused", "other.example.org/*", "", labels | {IMAGE_REF: by_digest(image)}),
        ("refused", "*", signed, labels),
        ("chain-id", "*", "", labels | {SNAPSHOT_REF: another.chain[0]}),
        # It is a layer of it, but not the first.
        ("chain-id", "*", "", labels | {SNAPSHOT_REF: image.chain[1]}),
        ("absent", "*", "", labels | {SEALED_IN: absent}),
        ("registry", "*", "", labels | {IMAGE_REF: "127.0.0.1:1/team/app:1"}),
        ("no-reference", "*", "", {k: labels[k] for k in (SEALED_IN, SNAPSHOT_REF)}),
        ("failed", "*", "", labels | {SEALED_IN: "nonsense"}),
    ]
    for number, (reason, pattern, keys, asked) in enumerate(cases):
        shutil.rmtree(place.path / "images", ignore_errors=True)
        place.allow(pattern, keys=keys)
        with served(place, root, require="sealed") as client:
            assert f"({reason})" in refusal(client, asked)
            assert client.names() == {} and list_volumes() == []
            assert state(root).fallbacks == {reason: 1}
        if number:
            continue
        with served(place, root) as client:
            assert ask_for(client, "unpacked", "", asked) is None
            assert client.names() == {"unpacked": "active"}
            assert state(root).fallbacks == {reason: 1}
            client.remove("unpacked")
            assert state(root).images == []
    place.allow("*", keys=signed)
    target = parse_reference(image.name)
    with open_repository(target, place.access) as repository:
        index = repository.document("1").digest
    sign(target, place.access, index, signature)
    with served(place, root) as client:
        pull(client, image)


def by_digest(image: Image) -> str:
    return image.name.rpartition(":")[0] + f"@{image.sealed}"


def test_ordinary_images_are_refused_if_all_have_to_be_lazy(
    place: Place, root: Path
) -> None:
    labels = {SNAPSHOT_REF: "sha256:" + 64 * "1"}
    with served(place, root, require="sealed") as client:
        assert ask_for(client, "ordinary", "", labels) is None
    with served(place, root, require="all") as client:
        assert "is in no sealed image" in refusal(client, labels)
        assert ask_for(client, "container", "", {}) is None


def test_where_an_image_is_without_its_reference(place: Place, root: Path) -> None:
    image = place.push("team/app", *some_layers())
    labels = image.labels(0)
    del labels[IMAGE_REF]
    wrong, right = (f"{place.registry.host}/team/{x}" for x in ("wrong", "app"))
    with served(place, root, repositories=[wrong, right]) as client:
        assert ask_for(client, "one", "", labels) == EXISTS
        assert state(root).images[0]["name"] == f"{right}@{image.sealed}"
        drop(client, "one")
    # What root has pulled is known.
    pull_image(parse_reference(image.name), place.access, ImageStore())
    place.allow("nothing")
    with served(place, root) as client:
        assert ask_for(client, "two", "", labels) == EXISTS
        drop(client, "two")
        # It is not removed, as it has another name.
        assert len(ImageStore().images()) == 1


@pytest.mark.data
def test_what_was_fetched_is_there_without_the_registry(
    place: Place, root: Path
) -> None:
    image = place.push("team/app", *some_layers())
    another = place.push("team/another", *some_layers(2))
    with served(place, root) as client:
        top = pull(client, image)
        container = client.prepare("container", top)
        assert (container / "big").read_bytes() == image.layers[0]["big"]
    (volume,) = list_volumes()
    down_volume(volume.name)  # as a reboot does
    place.stop_registry()
    with served(place, root) as client:
        client.call("Mounts", key="container")
        assert (container / "big").read_bytes() == image.layers[0]["big"]
        assert client.prepare("more", top).exists()
        assert ask_for(client, "unpacked", "", another.labels(0)) is None
        assert state(root).fallbacks == {"registry": 1}


@pytest.mark.data
def test_a_full_disk_is_said_and_leaves_nothing(
    place: Place, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No image can be opened where the disk of volumes is full, and one that is open is
    read on: what its cache cannot take is fetched."""
    image = place.push("team/app", *some_layers())
    disk = tmp_path / "disk"
    disk.mkdir()
    options = ["size=64m", "mode=700"]
    with mounted("tmpfs", disk, fs_type="tmpfs", options=options):
        monkeypatch.setenv(VOLUMES_VARIABLE, str(disk / "volumes"))
        hog = fill(disk)
        with served(place, root, require="sealed") as client:
            said = refusal(client, image.labels(0))
            assert "(failed)" in said and "is its disk full" in said
            assert state(root).fallbacks == {"failed": 1} and state(root).images == []
        hog.unlink()
        assert not list(disk.glob("volumes/snapshotter*"))
        with served(place, root) as client:
            container = client.prepare("container", pull(client, image))
            hog = fill(disk)
            assert (container / "big").read_bytes() == image.layers[0]["big"]
            assert (container / "other").read_bytes() == image.layers[1]["other"]
            hog.unlink()
        place.take_down()
        remove_volume(list_volumes()[0].name)


def test_none_waits_for_an_image_that_hangs(place: Place, root: Path) -> None:
    """A registry takes the connection and says nothing. The others come up meanwhile,
    and who asks for the same image gets the same."""
    images = [place.push(f"team/app{n}", *some_layers(n)) for n in range(3)]
    with socket.create_server(("127.0.0.1", 0)) as silent, ExitStack() as stack:
        client = stack.enter_context(served(place, root))
        hanging = elsewhere(images[0], f"127.0.0.1:{silent.getsockname()[1]}")
        hanging = replace(hanging, sealed="sha256:" + 64 * "7")
        pool = stack.enter_context(ThreadPoolExecutor(64))

        def first_layer(image: Image, number: int) -> Any:
            key = f"{image.sealed} {number}"
            return ask_for(client, key, "", image.labels(0))

        stuck = [pool.submit(first_layer, hanging, n) for n in range(20)]
        accepted, _ = silent.accept()
        stack.enter_context(accepted)
        asked = [pool.submit(first_layer, one, n) for one in images for n in range(5)]
        assert [each.result(60) for each in asked] == [EXISTS] * 15
        assert not any(each.done() for each in stuck)
        assert len(client.names()) == 3
        client.call("Cleanup")
        assert len(list_volumes()) == 3
        silent.close()
        accepted.close()
        assert [each.result(60) for each in stuck] == [None] * 20
        assert state(root).fallbacks == {"registry": 20}
