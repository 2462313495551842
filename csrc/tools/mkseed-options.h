/* SPDX-License-Identifier: MIT */
/* The command line of btrfs-ublk-mkseed, which is checked before anything is touched. */
#pragma once

#include <stdbool.h>

#include "btrfs/seed.h"

#define MKSEED_PROGRAM "btrfs-ublk-mkseed"

struct options {
	struct seed seed;
	const char *output;
	bool metadata_only;
	bool force;
};

/*
 * Sets defaults, and then parses the arguments. Returns an exit status, or -1 when there is work to
 * do.
 */
int options_parse(struct options *options, int argc, char **argv);

/*
 * Fills in what was not given: the time, a random fsid, and UUIDs derived from the fsid. Returns
 * -EINVAL after a message when $SOURCE_DATE_EPOCH is not a time.
 */
int options_fill_identity(struct options *options);
