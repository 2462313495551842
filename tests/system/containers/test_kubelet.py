"""A real kubelet, without a cluster: static pods from sealed images of a registry that
wants logins. scripts/containerd builds it.
"""

import hashlib
import http.client
import json
import os
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from support import containers as runtimes
from support import kubelet as logins
from support.containers import (  # noqa: F401
    BUSYBOX,
    TIMEOUT_S,
    Host,
    asks_again,
    connected,
    host,
    is_containerd_2,
    state,
)
from support.kubelet import WAIT, busybox_layer, write_network
from support.lazy_images import Place, some_layers
from support.needs import Need
from support.processes import ending_with_us, stop
from support.registry import PASSWORD
from support.waiting import wait_until

from btrfs_ublk.base.capabilities import Program
from btrfs_ublk.volume import list_volumes

pytestmark = [pytest.mark.device, pytest.mark.containerd2]

place = logins.place  # a fixture
KUBELET = Program("kubelet", "of k8s.io/kubernetes: scripts/containerd builds it")
NODE = "node"
#: What it would set otherwise, of the machine that runs the tests.
_SYSCTLS = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1000000,
    "kernel/keys/root_maxbytes": 25000000,
}


@contextmanager
def _cgroups() -> Iterator[str]:
    """Make a cgroup for all that the kubelet makes; yields its name."""
    name = f"btrfs-ublk-tests-{os.getpid()}"
    top = Path("/sys/fs/cgroup")
    tops = [top]
    if not (top / "cgroup.controllers").exists():  # cgroup v1: one for each controller
        tops = [x for x in top.iterdir() if x.name != "unified" and not x.is_symlink()]
    made = [each / name for each in tops]
    try:
        for path in made:
            path.mkdir()
            for kind in ("cpuset.cpus", "cpuset.mems"):
                if len(made) > 1 and (path / kind).exists():
                    (path / kind).write_text((path.parent / kind).read_text())
        yield f"/{name}"
    finally:
        # runc makes one in the other version's hierarchy, too.
        for path in [*made, top / "unified" / name]:
            for directory, _, _ in os.walk(path, topdown=False):
                os.rmdir(directory)


class Kubelet:
    """One on a host's containerd. It sees kernel settings as it wants them, and keeps
    what it cannot be told to keep elsewhere in directories that go with it."""

    def __init__(self, host: Host, cgroup: str, providers: Path) -> None:  # noqa: F811
        self._host = host
        self._work = host.work / "kubelet"
        self.pods = self._work / "root/pods"
        self.logs = self._work / "logs"
        self.manifests = self._work / "manifests"
        for path in (self._work, self.manifests, self.logs, self._work / "sysctl"):
            path.mkdir()
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self._port = int(taken.getsockname()[1])
        configuration = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "containerRuntimeEndpoint": f"unix://{host.work}/containerd.sock",
            "staticPodPath": str(self.manifests),
            "fileCheckFrequency": "1s",
            "syncFrequency": "1s",
            "podLogsDir": str(self.logs),
            "volumePluginDir": str(self._work / "plugins"),
            "address": "127.0.0.1",
            "port": self._port,
            "healthzPort": 0,
            "authentication": {
                "anonymous": {"enabled": True},
                "webhook": {"enabled": False},
            },
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": cgroup,
            "failCgroupV1": False,
            "failSwapOn": False,
            "makeIPTablesUtilChains": False,
            "oomScoreAdj": 0,
        }
        (self._work / "config.json").write_text(json.dumps(configuration))
        self._argv = [
            *(KUBELET.name, f"--config={self._work}/config.json"),
            *(f"--root-dir={self._work}/root", f"--cert-dir={self._work}/pki"),
            *(f"--hostname-override={NODE}", "--v=0"),
            f"--image-credential-provider-config={providers}",
            f"--image-credential-provider-bin-dir={providers.parent}",
        ]

    @contextmanager
    def running(self) -> Iterator[None]:
        lines = ["for x in /var/lib /var/log; do mount -t tmpfs tmpfs $x; done"]
        for name, value in _SYSCTLS.items():
            file = self._work / "sysctl" / name.replace("/", "-")
            file.write_text(f"{value}\n")
            lines.append(f"mount --bind {file} /proc/sys/{name}")
        script = "; ".join(["set -e", *lines, 'exec "$@"'])
        own = ["unshare", "--mount", "--propagation", "slave", "sh", "-c", script, "sh"]
        log = self._work / "log"
        with log.open("ab") as talk:
            self._process = process = subprocess.Popen(
                ending_with_us([*self._host.entering(), *own, *self._argv]),
                stdout=talk,
                stderr=talk,
            )
        try:
            yield
        finally:
            stop(process)
            print(log.read_text())  # shown when the test fails

    def ask(self, path: str, *, method: str = "GET") -> str:
        """Ask its server. Raises OSError, and ValueError for what it refuses."""
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE  # it has made its certificate itself
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self._port, context=context, timeout=TIMEOUT_S
        )
        try:
            connection.request(method, path)
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        if response.status != 200:
            raise ValueError(f"{path}: {response.status} {text}")
        return text

    def phases(self) -> dict[str, str]:
        """Return the phases of all pods, by name; none when it does not answer yet."""
        try:
            found = json.loads(self.ask("/pods"))["items"] or []
        except OSError:
            assert self._process.poll() is None, "it has ended: see its log"
            return {}
        return {x["metadata"]["name"]: x["status"].get("phase", "") for x in found}

    def start(self, name: str, image: str, script: str) -> None:
        """Have it run a pod of one container, "one"."""
        one: dict[str, Any] = {"name": "one", "image": image}
        one |= {"command": ["/bin/sh", "-c", script]}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "default"},
            "spec": {"containers": [one], "terminationGracePeriodSeconds": 1},
        }
        new = self._work / f"{name}.json"
        new.write_text(json.dumps(pod))
        new.rename(self.manifests / f"{name}.json")

    def shell(self, pod: str, script: str) -> str:
        # It splits a command at spaces, and the shell a line also at tabs.
        command = quote("/bin/sh -c " + script.replace(" ", "\t"))
        where = f"/run/default/{pod}-{NODE}/one"
        return self.ask(f"{where}?cmd={command}", method="POST")

    def said(self, pod: str) -> str:
        """Return the log of a pod's container, or "" before there is one."""
        try:
            return self.ask(f"/containerLogs/default/{pod}-{NODE}/one")
        except (OSError, ValueError):
            return ""


