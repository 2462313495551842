/* SPDX-License-Identifier: MIT */
/* Checks whether options fit each other. */

#include <errno.h>
#include <unistd.h>

#include "base/message.h"
#include "server/frontend/ublk_uapi.h"
#include "server/options.h"

static int check_recover(const struct server_options *options)
{
	if (!options->tag_given) {
		msg_error("--recover needs --tag");
		return -EINVAL;
	}
	if (options->queues || options->depth || options->max_io_bytes || options->id >= 0 ||
	    options->recovery != RECOVERY_NONE || options->features_on || options->features_off) {
		msg_error("--recover takes the device as it is: --id, --queues, --depth, --max-io, "
			  "--recovery and features were settled when it was made");
		return -EINVAL;
	}
	return 0;
}

static int check_alone(const char *option, int words)
{
	if (!words)
		return 0;
	msg_error("%s takes no description", option);
	return -EINVAL;
}

int server_options_check(const struct server_options *options, int words)
{
	if (options->features)
		return check_alone("--features", words);
	if (options->list_devices || options->delete_device >= 0) {
		if (words || (options->delete_device >= 0 && !options->tag_given)) {
			msg_error("%s",
				  options->list_devices ?
					  "--list-devices takes no description" :
					  "--delete-device needs --tag, and takes no description");
			return -EINVAL;
		}
		return 0;
	}
	if (options->device_owner >= 0)
		return check_alone("--device-owner", words);
	if (words != 1) {
		msg_error("%s", words ? "more than one description given" : "no description given");
		return -EINVAL;
	}
	if (options->grow && options->recover_id < 0 && !options->recover_fd_count) {
		msg_error("--grow enlarges a device that is taken over: it needs --recover or "
			  "--recover-fds");
		return -EINVAL;
	}
	if (options->recover_fd_count && options->queues) {
		msg_error("--queues does not go with --recover-fds, which says how many there are");
		return -EINVAL;
	}
	if (options->unprivileged &&
	    (options->recovery != RECOVERY_NONE || options->recover_id >= 0)) {
		msg_error(
			"--unprivileged devices have no recovery: the kernel does not trust them");
		return -EINVAL;
	}
	if (options->unprivileged && options->features_on & UBLK_F_AUTO_BUF_REG) {
		msg_error("--unprivileged devices have no auto-buf-reg: the kernel does not let "
			  "them have the memory of others");
		return -EINVAL;
	}
	if (options->unprivileged && !geteuid()) {
		msg_error(
			"--unprivileged is for users other than root: for root, the kernel makes an "
			"ordinary device");
		return -EINVAL;
	}
	return options->recover_id >= 0 ? check_recover(options) : 0;
}
