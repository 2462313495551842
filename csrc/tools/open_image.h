/* SPDX-License-Identifier: MIT */
/* Opens images and devices, unless they are in use. */
#pragma once

/*
 * Opens a regular file or a block device, read-only, for programs that need the content not to
 * change. A device must not be mounted or otherwise held (O_EXCL), and a file must not back a loop
 * device that is part of a mounted btrfs. Returns a descriptor, or a negative errno after a
 * message: -EBUSY, -EINVAL for what is neither file nor device, or that of open(2).
 */
int open_unmounted(const char *path);
/*
 * The same for reading and writing: a file must not back any loop device, and neither file nor
 * device may be locked (flock) by another run.
 */
int open_exclusive(const char *path);
