/* SPDX-License-Identifier: MIT */
/*
 * A directory as a source. Names are read in the order of their bytes, directories before what
 * comes behind them, so two readings give one model. Nothing is followed: each name is opened in
 * its directory with O_NOFOLLOW. One descriptor of a directory is open at a time, as trees may be
 * deeper than a process may have files open; the way up is "..", and has to lead where it came
 * from.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>

#include "base/array.h"
#include "base/cleanup.h"
#include "image/place.h"
#include "image/source.h"

enum {
	READ_BYTES = 1 << 20,
	ATTRIBUTES_MAX = 1024,
};

/* A directory on the way down. */
struct level {
	uint32_t inode;
	uint32_t next; /* the name that comes next */
	uint32_t count;
	char **names;
	dev_t dev;
	ino_t ino;
};

struct linked {
	dev_t dev;
	ino_t ino;
	uint32_t inode;
};

struct reading {
	struct model *model;
	struct placement placement;
	struct content_sink *sink;
	struct source_report *report;
	struct error *error;
	int fd; /* of the deepest level */
	struct level *levels;
	size_t depth, room;
	struct pool linked; /* inodes that have several names, found by by_file */
	struct index by_file;
	char *buffer;
	/* Attributes of one inode. */
	char *names, *values;
	struct model_attribute *attributes;
};

static int compare_names(const void *a, const void *b)
{
	return strcmp(*(char *const *)a, *(char *const *)b);
}

static void level_deinit(struct level *level)
{
	for (uint32_t i = 0; i < level->count; i++)
		free(level->names[i]);
	free(level->names);
}

/* Sets an error that has the name of the file in front: of `entry`, or of the top if that is 0. */
static int failed(struct reading *reading, int err, const char *name, const char *what)
{
	char path[200];
	uint32_t directory = reading->depth ? reading->levels[reading->depth - 1].inode : 0;

	if (what)
		error_set_text(reading->error, "%s: %s", what, strerror(-err));
	if (!directory)
		return source_error_at(reading->error, err, name);
	model_path(reading->model, model_inode(reading->model, directory)->name, path,
		   sizeof(path) - 1);
	if (*path)
		strcat(path, "/");
	{
		_cleanup_free_ char *whole = malloc(strlen(path) + strlen(name) + 1);

		if (!whole)
			return err;
		strcpy(whole, path);
		strcat(whole, name);
		return source_error_at(reading->error, err, whole);
	}
}

static int list_names(struct reading *reading, struct level *level)
{
	int copy = openat(reading->fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *stream = copy < 0 ? NULL : fdopendir(copy);
	size_t room = 0;
	int err = 0;

	if (!stream) {
		err = -errno;
		cleanup_close(&copy);
		return err;
	}
	while (!err) {
		const struct dirent *entry;

		errno = 0;
		entry = readdir(stream);
		if (!entry) {
			err = -errno;
			break;
		}
		if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))
			continue;
		err = array_reserve(level->names, room, level->count + 1);
		if (err)
			break;
		level->names[level->count] = strdup(entry->d_name);
		if (!level->names[level->count])
			err = -ENOMEM;
		else
			level->count++;
	}
	closedir(stream);
	if (!err && level->count)
		qsort(level->names, level->count, sizeof(*level->names), compare_names);
	return err;
}

/*
 * `fd` is that of a file or directory, or -1: then it is `name` in the present directory, of a type
 * that cannot be opened.
 */
static ssize_t list_attributes(int fd, const char *path, char *names, size_t bytes)
{
	return fd >= 0 ? flistxattr(fd, names, bytes) : llistxattr(path, names, bytes);
}

static ssize_t get_attribute(int fd, const char *path, const char *name, char *value, size_t bytes)
{
	return fd >= 0 ? fgetxattr(fd, name, value, bytes) : lgetxattr(path, name, value, bytes);
}

/*
 * Labels and signatures that a machine gives to the files on its own disks. Where the image is
 * mounted, another policy and other keys apply. A tar has only those that somebody put there.
 */
static bool is_of_this_machine(const char *name)
{
	return !strcmp(name, "security.selinux") || !strcmp(name, "security.evm") ||
	       !strcmp(name, "security.ima");
}

