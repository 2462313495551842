/* SPDX-License-Identifier: MIT */
/*
 * The map file itself. SQLite's "unix-excl" locks it against other processes for as long as it is
 * open, and keeps the index of the write-ahead log in memory, so that two connections of this
 * process share it and nothing but the file and its log lies on the disk.
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
#include "lazy/store/internal.h"

/* How long another process may have the file: it may be about to end. */
enum { BUSY_MS = 1000, PAGE_BYTES = 4096 };

/*
 * `list` is the source whose digests these are: sources of the same root share them. The number of a
 * page of digests is that source's, shifted by DIGEST_PAGE_BITS, and the page's own. `sum` tells
 * when a bit of the row has turned; all else of that sort shows in what a digest does not match.
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
	"CREATE INDEX mappings_by_source ON mappings(source, source_offset, length);"
	"CREATE TABLE digests(page INTEGER PRIMARY KEY, list BLOB NOT NULL) STRICT;"
	"CREATE TABLE pins("
	" source INTEGER NOT NULL, unit INTEGER NOT NULL, digest BLOB NOT NULL,"
	" PRIMARY KEY(source, unit)) STRICT, WITHOUT ROWID;"
	"CREATE TABLE identities("
	" source INTEGER NOT NULL, mirror INTEGER NOT NULL, identity TEXT NOT NULL,"
	" PRIMARY KEY(source, mirror)) STRICT, WITHOUT ROWID;";

static int check_file(const char *path, uint64_t *size, struct complaint *complaint)
{
	struct stat status;

	if (lstat(path, &status))
		return errno == ENOENT ? -ENOENT :
					 complain(complaint, -errno, "cannot look at '%s': %s",
						  path, strerror(errno));
	if (S_ISLNK(status.st_mode)) {
		complaint_hint(complaint, "name the file that it leads to");
		return complain(complaint, -ELOOP, "'%s' is a symbolic link", path);
	}
	if (!S_ISREG(status.st_mode))
		return complain(complaint, -EUCLEAN, "'%s' is no regular file", path);
	if (status.st_uid != geteuid())
		return complain(complaint, -EPERM, "'%s' belongs to user %u, not to user %u", path,
				(unsigned)status.st_uid, (unsigned)geteuid());
	if (status.st_mode & 077) {
		complaint_hint(complaint, "if its content can be trusted: chmod 600");
		return complain(complaint, -EPERM, "'%s' is open to others (mode %03o)", path,
				(unsigned)status.st_mode & 0777);
	}
	*size = (uint64_t)status.st_size;
	return 0;
}

/* The file, its log and a journal: each is as it should be, or not there. */
static int check_files(const char *path, struct complaint *complaint)
{
	static const char *const names[] = { "", "-wal", "-journal" };
	uint64_t sizes[3] = {};
	char name[PATH_MAX];
	int errors[3];

	for (unsigned i = 0; i < 3; i++) {
		if (snprintf(name, sizeof(name), "%s%s", path, names[i]) >= (int)sizeof(name))
			return complain(complaint, -ENAMETOOLONG, "'%s' is too long a name", path);
		errors[i] = check_file(name, &sizes[i], complaint);
		if (errors[i] && errors[i] != -ENOENT)
			return errors[i];
	}
	/*
	 * NB: SQLite would take it for a new one, and throw the log away. While it is made, it may be
	 * as short, but then there is no log yet, and a journal.
	 */
	if (sizes[0] < PAGE_BYTES && (sizes[1] || (sizes[0] && !sizes[2])))
		return complain(complaint, -EUCLEAN,
				"'%s' has only %llu bytes: it is no map, or damaged", path,
				(unsigned long long)sizes[0]);
	return errors[0];
}

/* SQLite takes no symbolic link anywhere in a name (SQLITE_OPEN_NOFOLLOW); directories may be. */
static int resolve(struct store *store, const char *path, struct complaint *complaint)
{
	_cleanup_free_ char *copy = strdup(path), *other = strdup(path), *directory = NULL;
	char *name = other ? basename(other) : NULL;

	if (!copy || !name)
		return complain(complaint, -ENOMEM, "no memory for a map");
	directory = realpath(dirname(copy), NULL);
	if (!directory) {
		int err = -errno;

		if (err == -ENOENT)
			complaint_hint(complaint, "make its directory first");
		return complain(complaint, err, "cannot open map '%s': %s", path, strerror(-err));
	}
	if (asprintf(&store->path, "%s/%s", strcmp(directory, "/") ? directory : "", name) < 0) {
		store->path = NULL;
		return complain(complaint, -ENOMEM, "no memory for a map");
	}
	return 0;
}

static int sync_directory(const char *path, struct complaint *complaint)
{
	_cleanup_free_ char *copy = strdup(path);
	_cleanup_close_ int fd = copy ? open(dirname(copy), O_RDONLY | O_DIRECTORY | O_CLOEXEC) :
					-1;

	if (fd < 0 || fsync(fd))
		return complain(complaint, -errno, "cannot sync the directory of '%s': %s", path,
				strerror(errno));
	return 0;
}

