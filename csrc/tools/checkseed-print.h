/* SPDX-License-Identifier: MIT */
/* The output of btrfs-ublk-checkseed, one line of JSON. */
#pragma once

#include "btrfs/check/check.h"
#include "btrfs/layout.h"

/* Each returns 0, or -ENOMEM or -EIO. */
int print_layout(const char *path, const struct reader *reader, const struct layout *layout);
int print_report(const char *path, const struct layout *layout, const struct report *report);
