/* SPDX-License-Identifier: MIT */
/* Emits the inodes of a model as the items of one subvolume. Internal to emit.c. */
#pragma once

#include "btrfs/image.h"
#include "btrfs/inode.h"
#include "image/data.h"
#include "image/model.h"

struct emit_tree {
	/* Inputs. */
	const struct model *model;
	struct data *data;
	uint64_t data_start; /* logical address of the data object */
	struct error *error;

	bool has_error; /* `error` is set */
	struct inode_name *names;
	size_t name_capacity;
	struct dir_entry *entries;
	size_t entry_capacity;
};

image_emit emit_tree; /* the context is a struct emit_tree */
void emit_tree_deinit(struct emit_tree *emit);
