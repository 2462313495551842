/* SPDX-License-Identifier: MIT */
/* Credentials of S3 stores, from where Amazon's tools keep them. */
#pragma once

#include "base/error.h"

struct aws_login {
	char *access_key, *secret_key;
	char *session_token; /* NULL: none */
};

/*
 * With `path`, reads `profile` (NULL: "default") of that file. Without, takes AWS_ACCESS_KEY_ID,
 * AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN from the environment, unless `profile` is given or
 * these are not set; else reads `profile` (NULL: AWS_PROFILE, or "default") of the file in
 * AWS_SHARED_CREDENTIALS_FILE, or ~/.aws/credentials. To be called on a worker, because it reads
 * files. Returns 0, or a negative errno with the error filled in, also
 * when there are no credentials.
 */
int aws_login_find(const char *path, const char *profile, struct aws_login *login,
		   struct error *error);
void aws_login_clear(struct aws_login *login);
