/* SPDX-License-Identifier: MIT */
/* Whole reads and writes: short I/O is -EIO, interruptions are retried; files in memory. */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* Return 0 or a negative errno; -EIO when the file ends before `length`. */
int pread_full(int fd, void *data, size_t length, uint64_t offset);
int pwrite_full(int fd, const void *data, size_t length, uint64_t offset);
int write_full(int fd, const void *data, size_t length);

/*
 * Returns a descriptor of an empty file in memory that can be sealed, and never be executed where
 * the kernel knows that (6.3; with vm.memfd_noexec=2, early ones make no others), or a negative errno.
 */
int memory_file(const char *name);