/* An empty file is an empty map: if we are killed here, the next one goes on. */
static int make_file(const char *path, struct complaint *complaint)
{
	_cleanup_close_ int fd =
		open(path, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC | O_NOFOLLOW, 0600);

	if (fd < 0 || fchmod(fd, 0600))
		return complain(complaint, -errno, "cannot make map '%s': %s", path,
				strerror(errno));
	return 0;
}

int store_file_connect(const struct store *store, sqlite3 **db, struct complaint *complaint)
{
	int rc = sqlite3_open_v2(store->path, db,
				 SQLITE_OPEN_READWRITE | SQLITE_OPEN_NOMUTEX | SQLITE_OPEN_NOFOLLOW,
				 "unix-excl");

	if (!*db)
		return complain(complaint, -ENOMEM, "no memory for a map");
	if (rc != SQLITE_OK)
		return sql_errno(*db);
	sqlite3_extended_result_codes(*db, 0);
	sqlite3_busy_timeout(*db, BUSY_MS);
	return sql_run(*db, "PRAGMA temp_store=MEMORY; PRAGMA cache_size=-512;"
			    "PRAGMA synchronous=FULL; PRAGMA journal_size_limit=16777216;"
			    "PRAGMA trusted_schema=OFF; PRAGMA cell_size_check=ON");
}

static int make_tables(struct store *store, struct complaint *complaint)
{
	char numbers[100];
	int err;

	snprintf(numbers, sizeof(numbers), "PRAGMA application_id=%d; PRAGMA user_version=%d",
		 STORE_APPLICATION_ID, STORE_VERSION);
	err = sql_run(store->writer, "BEGIN IMMEDIATE");
	if (!err)
		err = sql_run(store->writer, schema);
	if (!err)
		err = sql_run(store->writer, numbers);
	if (!err)
		err = store_commit(store);
	if (err) {
		err = sql_complain(store->writer, "make", complaint);
		store_rollback(store);
	}
	return err;
}

static int check_version(struct store *store, struct complaint *complaint)
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
		return make_tables(store, complaint);
	if (application != STORE_APPLICATION_ID || version < 1)
		return complain(complaint, -EUCLEAN, "'%s' is another program's database, no map",
				store->path);
	if (version > STORE_VERSION) {
		complaint_hint(complaint, "use the version of btrfs-ublk that made it, or a newer");
		return complain(
			complaint, -EPROTONOSUPPORT,
			"'%s' is a map of version %lld; this server knows versions up to %d",
			store->path, (long long)version, STORE_VERSION);
	}
	return 0;
}

/* What SQLite's words for it would leave unclear. */
static int say_why(struct store *store, int err, struct complaint *complaint)
{
	switch (err) {
	case -EBUSY:
		complaint_hint(complaint, "one server has a map at a time: see btrfs-ublk device "
					  "list");
		return complain(complaint, err, "map '%s' is in use by another process",
				store->path);
	case -EUCLEAN:
		complaint_hint(complaint, "put a copy of it back; or name another file, and a new "
					  "map is made there");
		return complain(complaint, err, "'%s' is no map, or damaged: %s", store->path,
				sqlite3_errmsg(store->writer));
	default:
		return sql_complain(store->writer, "open", complaint) ?: err;
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
		  "SELECT identity = ?3 FROM identities WHERE source = ?1 AND mirror = ?2" },
	};

	for (size_t i = 0; i < sizeof(all) / sizeof(*all); i++) {
		int err = sql_prepare(all[i].db, all[i].text, all[i].statement);

		if (err)
			return err;
	}
	return 0;
}

static int open_connections(struct store *store, struct complaint *complaint)
{
	int err = store_file_connect(store, &store->writer, complaint);

	if (err)
		return err;
	err = sql_run(store->writer, "PRAGMA journal_mode=WAL");
	if (!err)
		err = check_version(store, complaint);
	if (!err)
		err = store_file_connect(store, &store->reader, complaint);
	return err ? err : prepare_all(store);
}

int store_file_open(struct store *store, const char *path, struct complaint *complaint)
{
	int err = resolve(store, path, complaint);

	if (err)
		return err;
	err = check_files(store->path, complaint);
	if (err == -ENOENT)
		err = make_file(store->path, complaint);
	if (err)
		return err;
	err = open_connections(store, complaint);
	if (err)
		return say_why(store, err, complaint);
	/* SQLite would do it at the first commit, from where the directory may not be seen. */
	return sync_directory(store->path, complaint);
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

int store_commit(struct store *store)
{
	return sql_run(store->writer, "COMMIT");
}

/*
 * NB: a commit whose sync failed is whole in the log all the same, and would be found there after a
 * power cut. So the log is emptied, as far as the disk lets us.
 */
void store_rollback(struct store *store)
{
	if (!sqlite3_get_autocommit(store->writer))
		sql_run(store->writer, "ROLLBACK");
	sqlite3_wal_checkpoint_v2(store->writer, NULL, SQLITE_CHECKPOINT_TRUNCATE, NULL, NULL);
}
