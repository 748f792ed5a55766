/* XXH3-64 of a payload that is copied in pieces.
 *
 * Without a seed and with its default secret, as https://github.com/Cyan4973/xxHash specifies it (doc/xxhash_spec.md) for
 * inputs of more than 240 bytes. Python's xxhash has the same one, but it takes one buffer a call, keeps the GIL for those of
 * less than 100 KiB (a block has hundreds of parts of 16 to 64 KiB), and cannot copy meanwhile. The length must be a multiple
 * of a stripe, 64 bytes, and so must each piece: then no stripe lies in two pieces.
 */
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__) && !defined(WITHOUT_AVX2) /* the tests also build it without */
#define WITH_AVX2
#include <immintrin.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the checksum is written for little-endian machines; the twin in Python serves the others"
#endif

#define STRIPE 64             /* bytes that go into the accumulators at once */
#define STRIPES_PER_BLOCK 16  /* then the accumulators are scrambled */
#define SECRET 192            /* bytes */
#define AHEAD 4096            /* bytes: how far before its use data is fetched */
#define A_BIT_AHEAD 768       /* the same of shorter parts, behind which other data lies */
#define AT_ONCE 64            /* stripes that are copied, then checked: less than a core's first cache */

static const uint32_t P32_1 = 0x9E3779B1u, P32_2 = 0x85EBCA77u, P32_3 = 0xC2B2AE3Du;
static const uint64_t P64_1 = 0x9E3779B185EBCA87u, P64_2 = 0xC2B2AE3D27D4EB4Fu, P64_3 = 0x165667B19E3779F9u;
static const uint64_t P64_4 = 0x85EBCA77C2B2AE63u, P64_5 = 0x27D4EB2F165667C5u, MIX = 0x165667919E3779F9u;

