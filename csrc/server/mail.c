/* SPDX-License-Identifier: MIT */
/*
 * Parts that other threads finish. They put them on a stack and wake the worker by an eventfd, which
 * it reads through its ring: so it waits for mail as for any other I/O, and neither a front end nor a
 * device without such parts has anything to do with it.
 */
#include "server/mail.h"

#include <errno.h>
#include <liburing.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/list.h"
#include "server/segment.h"

static void arm(struct worker *worker)
{
	struct io_uring_sqe *sqe = worker_get_sqe(worker);

	io_uring_prep_read(sqe, worker->mail_fd, &worker->mail_count, sizeof(worker->mail_count),
			   0);
	io_uring_sqe_set_data(sqe, &worker->mail_io);
	worker->mail_armed = true;
}

/* The completion of that read. Whatever its result: what is in the mailbox is taken. */
static int take_mail(struct segment *segment, struct io *mail_io, int cqe_result)
{
	struct worker *worker = container_of(mail_io, struct worker, mail_io);
	struct mail *mail;

	(void)segment;
	(void)cqe_result;
	worker->mail_armed = false;
	mail = mailbox_take(&worker->mailbox);
	while (mail) {
		struct io *io = container_of(mail, struct io, mail);

		/* It may be answered, and used again, at once. */
		mail = mail->next;
		worker->expected--;
		engine_complete(io, io->mailed);
	}
	if (worker->expected && !worker->mail_armed)
		arm(worker);
	return PART_PENDING;
}

static const struct segment_ops mail_ops = {
	.name = "mail",
	.complete = take_mail,
};

/* Of no device: what the completion is handed to. */
static struct segment mail_segment = { .ops = &mail_ops };

int worker_open_mailbox(struct worker *worker)
{
	int fd = eventfd(0, EFD_CLOEXEC);

	if (fd < 0)
		return -errno;
	worker->mail_fd = fd;
	worker->mail_io.segment = &mail_segment;
	worker->mail_io.worker = worker;
	return 0;
}

void worker_close_mailbox(struct worker *worker)
{
	if (worker->mail_fd)
		close(worker->mail_fd);
	worker->mail_fd = 0;
}

void worker_expect(struct io *io)
{
	struct worker *worker = io->worker;

	worker->expected++;
	if (!worker->mail_armed)
		arm(worker);
}

void worker_expect_no_more(struct io *io)
{
	io->worker->expected--;
}

void worker_answer(struct io *io, int result)
{
	struct worker *worker = io->worker;

	io->mailed = result;
	if (mailbox_put(&worker->mailbox, &io->mail))
		eventfd_write(worker->mail_fd, 1);
}
