#!/usr/bin/env bash
# One image, two trees in containerd: with the snapshotter "overlayfs" a layer's lib/new
# hides all of the lower layer's /lib, with "native" it joins it.
#
# Version: containerd 1.6.20~ds1-1+deb12u3 (Debian 12); the code is alike in 2.x. Seen on
# Linux 6.18.44.
# Why it surprises: the base has lib -> usr/lib, as all merged-usr distributions, and a
# layer that a build tool put on it has a file below lib/, and no entry for lib itself.
# Chain ID and digests are the same for both snapshotters, and both report success. But
# overlayfs ends up with a directory /lib in which the new file is alone: the dynamic
# linker is gone, and the container's programs "do not exist". With native, which copies,
# the link is followed and all is well.
# Source: containerd, diff/apply/apply_linux.go, apply(): for a mount of type overlay,
# archive.Apply() writes into the upper directory alone, where the link is not; for
# others it writes into the mounted tree, where fs.RootPath() follows it. mkparent() in
# archive/tar.go takes the mode of lib from the lower layers, not that it is a link.
#
# Output seen:
#   native: lib is a symbolic link, in it: libc new
#   overlayfs: lib is a directory, in it: new
#
# As root, with Python and a network for apt. It fails when that behaviour has changed.
set -euo pipefail
work=$(mktemp -d)
server=
# shellcheck disable=SC2317  # it is reached by the trap
finish() {
    if mountpoint -q "$work/mnt"; then umount "$work/mnt"; fi
    if [ -n "$server" ] && kill "$server"; then wait "$server" || true; fi
    rm -rf "$work"
}
trap finish EXIT
cd "$work"
chmod 755 "$work" && if id _apt >/dev/null 2>&1; then chown _apt "$work"; fi
apt-get -qq download containerd=1.6.20~ds1-1+deb12u3
dpkg-deb -x ./containerd_*.deb root

cat >config.toml <<END
version = 2
root = "$work/images"
state = "$work/state"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
  address = "$work/socket"
[plugins."io.containerd.gc.v1.scheduler"]  # nothing is collected meanwhile
  mutation_threshold = 1000000
  startup_delay = "1h"
END
root/usr/bin/containerd --config config.toml >log 2>&1 &
server=$!
for _ in $(seq 100); do
    if [ -S socket ]; then break; fi
    sleep 0.1
done

cat >image.py <<'PY'
"""Write an OCI layout: usr/lib/libc and lib -> usr/lib, and a layer with lib/new."""
import hashlib, io, json, os, tarfile

os.makedirs("image/blobs/sha256")


def blob(data, kind):
    digest = hashlib.sha256(data).hexdigest()
    with open(f"image/blobs/sha256/{digest}", "wb") as file:
        file.write(data)
    kind = "application/vnd.oci.image." + kind
    return {"mediaType": kind, "digest": "sha256:" + digest, "size": len(data)}


def layer(**members):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, target in members.items():
            info = tarfile.TarInfo(name)
            if target:
                info.type, info.linkname = tarfile.SYMTYPE, target
            archive.addfile(info)
    return blob(stream.getvalue(), "layer.v1.tar")


layers = [layer(**{"usr/lib/libc": "", "lib": "usr/lib"}), layer(**{"lib/new": ""})]
rootfs = {"type": "layers", "diff_ids": [each["digest"] for each in layers]}
config = {"architecture": "amd64", "os": "linux", "rootfs": rootfs, "config": {}}
config = blob(json.dumps(config).encode(), "config.v1+json")
manifest = {"schemaVersion": 2, "config": config, "layers": layers}
manifest = blob(json.dumps(manifest).encode(), "manifest.v1+json")
index = {"schemaVersion": 2, "manifests": [manifest]}
json.dump(index, open("image/index.json", "w"))
json.dump({"imageLayoutVersion": "1.0.0"}, open("image/oci-layout", "w"))
chain = " ".join(rootfs["diff_ids"])
print("sha256:" + hashlib.sha256(chain.encode()).hexdigest())
PY
chain=$(python3 image.py)
index=sha256:$(sha256sum image/index.json | cut -d ' ' -f 1)
tar -cf image.tar -C image .

mkdir mnt
for name in native overlayfs; do
    ctr() { timeout 60 root/usr/bin/ctr --address "$work/socket" --namespace "$name" "$@"; }
    ctr namespaces create "$name"
    ctr namespaces label "$name" "containerd.io/defaults/snapshotter=$name"
    ctr images import --no-unpack --index-name test/image:1 image.tar >/dev/null
    snapshots() { ctr snapshots --snapshotter "$name" "$@"; }
    snapshots unpack "$index" >/dev/null
    snapshots view seen "$chain" >/dev/null
    snapshots mounts "$work/mnt" seen >mounts.sh
    sh mounts.sh
    kind=$(stat -c %F mnt/lib)
    files=$(cd mnt/lib/ && echo *)
    umount mnt
    echo "$name: lib is a $kind, in it: $files" | tee -a seen
done
cat >wanted <<'END'
native: lib is a symbolic link, in it: libc new
overlayfs: lib is a directory, in it: new
END
diff wanted seen
