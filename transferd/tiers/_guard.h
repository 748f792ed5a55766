/* How the other extensions copy memory that another process may take away: see _guard.c. */
#ifndef TRANSFERD_GUARD_H
#define TRANSFERD_GUARD_H
#include <stdint.h>

typedef struct {
    /* With the GIL, before `run`: 0, or -1 with an exception. */
    int (*ready)(void);
    /* Does the work. Returns 0 when it is done; 1 if memory vanished meanwhile, so that the rest was not done; -1 if this
     * thread cannot be guarded, so that nothing was done. The work takes no lock and calls no Python. */
    int (*run)(void (*work)(void *), void *argument);
    /* Ask this first about an address that cannot be accessed: it returns whether the access may be tried again. */
    void (*ask_first)(int (*mended)(uintptr_t at));
    PyObject *lost; /* the exception for 1: borrowed, for ever */
} Guard;

#ifndef GUARD_ITSELF
static const Guard *guard;

static int import_guard(void)
{
    PyObject *module = PyImport_ImportModule("transferd.tiers._guard"), *held = NULL;

    if (module)
        held = PyObject_GetAttrString(module, "api");
    if (held)
        guard = PyCapsule_GetPointer(held, "transferd.tiers._guard.api");
    Py_XDECREF(held);
    Py_XDECREF(module);
    return guard ? 0 : -1;
}

/* Sets the exception of a `run` that returned another value than 0. */
static void set_lost(int ended)
{
    if (ended > 0)
        PyErr_SetString(guard->lost, "shared memory vanished while it was copied: it was truncated, or it is full");
    else
        PyErr_NoMemory();
}
#endif
#endif
