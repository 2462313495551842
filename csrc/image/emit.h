/* SPDX-License-Identifier: MIT */
/*
 * Writes a sealed image: a seed with complete content (docs/design/images.md).
 *
 *	emit_open, then for each layer: fill the model, data_drain, emit_layer, emit_name; then
 *	data_finish, emit_finish, emit_close
 *
 * The model as it is after each layer becomes a read-only subvolume, /layers/NAME in the top-level
 * subvolume; /rootfs is a symbolic link to the last one. Byte n of the data object is byte
 * IMAGE_DATA_START + n of the device.
 */
#pragma once

#include <stdint.h>

#include "base/error.h"
#include "base/size.h"
#include "btrfs/csum.h"
#include "image/data.h"
#include "image/model.h"

#define IMAGE_DATA_START GIB(512)
#define IMAGE_DATA_STEP_BYTES GIB(4) /* the device ends at a multiple of it */

struct emit_params {
	int fd; /* of seed.img: empty, stays the caller's */
	const char *label;
	int64_t time; /* of what the input says nothing of; seconds since 1970 */
	const struct csum_kind *csum;
	bool has_zstd; /* extents may be compressed */
};

struct emit_result {
	uint8_t fsid[UUID_BYTES];
	uint64_t device_bytes;
	uint64_t local_bytes;	 /* of seed.img */
	uint64_t metadata_bytes; /* in tree blocks */
};

struct emit;

int emit_open(struct emit **emit, const struct emit_params *params, struct error *error);
void emit_close(struct emit *emit); /* may be NULL */

/*
 * Sets the object id of the subvolume, and a digest of all that it shows, of DATA_DIGEST_BYTES,
 * unless `digest` is NULL. Its name is set by emit_name before emit_finish, and has to outlive
 * `emit`.
 */
int emit_layer(struct emit *emit, const struct model *model, struct data *data, uint64_t *subvolume,
	       uint8_t *digest, struct error *error);
void emit_name(struct emit *emit, uint64_t subvolume, const char *name);
int emit_finish(struct emit *emit, struct data *data, struct emit_result *result,
		struct error *error);
