/* SPDX-License-Identifier: MIT */
/* What `btrfs-ublk-seed inspect` prints: one line of JSON. */
#pragma once

#include "btrfs/layout.h"

/* Returns 0, or -ENOMEM or -EIO. */
int print_layout(const char *path, const struct reader *reader, const struct layout *layout);
