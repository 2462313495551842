/* SPDX-License-Identifier: MIT */
/* Credentials of container registries, from where Docker's client and podman keep them. */
#pragma once

#include <stdint.h>

#include "base/error.h"

struct docker_login {
	char *user, *password; /* NULL: none is known */
	/* Instead of a password: a refresh token of OAuth 2.0, which is exchanged for tokens. */
	char *identity_token;
	/* Instead of a password: it is sent as it is. */
	char *registry_token;
};

/*
 * Finds the credentials for a repository of `registry`, named as in image names. `path` is the file,
 * like Docker's config.json; NULL: the usual ones, which may be missing; the first that has any
 * counts. To be called on a worker: it reads files, and may run credential helpers for
 * at most 10 s each; one that is not installed has none. `seen` is the helper's answer that the
 * caller has had, at first 0: another one's recent answer is used only where it is newer
 * (helper.h). Returns 0, or a negative errno with the error filled in.
 */
int docker_login_find(const char *path, const char *registry, const char *repository,
		      uint64_t *seen, struct docker_login *login, struct error *error);
void docker_login_clear(struct docker_login *login);
