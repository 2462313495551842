/* SPDX-License-Identifier: MIT */
/* What has to hold of all options together. */
#ifndef SERVER_OPTIONS_CHECK_H
#define SERVER_OPTIONS_CHECK_H

#include "server/options.h"

/*
 * `words` is how many arguments there are that are no options. Returns 0, or -EINVAL with a message
 * given.
 */
int server_options_check(const struct server_options *options, int words);

#endif
