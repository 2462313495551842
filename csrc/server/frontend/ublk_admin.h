/* SPDX-License-Identifier: MIT */
/* Examines and removes ublk devices whose server is gone. */
#pragma once

#include <stdint.h>

/* Each returns 0, or a negative errno after a message. */

/* Prints one JSON line per ublk device of this machine. */
int ublk_list_devices(void);

/*
 * Stops and deletes device `id`, provided that it has this `tag` (-EPERM otherwise) and is neither
 * mounted nor opened exclusively (-EBUSY).
 */
int ublk_remove_device(unsigned id, uint64_t tag);

struct ublk_control;

/*
 * Makes sure that the device is neither mounted nor claimed, and cannot be any more: either it is
 * stopped, or `*claim_fd` (-1 before) keeps others from it until it is closed. `dev_dir` is /dev.
 * Returns 0 or -EBUSY, without a message.
 */
int ublk_withdraw_device(struct ublk_control *control, int dev_dir, unsigned id, int *claim_fd);
