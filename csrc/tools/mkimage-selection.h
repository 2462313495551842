/* SPDX-License-Identifier: MIT */
/* Which bytes of a layer's tar its part of the data object consists of, for servers. */
#pragma once

#include "image/data.h"
#include "tools/mkimage-description.h"

/*
 * Writes a selection (content/selection.h) to an empty file. Returns 0 or a negative errno, with an
 * error.
 */
int selection_write(int fd, const struct layer *layer, uint32_t unit_bytes, struct data *data,
		    struct error *error);
