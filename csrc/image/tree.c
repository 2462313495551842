/* SPDX-License-Identifier: MIT */
#include "image/tree.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/array.h"
#include "base/cleanup.h"
#include "image/source.h"
#include "image/tree_content.h"

enum {
	NS_PER_S = 1000000000,
	MAJOR_MAX = (1 << 12) - 1, /* of the kernel's device numbers */
	MINOR_BITS = 20,
	MINOR_MAX = (1 << MINOR_BITS) - 1,
	ATTRIBUTES_MAX = 65536,
};

/* A name in a directory. */
struct name {
	uint64_t inode, index;
	uint32_t text; /* in the directory's `texts` */
	uint8_t bytes;
};

struct directory {
	uint64_t inode;
	size_t path_bytes;
	struct name *names;
	size_t count, capacity, next;
	char *texts;
	size_t text_bytes, text_capacity;
};

/* A file with several names, one of which came. An unused slot has inode 0. */
struct shared {
	uint64_t inode;
	char *path;
	uint32_t left; /* how many names have not come yet */
};

struct reading {
	struct reader *reader;
	struct tree_visitor *visitor;
	struct cursor names, items;
	struct directory *stack;
	size_t depth, stack_capacity;
	struct shared *shared; /* open addressing */
	size_t shared_count, shared_capacity;
	struct tree_content content;
	struct tree_attribute *attributes;
	size_t attribute_count, attribute_capacity;
	uint8_t *values; /* of the attributes, one behind the other */
	size_t value_bytes, value_capacity;
	char path[TREE_PATH_BYTES_MAX + 1];
	bool is_visitors; /* what failed last is the visitor, which knows why */
};

static int no_memory(struct reading *reading)
{
	return reader_fail(reading->reader, -ENOMEM, "no memory");
}

/* ---- Directories ---- */

static void directory_deinit(struct directory *directory)
{
	free(directory->names);
	free(directory->texts);
}

static bool is_name(const char *text, size_t bytes)
{
	if (!bytes || bytes > NAME_MAX_BYTES || memchr(text, '/', bytes) || memchr(text, 0, bytes))
		return false;
	return text[0] != '.' || (bytes > 1 && (bytes > 2 || text[1] != '.'));
}

static int add_name(struct reading *reading, struct directory *directory)
{
	struct cursor *cursor = &reading->names;
	const char *text = (const char *)cursor->data + sizeof(struct disk_dir_item);
	struct disk_dir_item disk;
	struct key target;
	uint16_t bytes;
	int ret = cursor_copy(cursor, &disk, sizeof(disk));

	if (ret)
		return ret;
	bytes = le16toh(disk.name_length);
	target = key_from_disk(&disk.location);
	if (cursor->size != sizeof(disk) + bytes || !is_name(text, bytes))
		return cursor_fail(cursor, "it has no name that a file can have");
	if (target.type != KEY_INODE_ITEM)
		return reader_fail(reading->reader, -ENOTSUP, "\"%.*s\" in it is another subvolume",
				   (int)bytes, text);
	if (target.objectid <= OBJECT_FIRST_FREE)
		return cursor_fail(cursor, "it leads to inode %" PRIu64, target.objectid);
	if (directory->text_bytes > UINT32_MAX - bytes)
		return cursor_fail(cursor, "there are too many names in a directory");
	ret = array_reserve(directory->names, directory->capacity, directory->count + 1) ?
		      no_memory(reading) :
		      0;
	if (!ret)
		ret = array_reserve(directory->texts, directory->text_capacity,
				    directory->text_bytes + bytes) ?
			      no_memory(reading) :
			      0;
	if (ret)
		return ret;
	directory->names[directory->count++] = (struct name){
		.inode = target.objectid,
		.index = cursor->key.offset,
		.text = (uint32_t)directory->text_bytes,
		.bytes = (uint8_t)bytes,
	};
	memcpy(directory->texts + directory->text_bytes, text, bytes);
	directory->text_bytes += bytes;
	return 0;
}

