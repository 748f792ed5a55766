/* Executes a copy plan: runs of (source offset, target offset, byte count), the GIL released throughout.
 *
 * The slow twin is hostcopy.copy_runs_python; tests/tiers/test_hostcopy.py proves that both agree.
 * Large plans are copied past the caches (docs/files.md). setup.py says for which versions of CPython one build serves.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#include "_guard.h"
#if defined(__x86_64__) && !defined(WITHOUT_AVX2) /* the tests also build it without */
#define WITH_AVX2
#include <immintrin.h>
#endif

#define LARGE 1048576 /* bytes of a plan: more than a core's own caches hold, so what it writes would not stay in them */
#define LONG 1024     /* bytes of a run that is worth more than a call of memcpy */
#define AHEAD 768     /* bytes: how far before its use data is fetched */

#if defined(WITH_AVX2)
/* memcpy reads each line that it writes, unless the whole copy is larger than a run ever is. This does not. */
__attribute__((target("avx2"))) static void copy_past_caches(char *to, const char *from, size_t count)
{
    size_t head = -(uintptr_t)to % 32, body = (count - head) / 64 * 64;

    memcpy(to, from, head);
    to += head;
    from += head;
    for (const char *end = from + body; from < end; from += 64, to += 64) {
        __m256i first = _mm256_loadu_si256((const __m256i *)from), second = _mm256_loadu_si256((const __m256i *)(from + 32));
        _mm_prefetch(from + AHEAD, _MM_HINT_T0);
        _mm256_stream_si256((__m256i *)to, first);
        _mm256_stream_si256((__m256i *)(to + 32), second);
    }
    memcpy(to, from, count - head - body);
}
#endif

static void copy_all(char *to, const char *from, const int64_t *run, const int64_t *end)
{
#if defined(WITH_AVX2)
    int64_t total = 0;
    for (const int64_t *one = run; one < end; one += 3)
        total += one[2];
    if (total >= LARGE && __builtin_cpu_supports("avx2")) {
        for (; run < end; run += 3)
            if (run[2] >= LONG)
                copy_past_caches(to + run[1], from + run[0], (size_t)run[2]);
            else
                memcpy(to + run[1], from + run[0], (size_t)run[2]);
        _mm_sfence();
        return;
    }
#endif
    for (; run < end; run += 3)
        memcpy(to + run[1], from + run[0], (size_t)run[2]);
}

typedef struct {
    char *to;
    const char *from;
    const int64_t *run, *end;
} Plan;

static void copy_plan(void *given)
{
    const Plan *plan = given;
    copy_all(plan->to, plan->from, plan->run, plan->end);
}

static PyObject *copy_runs(PyObject *module, PyObject *args)
{
    unsigned long long source, target;
    PyObject *table;
    Py_buffer runs;

    (void)module;
    if (!PyArg_ParseTuple(args, "KKO", &source, &target, &table))
        return NULL;
    if (PyObject_GetBuffer(table, &runs, PyBUF_C_CONTIGUOUS) < 0)
        return NULL;
    if (runs.itemsize != sizeof(int64_t) || runs.len % (3 * (Py_ssize_t)sizeof(int64_t)) != 0) {
        PyBuffer_Release(&runs);
        PyErr_SetString(PyExc_ValueError, "runs must be int64 [n, 3], C-contiguous");
        return NULL;
    }
    const int64_t *run = runs.buf;
    Plan plan = {(char *)(uintptr_t)target, (const char *)(uintptr_t)source, run, run + runs.len / (Py_ssize_t)sizeof(int64_t)};
    if (guard->ready() < 0) {
        PyBuffer_Release(&runs);
        return NULL;
    }
    int ended;

    Py_BEGIN_ALLOW_THREADS
    ended = guard->run(copy_plan, &plan);
    Py_END_ALLOW_THREADS

    PyBuffer_Release(&runs);
    if (ended == 0)
        Py_RETURN_NONE;
    set_lost(ended);
    return NULL;
}

static PyMethodDef methods[] = {
    {"copy_runs", copy_runs, METH_VARARGS,
     "copy_runs(source_address, target_address, runs): copy int64 [n, 3] runs without the GIL"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_copyruns", NULL, -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__copyruns(void)
{
    if (import_guard() < 0)
        return NULL;
    return PyModule_Create(&module);
}
