/* Moves whole blocks, or some segments of them, between a cache of scattered segments and packed blocks.
 *
 *     cache side    segment s of block b:  segments[s].address + b * segments[s].stride
 *     packed side   segment s of block p:  packed + p * packed_stride + segments[s].offset
 *
 * One launch moves segments first_segment ... first_segment + segment_count - 1 of `blocks` blocks. The
 * block ids travel in the launch itself, so there is no id buffer to fill, to wait for or to free.
 *
 * Work is cut into tiles of TILE bytes of one segment of one block; thread blocks take tiles in turn, so
 * any grid size is right and a small one leaves the other multiprocessors to the engine. So is any address
 * and any byte count: within a tile the kernel uses the widest load that both addresses allow, at most 16
 * bytes; bytes before the first and after the last vector go one by one.
 *
 * Loads and stores are marked streaming (__ldcs, __stcs): these bytes pass through once and should not
 * push the engine's out of the L2 cache.
 *
 * No header is included and the code is C as well as C++, so NVRTC compiles it as it is, and a C compiler
 * with the few definitions of tests/support/cuda/shim.c runs it on the CPU. The struct is mirrored in
 * tiers/cuda/kernel.py; a test compares sizes and offsets.
 */
#define TILE 16384
#define MAX_BLOCKS 448 /* 2 * 448 ids and the rest stay below the 4 KiB that every CUDA version takes as parameters */

struct segment {
    unsigned long long address; /* of block 0 in the cache */
    long long stride;           /* from block to block in the cache */
    long long nbytes;
    long long offset;           /* in a packed block */
};

struct move {
    const struct segment *segments; /* the whole table, in device memory */
    unsigned long long packed;
    long long packed_stride;
    int first_segment;
    int segment_count;
    int blocks;
    int tiles;  /* per segment: those of the longest one; shorter segments leave some empty */
    int gather; /* 1: cache to packed; 0: packed to cache */
    int reserved;
    int cache_ids[MAX_BLOCKS];
    int packed_ids[MAX_BLOCKS];
};

#define COPY(type)                                                        \
    do {                                                                  \
        const type *source = (const type *)from;                          \
        type *target = (type *)to;                                        \
        long long count = nbytes / (long long)sizeof(type);               \
        long long i = thread;                                             \
        for (; i + 3 * threads < count; i += 4 * threads) {               \
            type a = __ldcs(source + i);                                  \
            type b = __ldcs(source + i + threads);                        \
            type c = __ldcs(source + i + 2 * threads);                    \
            type d = __ldcs(source + i + 3 * threads);                    \
            __stcs(target + i, a);                                        \
            __stcs(target + i + threads, b);                              \
            __stcs(target + i + 2 * threads, c);                          \
            __stcs(target + i + 3 * threads, d);                          \
        }                                                                 \
        for (; i < count; i += threads)                                   \
            __stcs(target + i, __ldcs(source + i));                       \
        done = count * (long long)sizeof(type);                           \
    } while (0)

static __device__ void copy_bytes(unsigned char *to, const unsigned char *from, long long nbytes, int thread, int threads)
{
    for (long long i = thread; i < nbytes; i += threads)
        __stcs(to + i, __ldcs(from + i));
}

/* One tile, by all threads of a thread block. */
static __device__ void copy_tile(unsigned char *to, const unsigned char *from, long long nbytes, int thread, int threads)
{
    unsigned apart = (unsigned)(((unsigned long long)to ^ (unsigned long long)from) & 15u);
    unsigned width = apart == 0 ? 16u : apart & (0u - apart); /* the lowest bit in which the addresses differ */
    long long head = (long long)((0ull - (unsigned long long)to) & (width - 1u));
    long long done = 0;

    if (head > nbytes)
        head = nbytes;
    copy_bytes(to, from, head, thread, threads);
    to += head;
    from += head;
    nbytes -= head;
    if (width == 16)
        COPY(uint4);
    else if (width == 8)
        COPY(uint2);
    else if (width == 4)
        COPY(unsigned);
    else if (width == 2)
        COPY(unsigned short);
    copy_bytes(to + done, from + done, nbytes - done, thread, threads);
}

#ifdef __cplusplus
extern "C"
#endif
__global__ void move_blocks(const __grid_constant__ struct move move)
{
    long long items = (long long)move.blocks * move.segment_count * move.tiles;

    for (long long item = blockIdx.x; item < items; item += gridDim.x) {
        long long start = item % move.tiles * TILE;
        long long pair = item / move.tiles;
        int block = (int)(pair / move.segment_count);
        const struct segment segment = move.segments[move.first_segment + (int)(pair % move.segment_count)];
        long long nbytes = segment.nbytes - start;

        if (nbytes <= 0)
            continue;
        if (nbytes > TILE)
            nbytes = TILE;
        unsigned char *cache = (unsigned char *)(segment.address + (unsigned long long)(move.cache_ids[block] * segment.stride + start));
        unsigned char *packed = (unsigned char *)(move.packed + (unsigned long long)(move.packed_ids[block] * move.packed_stride + segment.offset + start));
        if (move.gather)
            copy_tile(packed, cache, nbytes, (int)threadIdx.x, (int)blockDim.x);
        else
            copy_tile(cache, packed, nbytes, (int)threadIdx.x, (int)blockDim.x);
    }
}
