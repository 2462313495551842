/* SPDX-License-Identifier: MIT */
#include "image/tar_write.h"

#include <errno.h>
#include <inttypes.h>
#include <openssl/evp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/cleanup.h"
#include "base/size.h"
#include "image/tar_acl.h"

enum {
	BLOCK = 512,
	END_BLOCKS = 2,
	RECORD_MODE = 0644,
	NS_PER_S = 1000000000,
	NS_DIGITS = 9,
};
#define ID_MAX 07777777
#define SIZE_MAX_OCTAL 077777777777

/* As POSIX has it for pax. */
struct header {
	char name[100];
	char mode[8];
	char uid[8];
	char gid[8];
	char size[12];
	char mtime[12];
	char checksum[8];
	char type;
	char link[100];
	char magic[8]; /* with the version */
	char user[32];
	char group[32];
	char major[8];
	char minor[8];
	char prefix[155];
	char padding[12];
};
_Static_assert(sizeof(struct header) == BLOCK, "a tar's header");

static int put(struct tar_writer *writer, const void *data, size_t bytes)
{
	if (fwrite(data, 1, bytes, writer->out) == bytes)
		return 0;
	return error_set(writer->error, -errno, "cannot write the tar: %s", strerror(errno));
}

/* Fills the last block of what has `bytes`. */
static int pad(struct tar_writer *writer, uint64_t bytes)
{
	static const char zeroes[BLOCK];

	return put(writer, zeroes, (BLOCK - bytes % BLOCK) % BLOCK);
}

/* ---- Records ---- */

static int reserve(struct tar_writer *writer, size_t bytes)
{
	size_t wanted = writer->record_capacity ? writer->record_capacity : 4096;
	char *grown;

	if (bytes <= writer->record_capacity - writer->record_bytes)
		return 0;
	while (wanted - writer->record_bytes < bytes)
		wanted *= 2;
	grown = realloc(writer->records, wanted);
	if (!grown)
		return error_set(writer->error, -ENOMEM, "no memory");
	writer->records = grown;
	writer->record_capacity = wanted;
	return 0;
}

static void append(struct tar_writer *writer, const void *data, size_t bytes)
{
	if (bytes)
		memcpy(writer->records + writer->record_bytes, data, bytes);
	writer->record_bytes += bytes;
}

static size_t digits(size_t number)
{
	size_t count = 1;

	while (number /= 10)
		count++;
	return count;
}

/* Adds "LENGTH PREFIXKEY=VALUE\n", whose length counts its own digits. */
static int add_record(struct tar_writer *writer, const char *prefix, const char *key,
		      size_t key_bytes, const void *value, size_t bytes)
{
	size_t rest = strlen(" =\n") + strlen(prefix) + key_bytes + bytes;
	size_t length = rest + digits(rest);
	char text[24];

	if (length - rest < digits(length))
		length++;
	if (reserve(writer, length))
		return -ENOMEM;
	append(writer, text, (size_t)snprintf(text, sizeof(text), "%zu ", length));
	append(writer, prefix, strlen(prefix));
	append(writer, key, key_bytes);
	append(writer, "=", 1);
	append(writer, value, bytes);
	append(writer, "\n", 1);
	return 0;
}

static int add_text(struct tar_writer *writer, const char *key, const char *value)
{
	return add_record(writer, "", key, strlen(key), value, strlen(value));
}

static int add_number(struct tar_writer *writer, const char *key, uint64_t value)
{
	char text[24];

	snprintf(text, sizeof(text), "%" PRIu64, value);
	return add_text(writer, key, text);
}

/* NB: -1.25 s are -2 s and 750,000,000 ns in the inode, and "-1.25" in the record. */
static int add_time(struct tar_writer *writer, int64_t seconds, uint32_t nanoseconds)
{
	bool is_negative = seconds < 0;
	uint64_t whole = is_negative ? -(uint64_t)seconds : (uint64_t)seconds;
	char text[48];
	int length;

	if (is_negative && nanoseconds) {
		whole--;
		nanoseconds = NS_PER_S - nanoseconds;
	}
	length = snprintf(text, sizeof(text), "%s%" PRIu64, is_negative ? "-" : "", whole);
	if (nanoseconds) {
		length += snprintf(text + length, sizeof(text) - (size_t)length, ".%0*" PRIu32,
				   NS_DIGITS, nanoseconds);
		while (text[length - 1] == '0')
			text[--length] = '\0';
	}
	return add_text(writer, "mtime", text);
}

