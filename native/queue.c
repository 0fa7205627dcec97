/* Who is next: loads before stores; of several roots the one with the least under way, so that all their devices work at
 * once; within a root in order of submission. Transfers that need a ring slot come only while one is free.
 *
 * What a root that hangs can take is bounded: half of the workers, of the stores among them and of the ring's slots is
 * set aside in equal parts, one for each root. A single root has all of them.
 *
 * All functions are called with the engine's lock held. */
#include "internal.h"

#include <sys/mman.h>

lane *lane_of(rw_engine *e, const transfer *t) { return &e->lanes[t->root]; }

static queue *queue_of(rw_engine *e, const transfer *t)
{
    return &lane_of(e, t)->queues[t->priority][reads_into_ring(t) && t->slot < 0];
}

/* By sequence; what comes back to have more of its units taken belongs near the head. */
void queue_insert(rw_engine *e, transfer *t)
{
    if (t->root >= e->num_lanes)
        e->num_lanes = t->root + 1u;
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

/* What is set aside for each root, of so many. */
static uint32_t part_of(const rw_engine *e, uint32_t count) { return count / (2 * e->num_lanes); }

static uint32_t missing(uint32_t part, uint32_t taken) { return taken < part ? part - taken : 0; }

/* What of it roots do not use now, and nobody else may have. */
typedef struct reserve {
    uint32_t loads, stores, slots;
} reserve;

static reserve part_a_root(const rw_engine *e)
{
    return (reserve){part_of(e, e->base_workers), part_of(e, e->base_workers / 2), part_of(e, e->num_slots)};
}

static reserve reserve_of(const reserve *part, const lane *l)
{
    return (reserve){missing(part->loads, l->num_units[RW_LOAD]), missing(part->stores, l->num_units[RW_STORE]),
                     missing(part->slots, l->num_slots)};
}

static reserve reserve_of_all(const rw_engine *e, const reserve *part)
{
    reserve sum = {0, 0, 0};
    for (uint32_t i = 0; i < e->num_lanes; i++) {
        const reserve one = reserve_of(part, &e->lanes[i]);
        sum.loads += one.loads;
        sum.stores += one.stores;
        sum.slots += one.slots;
    }
    return sum;
}

/* Stores never hold more than half of the workers that can move, so that a load finds one soon. */
static int store_may_start(const rw_engine *e, uint32_t others)
{
    const uint32_t half = e->base_workers / 2;
    return e->num_stores + others < (half ? half : 1);
}

/* Whether a root may have one more worker; one that has work already may take more beside it. */
static int may_start(const rw_engine *e, const lane *l, int priority, const reserve *part, const reserve *all)
{
    const reserve own = reserve_of(part, l);
    if (priority == RW_LOAD)
        return own.loads || e->num_busy + all->loads < e->num_workers;
    return (own.stores && store_may_start(e, 0)) ||
           (store_may_start(e, all->stores - own.stores) && e->num_busy + all->loads < e->num_workers);
}

/* Of one root, NULL: nothing. */
static transfer *first_of(const rw_engine *e, const lane *l, int priority, const reserve *part, const reserve *all)
{
    const reserve own = reserve_of(part, l);
    const int has_slot = own.slots ? e->num_free > 0 : e->num_free > all->slots;
    transfer *plain = l->queues[priority][0].head, *ring = has_slot ? l->queues[priority][1].head : NULL;
    return !ring || (plain && plain->sequence < ring->sequence) ? plain : ring;
}

static transfer *first_runnable(const rw_engine *e, int may_block)
{
    if (!e->num_lanes)
        return NULL;
    const reserve part = part_a_root(e), all = reserve_of_all(e, &part);
    for (int priority = RW_LOAD; priority <= RW_STORE; priority++) {
        transfer *best = NULL;
        uint32_t least = UINT32_MAX;
        for (uint32_t i = 0; i < e->num_lanes; i++) {
            const lane *l = &e->lanes[i];
            transfer *t = first_of(e, l, priority, &part, &all);
            if (!t || (may_block && !may_start(e, l, priority, &part, &all)) ||
                (!may_block && priority == RW_STORE && !store_may_start(e, 0)))
                continue;
            if (l->num_units[priority] < least || (l->num_units[priority] == least && t->sequence < best->sequence)) {
                best = t;
                least = l->num_units[priority];
            }
        }
        if (best)
            return best;
    }
    return NULL;
}

static void slot_take(rw_engine *e, transfer *t)
{
    t->slot = (int)e->free_slots[--e->num_free];
    e->slot_roots[t->slot] = t->root;
    lane_of(e, t)->num_slots++;
}

/* The next unit, 0 where there is none. may_block = 0: only what the caller can start without blocking. */
int queue_take(rw_engine *e, int may_block, unit *u)
{
    transfer *t = first_runnable(e, may_block);
    if (!t || (!may_block && !moves_bytes(t)))
        return 0;
    u->transfer = t;
    u->is_scatter = t->state == SCATTERING;
    u->is_first = t->state == QUEUED;
    if (u->is_first) { /* comes back when its file is open */
        queue_remove(e, t);
        t->state = MOVING;
        if (reads_into_ring(t))
            slot_take(e, t);
    }
    u->number = t->next_unit++;
    if (t->next_unit == t->num_units)
        queue_remove(e, t);
    t->running++;
    e->num_running++;
    lane_of(e, t)->num_units[t->priority]++;
    unit_begin(e, u);
    queue_wake(e);
    return 1;
}

/* One sleeper at a time: it wakes the next when it has taken its unit, so that rw_submit pays for one. */
void queue_wake(rw_engine *e)
{
    if (e->num_idle && first_runnable(e, 1))
        pthread_cond_signal(&e->work);
}

void slot_free(rw_engine *e, int slot)
{
    e->lanes[e->slot_roots[slot]].num_slots--;
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
