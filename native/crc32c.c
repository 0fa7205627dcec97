/* CRC32C (Castagnoli). Hardware: three interleaved streams hide the latency of the instruction (3 cycles, one a cycle),
 * and are combined by shifting a CRC over the zeros that follow it. Chosen once, at run time. */
#include "internal.h"

#include <pthread.h>
#include <string.h>

#define POLYNOMIAL 0x82f63b78u /* reflected */
#define LONG_BYTES 8192u       /* one stream; three of them fit a 32 KiB L1 */
#define SHORT_BYTES 256u

static uint32_t table[8][256];
static uint32_t shift_long[4][256], shift_short[4][256];
static uint32_t (*best)(uint32_t, const uint8_t *, size_t);
static const char *kind = "table";
static pthread_once_t once = PTHREAD_ONCE_INIT;

static uint32_t crc_table(uint32_t crc, const uint8_t *p, size_t n)
{
    for (; n >= 8; n -= 8, p += 8) {
        const uint32_t low = crc ^ ((uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24);
        crc = table[7][low & 255] ^ table[6][low >> 8 & 255] ^ table[5][low >> 16 & 255] ^ table[4][low >> 24] ^
              table[3][p[4]] ^ table[2][p[5]] ^ table[1][p[6]] ^ table[0][p[7]];
    }
    while (n--)
        crc = crc >> 8 ^ table[0][(crc ^ *p++) & 255];
    return crc;
}

/* STEP takes 8 bytes, STEP1 one; both may only be used in functions with their target attribute. */
#if defined(__x86_64__)
#include <nmmintrin.h>
#define HARDWARE_KIND "sse4.2"
#define HARDWARE __attribute__((target("sse4.2")))
#define STEP(crc, word) _mm_crc32_u64((crc), (word))
#define STEP1(crc, byte) _mm_crc32_u8((crc), (byte))
static int has_hardware(void) { return __builtin_cpu_supports("sse4.2"); }
#elif defined(__aarch64__)
#include <sys/auxv.h>
#define HARDWARE_KIND "armv8"
#define HARDWARE __attribute__((target("+crc")))
#define STEP(crc, word) __builtin_aarch64_crc32cx((uint32_t)(crc), (word))
#define STEP1(crc, byte) __builtin_aarch64_crc32cb((crc), (byte))
static int has_hardware(void) { return (getauxval(AT_HWCAP) & (1ul << 7)) != 0; } /* HWCAP_CRC32 */
#endif

#ifdef HARDWARE_KIND
static uint64_t load64(const uint8_t *p)
{
    uint64_t word;
    memcpy(&word, p, sizeof word);
    return word;
}

static uint32_t shift(const uint32_t op[4][256], uint64_t crc)
{
    return op[0][crc & 255] ^ op[1][crc >> 8 & 255] ^ op[2][crc >> 16 & 255] ^ op[3][crc >> 24 & 255];
}

/* Three streams of `length` bytes, one after the other. Fetches what the next call will read: bytes that a device has just
 * written come from memory, and the hardware's own prefetch stops at each page. */
HARDWARE static uint32_t crc_streams(uint32_t crc, const uint8_t *p, size_t length, const uint32_t op[4][256])
{
    const uint8_t *q = p + length, *r = q + length;
    uint64_t a = crc, b = 0, c = 0;
    for (const uint8_t *end = q; p < end; p += 64, q += 64, r += 64) {
        for (unsigned i = 0; i < 64; i += 8) {
            a = STEP(a, load64(p + i));
            b = STEP(b, load64(q + i));
            c = STEP(c, load64(r + i));
        }
        __builtin_prefetch(p + 3 * length);
        __builtin_prefetch(q + 3 * length);
        __builtin_prefetch(r + 3 * length);
    }
    return shift(op, shift(op, a) ^ b) ^ (uint32_t)c;
}

HARDWARE static uint32_t crc_hardware(uint32_t crc, const uint8_t *p, size_t n)
{
    for (; n >= 3 * LONG_BYTES; n -= 3 * LONG_BYTES, p += 3 * LONG_BYTES)
        crc = crc_streams(crc, p, LONG_BYTES, shift_long);
    for (; n >= 3 * SHORT_BYTES; n -= 3 * SHORT_BYTES, p += 3 * SHORT_BYTES)
        crc = crc_streams(crc, p, SHORT_BYTES, shift_short);
    for (; n >= 8; n -= 8, p += 8)
        crc = (uint32_t)STEP(crc, load64(p));
    while (n--)
        crc = STEP1(crc, *p++);
    return crc;
}
#endif

/* a * b modulo the polynomial, all reflected. */
static uint32_t multiply(uint32_t a, uint32_t b)
{
    uint32_t product = 0;
    for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
        if (a & bit)
            product ^= b;
        b = b & 1 ? b >> 1 ^ POLYNOMIAL : b >> 1;
    }
    return product;
}

/* The operator that appends `bytes` zeros: multiplication by x^(8 * bytes), one table a byte of the CRC. */
static void make_shift(uint32_t op[4][256], uint32_t bytes)
{
    uint32_t power = 1u << 31, square = 1u << 30; /* x^0, x^1 */
    for (uint64_t bits = 8ull * bytes; bits; bits >>= 1) {
        if (bits & 1)
            power = multiply(power, square);
        square = multiply(square, square);
    }
    for (uint32_t k = 0; k < 4; k++)
        for (uint32_t v = 0; v < 256; v++)
            op[k][v] = multiply(power, v << 8 * k);
}

static void prepare(void)
{
    for (uint32_t v = 0; v < 256; v++) {
        uint32_t crc = v;
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? crc >> 1 ^ POLYNOMIAL : crc >> 1;
        table[0][v] = crc;
    }
    for (uint32_t v = 0; v < 256; v++)
        for (int k = 1; k < 8; k++)
            table[k][v] = table[k - 1][v] >> 8 ^ table[0][table[k - 1][v] & 255];
    make_shift(shift_long, LONG_BYTES);
    make_shift(shift_short, SHORT_BYTES);
    best = crc_table;
#ifdef HARDWARE_KIND
    if (has_hardware()) {
        best = crc_hardware;
        kind = HARDWARE_KIND;
    }
#endif
}

uint32_t rw_crc32c(uint32_t crc, const void *bytes, size_t length)
{
    pthread_once(&once, prepare);
    return ~best(~crc, bytes, length);
}

uint32_t rw_crc32c_table(uint32_t crc, const void *bytes, size_t length)
{
    pthread_once(&once, prepare);
    return ~crc_table(~crc, bytes, length);
}

const char *rw_crc32c_kind(void)
{
    pthread_once(&once, prepare);
    return kind;
}