static const unsigned char secret[SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

#define MOST_ENDS 8

/* What the twin's hasher holds. stripes: how many have been taken. ends: where a checksum of all that is before it is wanted,
 * in stripes, ascending; the last is the end of the payload. sealed: those checksums, as far as it has come. */
typedef struct {
    uint64_t sums[8], stripes, count, ends[MOST_ENDS], sealed[MOST_ENDS];
} State;

static uint64_t word(const void *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static void begin(State *state)
{
    const State fresh = {{P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1}, 0, 0, {0}, {0}};
    *state = fresh;
}

static void add(uint64_t *sums, const unsigned char *data, const unsigned char *key)
{
    for (int i = 0; i < 8; i++) {
        uint64_t value = word(data + 8 * i), keyed = value ^ word(key + 8 * i);
        sums[i ^ 1] += value;
        sums[i] += (keyed & 0xFFFFFFFFu) * (keyed >> 32);
    }
}

static void scramble(uint64_t *sums)
{
    for (int i = 0; i < 8; i++) {
        uint64_t sum = sums[i];
        sums[i] = (sum ^ (sum >> 47) ^ word(secret + SECRET - STRIPE + 8 * i)) * P32_1;
    }
}

/* `count` stripes, the first of which has the index `index` in the payload. */
static void add_all(uint64_t *sums, const unsigned char *data, uint64_t index, uint64_t count)
{
    for (; count; count--, index++, data += STRIPE) {
        add(sums, data, secret + 8 * (index % STRIPES_PER_BLOCK));
        if (index % STRIPES_PER_BLOCK == STRIPES_PER_BLOCK - 1)
            scramble(sums);
    }
}

#if defined(WITH_AVX2)
#define LOAD(at) _mm256_loadu_si256((const __m256i *)(at))
#define AVX2 __attribute__((target("avx2")))

AVX2 static __m256i added(__m256i sums, __m256i value, const unsigned char *key)
{
    __m256i keyed = _mm256_xor_si256(value, LOAD(key));
    __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
    __m256i swapped = _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(_mm256_add_epi64(sums, swapped), product);
}

AVX2 static __m256i scrambled(__m256i sums, const unsigned char *key)
{
    const __m256i prime = _mm256_set1_epi32((int)P32_1);
    __m256i mixed = _mm256_xor_si256(_mm256_xor_si256(sums, _mm256_srli_epi64(sums, 47)), LOAD(key));
    __m256i low = _mm256_mul_epu32(mixed, prime), high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
    return _mm256_add_epi64(low, _mm256_slli_epi64(high, 32));
}

/* Like add_all, and copies the stripes to `to`; past the caches if that is a multiple of 32, unless it is to be `kept` there. */
AVX2 static void copy_all_avx2(
    uint64_t *sums, unsigned char *to, const unsigned char *data, uint64_t index, uint64_t count, int ahead, int kept)
{
    const int past = (uintptr_t)to % 32 == 0 && !kept;
    __m256i low = LOAD(sums), high = LOAD(sums + 4);
    for (; count; count--, index++, data += STRIPE, to += STRIPE) {
        const unsigned char *key = secret + 8 * (index % STRIPES_PER_BLOCK);
        __m256i first = LOAD(data), second = LOAD(data + 32);
        _mm_prefetch((const char *)data + ahead, _MM_HINT_T0);
        if (past) {
            _mm256_stream_si256((__m256i *)to, first);
            _mm256_stream_si256((__m256i *)(to + 32), second);
        } else {
            _mm256_storeu_si256((__m256i *)to, first);
            _mm256_storeu_si256((__m256i *)(to + 32), second);
        }
        low = added(low, first, key);
        high = added(high, second, key + 32);
        if (index % STRIPES_PER_BLOCK == STRIPES_PER_BLOCK - 1) {
            low = scrambled(low, secret + SECRET - STRIPE);
            high = scrambled(high, secret + SECRET - STRIPE + 32);
        }
    }
    _mm256_storeu_si256((__m256i *)sums, low);
    _mm256_storeu_si256((__m256i *)(sums + 4), high);
    if (past)
        _mm_sfence();
}
#endif

static uint64_t digest(const uint64_t *sums, uint64_t nbytes)
{
    uint64_t sum = nbytes * P64_1;
    for (int i = 0; i < 4; i++) {
        const unsigned char *key = secret + 11 + 16 * i;
        __uint128_t product = (__uint128_t)(sums[2 * i] ^ word(key)) * (sums[2 * i + 1] ^ word(key + 8));
        sum += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    sum ^= sum >> 37;
    sum *= MIX;
    return sum ^ (sum >> 32);
}

static void copy_stripes(State *state, unsigned char *to, const unsigned char *data, uint64_t count, int ahead, int kept)
{
    (void)ahead, (void)kept; /* without AVX2, all copies go through the caches */
#if defined(WITH_AVX2)
    if (__builtin_cpu_supports("avx2"))
        copy_all_avx2(state->sums, to, data, state->stripes, count, ahead, kept);
    else
#endif
        for (uint64_t done = 0, some; done < count; done += some) {
            some = count - done < AT_ONCE ? count - done : AT_ONCE;
            memcpy(to + STRIPE * done, data + STRIPE * done, STRIPE * some);
            add_all(state->sums, to + STRIPE * done, state->stripes + done, some);
        }
    state->stripes += count;
}

/* Copies the payload's next bytes, and takes their checksum in the same pass, so memory is read and written once. A stripe
 * before an end has a key of its own there, and is not followed by a scramble. ahead: AHEAD or A_BIT_AHEAD. kept: whether
 * what is written stays in the caches, because this core is the next to read it.
 */
static void copy_checked(State *state, unsigned char *to, const unsigned char *data, uint64_t nbytes, int ahead, int kept)
{
    uint64_t left = nbytes / STRIPE, some, sums[8], last[STRIPE / 8];

    for (uint64_t i = 0; i < state->count && left; i++) {
        if (state->ends[i] <= state->stripes)
            continue;
        some = state->ends[i] - 1 - state->stripes < left ? state->ends[i] - 1 - state->stripes : left;
        copy_stripes(state, to, data, some, ahead, kept);
        to += STRIPE * some, data += STRIPE * some, left -= some;
        if (!left)
            return;
        memcpy(last, data, STRIPE);
        memcpy(sums, state->sums, sizeof sums);
        add(sums, (const unsigned char *)last, secret + SECRET - STRIPE - 7);
        state->sealed[i] = digest(sums, STRIPE * state->ends[i]);
        copy_stripes(state, to, (const unsigned char *)last, 1, ahead, kept); /* what was checked, not what is there now */
        to += STRIPE, data += STRIPE, left--;
    }
}