/* Adds an ACL as text, as tools have it; -EINVAL when it is none that they know. */
static int add_acl(struct tar_writer *writer, const struct tree_attribute *attribute,
		   const char *key)
{
	char *text = tar_acl_text(attribute->value, attribute->value_bytes);
	int ret;

	if (!text)
		return -EINVAL;
	ret = add_text(writer, key, text);
	free(text);
	return ret;
}

static bool is_named(const struct tree_attribute *attribute, const char *name)
{
	return attribute->name_bytes == strlen(name) &&
	       !memcmp(attribute->name, name, attribute->name_bytes);
}

/*
 * A record's key ends at the first "=". So a name that has one is written as libarchive does, with
 * it as "%3D", and the value in base64. Other tools ignore such attributes.
 */
static int add_encoded(struct tar_writer *writer, const struct tree_attribute *attribute)
{
	_cleanup_free_ char *name = malloc(3 * (size_t)attribute->name_bytes + 1);
	_cleanup_free_ unsigned char *value = malloc(4 * ((attribute->value_bytes + 2) / 3) + 1);
	size_t length = 0;
	int bytes;

	if (!name || !value)
		return -ENOMEM;
	for (size_t i = 0; i < attribute->name_bytes; i++) {
		char byte = attribute->name[i];

		if (byte == '=' || byte == '%')
			length += (size_t)sprintf(name + length, "%%%02X", byte);
		else
			name[length++] = byte;
	}
	bytes = EVP_EncodeBlock(value, attribute->value, (int)attribute->value_bytes);
	while (bytes && value[bytes - 1] == '=')
		bytes--;
	return add_record(writer, "LIBARCHIVE.xattr.", name, length, value, (size_t)bytes);
}

static int add_attribute(struct tar_writer *writer, const struct tree_attribute *attribute)
{
	int ret = -EINVAL;

	if (is_named(attribute, "system.posix_acl_access"))
		ret = add_acl(writer, attribute, "SCHILY.acl.access");
	else if (is_named(attribute, "system.posix_acl_default"))
		ret = add_acl(writer, attribute, "SCHILY.acl.default");
	if (ret != -EINVAL)
		return ret;
	if (memchr(attribute->name, '=', attribute->name_bytes))
		return add_encoded(writer, attribute);
	return add_record(writer, "SCHILY.xattr.", attribute->name, attribute->name_bytes,
			  attribute->value, attribute->value_bytes);
}

/* ---- Headers ---- */

/* Writes an octal number that fills the field but for its last byte; 0 if it does not fit. */
static void set_octal(char *field, size_t size, uint64_t value)
{
	if (value >> (3 * (size - 1)))
		value = 0;
	field[size - 1] = '\0';
	for (size_t i = size - 1; i-- > 0; value >>= 3)
		field[i] = (char)('0' + (value & 7));
}

static void set_text(char *field, size_t size, const char *text)
{
	memcpy(field, text, strnlen(text, size));
}

static int put_header(struct tar_writer *writer, struct header *header)
{
	const uint8_t *bytes = (const uint8_t *)header;
	unsigned sum = 0;

	memcpy(header->magic, "ustar\00000", sizeof(header->magic));
	memset(header->checksum, ' ', sizeof(header->checksum));
	for (size_t i = 0; i < sizeof(*header); i++)
		sum += bytes[i];
	set_octal(header->checksum, sizeof(header->checksum) - 1, sum);
	return put(writer, header, sizeof(*header));
}

static int put_records(struct tar_writer *writer)
{
	struct header header = { .name = "././@PaxHeader", .type = 'x' };
	int ret;

	if (!writer->record_bytes)
		return 0;
	set_octal(header.mode, sizeof(header.mode), RECORD_MODE);
	set_octal(header.uid, sizeof(header.uid), 0);
	set_octal(header.gid, sizeof(header.gid), 0);
	set_octal(header.size, sizeof(header.size), writer->record_bytes);
	set_octal(header.mtime, sizeof(header.mtime), 0);
	ret = put_header(writer, &header);
	if (!ret)
		ret = put(writer, writer->records, writer->record_bytes);
	return ret ?: pad(writer, writer->record_bytes);
}

