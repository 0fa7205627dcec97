/* An engine: its workers, the watcher of deadlines and stuck workers, its ring, its end. */
#include "internal.h"

#include <errno.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define TICK_NS (SECOND_NS / 2) /* how often the watcher looks for stuck workers while anything is open */
#define MAX_WORKERS_TIMES 4     /* with spares, in multiples of what was asked for */
#define MAX_WORKERS 1024u
#define TURN_NS 30000000ll      /* of 0.1 to 100 ms that Linux takes */

static rw_engine *all_engines;
static pthread_mutex_t all_lock = PTHREAD_MUTEX_INITIALIZER;

uint32_t rw_abi(void) { return RW_ABI; }

int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * SECOND_NS + now.tv_nsec;
}

/* Waits for a signal or for the time; NO_DEADLINE: without limit. */
void clock_wait(pthread_cond_t *condition, pthread_mutex_t *lock, int64_t until_ns)
{
    if (until_ns == NO_DEADLINE) {
        pthread_cond_wait(condition, lock);
        return;
    }
    const struct timespec until = {until_ns / SECOND_NS, until_ns % SECOND_NS};
    pthread_cond_timedwait(condition, lock, &until);
}

/* True in a process that was forked after the engine was opened: its threads are not there. */
int is_foreign(const rw_engine *e) { return e->pid != getpid(); }

int make_condition(pthread_cond_t *condition)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    const int error = pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
    return error;
}

/* A detached thread that no signal of the process reaches. */
static int start_thread(void *(*run)(void *), void *argument)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    const int error = pthread_create(&thread, &attributes, run, argument);
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return -error;
}

/* A thread that asks for long turns comes after those that want short ones: a thread of the server that wakes up runs at
 * once, not behind the checksums of 32 workers (p99 of 1 ms sleeps beside a load on 2 cores: 1.5 ms instead of 3.5; with
 * turns shorter than others' it got worse). Since Linux 6.12; older kernels ignore it. */
static void let_others_first(void)
{
    struct {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t turn_ns, deadline_ns, period_ns;
    } a = {0};
    if (syscall(SYS_sched_getattr, 0, &a, sizeof a, 0) || a.policy != SCHED_OTHER)
        return;
    a.turn_ns = TURN_NS;
    syscall(SYS_sched_setattr, 0, &a, 0);
}

static void *worker_main(void *argument)
{
    worker *w = argument;
    rw_engine *e = w->engine;
    pthread_setname_np(pthread_self(), "rewarm-io");
    let_others_first();
    (e->kind == RW_URING ? uring_run : threads_run)(w);
    pthread_mutex_lock(&e->lock);
    *(w->previous ? &w->previous->next : &e->workers) = w->next;
    if (w->next)
        w->next->previous = w->previous;
    e->num_workers--;
    pthread_cond_broadcast(&e->quiet);
    pthread_mutex_unlock(&e->lock);
    free(w->page);
    free(w);
    return NULL;
}

/* With the lock held. */
static int start_worker(rw_engine *e)
{
    worker *w = calloc(1, sizeof *w);
    if (!w)
        return -ENOMEM;
    w->engine = e;
    w->page = aligned_alloc(RW_PAGE_BYTES, RW_PAGE_BYTES);
    const int error = w->page ? start_thread(worker_main, w) : -ENOMEM;
    if (error) {
        free(w->page);
        free(w);
        return error;
    }
    w->next = e->workers;
    if (w->next)
        w->next->previous = w;
    e->workers = w;
    e->num_workers++;
    return 0;
}

/* The next unit for a worker; 0: nothing can be taken now (may_wait = 0), or the worker has to end. */
int worker_begin(worker *w, unit *u, int may_wait, int may_block)
{
    rw_engine *e = w->engine;
    int taken;
    pthread_mutex_lock(&e->lock);
    while (!(taken = queue_take(e, may_block, u)) && may_wait) {
        if (e->is_closed || e->num_workers - e->num_stuck > e->base_workers) /* a spare that is no longer needed */
            break;
        e->num_idle++;
        pthread_cond_wait(&e->work, &e->lock);
        e->num_idle--;
    }
    if (taken) {
        e->num_busy += !w->num_units++;
        w->since_ns = now_ns();
        if (u->transfer->priority == RW_STORE) {
            w->num_stores++;
            e->num_stores++;
        }
    }
    pthread_mutex_unlock(&e->lock);
    return taken;
}

