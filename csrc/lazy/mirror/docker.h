/* SPDX-License-Identifier: MIT */
/* Credentials of container registries, where Docker's client keeps them: config.json. */
#ifndef LAZY_MIRROR_DOCKER_H
#define LAZY_MIRROR_DOCKER_H

#include "lazy/complaint.h"

struct docker_login {
	char *user, *password; /* NULL: none is known */
	char *identity_token;  /* instead: what tokens are got with (OAuth 2.0's refresh token) */
	char *registry_token;  /* instead: to be sent as it is */
};

/*
 * What is known of `registry`, as it is in image names. `path`: the file; NULL: where Docker's client has it, and
 * none there is fine. On a hand: reads files, and may run a credential helper, for 10 s at most.
 * Returns 0 or a negative errno with the complaint filled in.
 */
int docker_login_find(const char *path, const char *registry, struct docker_login *login,
		      struct complaint *complaint);
void docker_login_clear(struct docker_login *login);

#endif
