#!/usr/bin/env bash
# A whiteout deletes a file of its own layer in podman's store, and spares it in umoci.
#
# Versions: skopeo 1.9.3+ds1-1+b10, umoci 0.4.7+ds-3+b7 (Debian 12). The code of
# containers/storage is the same in 1.60 (development).
# Why it surprises: the OCI image specification says that whiteouts apply to lower layers
# only, and asks (SHOULD, not MUST) that they come first. A layer that replaces a directory
# or a file and lists the whiteout after what is new, as a builder that appends does, is
# valid: one digest, two trees. containers/storage (podman, skopeo, CRI-O) deletes the
# new file without a word. It does keep it where the whiteout is an opaque one; and where
# the whiteout names a directory of the same layer, it fails with an error about a time.
# Source: containers/storage, pkg/archive/diff.go, UnpackLayer(): the branch for opaque
# whiteouts asks unpackedPaths, the one for others calls os.RemoveAll() at once; times of
# directories are set after the loop, also of those that are gone. umoci,
# oci/layer/tar_extract.go, UnpackEntry(): upperPaths is asked for both.
#
# Output seen:
#   d/new, then d/.wh.new: umoci keeps d/new, skopeo drops it
#   d/new, then d/.wh..wh..opq: umoci keeps d/new, skopeo keeps it
#   d/new, then .wh.d: umoci keeps d/new, skopeo fails: chtimes /d: no such file or directory
#
# As root, with Python and a network for apt. It fails when that behaviour has changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
chmod 755 "$work" && if id _apt >/dev/null 2>&1; then chown _apt "$work"; fi
apt-get -qq download umoci=0.4.7+ds-3+b7 skopeo=1.9.3+ds1-1+b10 \
    libgpgme11=1.18.0-3+deb12u1 libassuan0=2.5.5-5 libdevmapper1.02.1=2:1.02.185-2
for package in ./*.deb; do dpkg-deb -x "$package" root; done
export LD_LIBRARY_PATH=$work/root/usr/lib/x86_64-linux-gnu:$work/root/lib/x86_64-linux-gnu
echo '{"default": [{"type": "insecureAcceptAnything"}]}' >policy.json

cat >image.py <<'PY'
"""Write an OCI layout: a layer with d/old, and one with d/new and then a whiteout."""
import hashlib, io, json, os, sys, tarfile

name, whiteout = sys.argv[1:]
os.makedirs(f"{name}/blobs/sha256")


def blob(data, kind):
    digest = hashlib.sha256(data).hexdigest()
    with open(f"{name}/blobs/sha256/{digest}", "wb") as file:
        file.write(data)
    kind = "application/vnd.oci.image." + kind
    return {"mediaType": kind, "digest": "sha256:" + digest, "size": len(data)}


def layer(*members):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for member in members:
            info = tarfile.TarInfo(member)
            if member == "d":
                info.type, info.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(info)
    return blob(stream.getvalue(), "layer.v1.tar")


layers = [layer("d", "d/old"), layer("d", "d/new", whiteout)]
rootfs = {"type": "layers", "diff_ids": [each["digest"] for each in layers]}
config = {"architecture": "amd64", "os": "linux", "rootfs": rootfs, "config": {}}
config = blob(json.dumps(config).encode(), "config.v1+json")
manifest = {"schemaVersion": 2, "config": config, "layers": layers}
manifest = blob(json.dumps(manifest).encode(), "manifest.v1+json")
manifest["annotations"] = {"org.opencontainers.image.ref.name": "tag"}
json.dump({"schemaVersion": 2, "manifests": [manifest]}, open(f"{name}/index.json", "w"))
json.dump({"imageLayoutVersion": "1.0.0"}, open(f"{name}/oci-layout", "w"))
PY
fate() { if [ -e "$1" ]; then echo "keeps $2"; else echo "drops $2"; fi; }
number=0
for whiteout in d/.wh.new d/.wh..wh..opq .wh.d; do
    number=$((number + 1))
    python3 image.py "$number" "$whiteout"
    timeout 60 root/usr/bin/umoci unpack --rootless --image "$number:tag" "$number/u" 2>err
    said="umoci $(fate "$number/u/rootfs/d/new" d/new)"
    store="[vfs@$work/$number/store+$work/$number/run]localhost/image:tag"
    if timeout 60 root/usr/bin/skopeo --policy policy.json copy -q "oci:$number:tag" \
        "containers-storage:$store" 2>err; then
        # The upper layer is the one that has a parent.
        top=$(python3 -c 'import json, sys
print([x["id"] for x in json.load(open(sys.argv[1])) if x.get("parent")][0])' \
            "$number/store/vfs-layers/layers.json")
        said="$said, skopeo $(fate "$number/store/vfs/dir/$top/d/new" it)"
    else
        reason=$(grep -o 'chtimes /d: no such file or directory' err | sed -n 1p)
        said="$said, skopeo fails: $reason"
    fi
    echo "d/new, then $whiteout: $said" | tee -a seen
done
cat >wanted <<'END'
d/new, then d/.wh.new: umoci keeps d/new, skopeo drops it
d/new, then d/.wh..wh..opq: umoci keeps d/new, skopeo keeps it
d/new, then .wh.d: umoci keeps d/new, skopeo fails: chtimes /d: no such file or directory
END
diff wanted seen
