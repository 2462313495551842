/* SPDX-License-Identifier: MIT */
/*
 * The map file. SQLite's "unix-excl" locks it against other processes while it is open, and keeps
 * the index of the write-ahead log in memory: two connections of this process share it, and only
 * the file and its log are on the disk.
 */
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "content/store/internal.h"

/* How long to wait for another process that has the file; it may be about to end. */
enum { BUSY_MS = 1000, PAGE_BYTES = 4096 };

/*
 * `list` is the source that has the digests: sources with the same root share them. The number of a
 * page of digests is that source's number, shifted by DIGEST_PAGE_BITS, plus the index of the page.
 * `sum` detects flipped bits in the row; elsewhere, a digest that does not match shows them.
 */
static const char schema[] =
	"CREATE TABLE sources("
	" id INTEGER PRIMARY KEY, name BLOB NOT NULL UNIQUE, text TEXT NOT NULL,"
	" key BLOB NOT NULL, list INTEGER) STRICT;"
	"CREATE INDEX sources_by_key ON sources(key);"
	"CREATE TABLE unsized(name BLOB PRIMARY KEY, source INTEGER NOT NULL)"
	" STRICT, WITHOUT ROWID;"
	"CREATE TABLE mappings("
	" offset INTEGER PRIMARY KEY, length INTEGER NOT NULL, source INTEGER NOT NULL,"
	" source_offset INTEGER NOT NULL, sum INTEGER NOT NULL) STRICT;"
	"CREATE TABLE digests(page INTEGER PRIMARY KEY, list BLOB NOT NULL) STRICT;"
	"CREATE TABLE pins("
	" source INTEGER NOT NULL, unit INTEGER NOT NULL, digest BLOB NOT NULL,"
	" PRIMARY KEY(source, unit)) STRICT, WITHOUT ROWID;"
	"CREATE TABLE identities("
	" source INTEGER NOT NULL, mirror INTEGER NOT NULL, identity TEXT NOT NULL,"
	" PRIMARY KEY(source, mirror)) STRICT, WITHOUT ROWID;";

static int check_file(const char *path, uint64_t *size, struct error *error)
{
	struct stat status;

	if (lstat(path, &status))
		return errno == ENOENT ? -ENOENT :
					 error_set(error, -errno, "cannot examine '%s': %s", path,
						   strerror(errno));
	if (S_ISLNK(status.st_mode)) {
		error_set_hint(error, "name the file that it leads to");
		return error_set(error, -ELOOP, "'%s' is a symbolic link", path);
	}
	if (!S_ISREG(status.st_mode))
		return error_set(error, -EUCLEAN, "'%s' is no regular file", path);
	if (status.st_uid != geteuid())
		return error_set(error, -EPERM, "'%s' belongs to user %u, not to user %u", path,
				 (unsigned)status.st_uid, (unsigned)geteuid());
	if (status.st_mode & 077) {
		error_set_hint(error, "if its content can be trusted: chmod 600");
		return error_set(error, -EPERM, "'%s' is open to others (mode %03o)", path,
				 (unsigned)status.st_mode & 0777);
	}
	*size = (uint64_t)status.st_size;
	return 0;
}

/* Checks that the file, its log and a journal are regular files, or missing. */
static int check_files(const char *path, struct error *error)
{
	static const char *const names[] = { "", "-wal", "-journal" };
	uint64_t sizes[3] = {};
	char name[PATH_MAX];
	int errors[3];

	for (unsigned i = 0; i < 3; i++) {
		if (snprintf(name, sizeof(name), "%s%s", path, names[i]) >= (int)sizeof(name))
			return error_set(error, -ENAMETOOLONG, "'%s' is too long a name", path);
		errors[i] = check_file(name, &sizes[i], error);
		if (errors[i] && errors[i] != -ENOENT)
			return errors[i];
	}
	/*
	 * NB: SQLite would take it for a new file and discard the log. While the file is being
	 * made, it may be as short, but then there is a journal, and no log yet.
	 */
	if (sizes[0] < PAGE_BYTES && (sizes[1] || (sizes[0] && !sizes[2])))
		return error_set(error, -EUCLEAN,
				 "'%s' has only %llu bytes: it is no map, or damaged", path,
				 (unsigned long long)sizes[0]);
	return errors[0];
}

/*
 * SQLite follows no symbolic link anywhere in a path (SQLITE_OPEN_NOFOLLOW), so resolve those of
 * the directory.
 */
