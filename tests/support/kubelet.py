"""A node of Kubernetes, as far as containers need one: networks of pods, a registry on
loopback that answers for all others, and plugins that bring logins."""

import json
import subprocess
from pathlib import Path

from support.containers import BUSYBOX, Host, write_image  # noqa: F401
from support.images import tar_of_entries
from support.lazy_images import Place, place_fixture
from support.registry import USER

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, ROOT

#: What a pod has of a network: its own loopback device, and an address that is nowhere.
_NETWORK = """\
#!/bin/sh
case $CNI_COMMAND in
ADD)
    nsenter --net="$CNI_NETNS" ip link set lo up || exit 1
    cat << END
{"cniVersion": "0.4.0",
 "interfaces": [{"name": "$CNI_IFNAME", "sandbox": "$CNI_NETNS"}],
 "ips": [{"version": "4", "interface": 0, "address": "192.0.2.1/32"}]}
END
    ;;
VERSION) echo '{"cniVersion": "0.4.0", "supportedVersions": ["0.3.1", "0.4.0"]}' ;;
esac
"""
_NETWORKS = {"cniVersion": "0.4.0", "name": "pods", "plugins": [{"type": "alone"}]}
_PASSWD = """\
root:x:0:0:root:/root:/bin/sh
www-data:x:33:33:www-data:/:/bin/sh
default-user:x:1000:1000::/:/bin/sh
"""
_GROUP = """\
root:x:0:
www-data:x:33:
default-user:x:1000:
group-defined-in-image:x:50000:default-user
"""
#: What an image does that waits for its end. It has no children, as others of its pod
#: would see them.
WAIT = ["/bin/tail", "-f", "/dev/null"]
#: Debian's busybox has none.
_PGREP = """\
#!/bin/sh
for x in /proc/[0-9]*; do
    read name 2> /dev/null < $x/comm && [ "$name" = "$1" ] && echo "${x#/proc/}"
done
"""


def write_network(host: Host) -> None:
    """Give pods a network, as containerd's configuration has it."""
    directory = host.work / "cni"
    directory.mkdir()
    for name in ("alone", "loopback"):
        plugin = directory / name
        plugin.write_text(_NETWORK)
        plugin.chmod(0o755)
    (directory / "10-pods.conflist").write_text(json.dumps(_NETWORKS))


def mirror_everything(host: Host, place: Place) -> None:
    """Have containerd ask the registry of the tests for the images of all others."""
    hosts = host.work / "certs.d/_default"
    hosts.mkdir(parents=True)
    (hosts / "hosts.toml").write_text(
        f'[host."https://{place.registry.host}"]\n'
        'capabilities = ["pull", "resolve"]\n'
        f'ca = "{place.registry.ca_file}"\n'
    )


def busybox_layer(more: str = "") -> bytes:
    """A tar of a small system, whose programs are busybox. ``more`` is in a file that
    tells images apart."""
    program = Path("/bin/busybox").read_bytes()
    listed = subprocess.run(["/bin/busybox", "--list"], capture_output=True, check=True)
    directories = ("bin", "dev", "etc", "home", "proc", "root", "sys", "www")
    applets = set(listed.stdout.decode().split()) - {"busybox", "pgrep"}
    return tar_of_entries(
        [
            *((name, None, 0o755) for name in directories),
            ("tmp", None, 0o1777),
            ("etc/passwd", _PASSWD.encode(), 0o644),
            ("etc/group", _GROUP.encode(), 0o644),
            ("www/index.html", b"It works!\n", 0o644),
            ("etc/image", more.encode(), 0o644),
            ("bin/busybox", program, 0o755),
            ("bin/pgrep", _PGREP.encode(), 0o755),
            *((f"bin/{applet}", "busybox", 0o644) for applet in sorted(applets)),
        ]
    )


#: A plugin that answers with what is in the file `answer`, and keeps what it was asked.
PLUGIN = (
    '#!/bin/sh\ncat >> "$HERE/asked" && echo >> "$HERE/asked" && cat "$HERE/answer"\n'
)


def configuration(path: Path, *images: str, **keys: object) -> Path:
    """Write a kubelet's configuration of one plugin, as YAML."""
    program = path / "plugin"
    program.write_text(PLUGIN)
    program.chmod(0o755)
    shown = "".join(f'  - "{one}"\n' for one in images)
    more = "".join(f"  {key}: {json.dumps(value)}\n" for key, value in keys.items())
    file = path / "providers.yaml"
    file.write_text(
        "apiVersion: kubelet.config.k8s.io/v1\nkind: CredentialProviderConfig\n"
        f"providers:\n- name: plugin\n  matchImages:\n{shown}"
        '  defaultCacheDuration: "12h"\n'
        "  apiVersion: credentialprovider.kubelet.k8s.io/v1\n"
        f"  env:\n  - name: HERE\n    value: {path}\n{more}"
    )
    return file


def answer(path: Path, password: str, *, pattern: str, duration: str = "1s") -> None:
    text = {
        "kind": "CredentialProviderResponse",
        "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
        "cacheKeyType": "Registry",
        "cacheDuration": duration,
        "auth": {
            pattern: {"username": USER, "password": password},
            "*.elsewhere.example.org": {"username": "no", "password": "no"},
        },
    }
    new = path / "answer.new"
    new.write_text(json.dumps(text))
    new.replace(path / "answer")


#: A registry that wants tokens, by HTTP.
place = place_fixture(ROOT, BTRFS, LOOP, FUSE, tls=False)
