/* SPDX-License-Identifier: MIT */
/*
 * Detects sources that are on the device that we serve. Such a file could only be read by waiting
 * for ourselves. Any thread that sees the host's files may call this.
 */
#pragma once

#include <sys/types.h>

#include "base/error.h"

/*
 * Sets the device that this process serves: st_rdev of a block device, or st_dev of a file system
 * (the fuse front end). 0 means that there is none yet.
 */
void dependence_set_own(dev_t own);

/*
 * Checks whether the file that `fd` refers to is on this server's own device: directly, or through
 * btrfs with several devices, partitions, device mapper, RAID, and loop devices on files. Returns
 * 0, or -EDEADLK with the error filled in, which names `path`. What lies below network file
 * systems, overlays and other FUSE servers cannot be seen. Waits for nothing but the kernel's own
 * tables.
 */
int dependence_check(int fd, const char *path, struct error *error);