/* A worker's unit has ended with 0 or an errno. */
void worker_end(worker *w, const unit *u, int error)
{
    rw_engine *e = w->engine;
    pthread_mutex_lock(&e->lock);
    if (w->is_stuck) {
        w->is_stuck = 0;
        e->num_stuck--;
        e->num_stores += w->num_stores;
    }
    if (u->transfer->priority == RW_STORE) {
        w->num_stores--;
        e->num_stores--;
    }
    w->since_ns = --w->num_units ? now_ns() : 0;
    e->num_busy -= !w->num_units;
    const int fd = unit_end(e, u, error);
    queue_wake(e);
    if (e->is_closed)
        pthread_cond_broadcast(&e->quiet);
    pthread_mutex_unlock(&e->lock);
    if (fd >= 0)
        close(fd);
}

/* With the lock held: a worker that hangs in one I/O is replaced, up to a bound. */
static void replace_stuck(rw_engine *e, int64_t now)
{
    for (worker *w = e->workers; w; w = w->next) {
        const int64_t since = w->since_ns;
        if (!since || w->is_stuck || now - since < STUCK_NS)
            continue;
        w->is_stuck = 1;
        e->num_stuck++;
        e->num_stores -= w->num_stores;
        if (e->num_workers < MAX_WORKERS_TIMES * e->base_workers)
            start_worker(e); /* at the list's head: this loop does not meet it */
    }
}

static void *watcher_main(void *argument)
{
    rw_engine *e = argument;
    pthread_setname_np(pthread_self(), "rewarm-watch");
    pthread_mutex_lock(&e->lock);
    while (!e->is_closed) {
        const int64_t now = now_ns();
        e->watch_until_ns = e->live || e->num_busy ? now + TICK_NS : NO_DEADLINE;
        for (rw_batch *b = e->live, *next; b; b = next) {
            next = b->next_live;
            if (b->deadline_ns > now && b->deadline_ns < e->watch_until_ns)
                e->watch_until_ns = b->deadline_ns;
            batch_expire(b, now); /* may free it */
        }
        replace_stuck(e, now);
        clock_wait(&e->watch, &e->lock, e->watch_until_ns);
    }
    e->has_watcher = 0;
    pthread_cond_broadcast(&e->quiet);
    pthread_mutex_unlock(&e->lock);
    return NULL;
}

/* With the lock held: the watcher must look at this time or before. */
void watch_by(rw_engine *e, int64_t at_ns)
{
    const int64_t tick = now_ns() + TICK_NS;
    at_ns = at_ns < tick ? at_ns : tick;
    if (at_ns < e->watch_until_ns) {
        e->watch_until_ns = at_ns;
        pthread_cond_signal(&e->watch);
    }
}

/* Enough to keep a device busy while some are held by an open, a rename or a whole record's write. With 8 threads a cold
 * load of 1 MiB records had 0.75 of a plain reader's rate, with 16 0.85, with 32 1.01, and with 48 no more (2 cores, ext4
 * on virtio). A worker of io_uring has several small reads under way, but blocks in opens and stores as a thread does: 16
 * stored 1 MiB records at 0.73 of the floor where 32 threads had 0.98. */
static uint32_t default_workers(void)
{
    const long workers = 4 * sysconf(_SC_NPROCESSORS_ONLN);
    return (uint32_t)(workers < 32 ? 32 : workers > 64 ? 64 : workers);
}

