/* SPDX-License-Identifier: MIT */
/* Asks mirrors what they have, before anything is mapped, and waits for the answer. */
#pragma once

#include <stdint.h>

#include "base/error.h"
#include "content/source.h"

struct fetcher;

/*
 * Not on the fetcher's thread. Without a fetcher, only mirrors
 * of this machine can be asked. These return 0, or a negative errno with the error filled in.
 */
int mirror_probe(struct fetcher *fetcher, struct mirror *mirror, uint32_t timeout_ms,
		 struct mirror_probe *probe, struct error *error);
/* `*text` is JSON about `name`, malloc()ed. */
int mirror_look_up(struct fetcher *fetcher, struct mirror *mirror, const char *name,
		   uint32_t timeout_ms, char **text, struct error *error);
