/* SPDX-License-Identifier: MIT */
/*
 * The on-disk format of btrfs: packed little-endian structures and the numbers that go with them.
 *
 * Each structure names the kernel's own structure; the facts are those of the kernel's user API
 * (include/uapi/linux/btrfs_tree.h, struct btrfs_super_block in fs/btrfs) and of the "On-disk
 * format" page of the btrfs documentation. The names here differ from the kernel's, so that a
 * program may include <linux/btrfs_tree.h> as well.
 */
#pragma once

#include <assert.h>
#include <endian.h>
#include <stdint.h>

/* Fields of these types are little-endian; read them with le64toh(), set them with htole64(). */
typedef uint16_t le16;
typedef uint32_t le32;
typedef uint64_t le64;

#define DISK_STRUCT __attribute__((packed))

enum {
	UUID_BYTES = 16,
	CSUM_BYTES = 32,
	LABEL_BYTES = 256,    /* with the terminating NUL */
	NAME_MAX_BYTES = 255, /* BTRFS_NAME_LEN */
	SYS_CHUNK_ARRAY_BYTES = 2048,
	SUPER_BYTES = 4096,
	SUPER_RESERVED_BYTES = 65536, /* that kernels keep free from each mirror on */
	SUPER_MIRRORS = 3,
	STRIPE_LEN = 65536, /* BTRFS_STRIPE_LEN; kernels accept no other */
	TREE_LEVELS = 8,    /* BTRFS_MAX_LEVEL */
	DEFAULT_NODE_BYTES = 16384,
	SECTOR_BYTES = 4096,
};

#define SUPER_MAGIC 0x4D5F53665248425FULL /* "_BHRfS_M" */

/* Object ids of trees, and reserved object ids within trees (BTRFS_*_OBJECTID). */
enum {
	TREE_ROOT = 1,
	TREE_EXTENT = 2,
	TREE_CHUNK = 3,
	TREE_DEV = 4,
	TREE_FS = 5,
	TREE_ROOT_DIR = 6, /* the directory in the root tree that names the default subvolume */
	TREE_CSUM = 7,
	TREE_UUID = 9,
	TREE_FREE_SPACE = 10,
	TREE_BLOCK_GROUP = 11,
	OBJECT_DEV_ITEMS = 1,
	OBJECT_FIRST_CHUNK = 256,
	OBJECT_FIRST_FREE = 256, /* also the inode number of every subvolume's top directory */
};
#define TREE_DATA_RELOC ((uint64_t)-9)
#define OBJECT_EXTENT_CSUM ((uint64_t)-10) /* of all items of the checksum tree */

/* Item types, as in keys (BTRFS_*_KEY). */
enum {
	KEY_INODE_ITEM = 1,
	KEY_INODE_REF = 12,
	KEY_INODE_EXTREF = 13,
	KEY_XATTR_ITEM = 24,
	KEY_DIR_ITEM = 84,
	KEY_DIR_INDEX = 96,
	KEY_EXTENT_DATA = 108,
	KEY_EXTENT_CSUM = 128,
	KEY_ROOT_ITEM = 132,
	KEY_ROOT_BACKREF = 144,
	KEY_ROOT_REF = 156,
	KEY_EXTENT_ITEM = 168,
	KEY_METADATA_ITEM = 169,
	KEY_TREE_BLOCK_REF = 176,
	KEY_EXTENT_DATA_REF = 178,
	KEY_SHARED_BLOCK_REF = 182,
	KEY_SHARED_DATA_REF = 184,
	KEY_BLOCK_GROUP_ITEM = 192,
	KEY_FREE_SPACE_INFO = 198,
	KEY_FREE_SPACE_EXTENT = 199,
	KEY_FREE_SPACE_BITMAP = 200,
	KEY_DEV_EXTENT = 204,
	KEY_DEV_ITEM = 216,
	KEY_CHUNK_ITEM = 228,
	KEY_UUID_SUBVOL = 251,
};

/* Types and profiles of chunks and block groups (BTRFS_BLOCK_GROUP_*); no profile bit is SINGLE. */
#define CHUNK_DATA (1ULL << 0)
#define CHUNK_SYSTEM (1ULL << 1)
#define CHUNK_METADATA (1ULL << 2)
#define CHUNK_RAID0 (1ULL << 3)
#define CHUNK_DUP (1ULL << 5)
#define CHUNK_TYPE_MASK (CHUNK_DATA | CHUNK_SYSTEM | CHUNK_METADATA)

