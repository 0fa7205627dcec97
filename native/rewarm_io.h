/* Rewarm's I/O core: batches of transfers between files and host memory, moved by native threads or io_uring.
 *
 * No Python in it. src/rewarm/engine/_native.py declares all of this once more for ctypes, and
 * tests/contract/test_engine_header.py compares the two. Functions return 0 or a count, or -errno. Every call on an
 * engine or a batch fails with -ECHILD in a process that was forked after rw_engine_open.
 */
#ifndef REWARM_IO_H
#define REWARM_IO_H

#include <stddef.h>
#include <stdint.h>

#define RW_API __attribute__((visibility("default")))
#define RW_ABI 3
#define RW_PAGE_BYTES 4096u
#define RW_PIECE_BYTES 1048576u
#define RW_MAX_PIECES 768u
#define RW_NUM_ROOTS 256u

enum { RW_READ = 1, RW_WRITE, RW_READ_RECORD, RW_WRITE_RECORD, RW_PROBE, RW_UNLINK };
enum { RW_TO_MEMORY = 0, RW_TO_BLOCKS, RW_TO_SLOT };
enum { RW_LOAD = 0, RW_STORE };
enum { RW_THREADS = 1, RW_URING };

/* One transfer. Its paths are not here: they are NUL-terminated strings, one after the other in the order of the
 * transfers, one for each and a second (the temporary name) for RW_WRITE_RECORD. */
typedef struct rw_transfer {
    uint8_t kind;
    uint8_t target;      /* RW_READ_RECORD: where the payload goes */
    uint8_t durable;     /* RW_WRITE_RECORD: fsync the file before and the directory after the rename */
    uint8_t root;        /* the caller's number for the device that the file lies on: a queue and a flow for each */
    uint8_t reserved[4];
    uint64_t address;    /* caller's memory; unused by RW_TO_BLOCKS and RW_TO_SLOT */
    uint64_t length;     /* bytes to move; a record's payload bytes */
    uint64_t offset;     /* in the file; RW_WRITE_RECORD: created, nanoseconds of Unix time */
    uint64_t planes;     /* RW_TO_BLOCKS: address of uint64_t[num_planes], the planes' addresses */
    uint64_t blocks;     /* RW_TO_BLOCKS: address of int64_t[num_blocks], block ids after the skipped ones */
    uint64_t page_bytes; /* RW_TO_BLOCKS: bytes of one block in one plane */
    uint32_t num_planes;
    uint32_t num_blocks;
    uint32_t skip_blocks;
    uint32_t reserved2;
    uint8_t key[32];
    uint8_t namespace_id[32];
} rw_transfer;

typedef struct rw_config {
    uint32_t kind;         /* RW_THREADS or RW_URING */
    uint32_t num_workers;  /* 0: chosen here */
    uint64_t ring_bytes;
    uint64_t slot_bytes;
    uint64_t ring_address; /* caller's memory for the ring; 0: allocated here */
} rw_config;

typedef struct rw_usage {
    uint32_t num_workers;   /* threads that do I/O, spares included */
    uint32_t stuck_workers; /* threads whose one I/O has taken longer than two seconds */
    uint32_t num_slots;
    uint32_t free_slots;
    uint32_t lost_slots;    /* held by reads that were abandoned and have not returned */
    uint32_t queued;        /* transfers of which nothing was submitted yet */
} rw_usage;

typedef struct rw_result {
    uint32_t index;
    int32_t result; /* 0 or errno */
} rw_result;

typedef struct rw_times {
    int64_t waited_ns; /* of the total: none of the batch's I/O was under way, it waited for workers or ring slots */
    int64_t total_ns;  /* since the submit, until the batch was done or now */
} rw_times;

typedef struct rw_flow {
    uint64_t bytes;  /* of record files, read and checked */
    int64_t busy_ns; /* while a read at least was under way */
} rw_flow;

typedef struct rw_header {
    uint64_t payload_bytes;
    uint64_t created_ns;
    uint32_t piece_bytes;
    uint32_t num_pieces;
    uint8_t key[32];
    uint8_t namespace_id[32];
    uint32_t crcs[RW_MAX_PIECES];
} rw_header;

typedef struct rw_engine rw_engine;
typedef struct rw_batch rw_batch;

/* Version of this interface: RW_ABI. */
RW_API uint32_t rw_abi(void);

