/* SPDX-License-Identifier: MIT */
#include "fetch/attachment.h"

#include <stdlib.h>

#include "fetch/fetcher_ops.h"

void *attachment_if_open(const struct fetcher *fetcher, const struct attachment_kind *kind)
{
	struct attachment *attachment = fetcher->attachments;

	while (attachment && attachment->kind != kind)
		attachment = attachment->next;
	return attachment;
}

void *attachment_of(struct fetcher *fetcher, const struct attachment_kind *kind)
{
	struct attachment *attachment = attachment_if_open(fetcher, kind);

	if (attachment)
		return attachment;
	attachment = calloc(1, kind->bytes);
	if (!attachment || kind->open(attachment, fetcher)) {
		free(attachment);
		return NULL;
	}
	attachment->kind = kind;
	attachment->next = fetcher->attachments;
	fetcher->attachments = attachment;
	return attachment;
}

void attachments_close(struct fetcher *fetcher)
{
	struct attachment *attachment;

	while ((attachment = fetcher->attachments)) {
		fetcher->attachments = attachment->next;
		attachment->kind->close(attachment);
	}
}
