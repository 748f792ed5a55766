/* Copies of memory that another process may take away at any moment.
 *
 * An engine's shared memory can be truncated, be sparse on a full file system, or lie on a broken page. Touching it then
 * raises SIGBUS, which ends the process and all engines' transfers. Here it ends one copy: the handler leaves the
 * copy with siglongjmp, and its caller raises an error. The handler stays for the process. A SIGBUS outside of a guarded copy
 * goes to the handler that was there before.
 *
 * A guard costs a system call and a few stores, so there is one for each plan or piece, not for each run. setup.py says for
 * which versions of CPython one build serves.
 */
#define _GNU_SOURCE 1
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>

#define GUARD_ITSELF
#include "_guard.h"

/* The sigjmp_buf that leads out of a thread's copy. It is no __thread variable, because the C library allocates those on
 * a thread's first use, and aborts if there is no memory. */
static pthread_key_t way_out;
static int (*ask_first_of)(uintptr_t at);
static struct sigaction before_ours;
static volatile sig_atomic_t passed_on;

static void on_bus_error(int number, siginfo_t *info, void *context)
{
    int error = errno;

    (void)context;
    if (info->si_code > 0) { /* from the kernel */
        if (ask_first_of && ask_first_of((uintptr_t)info->si_addr)) {
            errno = error;
            return;
        }
        sigjmp_buf *out = pthread_getspecific(way_out);
        if (out)
            siglongjmp(*out, 1);
    }
    /* The handler before ours may pass it on to us, if it was set when ours was already there. */
    struct sigaction next = {.sa_handler = SIG_DFL};
    if (!passed_on)
        next = before_ours;
    passed_on = 1;
    sigaction(number, &next, NULL);
    raise(number);
}

/* Sets our handler, also if another library has set its own since the last call. Guarded by the GIL. */
static int ready(void)
{
    /* NODEFER: who leaves a handler with siglongjmp would otherwise leave the signal blocked. */
    struct sigaction found, ours = {.sa_flags = SA_SIGINFO | SA_RESTART | SA_NODEFER};

    if (sigaction(SIGBUS, NULL, &found) == 0) {
        if ((found.sa_flags & SA_SIGINFO) && found.sa_sigaction == on_bus_error)
            return 0;
        before_ours = found;
        ours.sa_sigaction = on_bus_error;
        sigemptyset(&ours.sa_mask);
        if (sigaction(SIGBUS, &ours, NULL) == 0)
            return 0;
    }
    PyErr_SetFromErrno(PyExc_OSError);
    return -1;
}

static int run(void (*work)(void *), void *argument)
{
    sigjmp_buf out;

    if (pthread_setspecific(way_out, &out) != 0)
        return -1;
    if (sigsetjmp(out, 0) == 0) {
        work(argument);
        pthread_setspecific(way_out, NULL);
        return 0;
    }
    pthread_setspecific(way_out, NULL);
    return 1;
}

static void ask_first(int (*mended)(uintptr_t at))
{
    ask_first_of = mended;
}

static Guard api = {ready, run, ask_first, NULL};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_guard", NULL, -1, NULL, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__guard(void)
{
    PyObject *errors = NULL, *capsule = NULL, *made = NULL;

    if (!api.lost) {
        if (!(errors = PyImport_ImportModule("transferd.errors")))
            return NULL;
        api.lost = PyObject_GetAttrString(errors, "MemoryLost");
        Py_DECREF(errors);
        if (!api.lost)
            return NULL;
        if (pthread_key_create(&way_out, NULL) != 0) {
            Py_CLEAR(api.lost);
            PyErr_SetString(PyExc_ImportError, "this process already has PTHREAD_KEYS_MAX keys of thread-specific data");
            return NULL;
        }
    }
    if ((capsule = PyCapsule_New(&api, "transferd.tiers._guard.api", NULL)) && (made = PyModule_Create(&module)) &&
        PyModule_AddObject(made, "api", capsule) == 0)
        return made;
    Py_XDECREF(capsule);
    Py_XDECREF(made);
    return NULL;
}
