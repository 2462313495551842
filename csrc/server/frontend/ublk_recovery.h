/* SPDX-License-Identifier: MIT */
/* ublk devices that outlive their server: recovery modes, and taking a device over. */
#pragma once

#include <stdint.h>

#include "server/frontend/frontend.h"
#include "server/frontend/ublk_control.h"

/*
 * Sets the UBLK_F_* to ask for. Returns 0, or -EOPNOTSUPP after a message. A kernel that does not
 * tell its features (before 6.5) is asked anyway; see ublk_recovery_granted().
 */
int ublk_recovery_flags(enum recovery_mode mode, const struct ublk_control *control,
			uint64_t *flags);

/*
 * Checks whether a device has what was asked for. Returns the same values as ublk_recovery_flags().
 */
int ublk_recovery_granted(enum recovery_mode mode, uint64_t flags);

/* Returns "reissue", "queue", "fail-io" or "none": the mode of a device with these flags. */
const char *ublk_recovery_name(uint64_t flags);

/*
 * Waits until the driver has noticed the end of the server of device frontend->recover_id, and
 * checks that the device is the right one and has the engine's size (frontend->grow: or less). Sets
 * `info`. Returns 0, or a negative errno after a message; nothing was changed then.
 */
int ublk_recovery_find(const struct frontend *frontend, struct ublk_control *control,
		       struct ublksrv_ctrl_dev_info *info);

/*
 * Gives a device that is smaller the size of the engine's address space. To be called once it is
 * served, because it may be read at once. Returns 0, or a negative errno after a message.
 */
int ublk_recovery_grow(const struct engine *engine, struct ublk_control *control, uint32_t id);

/*
 * Prepares the device for new queues. `dev_dir` is /dev. Returns 0, or a negative errno after a
 * message.
 */
int ublk_recovery_begin(struct ublk_control *control, int dev_dir,
			const struct ublksrv_ctrl_dev_info *info);

/*
 * Opens /dev/ublkcN, which only one process can have open, and waits until it is free. Returns the
 * descriptor, or a negative errno after a message.
 */
int ublk_open_char_device(int dev_dir, uint32_t id);
