/* SPDX-License-Identifier: MIT */
#include "content/store/sql.h"

#include <errno.h>
#include <stdarg.h>
#include <stdint.h>

static int io_errno(sqlite3 *db)
{
	int extended = sqlite3_extended_errcode(db), of_system = sqlite3_system_errno(db);

	if (extended == SQLITE_IOERR_NOMEM)
		return -ENOMEM;
	return of_system == ENOSPC || of_system == EDQUOT ? -of_system : -EIO;
}

int sql_errno(sqlite3 *db)
{
	switch (sqlite3_errcode(db)) {
	case SQLITE_OK:
	case SQLITE_ROW:
	case SQLITE_DONE:
		return 0;
	case SQLITE_NOMEM:
		return -ENOMEM;
	case SQLITE_FULL:
		return -ENOSPC;
	case SQLITE_BUSY:
	case SQLITE_LOCKED:
		return -EBUSY;
	case SQLITE_READONLY:
		return -EROFS;
	case SQLITE_PERM:
		return -EACCES;
	case SQLITE_CANTOPEN:
		return sqlite3_system_errno(db) ? -sqlite3_system_errno(db) : -EACCES;
	case SQLITE_CORRUPT:
	case SQLITE_NOTADB:
	case SQLITE_FORMAT:
	case SQLITE_CONSTRAINT:
	case SQLITE_MISMATCH:
	case SQLITE_ERROR: /* such as a missing table */
		return -EUCLEAN;
	default:
		return io_errno(db);
	}
}

int sql_error_set(sqlite3 *db, const char *what, struct error *error)
{
	int err = sql_errno(db);

	if (!err)
		return 0;
	if (err == -ENOSPC)
		error_set_hint(error, "its file system is full: make room and try again");
	return error_set(error, err, "cannot %s the map: %s", what, sqlite3_errmsg(db));
}

int sql_run(sqlite3 *db, const char *statements)
{
	return sqlite3_exec(db, statements, NULL, NULL, NULL) == SQLITE_OK ? 0 : sql_errno(db);
}

int sql_prepare(sqlite3 *db, const char *text, sqlite3_stmt **statement)
{
	return sqlite3_prepare_v3(db, text, -1, SQLITE_PREPARE_PERSISTENT, statement, NULL) ==
			       SQLITE_OK ?
		       0 :
		       sql_errno(db);
}

int sql_step(sqlite3_stmt *statement)
{
	switch (sqlite3_step(statement)) {
	case SQLITE_ROW:
		return 1;
	case SQLITE_DONE:
		return 0;
	default:
		return sql_errno(sqlite3_db_handle(statement));
	}
}

int sql_do(sqlite3_stmt *statement)
{
	int err = sql_step(statement);

	sqlite3_reset(statement);
	return err;
}

static void bind_all(sqlite3_stmt *statement, const char *types, va_list args)
{
	for (int place = 1; *types; types++, place++) {
		const void *data;

		if (*types == 'i') {
			sqlite3_bind_int64(statement, place, (sqlite3_int64)va_arg(args, uint64_t));
			continue;
		}
		data = va_arg(args, const void *);
		if (*types == 't')
			sqlite3_bind_text(statement, place, data, -1, SQLITE_STATIC);
		else /* NB: NULL would be no blob, but NULL. */
			sqlite3_bind_blob64(statement, place, data ?: "", va_arg(args, size_t),
					    SQLITE_STATIC);
	}
}

void sql_bind(sqlite3_stmt *statement, const char *types, ...)
{
	va_list args;

	va_start(args, types);
	bind_all(statement, types, args);
	va_end(args);
}

static int find(sqlite3 *db, sqlite3_stmt **statement, const char *text, const char *types,
		va_list args)
{
	int err = sql_prepare(db, text, statement);

	if (err)
		return err;
	bind_all(*statement, types, args);
	return sql_step(*statement);
}

int sql_find(sqlite3 *db, sqlite3_stmt **statement, const char *text, const char *types, ...)
{
	va_list args;
	int found;

	va_start(args, types);
	found = find(db, statement, text, types, args);
	va_end(args);
	return found;
}

int sql_run_with(sqlite3 *db, const char *text, const char *types, ...)
{
	_cleanup_sql_ sqlite3_stmt *statement = NULL;
	va_list args;
	int err;

	va_start(args, types);
	err = find(db, &statement, text, types, args);
	va_end(args);
	return err;
}

int sql_number(sqlite3 *db, const char *query, sqlite3_int64 *number)
{
	_cleanup_sql_ sqlite3_stmt *statement = NULL;
	int err = sql_find(db, &statement, query, "");

	if (err <= 0)
		return err ?: -EUCLEAN;
	*number = sqlite3_column_int64(statement, 0);
	return 0;
}