static int make_ring(rw_engine *e, const rw_config *config)
{
    e->ring_bytes = config->ring_bytes;
    e->slot_bytes = config->slot_bytes;
    if (!e->ring_bytes)
        return 0;
    e->num_slots = e->num_free = (uint32_t)(e->ring_bytes / e->slot_bytes);
    e->free_slots = malloc(e->num_slots * sizeof *e->free_slots);
    e->slot_roots = malloc(e->num_slots);
    if (!e->free_slots || !e->slot_roots)
        return -ENOMEM;
    for (uint32_t i = 0; i < e->num_slots; i++)
        e->free_slots[i] = e->num_slots - 1 - i;
    e->ring = (uint8_t *)(uintptr_t)config->ring_address; /* NOLINT(performance-no-int-to-ptr) */
    if (e->ring)
        return 0;
    e->owns_ring = 1;
    e->ring = mmap(NULL, e->ring_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (e->ring == MAP_FAILED) {
        e->ring = NULL;
        return -errno;
    }
    madvise(e->ring, e->ring_bytes, MADV_HUGEPAGE);
    madvise(e->ring, e->ring_bytes, MADV_DONTFORK); /* no copy on write under a read that is under way */
    return 0;
}

static int config_is_wrong(const rw_config *c)
{
    if (c->kind != RW_THREADS && c->kind != RW_URING)
        return 1;
    if (c->ring_address % RW_PAGE_BYTES || c->num_workers > MAX_WORKERS)
        return 1;
    return c->ring_bytes && (c->slot_bytes < 2 * RW_PAGE_BYTES || c->slot_bytes % RW_PAGE_BYTES ||
                             c->ring_bytes < c->slot_bytes || c->ring_bytes / c->slot_bytes > INT32_MAX);
}

static int start_threads(rw_engine *e)
{
    int error = start_thread(watcher_main, e);
    pthread_mutex_lock(&e->lock);
    e->has_watcher = !error;
    while (!error && e->num_workers < e->base_workers)
        error = start_worker(e);
    pthread_mutex_unlock(&e->lock);
    return error;
}

int rw_engine_open(const rw_config *config, rw_engine **engine)
{
    if (config_is_wrong(config))
        return -EINVAL;
    int error = config->kind == RW_URING ? uring_probe() : 0;
    if (error)
        return error;
    rw_engine *e = calloc(1, sizeof *e);
    if (!e)
        return -ENOMEM;
    e->pid = getpid();
    e->kind = config->kind;
    e->base_workers = config->num_workers ? config->num_workers : default_workers();
    e->watch_until_ns = NO_DEADLINE;
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_t *conditions[] = {&e->work, &e->watch, &e->quiet, &e->hold_changed};
    for (size_t i = 0; i < sizeof conditions / sizeof *conditions; i++)
        make_condition(conditions[i]);
    error = make_ring(e, config);
    if (!error) {
        pthread_mutex_lock(&all_lock);
        e->next_ever = all_engines;
        all_engines = e;
        pthread_mutex_unlock(&all_lock);
        error = start_threads(e);
        if (!error)
            *engine = e;
        else
            rw_engine_close(e, -1);
        return error;
    }
    free(e->free_slots);
    free(e->slot_roots);
    free(e);
    return error;
}

/* With the lock held: nothing is under way but what was abandoned, and no thread but those that it keeps. */
static int is_quiet(const rw_engine *e)
{
    return !e->live && e->num_running == e->num_abandoned && e->num_workers == e->num_busy && !e->has_watcher;
}

int rw_engine_close(rw_engine *e, int64_t wait_ns)
{
    if (is_foreign(e))
        return -ECHILD;
    const int64_t until = wait_ns < 0 ? NO_DEADLINE : now_ns() + wait_ns;
    pthread_mutex_lock(&e->lock);
    e->is_closed = 1;
    for (rw_batch *b = e->live, *next; b; b = next) {
        next = b->next_live;
        batch_cut(b, ECANCELED); /* may free it */
    }
    pthread_cond_broadcast(&e->work);
    pthread_cond_broadcast(&e->watch);
    while (!is_quiet(e) && now_ns() < until)
        clock_wait(&e->quiet, &e->lock, until);
    int open = 0;
    for (const rw_batch *b = e->live; b; b = b->next_live)
        open += (int)b->open_count;
    ring_free_if_unused(e);
    pthread_mutex_unlock(&e->lock);
    return open;
}

int rw_engine_usage(rw_engine *e, rw_usage *usage)
{
    if (is_foreign(e))
        return -ECHILD;
    pthread_mutex_lock(&e->lock);
    *usage = (rw_usage){.num_workers = e->num_workers,
                        .stuck_workers = e->num_stuck,
                        .num_slots = e->num_slots,
                        .free_slots = e->num_free,
                        .lost_slots = e->num_lost};
    for (uint32_t i = 0; i < 4 * e->num_lanes; i++)
        for (const transfer *t = e->lanes[i / 4].queues[i / 2 % 2][i % 2].head; t; t = t->next)
            usage->queued += t->state == QUEUED;
    pthread_mutex_unlock(&e->lock);
    return 0;
}

int rw_engine_flow(rw_engine *e, uint32_t root, rw_flow *out)
{
    if (is_foreign(e))
        return -ECHILD;
    if (root >= RW_NUM_ROOTS)
        return -EINVAL;
    pthread_mutex_lock(&e->lock);
    *out = flow_of(e, root, now_ns());
    pthread_mutex_unlock(&e->lock);
    return 0;
}

int rw_test_hold(rw_engine *e, const char *part)
{
    if (is_foreign(e))
        return -ECHILD;
    char *copy = part ? strdup(part) : NULL;
    if (part && !copy)
        return -ENOMEM;
    pthread_mutex_lock(&e->lock);
    free(e->hold);
    e->hold = copy;
    e->is_holding = copy != NULL;
    pthread_cond_broadcast(&e->hold_changed);
    pthread_mutex_unlock(&e->lock);
    return 0;
}

int is_held(rw_engine *e, const char *path)
{
    if (!e->is_holding)
        return 0;
    pthread_mutex_lock(&e->lock);
    const int held = e->hold && strstr(path, e->hold);
    pthread_mutex_unlock(&e->lock);
    return held;
}

void wait_while_held(rw_engine *e, const char *path)
{
    if (!e->is_holding)
        return;
    pthread_mutex_lock(&e->lock);
    while (e->hold && strstr(path, e->hold))
        pthread_cond_wait(&e->hold_changed, &e->lock);
    pthread_mutex_unlock(&e->lock);
}
