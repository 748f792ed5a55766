/* Runs the kernel of tiers/kernels/move_blocks.cu on the CPU, one thread after the other.
 *
 * What a GPU would do wrong silently is found here: each load and store is checked for alignment and
 * against the ranges that exist. Compiled with -DKERNEL="path of the .cu".
 */
#include <stddef.h>
#include <stdint.h>

#define __global__
#define __device__
#define __grid_constant__

typedef struct { unsigned x, y, z, w; } __attribute__((aligned(16))) uint4;
typedef struct { unsigned x, y; } __attribute__((aligned(8))) uint2;
static struct { unsigned x, y, z; } threadIdx, blockIdx, blockDim, gridDim;

struct range {
    uint64_t start, end;
};
struct fault {
    uint64_t kind; /* 0 none, 1 misaligned, 2 read outside, 3 write outside */
    uint64_t address, nbytes;
};

static const struct range *ranges, *last;
static size_t range_count;
static struct fault fault;
static uint64_t accesses[17]; /* by width in bytes */
static unsigned char nowhere[16];

static void *checked(const void *pointer, size_t nbytes, uint64_t outside)
{
    uint64_t address = (uint64_t)(uintptr_t)pointer;

    accesses[nbytes]++;
    if (address % nbytes) {
        if (!fault.kind)
            fault = (struct fault){1, address, nbytes};
        return nowhere;
    }
    if (last && address >= last->start && address + nbytes <= last->end)
        return (void *)(uintptr_t)pointer;
    for (size_t i = 0; i < range_count; i++)
        if (address >= ranges[i].start && address + nbytes <= ranges[i].end) {
            last = ranges + i;
            return (void *)(uintptr_t)pointer;
        }
    if (!fault.kind)
        fault = (struct fault){outside, address, nbytes};
    return nowhere;
}

#define __ldcs(p) (*(__typeof__(*(p)) *)checked((p), sizeof(*(p)), 2))
#define __stcs(p, v) (*(__typeof__(*(p)) *)checked((p), sizeof(*(p)), 3) = (v))

#include KERNEL

/* Launch over the ranges that exist. Not for two threads at once. counts: accesses by width, 17 of them. */
void launch(unsigned grid, unsigned block, const struct move *move, const struct range *existing, uint64_t count,
            struct fault *result, uint64_t *counts)
{
    ranges = existing;
    range_count = count;
    last = 0;
    fault = (struct fault){0, 0, 0};
    for (int i = 0; i < 17; i++)
        accesses[i] = 0;
    gridDim.x = grid;
    blockDim.x = block;
    for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < block; threadIdx.x++)
            move_blocks(*move);
    *result = fault;
    for (int i = 0; i < 17; i++)
        counts[i] = accesses[i];
}

/* What the Python side has to agree with. */
const uint64_t shape[] = {
    TILE, MAX_BLOCKS, sizeof(struct segment), offsetof(struct segment, address), offsetof(struct segment, stride),
    offsetof(struct segment, nbytes), offsetof(struct segment, offset), sizeof(struct move),
    offsetof(struct move, segments), offsetof(struct move, packed), offsetof(struct move, packed_stride),
    offsetof(struct move, first_segment), offsetof(struct move, segment_count), offsetof(struct move, blocks),
    offsetof(struct move, tiles), offsetof(struct move, gather), offsetof(struct move, reserved),
    offsetof(struct move, cache_ids), offsetof(struct move, packed_ids),
};
const uint64_t shape_count = sizeof(shape) / sizeof(shape[0]);
