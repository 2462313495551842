/* SPDX-License-Identifier: MIT */
#ifndef SERVER_IO_OP_H
#define SERVER_IO_OP_H

enum io_op {
	IO_OP_READ,
	IO_OP_WRITE,
	IO_OP_FLUSH,
	IO_OP_DISCARD,
	IO_OP_WRITE_ZEROES,
	IO_OP_COUNT,
};

#endif
