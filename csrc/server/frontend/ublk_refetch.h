/* SPDX-License-Identifier: MIT */
/*
 * Drivers before 6.15 reset a queue only in START_USER_RECOVERY, through the thread that last
 * served it, and only if they remember one for some queue. A server that was killed between its
 * START_USER_RECOVERY and the FETCH_REQ of its last queue leaves queues without such a thread. The
 * next START_USER_RECOVERY then fails for good (no queue has one), or follows a null pointer (some
 * have). So before that command, each queue gets a thread that has served it and ended.
 */
#pragma once

#include <stdbool.h>

#include "server/frontend/ublk_uapi.h"

/*
 * To be called while the device is quiesced, so that no request can come. Does nothing for queues
 * that have such a thread. `device_fd` is that of /dev/ublkcN. Returns 0, or a negative errno after
 * a message.
 */
int ublk_refetch(int device_fd, const struct ublksrv_ctrl_dev_info *info, bool encoded);
