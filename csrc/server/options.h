/* SPDX-License-Identifier: MIT */
/* The command line of btrfs-ublk-server. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "server/frontend/frontend.h"

enum { MAX_QUEUES = 256 };

struct server_options {
	const char *description;
	const struct frontend_ops *frontend; /* NULL: auto */
	unsigned queues;
	unsigned depth;	       /* 0: the front end's default */
	uint32_t max_io_bytes; /* 0: the front end's default */
	int id;		       /* -1: any */
	uint64_t tag;
	bool tag_given;
	int control_fd; /* -1: none */
	int listen_fd;	/* -1: none */
	enum recovery_mode recovery;
	int recover_id; /* -1: none */
	bool grow;
	int recover_fds[MAX_QUEUES + 3];
	unsigned recover_fd_count; /* 0: not given */

	uint64_t features; /* UBLK_F_* that are insisted on */

	/* Instead of serving. */
	bool check;
	bool list_features;
	bool list_devices;
	int delete_device; /* -1: none */
};

/*
 * Returns 0, or -EINVAL after a message. Does not return from --help and --version.
 */
int server_options_parse(int argc, char **argv, struct server_options *options);

/*
 * Checks the options together, for server_options_parse() (options_check.c). `words` is the number
 * of arguments that are no options. Returns 0, or -EINVAL after a message.
 */
int server_options_check(const struct server_options *options, int words);