static int read_attributes(struct reading *reading, int fd, const char *name, uint32_t inode)
{
	char path[64 + NAME_MAX];
	size_t count = 0, used = 0;
	ssize_t listed;

	/* NOLINTNEXTLINE(bugprone-unused-return-value): it has room for any name. */
	(void)snprintf(path, sizeof(path), "/proc/self/fd/%d/%s", reading->fd, name);
	listed = list_attributes(fd, path, reading->names, XATTR_LIST_MAX);
	if (listed < 0)
		return errno == EOPNOTSUPP ? 0 : failed(reading, -errno, name, "its attributes");
	for (const char *at = reading->names; at < reading->names + listed; at += strlen(at) + 1) {
		ssize_t bytes;

		if (!source_keeps_attribute(at) || is_of_this_machine(at))
			continue;
		if (count == ATTRIBUTES_MAX || used + XATTR_SIZE_MAX > ARENA_PIECE_BYTES_MAX)
			return failed(reading, -E2BIG, name, "its attributes");
		bytes = get_attribute(fd, path, at, reading->values + used, XATTR_SIZE_MAX);
		if (bytes < 0)
			return failed(reading, -errno, name, at);
		reading->attributes[count++] = (struct model_attribute){
			.name = at,
			.name_bytes = (uint16_t)strlen(at),
			.value = (const uint8_t *)reading->values + used,
			.value_bytes = (uint32_t)bytes,
		};
		used += (size_t)bytes;
	}
	if (model_set_attributes(reading->model, inode, reading->attributes, count, reading->error))
		return failed(reading, -EINVAL, name, NULL);
	return 0;
}

static int read_range(struct reading *reading, int fd, off_t from, off_t to)
{
	while (from < to) {
		size_t wanted = to - from < READ_BYTES ? (size_t)(to - from) : READ_BYTES;
		ssize_t got = pread(fd, reading->buffer, wanted, from);
		int err;

		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0)
			return error_set(reading->error, -errno, "reading at %lld: %s",
					 (long long)from, strerror(errno));
		if (!got)
			return error_set(reading->error, -EAGAIN,
					 "it became shorter while it was read");
		err = reading->sink->ops->data(reading->sink, reading->buffer, (size_t)got,
					       reading->error);
		if (err)
			return err;
		from += got;
	}
	return 0;
}

static int read_ranges(struct reading *reading, int fd, const struct stat *stat)
{
	/* What has as many blocks as bytes has no holes: most files. */
	bool is_dense = stat->st_blocks >= (stat->st_size + 511) / 512;
	off_t at = 0;
	int err = 0;

	while (!err && at < stat->st_size) {
		off_t data = is_dense ? at : lseek(fd, at, SEEK_DATA);
		off_t end = stat->st_size;

		if (data < 0 && errno == EINVAL) {
			data = at;
			is_dense = true;
		} else if (data < 0 && errno == ENXIO) {
			data = end;
		} else if (data < 0) {
			return error_set(reading->error, -errno, "looking for holes: %s",
					 strerror(errno));
		}
		if (data > end)
			data = end;
		if (!is_dense && data < end) {
			off_t hole = lseek(fd, data, SEEK_HOLE);

			if (hole > data && hole < end)
				end = hole;
		}
		if (data > at)
			err = reading->sink->ops->hole(reading->sink, (uint64_t)(data - at),
						       reading->error);
		if (!err)
			err = read_range(reading, fd, data, end);
		at = end;
	}
	return err;
}

static int read_content(struct reading *reading, int fd, const struct stat *stat, uint32_t inode)
{
	struct stat after;
	int err = reading->sink->ops->begin(reading->sink, inode, (uint64_t)stat->st_size,
					    reading->error);

	if (!err)
		err = read_ranges(reading, fd, stat);
	if (!err && fstat(fd, &after))
		err = error_set(reading->error, -errno, "%s", strerror(errno));
	if (!err &&
	    (after.st_size != stat->st_size || after.st_mtim.tv_sec != stat->st_mtim.tv_sec ||
	     after.st_mtim.tv_nsec != stat->st_mtim.tv_nsec))
		err = error_set(reading->error, -EAGAIN, "it was changed while it was read");
	return err ?: reading->sink->ops->end(reading->sink, reading->error);
}

