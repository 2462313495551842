/* SPDX-License-Identifier: MIT */
/*
 * Prints a tree as lines of fields, for programs that compare trees. Equal trees make equal lines,
 * wherever holes and extents are. A line has, with tabs between them: the path, "-" at the top; the
 * type, as `ls` has it; permissions; owner and group; time; bytes; the device's numbers; where a
 * symbolic link leads; the path of the same file that came before; digests of attributes and
 * content. "-" is a field that an entry lacks, and %XX a byte that is no printable ASCII in paths
 * and targets.
 */
#pragma once

#include <openssl/evp.h>
#include <stdbool.h>
#include <stdio.h>

#include "base/error.h"
#include "image/tree_entry.h"

struct tree_lister {
	struct tree_visitor visitor; /* give its address to tree_read() */
	FILE *out;
	struct error *error;
	EVP_MD_CTX *digest;
	bool has_content;
};

/* Returns 0 or -ENOMEM, with an error. */
int tree_lister_init(struct tree_lister *lister, FILE *out, struct error *error);
void tree_lister_deinit(struct tree_lister *lister);
/* Returns 0 or a negative errno, with an error, as the visitor's functions do. */
int tree_lister_finish(struct tree_lister *lister);

/* Writes a path or a target as lines have it. */
void tree_put_text(FILE *out, const char *text);
