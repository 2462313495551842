"""A client of CRI, the interface between the kubelet and containerd, version 1.

Messages are dictionaries of field numbers (k8s.io/cri-api, runtime/v1/api.proto).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

TIMEOUT_S = 300  # of 200 containers, some wait that long for others
Message = Mapping[int, Any]

#: A containerd 1.6 with CRI, in {work}; it wants the name of a pause image.
CONFIGURATION = """
version = 2
root = "{work}/root"
state = "{work}/state"
[grpc]
  address = "{work}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "%(pause)s"
  restrict_oom_score_adj = true
  stream_server_port = "0"
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "{work}/cni"
  conf_dir = "{work}/cni"
[plugins."io.containerd.grpc.v1.cri".registry]
  config_path = "{work}/certs.d"
[plugins."io.containerd.grpc.v1.cri".containerd]
  snapshotter = "btrfs-ublk"
  disable_snapshot_annotations = false
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
"""


def _varint(number: int) -> bytes:
    some, rest = number & 0x7F, number >> 7
    return bytes([some | 0x80]) + _varint(rest) if rest else bytes([some])


def encode(message: Message) -> bytes:
    """Write a message: texts, numbers, messages, and lists of them."""
    made = b""
    for number, value in message.items():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, int):
                made += _varint(number << 3) + _varint(one)
                continue
            data = one.encode() if isinstance(one, str) else encode(one)
            made += _varint(number << 3 | 2) + _varint(len(data)) + data
    return made


def decode(data: bytes) -> dict[int, list[Any]]:
    """Read a message of numbers and bytes, which may be messages themselves."""
    found: dict[int, list[Any]] = {}
    rest = iter(data)

    def varint() -> int:
        number = shift = 0
        for byte in rest:
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        return number

    for byte in rest:
        key = byte  # no message here has more than 15 fields
        value: Any = varint()
        if key & 7 == 2:
            value = bytes(next(rest) for _ in range(value))
        found.setdefault(key >> 3, []).append(value)
    return found


class Cri:
    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def call(self, service: str, name: str, message: Message) -> dict[int, list[Any]]:
        path = f"/runtime.v1.{service}Service/{name}"
        call: Any = self._channel.unary_unary(path)
        return decode(call(encode(message), timeout=TIMEOUT_S))

    def is_ready(self) -> bool:
        """Whether it answers: the socket is there before CRI is."""
        try:
            self.call("Runtime", "Version", {})
        except grpc.RpcError:
            return False
        return True

    def info(self, container: str) -> dict[str, Any]:
        """Return what containerd says of a container: "pid", for example; {} when it
        does not run."""
        found = self.call("Runtime", "ContainerStatus", {1: container, 2: 1})
        running = 1
        if decode(found[1][0]).get(3) != [running]:
            return {}
        (entry,) = map(decode, found[2])
        made: dict[str, Any] = json.loads(entry[2][0])
        return made

    def pods(self) -> list[str]:
        """Return the IDs of all sandboxes, also of those that do not run."""
        found = self.call("Runtime", "ListPodSandbox", {})
        return [decode(each)[1][0].decode() for each in found.get(1, ())]

    def has_image(self, image: str) -> bool:
        return 1 in self.call("Image", "ImageStatus", {1: {1: image}})

    def pull(self, image: str) -> None:
        self.call("Image", "PullImage", {1: {1: image}})

    def remove_image(self, image: str) -> None:
        self.call("Image", "RemoveImage", {1: {1: image}})

    @contextmanager
    def pod(self, name: str) -> Iterator[str]:
        """Run a sandbox in the host's network, and yield its ID. It is removed at the
        end, with its containers."""
        identifier = self.start_pod(name)
        try:
            yield identifier
        finally:
            self.remove_pod(identifier)

    def start_pod(self, name: str) -> str:
        found = self.call("Runtime", "RunPodSandbox", {1: _pod(name)})
        return str(found[1][0].decode())

    def remove_pod(self, identifier: str) -> None:
        self.call("Runtime", "StopPodSandbox", {1: identifier})
        self.call("Runtime", "RemovePodSandbox", {1: identifier})

    def run(self, pod: str, image: str, name: str, *command: str) -> str:
        """Start a container in the pod of that name; return its ID."""
        container = {1: {1: name}, 2: {1: image}, 3: list(command)}
        asked = {1: pod, 2: container, 3: _pod("pod")}
        identifier = self.call("Runtime", "CreateContainer", asked)[1][0].decode()
        self.call("Runtime", "StartContainer", {1: identifier})
        return str(identifier)

    def remove(self, container: str) -> None:
        """Kill a container, if it runs, and remove it."""
        self.call("Runtime", "RemoveContainer", {1: container})

    def shell(self, container: str, script: str) -> str:
        """Run a script in a container that runs; return what it prints."""
        asked = {1: container, 2: ["/bin/sh", "-c", script], 3: TIMEOUT_S}
        done = self.call("Runtime", "ExecSync", asked)
        assert 3 not in done, (done[3], done.get(2))  # the exit status
        output: bytes = done.get(1, [b""])[0]
        return output.decode()


def _pod(name: str) -> Message:
    node, own = 2, 1  # whose namespaces: the host's network, and processes of its own
    return {
        1: {1: name, 2: f"uid of {name}", 3: "tests"},
        4: {1: "127.0.0.1"},  # a name server, so that no file of the host is read
        8: {2: {1: {1: node, 2: own}}},
    }


@contextmanager
def connected(socket: Path) -> Iterator[Cri]:
    # It may have been killed, and is asked again soon.
    again = [(f"grpc.{x}_reconnect_backoff_ms", 100) for x in ("initial", "min", "max")]
    with grpc.insecure_channel(f"unix:{socket}", options=again) as channel:
        grpc.channel_ready_future(channel).result(timeout=TIMEOUT_S)
        yield Cri(channel)
