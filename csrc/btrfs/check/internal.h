/* SPDX-License-Identifier: MIT */
/* The types and functions that the files of the check share. */
#pragma once

#include "btrfs/check/report.h"
#include "btrfs/cursor.h"
#include "btrfs/layout.h"
#include "btrfs/walk.h"

struct check {
	struct reader *reader;
	struct layout *layout;
	struct report *report;
};

/*
 * Handles the result of a reader function. Damage becomes a violation of `rule`, and 0 is returned;
 * any other error is returned.
 */
int check_damage(struct check *check, const char *rule, int error_number);

/* Each returns 0, or a negative errno when the check cannot go on. */
int check_walk_trees(struct check *check);   /* trees.c: every block, and its copies */
int check_virtual_file(struct check *check); /* virtual.c: rules for seeds only */
