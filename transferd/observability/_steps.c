/* The ring of steps of the flight recorder (trace.py): one call stores 24 bytes and leaves no object behind.
 *
 * The slow twin is recorder.PythonSteps; tests/observability/test_recorder.py proves that both agree.
 * Built against the limited API of CPython 3.11, so one build serves every later version.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

typedef struct { /* as trace._STEP: "<dqHhi" */
    double at;
    int64_t task;
    uint16_t what;
    int16_t rank;
    int32_t number;
} Step;

typedef struct {
    PyObject_HEAD
    PyObject *numbers; /* dict: word -> number */
    Step *ring;
    Py_ssize_t capacity, next;
} Steps;

static PyObject *steps_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    Py_ssize_t capacity;
    PyObject *numbers;

    (void)kwargs;
    if (!PyArg_ParseTuple(args, "nO!", &capacity, &PyDict_Type, &numbers))
        return NULL;
    if (capacity < 1) {
        PyErr_SetString(PyExc_ValueError, "a ring needs room for at least one step");
        return NULL;
    }
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Steps *self = (Steps *)alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->ring = PyMem_Calloc((size_t)capacity, sizeof(Step));
    if (self->ring == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    Py_INCREF(numbers);
    self->numbers = numbers;
    self->capacity = capacity;
    return (PyObject *)self;
}

static void steps_dealloc(PyObject *object)
{
    Steps *self = (Steps *)object;
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

    Py_XDECREF(self->numbers);
    PyMem_Free(self->ring);
    release(object);
    Py_DECREF(type);
}

static PyObject *steps_step(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    Steps *self = (Steps *)object;
    struct timespec now;

    if (nargs != 4) {
        PyErr_SetString(PyExc_TypeError, "step(task_id, what, rank, number)");
        return NULL;
    }
    Py_hash_t task = PyObject_Hash(args[0]);
    if (task == -1)
        return NULL;
    PyObject *what = PyDict_GetItemWithError(self->numbers, args[1]);
    if (what == NULL) {
        if (!PyErr_Occurred())
            PyErr_SetObject(PyExc_KeyError, args[1]);
        return NULL;
    }
    long kind = PyLong_AsLong(what), rank = PyLong_AsLong(args[2]), number = PyLong_AsLong(args[3]);
    if (PyErr_Occurred())
        return NULL;
    if (rank < INT16_MIN || rank > INT16_MAX || number < INT32_MIN || number > INT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "a rank is 16 bits wide, a number 32");
        return NULL;
    }
    clock_gettime(CLOCK_MONOTONIC, &now);
    Step *step = &self->ring[self->next];
    step->at = (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
    step->task = (int64_t)task;
    step->what = (uint16_t)kind;
    step->rank = (int16_t)rank;
    step->number = (int32_t)number;
    self->next = self->next + 1 < self->capacity ? self->next + 1 : 0;
    Py_RETURN_NONE;
}

static PyObject *steps_copy(PyObject *object, PyObject *unused)
{
    Steps *self = (Steps *)object;

    (void)unused;
    return PyBytes_FromStringAndSize((const char *)self->ring, self->capacity * (Py_ssize_t)sizeof(Step));
}

static PyMethodDef steps_methods[] = {
    {"step", (PyCFunction)(void (*)(void))steps_step, METH_FASTCALL,
     "step(task_id, what, rank, number): note it with the time of CLOCK_MONOTONIC"},
    {"copy", steps_copy, METH_NOARGS, "copy(): the ring as bytes; places never written are zero"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot steps_slots[] = {
    {Py_tp_new, steps_new},
    {Py_tp_dealloc, steps_dealloc},
    {Py_tp_methods, steps_methods},
    {Py_tp_doc, "Steps(capacity, numbers): the ring of steps; numbers: word -> number"},
    {0, NULL},
};

static PyType_Spec steps_spec = {
    .name = "transferd.observability._steps.Steps",
    .basicsize = sizeof(Steps),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = steps_slots,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_steps", NULL, -1, NULL, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__steps(void)
{
    PyObject *created = PyModule_Create(&module);
    PyObject *type = created == NULL ? NULL : PyType_FromSpec(&steps_spec);

    _Static_assert(sizeof(Step) == 24, "trace._STEP reads 24 bytes");
    if (type == NULL || PyModule_AddObjectRef(created, "Steps", type) < 0) {
        Py_XDECREF(type);
        Py_XDECREF(created);
        return NULL;
    }
    Py_DECREF(type);
    return created;
}
