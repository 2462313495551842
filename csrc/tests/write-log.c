/* SPDX-License-Identifier: MIT */
/*
 * To be preloaded. Appends to the file WRITE_LOG what any process does to files in WRITE_LOG_DIR,
 * in the order of the calls. The directory must exist and be empty. Also logs each fflush(3) of
 * standard output, with which a program acknowledges something. tests/support/disks.py reads the log,
 * and finds out what a loss of power may leave.
 *
 * A record is a `struct record`, the name as a path below WRITE_LOG_DIR, and the data. Names are
 * those of files and directories, which are inodes as well. Writes through mappings are not logged.
 */
/* This file defines both names of each call, such as `pwrite` and `pwrite64`. */
#undef _FILE_OFFSET_BITS

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/falloc.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

enum kind {
	LOG_CREATE = 1, /* name, or none yet */
	LOG_WRITE,	/* at offset, data */
	LOG_TRUNCATE,	/* to offset */
	LOG_PUNCH,	/* offset, length */
	LOG_SYNC,	/* a file was synced */
	LOG_SYNC_NAMES, /* the directory of that name was synced */
	LOG_RENAME,	/* its new name */
	LOG_UNLINK,	/* name */
	LOG_ANSWER,	/* standard output was flushed */
	LOG_LINK,	/* another name of a file */
	LOG_MKDIR,	/* name */
};

struct record {
	uint32_t kind, name_bytes;
	uint64_t file; /* its inode */
	uint64_t offset, length, data_bytes;
};

enum { INODES_MAX = 4096 };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int log_fd = -1;
static char directory[4096];
static uint64_t inodes[INODES_MAX];
static unsigned inode_count;

static void *next_of(const char *name)
{
	void *function = dlsym(RTLD_NEXT, name);

	if (!function)
		abort();
	return function;
}

