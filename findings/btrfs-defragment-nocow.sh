#!/usr/bin/env bash
# `btrfs filesystem defragment -czstd` of a NOCOW file compresses nothing, writes all of
# it anew, undoes its reflinks, and ends with status 0.
#
# Version: btrfs-progs 6.2-1+deb12u2 (Debian 12); seen on Linux 6.18.44.
# Why it surprises: a file with `chattr +C` cannot be compressed, and setting the property
# ("chattr +c", "property set") says so: EINVAL. defragment takes the order. -c has each
# extent rewritten, also one that is in one piece and large (without -c such a file is
# passed over), and when the data is written the flag is dropped. So for a disk image
# that shares its blocks with clones, an attempt to save space doubles what it takes,
# without an error or a warning.
# Source: fs/btrfs/ioctl.c, btrfs_ioctl_defrag(), checks the flags, not the inode, and sets
# the size up to which extents are rewritten to the maximum. fs/btrfs/inode.c,
# btrfs_run_delalloc_range(), then compresses only where btrfs_inode_can_compress() says
# so, which is not the case for NODATACOW, and writes plain data.
#
# Output seen:
#   before: 1 extent, shared with its clone: yes
#   defragment: status 0, shared: yes
#   defragment -czstd: status 0, moved: yes, shared: no, compressed: no
#   space used: 32 MiB more
#
# As root, with a network for apt. It fails when that behaviour has changed.
set -euo pipefail
work=$(mktemp -d)
loop=
# shellcheck disable=SC2317  # it is reached by the trap
finish() {
    if mountpoint -q "$work/mnt"; then umount "$work/mnt"; fi
    if [ -n "$loop" ]; then losetup --detach "$loop"; fi
    rm -rf "$work"
}
trap finish EXIT
cd "$work"
chmod 755 "$work" && if id _apt >/dev/null 2>&1; then chown _apt "$work"; fi
apt-get -qq download btrfs-progs=6.2-1+deb12u2 e2fsprogs=1.47.0-2+b2
for package in ./*.deb; do dpkg-deb -x "$package" root; done
export PATH=$work/root/bin:$work/root/sbin:$work/root/usr/bin:$work/root/usr/sbin:$PATH

truncate -s 512M disk && mkdir mnt
mkfs.btrfs -q disk >/dev/null
loop=$(losetup --find --show disk)
mount "$loop" mnt
touch mnt/file mnt/clone
chattr +C mnt/file mnt/clone
head -c 32M /dev/zero | tr '\0' a >mnt/file
sync -f mnt
cp --reflink=always mnt/file mnt/clone
sync -f mnt

flag() { if filefrag -v mnt/file | grep -q "$1"; then echo yes; else echo no; fi; }
place() { filefrag -v mnt/file | awk '$1 == "0:" { print $4 }'; }
used() { btrfs filesystem df --raw mnt | sed -n 's/^Data.*used=//p'; }
status=0
uname -r
{
    extents=$(filefrag mnt/file | grep -o '[0-9]* extents\? found')
    echo "before: ${extents% found}, shared with its clone: $(flag shared)"
    timeout 60 btrfs filesystem defragment mnt/file >/dev/null || status=$?
    sync -f mnt
    echo "defragment: status $status, shared: $(flag shared)"
    before=$(place)
    space=$(used)
    timeout 60 btrfs filesystem defragment -czstd mnt/file >/dev/null || status=$?
    sync -f mnt
    moved=no
    if [ "$(place)" != "$before" ]; then moved=yes; fi
    echo "defragment -czstd: status $status, moved: $moved, shared: $(flag shared)," \
        "compressed: $(flag encoded)"
    echo "space used: $((($(used) - space) >> 20)) MiB more"
} | tee seen
cat >wanted <<'END'
before: 1 extent, shared with its clone: yes
defragment: status 0, shared: yes
defragment -czstd: status 0, moved: yes, shared: no, compressed: no
space used: 32 MiB more
END
diff wanted seen
