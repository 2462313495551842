/* SPDX-License-Identifier: MIT */
/* Opens images and devices that are about to be changed: only if nobody else uses them. */
#ifndef TOOLS_EXCLUSIVE_H
#define TOOLS_EXCLUSIVE_H

/*
 * Open a regular file, or a block device, for reading and writing. A device must not be mounted
 * or held otherwise (O_EXCL), a file not be behind a loop device, and neither be locked (flock)
 * by another run. Returns a descriptor, or a negative errno after a message: -EBUSY, -EINVAL for
 * anything that is neither file nor device, or what open(2) says.
 */
int open_exclusive(const char *path);

#endif