static int resolve(struct store *store, const char *path, struct error *error)
{
	_cleanup_free_ char *copy = strdup(path), *other = strdup(path), *directory = NULL;
	char *name = other ? basename(other) : NULL;

	if (!copy || !name)
		return error_set(error, -ENOMEM, "no memory for a map");
	directory = realpath(dirname(copy), NULL);
	if (!directory) {
		int err = -errno;

		if (err == -ENOENT)
			error_set_hint(error, "make its directory first");
		return error_set(error, err, "cannot open map '%s': %s", path, strerror(-err));
	}
	if (asprintf(&store->path, "%s/%s", strcmp(directory, "/") ? directory : "", name) < 0) {
		store->path = NULL;
		return error_set(error, -ENOMEM, "no memory for a map");
	}
	return 0;
}

static int sync_directory(const char *path, struct error *error)
{
	_cleanup_free_ char *copy = strdup(path);
	_cleanup_close_ int fd = copy ? open(dirname(copy), O_RDONLY | O_DIRECTORY | O_CLOEXEC) :
					-1;

	if (fd < 0 || fsync(fd))
		return error_set(error, -errno, "cannot sync the directory of '%s': %s", path,
				 strerror(errno));
	return 0;
}

/* An empty file is an empty map: if we are killed here, the next server continues. */
static int make_file(const char *path, struct error *error)
{
	_cleanup_close_ int fd =
		open(path, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC | O_NOFOLLOW, 0600);

	if (fd < 0 || fchmod(fd, 0600))
		return error_set(error, -errno, "cannot make map '%s': %s", path, strerror(errno));
	return 0;
}

int store_file_connect(const struct store *store, sqlite3 **db, struct error *error)
{
	int rc = sqlite3_open_v2(store->path, db,
				 SQLITE_OPEN_READWRITE | SQLITE_OPEN_NOMUTEX | SQLITE_OPEN_NOFOLLOW,
				 "unix-excl");

	if (!*db)
		return error_set(error, -ENOMEM, "no memory for a map");
	if (rc != SQLITE_OK)
		return sql_errno(*db);
	/* Whatever keeps SQLite from opening a file for writing, it is content to read. */
	if (sqlite3_db_readonly(*db, "main") && !access(store->path, W_OK))
		return error_set(error, -EMFILE, "cannot open map '%s' for writing", store->path);
	sqlite3_extended_result_codes(*db, 0);
	sqlite3_busy_timeout(*db, BUSY_MS);
	return sql_run(*db, "PRAGMA temp_store=MEMORY; PRAGMA cache_size=" STORE_CACHE_SIZE ";"
			    "PRAGMA synchronous=FULL; PRAGMA journal_size_limit=16777216;"
			    "PRAGMA trusted_schema=OFF; PRAGMA cell_size_check=ON");
}

static int make_tables(struct store *store, struct error *error)
{
	char numbers[100];
	int err;

	snprintf(numbers, sizeof(numbers), "PRAGMA application_id=%d; PRAGMA user_version=%d",
		 STORE_APPLICATION_ID, STORE_VERSION);
	err = store_begin(store);
	if (!err)
		err = sql_run(store->writer, schema);
	if (!err)
		err = sql_run(store->writer, numbers);
	if (!err)
		err = store_commit(store);
	if (err) {
		err = sql_error_set(store->writer, "make", error);
		store_rollback(store);
	}
	return err;
}

static int check_version(struct store *store, struct error *error)
{
	sqlite3_int64 application, version, tables;
	int err = sql_number(store->writer, "PRAGMA application_id", &application);

	if (!err)
		err = sql_number(store->writer, "PRAGMA user_version", &version);
	if (!err)
		err = sql_number(store->writer, "SELECT count(*) FROM sqlite_schema", &tables);
	if (err)
		return err;
	if (!application && !version && !tables)
		return make_tables(store, error);
	if (application != STORE_APPLICATION_ID || version < 1)
		return error_set(error, -EUCLEAN, "'%s' is another program's database, no map",
				 store->path);
	if (version > STORE_VERSION_UNFINISHED) {
		error_set_hint(error, "use the version of btrfs-ublk that made it, or a newer");
		return error_set(
			error, -EPROTONOSUPPORT,
			"'%s' is a map of version %lld; this server knows versions up to %d",
			store->path, (long long)version, STORE_VERSION_UNFINISHED);
	}
	return 0;
}

