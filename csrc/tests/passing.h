/* SPDX-License-Identifier: MIT */
/* A message to a server that a file comes with. */
#pragma once

#include <stddef.h>
#include <sys/types.h>

/* Sends bytes, and a descriptor unless it is negative; returns as sendmsg(2) does. */
ssize_t send_with_file(int socket, const void *data, size_t bytes, int file);
