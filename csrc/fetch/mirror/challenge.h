/* SPDX-License-Identifier: MIT */
/*
 * How a registry says what it wants to be asked with: WWW-Authenticate (RFC 9110, 11.6).
 * btrfs_ublk/image/logins.py has the same rules.
 */
#pragma once

#include <stdbool.h>

struct challenge {
	bool bearer, basic;	       /* which schemes there are */
	char *realm, *service, *scope; /* of bearer, whose realm is a URL; NULL: not said */
};

/*
 * Parses the headers of a refusal, joined by commas, up to what is not valid. A realm may be
 * relative to `base`, the URL that was refused. Returns 0 or -ENOMEM.
 */
int challenge_parse(const char *text, const char *base, struct challenge *challenge);
/* Returns whether the registry wants a token, not a password. */
bool challenge_wants_token(const struct challenge *challenge);
void challenge_clear(struct challenge *challenge);

/*
 * Makes the request for a token to read `repository`: a URL and, with an identity token (NULL:
 * none), a form to post. Both are malloc()ed. Returns 0 or -ENOMEM.
 */
int challenge_request(const struct challenge *challenge, const char *repository,
		      const char *identity_token, char **url, char **form);