static int compare_names(const void *a, const void *b, void *texts)
{
	const struct name *one = a, *two = b;
	size_t bytes = one->bytes < two->bytes ? one->bytes : two->bytes;
	int order = memcmp((char *)texts + one->text, (char *)texts + two->text, bytes);

	return order ? order : (int)one->bytes - (int)two->bytes;
}

/* Reads all names of a directory, and puts it on the stack. */
static int push(struct reading *reading, uint64_t inode, size_t path_bytes)
{
	struct directory directory = { .inode = inode, .path_bytes = path_bytes };
	struct cursor *cursor = &reading->names;
	struct key first = { inode, KEY_DIR_INDEX, 0 };
	int err = 0, ret;

	for (ret = cursor_seek(cursor, &first); ret > 0 && !err; ret = cursor_next(cursor)) {
		if (cursor->key.objectid != inode || cursor->key.type != KEY_DIR_INDEX)
			break;
		err = add_name(reading, &directory);
	}
	if (ret < 0)
		err = ret;
	if (!err && directory.count > 1)
		qsort_r(directory.names, directory.count, sizeof(*directory.names), compare_names,
			directory.texts);
	for (size_t i = 1; !err && i < directory.count; i++)
		if (!compare_names(&directory.names[i - 1], &directory.names[i], directory.texts))
			err = reader_fail(reading->reader, -EUCLEAN, "\"%.*s\" is twice in it",
					  directory.names[i].bytes,
					  directory.texts + directory.names[i].text);
	if (!err)
		err = array_reserve(reading->stack, reading->stack_capacity, reading->depth + 1) ?
			      no_memory(reading) :
			      0;
	if (err)
		directory_deinit(&directory);
	else
		reading->stack[reading->depth++] = directory;
	return err;
}

/* ---- Files with several names ---- */

static struct shared *slot_of(const struct reading *reading, uint64_t inode)
{
	size_t mask = reading->shared_capacity - 1;
	size_t slot = (size_t)((inode * 0x9E3779B97F4A7C15ull) >> 32) & mask;

	while (reading->shared[slot].inode && reading->shared[slot].inode != inode)
		slot = (slot + 1) & mask;
	return &reading->shared[slot];
}

static int grow_shared(struct reading *reading)
{
	struct reading larger = {
		.shared_capacity = reading->shared_capacity ? 2 * reading->shared_capacity : 64,
	};

	larger.shared = calloc(larger.shared_capacity, sizeof(*larger.shared));
	if (!larger.shared)
		return no_memory(reading);
	for (size_t i = 0; i < reading->shared_capacity; i++)
		if (reading->shared[i].inode)
			*slot_of(&larger, reading->shared[i].inode) = reading->shared[i];
	free(reading->shared);
	reading->shared = larger.shared;
	reading->shared_capacity = larger.shared_capacity;
	return 0;
}

/* Sets `first` of a file whose inode has `links` names; the last of them frees the path, into
 * `*freed`, which the caller frees after use. */
static int share(struct reading *reading, uint64_t inode, uint32_t links, struct tree_entry *entry,
		 char **freed)
{
	struct shared *shared;

	if (2 * (reading->shared_count + 1) > reading->shared_capacity && grow_shared(reading))
		return -ENOMEM;
	shared = slot_of(reading, inode);
	if (!shared->inode) {
		*shared = (struct shared){ inode, strdup(reading->path), links - 1 };
		reading->shared_count++;
		return shared->path ? 0 : no_memory(reading);
	}
	if (!shared->left)
		return reader_fail(reading->reader, -EUCLEAN,
				   "inode %" PRIu64 " has more than the %" PRIu32
				   " names that it tells of",
				   inode, links);
	entry->first = shared->path;
	if (!--shared->left) {
		*freed = shared->path;
		shared->path = NULL;
	}
	return 0;
}

