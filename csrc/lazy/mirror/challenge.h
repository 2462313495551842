/* SPDX-License-Identifier: MIT */
/* How a registry says where to get tokens: `WWW-Authenticate: Bearer realm="...",...`. */
#ifndef LAZY_MIRROR_CHALLENGE_H
#define LAZY_MIRROR_CHALLENGE_H

struct challenge {
	char *realm, *service, *scope; /* NULL: not said */
};

/* Parses what follows "Bearer ". Returns 0, -EPROTO or -ENOMEM. */
int challenge_parse(const char *text, struct challenge *challenge);
void challenge_clear(struct challenge *challenge);

/*
 * Makes the request for a token to read `repository`: a URL and, with an identity token (NULL:
 * none), a form to post. Both are malloc()ed. Returns 0 or -ENOMEM.
 */
int challenge_request(const struct challenge *challenge, const char *repository,
		      const char *identity_token, char **url, char **form);

#endif
