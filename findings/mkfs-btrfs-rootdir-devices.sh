#!/usr/bin/env bash
# mkfs.btrfs --rootdir makes device nodes without a number, and fills holes with zeroes.
#
# Version: btrfs-progs 6.2-1+deb12u2 (Debian 12); 6.14 does the same, and the lines that
# set the number and the times are in the code of 6.19. Seen on Linux 6.18.44.
# Why it surprises: the tool copies owners, modes, hard links, xattrs, fifos and sockets,
# and ends with status 0, so an image of a root file system looks right. But dev/null and
# dev/console are there as devices 0:0 (opening them gives ENXIO), all times lose what
# is below a second, and a sparse file takes its whole
# length: a 64 MiB hole is 64 MiB of zeroes, in the image too.
# Source: btrfs-progs 6.2, mkfs/rootdir.c: fill_inode_item() sets rdev to 0 and the
# nanoseconds to 0, whatever stat() says; add_file_items() reads the file from its
# start to its end and does not look for holes.
#
# Output seen:
#   null: 1:3, in the image 0:0
#   times: .123456789, in the image .000000000
#   hole of 64 MiB: 0 MiB, in the image 64 MiB
#
# As root, with a network for apt. It fails when that behaviour has changed.
set -euo pipefail
work=$(mktemp -d)
# shellcheck disable=SC2317  # it is reached by the trap
finish() {
    if mountpoint -q "$work/mnt"; then umount "$work/mnt"; fi
    rm -rf "$work"
}
trap finish EXIT
cd "$work"
chmod 755 "$work" && if id _apt >/dev/null 2>&1; then chown _apt "$work"; fi
apt-get -qq download btrfs-progs=6.2-1+deb12u2
dpkg-deb -x ./btrfs-progs_*.deb root

mkdir tree mnt
mknod tree/null c 1 3
echo text >tree/times && touch -d '2020-01-01 00:00:00.123456789' tree/times
truncate -s 64M tree/hole
truncate -s 512M disk
timeout 120 root/sbin/mkfs.btrfs -q --rootdir tree disk >/dev/null
mount -o loop,ro disk mnt

uname -r
number() { stat -c '%Hr:%Lr' "$1/null"; }
fraction() { stat -c %y "$1/times" | grep -o '\.[0-9]*'; }
size() { echo "$(($(stat -c '%b * %B' "$1/hole") >> 20)) MiB"; }
{
    echo "null: $(number tree), in the image $(number mnt)"
    echo "times: $(fraction tree), in the image $(fraction mnt)"
    echo "hole of 64 MiB: $(size tree), in the image $(size mnt)"
} | tee seen
cat >wanted <<'END'
null: 1:3, in the image 0:0
times: .123456789, in the image .000000000
hole of 64 MiB: 0 MiB, in the image 64 MiB
END
diff wanted seen