/* ---- Inodes ---- */

static int take_stat(struct reading *reading, struct tree_entry *entry, uint32_t *links)
{
	struct disk_inode disk;
	uint64_t device;
	int ret = cursor_copy(&reading->items, &disk, sizeof(disk));

	if (ret)
		return ret;
	device = le64toh(disk.rdev);
	*links = le32toh(disk.link_count);
	*entry = (struct tree_entry){
		.path = reading->path,
		.mtime_s = (int64_t)le64toh(disk.modified.seconds),
		.mtime_ns = le32toh(disk.modified.nanoseconds),
		.mode = le32toh(disk.mode),
		.uid = le32toh(disk.uid),
		.gid = le32toh(disk.gid),
		.bytes = le64toh(disk.size),
	};
	if (entry->mtime_ns >= NS_PER_S)
		return cursor_fail(&reading->items, "a time of %" PRIu32 " ns", entry->mtime_ns);
	switch (entry->mode & S_IFMT) {
	case S_IFREG:
	case S_IFLNK:
		if (entry->bytes > INT64_MAX)
			return cursor_fail(&reading->items, "a file of %" PRIu64 " bytes",
					   entry->bytes);
		break;
	case S_IFCHR:
	case S_IFBLK:
		if (device >> MINOR_BITS > MAJOR_MAX)
			return cursor_fail(&reading->items, "a device of number %" PRIu64, device);
		entry->major = (uint32_t)(device >> MINOR_BITS);
		entry->minor = (uint32_t)(device & MINOR_MAX);
		entry->bytes = 0;
		break;
	case S_IFDIR:
	case S_IFIFO:
	case S_IFSOCK:
		entry->bytes = 0;
		break;
	default:
		return cursor_fail(&reading->items, "a file of mode 0%" PRIo32, entry->mode);
	}
	return 0;
}

/*
 * Checks that a directory has one name, the one that led here. So no directory is come to twice,
 * and the reading ends.
 */
static int check_parent(struct reading *reading, uint64_t parent, const struct name *name,
			const char *text, unsigned *found)
{
	struct cursor *cursor = &reading->items;
	struct disk_inode_ref ref;
	int ret;

	if (cursor->key.type == KEY_INODE_EXTREF || cursor->key.offset != parent || ++*found > 1)
		return cursor_fail(cursor, "a directory has another name");
	ret = cursor_copy(cursor, &ref, sizeof(ref));
	if (ret)
		return ret;
	if (cursor->size != sizeof(ref) + name->bytes || le64toh(ref.index) != name->index ||
	    le16toh(ref.name_length) != name->bytes ||
	    memcmp(cursor->data + sizeof(ref), text, name->bytes) != 0)
		return cursor_fail(cursor, "a directory has another name");
	return 0;
}

static int add_attribute(struct reading *reading, const uint8_t *name,
			 const struct disk_dir_item *disk)
{
	uint16_t name_bytes = le16toh(disk->name_length), bytes = le16toh(disk->data_length);
	size_t size = (size_t)name_bytes + bytes;
	int ret;

	if (!name_bytes || name_bytes > NAME_MAX_BYTES || memchr(name, 0, name_bytes) ||
	    reading->attribute_count == ATTRIBUTES_MAX)
		return cursor_fail(&reading->items, "an attribute cannot have this name");
	ret = array_reserve(reading->attributes, reading->attribute_capacity,
			    reading->attribute_count + 1) ?
		      no_memory(reading) :
		      0;
	if (!ret)
		ret = array_reserve(reading->values, reading->value_capacity,
				    reading->value_bytes + size) ?
			      no_memory(reading) :
			      0;
	if (ret)
		return ret;
	/* `values` may move until all are there: set_attributes(). */
	reading->attributes[reading->attribute_count++] =
		(struct tree_attribute){ .name_bytes = name_bytes, .value_bytes = bytes };
	memcpy(reading->values + reading->value_bytes, name, size);
	reading->value_bytes += size;
	return 0;
}

