/* SPDX-License-Identifier: MIT */
/* ublk devices that outlive their server: recovery modes, and how a device is taken over. */
#ifndef FRONTEND_UBLK_RECOVERY_H
#define FRONTEND_UBLK_RECOVERY_H

#include <stdint.h>

#include "server/frontend/frontend.h"
#include "server/frontend/ublk_control.h"

/*
 * UBLK_F_* to ask for. Returns 0, or -EOPNOTSUPP with a message given. A kernel that does not tell
 * its features (before 6.5) is asked for what is wanted; see ublk_recovery_granted().
 */
int ublk_recovery_flags(enum recovery_mode mode, const struct ublk_control *control,
			uint64_t *flags);

/* Whether a device has what was asked for. Returns as ublk_recovery_flags() does. */
int ublk_recovery_granted(enum recovery_mode mode, uint64_t flags);

/* "reissue", "queue", "fail-io", "none": what a device with these flags has. */
const char *ublk_recovery_name(uint64_t flags);

/*
 * Wait until the driver has seen the end of the server of device frontend->recover_id, and check
 * that it is the device that is meant, of the engine's size (frontend->grow: or smaller). Sets `info`. Returns 0 or a negative
 * errno, with a message given; nothing was changed then.
 */
int ublk_recovery_find(const struct frontend *frontend, struct ublk_control *control,
		       struct ublksrv_ctrl_dev_info *info);

/*
 * Give a device that is smaller than the engine's address space the size of that. To be called once
 * it is served: somebody may read there at once. Returns 0 or a negative errno, with a message given.
 */
int ublk_recovery_grow(const struct engine *engine, struct ublk_control *control, uint32_t id);

/* Prepare the device for new queues. `dev_dir` is /dev. Returns 0 or a negative errno, as above. */
int ublk_recovery_begin(struct ublk_control *control, int dev_dir,
			const struct ublksrv_ctrl_dev_info *info);

/*
 * Open /dev/ublkcN, of which there can be one user at a time. Waits for it to be free. Returns the
 * descriptor, or a negative errno with a message given.
 */
int ublk_open_char_device(int dev_dir, uint32_t id);

#endif
