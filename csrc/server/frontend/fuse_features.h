/* SPDX-License-Identifier: MIT */
#pragma once

#include <jansson.h>

/* See frontend_ops.features. Adds "protocol", "7.N", if this process may ask the kernel. */
int fuse_features_describe(json_t *about);
