/* The calls on a submitted batch. */
#include "internal.h"

#include <errno.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* Locks the batch's engine and looks at the deadline; -ECHILD in a forked child. */
static int enter(rw_batch *b)
{
    if (is_foreign(b->engine))
        return -ECHILD;
    pthread_mutex_lock(&b->engine->lock);
    batch_expire(b, now_ns());
    return 0;
}

static int leave(rw_batch *b, int result)
{
    pthread_mutex_unlock(&b->engine->lock);
    return result;
}

int rw_done(rw_batch *b)
{
    const int error = enter(b);
    return error ? error : leave(b, !b->open_count);
}

int rw_take(rw_batch *b, rw_result *results, uint32_t max)
{
    const int error = enter(b);
    if (error)
        return error;
    uint32_t n = 0;
    for (; n < max && b->num_taken < b->num_ended; n++) {
        const uint32_t index = b->ended[b->num_taken++];
        results[n] = (rw_result){index, b->results[index]};
    }
    eventfd_t ignored;
    if (b->event_fd >= 0 && b->num_taken == b->num_ended)
        eventfd_read(b->event_fd, &ignored);
    return leave(b, (int)n);
}

int rw_results(rw_batch *b, int32_t *results)
{
    const int error = enter(b);
    if (error)
        return error;
    if (b->open_count)
        return leave(b, -EBUSY);
    memcpy(results, b->results, b->count * sizeof *results);
    return leave(b, 0);
}

int rw_wait(rw_batch *b, int64_t timeout_ns)
{
    const int error = enter(b);
    if (error)
        return error;
    int64_t now = now_ns();
    const int64_t end = timeout_ns < 0 || timeout_ns > NO_DEADLINE - now ? NO_DEADLINE : now + timeout_ns;
    while (b->open_count && now < end) {
        clock_wait(&b->done, &b->engine->lock, b->cut || end < b->deadline_ns ? end : b->deadline_ns);
        now = now_ns();
        batch_expire(b, now);
    }
    return leave(b, !b->open_count);
}

int rw_cancel(rw_batch *b)
{
    const int error = enter(b);
    if (error)
        return error;
    batch_cut(b, ECANCELED);
    return leave(b, !b->open_count);
}

int rw_batch_times(rw_batch *b, rw_times *times)
{
    const int error = enter(b);
    if (error)
        return error;
    *times = batch_times(b, now_ns());
    return leave(b, 0);
}

int rw_fileno(rw_batch *b)
{
    const int error = enter(b);
    if (error)
        return error;
    if (b->event_fd < 0) {
        b->event_fd = eventfd(b->num_ended - b->num_taken, EFD_NONBLOCK | EFD_CLOEXEC);
        if (b->event_fd < 0)
            return leave(b, -errno);
    }
    return leave(b, b->event_fd);
}

/* The transfer whose slot the caller holds, else NULL. */
static transfer *holder(rw_batch *b, uint32_t index)
{
    if (index >= b->count)
        return NULL;
    transfer *t = &b->transfers[index];
    return t->state == FINAL && !b->results[index] && t->slot >= 0 ? t : NULL;
}

uint64_t rw_slot_address(rw_batch *b, uint32_t index)
{
    if (enter(b))
        return 0;
    const transfer *t = holder(b, index);
    const rw_engine *e = b->engine;
    const uint64_t address =
        t ? (uint64_t)(uintptr_t)e->ring + (uint64_t)t->slot * e->slot_bytes + RW_PAGE_BYTES : 0;
    leave(b, 0);
    return address;
}

int rw_release(rw_batch *b, uint32_t index)
{
    const int error = enter(b);
    if (error)
        return error;
    transfer *t = holder(b, index);
    if (!t)
        return leave(b, -EINVAL);
    slot_free(b->engine, t->slot);
    t->slot = -1;
    return leave(b, 0);
}

void rw_free(rw_batch *b)
{
    rw_engine *e = b->engine;
    if (is_foreign(e))
        return;
    pthread_mutex_lock(&e->lock);
    b->is_dropped = 1;
    if (b->event_fd >= 0)
        close(b->event_fd);
    b->event_fd = -1;
    for (uint32_t i = 0; i < b->count; i++) {
        transfer *t = holder(b, i);
        if (t) {
            slot_free(e, t->slot);
            t->slot = -1;
        }
    }
    batch_unref(b);
    pthread_mutex_unlock(&e->lock);
}
