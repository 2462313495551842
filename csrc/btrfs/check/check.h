/* SPDX-License-Identifier: MIT */
/*
 * Checks an unmounted image against all rules for seeds. Does not stop at the first violation:
 * each one becomes an entry of the report.
 */
#pragma once

#include "btrfs/check/report.h"
#include "btrfs/layout.h"
#include "btrfs/reader.h"

/*
 * Returns 0 when the check was completed, whatever it found. After -ENOMEM or an error of read(2),
 * the report proves nothing. Fills `layout` as far as it is known.
 */
int check_image(struct reader *reader, struct layout *layout, struct report *report);
