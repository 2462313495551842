/* SPDX-License-Identifier: MIT */
/*
 * Has a process without privileges ask servers, instead of object.c: one per fetcher, which is
 * started when it is needed. See docs/design/fetching.md.
 */
#pragma once

/*
 * Names the program; NULL: btrfs-ublk-fetch beside this one. It ends after `idle_ms` without work;
 * 0: a minute. To be called before there are mirrors, for fetchers whose options say `spawns`; only
 * the first success counts. Where there is no such program, what servers have cannot be fetched,
 * and the log says why. Returns 0, or a negative errno where descriptors or memory are too short to
 * open it.
 */
int front_use(const char *program, unsigned idle_ms);
