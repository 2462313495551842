/* SPDX-License-Identifier: MIT */
/*
 * The read path must not depend on what it backs: a file on a file system that our own device is part
 * of would be read by waiting for ourselves. Any thread that sees the host's files.
 */
#ifndef LAZY_DEPENDENCE_H
#define LAZY_DEPENDENCE_H

#include <sys/types.h>

#include "lazy/complaint.h"

/*
 * The device that this process serves: of a block device st_rdev, of a file system (the fuse front end)
 * st_dev. 0: there is none yet.
 */
void dependence_set_own(dev_t own);

/*
 * Whether what `fd` is open on stands on our own device: directly, or through btrfs with several
 * devices, partitions, device mapper, RAID, and loop devices on files. Returns 0, or -EDEADLK with the
 * complaint filled in, which names `path`. What stands below network file systems, overlays and FUSE
 * servers of others cannot be seen. May wait for nothing but the kernel's own tables.
 */
int dependence_check(int fd, const char *path, struct complaint *complaint);

#endif
