/* SPDX-License-Identifier: MIT */
/*
 * A tar as a source, read once from its beginning to its end.
 *
 * NB: names are bytes here. libarchive converts those of PAX headers to the character set of the
 * locale; where it cannot, it keeps the bytes and warns. In the locale "C", which a program has
 * that does not call setlocale(), it can convert ASCII only, which stays as it is.
 */
#include <archive.h>
#include <archive_entry.h>
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sysmacros.h>

#include "base/cleanup.h"
#include "base/hex.h"
#include "image/place.h"
#include "image/source.h"
#include "image/tar_acl.h"
#include "image/tar_stream.h"

enum {
	ATTRIBUTES_MAX = 1024,
	BLOCK_BYTES = 512,
	NS_PER_S = 1000000000,
	MAJOR_MAX = (1 << 12) - 1, /* of the kernel's device numbers */
	MINOR_MAX = (1 << 20) - 1,
};

struct reading {
	struct model *model;
	struct placement placement;
	struct content_sink *sink;
	const struct source_options *options;
	struct error *error;
	struct tar_stream stream;
	struct archive *archive;
	struct archive_entry *entry;
	const void *ahead; /* the first bytes of the stream, until libarchive has them */
	ssize_t ahead_bytes;
	bool is_padded;
	uint64_t content_left; /* of the entry, as far as it lies in the stream */
	struct model_attribute attributes[ATTRIBUTES_MAX];
	size_t attribute_count;
	uint8_t *acls[2];
};

/*
 * `umoci insert` leaves out what pads the last file. Where a digest proves that there was no more,
 * and all content has come, it is made up for; libarchive does not miss blocks of zeros.
 */
static ssize_t pad(struct reading *reading, const void **data)
{
	static const uint8_t zeros[BLOCK_BYTES];
	uint64_t rest = reading->stream.bytes % BLOCK_BYTES;

	if (!rest || !reading->options->diff_id || reading->content_left || reading->is_padded)
		return 0;
	reading->is_padded = true;
	*data = zeros;
	return (ssize_t)(BLOCK_BYTES - rest);
}

static la_ssize_t read_stream(struct archive *archive, void *context, const void **data)
{
	struct reading *reading = context;
	ssize_t got = reading->ahead_bytes;

	*data = reading->ahead;
	reading->ahead_bytes = 0;
	if (!got)
		got = tar_stream_read(&reading->stream, data);
	if (!got)
		got = pad(reading, data);
	if (got < 0)
		archive_set_error(archive, (int)-got, "%s", reading->error->text);
	return got < 0 ? ARCHIVE_FATAL : got;
}

static int refused(struct reading *reading)
{
	const char *text = archive_error_string(reading->archive);

	if (reading->stream.err)
		return reading->stream.err;
	return error_set(reading->error, -EINVAL, "the tar is damaged: %s", text ? text : "");
}

static int take_stat(struct reading *reading, struct model_stat *stat)
{
	struct archive_entry *entry = reading->entry;
	int64_t uid = archive_entry_uid(entry), gid = archive_entry_gid(entry);
	long nanoseconds = archive_entry_mtime_nsec(entry);
	time_t seconds = archive_entry_mtime(entry);

	/* The highest number means "none". */
	if (uid < 0 || uid >= UINT32_MAX || gid < 0 || gid >= UINT32_MAX)
		return error_set(reading->error, -EINVAL,
				 "owner %lld:%lld: they must be from 0 to 4294967294",
				 (long long)uid, (long long)gid);
	if (nanoseconds < 0 || nanoseconds >= NS_PER_S)
		nanoseconds = 0;
	/* NB: libarchive takes "-1.25" of a PAX header for -1 s and 0.25 s (3.6). */
	if (seconds < 0 && nanoseconds) {
		seconds--;
		nanoseconds = NS_PER_S - nanoseconds;
	}
	*stat = (struct model_stat){
		.mode = archive_entry_filetype(entry) | archive_entry_perm(entry),
		.uid = (uint32_t)uid,
		.gid = (uint32_t)gid,
		.mtime_s = seconds,
		.mtime_ns = (uint32_t)nanoseconds,
	};
	if (S_ISCHR(stat->mode) || S_ISBLK(stat->mode)) {
		dev_t major = archive_entry_rdevmajor(entry),
		      minor = archive_entry_rdevminor(entry);

		if (major > MAJOR_MAX || minor > MINOR_MAX)
			return error_set(reading->error, -EINVAL,
					 "device %llu:%llu: at most is %d:%d",
					 (unsigned long long)major, (unsigned long long)minor,
					 MAJOR_MAX, MINOR_MAX);
		stat->major = (uint32_t)major;
		stat->minor = (uint32_t)minor;
	}
	return 0;
}

