/* SPDX-License-Identifier: MIT */
#include "image/tree_make.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/fs.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "base/array.h"
#include "base/cleanup.h"
#include "base/list.h"
#include "image/emit.h"
#include "image/source.h"

enum {
	SECTOR = 4096,
	PATH_PART_BYTES = 4000, /* less than PATH_MAX */
	NAME_BYTES = 256,
	MODE_BITS = 07777,
	SPECIAL_BITS = 07000, /* chown(2) takes some of them away */
	PROGRESS_ENTRIES = 4096,
};

static const int DIRECTORY_FLAGS = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;

/*
 * What a directory gets when all that is in it is there: else what is made in it would inherit its
 * default ACL, and change its time.
 */
struct made_directory {
	size_t path_bytes;
	uint32_t mode, uid, gid;
	int64_t mtime_s;
	uint32_t mtime_ns;
	size_t attribute_count;
	struct tree_attribute *attributes; /* with names and values behind them */
};

static struct tree_maker *maker_of(struct tree_visitor *visitor)
{
	return container_of(visitor, struct tree_maker, visitor);
}

/* Tells of errno. */
static int failed(struct tree_maker *maker, const char *path, const char *what)
{
	int err = -errno;

	error_set_text(maker->error, "cannot %s: %s", what, strerror(-err));
	if (err == -ENOSPC)
		error_set_hint(maker->error, "the volume has no room for it: see "
					     "`btrfs-ublk volume resize`");
	return source_error_at(maker->error, err, *path ? path : "/");
}

static int refuse(struct tree_maker *maker, const char *path, int err, const char *why)
{
	error_set_text(maker->error, "%s", why);
	return source_error_at(maker->error, err, *path ? path : "/");
}

/* ---- Attributes ---- */

static int set_attributes(struct tree_maker *maker, const char *path, int fd, const char *name,
			  const struct tree_attribute *attributes, size_t count)
{
	char place[sizeof("/proc/self/fd/-2147483648/") + NAME_BYTES];

	if (!count)
		return 0;
	/* NOLINTNEXTLINE(bugprone-unused-return-value): it fits, names are short. */
	(void)snprintf(place, sizeof(place), "/proc/self/fd/%d/%s", fd, name ? name : "");
	for (size_t i = 0; i < count; i++) {
		const struct tree_attribute *one = &attributes[i];
		char text[NAME_BYTES];
		int ret;

		memcpy(text, one->name, one->name_bytes);
		text[one->name_bytes] = '\0';
		if (name)
			ret = lsetxattr(place, text, one->value, one->value_bytes, 0);
		else
			ret = fsetxattr(fd, text, one->value, one->value_bytes, 0);
		if (ret)
			return failed(maker, path, "set an attribute");
	}
	return 0;
}

static int check_attributes(struct tree_maker *maker, const struct tree_entry *entry)
{
	for (size_t i = 0; i < entry->attribute_count; i++) {
		const struct tree_attribute *one = &entry->attributes[i];
		char text[NAME_BYTES];

		if (one->name_bytes >= sizeof(text))
			return refuse(maker, entry->path, -EUCLEAN,
				      "it has an attribute with too long a name");
		memcpy(text, one->name, one->name_bytes);
		text[one->name_bytes] = '\0';
		if (!source_keeps_attribute(text))
			return refuse(maker, entry->path, -EUCLEAN,
				      "it has an attribute that images do not have");
	}
	return 0;
}

/* Sets what an entry that is open has; its content is there already, as writing takes file
 * capabilities away. */
static int furnish(struct tree_maker *maker, const char *path, int fd,
		   const struct made_directory *wanted, bool has_mode)
{
	const struct timespec times[2] = {
		{ wanted->mtime_s, wanted->mtime_ns },
		{ wanted->mtime_s, wanted->mtime_ns },
	};
	int ret;

	if ((wanted->uid || wanted->gid) && fchown(fd, wanted->uid, wanted->gid))
		return failed(maker, path, "set its owner");
	if ((!has_mode || wanted->mode & SPECIAL_BITS) && fchmod(fd, wanted->mode & MODE_BITS))
		return failed(maker, path, "set its mode");
	ret = set_attributes(maker, path, fd, NULL, wanted->attributes, wanted->attribute_count);
	if (!ret && futimens(fd, times))
		ret = failed(maker, path, "set its time");
	return ret;
}

