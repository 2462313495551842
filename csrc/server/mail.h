/* SPDX-License-Identifier: MIT */
/* A worker's mailbox: worker_expect() and worker_answer() of engine.h are made of it. */
#ifndef SERVER_MAIL_H
#define SERVER_MAIL_H

struct worker;

/* Returns 0 or a negative errno. */
int worker_open_mailbox(struct worker *worker);
/* No other thread has anything of this worker any more. One that was not opened: nothing happens. */
void worker_close_mailbox(struct worker *worker);

#endif