static bool has_attribute(const struct reading *reading, const char *name)
{
	for (size_t i = 0; i < reading->attribute_count; i++)
		if (!strcmp(reading->attributes[i].name, name))
			return true;
	return false;
}

static int add_attribute(struct reading *reading, const char *name, const void *value, size_t bytes)
{
	if (reading->attribute_count == ATTRIBUTES_MAX)
		return error_set(reading->error, -E2BIG, "it has more than %d attributes",
				 ATTRIBUTES_MAX);
	if (strlen(name) > MODEL_NAME_BYTES_MAX || bytes > MODEL_ATTRIBUTE_BYTES_MAX)
		return error_set(reading->error, -E2BIG,
				 "attribute \"%.60s\": its name has %zu bytes, its value %zu", name,
				 strlen(name), bytes);
	reading->attributes[reading->attribute_count++] = (struct model_attribute){
		.name = name,
		.name_bytes = (uint16_t)strlen(name),
		.value = value,
		.value_bytes = (uint32_t)bytes,
	};
	return 0;
}

static int take_attributes(struct reading *reading, struct model_stat *stat)
{
	static const char *const names[] = { "system.posix_acl_access",
					     "system.posix_acl_default" };
	const char *name;
	const void *value;
	size_t bytes;
	int err = 0;

	reading->attribute_count = 0;
	archive_entry_xattr_reset(reading->entry);
	while (!err &&
	       archive_entry_xattr_next(reading->entry, &name, &value, &bytes) == ARCHIVE_OK)
		if (name && source_keeps_attribute(name) && !has_attribute(reading, name))
			err = add_attribute(reading, name, value, bytes);
	for (int i = 0; !err && i < 2; i++) {
		int acl_bytes =
			tar_acl(reading->entry, i, &reading->acls[i], &stat->mode, reading->error);

		if (acl_bytes < 0)
			err = acl_bytes;
		else if (acl_bytes && !has_attribute(reading, names[i]))
			err = add_attribute(reading, names[i], reading->acls[i], (size_t)acl_bytes);
	}
	return err;
}

static void drop_acls(struct reading *reading)
{
	for (int i = 0; i < 2; i++) {
		free(reading->acls[i]);
		reading->acls[i] = NULL;
	}
}

static int hand_on(struct reading *reading, uint64_t bytes)
{
	const struct content_sink_ops *ops = reading->sink->ops;
	uint64_t at = 0;

	for (;;) {
		const void *data;
		size_t length;
		la_int64_t offset;
		int err = 0, ret;

		ret = archive_read_data_block(reading->archive, &data, &length, &offset);
		if (ret == ARCHIVE_EOF)
			break;
		if (ret == ARCHIVE_RETRY)
			continue;
		if (ret != ARCHIVE_OK)
			return refused(reading);
		if (offset < 0 || (uint64_t)offset < at || (uint64_t)offset > bytes ||
		    length > bytes - (uint64_t)offset)
			return error_set(reading->error, -EINVAL,
					 "its content at %lld does not fit: it has %llu bytes",
					 (long long)offset, (unsigned long long)bytes);
		if ((uint64_t)offset > at)
			err = ops->hole(reading->sink, (uint64_t)offset - at, reading->error);
		reading->sink->offset = (uint64_t)archive_filter_bytes(reading->archive, 0);
		if (!err && length)
			err = ops->data(reading->sink, data, length, reading->error);
		if (err)
			return err;
		at = (uint64_t)offset + length;
		reading->content_left -= length < reading->content_left ? length :
									  reading->content_left;
	}
	if (at < bytes && !archive_entry_sparse_count(reading->entry))
		return error_set(reading->error, -EINVAL, "it has %llu bytes, and says %llu",
				 (unsigned long long)at, (unsigned long long)bytes);
	return at < bytes ? ops->hole(reading->sink, bytes - at, reading->error) : 0;
}

