/* SPDX-License-Identifier: MIT */
/* Checks whether options fit each other. */

#include <errno.h>

#include "base/message.h"
#include "server/options.h"

static int refuse(const char *why)
{
	return msg_fail(-EINVAL, "%s", why);
}

static int check_recover(const struct server_options *options)
{
	if (!options->tag_given)
		return refuse("--recover needs --tag");
	if (options->queues || options->depth || options->max_io_bytes || options->id >= 0 ||
	    options->recovery != RECOVERY_NONE || options->features)
		return refuse(
			"--recover takes the device as it is: --id, --queues, --depth, --max-io, "
			"--recovery and features were settled when it was made");
	return 0;
}

int server_options_check(const struct server_options *options, int words)
{
	if (options->list_features)
		return words ? refuse("--features takes no description") : 0;
	if (options->list_devices)
		return words ? refuse("--list-devices takes no description") : 0;
	if (options->delete_device >= 0)
		return words || !options->tag_given ?
			       refuse("--delete-device needs --tag, and takes no description") :
			       0;
	if (words != 1)
		return refuse(words ? "more than one description given" : "no description given");
	if (options->grow && options->recover_id < 0 && !options->recover_fd_count)
		return refuse("--grow enlarges a device that is taken over: it needs --recover or "
			      "--recover-fds");
	if (options->recover_fd_count && options->queues)
		return refuse("--queues does not go with --recover-fds, which says how many there "
			      "are");
	return options->recover_id >= 0 ? check_recover(options) : 0;
}
