"""BuildKit on our snapshotter: images that are built upon one that arrives lazily.

scripts/containerd builds it.
"""

import hashlib
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.containers import (  # noqa: F401
    BUSYBOX,
    TIMEOUT_S,
    Host,
    configuration,
    host,
    is_containerd_2,
    lazy_host,
    state,
)
from support.lazy_images import Place, place_fixture
from support.needs import inapplicable
from support.processes import ending_with_us, stop
from support.waiting import wait_until

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, ROOT, Program
from btrfs_ublk.base.process import run
from btrfs_ublk.units import MIB

pytestmark = [pytest.mark.device, pytest.mark.containerd2, pytest.mark.timeout(900)]

BUILDKITD, BUILDCTL = (
    Program(name, "of github.com/moby/buildkit: scripts/containerd builds it")
    for name in ("buildkitd", "buildctl")
)
#: BuildKit asks a snapshotter of this name for layers before it fetches them, and gives
#: it their annotations.
NAME = "overlaybd"
LIMIT_S = 400
_BIG = 24 * MIB
#: --network=none: the tests' networks are none of BuildKit's.
_DOCKERFILE = """\
FROM {base}
RUN --network=none cat /etc/name > /etc/copy; echo built > /etc/name; rm /etc/gone
COPY added /etc/added
COPY --from={plain} /etc/plain /etc/plain
"""


place = place_fixture(ROOT, BTRFS, LOOP, FUSE, BUSYBOX, BUILDKITD, BUILDCTL)


@contextmanager
def _buildkitd(host: Host, place: Place) -> Iterator[list[str | Path]]:  # noqa: F811
    """Run BuildKit beside containerd; yield the command line of its client."""
    work = host.work / "buildkit"
    work.mkdir()
    socket, log = work / "socket", work / "log"
    settings = work / "buildkitd.toml"
    registry = place.registry
    settings.write_text(
        f'[registry."{registry.host}"]\nca = ["{registry.ca_file}"]\n'
        "http = false\n"  # the default of loopback is another one
    )
    command = [
        *(*host.entering(), BUILDKITD.name, "--config", settings),
        *("--root", work / "root", "--addr", f"unix://{socket}"),
        *("--oci-worker=false", "--containerd-worker=true"),
        *("--containerd-worker-addr", host.work / "containerd.sock"),
        *("--containerd-worker-snapshotter", NAME, "--containerd-worker-net", "host"),
    ]
    with log.open("wb") as file:
        process = subprocess.Popen(ending_with_us(command), stdout=file, stderr=file)
    try:
        client = [*host.entering(), BUILDCTL.name, "--addr", f"unix://{socket}"]
        wait_until(
            lambda: not subprocess.run(
                [*client, "debug", "workers"], check=False
            ).returncode,
            timeout_s=TIMEOUT_S,
        )
        yield client
    finally:
        stop(process)
        print(log.read_text())  # shown when the test fails


@pytest.mark.parametrize("mode", ["snapshot", "overlay"])
def test_an_image_is_built_upon_one_that_arrives_lazily(
    place: Place, lazy_host: Host, mode: str  # noqa: F811
) -> None:
    """No layer of the base is fetched, neither for the build nor for its push, nor when
    the result is started where the base is."""
    host = lazy_host  # noqa: F811
    if not is_containerd_2():
        inapplicable("the ctr of containerd 1 fetches layers before it unpacks them")
    some = random.Random(1)
    lower = {
        "bin/sh": Path("/bin/busybox").read_bytes(),
        "etc/name": b"lower\n",
        "etc/gone": b"lower\n",
        "big": some.randbytes(_BIG),
    }
    upper = {"etc/name": b"upper\n", "other": some.randbytes(_BIG)}
    base = place.push("team/base", lower, upper)
    certs = host.trust(place.registry.host, place.registry.ca_file)
    host.name, host.config_options = NAME, ["--diff"]
    host.configuration = configuration("none").replace('"btrfs-ublk"', f'"{NAME}"')
    host.options = ["--ca-file", place.registry.ca_file, "--writable=256M"]
    host.options += ["--require-lazy", "--mode", mode]
    context = host.work / "context"
    context.mkdir()
    plain = place.push_plain("team/plain", {"etc/plain": b"plain\n"})  # is unpacked
    (context / "Dockerfile").write_text(
        _DOCKERFILE.format(base=base.name, plain=plain.name)
    )
    (context / "added").write_text("added\n")
    result = f"{place.registry.host}/team/result:1"

    def fetched() -> int:
        (image,) = state(host).images
        return int(image["fetched_bytes"])

    here = ("--snapshotter", NAME)
    pull = ("images", "pull", "--hosts-dir", certs, *here)
    with host.snapshotter(), host.containerd():
        with _buildkitd(host, place) as client:
            build = [
                *(*client, "build", "--frontend", "dockerfile.v0"),
                *("--local", f"context={context}", "--local", f"dockerfile={context}"),
            ]
            run(build, timeout_s=LIMIT_S)
            of_build = fetched()
            # A stored image has all its layers here.
            image = f"type=image,name={result},push=true,store=false"
            run([*build, "--output", image], timeout_s=LIMIT_S)
            of_push = fetched()
            print(of_build, of_push, state(host))
            host.ctr(*pull, base.name)
            host.ctr(*pull, result)
            said = host.ctr(
                *("run", "--rm", *here, result, "one", "/bin/sh", "-c"),
                "cat /etc/copy /etc/name /etc/added; ls /etc; sha256sum /big /other",
            )
        words = said.split()
        assert words[:3] == ["upper", "built", "added"]
        assert words[3:7] == ["added", "copy", "name", "plain"]
        for name, data in (("/big", lower["big"]), ("/other", upper["other"])):
            assert words[words.index(name) - 1] == hashlib.sha256(data).hexdigest()
        assert place.registry.downloads(*base.blobs) == 0
        assert state(host).fallbacks == {}
        assert of_build == of_push < _BIG
        for name in host.ctr("images", "list", "--quiet").split():
            host.ctr("images", "remove", "--sync", name)
