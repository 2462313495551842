/* SPDX-License-Identifier: MIT */
/* A login as bytes: the server reads it, and its fetch process uses it. */
#pragma once

#include "fetch/mirror/remote.h"

/* Certificates, a key, headers, user, password and URL; at most so many bytes. */
enum { LOGIN_TEXT_MAX_BYTES = 5 << 20 };

/* Returns 0 and the text, which secret_clear() frees, or a negative errno. */
int login_pack(const struct login *login, struct secret *text);
/* Adds what `text` has to an empty login. Returns 0, -EPROTO or -ENOMEM. */
int login_unpack(const void *text, size_t bytes, struct login *login);
