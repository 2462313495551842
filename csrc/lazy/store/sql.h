/* SPDX-License-Identifier: MIT */
/* SQLite, in the terms of this program: negative errnos, and complaints. */
#ifndef LAZY_STORE_SQL_H
#define LAZY_STORE_SQL_H

#include <sqlite3.h>
#include <stddef.h>

#include "lazy/complaint.h"

static inline void cleanup_finalize(sqlite3_stmt **statement)
{
	sqlite3_finalize(*statement);
}

/* `_cleanup_sql_ sqlite3_stmt *statement = NULL;` */
#define _cleanup_sql_ __attribute__((cleanup(cleanup_finalize)))

/* The negative errno of the connection's last failure. */
int sql_errno(sqlite3 *db);

/* "cannot DO the map: why"; returns sql_errno(). */
int sql_complain(sqlite3 *db, const char *what, struct complaint *complaint);

/* Each returns 0 or a negative errno. */
int sql_run(sqlite3 *db, const char *statements);
int sql_prepare(sqlite3 *db, const char *text, sqlite3_stmt **statement);
/* 1: a row; 0: no more; else a negative errno. */
int sql_step(sqlite3_stmt *statement);
/* A statement without rows, made ready to be run again. */
int sql_do(sqlite3_stmt *statement);
/* The only number that a query gives. */
int sql_number(sqlite3 *db, const char *query, sqlite3_int64 *number);

#endif
