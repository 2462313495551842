/* SPDX-License-Identifier: MIT */
/* The loop devices of all namespaces, and the devices of all mounted btrfs, as sysfs lists them. */
#pragma once

#include <limits.h>

/*
 * Calls `each` for loop devices that may have a file, until it returns something else than 0.
 * Returns that, or a negative errno after a message where they cannot be listed. NB: not with
 * glob(), which frees memory twice when memory is short (glibc 2.36).
 */
int loops_each(int (*each)(void *context, unsigned number), void *context);
/*
 * Returns 1 when a mounted btrfs has the block device of that name, with its entry in `entry`; 0 when none has; or
 * a negative errno after a message.
 */
int btrfs_has_device(const char *device, char entry[static PATH_MAX]);
