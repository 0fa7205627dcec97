/* The header page of a record and its pieces: the twin of src/rewarm/engine/record.py. Layout: docs/format/volume-v1.md.
 * The page comes from flash and is hostile: no field is believed before its check. */
#include "internal.h"

#include <errno.h>
#include <string.h>

#define MAGIC "RWR1"
#define FORMAT_VERSION 1u
#define CHECKSUM_CRC32C 1u
#define TABLE_OFFSET 1024u

_Static_assert(TABLE_OFFSET + 4 * RW_MAX_PIECES == RW_PAGE_BYTES, "the table of checksums ends with the page");

static uint64_t get(const uint8_t *p, unsigned bytes)
{
    uint64_t value = 0;
    for (unsigned i = bytes; i-- > 0;)
        value = value << 8 | p[i];
    return value;
}

static void put(uint8_t *p, uint64_t value, unsigned bytes)
{
    for (unsigned i = 0; i < bytes; i++)
        p[i] = (uint8_t)(value >> 8 * i);
}

uint64_t record_bytes(uint64_t payload_bytes)
{
    return RW_PAGE_BYTES + round_up(payload_bytes, RW_PAGE_BYTES);
}

uint64_t record_pieces(uint64_t payload_bytes, uint64_t piece_bytes)
{
    return payload_bytes ? (record_bytes(payload_bytes) + piece_bytes - 1) / piece_bytes : 0;
}

void rw_record_pack(const rw_header *header, uint8_t *page)
{
    memset(page, 0, RW_PAGE_BYTES);
    memcpy(page, MAGIC, 4);
    put(page + 8, FORMAT_VERSION, 2);
    put(page + 12, CHECKSUM_CRC32C, 4);
    put(page + 16, header->payload_bytes, 8);
    put(page + 24, header->piece_bytes, 4);
    put(page + 28, header->num_pieces, 4);
    memcpy(page + 32, header->key, 32);
    memcpy(page + 64, header->namespace_id, 32);
    put(page + 96, header->created_ns, 8);
    for (uint32_t i = 0; i < header->num_pieces && i < RW_MAX_PIECES; i++)
        put(page + TABLE_OFFSET + 4 * i, header->crcs[i], 4);
    put(page + 4, rw_crc32c(0, page + 8, RW_PAGE_BYTES - 8), 4);
}

int rw_record_parse(const uint8_t *page, rw_header *header)
{
    if (memcmp(page, MAGIC, 4) != 0 || get(page + 4, 4) != rw_crc32c(0, page + 8, RW_PAGE_BYTES - 8))
        return -EBADMSG;
    if (get(page + 8, 2) != FORMAT_VERSION)
        return -EPROTONOSUPPORT;
    const uint64_t payload_bytes = get(page + 16, 8), piece_bytes = get(page + 24, 4), count = get(page + 28, 4);
    if (get(page + 12, 4) != CHECKSUM_CRC32C || count > RW_MAX_PIECES || piece_bytes < 2 * RW_PAGE_BYTES ||
        piece_bytes % RW_PAGE_BYTES || payload_bytes > RW_MAX_PIECES * piece_bytes ||
        count != record_pieces(payload_bytes, piece_bytes))
        return -EBADMSG;
    header->payload_bytes = payload_bytes;
    header->piece_bytes = (uint32_t)piece_bytes;
    header->num_pieces = (uint32_t)count;
    header->created_ns = get(page + 96, 8);
    memcpy(header->key, page + 32, 32);
    memcpy(header->namespace_id, page + 64, 32);
    for (uint32_t i = 0; i < count; i++)
        header->crcs[i] = (uint32_t)get(page + TABLE_OFFSET + 4 * i, 4);
    return 0;
}