static char type_of(const struct tree_entry *entry)
{
	if (entry->first)
		return '1';
	switch (entry->mode & S_IFMT) {
	case S_IFLNK:
		return '2';
	case S_IFCHR:
		return '3';
	case S_IFBLK:
		return '4';
	case S_IFDIR:
		return '5';
	case S_IFIFO:
		return '6';
	default:
		return '0';
	}
}

/* Adds records for the numbers of an inode that headers cannot hold. */
static int add_numbers(struct tar_writer *writer, const struct tree_entry *entry, uint64_t stored)
{
	int ret = 0;

	if (entry->mtime_ns || entry->mtime_s < 0 || entry->mtime_s > SIZE_MAX_OCTAL)
		ret = add_time(writer, entry->mtime_s, entry->mtime_ns);
	if (!ret && entry->uid > ID_MAX)
		ret = add_number(writer, "uid", entry->uid);
	if (!ret && entry->gid > ID_MAX)
		ret = add_number(writer, "gid", entry->gid);
	if (!ret && stored > SIZE_MAX_OCTAL)
		ret = add_number(writer, "size", stored);
	for (size_t i = 0; i < entry->attribute_count && !ret; i++)
		ret = add_attribute(writer, &entry->attributes[i]);
	return ret;
}

/* ---- Holes ---- */

static bool has_holes(const struct tree_entry *entry)
{
	if (entry->first || !S_ISREG(entry->mode) || !entry->bytes)
		return false;
	return entry->region_count != 1 || entry->regions[0].bytes != entry->bytes;
}

/* Returns whether the map needs an empty region at the end, to say where the file ends. */
static bool ends_in_hole(const struct tree_entry *entry)
{
	const struct tree_region *last;

	if (!entry->region_count)
		return true;
	last = &entry->regions[entry->region_count - 1];
	return last->offset + last->bytes != entry->bytes;
}

/* Calls `line` with each number of the map: how many regions, then offset and length of each. */
static int each_number(struct tar_writer *writer, const struct tree_entry *entry,
		       int (*line)(struct tar_writer *writer, uint64_t number, uint64_t *bytes),
		       uint64_t *bytes)
{
	bool is_open = ends_in_hole(entry);
	int ret = line(writer, entry->region_count + is_open, bytes);

	for (size_t i = 0; i < entry->region_count && !ret; i++) {
		ret = line(writer, entry->regions[i].offset, bytes);
		if (!ret)
			ret = line(writer, entry->regions[i].bytes, bytes);
	}
	if (!ret && is_open)
		ret = line(writer, entry->bytes, bytes);
	if (!ret && is_open)
		ret = line(writer, 0, bytes);
	return ret;
}

static int count_line(struct tar_writer *writer, uint64_t number, uint64_t *bytes)
{
	*bytes += digits(number) + 1;
	return 0;
}

static int put_line(struct tar_writer *writer, uint64_t number, uint64_t *bytes)
{
	char text[24];
	int length = snprintf(text, sizeof(text), "%" PRIu64 "\n", number);

	*bytes += (uint64_t)length;
	return put(writer, text, (size_t)length);
}

static int add_sparse(struct tar_writer *writer, const char *path, const struct tree_entry *entry)
{
	int ret = add_text(writer, "GNU.sparse.major", "1");

	if (!ret)
		ret = add_text(writer, "GNU.sparse.minor", "0");
	if (!ret)
		ret = add_text(writer, "GNU.sparse.name", path);
	return ret ?: add_number(writer, "GNU.sparse.realsize", entry->bytes);
}

/* ---- The visitor ---- */

static uint64_t stored_bytes(const struct tree_entry *entry)
{
	uint64_t bytes = 0;

	for (size_t i = 0; i < entry->region_count; i++)
		bytes += entry->regions[i].bytes;
	return bytes;
}

