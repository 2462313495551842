/* SPDX-License-Identifier: MIT */
/* Doubly linked lists with links embedded in the elements. A list is itself a link. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

struct link {
	struct link *previous, *next; /* NULL: it is in no list */
};

/* Returns the `type` whose `member` is at `pointer`. */
#define container_of(pointer, type, member) \
	((type *)(void *)((char *)(pointer)-offsetof(type, member)))

static inline void list_init(struct link *list)
{
	list->previous = list->next = list;
}

static inline bool list_is_empty(const struct link *list)
{
	return list->next == list;
}

/* Returns NULL when the list is empty. */
static inline struct link *list_first(const struct link *list)
{
	return list_is_empty(list) ? NULL : list->next;
}

/* Goes through the elements of a list, which must stay in it meanwhile. */
/* NOLINTBEGIN(bugprone-macro-parentheses): a type and a name take none. */
#define list_for_each(type, item, list, member)                              \
	for (type *item = list_item((list)->next, list, type, member); item; \
	     item = list_item((item)->member.next, list, type, member))
#define list_item(link, list, type, member) \
	((link) == (list) ? NULL : container_of(link, type, member))
/* NOLINTEND(bugprone-macro-parentheses) */

static inline bool link_is_in_list(const struct link *link)
{
	return link->next != NULL;
}

static inline void list_insert_after(struct link *place, struct link *link)
{
	link->previous = place;
	link->next = place->next;
	place->next->previous = link;
	place->next = link;
}

static inline void list_append(struct link *list, struct link *link)
{
	list_insert_after(list->previous, link);
}

/* Does nothing when the link is in no list. */
static inline void list_remove(struct link *link)
{
	if (!link->next)
		return;
	link->previous->next = link->next;
	link->next->previous = link->previous;
	link->previous = link->next = NULL;
}
