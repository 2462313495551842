/* SPDX-License-Identifier: MIT */
#include "lazy/attachment.h"

#include <stdlib.h>

void *attachment_of(struct fetcher *fetcher, const struct attachment_kind *kind)
{
	struct attachment **first = fetcher_attachments(fetcher), *attachment = *first;

	while (attachment && attachment->kind != kind)
		attachment = attachment->next;
	if (attachment)
		return attachment;
	attachment = calloc(1, kind->bytes);
	if (!attachment || kind->open(attachment, fetcher)) {
		free(attachment);
		return NULL;
	}
	attachment->kind = kind;
	attachment->next = *first;
	*first = attachment;
	return attachment;
}

void attachments_close(struct fetcher *fetcher)
{
	struct attachment **first = fetcher_attachments(fetcher), *attachment;

	while ((attachment = *first)) {
		*first = attachment->next;
		attachment->kind->close(attachment);
	}
}
