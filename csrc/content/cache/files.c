/* SPDX-License-Identifier: MIT */
/* The two files of a content: makes, checks or discards them. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "base/fileio.h"
#include "base/fnv.h"
#include "base/message.h"
#include "content/cache/internal.h"

enum { FILE_NAME_BYTES = CACHE_NAME_BYTES + 16 };

static const char *file_name(const char *name, const char *ending, char text[FILE_NAME_BYTES])
{
	snprintf(text, FILE_NAME_BYTES, "%s%s", name, ending);
	return text;
}

static uint64_t header_checksum(const struct cache_header *header)
{
	return fnv_add(FNV_BEGIN, header, offsetof(struct cache_header, checksum));
}

static int header_make(struct cache_header *header, const uint8_t *key,
		       const struct content_shape *shape)
{
	memset(header, 0, sizeof(*header));
	memcpy(header->magic, CACHE_MAGIC, sizeof(CACHE_MAGIC));
	header->version = htole32(CACHE_VERSION);
	header->unit_bytes = htole32(shape->unit_bytes);
	header->size = htole64(shape->size);
	memcpy(header->key, key, sizeof(header->key));
	if (getrandom(header->id, sizeof(header->id), 0) != sizeof(header->id))
		return -EIO;
	header->checksum = htole64(header_checksum(header));
	return 0;
}

/* Returns what is wrong with a header, or NULL. `*newer`: a later version may understand it. */
static const char *header_fault(const struct cache_header *header, const uint8_t *key,
				const struct content_shape *shape, bool *newer)
{
	uint32_t unit_bytes = le32toh(header->unit_bytes);

	if (memcmp(header->magic, CACHE_MAGIC, sizeof(CACHE_MAGIC)))
		return "it does not begin with the magic number of such files";
	*newer = le32toh(header->version) > CACHE_VERSION;
	if (*newer)
		return "a newer version of btrfs-ublk has written it";
	if (header_checksum(header) != le64toh(header->checksum))
		return "its header is damaged";
	if (le32toh(header->version) != CACHE_VERSION)
		return "it has another version of the format";
	if (memcmp(header->key, key, sizeof(header->key)))
		return "it belongs to another content";
	if (unit_bytes < SOURCE_UNIT_MIN_BYTES || unit_bytes > SOURCE_UNIT_MAX_BYTES ||
	    unit_bytes & (unit_bytes - 1) || !header->size || le64toh(header->size) > INT64_MAX / 2)
		return "its header has an invalid size or unit";
	if (shape && (shape->unit_bytes != unit_bytes || shape->size != le64toh(header->size)))
		return "its size or unit is not the content's";
	return NULL;
}

static int open_existing(const struct cache *cache, const char *name, const char *ending, int flags,
			 int *fd)
{
	char text[FILE_NAME_BYTES];
	struct stat status;

	/* O_NONBLOCK: opening a FIFO must not hang. */
	*fd = openat(cache->dir_fd, file_name(name, ending, text),
		     O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | flags);
	if (*fd < 0)
		return errno == ELOOP || errno == ENXIO || errno == EISDIR ? -EUCLEAN : -errno;
	if (fstat(*fd, &status))
		return -errno;
	if (!S_ISREG(status.st_mode))
		return -EUCLEAN;
	/* NB: io_uring takes O_NONBLOCK as a promise that reads never wait. */
	return fcntl(*fd, F_SETFL, flags) ? -errno : 0;
}

static int check_sizes(const struct content_files *files)
{
	uint64_t size = le64toh(files->header.size);
	uint64_t units = (size - 1) / le32toh(files->header.unit_bytes) + 1;
	struct stat data, bits;

	if (fstat(files->data_fd, &data) || fstat(files->bits_fd, &bits))
		return -errno;
	if ((uint64_t)data.st_size != cache_file_bytes(size) ||
	    (uint64_t)bits.st_size !=
		    CACHE_HEADER_BYTES + cache_group_count(units) * sizeof(struct cache_group))
		return -EUCLEAN;
	return 0;
}

/*
 * Returns 0, -EUCLEAN (the files are damaged; `*fault` says how), -EPROTONOSUPPORT, or another
 * negative errno.
 */
static int check_files(struct content_files *files, const uint8_t *key,
		       const struct content_shape *shape, const char **fault)
{
	struct cache_header twin;
	bool newer = false;
	int err = pread_full(files->bits_fd, &files->header, sizeof(files->header), 0);

	*fault = "it is too short";
	if (err == -EIO)
		return -EUCLEAN;
	if (err)
		return err;
	*fault = header_fault(&files->header, key, shape, &newer);
	if (*fault)
		return newer ? -EPROTONOSUPPORT : -EUCLEAN;
	*fault = "a file of it has the wrong size";
	err = check_sizes(files);
	if (!err)
		err = pread_full(files->data_fd, &twin, sizeof(twin),
				 cache_data_bytes(le64toh(files->header.size)));
	if (err)
		return err;
	*fault = "its data and its bits do not belong together";
	return memcmp(&twin, &files->header, sizeof(twin)) ? -EUCLEAN : 0;
}

