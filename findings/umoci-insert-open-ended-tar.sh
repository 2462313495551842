#!/usr/bin/env bash
# `umoci insert` writes layers that tar and Python cannot read, and umoci and skopeo can.
#
# Version: umoci 0.4.7+ds-3+b7 (Debian 12; upstream mended it in 0.5.0). GNU tar 1.34,
# Python 3.11.
# Why it surprises: the layer's digest, size and diff ID are right, and the container
# tools, written in Go, take the image. The tar stream in it just stops after the
# last byte of the last file: no padding to 512 bytes, no end of archive. Readers that
# take whole blocks (tar, Python's tarfile) fail at the end, and GNU tar then has made
# the last file, but with 0 bytes. It shows where such an image leaves Go: a script that
# scans layers, a builder that unpacks with tar. Images made so stay so, as their digests
# include it; a reader has to take them.
# Source: umoci 0.4.7, oci/layer/generate.go: GenerateInsertLayer() does not close its
# tar.Writer; GenerateLayer(), for `repack`, does. Go's archive/tar takes the end of the
# stream at such a place for the end of the archive.
#
# Output seen:
#   length of the layer's tar: 518 = 512 + 6
#   umoci unpacks 6 bytes, skopeo copies it
#   GNU tar: exit status 2, file of 0 bytes; Python: ReadError
#
# With Python and a network for apt. It fails when that behaviour has changed.
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
umoci() { timeout 60 root/usr/bin/umoci "$@" 2>/dev/null; }

echo hello >file
umoci init --layout image
umoci new --image image:tag
umoci insert --image image:tag file /file

cat >layer.py <<'PY'
import gzip, json, tarfile


def blob(descriptor):
    with open("image/blobs/" + descriptor["digest"].replace(":", "/"), "rb") as file:
        return file.read()


with open("image/index.json") as file:
    manifest = json.loads(blob(json.load(file)["manifests"][0]))
with open("layer.tar", "wb") as file:
    file.write(gzip.decompress(blob(manifest["layers"][0])))
try:
    print(tarfile.open("layer.tar").getnames())
except tarfile.ReadError:
    print("ReadError")
PY
python=$(timeout 60 python3 layer.py)
length=$(stat -c %s layer.tar)
mkdir tree
status=0
tar -xf layer.tar -C tree 2>/dev/null || status=$?

umoci unpack --rootless --image image:tag bundle
store="[vfs@$work/store+$work/run]localhost/image:tag"
copied="skopeo copies it"
timeout 60 root/usr/bin/skopeo --policy policy.json copy -q oci:image:tag \
    "containers-storage:$store" || copied="skopeo does not copy it"
{
    echo "length of the layer's tar: $length = 512 + $((length - 512))"
    echo "umoci unpacks $(stat -c %s bundle/rootfs/file) bytes, $copied"
    echo "GNU tar: exit status $status, file of $(stat -c %s tree/file) bytes; Python: $python"
} | tee seen
cat >wanted <<'END'
length of the layer's tar: 518 = 512 + 6
umoci unpacks 6 bytes, skopeo copies it
GNU tar: exit status 2, file of 0 bytes; Python: ReadError
END
diff wanted seen