static int put_map(struct tar_writer *writer, const struct tree_entry *entry)
{
	uint64_t bytes = 0;
	int ret = each_number(writer, entry, put_line, &bytes);

	return ret ?: pad(writer, bytes);
}

static int put_entry(struct tar_writer *writer, const struct tree_entry *entry, const char *path)
{
	const char *link = entry->first ? entry->first : entry->target;
	bool is_sparse = has_holes(entry);
	uint64_t stored = stored_bytes(entry), map_bytes = 0;
	struct header header = { .type = type_of(entry) };
	int ret = 0;

	writer->record_bytes = 0;
	if (is_sparse) {
		each_number(writer, entry, count_line, &map_bytes);
		stored += round_up_u64(map_bytes, BLOCK);
		ret = add_sparse(writer, path, entry);
	}
	if (!ret && !is_sparse && strlen(path) > sizeof(header.name))
		ret = add_text(writer, "path", path);
	if (!ret && link && strlen(link) > sizeof(header.link))
		ret = add_text(writer, "linkpath", link);
	if (!ret)
		ret = add_numbers(writer, entry, stored);
	if (!ret)
		ret = put_records(writer);
	if (ret)
		return ret;
	set_text(header.name, sizeof(header.name), path);
	if (link)
		set_text(header.link, sizeof(header.link), link);
	set_octal(header.mode, sizeof(header.mode), entry->mode & 07777);
	set_octal(header.uid, sizeof(header.uid), entry->uid);
	set_octal(header.gid, sizeof(header.gid), entry->gid);
	set_octal(header.size, sizeof(header.size), stored);
	set_octal(header.mtime, sizeof(header.mtime),
		  entry->mtime_s < 0 ? 0 : (uint64_t)entry->mtime_s);
	set_octal(header.major, sizeof(header.major), entry->major);
	set_octal(header.minor, sizeof(header.minor), entry->minor);
	ret = put_header(writer, &header);
	return !ret && is_sparse ? put_map(writer, entry) : ret;
}

static struct tar_writer *writer_of(struct tree_visitor *visitor)
{
	return (struct tar_writer *)((char *)visitor - offsetof(struct tar_writer, visitor));
}

static int visit_entry(struct tree_visitor *visitor, const struct tree_entry *entry)
{
	struct tar_writer *writer = writer_of(visitor);
	size_t bytes = strlen(entry->path);
	char *path;
	int ret;

	writer->written_bytes = 0;
	if (S_ISSOCK(entry->mode)) {
		writer->sockets++;
		return 0;
	}
	if (!S_ISDIR(entry->mode))
		return put_entry(writer, entry, entry->path);
	path = malloc(bytes + sizeof("./"));
	if (!path)
		return error_set(writer->error, -ENOMEM, "no memory");
	if (bytes)
		memcpy(path, entry->path, bytes);
	memcpy(path + bytes, bytes ? "/" : "./", bytes ? sizeof("/") : sizeof("./"));
	ret = put_entry(writer, entry, path);
	free(path);
	return ret;
}

static int visit_data(struct tree_visitor *visitor, uint64_t offset, const void *data, size_t bytes)
{
	struct tar_writer *writer = writer_of(visitor);

	writer->written_bytes += bytes;
	return put(writer, data, bytes);
}

static int visit_end(struct tree_visitor *visitor, const struct tree_entry *entry)
{
	struct tar_writer *writer = writer_of(visitor);

	return pad(writer, writer->written_bytes);
}

void tar_writer_init(struct tar_writer *writer, FILE *out, struct error *error)
{
	*writer = (struct tar_writer){
		.visitor = { .entry = visit_entry, .data = visit_data, .end = visit_end },
		.out = out,
		.error = error,
	};
}

void tar_writer_deinit(struct tar_writer *writer)
{
	free(writer->records);
}

int tar_writer_finish(struct tar_writer *writer)
{
	static const char zeroes[END_BLOCKS * BLOCK];
	int ret = put(writer, zeroes, sizeof(zeroes));

	if (!ret && fflush(writer->out))
		ret = error_set(writer->error, -errno, "cannot write the tar: %s", strerror(errno));
	return ret;
}
