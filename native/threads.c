/* The engine of plain threads: a worker does one unit at a time, and blocks in it. */
#include "internal.h"

#include <fcntl.h>

/* Opens the file for a transfer's first unit, then lets other workers have the rest of the units. */
int unit_start(worker *w, const unit *u)
{
    const int error = u->is_first ? unit_open(u) : 0;
    if (!error && u->is_first && u->transfer->num_units > 1)
        unit_requeue(w->engine, u);
    return error;
}

static int move_unit(worker *w, const unit *u)
{
    int error = unit_start(w, u);
    if (error)
        return error;
    span s;
    unit_span(u, w->page, &s);
    error = move_span(u->transfer->fd, &s, u->transfer->kind == RW_WRITE);
    return error ? error : unit_check(u, w->page);
}

/* All of a unit; 0 or an errno. */
int unit_do(worker *w, const unit *u)
{
    transfer *t = u->transfer;
    if (u->is_scatter) {
        unit_scatter(u);
        return 0;
    }
    wait_while_held(w->engine, t->path);
    switch (t->kind) {
    case RW_WRITE_RECORD:
        return write_record(w, t);
    case RW_PROBE:
        return probe_file(t->path);
    case RW_UNLINK:
        return unlink_file(t->path);
    default:
        return move_unit(w, u);
    }
}

void threads_run(worker *w)
{
    unit u;
    while (worker_begin(w, &u, 1, 1))
        worker_end(w, &u, unit_do(w, &u));
}