/* Superblock flags: BTRFS_HEADER_FLAG_WRITTEN, BTRFS_SUPER_FLAG_SEEDING. */
#define SUPER_WRITTEN (1ULL << 0)
#define SUPER_SEEDING (1ULL << 32)

/* BTRFS_FEATURE_INCOMPAT_* */
#define INCOMPAT_MIXED_BACKREF (1ULL << 0)
#define INCOMPAT_DEFAULT_SUBVOL (1ULL << 1) /* not the top-level one */
#define INCOMPAT_COMPRESS_ZSTD (1ULL << 4)
#define INCOMPAT_BIG_METADATA (1ULL << 5) /* nodes larger than a page */
#define INCOMPAT_EXTENDED_IREF (1ULL << 6)
#define INCOMPAT_SKINNY_METADATA (1ULL << 8)
#define INCOMPAT_NO_HOLES (1ULL << 9)

/* BTRFS_FEATURE_COMPAT_RO_*; a block-group tree demands the other two and NO_HOLES. */
#define COMPAT_RO_FREE_SPACE_TREE (1ULL << 0)
#define COMPAT_RO_FREE_SPACE_TREE_VALID (1ULL << 1)
#define COMPAT_RO_BLOCK_GROUP_TREE (1ULL << 3)

/* Flags of inodes (BTRFS_INODE_*). */
#define INODE_NODATASUM (1ULL << 0)
#define INODE_NODATACOW (1ULL << 1)
#define INODE_IMMUTABLE (1ULL << 6)
#define INODE_ROOT_ITEM_INIT (1ULL << 31) /* the inode within a root item is filled */

/* Flags of extents (BTRFS_EXTENT_FLAG_*), of tree blocks, and types of file extents and entries. */
#define EXTENT_DATA_FLAG (1ULL << 0)
#define EXTENT_TREE_BLOCK_FLAG (1ULL << 1)
#define BLOCK_WRITTEN (1ULL << 0)
#define BLOCK_MIXED_BACKREF (1ULL << 56) /* BTRFS_MIXED_BACKREF_REV in the topmost byte */
enum { FILE_EXTENT_INLINE = 0, FILE_EXTENT_REGULAR = 1, FILE_EXTENT_PREALLOC = 2 };
enum { COMPRESSION_NONE = 0, COMPRESSION_ZSTD = 3 }; /* BTRFS_COMPRESS_* */
enum {						     /* BTRFS_FT_* */
       ENTRY_FILE = 1,
       ENTRY_DIR = 2,
       ENTRY_CHARACTER_DEVICE = 3,
       ENTRY_BLOCK_DEVICE = 4,
       ENTRY_FIFO = 5,
       ENTRY_SOCKET = 6,
       ENTRY_SYMLINK = 7,
       ENTRY_XATTR = 8,
};

#define ROOT_READ_ONLY (1ULL << 0) /* BTRFS_ROOT_SUBVOL_RDONLY */

/* struct btrfs_disk_key */
struct DISK_STRUCT disk_key {
	le64 objectid;
	uint8_t type;
	le64 offset;
};
static_assert(sizeof(struct disk_key) == 17, "disk_key");

/* struct btrfs_header; `csum` covers everything behind it up to the end of the block. */
struct DISK_STRUCT disk_header {
	uint8_t csum[CSUM_BYTES];
	uint8_t fsid[UUID_BYTES];
	le64 bytenr; /* logical address of this block */
	le64 flags;
	uint8_t chunk_tree_uuid[UUID_BYTES];
	le64 generation;
	le64 owner; /* object id of the tree */
	le32 item_count;
	uint8_t level;
};
static_assert(sizeof(struct disk_header) == 101, "disk_header");

/* struct btrfs_item: `offset` counts from the end of the header. */
struct DISK_STRUCT disk_item {
	struct disk_key key;
	le32 offset;
	le32 size;
};
static_assert(sizeof(struct disk_item) == 25, "disk_item");

