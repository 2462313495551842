/* SPDX-License-Identifier: MIT */
#include "tests/files.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fileio.h"

enum { BLOCK_BYTES = 4096 };

static void must(bool worked, const char *what)
{
	if (worked)
		return;
	perror(what);
	exit(1);
}

const char *fuzz_files_path(const struct fuzz_files *files, const char *name, char path[static 512])
{
	snprintf(path, 512, "%s/%s", files->directory, name);
	return path;
}

void fuzz_files_make(struct fuzz_files *files)
{
	*files = (struct fuzz_files){};
	fuzz_directory(files->directory);
}

static void keep(struct fuzz_files *files, const char *name)
{
	struct fuzz_file *file = &files->files[files->count];
	char path[512];
	struct stat status;
	int fd = open(fuzz_files_path(files, name, path), O_RDONLY | O_CLOEXEC);

	must(files->count < FUZZ_FILES_MAX && fd >= 0 && !fstat(fd, &status), path);
	snprintf(file->name, sizeof(file->name), "%s", name);
	file->bytes = (size_t)status.st_size;
	file->data = malloc(file->bytes ?: 1);
	must(file->data && !pread_full(fd, file->data, file->bytes, 0), path);
	close(fd);
	files->count++;
}

/* Calls `what` for each file there. */
static void for_all(struct fuzz_files *files, void (*what)(struct fuzz_files *, const char *))
{
	DIR *directory = opendir(files->directory);
	const struct dirent *entry;

	must(directory, files->directory);
	while ((entry = readdir(directory))) {
		if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
			what(files, entry->d_name);
	}
	closedir(directory);
}

static void remove_file(struct fuzz_files *files, const char *name)
{
	char path[512];

	unlink(fuzz_files_path(files, name, path));
}

static void remove_unless_kept(struct fuzz_files *files, const char *name)
{
	for (size_t i = 0; i < files->count; i++) {
		if (!strcmp(files->files[i].name, name))
			return;
	}
	remove_file(files, name);
}

void fuzz_files_keep(struct fuzz_files *files)
{
	for_all(files, keep);
}

static void unmap(struct fuzz_file *file)
{
	if (file->now && file->bytes)
		munmap((void *)file->now, file->bytes);
	file->now = NULL;
}

static void write_all(struct fuzz_file *file, const char *path)
{
	struct stat status;
	int fd;

	unmap(file);
	unlink(path);
	fd = open(path, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
	must(fd >= 0 && !pwrite_full(fd, file->data, file->bytes, 0) && !fstat(fd, &status), path);
	file->inode = status.st_ino;
	if (file->bytes)
		file->now = mmap(NULL, file->bytes, PROT_READ, MAP_SHARED, fd, 0);
	must(file->now != MAP_FAILED, path);
	close(fd);
}

/*
 * Most of a file is as it was, and reading memory takes less than writing to a file. But a hole is
 * not looked at, as that would fill it with pages.
 */
static void write_differences(const struct fuzz_file *file, const char *path)
{
	static const uint8_t zeroes[BLOCK_BYTES];
	int fd = open(path, O_WRONLY | O_CLOEXEC);
	size_t data = 0, hole = 0; /* the next ones */

	must(fd >= 0, path);
	for (size_t at = 0; at < file->bytes; at += BLOCK_BYTES) {
		size_t bytes = file->bytes - at < BLOCK_BYTES ? file->bytes - at : BLOCK_BYTES;

		if (at >= hole) {
			off_t found = lseek(fd, (off_t)at, SEEK_DATA);

			data = found < 0 ? file->bytes : (size_t)found;
			hole = found < 0 ? file->bytes : (size_t)lseek(fd, found, SEEK_HOLE);
		}
		if (!memcmp(at < data ? zeroes : file->now + at, file->data + at, bytes))
			continue;
		must(!pwrite_full(fd, file->data + at, bytes, at), path);
	}
	close(fd);
}

void fuzz_files_restore(struct fuzz_files *files)
{
	struct stat status;
	char path[512];

	for_all(files, remove_unless_kept);
	for (size_t i = 0; i < files->count; i++) {
		struct fuzz_file *file = &files->files[i];

		fuzz_files_path(files, file->name, path);
		if (file->now && !lstat(path, &status) && status.st_ino == file->inode &&
		    (size_t)status.st_size == file->bytes)
			write_differences(file, path);
		else
			write_all(file, path);
	}
}

void fuzz_files_remove(struct fuzz_files *files)
{
	for_all(files, remove_file);
	must(!rmdir(files->directory), files->directory);
	for (size_t i = 0; i < files->count; i++) {
		unmap(&files->files[i]);
		free(files->files[i].data);
	}
	files->count = 0;
}

/* Half of them are near the start, where headers are. */
static uint64_t place_in(const struct fuzz_file *file, struct fuzz_input *input)
{
	uint64_t place = fuzz_take(input, 3), most = file->bytes;

	if (place % 2 && most > 1024)
		most = 1024;
	return most ? place / 2 % most : 0;
}

void fuzz_files_change(const struct fuzz_files *files, struct fuzz_input *input)
{
	static const uint8_t values[] = { 0, 1, 2, 0x7f, 0x80, 0xff };
	const struct fuzz_file *file = &files->files[fuzz_take(input, 1) % files->count];
	uint64_t how = fuzz_take(input, 1), place = place_in(file, input);
	uint8_t data[8];
	size_t bytes = 1 + how / 8 % sizeof(data);
	char path[512];
	int fd = open(fuzz_files_path(files, file->name, path), O_RDWR | O_CLOEXEC);

	must(fd >= 0, path);
	for (size_t i = 0; i < bytes; i++)
		data[i] = (uint8_t)fuzz_take(input, 1);
	switch (how % 8) {
	case 0:
		must(!ftruncate(fd, (off_t)place), path);
		break;
	case 1:
		must(!ftruncate(fd, (off_t)(file->bytes + place)), path);
		break;
	case 2:
		memset(data, values[data[0] % sizeof(values)], sizeof(data));
		/* fallthrough */
	case 3:
		must(!pwrite_full(fd, data, bytes, place), path);
		break;
	default:
		/* A bit, or a small number more. */
		if (place < file->bytes) {
			data[0] = (uint8_t)(how % 2 ? file->data[place] ^ 1 << data[0] % 8 :
						      file->data[place] + data[0] % 5 - 2);
			must(!pwrite_full(fd, data, 1, place), path);
		}
	}
	close(fd);
}
