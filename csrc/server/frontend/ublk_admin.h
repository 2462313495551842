/* SPDX-License-Identifier: MIT */
/* Looking at, and removing, ublk devices whose server is gone. */
#ifndef FRONTEND_UBLK_ADMIN_H
#define FRONTEND_UBLK_ADMIN_H

#include <stdint.h>

/* Both return 0 or a negative errno, with a message given. */

/* One JSON line per ublk device of this machine, on stdout. */
int ublk_list_devices(void);

/*
 * Stop and delete device `id`, provided that it carries `tag` (-EPERM otherwise) and nobody has it
 * mounted or open exclusively (-EBUSY).
 */
int ublk_remove_device(unsigned id, uint64_t tag);

#endif
