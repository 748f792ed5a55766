/* Loads a piece of an object into the parts of a block and checks it on the way, without the GIL.
 *
 * The slow twin is BlockInPlace._load_in_python; tests/workers/test_in_place.py runs both over the same objects.
 * Built against the limited API of CPython 3.11, so one build serves every later version.
 *
 * The checksum is XXH3-64 without a seed and with its default secret, as https://github.com/Cyan4973/xxHash specifies it
 * (doc/xxhash_spec.md) for inputs of more than 240 bytes. Python's xxhash has the same one, but it takes one buffer a call,
 * and keeps the GIL for those of less than 100 KiB: a block has hundreds of parts of 16 to 64 KiB. The length must be a
 * multiple of a stripe, 64 bytes, and so must each part: then no stripe lies in two parts.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>
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
#define MOST_PARTS 1024       /* of one piece: IOV_MAX */
#define READ_AT_ONCE 524288   /* bytes of a file that are read, then checked: about a core's second cache */
#define COPY_AT_ONCE 4096     /* bytes of memory that are checked, then copied: less than its first cache */

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

/* What the twin's hasher holds. nbytes: of the whole payload. stripes: how many have been taken. */
typedef struct {
    uint64_t sums[8], nbytes, stripes;
} State;

static uint64_t word(const void *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static void begin(State *state, uint64_t nbytes)
{
    const State fresh = {{P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1}, nbytes, 0};
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

AVX2 static __m256i added(__m256i sums, const unsigned char *data, const unsigned char *key)
{
    __m256i value = LOAD(data), keyed = _mm256_xor_si256(value, LOAD(key));
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

AVX2 static void add_all_avx2(uint64_t *sums, const unsigned char *data, uint64_t index, uint64_t count)
{
    __m256i low = LOAD(sums), high = LOAD(sums + 4);
    for (; count; count--, index++, data += STRIPE) {
        const unsigned char *key = secret + 8 * (index % STRIPES_PER_BLOCK);
        low = added(low, data, key);
        high = added(high, data + 32, key + 32);
        if (index % STRIPES_PER_BLOCK == STRIPES_PER_BLOCK - 1) {
            low = scrambled(low, secret + SECRET - STRIPE);
            high = scrambled(high, secret + SECRET - STRIPE + 32);
        }
    }
    _mm256_storeu_si256((__m256i *)sums, low);
    _mm256_storeu_si256((__m256i *)(sums + 4), high);
}
#endif

/* The payload's next bytes. Its last stripe has a key of its own, and is not followed by a scramble. */
static void take(State *state, const unsigned char *data, uint64_t nbytes)
{
    uint64_t last = state->nbytes / STRIPE - 1, count = nbytes / STRIPE;
    uint64_t usual = state->stripes + count > last ? last - state->stripes : count;
#if defined(WITH_AVX2)
    if (__builtin_cpu_supports("avx2"))
        add_all_avx2(state->sums, data, state->stripes, usual);
    else
#endif
        add_all(state->sums, data, state->stripes, usual);
    if (usual < count)
        add(state->sums, data + STRIPE * usual, secret + SECRET - STRIPE - 7);
    state->stripes += count;
}

static uint64_t digest(const State *state)
{
    uint64_t sum = state->nbytes * P64_1;
    for (int i = 0; i < 4; i++) {
        const unsigned char *key = secret + 11 + 16 * i;
        __uint128_t product = (__uint128_t)(state->sums[2 * i] ^ word(key)) * (state->sums[2 * i + 1] ^ word(key + 8));
        sum += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    sum ^= sum >> 37;
    sum *= MIX;
    return sum ^ (sum >> 32);
}

/* A piece of a block: parts[i] = (offset in block 0, bytes from block to block, bytes). */
typedef struct {
    Py_buffer state, parts;
    unsigned char *at[MOST_PARTS];
    uint64_t nbytes[MOST_PARTS], total;
    int count;
} Piece;

static void release(Piece *piece)
{
    PyBuffer_Release(&piece->parts);
    PyBuffer_Release(&piece->state);
}

static int open_piece(Piece *piece, uint64_t address, PyObject *parts, uint64_t block, PyObject *state)
{
    if (PyObject_GetBuffer(state, &piece->state, PyBUF_WRITABLE) < 0)
        return -1;
    if (PyObject_GetBuffer(parts, &piece->parts, PyBUF_C_CONTIGUOUS) < 0) {
        PyBuffer_Release(&piece->state);
        return -1;
    }
    const int64_t *part = piece->parts.buf;
    Py_ssize_t row = 3 * (Py_ssize_t)sizeof(int64_t);
    if (piece->state.len != sizeof(State) || piece->parts.itemsize != sizeof(int64_t))
        goto wrong;
    if (piece->parts.len % row || piece->parts.len / row > MOST_PARTS)
        goto wrong;
    piece->count = (int)(piece->parts.len / row);
    piece->total = 0;
    for (int i = 0; i < piece->count; i++, part += 3) {
        if (part[2] <= 0 || part[2] % STRIPE)
            goto wrong;
        piece->at[i] = (unsigned char *)(uintptr_t)(address + (uint64_t)part[0] + (uint64_t)part[1] * block);
        piece->nbytes[i] = (uint64_t)part[2];
        piece->total += piece->nbytes[i];
    }
    const State *so_far = piece->state.buf;
    if (so_far->stripes * STRIPE + piece->total <= so_far->nbytes)
        return 0;
wrong:
    release(piece);
    PyErr_SetString(PyExc_ValueError, "the state or the parts of a piece are wrong");
    return -1;
}

static PyObject *new_state(PyObject *module, PyObject *args)
{
    unsigned long long nbytes;
    State state;

    (void)module;
    if (!PyArg_ParseTuple(args, "K", &nbytes))
        return NULL;
    if (nbytes <= 240 || nbytes % STRIPE) {
        PyErr_SetString(PyExc_ValueError, "a payload must have more than 240 bytes and be a multiple of 64");
        return NULL;
    }
    begin(&state, nbytes);
    return PyByteArray_FromStringAndSize((const char *)&state, sizeof state);
}

static PyObject *checksum(PyObject *module, PyObject *args)
{
    PyObject *given;
    Py_buffer state;

    (void)module;
    if (!PyArg_ParseTuple(args, "O", &given) || PyObject_GetBuffer(given, &state, PyBUF_SIMPLE) < 0)
        return NULL;
    const State *held = state.buf;
    PyObject *result = NULL;
    if (state.len == sizeof(State) && held->stripes * STRIPE == held->nbytes)
        result = PyLong_FromUnsignedLongLong(digest(held));
    else
        PyErr_SetString(PyExc_ValueError, "the payload has not been read to its end");
    PyBuffer_Release(&state);
    return result;
}

/* Reads parts [from, to), and checks them if all of them were in memory. Returns the bytes read, or -1 with errno. */
static ssize_t read_parts(int fd, uint64_t offset, Piece *piece, int from, int to)
{
    struct iovec into[MOST_PARTS];
    uint64_t wanted = 0;
    ssize_t got;

    for (int i = from; i < to; i++) {
        into[i - from].iov_base = piece->at[i];
        into[i - from].iov_len = piece->nbytes[i];
        wanted += piece->nbytes[i];
    }
    do
        got = preadv2(fd, into, to - from, (off_t)offset, RWF_NOWAIT);
    while (got < 0 && errno == EINTR);
    if (got < 0 && (errno == EAGAIN || errno == EOPNOTSUPP || errno == ENOSYS || errno == EINVAL))
        return 0; /* not in memory; or a file system that cannot say so */
    if (got >= 0 && (uint64_t)got == wanted)
        for (int i = from; i < to; i++)
            take(piece->state.buf, piece->at[i], piece->nbytes[i]);
    return got;
}

static PyObject *read_file(PyObject *module, PyObject *args)
{
    int fd, from = 0, error = 0;
    unsigned long long offset, address, block;
    PyObject *parts, *state;
    Piece piece;
    uint64_t done = 0, wanted;

    (void)module;
    if (!PyArg_ParseTuple(args, "iKKOKO", &fd, &offset, &address, &parts, &block, &state) ||
        open_piece(&piece, address, parts, block, state) < 0)
        return NULL;

    Py_BEGIN_ALLOW_THREADS
    while (from < piece.count) {
        int to = from;
        for (wanted = 0; to < piece.count && (to == from || wanted + piece.nbytes[to] <= READ_AT_ONCE); to++)
            wanted += piece.nbytes[to];
        ssize_t got = read_parts(fd, offset + done, &piece, from, to);
        error = got < 0 ? errno : 0;
        done += got < 0 ? 0 : (uint64_t)got;
        if (got < 0 || (uint64_t)got < wanted)
            break;
        from = to;
    }
    Py_END_ALLOW_THREADS

    release(&piece);
    if (!error)
        return PyLong_FromUnsignedLongLong(done);
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *copy_memory(PyObject *module, PyObject *args)
{
    unsigned long long offset, address, block;
    PyObject *given, *parts, *state;
    Py_buffer source;
    Piece piece;

    (void)module;
    if (!PyArg_ParseTuple(args, "OKKOKO", &given, &offset, &address, &parts, &block, &state) ||
        PyObject_GetBuffer(given, &source, PyBUF_SIMPLE) < 0)
        return NULL;
    if (open_piece(&piece, address, parts, block, state) < 0) {
        PyBuffer_Release(&source);
        return NULL;
    }
    uint64_t total = piece.total;
    int whole = offset <= (uint64_t)source.len && total <= (uint64_t)source.len - offset;

    Py_BEGIN_ALLOW_THREADS
    const unsigned char *from = (const unsigned char *)source.buf + offset;
    for (int i = 0; whole && i < piece.count; i++)
        for (uint64_t done = 0; done < piece.nbytes[i];) {
            uint64_t left = piece.nbytes[i] - done, count = left < COPY_AT_ONCE ? left : COPY_AT_ONCE;
            take(piece.state.buf, from, count);
            memcpy(piece.at[i] + done, from, count);
            from += count;
            done += count;
        }
    Py_END_ALLOW_THREADS

    release(&piece);
    PyBuffer_Release(&source);
    return PyLong_FromUnsignedLongLong(whole ? total : 0);
}

static PyMethodDef methods[] = {
    {"new_state", new_state, METH_VARARGS, "new_state(payload_bytes): of a checksum that has seen nothing"},
    {"checksum", checksum, METH_VARARGS, "checksum(state): of the payload, all of which has been read"},
    {"read_file", read_file, METH_VARARGS,
     "read_file(fd, offset, address, parts, block, state): bytes read from the page cache, checked if all were there"},
    {"copy_memory", copy_memory, METH_VARARGS,
     "copy_memory(source, offset, address, parts, block, state): bytes copied and checked; 0 if the source is too short"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_inplace", NULL, -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__inplace(void)
{
    return PyModule_Create(&module);
}
