/* SPDX-License-Identifier: MIT */
#include "content/store/sql.h"

#include <errno.h>

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

int sql_number(sqlite3 *db, const char *query, sqlite3_int64 *number)
{
	_cleanup_sql_ sqlite3_stmt *statement = NULL;
	int err = sql_prepare(db, query, &statement);

	if (!err)
		err = sql_step(statement);
	if (err <= 0)
		return err ?: -EUCLEAN;
	*number = sqlite3_column_int64(statement, 0);
	return 0;
}
