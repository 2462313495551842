/* SPDX-License-Identifier: MIT */
/*
 * A healthy image in memory, whose superblocks and tree blocks are changed, mostly with correct
 * checksums, and then restored. For fuzzers of what reads images.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "tests/fuzz.h"

enum { FUZZ_IMAGE_INPUT_BYTES = 96 };

/* Ends the program where the file is no healthy image. */
void fuzz_image_load(const char *path);
/* Changes it as the input says (change() has how), has `look` look at it, and restores it. */
void fuzz_image_change(const uint8_t *data, size_t length, void (*look)(int fd));
void fuzz_image_free(void);