/* An item has all attributes whose names have the same hash. */
static int take_attributes(struct reading *reading)
{
	const struct cursor *cursor = &reading->items;
	uint32_t at = 0;

	while (at < cursor->size) {
		struct disk_dir_item disk;
		uint32_t bytes;
		int ret;

		if (cursor->size - at < sizeof(disk))
			return cursor_fail(&reading->items, "an attribute is cut off");
		memcpy(&disk, cursor->data + at, sizeof(disk));
		at += (uint32_t)sizeof(disk);
		bytes = (uint32_t)le16toh(disk.name_length) + le16toh(disk.data_length);
		if (bytes > cursor->size - at)
			return cursor_fail(&reading->items, "an attribute is cut off");
		ret = add_attribute(reading, cursor->data + at, &disk);
		if (ret)
			return ret;
		at += bytes;
	}
	return 0;
}

static int compare_attributes(const void *a, const void *b)
{
	const struct tree_attribute *one = a, *two = b;
	size_t bytes = one->name_bytes < two->name_bytes ? one->name_bytes : two->name_bytes;
	int order = memcmp(one->name, two->name, bytes);

	return order ? order : (int)one->name_bytes - (int)two->name_bytes;
}

static void set_attributes(struct reading *reading, struct tree_entry *entry)
{
	const uint8_t *at = reading->values;

	for (size_t i = 0; i < reading->attribute_count; i++) {
		struct tree_attribute *attribute = &reading->attributes[i];

		attribute->name = (const char *)at;
		attribute->value = at + attribute->name_bytes;
		at = attribute->value + attribute->value_bytes;
	}
	if (reading->attribute_count > 1)
		qsort(reading->attributes, reading->attribute_count, sizeof(*reading->attributes),
		      compare_attributes);
	entry->attributes = reading->attributes;
	entry->attribute_count = reading->attribute_count;
}

/* Reads the items between that of the inode and those of its content. */
static int take_items(struct reading *reading, uint64_t inode, uint64_t parent,
		      const struct name *name, const char *text, struct tree_entry *entry)
{
	struct cursor *cursor = &reading->items;
	bool is_below = name && S_ISDIR(entry->mode);
	unsigned found = 0;
	int err = 0, ret;

	reading->attribute_count = reading->value_bytes = 0;
	while (!err && (ret = cursor_next(cursor)) > 0) {
		if (cursor->key.objectid != inode || cursor->key.type > KEY_XATTR_ITEM)
			break;
		if (cursor->key.type == KEY_XATTR_ITEM)
			err = take_attributes(reading);
		else if (is_below && (cursor->key.type == KEY_INODE_REF ||
				      cursor->key.type == KEY_INODE_EXTREF))
			err = check_parent(reading, parent, name, text, &found);
	}
	if (err || ret < 0)
		return err ?: ret;
	if (is_below && !found)
		return reader_fail(reading->reader, -EUCLEAN, "a directory has no name");
	set_attributes(reading, entry);
	return 0;
}

static int visit(struct reading *reading, uint64_t inode, const struct tree_entry *entry)
{
	struct tree_visitor *visitor = reading->visitor;
	int ret = visitor->entry(visitor, entry);

	reading->is_visitors = ret != 0;
	if (ret || !entry->region_count)
		return ret;
	ret = tree_content_read(&reading->content, &reading->items, inode, entry, visitor,
				&reading->is_visitors);
	if (ret)
		return ret;
	ret = visitor->end(visitor, entry);
	reading->is_visitors = ret != 0;
	return ret;
}

