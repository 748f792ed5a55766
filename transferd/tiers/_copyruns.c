/* Executes a copy plan: runs of (source offset, target offset, byte count), the GIL released throughout.
 *
 * The slow twin is hostcopy.copy_runs_python; tests/tiers/test_hostcopy.py proves that both agree.
 * Built against the limited API of CPython 3.11, so one build serves every later version.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

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
    const int64_t *end = run + runs.len / (Py_ssize_t)sizeof(int64_t);
    const char *from = (const char *)(uintptr_t)source;
    char *to = (char *)(uintptr_t)target;

    Py_BEGIN_ALLOW_THREADS
    for (; run < end; run += 3)
        memcpy(to + run[1], from + run[0], (size_t)run[2]);
    Py_END_ALLOW_THREADS

    PyBuffer_Release(&runs);
    Py_RETURN_NONE;
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
    return PyModule_Create(&module);
}
