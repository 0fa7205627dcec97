/* The engine of io_uring, by raw system calls: a worker has a ring of its own and up to DEPTH small units under way in it.
 * It opens files, checks and scatters itself; what has no bytes to move, or writes a record, it does as the engine of
 * threads does, when its ring is empty. */
#include "internal.h"

#include <errno.h>
#include <linux/io_uring.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define DEPTH 8u
/* A worker with so many bytes under way takes no more units. With 8 MiB a worker a host handed all 256 MiB over at once
 * (some tell of ends only when their queue is empty), and the checksums came after the reads: 0.88 of the floor, not 0.97. */
#define DEPTH_BYTES (256u << 10)

/* Newer than some kernel headers; a kernel that does not know them says EINVAL. */
#define SETUP_COOP_TASKRUN (1u << 8)
#define SETUP_SINGLE_ISSUER (1u << 12)
#define SETUP_DEFER_TASKRUN (1u << 13)

typedef struct flight {
    unit unit;
    span span;
    uint8_t *page;
    uint64_t bytes;
    int is_busy;
} flight;

typedef struct ring {
    int fd;
    uint8_t *queues;
    size_t queues_bytes, entries_bytes;
    struct io_uring_sqe *entries;
    uint32_t *tail, *array, *done_head, *done_tail;
    struct io_uring_cqe *done;
    uint32_t mask, done_mask;
    uint32_t num_busy;   /* flights that have not landed */
    uint64_t bytes_busy; /* theirs */
    uint32_t num_queued; /* of them, those that the kernel was not told of yet */
    uint8_t *pages;
    flight flights[DEPTH];
} ring;

static int setup(struct io_uring_params *parameters)
{
    static const uint32_t flags[] = {SETUP_SINGLE_ISSUER | SETUP_DEFER_TASKRUN, SETUP_COOP_TASKRUN, 0};
    int fd = -1;
    for (size_t i = 0; i < sizeof flags / sizeof *flags && fd < 0; i++) {
        memset(parameters, 0, sizeof *parameters);
        parameters->flags = flags[i];
        fd = (int)syscall(SYS_io_uring_setup, DEPTH, parameters);
        if (fd < 0 && errno != EINVAL)
            return -errno;
    }
    if (fd >= 0 && !(parameters->features & IORING_FEAT_SINGLE_MMAP)) { /* Linux 5.4 */
        close(fd);
        return -ENOSYS;
    }
    return fd < 0 ? -errno : fd;
}

/* 0, or -errno where this process may not have a ring. */
int uring_probe(void)
{
    struct io_uring_params parameters;
    const int fd = setup(&parameters);
    if (fd < 0)
        return fd;
    close(fd);
    return 0;
}

static void ring_close(ring *r)
{
    if (r->queues)
        munmap(r->queues, r->queues_bytes);
    if (r->entries)
        munmap(r->entries, r->entries_bytes);
    free(r->pages);
    close(r->fd);
    free(r);
}

static void *map(int fd, size_t bytes, off_t what)
{
    void *found = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, what);
    return found == MAP_FAILED ? NULL : found;
}

/* The calling thread's ring, NULL where there is none to be had. */
static ring *ring_open(void)
{
    struct io_uring_params p;
    const int fd = setup(&p);
    ring *r = fd < 0 ? NULL : calloc(1, sizeof *r);
    if (!r) {
        if (fd >= 0)
            close(fd);
        return NULL;
    }
    const size_t submit_bytes = p.sq_off.array + p.sq_entries * sizeof(uint32_t);
    const size_t done_bytes = p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe);
    r->fd = fd;
    r->queues_bytes = submit_bytes > done_bytes ? submit_bytes : done_bytes;
    r->entries_bytes = p.sq_entries * sizeof *r->entries;
    r->queues = map(fd, r->queues_bytes, IORING_OFF_SQ_RING);
    r->entries = map(fd, r->entries_bytes, IORING_OFF_SQES);
    r->pages = aligned_alloc(RW_PAGE_BYTES, DEPTH * RW_PAGE_BYTES);
    if (!r->queues || !r->entries || !r->pages) {
        ring_close(r);
        return NULL;
    }
    r->tail = (uint32_t *)(r->queues + p.sq_off.tail);
    r->array = (uint32_t *)(r->queues + p.sq_off.array);
    r->mask = *(uint32_t *)(r->queues + p.sq_off.ring_mask);
    r->done_head = (uint32_t *)(r->queues + p.cq_off.head);
    r->done_tail = (uint32_t *)(r->queues + p.cq_off.tail);
    r->done_mask = *(uint32_t *)(r->queues + p.cq_off.ring_mask);
    r->done = (struct io_uring_cqe *)(r->queues + p.cq_off.cqes);
    for (uint32_t i = 0; i < DEPTH; i++)
        r->flights[i].page = r->pages + (size_t)i * RW_PAGE_BYTES;
    return r;
}