static struct made_directory wanted_of(const struct tree_entry *entry)
{
	return (struct made_directory){
		.mode = entry->mode,
		.uid = entry->uid,
		.gid = entry->gid,
		.mtime_s = entry->mtime_s,
		.mtime_ns = entry->mtime_ns,
		.attributes = (struct tree_attribute *)entry->attributes,
		.attribute_count = entry->attribute_count,
	};
}

/* ---- Directories ---- */

static int keep_attributes(struct made_directory *wanted)
{
	size_t bytes = wanted->attribute_count * sizeof(struct tree_attribute), at = bytes;
	struct tree_attribute *kept;

	for (size_t i = 0; i < wanted->attribute_count; i++)
		bytes += (size_t)wanted->attributes[i].name_bytes +
			 wanted->attributes[i].value_bytes;
	kept = malloc(bytes ? bytes : 1);
	if (!kept)
		return -ENOMEM;
	for (size_t i = 0; i < wanted->attribute_count; i++) {
		const struct tree_attribute *one = &wanted->attributes[i];
		uint8_t *place = (uint8_t *)kept + at;

		memcpy(place, one->name, one->name_bytes);
		memcpy(place + one->name_bytes, one->value, one->value_bytes);
		kept[i] = (struct tree_attribute){
			.name = (char *)place,
			.value = place + one->name_bytes,
			.name_bytes = one->name_bytes,
			.value_bytes = one->value_bytes,
		};
		at += (size_t)one->name_bytes + one->value_bytes;
	}
	wanted->attributes = kept;
	return 0;
}

/* Goes into the directory `name` of the present one. */
static int enter(struct tree_maker *maker, const struct tree_entry *entry, const char *name)
{
	struct made_directory wanted = wanted_of(entry);
	int fd;

	if (array_reserve(maker->stack, maker->stack_capacity, maker->depth + 1))
		return refuse(maker, entry->path, -ENOMEM, "no memory");
	wanted.path_bytes = strlen(entry->path);
	memcpy(maker->path, entry->path, wanted.path_bytes + 1);
	if (keep_attributes(&wanted))
		return refuse(maker, entry->path, -ENOMEM, "no memory");
	maker->stack[maker->depth++] = wanted;
	if (maker->options.target < 0)
		return 0;
	fd = maker->depth == 1 ? fcntl(maker->options.target, F_DUPFD_CLOEXEC, 0) :
				 openat(maker->directory, name, DIRECTORY_FLAGS);
	if (fd < 0)
		return failed(maker, entry->path, "open it");
	cleanup_close(&maker->directory);
	maker->directory = fd;
	return 0;
}

/*
 * Sets owner, mode, times and attributes of the present directory, and goes to the one above: by its
 * "..", so that few descriptors are needed however deep a tree is. Nobody else can have moved it.
 */
static int leave(struct tree_maker *maker)
{
	struct made_directory *last = &maker->stack[--maker->depth];
	int fd = -1, ret = 0;

	maker->path[last->path_bytes] = '\0';
	if (maker->options.target >= 0) {
		ret = furnish(maker, maker->path, maker->directory, last, false);
		if (maker->depth)
			fd = openat(maker->directory, "..", DIRECTORY_FLAGS);
		if (!ret && maker->depth && fd < 0)
			ret = failed(maker, maker->path, "open the one above it");
		close(maker->directory);
		maker->directory = fd;
	}
	free(last->attributes);
	return ret;
}

/* Makes the directory of the entry the present one; `*name` is the entry's name in it. */
static int find_directory(struct tree_maker *maker, const struct tree_entry *entry,
			  const char **name)
{
	const char *slash = strrchr(entry->path, '/');
	size_t parent_bytes = slash ? (size_t)(slash - entry->path) : 0;
	int ret = 0;

	while (!ret && maker->depth > 1 &&
	       maker->stack[maker->depth - 1].path_bytes != parent_bytes)
		ret = leave(maker);
	*name = slash ? slash + 1 : entry->path;
	return ret;
}

/* ---- Other entries ---- */

