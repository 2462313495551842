/* SPDX-License-Identifier: MIT */
#include "tools/loops.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/message.h"

static int cannot_list(const char *path, int error)
{
	msg_error("cannot list %s: %s", path, strerror(error));
	return -error;
}

/*
 * Calls `each` with the names in a directory, until it returns something else than 0. Where there
 * is no such directory, there is none of its names.
 */
static int each_name(const char *path, int (*each)(void *context, const char *name), void *context)
{
	DIR *directory = opendir(path);
	const struct dirent *entry;
	int ret = 0;

	if (!directory)
		return errno == ENOENT ? 0 : cannot_list(path, errno);
	while (!ret) {
		errno = 0;
		entry = readdir(directory);
		if (!entry)
			break;
		ret = each(context, entry->d_name);
	}
	if (!ret && errno)
		ret = cannot_list(path, errno);
	closedir(directory);
	return ret;
}

struct loops {
	int (*each)(void *context, unsigned number);
	void *context;
};

static int take_loop(void *context, const char *name)
{
	const struct loops *loops = context;
	unsigned number;
	char path[64];

	if (sscanf(name, "loop%u", &number) != 1)
		return 0;
	snprintf(path, sizeof(path), "/sys/block/loop%u/loop/backing_file", number);
	return access(path, F_OK) ? 0 : loops->each(loops->context, number);
}

int loops_each(int (*each)(void *context, unsigned number), void *context)
{
	struct loops loops = { each, context };

	return each_name("/sys/block", take_loop, &loops);
}

struct wanted {
	const char *device;
	char *entry;
};

static int take_btrfs(void *context, const char *name)
{
	const struct wanted *wanted = context;

	if (*name == '.')
		return 0;
	snprintf(wanted->entry, PATH_MAX, "/sys/fs/btrfs/%.255s/devices/%.255s", name,
		 wanted->device);
	return !access(wanted->entry, F_OK);
}

int btrfs_has_device(const char *device, char entry[static PATH_MAX])
{
	struct wanted wanted = { device, entry };

	return each_name("/sys/fs/btrfs", take_btrfs, &wanted);
}