static int take_content(struct reading *reading, uint32_t inode)
{
	int64_t bytes = archive_entry_size(reading->entry);
	int err;

	if (bytes < 0)
		return error_set(reading->error, -EINVAL, "its size is %lld", (long long)bytes);
	model_inode(reading->model, inode)->bytes = (uint64_t)bytes;
	if (!bytes)
		return 0;
	err = reading->sink->ops->begin(reading->sink, inode, (uint64_t)bytes, reading->error);
	if (!err)
		err = hand_on(reading, (uint64_t)bytes);
	return err ?: reading->sink->ops->end(reading->sink, reading->error);
}

static int take_hard_link(struct reading *reading, const struct place *place, const char *target)
{
	struct place found;
	int err = place_find(&reading->placement, target, false, &found, reading->error);

	if (err)
		return source_error_at(reading->error, err, target);
	if (!found.entry)
		return error_set(reading->error, -ENOENT,
				 "it is a hard link to \"%.200s\", which is not there", target);
	return place_link(&reading->placement, place,
			  model_entry(reading->model, found.entry)->inode, reading->error);
}

static int take_target(struct reading *reading, uint32_t inode)
{
	const char *target = archive_entry_symlink(reading->entry);

	if (!target)
		return error_set(reading->error, -EINVAL, "it is a symbolic link without a target");
	return model_set_target(reading->model, inode, target, strlen(target), reading->error);
}

static int take_inode(struct reading *reading, const struct place *place)
{
	struct model_stat stat;
	uint32_t inode;
	int err = take_stat(reading, &stat);

	if (!err)
		err = take_attributes(reading, &stat);
	if (!err)
		err = place_inode(&reading->placement, place, &stat, &inode, reading->error);
	if (!err)
		err = model_set_attributes(reading->model, inode, reading->attributes,
					   reading->attribute_count, reading->error);
	drop_acls(reading);
	if (!err && S_ISLNK(stat.mode))
		err = take_target(reading, inode);
	if (!err && S_ISREG(stat.mode))
		err = take_content(reading, inode);
	return err;
}

static int take_entry(struct reading *reading, char *path)
{
	const char *hard_link = archive_entry_hardlink(reading->entry);
	struct place place;
	int err;

	if (reading->options->is_oci_layer) {
		place_shorten(path);
		err = place_whiteout(&reading->placement, path, reading->error);
		if (err)
			return err < 0 ? err : 0;
	}
	err = place_find(&reading->placement, path, true, &place, reading->error);
	if (err)
		return err;
	if (hard_link)
		return take_hard_link(reading, &place, hard_link);
	switch (archive_entry_filetype(reading->entry)) {
	case AE_IFREG:
	case AE_IFDIR:
	case AE_IFLNK:
	case AE_IFCHR:
	case AE_IFBLK:
	case AE_IFIFO:
	case AE_IFSOCK:
		return take_inode(reading, &place);
	default:
		return error_set(reading->error, -EINVAL, "it is of an unknown type");
	}
}

/* Returns 1 when there is another entry, 0 at the end, or a negative errno. */
static int next_entry(struct reading *reading)
{
	const char *text;

	switch (archive_read_next_header(reading->archive, &reading->entry)) {
	case ARCHIVE_OK:
		return 1;
	case ARCHIVE_EOF:
		return 0;
	case ARCHIVE_WARN:
		/* That is of names, which stay bytes; all else was not understood. */
		text = archive_error_string(reading->archive);
		if (text && strstr(text, "current locale"))
			return 1;
		break;
	}
	return refused(reading);
}

/* How much of an entry's content lies in the stream. */
static uint64_t stored_bytes(struct archive_entry *entry)
{
	la_int64_t bytes = archive_entry_size(entry), offset, length;

	if (archive_entry_sparse_reset(entry)) {
		bytes = 0;
		while (archive_entry_sparse_next(entry, &offset, &length) == ARCHIVE_OK)
			bytes += length;
	}
	return bytes > 0 ? (uint64_t)bytes : 0;
}

