/* SPDX-License-Identifier: MIT */
#include "image/model.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/cleanup.h"

/* A set of attributes is in the arena as a head, and for each attribute its own head, name, value. */
struct set_head {
	uint32_t bytes; /* of all that follows it */
};
struct attribute_head {
	uint16_t name_bytes; /* 0: there is none any more */
	uint32_t value_bytes;
} __attribute__((packed));

int model_init(struct model *model, const struct model_limits *limits, struct error *error)
{
	const struct model_stat top = { .mode = S_IFDIR | 0755 };
	uint32_t number;
	int err;

	*model = (struct model){
		.limits = *limits,
		.layer = 1,
		.inodes.element_bytes = sizeof(struct model_inode),
		.entries.element_bytes = sizeof(struct model_entry),
		.extents.element_bytes = sizeof(struct model_extent),
	};
	err = index_init(&model->by_name);
	if (!err)
		err = index_init(&model->by_attributes);
	if (err)
		return error_set(error, err, "no random numbers: %s", strerror(-err));
	err = model_add(model, &top, &number, error);
	if (!err) {
		model_inode(model, number)->links = 1;
		model->live_inodes++;
	}
	return err;
}

void model_deinit(struct model *model)
{
	pool_deinit(&model->inodes);
	pool_deinit(&model->entries);
	pool_deinit(&model->extents);
	arena_deinit(&model->names);
	arena_deinit(&model->attributes);
	index_deinit(&model->by_name);
	index_deinit(&model->by_attributes);
}

int model_begin_layer(struct model *model, struct error *error)
{
	if (model->layer == UINT16_MAX)
		return error_set(error, -E2BIG, "an image has at most %u layers", UINT16_MAX);
	model->layer++;
	return 0;
}

uint32_t model_next(const struct model *model, uint32_t number)
{
	for (number = number ? number + 1 : MODEL_ROOT; number - MODEL_ROOT < model->inodes.count;
	     number++)
		if (model_inode(model, number)->links)
			return number;
	return 0;
}

bool model_attribute_next(const struct model *model, uint32_t *place,
			  struct model_attribute *attribute)
{
	struct attribute_head head;
	const char *bytes;

	if (!*place)
		return false;
	bytes = arena_at(&model->attributes, *place);
	memcpy(&head, bytes, sizeof(head));
	if (!head.name_bytes)
		return false;
	bytes += sizeof(head);
	*attribute = (struct model_attribute){
		.name = bytes,
		.name_bytes = head.name_bytes,
		.value = (const uint8_t *)bytes + head.name_bytes,
		.value_bytes = head.value_bytes,
	};
	*place += sizeof(head) + head.name_bytes + head.value_bytes;
	return true;
}

struct name_key {
	uint32_t parent;
	size_t bytes;
	const char *name;
};

static bool same_name(const void *context, uint32_t value, const void *key)
{
	const struct model *model = context;
	const struct model_entry *entry = model_entry(model, value);
	const struct name_key *wanted = key;

	return entry->parent == wanted->parent && entry->name_bytes == wanted->bytes &&
	       !memcmp(model_name(model, entry), wanted->name, wanted->bytes);
}

uint32_t model_find(const struct model *model, uint32_t parent, const char *name, size_t name_bytes)
{
	const struct name_key key = { parent, name_bytes, name };

	return index_find(&model->by_name, index_hash(&model->by_name, parent, name, name_bytes),
			  same_name, model, &key);
}

void model_path(const struct model *model, uint32_t entry, char *path, size_t size)
{
	size_t start = size - 1;

	path[start] = '\0';
	while (entry) {
		const struct model_entry *found = model_entry(model, entry);

		if (start < found->name_bytes + sizeof("…/"))
			break;
		if (path[start])
			path[--start] = '/';
		start -= found->name_bytes;
		memcpy(path + start, model_name(model, found), found->name_bytes);
		entry = model_inode(model, found->parent)->name;
	}
	if (entry && start >= sizeof("…/")) {
		start -= strlen("…/");
		memcpy(path + start, "…/", strlen("…/"));
	}
	memmove(path, path + start, size - start);
}

