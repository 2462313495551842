/* SPDX-License-Identifier: MIT */
/*
 * Tokens of registries, which the processes of one user on one host share: one of them asks the
 * token server, and the others wait for what it gets. btrfs_ublk/image/logins.py is the same for
 * commands.
 *
 * Each is a file in BTRFS_UBLK_RUN_DIR/tokens (usually /run/btrfs-ublk/tokens, 0700), named by a
 * hash of what it is for: {"token": TEXT, "until_ns": N, "asking_ns": N, "failed_ns": N, "why":
 * TEXT, "refused": BOOL}, with times of CLOCK_MONOTONIC until when it is good, somebody asks, and
 * nobody may ask again, as the token server has failed, or refused the credentials. flock(2) guards
 * it. Without that directory, each process has its own.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct fetcher;

#define TOKEN_HEADER "Authorization: Bearer "

enum {
	TOKEN_KEY_BYTES = 65,
	TOKEN_TEXT_MAX_BYTES = 64 << 10, /* what is longer is not shared */
};

enum token_state {
	TOKEN_THERE,
	TOKEN_ASK,     /* it is the caller's to ask for one, and to tell */
	TOKEN_NONE,    /* there is none, and none is wanted */
	TOKEN_FAILED,  /* the token server has failed less than a second ago */
	TOKEN_REFUSED, /* it has refused these credentials less than a second ago */
};

/* Names what a token is for: a hash of texts, which may be secrets. NULL ends them. */
void token_key(const char *const texts[], char key[static TOKEN_KEY_BYTES]);
/* Tells a token from others; never 0. */
uint64_t token_number(const char *token);

/*
 * Looks for a token, on a worker; where somebody asks for one, it waits for that (10 s at most).
 * `refused`: the number of one that is of no use, or 0. TOKEN_THERE fills in the token, TOKEN_FAILED
 * and TOKEN_REFUSED why, or NULL; secret_free() frees it.
 */
enum token_state token_find(const char *key, bool wanted, uint64_t refused, char **text,
			    uint64_t *until_ns);
/*
 * Tells what has become of TOKEN_ASK; `text` is NULL where there is none, and `why` where the token
 * server has neither failed nor `refused`. To be called on the fetcher's thread: a worker writes.
 */
void token_tell(struct fetcher *fetcher, const char *key, const char *text, const char *why,
		bool refused, uint64_t until_ns);
