/* io_uring by raw system calls. */
#include "internal.h"

#include <errno.h>
#include <linux/io_uring.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* 0, or -errno where this process may not have a ring. */
int uring_probe(void)
{
    struct io_uring_params parameters;
    memset(&parameters, 0, sizeof parameters);
    const int fd = (int)syscall(SYS_io_uring_setup, 1u, &parameters);
    if (fd < 0)
        return -errno;
    close(fd);
    return -ENOSYS;
}

void uring_run(worker *w) { threads_run(w); }
