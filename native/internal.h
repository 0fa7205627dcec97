/* What the files of the library share. One mutex guards an engine and all its batches; no I/O is done under it.
 *
 * The path of a transfer: rw_submit() queues it; workers take its units (about 1 MiB of its file each) one at a time;
 * whoever ends the last unit settles it: compares checksums, queues the scatter, or makes it final.
 */
#ifndef REWARM_INTERNAL_H
#define REWARM_INTERNAL_H

#define _GNU_SOURCE
#include "rewarm_io.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>
#include <sys/uio.h>

#define SECOND_NS 1000000000ll
#define STUCK_NS (2 * SECOND_NS)
#define NO_DEADLINE INT64_MAX

enum state { QUEUED, MOVING, SCATTERING, FINAL };

typedef struct transfer {
    struct transfer *next, *previous; /* in its queue */
    rw_batch *batch;
    const char *path, *temporary;
    uint64_t *planes;
    int64_t *blocks;
    uint32_t *found, *expected; /* RW_READ_RECORD: a checksum a piece */
    uint64_t sequence, address, length, offset, page_bytes;
    uint32_t num_planes, num_blocks, skip_blocks;
    uint32_t index, num_units, next_unit;
    uint32_t running; /* units taken and not ended */
    int slot, fd, error;
    enum state state;
    uint8_t kind, target, durable, root, priority, is_queued;
    uint8_t key[32], namespace_id[32];
} transfer;

struct rw_batch {
    rw_engine *engine;
    rw_batch *next_live, *previous_live;
    pthread_cond_t done;
    int64_t deadline_ns;
    _Atomic int cut;     /* 0, or the errno with which what is not final has to end */
    uint32_t references; /* the handle, and each transfer that is not final or still has I/O under way */
    uint32_t count, open_count, num_ended, num_taken;
    uint32_t num_running;                              /* units under way */
    int64_t submitted_ns, idle_ns, waited_ns, done_ns; /* idle_ns: since when none is under way, while it is open */
    uint32_t *ended; /* indices in the order in which they became final */
    int *results;
    int event_fd;
    int is_dropped; /* rw_free was called */
    transfer *transfers;
};

typedef struct queue {
    transfer *head, *tail;
} queue;

/* One root's reads. */
typedef struct flow {
    uint64_t bytes;
    int64_t busy_ns, since_ns; /* without, and since, the time when the units under way began */
    uint32_t num_running;
} flow;

/* What waits for one root, and what is under way there. */
typedef struct lane {
    queue queues[2][2];    /* [priority][needs a ring slot] */
    uint32_t num_units[2]; /* taken and not ended, by priority */
    uint32_t num_slots;    /* of the ring, that its records hold */
} lane;

typedef struct worker {
    rw_engine *engine;
    struct worker *next, *previous;
    uint8_t *page;        /* for header pages that have no place of their own */
    _Atomic int64_t since_ns; /* when it last took or ended a unit; 0: it waits for work */
    int is_stuck;
    uint32_t num_units, num_stores; /* that it has under way */
} worker;

struct rw_engine {
    rw_engine *next_ever; /* all engines of this process: a handle stays valid for ever, to say ESHUTDOWN or ECHILD */
    pid_t pid;
    pthread_mutex_t lock;
    pthread_cond_t work, watch, quiet, hold_changed;
    lane lanes[RW_NUM_ROOTS];
    uint32_t num_lanes; /* one more than the highest number of a root that was used */
    rw_batch *live;     /* batches that are not done */
    worker *workers;
    uint64_t next_sequence;
    uint32_t kind, base_workers, num_workers, num_idle, num_busy, num_stuck, num_stores;
    uint32_t num_running, num_abandoned; /* units; the second counts among the first */
    uint8_t *ring;
    uint64_t ring_bytes, slot_bytes;
    uint32_t *free_slots;
    uint8_t *slot_roots; /* whose record each slot holds, while it is taken */
    uint32_t num_slots, num_free, num_lost;
    int owns_ring, is_closed, has_watcher;
    int64_t watch_until_ns;
    flow flows[RW_NUM_ROOTS];
    _Atomic int is_holding;
    char *hold;
};

/* A unit that a worker has taken. */
typedef struct unit {
    transfer *transfer;
    uint32_t number;
    int is_scatter, is_first;
} unit;

/* One vectored read or write of a unit. */
typedef struct span {
    struct iovec parts[2];
    int num_parts;
    off_t offset;
    int was_refused; /* EINVAL came once, O_DIRECT is off since */
} span;

static inline uint64_t round_up(uint64_t value, uint64_t multiple)
{
    return (value + multiple - 1) / multiple * multiple;
}

/* A record read through the ring may be abandoned; every other transfer works in the caller's memory. */
static inline int reads_into_ring(const transfer *t)
{
    return t->kind == RW_READ_RECORD && t->target != RW_TO_MEMORY;
}

static inline int moves_bytes(const transfer *t)
{
    return t->kind == RW_READ || t->kind == RW_WRITE || t->kind == RW_READ_RECORD;
}

/* record.c */
uint64_t record_bytes(uint64_t payload_bytes);
uint64_t record_pieces(uint64_t payload_bytes, uint64_t piece_bytes);

/* engine.c */
int64_t now_ns(void);
int make_condition(pthread_cond_t *condition);
void clock_wait(pthread_cond_t *condition, pthread_mutex_t *lock, int64_t until_ns);
int is_foreign(const rw_engine *e);
void watch_by(rw_engine *e, int64_t at_ns);
int is_held(rw_engine *e, const char *path);
void wait_while_held(rw_engine *e, const char *path);
int worker_begin(worker *w, unit *u, int may_wait, int may_block);
void worker_end(worker *w, const unit *u, int error);

/* queue.c: all with the lock held */
lane *lane_of(rw_engine *e, const transfer *t);
void queue_insert(rw_engine *e, transfer *t);
void queue_remove(rw_engine *e, transfer *t);
int queue_take(rw_engine *e, int may_block, unit *u);
void queue_wake(rw_engine *e);
void slot_free(rw_engine *e, int slot);
void ring_free_if_unused(rw_engine *e);

/* batch.c: with the lock held */
void batch_cut(rw_batch *b, int reason);
void batch_unref(rw_batch *b);
void batch_expire(rw_batch *b, int64_t now);
rw_times batch_times(const rw_batch *b, int64_t now);
rw_flow flow_of(const rw_engine *e, uint32_t root, int64_t now);
void unit_begin(rw_engine *e, const unit *u);
int unit_end(rw_engine *e, const unit *u, int error);
void unit_requeue(rw_engine *e, const unit *u);

/* move.c */
uint32_t num_units_of(const transfer *t);
uint64_t unit_bytes(const unit *u);
int unit_open(const unit *u);
void unit_span(const unit *u, uint8_t *page, span *s);
int span_next(span *s, int fd, ssize_t moved);
int unit_check(const unit *u, const uint8_t *page);
void unit_scatter(const unit *u);
uint32_t num_scatter_units(const transfer *t);

/* file.c */
int open_file(const char *path, int flags, int direct, int *fd);
int move_span(int fd, span *s, int is_write);
int write_record(worker *w, const transfer *t);
int probe_file(const char *path);
int unlink_file(const char *path);

/* threads.c, uring.c */
int unit_start(worker *w, const unit *u);
int unit_do(worker *w, const unit *u);
void threads_run(worker *w);
void uring_run(worker *w);
int uring_probe(void);

#endif