RW_API int rw_engine_open(const rw_config *config, rw_engine **engine);
/* Ends all that is open with ECANCELED. Waits for I/O in place up to wait_ns, never for abandoned reads. Memory that
 * hung I/O may still touch is kept. Returns the number of transfers in place that are not final. */
RW_API int rw_engine_close(rw_engine *engine, int64_t wait_ns);
RW_API int rw_engine_usage(rw_engine *engine, rw_usage *usage);
/* What RW_READ_RECORD transfers of one root have brought since the engine was opened; those that wait for a worker or
 * a ring slot are not under way. -EINVAL: no such number. */
RW_API int rw_engine_flow(rw_engine *engine, uint32_t root, rw_flow *flow);

/* Queues n transfers; copies all that it is given but the bytes to move. deadline_ns < 0: none, else from now.
 * -EINVAL: *bad is the index of the malformed transfer, n where the paths do not add up. -ESHUTDOWN: closed. */
RW_API int rw_submit(rw_engine *engine, const rw_transfer *transfers, uint32_t n, const char *paths,
                     uint64_t paths_bytes, uint32_t priority, int64_t deadline_ns, rw_batch **batch, uint32_t *bad);
/* 1 when every transfer is final, else 0. */
RW_API int rw_done(rw_batch *batch);
/* Up to max results that ended since the last take; returns how many. */
RW_API int rw_take(rw_batch *batch, rw_result *results, uint32_t max);
/* The results of all n transfers, in order; -EBUSY before the batch is done. */
RW_API int rw_results(rw_batch *batch, int32_t *results);
/* Waits until done; timeout_ns < 0: without limit. Returns as rw_done. */
RW_API int rw_wait(rw_batch *batch, int64_t timeout_ns);
/* Ends what can end at once with ECANCELED, the rest when its I/O in place has returned. Returns as rw_done. */
RW_API int rw_cancel(rw_batch *batch);
/* Where a batch's time went; of a batch that is done it stays as it is. */
RW_API int rw_batch_times(rw_batch *batch, rw_times *times);
/* An eventfd that is readable when rw_take would return something; closed by rw_free. */
RW_API int rw_fileno(rw_batch *batch);
/* Payload of an RW_TO_SLOT transfer that ended with 0; 0 where there is none. */
RW_API uint64_t rw_slot_address(rw_batch *batch, uint32_t index);
RW_API int rw_release(rw_batch *batch, uint32_t index);
/* Gives the handle up. Its transfers go on; slots that it holds, and will hold, are released. */
RW_API void rw_free(rw_batch *batch);

/* Copies a chunk's blocks to `address`, [plane][block][page]. */
RW_API void rw_gather(const uint64_t *planes, uint32_t num_planes, uint64_t page_bytes, const int64_t *blocks,
                      uint32_t num_blocks, void *address);

/* CRC32C of more bytes; start with 0. rw_crc32c_table is the fallback, for comparison. */
RW_API uint32_t rw_crc32c(uint32_t crc, const void *bytes, size_t length);
RW_API uint32_t rw_crc32c_table(uint32_t crc, const void *bytes, size_t length);
/* "sse4.2", "armv8" or "table". */
RW_API const char *rw_crc32c_kind(void);

/* Header pages. rw_record_parse: -EBADMSG not a whole header, -EPROTONOSUPPORT a version not known here. */
RW_API void rw_record_pack(const rw_header *header, uint8_t *page);
RW_API int rw_record_parse(const uint8_t *page, rw_header *header);

/* Fingerprints of the records below a namespace's directory, in no order: names <hh>/<64 hex digits>.rec, no stat.
 * le64(key[0:8]) ^ rotl64(le64(key[24:32]), 1), 1 where that is 0. Returns how many there are, also where that is more
 * than `capacity`: then call again with more room; or -errno. */
RW_API int64_t rw_scan(const char *directory, uint32_t num_threads, uint64_t *fingerprints, uint64_t capacity);
/* Adds fingerprints to an open-addressed table: num_slots, a power of two, more than will be filled; linear probing from
 * fingerprint & (num_slots - 1); 0 is an empty slot, fingerprint 0 is kept as 1. Returns how many were not there yet. */
RW_API uint64_t rw_index_add(uint64_t *table, uint64_t num_slots, const uint64_t *fingerprints, uint64_t n);

/* For tests: holds the I/O of files whose path contains `part`, after it counts as submitted; NULL lets all go on. */
RW_API int rw_test_hold(rw_engine *engine, const char *part);

#endif