int content_remove(struct cache *cache, const char *name)
{
	static const char *const endings[] = { ".bits", ".data" };
	_cleanup_close_ int data_fd = -1;
	char text[FILE_NAME_BYTES];

	/* A process that has the content open holds a shared lock on its data. */
	data_fd = openat(cache->dir_fd, file_name(name, ".data", text),
			 O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
	if (data_fd >= 0 && flock(data_fd, LOCK_EX | LOCK_NB))
		return -EBUSY;
	/* Remove the bits first: data without bits mean nothing. */
	for (unsigned i = 0; i < 2; i++) {
		int err = unlinkat(cache->dir_fd, file_name(name, endings[i], text), 0) ? -errno :
											  0;

		if (err && err != -ENOENT)
			return err;
	}
	return 0;
}

/*
 * No sync is needed: bits are set only after both files were synced, and until then a file that a
 * crash has cut is discarded. A temporary name keeps others from taking half a file for a damaged
 * one.
 */
static int make_file(const struct cache *cache, const char *name, const char *ending,
		     uint64_t header_at, uint64_t bytes, const struct cache_header *header, int *fd)
{
	char temporary[FILE_NAME_BYTES], text[FILE_NAME_BYTES];
	int err;

	file_name(name, ".new", temporary);
	*fd = openat(cache->dir_fd, temporary, O_RDWR | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC,
		     0600);
	if (*fd < 0)
		return -errno;
	err = ftruncate(*fd, (off_t)bytes) ? -errno : 0;
	if (!err)
		err = pwrite_full(*fd, header, sizeof(*header), header_at);
	if (!err &&
	    renameat(cache->dir_fd, temporary, cache->dir_fd, file_name(name, ending, text)))
		err = -errno;
	if (err)
		unlinkat(cache->dir_fd, temporary, 0);
	return err;
}

static int make_files(struct cache *cache, const char *name, const uint8_t *key,
		      const struct content_shape *shape, struct content_files *files)
{
	uint64_t units = (shape->size - 1) / shape->unit_bytes + 1;
	uint64_t bits_bytes =
		CACHE_HEADER_BYTES + cache_group_count(units) * sizeof(struct cache_group);
	int err = header_make(&files->header, key, shape);

	if (!err)
		err = make_file(cache, name, ".data", cache_data_bytes(shape->size),
				cache_file_bytes(shape->size), &files->header, &files->data_fd);
	if (!err)
		err = make_file(cache, name, ".bits", 0, bits_bytes, &files->header,
				&files->bits_fd);
	/*
	 * Reading a hole in a mapping of tmpfs takes space, and SIGBUS is how it says that there is
	 * none.
	 */
	if (!err && fallocate(files->bits_fd, 0, 0, (off_t)bits_bytes) && errno != EOPNOTSUPP)
		err = -errno;
	if (err)
		content_remove(cache, name);
	return err;
}

static void close_files(struct content_files *files)
{
	cleanup_close(&files->data_fd);
	cleanup_close(&files->bits_fd);
	files->data_fd = files->bits_fd = -1;
}

int content_files_open(struct cache *cache, const char *name,
		       const uint8_t key[static SOURCE_KEY_BYTES],
		       const struct content_shape *shape, struct content_files *files,
		       struct error *error)
{
	const char *fault = "one of its two files is missing";
	int data_err, bits_err, err;

	/* Administration and eviction are no use of a content, so they keep its times. */
	data_err = open_existing(cache, name, ".data", shape ? 0 : O_NOATIME, &files->data_fd);
	bits_err = open_existing(cache, name, ".bits", 0, &files->bits_fd);
	if (data_err == -ENOENT && bits_err == -ENOENT) {
		err = -ENOENT;
	} else if (data_err == -ENOENT || bits_err == -ENOENT) {
		err = -EUCLEAN;
	} else {
		fault = "it is not a regular file";
		err = data_err ? data_err : bits_err;
		if (!err)
			err = check_files(files, key, shape, &fault);
	}
	if (!err)
		goto found;
	close_files(files);
	if (err == -ENOENT && !shape)
		return err;
	if (err != -ENOENT && err != -EUCLEAN)
		return error_set(error, err, "cannot use %s.bits in the cache '%s': %s", name,
				 cache->path, err == -EPROTONOSUPPORT ? fault : strerror(-err));
	if (err == -EUCLEAN) {
		if (!shape)
			return error_set(error, err, "%s in the cache '%s': %s", name, cache->path,
					 fault);
		err = content_remove(cache, name);
		if (err)
			return error_set(error, err,
					 "%s in the cache '%s' is damaged (%s), and cannot be "
					 "removed: %s",
					 name, cache->path, fault, strerror(-err));
		msg_warning("%s in the cache '%s' was discarded: %s", name, cache->path, fault);
	}
	err = make_files(cache, name, key, shape, files);
	if (err) {
		close_files(files);
		return error_set(error, err, "cannot make files of %llu bytes in '%s': %s",
				 (unsigned long long)shape->size, cache->path, strerror(-err));
	}
found:
	if (flock(files->data_fd, LOCK_SH | LOCK_NB)) {
		err = -errno;
		close_files(files);
		return error_set(error, err, "cannot lock %s.data in '%s': %s", name, cache->path,
				 strerror(-err));
	}
	return 0;
}
