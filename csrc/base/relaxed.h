/* SPDX-License-Identifier: MIT */
/*
 * Numbers that one thread writes and any may read. Accesses are neither torn nor ordered. They cost
 * as much as plain ones, because a single writer needs no locked instruction.
 */
#pragma once

#define relaxed_load(number) __atomic_load_n(number, __ATOMIC_RELAXED)
#define relaxed_store(number, value) __atomic_store_n(number, value, __ATOMIC_RELAXED)
#define relaxed_add(number, amount) relaxed_store(number, *(number) + (amount))
