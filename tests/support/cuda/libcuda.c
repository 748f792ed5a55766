/* A libcuda.so.1 that has one function: the one that every other is asked for by name. See abi.py. */
#include <stdint.h>

typedef int (*resolver)(const char *symbol, void **function, int version, uint64_t flags, int *status);

static resolver resolve;

void transferd_serve(resolver with)
{
    resolve = with;
}

int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status)
{
    return resolve ? resolve(symbol, function, version, flags, status) : 3; /* CUDA_ERROR_NOT_INITIALIZED */
}
