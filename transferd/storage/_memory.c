/* Has objects in memory made of blocks that a task lends (_lent.h), or taken by them, as a native call: threads that need no
 * interpreter do it (../runtime/_native.h).
 *
 * What does not go as it usually does is left, and the slow twins in Python say what is wrong with it (memory.py). setup.py says
 * for which versions of CPython one build serves.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../runtime/_native.h"
#include "../tiers/_guard.h"
#include "../workers/_lent.h"

/* One object. number: of its block among the lent ones. done: it has been made, or taken. */
typedef struct {
    Py_ssize_t number;
    Py_buffer data;
    char done;
} Object;

/* run: how many objects an item of the call is. */
typedef struct {
    Native native;
    PyObject *blocks; /* the capsule of `lent` */
    Lent *lent;
    Object *object;
    Py_ssize_t count, run;
    int fills;
} Batch;

static void do_run(Native *native, Py_ssize_t item)
{
    const Batch *batch = (const Batch *)native;
    Object *one = batch->object + item * batch->run, *end = batch->object + batch->count;
    Lent *lent = batch->lent;

    for (Py_ssize_t i = 0; i < batch->run && one < end; i++, one++)
        one->done = (batch->fills ? lent->fill(lent, one->number, one->data.buf, 0) : lent->take(lent, one->number, one->data.buf)) == 1;
}

static void free_batch(PyObject *capsule)
{
    Batch *batch = PyCapsule_GetPointer(capsule, NATIVE);

    while (batch->count)
        PyBuffer_Release(&batch->object[--batch->count].data);
    Py_DECREF(batch->blocks);
    PyMem_Free(batch->object);
    PyMem_Free(batch);
}

static int open_batch(Batch *batch, PyObject *numbers, PyObject *datas)
{
    Py_ssize_t count = PyList_Size(numbers);
    int wrong = 0;

    if (!(batch->object = PyMem_Calloc((size_t)count + 1, sizeof *batch->object))) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count && i < PyList_Size(datas); i++) {
        Object *one = batch->object + i;
        one->number = PyLong_AsSsize_t(PyList_GetItem(numbers, i));
        if (PyErr_Occurred() || PyObject_GetBuffer(PyList_GetItem(datas, i), &one->data, batch->fills ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
            return -1;
        batch->count++;
        wrong |= one->number < 0 || one->number >= batch->lent->count || (size_t)one->data.len != batch->lent->nbytes;
    }
    if (wrong || batch->run < 1 || count != PyList_Size(datas)) {
        PyErr_SetString(PyExc_ValueError, "an object is of none of the lent blocks, or of another length");
        return -1;
    }
    batch->native = (Native){.one = do_run, .count = (count + batch->run - 1) / batch->run};
    return guard->ready();
}

static PyObject *prepared(PyObject *module, PyObject *args)
{
    PyObject *numbers, *datas, *capsule;
    Batch given = {.count = 0}, *batch;

    (void)module;
    if (!PyArg_ParseTuple(args, "OO!O!pn", &given.blocks, &PyList_Type, &numbers, &PyList_Type, &datas, &given.fills,
                          &given.run) ||
        !(given.lent = PyCapsule_GetPointer(given.blocks, LENT)))
        return NULL;
    if (!(batch = PyMem_Malloc(sizeof *batch)))
        return PyErr_NoMemory();
    *batch = given;
    if (!(capsule = PyCapsule_New(batch, NATIVE, free_batch))) {
        PyMem_Free(batch);
        return NULL;
    }
    Py_INCREF(batch->blocks);
    if (open_batch(batch, numbers, datas) == 0)
        return capsule;
    Py_DECREF(capsule);
    return NULL;
}

static PyObject *done(PyObject *module, PyObject *capsule)
{
    const Batch *batch = PyCapsule_GetPointer(capsule, NATIVE);
    PyObject *answers = batch ? PyList_New(batch->count) : NULL;

    (void)module;
    for (Py_ssize_t i = 0; answers && i < batch->count; i++)
        PyList_SetItem(answers, i, PyBool_FromLong(batch->object[i].done));
    return answers;
}

static PyMethodDef methods[] = {
    {"prepared", prepared, METH_VARARGS,
     "prepared(lent, numbers, datas, fills, run): a native call that has objects made of these blocks, in these memories of theirs, "
     "or taken by them; an item of it is a run of so many objects"},
    {"done", done, METH_O, "done(native): for each object whether it has been made, or taken; else it is left"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_memory", NULL, -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__memory(void)
{
    if (import_guard() < 0)
        return NULL;
    return PyModule_Create(&module);
}
