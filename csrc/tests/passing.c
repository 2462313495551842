/* SPDX-License-Identifier: MIT */
#include "tests/passing.h"

#include <string.h>
#include <sys/socket.h>

ssize_t send_with_file(int socket, const void *data, size_t bytes, int file)
{
	union {
		char data[CMSG_SPACE(sizeof(int))];
		struct cmsghdr align;
	} control = {};
	struct iovec part = { (void *)data, bytes };
	struct msghdr header = { .msg_iov = &part, .msg_iovlen = 1 };

	if (file >= 0) {
		header.msg_control = control.data;
		header.msg_controllen = sizeof(control.data);
		*CMSG_FIRSTHDR(&header) = (struct cmsghdr){
			.cmsg_level = SOL_SOCKET,
			.cmsg_type = SCM_RIGHTS,
			.cmsg_len = CMSG_LEN(sizeof(int)),
		};
		memcpy(CMSG_DATA(CMSG_FIRSTHDR(&header)), &file, sizeof(file));
	}
	return sendmsg(socket, &header, MSG_NOSIGNAL);
}
