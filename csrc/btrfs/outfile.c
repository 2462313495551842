/* SPDX-License-Identifier: MIT */
#include "btrfs/outfile.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "base/cleanup.h"

enum { OUTFILE_MODE = 0666, NAME_TRIES = 16 };

static int open_directory(const char *path, char name[NAME_MAX + 1])
{
	const char *slash = strrchr(path, '/');
	const char *last = slash ? slash + 1 : path;
	_cleanup_free_ char *directory = NULL;
	int fd;

	if (strlen(last) > NAME_MAX)
		return -ENAMETOOLONG;
	if (!*last)
		return -EISDIR;
	strcpy(name, last);
	if (!slash)
		directory = strdup(".");
	else
		directory = strndup(path, slash == path ? 1 : (size_t)(slash - path));
	if (!directory)
		return -ENOMEM;
	fd = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	return fd < 0 ? -errno : fd;
}

/* The name is random: one made from the file's own name might be too long. */
static int pick_temporary_name(char name[64])
{
	unsigned long long number;

	if (getrandom(&number, sizeof(number), 0) != sizeof(number))
		return -EAGAIN;
	snprintf(name, 64, ".btrfs-ublk-%d-%016llx.tmp", getpid(), number);
	return 0;
}

/* Blocks signals that would end the program, as that would leave a named file behind. */
static void block_signals(struct outfile *out)
{
	sigset_t ending;

	sigemptyset(&ending);
	sigaddset(&ending, SIGINT);
	sigaddset(&ending, SIGTERM);
	sigaddset(&ending, SIGHUP);
	out->signals_blocked = !sigprocmask(SIG_BLOCK, &ending, &out->blocked_before);
}

static int create_named(struct outfile *out)
{
	block_signals(out);
	for (int i = 0; i < NAME_TRIES; i++) {
		int ret = pick_temporary_name(out->temporary_name);

		if (ret)
			return ret;
		out->fd = openat(out->directory_fd, out->temporary_name,
				 O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, OUTFILE_MODE);
		if (out->fd >= 0)
			return 0;
		ret = -errno;
		out->temporary_name[0] = '\0'; /* do not remove another's file */
		if (ret != -EEXIST)
			return ret;
	}
	return -EEXIST;
}

int outfile_open(struct outfile *out, const char *path, bool named)
{
	*out = OUTFILE_CLOSED;
	out->directory_fd = open_directory(path, out->name);
	if (out->directory_fd < 0)
		return out->directory_fd;
	/* A nameless file gets its name through /proc. */
	if (!named && access("/proc/self/fd", X_OK) == 0) {
		out->fd = openat(out->directory_fd, ".", O_RDWR | O_TMPFILE | O_CLOEXEC,
				 OUTFILE_MODE);
		if (out->fd >= 0)
			return 0;
		if (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL && errno != ENOENT)
			return -errno;
	}
	return create_named(out);
}

/* Link the nameless file to `name` in its directory. */
static int link_as(struct outfile *out, const char *name)
{
	char self[64];

	snprintf(self, sizeof(self), "/proc/self/fd/%d", out->fd);
	if (linkat(AT_FDCWD, self, out->directory_fd, name, AT_SYMLINK_FOLLOW))
		return -errno;
	return 0;
}

int outfile_publish(struct outfile *out, bool replace)
{
	int ret;

	if (!out->temporary_name[0]) {
		ret = link_as(out, out->name);
		if (!ret || ret != -EEXIST || !replace)
			return ret;
		/* Only a rename replaces a file atomically, so this one needs a name first. */
		block_signals(out);
		ret = pick_temporary_name(out->temporary_name);
		if (!ret)
			ret = link_as(out, out->temporary_name);
		if (ret) {
			out->temporary_name[0] = '\0';
			return ret;
		}
	}
	/* Some file systems lack RENAME_NOREPLACE. There, a hard link does the same. */
	if (replace)
		ret = renameat(out->directory_fd, out->temporary_name, out->directory_fd,
			       out->name);
	else
		ret = renameat2(out->directory_fd, out->temporary_name, out->directory_fd,
				out->name, RENAME_NOREPLACE);
	if (ret && !replace && (errno == EINVAL || errno == ENOSYS)) {
		ret = linkat(out->directory_fd, out->temporary_name, out->directory_fd, out->name,
			     0);
		if (!ret)
			unlinkat(out->directory_fd, out->temporary_name, 0);
	}
	if (ret)
		return -errno;
	out->temporary_name[0] = '\0';
	return 0;
}

void outfile_close(struct outfile *out)
{
	if (out->temporary_name[0])
		unlinkat(out->directory_fd, out->temporary_name, 0);
	out->temporary_name[0] = '\0';
	cleanup_close(&out->fd);
	cleanup_close(&out->directory_fd);
	out->fd = out->directory_fd = -1;
	if (out->signals_blocked)
		sigprocmask(SIG_SETMASK, &out->blocked_before, NULL);
	out->signals_blocked = false;
}