static struct model_stat stat_of(const struct stat *stat)
{
	bool is_device = S_ISCHR(stat->st_mode) || S_ISBLK(stat->st_mode);

	return (struct model_stat){
		.mtime_s = stat->st_mtim.tv_sec,
		.mtime_ns = (uint32_t)stat->st_mtim.tv_nsec,
		.mode = stat->st_mode,
		.uid = stat->st_uid,
		.gid = stat->st_gid,
		.major = is_device ? major(stat->st_rdev) : 0,
		.minor = is_device ? minor(stat->st_rdev) : 0,
	};
}

static bool same_file(const void *context, uint32_t value, const void *key)
{
	const struct linked *linked = pool_at(context, value - 1);
	const struct stat *stat = key;

	return linked->dev == stat->st_dev && linked->ino == stat->st_ino;
}

/* The inode's number if one of its other names was read already, or 0. */
static uint32_t find_linked(const struct reading *reading, const struct stat *stat)
{
	uint32_t hash =
		index_hash(&reading->by_file, stat->st_ino, &stat->st_dev, sizeof(stat->st_dev));
	uint32_t value = index_find(&reading->by_file, hash, same_file, &reading->linked, stat);

	return value ? ((const struct linked *)pool_at(&reading->linked, value - 1))->inode : 0;
}

static int remember_linked(struct reading *reading, const struct stat *stat, uint32_t inode)
{
	uint32_t hash =
		index_hash(&reading->by_file, stat->st_ino, &stat->st_dev, sizeof(stat->st_dev));
	struct linked *linked = pool_add(&reading->linked);

	if (!linked || index_add(&reading->by_file, hash, reading->linked.count))
		return -ENOMEM;
	*linked = (struct linked){ stat->st_dev, stat->st_ino, inode };
	return 0;
}

static int read_target(struct reading *reading, const char *name, uint32_t inode)
{
	ssize_t bytes = readlinkat(reading->fd, name, reading->buffer, READ_BYTES);

	if (bytes < 0)
		return error_set(reading->error, -errno, "%s", strerror(errno));
	return model_set_target(reading->model, inode, reading->buffer, (size_t)bytes,
				reading->error);
}

/* Takes over `fd`, and reads the names of the directory. */
static int descend(struct reading *reading, int fd, const char *name, uint32_t inode,
		   const struct stat *stat)
{
	struct level *level;
	int err;

	if (array_reserve(reading->levels, reading->room, reading->depth + 1)) {
		close(fd);
		return failed(reading, -ENOMEM, name, "no memory");
	}
	level = &reading->levels[reading->depth++];
	*level = (struct level){ .inode = inode, .dev = stat->st_dev, .ino = stat->st_ino };
	cleanup_close(&reading->fd);
	reading->fd = fd;
	err = list_names(reading, level);
	return err ? failed(reading, err, ".", "reading the directory") : 0;
}

