/* SPDX-License-Identifier: MIT */
#include "image/tree_list.h"

#include <endian.h>
#include <errno.h>
#include <inttypes.h>
#include <stddef.h>
#include <string.h>
#include <sys/stat.h>

#include "base/crypto.h"
#include "base/hex.h"

enum { SECTOR = 4096 };

static struct tree_lister *lister_of(struct tree_visitor *visitor)
{
	return (struct tree_lister *)((char *)visitor - offsetof(struct tree_lister, visitor));
}

/* stdio keeps that something failed, see put_end(). */
void tree_put_text(FILE *out, const char *text)
{
	if (!text || !*text)
		putc('-', out);
	for (; text && *text; text++) {
		unsigned char byte = (unsigned char)*text;

		/* A text that is only "-" must not look like none. */
		if (byte <= ' ' || byte >= 0x7f || byte == '%' || byte == '-')
			fprintf(out, "%%%02x", byte);
		else
			putc(byte, out);
	}
}

static int put_end(struct tree_lister *lister)
{
	putc('\n', lister->out);
	if (!ferror(lister->out))
		return 0;
	return error_set(lister->error, -EIO, "cannot write the list: %s", strerror(errno));
}

static int digest_failed(struct tree_lister *lister)
{
	return error_set(lister->error, -ENOMEM, "no memory for a digest");
}

static int put_digest(struct tree_lister *lister)
{
	char text[2 * EVP_MAX_MD_SIZE + 1];
	uint8_t digest[EVP_MAX_MD_SIZE];
	unsigned bytes = 0;

	if (!EVP_DigestFinal_ex(lister->digest, digest, &bytes))
		return digest_failed(lister);
	fprintf(lister->out, "\t%s", hex_encode(digest, bytes, text));
	return 0;
}

static int begin_digest(struct tree_lister *lister)
{
	return EVP_DigestInit_ex(lister->digest, EVP_sha256(), NULL) ? 0 : digest_failed(lister);
}

static int put_attributes(struct tree_lister *lister, const struct tree_entry *entry)
{
	if (!entry->attribute_count) {
		fputs("\t-", lister->out);
		return 0;
	}
	if (begin_digest(lister))
		return -ENOMEM;
	for (size_t i = 0; i < entry->attribute_count; i++) {
		const struct tree_attribute *attribute = &entry->attributes[i];
		uint16_t lengths[] = { htole16(attribute->name_bytes),
				       htole16(attribute->value_bytes) };

		if (!EVP_DigestUpdate(lister->digest, lengths, sizeof(lengths)) ||
		    !EVP_DigestUpdate(lister->digest, attribute->name, attribute->name_bytes) ||
		    !EVP_DigestUpdate(lister->digest, attribute->value, attribute->value_bytes))
			return digest_failed(lister);
	}
	return put_digest(lister);
}

static char type_of(uint32_t mode)
{
	switch (mode & S_IFMT) {
	case S_IFDIR:
		return 'd';
	case S_IFLNK:
		return 'l';
	case S_IFCHR:
		return 'c';
	case S_IFBLK:
		return 'b';
	case S_IFIFO:
		return 'p';
	case S_IFSOCK:
		return 's';
	default:
		return '-';
	}
}

static int visit_entry(struct tree_visitor *visitor, const struct tree_entry *entry)
{
	struct tree_lister *lister = lister_of(visitor);
	int ret;

	tree_put_text(lister->out, entry->path);
	fprintf(lister->out,
		"\t%c\t%04" PRIo32 "\t%" PRIu32 ":%" PRIu32 "\t%" PRId64 ".%09" PRIu32 "\t%" PRIu64
		"\t%" PRIu32 ":%" PRIu32,
		type_of(entry->mode), entry->mode & 07777, entry->uid, entry->gid, entry->mtime_s,
		entry->mtime_ns, entry->bytes, entry->major, entry->minor);
	putc('\t', lister->out);
	tree_put_text(lister->out, entry->target);
	putc('\t', lister->out);
	tree_put_text(lister->out, entry->first);
	ret = put_attributes(lister, entry);
	if (ret)
		return ret;
	lister->has_content = false;
	if (entry->region_count)
		return begin_digest(lister);
	fputs("\t-", lister->out);
	return put_end(lister);
}

static bool is_zero(const uint8_t *data, size_t bytes)
{
	return !data[0] && !memcmp(data, data + 1, bytes - 1);
}

/* Extents begin with whole sectors, so `offset` does. */
static int visit_data(struct tree_visitor *visitor, uint64_t offset, const void *data, size_t bytes)
{
	static const uint8_t zeroes[SECTOR];
	struct tree_lister *lister = lister_of(visitor);
	const uint8_t *at = data;

	for (size_t done = 0; done < bytes; done += SECTOR) {
		size_t part = bytes - done < SECTOR ? bytes - done : SECTOR;
		uint64_t place = htole64(offset + done);

		if (is_zero(at + done, part))
			continue;
		lister->has_content = true;
		if (!EVP_DigestUpdate(lister->digest, &place, sizeof(place)) ||
		    !EVP_DigestUpdate(lister->digest, at + done, part) ||
		    !EVP_DigestUpdate(lister->digest, zeroes, SECTOR - part))
			return digest_failed(lister);
	}
	return 0;
}

static int visit_end(struct tree_visitor *visitor, const struct tree_entry *entry)
{
	struct tree_lister *lister = lister_of(visitor);
	int ret = 0;

	if (lister->has_content)
		ret = put_digest(lister);
	else
		fputs("\t-", lister->out);
	return ret ?: put_end(lister);
}

int tree_lister_init(struct tree_lister *lister, FILE *out, struct error *error)
{
	*lister = (struct tree_lister){
		.visitor = { .entry = visit_entry, .data = visit_data, .end = visit_end },
		.out = out,
		.error = error,
		.digest = EVP_MD_CTX_new(),
	};
	return lister->digest && crypto_is_ready() ? 0 : digest_failed(lister);
}

void tree_lister_deinit(struct tree_lister *lister)
{
	EVP_MD_CTX_free(lister->digest);
}

int tree_lister_finish(struct tree_lister *lister)
{
	if (fflush(lister->out))
		return error_set(lister->error, -errno, "cannot write the list: %s",
				 strerror(errno));
	return 0;
}
