/* SPDX-License-Identifier: MIT */
/*
 * A FUSE mount that is attached to no directory. So no process enters it by accident (such as a df
 * that would wait for a stopped server), no mount namespace copies it, and the kernel removes it
 * with its last user: there is nothing to unmount, and nothing stays when all processes were
 * killed.
 */
#pragma once

#include <stdint.h>

/*
 * Mounts the connection `fuse_fd` (/dev/fuse). Returns an O_PATH descriptor of its root directory,
 * or a negative errno after a message. The mount lasts as long as the descriptor, or a file in it,
 * is open.
 */
int fuse_mount_detached(int fuse_fd, uint32_t max_read_bytes);