/* Opens what a path leads to, part by part, as the kernel takes no longer ones at once. */
static int link_to(struct tree_maker *maker, const char *first, const char *name)
{
	int at = maker->options.target, ret = 0;

	while (!ret && strlen(first) > PATH_PART_BYTES) {
		char part[PATH_PART_BYTES + 1];
		size_t bytes = PATH_PART_BYTES;
		int fd;

		while (bytes && first[bytes] != '/')
			bytes--;
		memcpy(part, first, bytes);
		part[bytes] = '\0';
		fd = openat(at, part, DIRECTORY_FLAGS);
		if (at != maker->options.target)
			close(at);
		if (fd < 0)
			return -1;
		at = fd;
		first += bytes + 1;
	}
	ret = linkat(at, first, maker->directory, name, 0);
	if (at != maker->options.target) {
		int kept = errno;

		close(at);
		errno = kept;
	}
	return ret;
}

/* Symbolic links, devices, FIFOs and sockets, which cannot be opened. */
static int make_special(struct tree_maker *maker, const struct tree_entry *entry, const char *name)
{
	const struct timespec times[2] = {
		{ entry->mtime_s, entry->mtime_ns },
		{ entry->mtime_s, entry->mtime_ns },
	};
	int at = maker->directory, ret;

	if (S_ISLNK(entry->mode) ? symlinkat(entry->target, at, name) :
				   mknodat(at, name, entry->mode & (S_IFMT | 0777),
					   makedev(entry->major, entry->minor)))
		return failed(maker, entry->path, "make it");
	if ((entry->uid || entry->gid) &&
	    fchownat(at, name, entry->uid, entry->gid, AT_SYMLINK_NOFOLLOW))
		return failed(maker, entry->path, "set its owner");
	if (!S_ISLNK(entry->mode) && entry->mode & SPECIAL_BITS &&
	    fchmodat(at, name, entry->mode & MODE_BITS, 0))
		return failed(maker, entry->path, "set its mode");
	ret = set_attributes(maker, entry->path, at, name, entry->attributes,
			     entry->attribute_count);
	if (!ret && utimensat(at, name, times, AT_SYMLINK_NOFOLLOW))
		ret = failed(maker, entry->path, "set its time");
	return ret;
}

static int end_file(struct tree_maker *maker, const struct tree_entry *entry)
{
	const struct made_directory wanted = wanted_of(entry);
	int ret = furnish(maker, entry->path, maker->file, &wanted, true);

	close(maker->file);
	maker->file = -1;
	return ret;
}

static int make_file(struct tree_maker *maker, const struct tree_entry *entry, const char *name)
{
	int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;

	memcpy(maker->path, entry->path, strlen(entry->path) + 1);
	maker->file = openat(maker->directory, name, flags, entry->mode & 0777);
	if (maker->file < 0)
		return failed(maker, entry->path, "make it");
	if (entry->region_count)
		return 0; /* visit_end() comes */
	if (entry->bytes && ftruncate(maker->file, (off_t)entry->bytes))
		return failed(maker, entry->path, "set its size");
	return end_file(maker, entry);
}

static int visit_entry(struct tree_visitor *visitor, const struct tree_entry *entry)
{
	struct tree_maker *maker = maker_of(visitor);
	const char *name = "";
	int ret = check_attributes(maker, entry);

	if (!ret && maker->depth)
		ret = find_directory(maker, entry, &name);
	if (ret)
		return ret;
	maker->entries++;
	if (maker->options.progress && maker->entries % PROGRESS_ENTRIES == 0)
		maker->options.progress(maker->entries);
	if (S_ISDIR(entry->mode)) {
		if (maker->options.target >= 0 && maker->depth &&
		    mkdirat(maker->directory, name, 0700))
			return failed(maker, entry->path, "make it");
		return enter(maker, entry, name);
	}
	if (maker->options.target < 0)
		return 0;
	if (entry->first)
		return link_to(maker, entry->first, name) ?
			       failed(maker, entry->path, "make the hard link") :
			       0;
	return S_ISREG(entry->mode) ? make_file(maker, entry, name) :
				      make_special(maker, entry, name);
}

/* ---- Content ---- */

