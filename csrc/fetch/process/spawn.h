/* SPDX-License-Identifier: MIT */
/* Starts and ends the program that fetches; on the thread for that (CONFINE_SPAWN). */
#pragma once

#include <stdint.h>
#include <sys/types.h>

#include "base/error.h"

struct spawned {
	pid_t pid;
	int fd;		  /* of a local stream to it, which does not block */
	uint8_t *windows; /* shared with it; CHANNEL_WINDOWS_BYTES */
};

/* Returns 0, or a negative errno with the error filled in. */
int spawn_start(int program_fd, struct spawned *spawned, struct error *error);
/* Kills it, and waits for its end. Then nothing of it is left. */
void spawn_end(pid_t pid);