static int no_memory(const struct pool *pool, uint32_t limit, const char *what, struct error *error)
{
	if (pool->count < limit)
		return error_set(error, -ENOMEM, "no memory for more %s: there are %u", what,
				 pool->count);
	error_set_hint(error, "split the tree, or raise the bound");
	return error_set(error, -E2BIG, "the image has more than %u %s", limit, what);
}

int model_add(struct model *model, const struct model_stat *stat, uint32_t *number,
	      struct error *error)
{
	struct model_inode *inode = NULL;
	/* So that the highest inode number is one. */
	uint32_t limit = model->limits.inodes;

	if (limit > UINT32_MAX - MODEL_ROOT)
		limit = UINT32_MAX - MODEL_ROOT;
	if (model->inodes.count < limit)
		inode = pool_add(&model->inodes);
	if (!inode)
		return no_memory(&model->inodes, limit, "files and directories", error);
	*number = MODEL_ROOT + model->inodes.count - 1;
	model_set_stat(model, *number, stat);
	if (S_ISDIR(stat->mode))
		inode->directory.next_index = MODEL_INDEX_FIRST;
	return 0;
}

void model_set_stat(struct model *model, uint32_t number, const struct model_stat *stat)
{
	struct model_inode *inode = model_inode(model, number);

	inode->mtime_s = stat->mtime_s;
	inode->mtime_ns = stat->mtime_ns;
	inode->mode = stat->mode;
	inode->uid = stat->uid;
	inode->gid = stat->gid;
	inode->layer = model->layer;
	if (S_ISCHR(stat->mode) || S_ISBLK(stat->mode)) {
		inode->device.major = stat->major;
		inode->device.minor = stat->minor;
	}
}

static int check_name(const char *name, size_t bytes, struct error *error)
{
	if (bytes > MODEL_NAME_BYTES_MAX)
		return error_set(error, -ENAMETOOLONG,
				 "the name \"%.*s…\" has %zu bytes, a name has at most %d", 60,
				 name, bytes, MODEL_NAME_BYTES_MAX);
	if (!bytes || memchr(name, '/', bytes) || memchr(name, '\0', bytes) ||
	    (name[0] == '.' && (bytes == 1 || (bytes == 2 && name[1] == '.'))))
		return error_set(error, -EINVAL, "\"%.*s\" is no name", (int)bytes, name);
	return 0;
}

int model_link(struct model *model, uint32_t parent, const char *name, size_t name_bytes,
	       uint32_t number, struct error *error)
{
	struct model_inode *directory = model_inode(model, parent);
	struct model_inode *inode = model_inode(model, number);
	struct model_entry *entry = NULL;
	uint32_t entry_number;
	int err = check_name(name, name_bytes, error);

	if (err)
		return err;
	if (directory->directory.next_index == UINT32_MAX)
		return error_set(error, -E2BIG, "a directory got too many names");
	if (model->entries.count < model->limits.entries)
		entry = pool_add(&model->entries);
	if (!entry)
		return no_memory(&model->entries, model->limits.entries, "names", error);
	entry_number = model->entries.count;
	*entry = (struct model_entry){
		.parent = parent,
		.inode = number,
		.index = directory->directory.next_index++,
		.name = arena_add(&model->names, name_bytes),
		.name_bytes = (uint8_t)name_bytes,
		.layer = model->layer,
		.next_of_inode = inode->name,
		.previous = directory->directory.last,
	};
	if (!entry->name ||
	    index_add(&model->by_name, index_hash(&model->by_name, parent, name, name_bytes),
		      entry_number))
		return error_set(error, -ENOMEM, "no memory for more than %u names", entry_number);
	memcpy(arena_at(&model->names, entry->name), name, name_bytes);
	if (entry->previous)
		model_entry(model, entry->previous)->next = entry_number;
	else
		directory->directory.first = entry_number;
	directory->directory.last = entry_number;
	directory->bytes += name_bytes;
	if (inode->name)
		model_entry(model, inode->name)->previous_of_inode = entry_number;
	inode->name = entry_number;
	if (!inode->links++)
		model->live_inodes++;
	return 0;
}