/* struct btrfs_key_ptr */
struct DISK_STRUCT disk_key_ptr {
	struct disk_key key;
	le64 bytenr;
	le64 generation;
};
static_assert(sizeof(struct disk_key_ptr) == 33, "disk_key_ptr");

/* struct btrfs_timespec */
struct DISK_STRUCT disk_time {
	le64 seconds;
	le32 nanoseconds;
};
static_assert(sizeof(struct disk_time) == 12, "disk_time");

/* struct btrfs_inode_item */
struct DISK_STRUCT disk_inode {
	le64 generation;
	le64 transid;
	le64 size; /* of a directory: twice the sum of its entries' name lengths */
	le64 byte_count;
	le64 block_group;
	le32 link_count;
	le32 uid;
	le32 gid;
	le32 mode;
	le64 rdev;
	le64 flags;
	le64 sequence;
	le64 reserved[4];
	struct disk_time accessed;
	struct disk_time changed;
	struct disk_time modified;
	struct disk_time created;
};
static_assert(sizeof(struct disk_inode) == 160, "disk_inode");

/* struct btrfs_inode_ref; the name follows. */
struct DISK_STRUCT disk_inode_ref {
	le64 index;
	le16 name_length;
};
static_assert(sizeof(struct disk_inode_ref) == 10, "disk_inode_ref");

/* struct btrfs_inode_extref; the name follows. */
struct DISK_STRUCT disk_inode_extref {
	le64 parent;
	le64 index;
	le16 name_length;
};
static_assert(sizeof(struct disk_inode_extref) == 18, "disk_inode_extref");

/* struct btrfs_dir_item; the name follows, then the value of an extended attribute. */
struct DISK_STRUCT disk_dir_item {
	struct disk_key location;
	le64 transid;
	le16 data_length;
	le16 name_length;
	uint8_t type;
};
static_assert(sizeof(struct disk_dir_item) == 30, "disk_dir_item");

/* struct btrfs_file_extent_item of a regular or preallocated extent. */
struct DISK_STRUCT disk_file_extent {
	le64 generation;
	le64 ram_bytes;
	uint8_t compression;
	uint8_t encryption;
	le16 other_encoding;
	uint8_t type;
	le64 disk_bytenr; /* logical address of the whole extent */
	le64 disk_bytes;
	le64 offset; /* where within the (uncompressed) extent this file extent starts */
	le64 bytes;
};
static_assert(sizeof(struct disk_file_extent) == 53, "disk_file_extent");

/* struct btrfs_extent_item; inline references follow. */
struct DISK_STRUCT disk_extent {
	le64 refs;
	le64 generation;
	le64 flags;
};
static_assert(sizeof(struct disk_extent) == 24, "disk_extent");

/* struct btrfs_extent_inline_ref of a tree block: `offset` is the tree's object id. */
struct DISK_STRUCT disk_tree_block_ref {
	uint8_t type;
	le64 offset;
};
static_assert(sizeof(struct disk_tree_block_ref) == 9, "disk_tree_block_ref");

/* A type byte and struct btrfs_extent_data_ref: an inline reference to a data extent. */
struct DISK_STRUCT disk_data_ref {
	uint8_t type;
	le64 root;
	le64 objectid;
	le64 offset; /* file offset minus the file extent's offset within the extent */
	le32 count;
};
static_assert(sizeof(struct disk_data_ref) == 29, "disk_data_ref");

/* struct btrfs_block_group_item */
struct DISK_STRUCT disk_block_group {
	le64 used;
	le64 chunk_objectid;
	le64 flags;
};
static_assert(sizeof(struct disk_block_group) == 24, "disk_block_group");

/* struct btrfs_free_space_info */
struct DISK_STRUCT disk_free_space_info {
	le32 extent_count;
	le32 flags;
};
static_assert(sizeof(struct disk_free_space_info) == 8, "disk_free_space_info");

/* struct btrfs_stripe */
struct DISK_STRUCT disk_stripe {
	le64 devid;
	le64 offset;
	uint8_t device_uuid[UUID_BYTES];
};
static_assert(sizeof(struct disk_stripe) == 32, "disk_stripe");

