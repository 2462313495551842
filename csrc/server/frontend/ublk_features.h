/* SPDX-License-Identifier: MIT */
/*
 * What the ublk driver can do, which of it the server asks for, and why (not). A feature that comes
 * or goes is one row of the table in ublk_features.c.
 */
#ifndef FRONTEND_UBLK_FEATURES_H
#define FRONTEND_UBLK_FEATURES_H

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

/* NULL, with a message given: there is none of that name, or none that can be switched. */
const struct ublk_feature *ublk_feature_find(const char *name);

/*
 * The flags to ask for: all that are used, without those in `off`, and those in `on`. Returns 0, or
 * -EOPNOTSUPP with a message given when the driver lacks one of `on`.
 */
int ublk_features_choose(const struct ublk_control *control, uint64_t on, uint64_t off,
			 uint64_t *flags);

/* See frontend_ops.features. */
int ublk_features_describe(json_t *about);

#endif