/* Reads the inode that reading->path leads to; `name` is NULL for the top. */
static int read_inode(struct reading *reading, uint64_t inode, uint64_t parent,
		      const struct name *name, const char *text)
{
	_cleanup_free_ char *freed = NULL;
	struct key key = { inode, KEY_INODE_ITEM, 0 };
	struct tree_entry entry;
	uint32_t links;
	int ret = cursor_find(&reading->items, &key);

	if (!ret)
		ret = take_stat(reading, &entry, &links);
	if (!ret && !name && !S_ISDIR(entry.mode))
		ret = reader_fail(reading->reader, -EUCLEAN, "it is no directory");
	if (!ret && links > 1 && !S_ISDIR(entry.mode))
		ret = share(reading, inode, links, &entry, &freed);
	if (!ret && !entry.first)
		ret = take_items(reading, inode, parent, name, text, &entry);
	if (!ret && (S_ISLNK(entry.mode) || (S_ISREG(entry.mode) && !entry.first)))
		ret = tree_content_find(&reading->content, &reading->items, inode, &entry);
	if (ret)
		return ret;
	if (S_ISLNK(entry.mode))
		entry.target = reading->content.target;
	if (S_ISREG(entry.mode) && !entry.first) {
		entry.regions = reading->content.regions;
		entry.region_count = reading->content.region_count;
	}
	ret = visit(reading, inode, &entry);
	if (!ret && S_ISDIR(entry.mode))
		ret = push(reading, inode, strlen(reading->path));
	return ret;
}

static int read_name(struct reading *reading)
{
	struct directory *directory = &reading->stack[reading->depth - 1];
	const struct name name = directory->names[directory->next++];
	/* Reading may move the stack, but not what is on it. */
	const char *text = directory->texts + name.text;
	size_t at = directory->path_bytes;

	reading->path[at] = '\0';
	if (at + 1 + name.bytes > TREE_PATH_BYTES_MAX)
		return reader_fail(reading->reader, -ENAMETOOLONG,
				   "a path in it has more than %d bytes", TREE_PATH_BYTES_MAX);
	if (at)
		reading->path[at++] = '/';
	memcpy(reading->path + at, text, name.bytes);
	reading->path[at + name.bytes] = '\0';
	return read_inode(reading, name.inode, directory->inode, &name, text);
}

static int read_all(struct reading *reading, uint64_t subvolume)
{
	struct block_expect root;
	int ret = tree_root_find(reading->reader, subvolume, &root);

	if (ret)
		return ret;
	cursor_init(&reading->names, reading->reader, &root);
	cursor_init(&reading->items, reading->reader, &root);
	ret = read_inode(reading, OBJECT_FIRST_FREE, 0, NULL, NULL);
	while (!ret && reading->depth) {
		struct directory *top = &reading->stack[reading->depth - 1];

		if (top->next < top->count) {
			ret = read_name(reading);
		} else {
			directory_deinit(top);
			reading->depth--;
		}
	}
	return ret;
}

static void reading_deinit(struct reading *reading)
{
	while (reading->depth)
		directory_deinit(&reading->stack[--reading->depth]);
	for (size_t i = 0; i < reading->shared_capacity; i++)
		free(reading->shared[i].path);
	free(reading->stack);
	free(reading->shared);
	free(reading->attributes);
	free(reading->values);
	tree_content_deinit(&reading->content);
	cursor_close(&reading->names);
	cursor_close(&reading->items);
}

int tree_read(struct reader *reader, uint64_t subvolume, struct tree_visitor *visitor,
	      struct error *error)
{
	_cleanup_free_ struct reading *reading = calloc(1, sizeof(*reading));
	int ret;

	if (!reading)
		return error_set(error, -ENOMEM, "no memory");
	reading->reader = reader;
	reading->visitor = visitor;
	ret = read_all(reading, subvolume);
	if (ret && !reading->is_visitors) {
		error_set_text(error, "%s", reader->error);
		source_error_at(error, ret, *reading->path ? reading->path : "/");
	}
	reading_deinit(reading);
	return ret;
}
