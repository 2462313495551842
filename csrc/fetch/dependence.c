/* SPDX-License-Identifier: MIT */
#include "fetch/dependence.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/btrfs.h>
#include <linux/loop.h>
#include <linux/magic.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "base/clock.h"

enum {
	DEPTH_MAX = 12, /* nested devices on files on devices; deeper nesting is taken for a loop */
	REMEMBERED = 16,
	REMEMBERED_S = 10, /* because a file system may get another device at any time */
	BTRFS_DEVICES_MAX = 4096,
};

static dev_t own_device; /* atomic */

/* Results by st_dev, because each fetch from a file asks. */
static struct {
	dev_t device;
	uint64_t until_ns;
	bool depends;
} remembered[REMEMBERED];
static unsigned next_remembered;
static pthread_mutex_t remembered_lock = PTHREAD_MUTEX_INITIALIZER;

void dependence_set_own(dev_t own)
{
	__atomic_store_n(&own_device, own, __ATOMIC_RELAXED);
}

static bool is_own(dev_t device)
{
	return device == __atomic_load_n(&own_device, __ATOMIC_RELAXED);
}

static bool fs_depends(int fd, unsigned depth);
static bool disk_depends(dev_t disk, unsigned depth);

/* NB: st_dev of a file in btrfs is that of the subvolume, and no block device's. */
static bool btrfs_depends(int fd, unsigned depth)
{
	struct btrfs_ioctl_fs_info_args fs = {};

	if (ioctl(fd, BTRFS_IOC_FS_INFO, &fs))
		return false;
	for (uint64_t id = 1; id <= fs.max_id && id <= BTRFS_DEVICES_MAX; id++) {
		struct btrfs_ioctl_dev_info_args device = { .devid = id };
		struct stat status;

		if (!ioctl(fd, BTRFS_IOC_DEV_INFO, &device) &&
		    !stat((const char *)device.path, &status) &&
		    disk_depends(status.st_rdev, depth + 1))
			return true;
	}
	return false;
}

static bool fs_depends(int fd, unsigned depth)
{
	struct statfs system;
	struct stat status;

	if (fstat(fd, &status) || fstatfs(fd, &system))
		return false;
	if (S_ISBLK(status.st_mode))
		return disk_depends(status.st_rdev, depth + 1);
	if (system.f_type == BTRFS_SUPER_MAGIC)
		return btrfs_depends(fd, depth);
	return disk_depends(status.st_dev, depth + 1);
}

/* Reads a file of /sys/dev/block/MAJOR:MINOR; the text is empty when there is none. */
static void read_attribute(dev_t disk, const char *name, char *text, size_t bytes)
{
	char path[128];
	_cleanup_close_ int fd = -1;
	ssize_t length;

	snprintf(path, sizeof(path), "/sys/dev/block/%u:%u/%s", major(disk), minor(disk), name);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	length = fd < 0 ? 0 : read(fd, text, bytes - 1);
	text[length > 0 ? length : 0] = '\0';
	text[strcspn(text, "\n")] = '\0';
}

static bool parse_device(const char *text, dev_t *device)
{
	unsigned majors, minors;

	if (sscanf(text, "%u:%u", &majors, &minors) != 2)
		return false;
	*device = makedev(majors, minors);
	return true;
}

static bool loop_depends(dev_t disk, unsigned depth)
{
	struct loop_info64 loop;
	char text[4096], node[32];
	_cleanup_close_ int fd = -1;
	_cleanup_close_ int file_fd = -1;

	read_attribute(disk, "loop/backing_file", text, sizeof(text));
	if (!*text)
		return false;
	file_fd = open(text, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
	/*
	 * Do not follow lo_file_name: the path may lead nowhere, or elsewhere. The file's device is
	 * certain.
	 */
	snprintf(node, sizeof(node), "/dev/loop%u", minor(disk));
	fd = open(node, O_RDONLY | O_CLOEXEC);
	if (fd >= 0 && !ioctl(fd, LOOP_GET_STATUS64, &loop) &&
	    disk_depends((dev_t)loop.lo_device, depth + 1))
		return true;
	return file_fd >= 0 && fs_depends(file_fd, depth + 1);
}

/* Checks the devices below device mapper and RAID. */
static bool slaves_depend(dev_t disk, unsigned depth)
{
	char path[512], text[64];
	const struct dirent *entry;
	bool depends = false;
	DIR *slaves;

	snprintf(path, sizeof(path), "/sys/dev/block/%u:%u/slaves", major(disk), minor(disk));
	slaves = opendir(path);
	while (slaves && !depends && (entry = readdir(slaves))) {
		dev_t slave;

		if (*entry->d_name == '.')
			continue;
		snprintf(path, sizeof(path), "slaves/%s/dev", entry->d_name);
		read_attribute(disk, path, text, sizeof(text));
		depends = parse_device(text, &slave) && disk_depends(slave, depth + 1);
	}
	if (slaves)
		closedir(slaves);
	return depends;
}

static bool disk_depends(dev_t disk, unsigned depth)
{
	char text[64];
	dev_t whole;

	if (is_own(disk) || depth > DEPTH_MAX)
		return true;
	if (!major(disk))
		return false; /* it is no disk */
	read_attribute(disk, "partition", text, sizeof(text));
	if (*text) {
		read_attribute(disk, "../dev", text, sizeof(text));
		return parse_device(text, &whole) && disk_depends(whole, depth + 1);
	}
	return loop_depends(disk, depth) || slaves_depend(disk, depth);
}

static bool recall(dev_t device, uint64_t now_ns, bool *depends)
{
	bool found = false;

	pthread_mutex_lock(&remembered_lock);
	for (unsigned i = 0; i < REMEMBERED && !found; i++) {
		found = remembered[i].device == device && now_ns < remembered[i].until_ns;
		*depends = remembered[i].depends;
	}
	pthread_mutex_unlock(&remembered_lock);
	return found;
}

static void remember(dev_t device, uint64_t now_ns, bool depends)
{
	pthread_mutex_lock(&remembered_lock);
	remembered[next_remembered].device = device;
	remembered[next_remembered].until_ns = now_ns + REMEMBERED_S * NS_PER_S;
	remembered[next_remembered].depends = depends;
	next_remembered = (next_remembered + 1) % REMEMBERED;
	pthread_mutex_unlock(&remembered_lock);
}

int dependence_check(int fd, const char *path, struct error *error)
{
	uint64_t now_ns = clock_now_ns();
	struct stat status;
	bool depends;

	if (is_own(0) || fstat(fd, &status))
		return 0;
	if (!recall(status.st_dev, now_ns, &depends)) {
		depends = fs_depends(fd, 0);
		remember(status.st_dev, now_ns, depends);
	}
	if (!depends)
		return 0;
	error_set_hint(error, "put it on another file system");
	return error_set(error, -EDEADLK,
			 "'%.200s' is on a file system of the device which is served from it",
			 path);
}
