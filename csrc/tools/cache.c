/* SPDX-License-Identifier: MIT */
/*
 * btrfs-ublk-cache: does for `btrfs-ublk cache` what needs the format of a cache's files, which the
 * Python package does not know. Prints one JSON document (content/cache/admin.h).
 */
#include <errno.h>
#include <string.h>

#include "base/json_text.h"
#include "base/message.h"
#include "content/cache/admin.h"

int main(int argc, char **argv)
{
	struct error error = {};
	json_t *answer;
	int err;

	message_init("btrfs-ublk-cache");
	if (argc == 2 && !strcmp(argv[1], "--version"))
		return print_version();
	err = cache_admin(argv[1], argv + 2, argc - 2, &answer, &error);
	if (err) {
		error_set_text(&error, "%s", strerror(-err)); /* unless there is one */
		msg_error_of(&error);
		return err == -EINVAL || err == -ENOENT ? EXIT_USAGE : EXIT_FAILED;
	}
	return json_text_print(answer) ? EXIT_FAILED : EXIT_OK;
}
