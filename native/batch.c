/* What happens to batches and transfers: cut, settle, final. All functions are called with the engine's lock held. */
#include "internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

void batch_unref(rw_batch *b)
{
    if (--b->references)
        return;
    pthread_cond_destroy(&b->done);
    if (b->event_fd >= 0)
        close(b->event_fd);
    free(b);
}

static void leave_live(rw_batch *b)
{
    *(b->previous_live ? &b->previous_live->next_live : &b->engine->live) = b->next_live;
    if (b->next_live)
        b->next_live->previous_live = b->previous_live;
}

/* Makes a transfer final. */
static void finish(transfer *t, int result)
{
    rw_batch *b = t->batch;
    t->state = FINAL;
    b->results[t->index] = result;
    b->ended[b->num_ended++] = t->index;
    if (b->event_fd >= 0)
        eventfd_write(b->event_fd, 1);
    if (--b->open_count)
        return;
    b->done_ns = now_ns();
    if (!b->num_running)
        b->waited_ns += b->done_ns - b->idle_ns;
    leave_live(b);
    pthread_cond_broadcast(&b->done);
    if (b->engine->is_closed)
        pthread_cond_broadcast(&b->engine->quiet);
}

static int compare_checksums(const transfer *t)
{
    const uint64_t pieces = record_pieces(t->length, RW_PIECE_BYTES);
    return memcmp(t->found, t->expected, pieces * sizeof *t->found) ? EBADMSG : 0;
}

/* A file that ends early, a symlink, a FIFO or a directory in a record's place: damage. */
static int as_record_error(int error)
{
    return error == ENODATA || error == ELOOP || error == ESPIPE || error == EISDIR ? EBADMSG : error;
}

static int result_of(const transfer *t)
{
    if (t->state == SCATTERING)
        return 0;
    if (t->batch->cut && (t->state == QUEUED || moves_bytes(t)))
        return t->batch->cut;
    if (t->error || t->kind != RW_READ_RECORD)
        return t->kind == RW_READ_RECORD ? as_record_error(t->error) : t->error;
    return compare_checksums(t);
}

static int begins_scatter(transfer *t)
{
    if (t->state != MOVING || t->kind != RW_READ_RECORD || t->target != RW_TO_BLOCKS || !num_scatter_units(t))
        return 0;
    t->state = SCATTERING;
    t->next_unit = 0;
    t->num_units = num_scatter_units(t);
    queue_insert(t->batch->engine, t);
    return 1;
}

/* A transfer of which no unit is queued or under way: makes it final and lets go of what it holds, or goes on to its
 * scatter. Returns a file to close, or -1. */
static int settle(transfer *t)
{
    rw_batch *b = t->batch;
    rw_engine *e = b->engine;
    const int fd = t->fd;
    int keeps_slot = 0;
    t->fd = -1;
    if (t->state == FINAL) {
        e->num_lost--; /* it was abandoned, its I/O has returned */
    } else {
        const int result = result_of(t);
        if (!result && begins_scatter(t))
            return fd;
        keeps_slot = !result && t->kind == RW_READ_RECORD && t->target == RW_TO_SLOT && !b->is_dropped;
        finish(t, result);
    }
    if (t->slot >= 0 && !keeps_slot) {
        slot_free(e, t->slot);
        t->slot = -1;
    }
    batch_unref(b);
    return fd;
}

/* Where a unit's bytes count; NULL: nowhere. */
static flow *flow_for(rw_engine *e, const unit *u)
{
    const transfer *t = u->transfer;
    return t->kind == RW_READ_RECORD && !u->is_scatter ? &e->flows[t->root] : NULL;
}

/* A unit was taken. */
void unit_begin(rw_engine *e, const unit *u)
{
    rw_batch *b = u->transfer->batch;
    if (!b->num_running++ && b->open_count)
        b->waited_ns += now_ns() - b->idle_ns;
    flow *f = flow_for(e, u);
    if (f && !f->num_running++)
        f->since_ns = now_ns();
}

static void flow_end(flow *f, uint64_t bytes)
{
    f->bytes += bytes;
    if (!--f->num_running)
        f->busy_ns += now_ns() - f->since_ns;
}

rw_flow flow_of(const rw_engine *e, uint32_t root, int64_t now)
{
    const flow *f = &e->flows[root];
    return (rw_flow){f->bytes, f->busy_ns + (f->num_running ? now - f->since_ns : 0)};
}

rw_times batch_times(const rw_batch *b, int64_t now)
{
    const int64_t end = b->open_count ? now : b->done_ns;
    const int64_t idle = b->open_count && !b->num_running ? now - b->idle_ns : 0;
    return (rw_times){b->waited_ns + idle, end - b->submitted_ns};
}

/* A unit has ended with 0 or an errno. Returns a file to close, or -1. */
int unit_end(rw_engine *e, const unit *u, int error)
{
    transfer *t = u->transfer;
    t->running--;
    e->num_running--;
    lane_of(e, t)->num_units[t->priority]--;
    e->num_abandoned -= t->state == FINAL;
    if (!--t->batch->num_running)
        t->batch->idle_ns = now_ns();
    flow *f = flow_for(e, u);
    if (f)
        flow_end(f, error ? 0 : unit_bytes(u));
    if (error && !t->error) {
        t->error = error;
        queue_remove(e, t);
    }
    return t->running || t->is_queued ? -1 : settle(t);
}

/* The file is open: the other units can be taken. */
void unit_requeue(rw_engine *e, const unit *u)
{
    transfer *t = u->transfer;
    pthread_mutex_lock(&e->lock);
    if (!t->batch->cut) {
        queue_insert(e, t);
        queue_wake(e);
    }
    pthread_mutex_unlock(&e->lock);
}

/* Ends what is queued and what reads into the ring. What moves in place ends with its units under way; a scatter that
 * has begun, and a record being written, end by themselves. */
void batch_cut(rw_batch *b, int reason)
{
    rw_engine *e = b->engine;
    if (b->cut || !b->open_count)
        return;
    b->cut = reason;
    b->references++; /* the last transfer may let it go */
    for (uint32_t i = 0; i < b->count; i++) {
        transfer *t = &b->transfers[i];
        if (t->state == FINAL || t->state == SCATTERING)
            continue;
        queue_remove(e, t);
        if (!t->running) {
            const int fd = settle(t);
            if (fd >= 0)
                close(fd);
        } else if (reads_into_ring(t)) {
            e->num_abandoned += t->running;
            e->num_lost++;
            finish(t, reason);
        }
    }
    batch_unref(b);
}

void batch_expire(rw_batch *b, int64_t now)
{
    if (now >= b->deadline_ns)
        batch_cut(b, ETIMEDOUT);
}