/* Explains errors for which SQLite's own text is unclear. */
static int say_why(struct store *store, int err, struct error *error)
{
	switch (err) {
	case -EBUSY:
		error_set_hint(error, "one server has a map at a time: see btrfs-ublk device "
				      "list");
		return error_set(error, err, "map '%s' is in use by another process", store->path);
	case -EUCLEAN:
		error_set_hint(error, "put a copy of it back; or name another file, and a new "
				      "map is made there");
		return error_set(error, err, "'%s' is no map, or damaged: %s", store->path,
				 sqlite3_errmsg(store->writer));
	default:
		return sql_error_set(store->writer, "open", error) ?: err;
	}
}

static int prepare_all(struct store *store)
{
	const struct {
		sqlite3 *db;
		sqlite3_stmt **statement;
		const char *text;
	} all[] = {
		{ store->reader, &store->find_digest,
		  "SELECT list FROM digests WHERE page ="
		  " ((SELECT list FROM sources WHERE id = ?1) << 32) | ?2" },
		{ store->reader, &store->find_pin,
		  "SELECT digest FROM pins WHERE source = ?1 AND unit = ?2" },
		{ store->writer, &store->add_pin, "INSERT OR IGNORE INTO pins VALUES(?1, ?2, ?3)" },
		{ store->writer, &store->add_identity,
		  "INSERT OR IGNORE INTO identities VALUES(?1, ?2, ?3)" },
		{ store->writer, &store->same_pin,
		  "SELECT digest = ?3 FROM pins WHERE source = ?1 AND unit = ?2" },
		{ store->writer, &store->same_identity,
		  "SELECT identity FROM identities WHERE source = ?1 AND mirror = ?2" },
	};

	for (size_t i = 0; i < sizeof(all) / sizeof(*all); i++) {
		int err = sql_prepare(all[i].db, all[i].text, all[i].statement);

		if (err)
			return err;
	}
	return 0;
}

static int open_connections(struct store *store, struct error *error)
{
	int err = store_file_connect(store, &store->writer, error);

	if (err)
		return err;
	err = sql_run(store->writer, "PRAGMA journal_mode=WAL");
	if (!err)
		err = check_version(store, error);
	if (!err)
		err = store_file_connect(store, &store->reader, error);
	return err ?: prepare_all(store);
}

int store_file_open(struct store *store, const char *path, struct error *error)
{
	int err = resolve(store, path, error);

	if (err)
		return err;
	err = check_files(store->path, error);
	if (err == -ENOENT)
		err = make_file(store->path, error);
	if (err)
		return err;
	err = open_connections(store, error);
	if (err)
		return say_why(store, err, error);
	/*
	 * Sync it now: SQLite would do that at the first commit, when the directory may be out of
	 * sight.
	 */
	return sync_directory(store->path, error);
}

void store_file_close(struct store *store)
{
	sqlite3_finalize(store->find_digest);
	sqlite3_finalize(store->find_pin);
	sqlite3_finalize(store->add_pin);
	sqlite3_finalize(store->add_identity);
	sqlite3_finalize(store->same_pin);
	sqlite3_finalize(store->same_identity);
	sqlite3_close(store->reader);
	sqlite3_close(store->writer);
	free(store->path);
}

int store_has_table(sqlite3 *db, const char *name)
{
	_cleanup_sql_ sqlite3_stmt *find = NULL;

	return sql_find(db, &find, "SELECT 1 FROM sqlite_schema WHERE name = ?1", "t", name);
}

int store_end_last(struct store *store)
{
	if (!sqlite3_get_autocommit(store->writer))
		store_rollback(store);
	return sqlite3_get_autocommit(store->writer) ? 0 : -ENOMEM;
}

int store_begin(struct store *store)
{
	return store_end_last(store) ?: sql_run(store->writer, "BEGIN IMMEDIATE");
}

int store_commit(struct store *store)
{
	return sql_run(store->writer, "COMMIT");
}

/*
 * NB: a commit whose sync failed is nevertheless complete in the log, and could reappear after a
 * power cut. So empty the log, as far as the disk allows.
 */
void store_rollback(struct store *store)
{
	if (!sqlite3_get_autocommit(store->writer))
		sql_run(store->writer, "ROLLBACK");
	sqlite3_wal_checkpoint_v2(store->writer, NULL, SQLITE_CHECKPOINT_TRUNCATE, NULL, NULL);
}