def test_static_pods_run_from_sealed_images(
    need: Need, place: Place, host: Host  # noqa: F811
) -> None:
    """Kubelet and snapshotter ask the same plugin for logins."""
    need(BUSYBOX, KUBELET)
    with ExitStack() as stack:
        (lower, upper), registry = some_layers(), place.registry
        pause = place.push("k8s/pause", busybox_layer("pause"), Cmd=WAIT)
        image = place.push("team/app", busybox_layer(), lower, upper)
        write_network(host)
        own = host.work / "certs.d" / registry.host
        own.mkdir(parents=True)
        (own / "hosts.toml").write_text(f'[host."http://{registry.host}"]\n')
        providers = logins.configuration(place.path, registry.host)
        logins.answer(place.path, PASSWORD, pattern=registry.host, duration="1h")
        host.configuration = runtimes.configuration(pause.name)
        host.options = ["--insecure", "--writable=256M", "--require-lazy=all"]
        host.options += ["--credential-provider-config", providers]
        host.options += ["--credential-provider-bin-dir", providers.parent]
        stack.callback(place.take_down)
        if not is_containerd_2():
            # As docs/how-to/containerd.md says it.
            there = host.work / "root/io.containerd.snapshotter.v1.btrfs-ublk"
            there.parent.mkdir()
            there.symlink_to(host.root)
        # Pods are in its cgroups, and stand on the snapshotter, also on the second one.
        cgroup = stack.enter_context(_cgroups())
        serving = stack.enter_context(ExitStack())
        snapshotter = serving.enter_context(host.snapshotter())
        stack.enter_context(host.containerd())
        cri = stack.enter_context(connected(host.work / "containerd.sock"))
        wait_until(cri.is_ready, timeout_s=TIMEOUT_S)
        # Of that one containerd has no login.
        registry.tokens.anonymous = True
        cri.pull(pause.name)
        registry.tokens.anonymous = False

        @stack.callback
        def remove_pods() -> None:  # of a test that has failed
            for pod in cri.pods():
                cri.remove_pod(pod)

        kubelet = Kubelet(host, cgroup, providers)
        stack.enter_context(kubelet.running())

        def digest(name: str) -> str:
            data = (lower | upper)[name]
            return f"{hashlib.sha256(data).hexdigest()}  /{name}\n"

        def runs(name: str, said: str) -> bool:
            running = kubelet.phases().get(f"{name}-{NODE}") == "Running"
            return running and kubelet.said(name) == said

        show = "cat /etc/name; sha256sum /big; while :; do sleep 1; done"
        expected = "upper\n" + digest("big")
        kubelet.start("first", image.name, show)
        wait_until(lambda: runs("first", expected), timeout_s=TIMEOUT_S)
        assert state(host).layers == {
            pause.name: {"lazy": 1, "ordinary": 0},
            image.name: {"lazy": 3, "ordinary": 0},
        }
        listed = host.ctr("--namespace", "k8s.io", "content", "list", "--quiet")
        assert listed and not set(listed.split()) & set(image.blobs)
        snapshotter.kill()
        snapshotter.wait(TIMEOUT_S)
        assert kubelet.shell("first", "sha256sum /other") == digest("other")
        kubelet.shell("first", "echo kept > /kept")
        (host.work / "snapshotter.sock").unlink()
        serving.enter_context(host.snapshotter())
        wait_until(lambda: asks_again(host), timeout_s=TIMEOUT_S)
        kubelet.start("second", image.name, show)
        wait_until(lambda: runs("second", expected), timeout_s=TIMEOUT_S)
        assert kubelet.shell("first", "cat /kept") == "kept\n"
        usage = json.loads(kubelet.ask("/stats/summary"))["node"]["runtime"]["imageFs"]
        disk = os.statvfs(host.root)
        assert usage["capacityBytes"] == disk.f_blocks * disk.f_frsize

        for manifest in kubelet.manifests.iterdir():
            manifest.unlink()
        wait_until(lambda: not cri.pods(), timeout_s=TIMEOUT_S)
        wait_until(lambda: not os.listdir(kubelet.pods), timeout_s=TIMEOUT_S)
        assert kubelet.phases() == {}
        for name in (image.name, pause.name):
            cri.remove_image(name)
        wait_until(lambda: not list_volumes(), timeout_s=TIMEOUT_S)
        wait_until(lambda: not os.listdir(host.root / "snapshots"), timeout_s=TIMEOUT_S)
        assert os.listdir(host.root / "images") == []
