/* Work that threads do without the interpreter: an extension makes it, and the threads of _crew.c do it. */
#ifndef TRANSFERD_NATIVE_H
#define TRANSFERD_NATIVE_H
#include <stdatomic.h>

#define NATIVE "transferd.runtime.native" /* the name of the capsule with a Native, which is the first member of what it points to */

/* `one` does an item, without the GIL, in any thread; each item once. The capsule owns all that it needs. */
typedef struct Native Native;
struct Native {
    void (*one)(Native *native, Py_ssize_t item);
    void (*leave)(void);      /* or NULL: called by a thread when it turns to something else, for a while or for good */
    Py_ssize_t count;         /* items */
    int given, shares;        /* the crew's own: threads that were asked for it, and those that are not done */
    _Atomic Py_ssize_t taken; /* so many have been taken by threads; more than `count` once none is left */
    _Atomic Py_ssize_t ended; /* so many have been done */
};
#endif
