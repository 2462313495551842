/* SPDX-License-Identifier: MIT */
/*
 * The features of the ublk driver, whether the server asks for them, and why. To add or remove one,
 * change one row of the table in ublk_features.c.
 */
#pragma once

#include <jansson.h>
#include <stdint.h>

struct ublk_control;

enum ublk_feature_use {
	UBLK_NOT_USED,
	UBLK_WANTED, /* by --feature */
	UBLK_USED,   /* where the driver has it */
	UBLK_ASKED,  /* by an option of its own, such as --recovery */
};

struct ublk_feature {
	const char *name;
	uint64_t flag;	   /* UBLK_F_* */
	const char *since; /* Linux; for people, never compared */
	enum ublk_feature_use use;
	const char *reason; /* why, or why not */
};

/* Returns NULL, after a message, when there is no such feature, or it has no --feature. */
const struct ublk_feature *ublk_feature_find(const char *name);

/*
 * Sets the flags to ask for: all that are used, and those in `on`. Returns 0, or -EOPNOTSUPP after a
 * message when the driver lacks one of `on`.
 */
int ublk_features_choose(const struct ublk_control *control, uint64_t on, uint64_t *flags);

/* See frontend_ops.features. */
int ublk_features_describe(json_t *about);
