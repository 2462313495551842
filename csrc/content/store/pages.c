/* SPDX-License-Identifier: MIT */
/* Recently used pages of digests, in memory, for threads that must not wait. */
#include <stdlib.h>
#include <string.h>

#include "content/store/internal.h"

/* The functions before digest_page_keep() need the lock. */

/* Returns the first of the DIGEST_PAGE_PLACES where a page may be. */
static struct digest_page *places_of(struct store *store, const struct source *source,
				     uint64_t number)
{
	uint64_t hash = (source->id * 0x9e3779b97f4a7c15ull + number) * 0xd6e8feb86659fd93ull;

	return &store->pages[hash % (DIGEST_PAGES_KEPT / DIGEST_PAGE_PLACES) * DIGEST_PAGE_PLACES];
}

/* Returns the page, or NULL. */
static struct digest_page *find(struct store *store, const struct source *source, uint64_t number)
{
	struct digest_page *page = places_of(store, source, number);

	for (unsigned i = 0; i < DIGEST_PAGE_PLACES; i++, page++) {
		if (page->source == source->id && page->number == number) {
			page->used = ++store->page_uses;
			return page;
		}
	}
	return NULL;
}

/* Returns the page, or the place that was used least recently. */
static struct digest_page *find_place(struct store *store, const struct source *source,
				      uint64_t number)
{
	struct digest_page *places = places_of(store, source, number), *oldest = places;
	struct digest_page *page = find(store, source, number);

	for (unsigned i = 1; i < DIGEST_PAGE_PLACES; i++) {
		if (places[i].used < oldest->used)
			oldest = &places[i];
	}
	return page ?: oldest;
}

void digest_page_keep(struct store *store, const struct source *source, uint64_t number,
		      const uint8_t *digests, size_t bytes)
{
	struct digest_page *page;

	pthread_mutex_lock(&store->pages_lock);
	page = find_place(store, source, number);
	if (!page->digests)
		page->digests = malloc(DIGESTS_PER_PAGE * SOURCE_DIGEST_BYTES);
	if (page->digests) {
		memcpy(page->digests, digests, bytes);
		page->source = source->id;
		page->number = number;
		page->used = ++store->page_uses;
		page->count = (unsigned)(bytes / SOURCE_DIGEST_BYTES);
	}
	pthread_mutex_unlock(&store->pages_lock);
}

bool store_digest_at_hand(struct store *store, const struct source *source, uint64_t unit,
			  uint8_t digest[static SOURCE_DIGEST_BYTES])
{
	const uint64_t number = unit / DIGESTS_PER_PAGE, index = unit % DIGESTS_PER_PAGE;
	const struct digest_page *page;
	bool found;

	if (!source->has_digests)
		return false;
	pthread_mutex_lock(&store->pages_lock);
	page = find(store, source, number);
	found = page && index < page->count;
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
