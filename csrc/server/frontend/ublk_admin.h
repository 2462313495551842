/* SPDX-License-Identifier: MIT */
/* Looking at, and removing, ublk devices whose server is gone. */
#ifndef FRONTEND_UBLK_ADMIN_H
#define FRONTEND_UBLK_ADMIN_H

#include <stdint.h>

/* Each returns 0 or a negative errno, with a message given. */

/* One JSON line per ublk device of this machine, on stdout. */
int ublk_list_devices(void);

/*
 * Stop and delete device `id`, provided that it carries `tag` (-EPERM otherwise) and nobody has it
 * mounted or open exclusively (-EBUSY).
 */
int ublk_remove_device(unsigned id, uint64_t tag);

/* "UID GID" of who added unprivileged device `id`, on stdout; of others it is root. */
int ublk_print_owner(unsigned id);

struct ublk_control;

/*
 * Make sure that nobody has the device mounted or claimed, and that nobody can any more: it is
 * stopped then, or `*claim_fd`, which is -1 before, keeps others from it until it is closed. `dev_dir`
 * is /dev. Returns 0, or -EBUSY, without a message.
 */
int ublk_withdraw_device(struct ublk_control *control, int dev_dir, unsigned id, int *claim_fd);

#endif
