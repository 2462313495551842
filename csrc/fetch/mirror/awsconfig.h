/* SPDX-License-Identifier: MIT */
/* Credentials of S3 stores, from where Amazon's tools keep them. */
#pragma once

#include "fetch/mirror/remote.h"

/*
 * With `path`, reads `profile` (NULL: "default") of that file. Without, takes AWS_ACCESS_KEY_ID,
 * AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN from the environment, unless `profile` is given or
 * these are not set; else reads `profile` (NULL: AWS_PROFILE, or "default") of the file in
 * AWS_SHARED_CREDENTIALS_FILE, or ~/.aws/credentials. To be called on a worker, because it reads
 * files. Fills in user, password and, where there is a session, its header. Returns 0, or a negative
 * errno with the error filled in, also when there are no credentials.
 */
int aws_login_read(const char *path, const char *profile, struct login *login, struct error *error);