/* Removes one name; not of a directory that has entries. */
static void drop(struct model *model, uint32_t number)
{
	struct model_entry *entry = model_entry(model, number);
	struct model_inode *directory = model_inode(model, entry->parent);
	struct model_inode *inode = model_inode(model, entry->inode);

	index_remove(&model->by_name,
		     index_hash(&model->by_name, entry->parent, model_name(model, entry),
				entry->name_bytes),
		     number);
	if (entry->previous)
		model_entry(model, entry->previous)->next = entry->next;
	else
		directory->directory.first = entry->next;
	if (entry->next)
		model_entry(model, entry->next)->previous = entry->previous;
	else
		directory->directory.last = entry->previous;
	directory->bytes -= entry->name_bytes;
	if (entry->previous_of_inode)
		model_entry(model, entry->previous_of_inode)->next_of_inode = entry->next_of_inode;
	else
		inode->name = entry->next_of_inode;
	if (entry->next_of_inode)
		model_entry(model, entry->next_of_inode)->previous_of_inode =
			entry->previous_of_inode;
	if (!--inode->links)
		model->live_inodes--;
}

static bool has_entries(const struct model *model, uint32_t number)
{
	const struct model_inode *inode = model_inode(model, number);

	return S_ISDIR(inode->mode) && inode->directory.first;
}

/* Removes what is below `top`, and then `top`. Trees may be deep, so it does not call itself. */
static void sweep(struct model *model, uint32_t top, bool is_lower_only)
{
	uint32_t at = top;
	bool is_new = true;

	for (;;) {
		struct model_entry *entry = model_entry(model, at);
		uint32_t next = entry->next, parent = entry->parent;

		if (is_new && has_entries(model, entry->inode)) {
			at = model_inode(model, entry->inode)->directory.first;
			continue;
		}
		if (!is_lower_only ||
		    (entry->layer < model->layer && !has_entries(model, entry->inode)))
			drop(model, at);
		if (at == top)
			return;
		is_new = next != 0;
		at = next ? next : model_inode(model, parent)->name;
	}
}

void model_remove(struct model *model, uint32_t entry)
{
	sweep(model, entry, false);
}

void model_remove_lower(struct model *model, uint32_t entry)
{
	sweep(model, entry, true);
}

void model_empty_lower(struct model *model, uint32_t directory)
{
	uint32_t next;

	for (uint32_t at = model_inode(model, directory)->directory.first; at; at = next) {
		next = model_entry(model, at)->next;
		sweep(model, at, true);
	}
}

int model_set_target(struct model *model, uint32_t number, const char *target, size_t bytes,
		     struct error *error)
{
	struct model_inode *inode = model_inode(model, number);

	if (!bytes || bytes > MODEL_TARGET_BYTES_MAX)
		return error_set(error, -ENAMETOOLONG,
				 "a symbolic link's target has %zu bytes, it must have 1 to %d",
				 bytes, MODEL_TARGET_BYTES_MAX);
	if (memchr(target, '\0', bytes))
		return error_set(error, -EINVAL, "a symbolic link's target has a NUL in it");
	inode->target = arena_add(&model->names, bytes);
	if (!inode->target)
		return error_set(error, -ENOMEM, "no memory for targets of symbolic links");
	memcpy(arena_at(&model->names, inode->target), target, bytes);
	inode->bytes = bytes;
	return 0;
}

static int compare_attributes(const void *a, const void *b)
{
	const struct model_attribute *one = a, *two = b;
	size_t common = one->name_bytes < two->name_bytes ? one->name_bytes : two->name_bytes;
	int order = memcmp(one->name, two->name, common);

	return order ? order : one->name_bytes - two->name_bytes;
}

