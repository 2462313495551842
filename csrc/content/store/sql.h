/* SPDX-License-Identifier: MIT */
/* A thin layer over SQLite with negative errnos and struct error. */
#pragma once

#include <sqlite3.h>
#include <stddef.h>

#include "base/error.h"

static inline void cleanup_finalize(sqlite3_stmt **statement)
{
	sqlite3_finalize(*statement);
}

/* `_cleanup_sql_ sqlite3_stmt *statement = NULL;` */
#define _cleanup_sql_ __attribute__((cleanup(cleanup_finalize)))

/* Returns the negative errno of the connection's last failure. */
int sql_errno(sqlite3 *db);

/* Sets "cannot DO the map: why"; returns sql_errno(). Sets nothing where that is 0. */
int sql_error_set(sqlite3 *db, const char *what, struct error *error);

/* Each returns 0 or a negative errno. */
int sql_run(sqlite3 *db, const char *statements);
int sql_prepare(sqlite3 *db, const char *text, sqlite3_stmt **statement);
/* Returns 1 for a row, 0 at the end, or a negative errno. */
int sql_step(sqlite3_stmt *statement);
/* Runs a statement without rows, and resets it. */
int sql_do(sqlite3_stmt *statement);
/*
 * Binds values to ?1, ?2 and so on. Each letter of `types` is one of them: `i` a uint64_t, `t` a text,
 * `b` a blob, with its size_t. They must stay while the statement runs.
 */
void sql_bind(sqlite3_stmt *statement, const char *types, ...);
/*
 * Prepares a statement, binds values to it, and takes its first step. Returns as sql_step() does. The
 * caller finalizes it, also after a failure.
 */
int sql_find(sqlite3 *db, sqlite3_stmt **statement, const char *text, const char *types, ...);
/* Does all of a statement that has no rows. Returns 0 or a negative errno. */
int sql_run_with(sqlite3 *db, const char *text, const char *types, ...);
/* Reads the single number that a query yields. */
int sql_number(sqlite3 *db, const char *query, sqlite3_int64 *number);
