/* SPDX-License-Identifier: MIT */
#include "image/tar_acl.h"

#include <archive.h>
#include <archive_entry.h>
#include <endian.h>
#include <errno.h>
#include <linux/limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* struct posix_acl_xattr_header and _entry of the kernel's user API, version 2. */
struct acl_head {
	uint32_t version;
};
struct acl_entry {
	uint16_t tag;
	uint16_t permissions;
	uint32_t id;
};
_Static_assert(sizeof(struct acl_entry) == 8, "as in posix_acl_xattr.h");

enum {
	ACL_VERSION = 2,
	ACL_ENTRIES_MAX = (XATTR_SIZE_MAX - sizeof(struct acl_head)) / sizeof(struct acl_entry),
	TAG_USER_OBJ = 1,
	TAG_USER = 2,
	TAG_GROUP_OBJ = 4,
	TAG_GROUP = 8,
	TAG_MASK = 16,
	TAG_OTHER = 32,
	BASE_ENTRIES = 3, /* which the mode has as well */
};
#define ID_NONE UINT32_MAX

static int kernel_tag(int tag)
{
	switch (tag) {
	case ARCHIVE_ENTRY_ACL_USER_OBJ:
		return TAG_USER_OBJ;
	case ARCHIVE_ENTRY_ACL_USER:
		return TAG_USER;
	case ARCHIVE_ENTRY_ACL_GROUP_OBJ:
		return TAG_GROUP_OBJ;
	case ARCHIVE_ENTRY_ACL_GROUP:
		return TAG_GROUP;
	case ARCHIVE_ENTRY_ACL_MASK:
		return TAG_MASK;
	case ARCHIVE_ENTRY_ACL_OTHER:
		return TAG_OTHER;
	default:
		return -EINVAL;
	}
}

/* Kernels refuse entries that are not ordered. */
static int compare(const void *a, const void *b)
{
	const struct acl_entry *one = a, *two = b;

	if (one->tag != two->tag)
		return le16toh(one->tag) < le16toh(two->tag) ? -1 : 1;
	if (one->id != two->id)
		return le32toh(one->id) < le32toh(two->id) ? -1 : 1;
	return 0;
}

static int take(struct acl_entry *entry, int tag, int permissions, int id, const char *name,
		struct error *error)
{
	bool has_id = tag == TAG_USER || tag == TAG_GROUP;

	if (tag < 0 || permissions & ~7)
		return error_set(error, -EINVAL, "an ACL that is not one of POSIX");
	if (has_id && id < 0) {
		/* NB: GNU tar's --acls writes names also with --numeric-owner. */
		error_set_hint(error, "make the tar, or the layer, with `tar --xattrs "
				      "--xattrs-include='*'` instead of --acls, or with "
				      "`bsdtar`, which write numbers");
		return error_set(error, -EINVAL, "an ACL names \"%s\", and no number of it",
				 name ? name : "");
	}
	*entry = (struct acl_entry){
		.tag = htole16((uint16_t)tag),
		.permissions = htole16((uint16_t)permissions),
		.id = htole32(has_id ? (uint32_t)id : ID_NONE),
	};
	return 0;
}

int tar_acl(struct archive_entry *entry, int is_default, uint8_t **value, uint32_t *mode,
	    struct error *error)
{
	const int wanted = is_default ? ARCHIVE_ENTRY_ACL_TYPE_DEFAULT :
					ARCHIVE_ENTRY_ACL_TYPE_ACCESS;
	int type, permissions, tag, id, room, count = 0;
	struct acl_entry *entries;
	const char *name;

	*value = NULL;
	if (!(archive_entry_acl_types(entry) & wanted))
		return 0;
	room = archive_entry_acl_reset(entry, wanted);
	if (room <= 0)
		return 0;
	if (room > ACL_ENTRIES_MAX)
		return error_set(error, -E2BIG, "an ACL has %d entries, at most are %d", room,
				 ACL_ENTRIES_MAX);
	*value = malloc(sizeof(struct acl_head) + (size_t)room * sizeof(*entries));
	if (!*value)
		return error_set(error, -ENOMEM, "no memory for an ACL");
	*(struct acl_head *)*value = (struct acl_head){ htole32(ACL_VERSION) };
	entries = (void *)(*value + sizeof(struct acl_head));
	while (count < room && archive_entry_acl_next(entry, wanted, &type, &permissions, &tag, &id,
						      &name) == ARCHIVE_OK) {
		int err = take(&entries[count++], kernel_tag(tag), permissions, id, name, error);

		if (err)
			return err;
		if (tag == ARCHIVE_ENTRY_ACL_MASK && !is_default)
			*mode = (*mode & ~070u) | (uint32_t)permissions << 3;
	}
	qsort(entries, (size_t)count, sizeof(*entries), compare);
	if (count <= BASE_ENTRIES && !is_default)
		return 0;
	return (int)(sizeof(struct acl_head) + (size_t)count * sizeof(*entries));
}

static const char *tag_text(uint16_t tag)
{
	switch (tag) {
	case TAG_USER_OBJ:
	case TAG_USER:
		return "user";
	case TAG_GROUP_OBJ:
	case TAG_GROUP:
		return "group";
	case TAG_MASK:
		return "mask";
	case TAG_OTHER:
		return "other";
	default:
		return NULL;
	}
}

char *tar_acl_text(const uint8_t *value, size_t bytes)
{
	enum { ENTRY_TEXT_BYTES = 24 }; /* "group:4294967295:rwx," and the end */
	size_t count, length = 0;
	struct acl_head head;
	char *text;

	if (bytes < sizeof(head) || (bytes - sizeof(head)) % sizeof(struct acl_entry))
		return NULL;
	memcpy(&head, value, sizeof(head));
	count = (bytes - sizeof(head)) / sizeof(struct acl_entry);
	if (le32toh(head.version) != ACL_VERSION || !count)
		return NULL;
	text = malloc(count * ENTRY_TEXT_BYTES);
	for (size_t i = 0; i < count && text; i++) {
		struct acl_entry entry;
		uint16_t tag, allowed;
		const char *name;
		char id[16] = "";
		bool has_id;

		memcpy(&entry, value + sizeof(head) + i * sizeof(entry), sizeof(entry));
		tag = le16toh(entry.tag);
		allowed = le16toh(entry.permissions);
		name = tag_text(tag);
		has_id = tag == TAG_USER || tag == TAG_GROUP;
		/* Readers of tars take the number as an int. */
		if (!name || allowed > 7 || (has_id && le32toh(entry.id) > INT32_MAX)) {
			free(text);
			return NULL;
		}
		if (has_id)
			snprintf(id, sizeof(id), "%u", le32toh(entry.id));
		length += (size_t)snprintf(text + length, count * ENTRY_TEXT_BYTES - length,
					   "%s%s:%s:%c%c%c", i ? "," : "", name, id,
					   allowed & 4 ? 'r' : '-', allowed & 2 ? 'w' : '-',
					   allowed & 1 ? 'x' : '-');
	}
	return text;
}
