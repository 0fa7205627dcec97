/* Checksums, header pages, the scan and the table: what needs no engine. */
#include "check.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

static void check_crc(void)
{
    CHECK(rw_crc32c(0, "123456789", 9) == 0xe3069283u); /* RFC 3720 */
    CHECK(rw_crc32c_table(0, "123456789", 9) == 0xe3069283u);
    uint8_t *bytes = make_bytes(100000, 1);
    uint64_t random = 7;
    for (int i = 0; i < 300; i++) {
        const uint64_t start = next_random(&random) % 50000, length = next_random(&random) % 50000;
        const uint64_t cut = length ? next_random(&random) % length : 0;
        const uint32_t whole = rw_crc32c(0, bytes + start, length);
        CHECK(whole == rw_crc32c_table(0, bytes + start, length));
        CHECK(whole == rw_crc32c(rw_crc32c(0, bytes + start, cut), bytes + start + cut, length - cut));
    }
    printf("crc32c: %s\n", rw_crc32c_kind());
    free(bytes);
}

/* Gives a page a valid checksum of its own, so that the fields behind it are looked at. */
static void sign(uint8_t *page)
{
    const uint32_t crc = rw_crc32c(0, page + 8, RW_PAGE_BYTES - 8);
    for (int i = 0; i < 4; i++)
        page[4 + i] = (uint8_t)(crc >> 8 * i);
}

static void check_header(void)
{
    uint8_t page[RW_PAGE_BYTES];
    static rw_header header, found;
    header = (rw_header){.payload_bytes = 3u << 20, .created_ns = 5, .piece_bytes = RW_PIECE_BYTES, .num_pieces = 4};
    memset(header.key, 1, 32);
    memset(header.namespace_id, 2, 32);
    for (uint32_t i = 0; i < 4; i++)
        header.crcs[i] = i;
    rw_record_pack(&header, page);
    CHECK(!rw_record_parse(page, &found));
    CHECK(!memcmp(&header, &found, sizeof header));
    uint64_t random = 3;
    for (int i = 0; i < 200000; i++) {
        rw_record_pack(&header, page);
        const uint64_t at = next_random(&random) % 200;
        page[at] = (uint8_t)next_random(&random);
        if (next_random(&random) % 2)
            memset(page + 16, (int)(next_random(&random) & 255), next_random(&random) % 17);
        if (next_random(&random) % 4)
            sign(page);
        const int error = rw_record_parse(page, &found);
        CHECK(!error || error == -EBADMSG || error == -EPROTONOSUPPORT);
        CHECK(error || (found.num_pieces <= RW_MAX_PIECES && found.piece_bytes % RW_PAGE_BYTES == 0));
    }
}

static void check_scan(void)
{
    char path[256];
    uint64_t found[32], table[64] = {0};
    for (int i = 0; i < 20; i++) {
        snprintf(path, sizeof path, "%s/%02x", folder, i);
        CHECK(!mkdir(path, 0700));
        snprintf(path, sizeof path, "%s/%02x/%02x%062x.rec", folder, i, i, i);
        const int fd = open(path, O_CREAT | O_WRONLY, 0600);
        CHECK(fd >= 0);
        close(fd);
    }
    CHECK(rw_scan(folder, 4, found, 3) == 20);
    CHECK(rw_scan(folder, 4, found, 32) == 20);
    CHECK(rw_index_add(table, 64, found, 20) == 20);
    CHECK(rw_index_add(table, 64, found, 20) == 0);
    CHECK(rw_scan("/does/not/exist", 4, found, 32) == -ENOENT);
}

void check_pure_parts(void)
{
    check_crc();
    check_header();
    check_scan();
}
