/* SPDX-License-Identifier: MIT */
/* Credentials of S3 stores, where Amazon's tools keep them. */
#ifndef LAZY_MIRROR_AWSCONFIG_H
#define LAZY_MIRROR_AWSCONFIG_H

#include "lazy/complaint.h"

struct aws_login {
	char *access_key, *secret_key;
	char *session_token; /* NULL: none */
};

/*
 * With `path`, of that file and `profile` (NULL: "default"). Without: the environment
 * (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN), unless there is a profile; then the file
 * of AWS_SHARED_CREDENTIALS_FILE, or ~/.aws/credentials, and AWS_PROFILE. On a hand: reads files. Returns 0
 * or a negative errno with the complaint filled in: to have none is an error.
 */
int aws_login_find(const char *path, const char *profile, struct aws_login *login,
		   struct complaint *complaint);
void aws_login_clear(struct aws_login *login);

#endif