static int check_attributes(struct model_attribute *attributes, size_t count, size_t *bytes,
			    struct error *error)
{
	*bytes = sizeof(struct set_head) + sizeof(struct attribute_head);
	qsort(attributes, count, sizeof(*attributes), compare_attributes);
	for (size_t i = 0; i < count; i++) {
		const struct model_attribute *attribute = &attributes[i];

		if (!attribute->name_bytes || attribute->name_bytes > MODEL_NAME_BYTES_MAX ||
		    memchr(attribute->name, '\0', attribute->name_bytes))
			return error_set(error, -EINVAL, "the name of an attribute has %u bytes%s",
					 attribute->name_bytes,
					 ", or a NUL: it must have 1 to 255");
		if (attribute->value_bytes > MODEL_ATTRIBUTE_BYTES_MAX)
			return error_set(error, -E2BIG,
					 "attribute \"%.*s\" has %u bytes, at most are %d",
					 attribute->name_bytes, attribute->name,
					 attribute->value_bytes, MODEL_ATTRIBUTE_BYTES_MAX);
		if (i && !compare_attributes(attribute - 1, attribute))
			return error_set(error, -EINVAL, "attribute \"%.*s\" is there twice",
					 attribute->name_bytes, attribute->name);
		*bytes += sizeof(struct attribute_head) + attribute->name_bytes +
			  attribute->value_bytes;
	}
	if (*bytes > ARENA_PIECE_BYTES_MAX)
		return error_set(error, -E2BIG, "attributes have %zu bytes, at most are %d", *bytes,
				 ARENA_PIECE_BYTES_MAX);
	return 0;
}

static char *put(char *to, const void *from, size_t bytes)
{
	if (bytes)
		memcpy(to, from, bytes);
	return to + bytes;
}

static bool same_set(const void *context, uint32_t value, const void *key)
{
	const struct model *model = context;
	const char *set = arena_at(&model->attributes, value);
	struct set_head found, wanted;

	memcpy(&found, set, sizeof(found));
	memcpy(&wanted, key, sizeof(wanted));
	return found.bytes == wanted.bytes && !memcmp(set, key, sizeof(found) + found.bytes);
}

int model_set_attributes(struct model *model, uint32_t number, struct model_attribute *attributes,
			 size_t count, struct error *error)
{
	struct model_inode *inode = model_inode(model, number);
	const struct attribute_head last = { 0 };
	_cleanup_free_ char *set = NULL;
	uint32_t hash, place;
	size_t bytes;
	char *end;
	int err;

	inode->attributes = 0;
	if (!count)
		return 0;
	err = check_attributes(attributes, count, &bytes, error);
	if (err)
		return err;
	set = malloc(bytes);
	if (!set)
		return error_set(error, -ENOMEM, "no memory for attributes");
	end = put(set, &(struct set_head){ (uint32_t)(bytes - sizeof(struct set_head)) },
		  sizeof(struct set_head));
	for (size_t i = 0; i < count; i++) {
		const struct attribute_head head = { attributes[i].name_bytes,
						     attributes[i].value_bytes };

		end = put(end, &head, sizeof(head));
		end = put(end, attributes[i].name, attributes[i].name_bytes);
		end = put(end, attributes[i].value, attributes[i].value_bytes);
	}
	put(end, &last, sizeof(last));
	hash = index_hash(&model->by_attributes, 0, set, bytes);
	place = index_find(&model->by_attributes, hash, same_set, model, set);
	if (!place) {
		place = arena_add(&model->attributes, bytes);
		if (!place || index_add(&model->by_attributes, hash, place))
			return error_set(error, -ENOMEM, "no memory for more attributes");
		memcpy(arena_at(&model->attributes, place), set, bytes);
	}
	inode->attributes = place + sizeof(struct set_head);
	return 0;
}

void model_set_spooled(struct model *model, uint32_t number, uint64_t offset, uint32_t stored_bytes,
		       uint8_t compression)
{
	struct model_inode *inode = model_inode(model, number);

	inode->content = MODEL_SPOOLED;
	inode->compression = compression;
	inode->spool.offset = offset;
	inode->spool.stored_bytes = stored_bytes;
}

int model_add_extent(struct model *model, uint32_t number, const struct model_extent *extent,
		     struct error *error)
{
	struct model_inode *inode = model_inode(model, number);
	struct model_extent *added = pool_add(&model->extents);

	if (!added)
		return error_set(error, -ENOMEM, "no memory for more than %u extents",
				 model->extents.count);
	if (inode->content != MODEL_EXTENTS) {
		inode->content = MODEL_EXTENTS;
		inode->extents.first = model->extents.count - 1;
		inode->extents.count = 0;
	}
	*added = *extent;
	inode->extents.count++;
	return 0;
}
