/* SPDX-License-Identifier: MIT */
#ifndef FRONTEND_FUSE_FEATURES_H
#define FRONTEND_FUSE_FEATURES_H

#include <jansson.h>

/* See frontend_ops.features. Adds "protocol", "7.N", if this process may ask the kernel. */
int fuse_features_describe(json_t *about);

#endif
