#!/usr/bin/env bash
# In an archive that was appended to, ratarmount shows under a hard link the content that its target
# got later: `tar -x` gives the old one.
#
# Version: ratarmount 1.3.0 with ratarmountcore 0.11.1 (PyPI); archives of GNU tar 1.34.
# Why it surprises: `tar -r` and `tar -u` are how archives are kept up to date, and a later member
# replaces an earlier one of its name: unlink, then write. A hard link that was stored before the
# change keeps the old content, as in the file system that the archive is of. ratarmount knows all
# versions of a name, and shows old ones on request (file.versions/1), so one expects the link to
# lead to the version that was there. It leads to the name, and thus to the newest: a copy that was
# kept by `ln` before editing is shown with the content after it, and diff finds no difference.
# Source: ratarmountcore/mountsource/compositing/versioning.py, _resolve_hard_links(): the version of
# the target is 0, the newest, unless the link has the name of its target.
#
# Output seen:
#   tar: file=new link=old
#   ratarmount: file=new link=new, the first version of file: old
#
# As root or with fusermount, with Python, GNU tar, FUSE, and a network for pip. It fails when that
# has changed.
set -euo pipefail
work=$(mktemp -d)
# shellcheck disable=SC2317  # it is reached by the trap
finish() {
    if mountpoint -q "$work/mnt"; then umount "$work/mnt"; fi
    rm -rf "$work"
}
trap finish EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip -q install ratarmount==1.3.0 ratarmountcore==0.11.1 mfusepy==3.1.1

mkdir tree unpacked mnt
echo old >tree/file
ln tree/file tree/link
tar -C tree -cf archive.tar file link
echo new >tree/changed
mv tree/changed tree/file
tar -C tree -rf archive.tar file

tar -C unpacked -xf archive.tar
timeout 60 venv/bin/ratarmount --index-file :memory: archive.tar mnt >log
first=$(cat mnt/file.versions/1)
{
    echo "tar: file=$(cat unpacked/file) link=$(cat unpacked/link)"
    echo "ratarmount: file=$(cat mnt/file) link=$(cat mnt/link), the first version of file: $first"
} | tee seen
cat >wanted <<'TEXT'
tar: file=new link=old
ratarmount: file=new link=new, the first version of file: old
TEXT
diff wanted seen
