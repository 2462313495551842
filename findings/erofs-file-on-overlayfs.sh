#!/usr/bin/env bash
# Linux mounts an EROFS image straight from a file, but not from overlayfs or tmpfs: there
# it says "Block device required".
#
# Version: Linux 6.18.44 (the feature is there from 6.12 on); erofs-utils 1.5-1 (Debian 12)
# only makes the image.
# Why it surprises: mounts without a loop device were made for containers, and the root
# of a container, where an image then lies, is overlayfs. The error names what the feature
# does away with, the log stays empty, and the same call with the same bytes works in a
# volume, so one looks for a kernel without the feature. mount(8) of util-linux does not
# show it, as it makes a loop device by itself; programs that call mount(2) or fsmount(2)
# have to do that too when the error is ENOTBLK.
# Source: fs/erofs/super.c, erofs_fc_get_tree(): when there is no block device, the file
# is taken only if it is a regular one whose address space has read_folio; otherwise the
# error of the look-up, ENOTBLK, is what is returned. overlayfs (fs/overlayfs/inode.c)
# and tmpfs (mm/shmem.c) have no read_folio, as they read by other means.
#
# Output seen:
#   ext4: mounted
#   overlayfs on that ext4: Block device required
#   tmpfs: Block device required
#   overlayfs, by mount(8): mounted, from a loop device
#
# As root, with Python, on a kernel with CONFIG_EROFS_FS_BACKED_BY_FILE, and a network for
# apt. It fails when that behaviour has changed.
set -euo pipefail
work=$(mktemp -d)
# shellcheck disable=SC2317  # it is reached by the trap
finish() {
    for place in mnt overlay memory disk; do
        if mountpoint -q "$work/$place"; then umount "$work/$place"; fi
    done
    rm -rf "$work"
}
trap finish EXIT
cd "$work"
chmod 755 "$work" && if id _apt >/dev/null 2>&1; then chown _apt "$work"; fi
apt-get -qq download erofs-utils=1.5-1 liblz4-1=1.9.4-1
for package in ./*.deb; do dpkg-deb -x "$package" root; done
export LD_LIBRARY_PATH=$work/root/usr/lib/x86_64-linux-gnu

mkdir tree lower mnt overlay memory disk && echo text >tree/file
root/usr/bin/mkfs.erofs image tree >/dev/null
truncate -s 64M ext4 && mkfs.ext4 -q ext4
mount -o loop ext4 disk
mount -t tmpfs tmpfs memory
mkdir disk/upper disk/work
mount -t overlay -o "lowerdir=lower,upperdir=disk/upper,workdir=disk/work" overlay overlay
for place in disk overlay memory; do cp image "$place/image"; done

cat >mount.py <<'PY'
import ctypes, os, sys

libc = ctypes.CDLL(None, use_errno=True)
read_only = 1
failed = libc.mount(sys.argv[1].encode(), b"mnt", b"erofs", read_only, None)
print(os.strerror(ctypes.get_errno()) if failed else "mounted")
PY
direct() {
    python3 mount.py "$1/image"
    if mountpoint -q mnt; then umount mnt; fi
}
uname -r
{
    echo "ext4: $(direct disk)"
    echo "overlayfs on that ext4: $(direct overlay)"
    echo "tmpfs: $(direct memory)"
    mount -t erofs -o ro overlay/image mnt
    case $(findmnt -no SOURCE mnt) in
        /dev/loop*) echo "overlayfs, by mount(8): mounted, from a loop device" ;;
        *) echo "overlayfs, by mount(8): mounted, from the file" ;;
    esac
} | tee seen
cat >wanted <<'END'
ext4: mounted
overlayfs on that ext4: Block device required
tmpfs: Block device required
overlayfs, by mount(8): mounted, from a loop device
END
diff wanted seen