static int ascend(struct reading *reading)
{
	const struct level *level;
	struct stat stat;
	int fd;

	level_deinit(&reading->levels[--reading->depth]);
	if (!reading->depth)
		return 0;
	level = &reading->levels[reading->depth - 1];
	fd = openat(reading->fd, "..", O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	close(reading->fd);
	reading->fd = fd;
	if (fd < 0 || fstat(fd, &stat))
		return failed(reading, -errno, ".", "going back to it");
	if (stat.st_dev != level->dev || stat.st_ino != level->ino) {
		error_set_text(reading->error, "a directory in it was moved while it was read");
		return failed(reading, -EAGAIN, ".", NULL);
	}
	return 0;
}

static int open_entry(struct reading *reading, const char *name, struct stat *stat, int *fd)
{
	struct stat opened;

	*fd = -1;
	if (fstatat(reading->fd, name, stat, AT_SYMLINK_NOFOLLOW))
		return failed(reading, -errno, name, "looking at it");
	if (!S_ISREG(stat->st_mode) && !S_ISDIR(stat->st_mode))
		return 0;
	*fd = openat(reading->fd, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
	if (*fd < 0 || fstat(*fd, &opened))
		return failed(reading, -errno, name, "opening it");
	if (opened.st_dev != stat->st_dev || opened.st_ino != stat->st_ino ||
	    (opened.st_mode & S_IFMT) != (stat->st_mode & S_IFMT)) {
		error_set_text(reading->error, "it was replaced while it was read");
		return failed(reading, -EAGAIN, name, NULL);
	}
	*stat = opened;
	return 0;
}

static int read_entry(struct reading *reading, uint32_t parent, const char *name)
{
	struct place place = { .parent = parent, .name = name, .name_bytes = strlen(name) };
	_cleanup_close_ int fd = -1;
	struct model_stat attributes;
	uint32_t inode = 0;
	struct stat stat;
	bool is_linked;
	int err = open_entry(reading, name, &stat, &fd);

	if (err)
		return err;
	reading->report->entries++;
	attributes = stat_of(&stat);
	place.entry = model_find(reading->model, parent, name, place.name_bytes);
	is_linked = stat.st_nlink > 1 && !S_ISDIR(stat.st_mode);
	if (is_linked)
		inode = find_linked(reading, &stat);
	if (inode) {
		err = place_link(&reading->placement, &place, inode, reading->error);
		return err ? failed(reading, err, name, NULL) : 0;
	}
	err = place_inode(&reading->placement, &place, &attributes, &inode, reading->error);
	if (err)
		return failed(reading, err, name, NULL);
	if (is_linked && remember_linked(reading, &stat, inode))
		return failed(reading, -ENOMEM, name, "no memory");
	err = read_attributes(reading, fd, name, inode);
	if (err)
		return err;
	if (S_ISDIR(stat.st_mode))
		return descend(reading, take_fd(&fd), name, inode, &stat);
	if (S_ISLNK(stat.st_mode))
		err = read_target(reading, name, inode);
	if (S_ISREG(stat.st_mode)) {
		model_inode(reading->model, inode)->bytes = (uint64_t)stat.st_size;
		if (stat.st_size)
			err = read_content(reading, fd, &stat, inode);
	}
	return err ? failed(reading, err, name, NULL) : 0;
}

static void reading_deinit(struct reading *reading)
{
	while (reading->depth)
		level_deinit(&reading->levels[--reading->depth]);
	free(reading->levels);
	cleanup_close(&reading->fd);
	pool_deinit(&reading->linked);
	index_deinit(&reading->by_file);
	free(reading->buffer);
	free(reading->names);
	free(reading->values);
	free(reading->attributes);
}

static int read_top(struct reading *reading, const char *path)
{
	const struct place top = { 0 };
	struct model_stat attributes;
	_cleanup_close_ int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	uint32_t inode;
	struct stat stat;
	int err;

	if (fd < 0 || fstat(fd, &stat))
		return failed(reading, -errno, path, "opening the directory");
	attributes = stat_of(&stat);
	err = place_inode(&reading->placement, &top, &attributes, &inode, reading->error);
	if (!err)
		err = read_attributes(reading, fd, ".", inode);
	return err ?: descend(reading, take_fd(&fd), path, inode, &stat);
}

int source_read_directory(struct model *model, struct content_sink *sink,
			  const struct source_options *options, struct source_report *report,
			  struct error *error)
{
	_cleanup_(reading_deinit) struct reading reading = {
		.model = model,
		.placement = { .model = model },
		.sink = sink,
		.report = report,
		.error = error,
		.fd = -1,
		.linked.element_bytes = sizeof(struct linked),
		.buffer = malloc(READ_BYTES),
		.names = malloc(XATTR_LIST_MAX),
		.values = malloc(ARENA_PIECE_BYTES_MAX),
		.attributes = calloc(ATTRIBUTES_MAX, sizeof(struct model_attribute)),
	};
	int err;

	*report = (struct source_report){ 0 };
	if (!reading.buffer || !reading.names || !reading.values || !reading.attributes)
		return error_set(error, -ENOMEM, "no memory for reading a directory");
	err = index_init(&reading.by_file);
	if (err)
		return error_set(error, err, "no random numbers: %s", strerror(-err));
	err = read_top(&reading, options->path);
	while (!err && reading.depth) {
		struct level *level = &reading.levels[reading.depth - 1];

		if (level->next < level->count) {
			const char *name = level->names[level->next++];

			err = read_entry(&reading, level->inode, name);
		} else {
			err = ascend(&reading);
		}
	}
	return err;
}
