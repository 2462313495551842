/* SPDX-License-Identifier: MIT */
/* Recently used pages of digests, in memory, for threads that must not wait. */
#include <stdlib.h>
#include <string.h>

#include "lazy/store/internal.h"

static struct digest_page *page_of(struct store *store, const struct source *source,
				   uint64_t number)
{
	uint64_t hash = (source->id * 0x9e3779b97f4a7c15ull + number) * 0xd6e8feb86659fd93ull;

	return &store->pages[hash >> 55]; /* the upper 9 bits */
}

void digest_page_keep(struct store *store, const struct source *source, uint64_t number,
		      const uint8_t *digests, size_t bytes)
{
	struct digest_page *page = page_of(store, source, number);

	pthread_mutex_lock(&store->pages_lock);
	if (!page->digests)
		page->digests = malloc(DIGESTS_PER_PAGE * SOURCE_DIGEST_BYTES);
	if (page->digests) {
		memcpy(page->digests, digests, bytes);
		page->source = source->id;
		page->number = number;
		page->count = (unsigned)(bytes / SOURCE_DIGEST_BYTES);
	}
	pthread_mutex_unlock(&store->pages_lock);
}

bool store_digest_at_hand(struct store *store, const struct source *source, uint64_t unit,
			  uint8_t digest[static SOURCE_DIGEST_BYTES])
{
	const uint64_t number = unit / DIGESTS_PER_PAGE, index = unit % DIGESTS_PER_PAGE;
	const struct digest_page *page = page_of(store, source, number);
	bool found;

	if (!source->has_digests)
		return false;
	pthread_mutex_lock(&store->pages_lock);
	found = page->source == source->id && page->number == number && index < page->count;
	if (found)
		memcpy(digest, page->digests + index * SOURCE_DIGEST_BYTES, SOURCE_DIGEST_BYTES);
	pthread_mutex_unlock(&store->pages_lock);
	return found;
}

void digest_pages_free(struct store *store)
{
	for (unsigned i = 0; i < DIGEST_PAGES_KEPT; i++)
		free(store->pages[i].digests);
}
