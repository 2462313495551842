/* SPDX-License-Identifier: MIT */
/* Opens images and devices that are about to be changed, unless they are in use. */
#pragma once

/*
 * Opens a regular file, or a block device, for reading and writing. A device must not be mounted or
 * otherwise held (O_EXCL), a file must not back a loop device, and neither may be locked (flock) by
 * another run. Returns a descriptor, or a negative errno after a message: -EBUSY, -EINVAL for
 * anything that is neither file nor device, or that of open(2).
 */
int open_exclusive(const char *path);