/* struct btrfs_chunk without its first stripe; `stripe_count` stripes follow. */
struct DISK_STRUCT disk_chunk {
	le64 length;
	le64 owner;
	le64 stripe_len;
	le64 type;
	le32 io_align;
	le32 io_width;
	le32 sector_bytes;
	le16 stripe_count;
	le16 sub_stripes;
};
static_assert(sizeof(struct disk_chunk) == 48, "disk_chunk");

/* struct btrfs_dev_item */
struct DISK_STRUCT disk_device {
	le64 devid;
	le64 total_bytes;
	le64 bytes_used;
	le32 io_align;
	le32 io_width;
	le32 sector_bytes;
	le64 type;
	le64 generation;
	le64 start_offset;
	le32 dev_group;
	uint8_t seek_speed;
	uint8_t bandwidth;
	uint8_t uuid[UUID_BYTES];
	uint8_t fsid[UUID_BYTES];
};
static_assert(sizeof(struct disk_device) == 98, "disk_device");

/* struct btrfs_dev_extent */
struct DISK_STRUCT disk_dev_extent {
	le64 chunk_tree;
	le64 chunk_objectid;
	le64 chunk_offset;
	le64 length;
	uint8_t chunk_tree_uuid[UUID_BYTES];
};
static_assert(sizeof(struct disk_dev_extent) == 48, "disk_dev_extent");

/* struct btrfs_root_item */
struct DISK_STRUCT disk_root {
	struct disk_inode inode;
	le64 generation;
	le64 top_inode; /* root_dirid: OBJECT_FIRST_FREE for trees that hold files */
	le64 bytenr;
	le64 byte_limit;
	le64 bytes_used;
	le64 last_snapshot;
	le64 flags;
	le32 refs;
	struct disk_key drop_progress;
	uint8_t drop_level;
	uint8_t level;
	le64 generation_v2; /* equal to `generation`: the fields from here on are valid */
	uint8_t uuid[UUID_BYTES];
	uint8_t parent_uuid[UUID_BYTES];
	uint8_t received_uuid[UUID_BYTES];
	le64 ctransid;
	le64 otransid;
	le64 stransid;
	le64 rtransid;
	struct disk_time ctime;
	struct disk_time otime;
	struct disk_time stime;
	struct disk_time rtime;
	le64 reserved[8];
};
static_assert(sizeof(struct disk_root) == 439, "disk_root");

/* struct btrfs_root_ref: where a subvolume is within another one. The name follows. */
struct DISK_STRUCT disk_root_ref {
	le64 directory; /* inode number */
	le64 sequence;	/* the entry's index there */
	le16 name_length;
};
static_assert(sizeof(struct disk_root_ref) == 18, "disk_root_ref");

/* struct btrfs_root_backup, unused by this writer */
struct DISK_STRUCT disk_root_backup {
	uint8_t bytes[168];
};

/* struct btrfs_super_block */
struct DISK_STRUCT disk_super {
	uint8_t csum[CSUM_BYTES];
	uint8_t fsid[UUID_BYTES];
	le64 bytenr; /* physical address of this mirror */
	le64 flags;
	le64 magic;
	le64 generation;
	le64 root;
	le64 chunk_root;
	le64 log_root;
	le64 log_root_transid;
	le64 total_bytes;
	le64 bytes_used;
	le64 root_dir_objectid;
	le64 device_count;
	le32 sector_bytes;
	le32 node_bytes;
	le32 leaf_bytes; /* equal to node_bytes, or the kernel refuses */
	le32 stripe_bytes;
	le32 sys_chunk_array_bytes;
	le64 chunk_root_generation;
	le64 compat_flags;
	le64 compat_ro_flags;
	le64 incompat_flags;
	le16 csum_type;
	uint8_t root_level;
	uint8_t chunk_root_level;
	uint8_t log_root_level;
	struct disk_device device;
	char label[LABEL_BYTES];
	le64 cache_generation;
	le64 uuid_tree_generation;
	uint8_t metadata_uuid[UUID_BYTES];
	le64 reserved[28];
	uint8_t sys_chunk_array[SYS_CHUNK_ARRAY_BYTES];
	struct disk_root_backup backups[4];
	uint8_t padding[565];
};
static_assert(sizeof(struct disk_super) == SUPER_BYTES, "disk_super");
