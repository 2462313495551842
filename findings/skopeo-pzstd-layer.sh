#!/usr/bin/env bash
# skopeo and podman cannot unpack a layer that pzstd compressed: "unexpected EOF".
#
# Versions: skopeo 1.9.3+ds1-1+b10, pzstd of zstd 1.5.4+dfsg2-5 (Debian 12); podman 4.3.1
# says the same. The code is alike in containers/image 5.37 and containers/storage 1.60.
# Why it surprises: the image is valid, its layer has the media type "tar+zstd", and
# `zstd -d` and containerd read the same bytes. pzstd, which comes with zstd, puts a
# skippable frame before each part; writers of seekable streams do so too. The media type
# is no help: the first four bytes decide, and those of a skippable frame are not known.
# So the layer counts as a plain tar, and the error speaks of a file that ends too early.
# It comes late, too: copies that unpack nothing work.
# Source: containers/storage, pkg/archive/archive.go, DetectCompression(), and
# containers/image, pkg/compression/compression.go, which has one prefix for each
# algorithm. containerd, pkg/archive/compression/compression.go, has zstdMatcher(), which
# knows the numbers of skippable frames (RFC 8878, 3.1.2).
#
# Output seen:
#   zstd: copied to a folder, unpacked
#   pzstd: copied to a folder, not unpacked: unexpected EOF
#
# As root, with Python and a network for apt. It fails when that behaviour has changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
chmod 755 "$work" && if id _apt >/dev/null 2>&1; then chown _apt "$work"; fi
apt-get -qq download skopeo=1.9.3+ds1-1+b10 zstd=1.5.4+dfsg2-5 \
    libgpgme11=1.18.0-3+deb12u1 libassuan0=2.5.5-5 libdevmapper1.02.1=2:1.02.185-2
for package in ./*.deb; do dpkg-deb -x "$package" root; done
export LD_LIBRARY_PATH=$work/root/usr/lib/x86_64-linux-gnu:$work/root/lib/x86_64-linux-gnu
echo '{"default": [{"type": "insecureAcceptAnything"}]}' >policy.json
skopeo() { timeout 60 root/usr/bin/skopeo --policy policy.json "$@"; }

cat >image.py <<'PY'
"""Write an OCI layout NAME of one layer: layer.tar, compressed as NAME.zst."""
import hashlib, json, os, sys

name = sys.argv[1]
os.makedirs(f"{name}/blobs/sha256")


def blob(data, kind):
    digest = hashlib.sha256(data).hexdigest()
    with open(f"{name}/blobs/sha256/{digest}", "wb") as file:
        file.write(data)
    kind = "application/vnd.oci.image." + kind
    return {"mediaType": kind, "digest": "sha256:" + digest, "size": len(data)}


diff_id = "sha256:" + hashlib.sha256(open("layer.tar", "rb").read()).hexdigest()
rootfs = {"type": "layers", "diff_ids": [diff_id]}
config = {"architecture": "amd64", "os": "linux", "rootfs": rootfs, "config": {}}
manifest = {
    "schemaVersion": 2,
    "config": blob(json.dumps(config).encode(), "config.v1+json"),
    "layers": [blob(open(name + ".zst", "rb").read(), "layer.v1.tar+zstd")],
}
manifest = blob(json.dumps(manifest).encode(), "manifest.v1+json")
manifest["annotations"] = {"org.opencontainers.image.ref.name": "tag"}
json.dump({"schemaVersion": 2, "manifests": [manifest]}, open(f"{name}/index.json", "w"))
json.dump({"imageLayoutVersion": "1.0.0"}, open(f"{name}/oci-layout", "w"))
PY
mkdir tree && echo text >tree/file
tar -cf layer.tar -C tree .
for tool in zstd pzstd; do
    "root/usr/bin/$tool" -q layer.tar -o "$tool.zst"
    python3 image.py "$tool"
    skopeo copy -q "oci:$tool:tag" "dir:$work/$tool-copy" && said="copied to a folder"
    store="[vfs@$work/$tool-store+$work/$tool-run]localhost/image:tag"
    if skopeo copy -q "oci:$tool:tag" "containers-storage:$store" 2>err; then
        said="$said, unpacked"
    else
        said="$said, not unpacked: $(grep -o 'unexpected EOF' err | sed -n 1p)"
    fi
    echo "$tool: $said" | tee -a seen
done
cat >wanted <<'END'
zstd: copied to a folder, unpacked
pzstd: copied to a folder, not unpacked: unexpected EOF
END
diff wanted seen
