/* SPDX-License-Identifier: MIT */
#include "fetch/process/login_text.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum field {
	FIELD_CA,
	FIELD_CERTIFICATE,
	FIELD_KEY,
	FIELD_HEADER,
	FIELD_USER,
	FIELD_PASSWORD,
	FIELD_URL,
	FIELD_UNTIL
};

struct field_head {
	uint32_t field, bytes;
};

/* Adds a field; without a place for it, only counts it. */
static void put(struct secret *text, enum field field, const char *data, size_t bytes)
{
	const struct field_head head = { field, (uint32_t)bytes };

	if (!data)
		return;
	if (text->text) {
		memcpy(text->text + text->length, &head, sizeof(head));
		memcpy(text->text + text->length + sizeof(head), data, bytes);
	}
	text->length += sizeof(head) + bytes;
}

static void put_text(struct secret *text, enum field field, const char *data)
{
	put(text, field, data, data ? strlen(data) : 0);
}

static void put_all(struct secret *text, const struct login *login)
{
	put(text, FIELD_CA, login->ca.text, login->ca.length);
	put(text, FIELD_CERTIFICATE, login->certificate.text, login->certificate.length);
	put(text, FIELD_KEY, login->key.text, login->key.length);
	for (const struct curl_slist *header = login->headers; header; header = header->next)
		put_text(text, FIELD_HEADER, header->data);
	put_text(text, FIELD_USER, login->user);
	put_text(text, FIELD_PASSWORD, login->password);
	put_text(text, FIELD_URL, login->url);
	if (login_token(login))
		put(text, FIELD_UNTIL, (const char *)&login->until_ns, sizeof(login->until_ns));
}

int login_pack(const struct login *login, struct secret *text)
{
	struct secret packed = {};

	put_all(&packed, login);
	if (packed.length > LOGIN_TEXT_MAX_BYTES)
		return -EFBIG;
	packed.text = malloc(packed.length + 1);
	if (!packed.text)
		return -ENOMEM;
	packed.length = 0;
	put_all(&packed, login);
	*text = packed;
	return 0;
}

/* Takes over `data`, which has a NUL behind its bytes. */
static int take(struct login *login, enum field field, char *data, size_t bytes)
{
	struct secret *const files[] = {
		[FIELD_CA] = &login->ca,
		[FIELD_CERTIFICATE] = &login->certificate,
		[FIELD_KEY] = &login->key,
	};
	char **const texts[] = {
		[FIELD_USER] = &login->user,
		[FIELD_PASSWORD] = &login->password,
		[FIELD_URL] = &login->url,
	};
	int err = 0;

	if (field <= FIELD_KEY) {
		*files[field] = (struct secret){ data, bytes };
		return 0;
	}
	if (field >= FIELD_USER && field <= FIELD_URL) {
		*texts[field] = data;
		return 0;
	}
	if (field == FIELD_HEADER)
		err = login_add_header(login, "%s", data);
	else if (field != FIELD_UNTIL)
		err = -EPROTO;
	else if (bytes == sizeof(login->until_ns))
		memcpy(&login->until_ns, data, bytes);
	secret_free(data);
	return err;
}

int login_unpack(const void *text, size_t bytes, struct login *login)
{
	const uint8_t *at = text, *end = at + bytes;
	struct field_head head;
	int err = 0;

	while (!err && at < end) {
		char *data;

		if ((size_t)(end - at) < sizeof(head))
			return -EPROTO;
		memcpy(&head, at, sizeof(head));
		at += sizeof(head);
		if (head.bytes > (size_t)(end - at))
			return -EPROTO;
		data = malloc(head.bytes + 1);
		if (!data)
			return -ENOMEM;
		memcpy(data, at, head.bytes);
		data[head.bytes] = 0;
		at += head.bytes;
		err = take(login, (enum field)head.field, data, head.bytes);
	}
	return err;
}