/* Queues one flight; the kernel is told by the next ring_go(). */
static void submit(ring *r, const flight *f)
{
    const transfer *t = f->unit.transfer;
    const uint32_t tail = *r->tail, slot = tail & r->mask;
    struct io_uring_sqe *entry = &r->entries[slot];
    memset(entry, 0, sizeof *entry);
    entry->opcode = t->kind == RW_WRITE ? IORING_OP_WRITEV : IORING_OP_READV;
    entry->fd = t->fd;
    entry->off = (uint64_t)f->span.offset;
    entry->addr = (uint64_t)(uintptr_t)f->span.parts;
    entry->len = (uint32_t)f->span.num_parts;
    entry->user_data = (uint64_t)(f - r->flights);
    r->array[slot] = slot;
    __atomic_store_n(r->tail, tail + 1, __ATOMIC_RELEASE);
    r->num_queued++;
}

/* Tells the kernel of what is queued, and waits until one flight at least is back. */
static void ring_go(ring *r)
{
    while (r->num_busy) {
        const long taken = syscall(SYS_io_uring_enter, r->fd, r->num_queued, 1, IORING_ENTER_GETEVENTS, NULL, 0);
        if (taken > 0)
            r->num_queued -= (uint32_t)taken;
        if ((taken >= 0 && !r->num_queued) || *r->done_head != __atomic_load_n(r->done_tail, __ATOMIC_ACQUIRE))
            return;
        if (taken < 0 && errno != EINTR)
            sched_yield(); /* EAGAIN, EBUSY: the kernel is short of memory for now */
    }
}

static void land(worker *w, ring *r, flight *f, int error)
{
    const unit u = f->unit;
    if (!error)
        error = unit_check(&u, f->page);
    f->is_busy = 0;
    r->num_busy--;
    r->bytes_busy -= f->bytes;
    worker_end(w, &u, error);
}

static void go_on(worker *w, ring *r, flight *f, int32_t moved)
{
    const transfer *t = f->unit.transfer;
    const int next = moved == -EAGAIN ? -EAGAIN : span_next(&f->span, t->fd, moved);
    if (next != -EAGAIN)
        land(w, r, f, -next);
    else if (moved == -EAGAIN) /* not without blocking: then so */
        land(w, r, f, move_span(t->fd, &f->span, t->kind == RW_WRITE));
    else
        submit(r, f);
}

/* Waits for one flight at least, and ends what has landed. */
static void reap(worker *w, ring *r)
{
    ring_go(r);
    uint32_t head = *r->done_head;
    while (head != __atomic_load_n(r->done_tail, __ATOMIC_ACQUIRE)) {
        const struct io_uring_cqe done = r->done[head & r->done_mask];
        __atomic_store_n(r->done_head, ++head, __ATOMIC_RELEASE);
        go_on(w, r, &r->flights[done.user_data], done.res);
    }
}

static flight *free_flight(ring *r)
{
    flight *f = r->flights;
    while (f->is_busy)
        f++;
    return f;
}

static void begin(worker *w, ring *r, const unit *u)
{
    if (u->is_scatter || !moves_bytes(u->transfer)) {
        worker_end(w, u, unit_do(w, u));
        return;
    }
    if (is_held(w->engine, u->transfer->path)) { /* tests only: nothing else may be held with it */
        while (r->num_busy)
            reap(w, r);
        wait_while_held(w->engine, u->transfer->path);
    }
    const int error = unit_start(w, u);
    if (error) {
        worker_end(w, u, error);
        return;
    }
    flight *f = free_flight(r);
    f->unit = *u;
    f->is_busy = 1;
    r->num_busy++;
    unit_span(u, f->page, &f->span);
    f->bytes = f->span.parts[0].iov_len + f->span.parts[1].iov_len;
    r->bytes_busy += f->bytes;
    submit(r, f);
}

void uring_run(worker *w)
{
    ring *r = ring_open();
    if (!r) { /* the probe had one: no memory or no file descriptor is left */
        threads_run(w);
        return;
    }
    for (;;) {
        unit u;
        const int is_empty = !r->num_busy;
        if (r->num_busy < DEPTH && r->bytes_busy < DEPTH_BYTES && worker_begin(w, &u, is_empty, is_empty))
            begin(w, r, &u);
        else if (is_empty)
            break;
        else
            reap(w, r);
    }
    ring_close(r);
}
