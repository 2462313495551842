/* SPDX-License-Identifier: MIT */
/* Opens images and devices for those who only look, but want what they see to hold still. */
#ifndef TOOLS_UNMOUNTED_H
#define TOOLS_UNMOUNTED_H

/*
 * Open a regular file or a block device, read-only. A device must not be mounted or held otherwise
 * (O_EXCL), and no loop device over a file be part of a mounted btrfs. Returns a descriptor, or a
 * negative errno after a message: -EBUSY, -EINVAL for what is neither file nor device, or what
 * open(2) says.
 */
int open_unmounted(const char *path);

#endif