/* Sets `next` to the function `name` that this file replaces. */
#define FIND_NEXT(name)                  \
	static __typeof__(&(name)) next; \
                                         \
	if (!next)                       \
	next = (__typeof__(&(name)))next_of(#name)

__attribute__((constructor)) static void init(void)
{
	const char *path = getenv("WRITE_LOG"), *where = getenv("WRITE_LOG_DIR");

	if (!path || !where || !realpath(where, directory))
		return;
	log_fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
}

/* Until leave(), no other thread or process can do anything that is logged. */
static void enter(void)
{
	pthread_mutex_lock(&mutex);
	if (log_fd >= 0)
		flock(log_fd, LOCK_EX);
}

static void leave(void)
{
	int err = errno;

	if (log_fd >= 0)
		flock(log_fd, LOCK_UN);
	pthread_mutex_unlock(&mutex);
	errno = err;
}

static void put(const void *data, size_t length)
{
	static __typeof__(&write) real;

	if (!real)
		real = (__typeof__(&write))next_of("write");
	if (length && real(log_fd, data, length) != (ssize_t)length)
		abort();
}

static void add(enum kind kind, uint64_t file, const char *name, uint64_t offset, uint64_t length,
		const void *data, size_t data_bytes)
{
	int err = errno;
	struct record record = {
		.kind = kind,
		.file = file,
		.offset = offset,
		.length = length,
		.data_bytes = data_bytes,
	};

	record.name_bytes = name ? (uint32_t)strlen(name) : 0;
	put(&record, sizeof(record));
	put(name, record.name_bytes);
	put(data, data_bytes);
	errno = err;
}

/*
 * Puts into `path` where a descriptor leads: with `name`, that of a directory, and the name appended.
 * Returns what of it is below the directory that is logged, "" for that itself, or NULL.
 */
static const char *inside(int fd, const char *name, char path[static PATH_MAX])
{
	char link[64];
	size_t length = strlen(directory);
	ssize_t got;

	snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	got = readlink(link, path, PATH_MAX - 1);
	if (got < 0 || (size_t)got + (name ? strlen(name) : 0) + 2 > PATH_MAX)
		return NULL;
	path[got] = '\0';
	if (name) {
		path[got] = '/';
		memcpy(path + got + 1, name, strlen(name) + 1);
	}
	if (strncmp(path, directory, length))
		return NULL;
	if (!path[length])
		return path + length;
	return path[length] == '/' ? path + length + 1 : NULL;
}

/* As inside(), of a path that is given to a system call, whose last part may not be there. */
static const char *inside_at(int at, const char *given, char path[static PATH_MAX])
{
	static __typeof__(&openat) real;
	char parent[PATH_MAX];
	const char *last = strrchr(given, '/'), *found;
	int err = errno, fd;

	if (log_fd < 0 || strlen(given) >= sizeof(parent))
		return NULL;
	if (!real)
		real = (__typeof__(&openat))next_of("openat64");
	memcpy(parent, given, strlen(given) + 1);
	if (last)
		parent[last - given + (last == given)] = '\0';
	fd = real(at, last ? parent : ".", O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (fd < 0) {
		errno = err;
		return NULL;
	}
	found = inside(fd, last ? last + 1 : given, path);
	close(fd);
	errno = err;
	return found;
}

static bool is_logged(uint64_t inode)
{
	for (unsigned i = 0; i < inode_count; i++) {
		if (inodes[i] == inode)
			return true;
	}
	return false;
}

static void remember(uint64_t inode)
{
	if (!is_logged(inode) && inode_count < INODES_MAX)
		inodes[inode_count++] = inode;
}

/* Returns the inode of a file that is logged, or 0 for other files. */
static uint64_t file_of(int fd)
{
	struct stat status;

	if (log_fd < 0 || fstat(fd, &status) || !S_ISREG(status.st_mode))
		return 0;
	return is_logged(status.st_ino) ? status.st_ino : 0;
}

static void opened(int fd, int flags, bool existed)
{
	char path[PATH_MAX];
	const char *name;
	struct stat status;

	if (fd < 0 || log_fd < 0 || fstat(fd, &status) || !S_ISREG(status.st_mode))
		return;
	name = inside(fd, NULL, path);
	if (!name)
		return;
	/* A file that has no name yet gets one by link(2). */
	if (!existed)
		add(LOG_CREATE, status.st_ino, (flags & O_TMPFILE) == O_TMPFILE ? "" : name, 0, 0,
		    NULL, 0);
	remember(status.st_ino);
}

static int open_and_log(int (*next)(int, const char *, int, ...), int at, const char *name,
			int flags, mode_t mode)
{
	struct stat status;
	bool existed;
	int fd;

	enter();
	existed = (flags & O_TMPFILE) != O_TMPFILE &&
		  (!(flags & O_CREAT) || !fstatat(at, name, &status, AT_SYMLINK_NOFOLLOW));
	fd = next(at, name, flags, mode);
	opened(fd, flags, existed);
	if (fd >= 0 && existed && flags & O_TRUNC && file_of(fd))
		add(LOG_TRUNCATE, file_of(fd), NULL, 0, 0, NULL, 0);
	leave();
	return fd;
}

static mode_t mode_of(int flags, va_list args)
{
	return flags & (O_CREAT | __O_TMPFILE) ? va_arg(args, mode_t) : 0;
}

/* Opens without a directory are the same as with the current directory. */
#define DEFINE_OPENAT(name, parameters, at)                              \
	int name parameters                                              \
	{                                                                \
		static __typeof__(&openat) next;                         \
		va_list args;                                            \
		mode_t mode;                                             \
                                                                         \
		if (!next)                                               \
			next = (__typeof__(&openat))next_of("openat64"); \
		va_start(args, flags);                                   \
		mode = mode_of(flags, args);                             \
		va_end(args);                                            \
		return open_and_log(next, at, path, flags, mode);        \
	}
DEFINE_OPENAT(open, (const char *path, int flags, ...), AT_FDCWD)
DEFINE_OPENAT(open64, (const char *path, int flags, ...), AT_FDCWD)
DEFINE_OPENAT(openat, (int at, const char *path, int flags, ...), at)
DEFINE_OPENAT(openat64, (int at, const char *path, int flags, ...), at)

ssize_t write(int fd, const void *data, size_t length)
{
	uint64_t file;
	off_t offset;
	ssize_t done;

	FIND_NEXT(write);
	/* Do not lock here: a write to a pipe may wait for long. */
	if (!file_of(fd))
		return next(fd, data, length);
	enter();
	file = file_of(fd);
	offset = file ? lseek(fd, 0, fcntl(fd, F_GETFL) & O_APPEND ? SEEK_END : SEEK_CUR) : 0;
	done = next(fd, data, length);
	if (file && done > 0)
		add(LOG_WRITE, file, NULL, (uint64_t)offset, 0, data, (size_t)done);
	leave();
	return done;
}

#define DEFINE_PWRITE(name, offset_type)                                                     \
	ssize_t name(int fd, const void *data, size_t length, offset_type offset)            \
	{                                                                                    \
		uint64_t file;                                                               \
		ssize_t done;                                                                \
                                                                                             \
		FIND_NEXT(name);                                                             \
		enter();                                                                     \
		file = file_of(fd);                                                          \
		done = next(fd, data, length, offset);                                       \
		if (file && done > 0)                                                        \
			add(LOG_WRITE, file, NULL, (uint64_t)offset, 0, data, (size_t)done); \
		leave();                                                                     \
		return done;                                                                 \
	}
DEFINE_PWRITE(pwrite, off_t)
DEFINE_PWRITE(pwrite64, off64_t)

#define DEFINE_TRUNCATE(name, offset_type)                                           \
	int name(int fd, offset_type length)                                         \
	{                                                                            \
		uint64_t file;                                                       \
		int result;                                                          \
                                                                                     \
		FIND_NEXT(name);                                                     \
		enter();                                                             \
		file = file_of(fd);                                                  \
		result = next(fd, length);                                           \
		if (file && !result)                                                 \
			add(LOG_TRUNCATE, file, NULL, (uint64_t)length, 0, NULL, 0); \
		leave();                                                             \
		return result;                                                       \
	}
DEFINE_TRUNCATE(ftruncate, off_t)
DEFINE_TRUNCATE(ftruncate64, off64_t)

/* NB: only holes are logged, as other modes change nothing that a reader could see. */
#define DEFINE_FALLOCATE(name, offset_type)                                                      \
	int name(int fd, int mode, offset_type offset, offset_type length)                       \
	{                                                                                        \
		uint64_t file;                                                                   \
		int result;                                                                      \
                                                                                                 \
		FIND_NEXT(name);                                                                 \
		enter();                                                                         \
		file = file_of(fd);                                                              \
		result = next(fd, mode, offset, length);                                         \
		if (file && !result && mode & FALLOC_FL_PUNCH_HOLE)                              \
			add(LOG_PUNCH, file, NULL, (uint64_t)offset, (uint64_t)length, NULL, 0); \
		leave();                                                                         \
		return result;                                                                   \
	}
DEFINE_FALLOCATE(fallocate, off_t)
DEFINE_FALLOCATE(fallocate64, off64_t)

static void synced(int fd)
{
	char path[PATH_MAX];
	uint64_t file = file_of(fd);
	struct stat status;
	const char *name;

	if (file) {
		add(LOG_SYNC, file, NULL, 0, 0, NULL, 0);
		return;
	}
	if (log_fd < 0 || fstat(fd, &status) || !S_ISDIR(status.st_mode))
		return;
	name = inside(fd, NULL, path);
	if (name)
		add(LOG_SYNC_NAMES, 0, name, 0, 0, NULL, 0);
}

#define DEFINE_SYNC(name)           \
	int name(int fd)            \
	{                           \
		int result;         \
                                    \
		FIND_NEXT(name);    \
		enter();            \
		result = next(fd);  \
		if (!result)        \
			synced(fd); \
		leave();            \
		return result;      \
	}
DEFINE_SYNC(fsync)
DEFINE_SYNC(fdatasync)

/* Returns the inode of what a path names, or 0. */
static uint64_t inode_of(int at, const char *path, int flags)
{
	struct stat status;

	return log_fd < 0 || fstatat(at, path, &status, flags) ? 0 : status.st_ino;
}

int renameat2(int old_at, const char *old_path, int new_at, const char *new_path, unsigned flags)
{
	char path[PATH_MAX];
	const char *name;
	uint64_t inode;
	int result;

	FIND_NEXT(renameat2);
	enter();
	inode = inode_of(old_at, old_path, AT_SYMLINK_NOFOLLOW);
	name = inside_at(old_at, old_path, path) ? inside_at(new_at, new_path, path) : NULL;
	result = next(old_at, old_path, new_at, new_path, flags);
	if (name && !result)
		add(LOG_RENAME, inode, name, 0, 0, NULL, 0);
	leave();
	return result;
}

int renameat(int old_at, const char *old_path, int new_at, const char *new_path)
{
	return renameat2(old_at, old_path, new_at, new_path, 0);
}

int rename(const char *old_path, const char *new_path)
{
	return renameat2(AT_FDCWD, old_path, AT_FDCWD, new_path, 0);
}

int linkat(int old_at, const char *old_path, int new_at, const char *new_path, int flags)
{
	char path[PATH_MAX];
	const char *name;
	uint64_t inode;
	int result;

	FIND_NEXT(linkat);
	enter();
	inode = inode_of(old_at, old_path, flags & AT_SYMLINK_FOLLOW ? 0 : AT_SYMLINK_NOFOLLOW);
	name = inside_at(new_at, new_path, path);
	result = next(old_at, old_path, new_at, new_path, flags);
	if (name && !result) {
		add(LOG_LINK, inode, name, 0, 0, NULL, 0);
		remember(inode);
	}
	leave();
	return result;
}

int link(const char *old_path, const char *new_path)
{
	return linkat(AT_FDCWD, old_path, AT_FDCWD, new_path, 0);
}

int mkdirat(int at, const char *given, mode_t mode)
{
	char path[PATH_MAX];
	const char *name;
	int result;

	FIND_NEXT(mkdirat);
	enter();
	name = inside_at(at, given, path);
	result = next(at, given, mode);
	if (name && !result)
		add(LOG_MKDIR, inode_of(at, given, AT_SYMLINK_NOFOLLOW), name, 0, 0, NULL, 0);
	leave();
	return result;
}

int mkdir(const char *path, mode_t mode)
{
	return mkdirat(AT_FDCWD, path, mode);
}

int unlinkat(int at, const char *given, int flags)
{
	char path[PATH_MAX];
	const char *name;
	uint64_t inode;
	int result;

	FIND_NEXT(unlinkat);
	enter();
	inode = inode_of(at, given, AT_SYMLINK_NOFOLLOW);
	name = inside_at(at, given, path);
	result = next(at, given, flags);
	if (name && !result)
		add(LOG_UNLINK, inode, name, 0, 0, NULL, 0);
	leave();
	return result;
}

int unlink(const char *path)
{
	return unlinkat(AT_FDCWD, path, 0);
}

int rmdir(const char *path)
{
	return unlinkat(AT_FDCWD, path, AT_REMOVEDIR);
}

int fflush(FILE *stream)
{
	int result;

	FIND_NEXT(fflush);
	enter();
	/* Log it first: once the answer is out, others may rely on it. */
	if (stream == stdout && log_fd >= 0)
		add(LOG_ANSWER, 0, NULL, 0, 0, NULL, 0);
	result = next(stream);
	leave();
	return result;
}
