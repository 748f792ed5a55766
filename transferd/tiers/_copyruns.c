/* Executes a copy plan: runs of (source offset, target offset, byte count), the GIL released throughout.
 *
 * The slow twin is hostcopy.copy_runs_python; tests/tiers/test_hostcopy.py proves that both agree.
 * Large plans are copied past the caches (docs/files.md). setup.py says for which versions of CPython one build serves.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#include "../runtime/_native.h"
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

/* runs: the caller releases it. */
static int open_plan(PyObject *args, Plan *plan, Py_buffer *runs)
{
    unsigned long long source, target;
    PyObject *table;

    if (!PyArg_ParseTuple(args, "KKO", &source, &target, &table) || PyObject_GetBuffer(table, runs, PyBUF_C_CONTIGUOUS) < 0)
        return -1;
    const int64_t *run = runs->buf;
    *plan = (Plan){(char *)(uintptr_t)target, (const char *)(uintptr_t)source, run, run + runs->len / (Py_ssize_t)sizeof(int64_t)};
    if (runs->itemsize != sizeof(int64_t) || runs->len % (3 * (Py_ssize_t)sizeof(int64_t)) != 0)
        PyErr_SetString(PyExc_ValueError, "runs must be int64 [n, 3], C-contiguous");
    else if (guard->ready() == 0)
        return 0;
    PyBuffer_Release(runs);
    return -1;
}

static PyObject *ended(int how)
{
    if (how == 0)
        Py_RETURN_NONE;
    set_lost(how);
    return NULL;
}

static PyObject *copy_runs(PyObject *module, PyObject *args)
{
    Py_buffer runs;
    Plan plan;
    int how;

    (void)module;
    if (open_plan(args, &plan, &runs) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    how = guard->run(copy_plan, &plan);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&runs);
    return ended(how);
}

/* A copy that any thread may do. */
typedef struct {
    Native native;
    Plan plan;
    Py_buffer runs;
    int how; /* as guard->run returns it */
} Prepared;

static void copy_prepared(Native *native, Py_ssize_t item)
{
    Prepared *copy = (Prepared *)native;

    (void)item;
    copy->how = guard->run(copy_plan, &copy->plan);
}

static void free_prepared(PyObject *capsule)
{
    Prepared *copy = PyCapsule_GetPointer(capsule, NATIVE);

    PyBuffer_Release(&copy->runs);
    PyMem_Free(copy);
}

static PyObject *prepared(PyObject *module, PyObject *args)
{
    Prepared *copy = PyMem_Calloc(1, sizeof *copy);
    PyObject *capsule;

    (void)module;
    if (!copy)
        return PyErr_NoMemory();
    copy->native = (Native){.one = copy_prepared, .count = 1};
    if (open_plan(args, &copy->plan, &copy->runs) == 0) {
        if ((capsule = PyCapsule_New(copy, NATIVE, free_prepared)))
            return capsule;
        PyBuffer_Release(&copy->runs);
    }
    PyMem_Free(copy);
    return NULL;
}

static PyObject *check(PyObject *module, PyObject *capsule)
{
    const Prepared *copy = PyCapsule_GetPointer(capsule, NATIVE);

    (void)module;
    return copy ? ended(copy->how) : NULL;
}

static PyMethodDef methods[] = {
    {"copy_runs", copy_runs, METH_VARARGS,
     "copy_runs(source_address, target_address, runs): copy int64 [n, 3] runs without the GIL"},
    {"prepared", prepared, METH_VARARGS, "prepared(source_address, target_address, runs): the same as a native call (_native.h)"},
    {"check", check, METH_O, "check(native): raise what `copy_runs` would have raised, once the call has ended"},
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
