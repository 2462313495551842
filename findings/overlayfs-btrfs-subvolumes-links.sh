#!/usr/bin/env bash
# overlayfs over two btrfs subvolumes shows two files as one: tar and cp -a copy the content
# of the one under the name of the other.
#
# Versions: btrfs-progs 6.2-1+deb12u2, tar 1.34+dfsg-1.2+deb12u1, coreutils 9.1-1 (Debian
# 12); seen on Linux 6.18.44.
# Why it surprises: the kernel's documentation promises, where all layers are on one file
# system, one device number, and inode numbers that are unique. On btrfs each subvolume
# counts from 257, and has a device number of its own to tell its files from those of
# others. overlayfs replaces that by its own, and leaves the inode numbers. So a layer
# in a subvolume of its own, over another one, has files with the same numbers, and
# what looks for hard links (tar, cp -a, rsync -H, du) takes the first for the second, without
# an error. It takes no more than two links: Debian's perl, git and e2fsprogs have some.
# A lower directory that has a subvolume in it is the same. "xino=on" changes nothing.
# Source: fs/overlayfs/inode.c, ovl_map_dev_ino(): with ovl_same_fs(), which compares super
# blocks, st_dev is that of the overlay and st_ino stays. A btrfs has one super block.
# Documentation/filesystems/overlayfs.rst, "Inode properties".
#
# Output seen (the file "a" in one layer has "one", "b" in the other one "two"):
#   in btrfs: two files; in the overlay: one file
#   read in the overlay: a one, b two
#   unpacked from tar: a one, b one
#   copied by cp -a: a one, b one
#
# As root, with a network for apt. It fails when that behaviour has changed.
set -euo pipefail
work=$(mktemp -d)
# shellcheck disable=SC2317  # it is reached by the trap
finish() {
    for place in "$work/overlay" "$work/btrfs"; do
        if mountpoint -q "$place"; then umount "$place"; fi
    done
    rm -rf "$work"
}
trap finish EXIT
cd "$work"
chmod 755 "$work" && if id _apt >/dev/null 2>&1; then chown _apt "$work"; fi
apt-get -qq download btrfs-progs=6.2-1+deb12u2 tar=1.34+dfsg-1.2+deb12u1 coreutils=9.1-1
for package in ./*.deb; do dpkg-deb -x "$package" root; done
export PATH=$work/root/bin:$work/root/sbin:$PATH

mkdir btrfs overlay unpacked copied
truncate -s 256M disk
mkfs.btrfs -q disk >/dev/null
mount -o loop disk btrfs
for layer in one two; do btrfs -q subvolume create "btrfs/$layer"; done
echo one >btrfs/one/a && ln btrfs/one/a btrfs/one/a2
echo two >btrfs/two/b && ln btrfs/two/b btrfs/two/b2
mount -t overlay overlay -o lowerdir=btrfs/two:btrfs/one overlay

files() { if [ "$(stat -c %d:%i "$@" | sort -u | wc -l)" = 1 ]; then echo one file; else echo two files; fi; }
shown() { echo "a $(cat "$1/a"), b $(cat "$1/b")"; }
tar -C overlay -c . | tar -C unpacked -x
cp -a overlay/. copied/
uname -r
{
    echo "in btrfs: $(files btrfs/one/a btrfs/two/b); in the overlay: $(files overlay/a overlay/b)"
    echo "read in the overlay: $(shown overlay)"
    echo "unpacked from tar: $(shown unpacked)"
    echo "copied by cp -a: $(shown copied)"
} | tee seen
cat >wanted <<'END'
in btrfs: two files; in the overlay: one file
read in the overlay: a one, b two
unpacked from tar: a one, b one
copied by cp -a: a one, b one
END
diff wanted seen