static int read_entries(struct reading *reading, struct source_report *report)
{
	int ret;

	while ((ret = next_entry(reading)) > 0) {
		const char *path = archive_entry_pathname(reading->entry);
		_cleanup_free_ char *name = strdup(path ? path : "");
		_cleanup_free_ char *place = strdup(path ? path : "");
		int err;

		if (!name || !place)
			return error_set(reading->error, -ENOMEM, "no memory for a name");
		report->entries++;
		reading->content_left = stored_bytes(reading->entry);
		err = take_entry(reading, place);
		if (err)
			return source_error_at(reading->error, err, name);
	}
	return ret;
}

/* What follows the end of the tar belongs to it as well, as far as its digest is concerned. */
static int finish(struct reading *reading, struct source_report *report)
{
	const void *data;
	ssize_t got;

	while ((got = tar_stream_read(&reading->stream, &data)) > 0)
		;
	if (got < 0)
		return (int)got;
	report->stream_bytes = reading->stream.bytes;
	if (!EVP_DigestFinal_ex(reading->stream.digest, report->diff_id, NULL))
		return error_set(reading->error, -EIO, "computing a SHA-256 failed");
	if (reading->options->diff_id) {
		char found[2 * DIFF_ID_BYTES + 1], wanted[2 * DIFF_ID_BYTES + 1];

		if (!memcmp(reading->options->diff_id, report->diff_id, DIFF_ID_BYTES))
			return 0;
		return error_set(reading->error, -EBADMSG,
				 "the tar has the SHA-256 %s uncompressed, it should have %s",
				 hex_encode(report->diff_id, DIFF_ID_BYTES, found),
				 hex_encode(reading->options->diff_id, DIFF_ID_BYTES, wanted));
	}
	if (reading->stream.zeros < BLOCK_BYTES)
		return error_set(reading->error, -EINVAL,
				 "the tar has no end (blocks of zeros): it was cut off");
	return 0;
}

static void reading_free(struct reading **reading)
{
	if (!*reading)
		return;
	drop_acls(*reading);
	if ((*reading)->archive)
		archive_read_free((*reading)->archive);
	tar_stream_close(&(*reading)->stream);
	free(*reading);
}

static int open_archive(struct reading *reading)
{
	reading->archive = archive_read_new();
	if (!reading->archive || archive_read_support_format_tar(reading->archive) != ARCHIVE_OK)
		return error_set(reading->error, -ENOMEM, "no memory for reading a tar");
	if (archive_read_open(reading->archive, reading, NULL, read_stream, NULL) != ARCHIVE_OK)
		return refused(reading);
	return 0;
}

int source_read_tar(struct model *model, struct content_sink *sink,
		    const struct source_options *options, struct source_report *report,
		    struct error *error)
{
	_cleanup_(reading_free) struct reading *reading = calloc(1, sizeof(*reading));
	bool is_empty;
	int err;

	*report = (struct source_report){ 0 };
	if (!reading)
		return error_set(error, -ENOMEM, "no memory for reading a tar");
	*reading = (struct reading){
		.model = model,
		.placement = { .model = model,
			       .clamps = options->is_oci_layer,
			       .time_s = options->time_s },
		.sink = sink,
		.options = options,
		.error = error,
		.stream = { .fd = -1 },
	};
	err = tar_stream_open(&reading->stream, options->path, options->stream_bytes_max, error);
	if (!err) {
		reading->ahead_bytes = tar_stream_read(&reading->stream, &reading->ahead);
		err = reading->ahead_bytes < 0 ? (int)reading->ahead_bytes : 0;
	}
	/* A layer may be no bytes at all, which libarchive does not take for a tar. */
	is_empty = !err && !reading->ahead_bytes;
	if (is_empty && !options->diff_id)
		err = error_set(error, -EINVAL, "the tar is an empty file");
	if (!err && !is_empty)
		err = open_archive(reading);
	if (err)
		return source_error_at(error, err, options->path);
	if (!is_empty)
		err = read_entries(reading, report);
	if (!err) {
		err = finish(reading, report);
		if (err)
			return source_error_at(error, err, options->path);
	}
	return err;
}