static int visit_data(struct tree_visitor *visitor, uint64_t offset, const void *data, size_t bytes)
{
	struct tree_maker *maker = maker_of(visitor);

	maker->written_bytes += bytes;
	for (size_t done = 0; maker->options.target >= 0 && done < bytes;) {
		ssize_t part = pwrite(maker->file, (const char *)data + done, bytes - done,
				      (off_t)(offset + done));

		if (part < 0)
			return failed(maker, maker->path, "write it");
		done += (size_t)part;
	}
	return 0;
}

static int clone_pending(struct tree_maker *maker, const char *path)
{
	struct file_clone_range range = {
		.src_fd = maker->options.data,
		.src_offset = maker->options.data_offset + maker->clone_begin,
		.src_length = maker->clone_bytes,
		.dest_offset = maker->clone_offset,
	};
	bool is_none = !maker->clone_bytes;

	maker->cloned_bytes += maker->clone_bytes;
	maker->clone_bytes = 0;
	if (is_none || maker->options.target < 0 || !ioctl(maker->file, FICLONERANGE, &range))
		return 0;
	return failed(maker, path, "clone its content");
}

static int visit_extent(struct tree_visitor *visitor, const struct tree_entry *entry,
			const struct tree_extent *extent)
{
	struct tree_maker *maker = maker_of(visitor);
	uint64_t bytes = (extent->bytes + SECTOR - 1) / SECTOR * SECTOR;
	uint64_t begin = extent->logical - IMAGE_DATA_START + extent->begin;
	int ret = 0;

	if (extent->is_compressed) {
		error_set_hint(maker->error, "make an image whose files can be clones: "
					     "btrfs-ublk image build --compression none");
		return refuse(maker, entry->path, -ENOTSUP,
			      "its data are compressed in the image, so that no file can be a "
			      "clone of them");
	}
	/* NB: what lies behind the image's data in that file belongs to others. */
	if (extent->logical < IMAGE_DATA_START || begin % SECTOR ||
	    begin > maker->options.data_bytes || bytes > maker->options.data_bytes - begin)
		return refuse(maker, entry->path, -EUCLEAN,
			      "an extent of it is not in the data of the image");
	if (maker->clone_bytes && maker->clone_begin + maker->clone_bytes == begin &&
	    maker->clone_offset + maker->clone_bytes == extent->offset) {
		maker->clone_bytes += bytes;
		return 0;
	}
	ret = clone_pending(maker, entry->path);
	maker->clone_offset = extent->offset;
	maker->clone_begin = begin;
	maker->clone_bytes = bytes;
	return ret;
}

static int visit_end(struct tree_visitor *visitor, const struct tree_entry *entry)
{
	struct tree_maker *maker = maker_of(visitor);
	const struct tree_region *last = &entry->regions[entry->region_count - 1];
	bool is_exact = last->offset + last->bytes == entry->bytes && entry->bytes % SECTOR == 0;
	bool is_inline = entry->region_count == 1 && !maker->clone_bytes && !last->offset &&
			 last->bytes == entry->bytes && last->bytes < SECTOR;
	int ret = clone_pending(maker, entry->path);

	if (ret || maker->options.target < 0)
		return ret;
	/* Whole sectors were cloned, and holes at the end are none yet. */
	if (!is_exact && !is_inline && ftruncate(maker->file, (off_t)entry->bytes))
		return failed(maker, entry->path, "set its size");
	return end_file(maker, entry);
}

void tree_maker_init(struct tree_maker *maker, const struct tree_make_options *options,
		     struct error *error)
{
	*maker = (struct tree_maker){
		.visitor = { .entry = visit_entry,
			     .data = visit_data,
			     .extent = visit_extent,
			     .end = visit_end },
		.error = error,
		.options = *options,
		.directory = -1,
		.file = -1,
	};
}

void tree_maker_deinit(struct tree_maker *maker)
{
	while (maker->depth)
		free(maker->stack[--maker->depth].attributes);
	free(maker->stack);
	cleanup_close(&maker->directory);
	cleanup_close(&maker->file);
}

int tree_maker_finish(struct tree_maker *maker)
{
	int ret = 0;

	while (!ret && maker->depth)
		ret = leave(maker);
	return ret;
}
