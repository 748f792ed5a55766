/* A native call whose items wait: each tells that it has begun by a byte in one pipe, and ends with the next byte of another one. For
 * tests/runtime/test_native.py. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <unistd.h>

#include "_native.h"

typedef struct {
    Native native;
    int begun, go;
    char name;
} Held;

static void hold(Native *native, Py_ssize_t item)
{
    const Held *held = (const Held *)native;
    char byte;

    (void)item;
    (void)!write(held->begun, &held->name, 1);
    (void)!read(held->go, &byte, 1);
}

static int left_in;

static void leave(void)
{
    (void)!write(left_in, ".", 1);
}

static void release(PyObject *capsule)
{
    PyMem_Free(PyCapsule_GetPointer(capsule, NATIVE));
}

static PyObject *held(PyObject *module, PyObject *args)
{
    Held *one = PyMem_Calloc(1, sizeof *one);
    int name, leaves;

    (void)module;
    if (!one || !PyArg_ParseTuple(args, "Ciinp", &name, &one->begun, &one->go, &one->native.count, &leaves)) {
        PyMem_Free(one);
        return NULL;
    }
    one->name = (char)name;
    one->native.one = hold;
    if (leaves) {
        left_in = one->begun;
        one->native.leave = leave;
    }
    return PyCapsule_New(one, NATIVE, release);
}

static PyMethodDef methods[] = {
    {"held", held, METH_VARARGS, "held(name, pipe that tells of begun items, pipe that ends items, items, leaves): a native call. leaves: a thread that turns to "
     "something else tells so, too"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "held_call", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_held_call(void)
{
    return PyModule_Create(&module);
}
