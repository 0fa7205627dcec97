/* Who is next: loads before stores, then in order of submission; transfers that need a ring slot only while one is free.
 * All functions are called with the engine's lock held. */
#include "internal.h"

#include <sys/mman.h>

static queue *queue_of(rw_engine *e, const transfer *t)
{
    return &e->queues[t->priority][reads_into_ring(t) && t->slot < 0];
}

/* By sequence; what comes back to have more of its units taken belongs near the head. */
void queue_insert(rw_engine *e, transfer *t)
{
    queue *q = queue_of(e, t);
    transfer *before = q->tail;
    if (before && before->sequence > t->sequence) {
        transfer *after = q->head;
        while (after->sequence < t->sequence)
            after = after->next;
        before = after->previous;
    }
    t->previous = before;
    t->next = before ? before->next : q->head;
    *(t->previous ? &t->previous->next : &q->head) = t;
    *(t->next ? &t->next->previous : &q->tail) = t;
    t->is_queued = 1;
}

void queue_remove(rw_engine *e, transfer *t)
{
    if (!t->is_queued)
        return;
    queue *q = queue_of(e, t);
    *(t->previous ? &t->previous->next : &q->head) = t->next;
    *(t->next ? &t->next->previous : &q->tail) = t->previous;
    t->is_queued = 0;
}

/* Stores never hold more than half of the workers that can move, so that a load finds one soon. */
static int store_may_start(const rw_engine *e)
{
    const uint32_t half = e->base_workers / 2;
    return e->num_stores < (half ? half : 1);
}

static transfer *first_runnable(rw_engine *e)
{
    for (int priority = RW_LOAD; priority <= RW_STORE; priority++) {
        if (priority == RW_STORE && !store_may_start(e))
            return NULL;
        transfer *plain = e->queues[priority][0].head, *ring = e->num_free ? e->queues[priority][1].head : NULL;
        if (plain || ring)
            return !ring || (plain && plain->sequence < ring->sequence) ? plain : ring;
    }
    return NULL;
}

/* The next unit, 0 where there is none. may_block = 0: only what the caller can start without blocking. */
int queue_take(rw_engine *e, int may_block, unit *u)
{
    transfer *t = first_runnable(e);
    if (!t || (!may_block && !moves_bytes(t)))
        return 0;
    u->transfer = t;
    u->is_scatter = t->state == SCATTERING;
    u->is_first = t->state == QUEUED;
    if (u->is_first) { /* comes back when its file is open */
        queue_remove(e, t);
        t->state = MOVING;
        if (reads_into_ring(t))
            t->slot = (int)e->free_slots[--e->num_free];
    }
    u->number = t->next_unit++;
    if (t->next_unit == t->num_units)
        queue_remove(e, t);
    t->running++;
    e->num_running++;
    unit_begin(e, u);
    queue_wake(e);
    return 1;
}

/* One sleeper at a time: it wakes the next when it has taken its unit, so that rw_submit pays for one. */
void queue_wake(rw_engine *e)
{
    if (e->num_idle && first_runnable(e))
        pthread_cond_signal(&e->work);
}

void slot_free(rw_engine *e, int slot)
{
    e->free_slots[e->num_free++] = (uint32_t)slot;
    queue_wake(e);
    ring_free_if_unused(e);
}

/* A slot that a hung read or a caller still holds keeps the ring: unmapping it would hand its pages to others. */
void ring_free_if_unused(rw_engine *e)
{
    if (e->is_closed && e->ring && e->num_free == e->num_slots) {
        if (e->owns_ring)
            munmap(e->ring, e->ring_bytes);
        e->ring = NULL;
    }
}
