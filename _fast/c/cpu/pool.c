/* The thread pool. Protocol:
 *
 *   caller   takes `owner`, fills the job, opens it (`opened` = its number), works, closes it (`opened` = 0), waits for
 *            `active` == 0, releases `owner`.
 *   worker   increments `active`, checks whether a job is open, works on it if so, decrements `active`.
 *
 * "Increment, then check" and "close, then read active" are sequentially consistent. So a worker never reads a job that
 * is being refilled, and a late worker (its core was busy) costs the caller nothing. */
#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__) || defined(__i386__)
#define RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ __volatile__("yield")
#else
#define RELAX() ((void)0)
#endif

enum { MAX_THREADS = 256, SPIN_NANOSECONDS = 40000, WORKER_STACK = 2 << 20 };

static struct {
    pthread_mutex_t owner; /* held by the caller of parallel_for and by pool_set_threads */
    pthread_mutex_t sleep;
    pthread_cond_t wake;
    pthread_t threads[MAX_THREADS];
    int workers; /* running threads, without the caller */
    atomic_int wanted; /* number of threads; 0 until set or first used */
    atomic_int stop;
    atomic_int sleepers;
    range_fn run;
    const void *context;
    long count, grain;
    unsigned long number; /* number of the last job; written only by the owner */
    _Alignas(64) atomic_ulong opened;
    _Alignas(64) atomic_int active;
    _Alignas(64) atomic_long next;
} pool = {.owner = PTHREAD_MUTEX_INITIALIZER, .sleep = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static long nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000L + now.tv_nsec;
}

int pool_cores(void) {
#ifdef __linux__
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 ? (int)online : 1;
}

static void take_ranges(void) {
    range_fn run = pool.run;
    const void *context = pool.context;
    long count = pool.count, grain = pool.grain;
    for (;;) {
        long begin = atomic_fetch_add_explicit(&pool.next, grain, memory_order_relaxed);
        if (begin >= count) return;
        run(context, begin, begin + grain < count ? begin + grain : count);
    }
}

/* Waits for an open job that is not `seen`; returns 0 if the pool stops. */
static unsigned long await_job(unsigned long seen) {
    long deadline = 0;
    for (unsigned turn = 0;; turn++) {
        unsigned long job = atomic_load_explicit(&pool.opened, memory_order_acquire);
        if (job != 0 && job != seen) return job;
        if (atomic_load_explicit(&pool.stop, memory_order_relaxed)) return 0;
        RELAX();
        if ((turn & 31) == 31) {
            long now = nanoseconds();
            if (deadline == 0) deadline = now + SPIN_NANOSECONDS;
            if (now > deadline) break;
        }
    }
    unsigned long job;
    pthread_mutex_lock(&pool.sleep);
    atomic_fetch_add(&pool.sleepers, 1);
    for (;;) {
        job = atomic_load(&pool.opened);
        if ((job != 0 && job != seen) || atomic_load(&pool.stop)) break;
        pthread_cond_wait(&pool.wake, &pool.sleep);
    }
    atomic_fetch_sub(&pool.sleepers, 1);
    pthread_mutex_unlock(&pool.sleep);
    return atomic_load(&pool.stop) ? 0 : job;
}

static void *worker(void *unused) {
    (void)unused;
    unsigned long seen = 0;
    while ((seen = await_job(seen)) != 0) {
        atomic_fetch_add(&pool.active, 1);
        unsigned long job = atomic_load(&pool.opened);
        if (job != 0) {
            seen = job;
            take_ranges();
        }
        atomic_fetch_sub(&pool.active, 1);
    }
    return NULL;
}

static void wake_all(void) {
    if (atomic_load(&pool.sleepers) == 0) return;
    pthread_mutex_lock(&pool.sleep);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.sleep);
}

/* Needs `owner`. */
static void stop_workers(void) {
    atomic_store(&pool.stop, 1);
    wake_all();
    for (int i = 0; i < pool.workers; i++) pthread_join(pool.threads[i], NULL);
    pool.workers = 0;
    atomic_store(&pool.stop, 0);
}

/* Needs `owner`. Fewer threads than wanted are only slower, so a failure to create a thread is no error. */
static void start_workers(void) {
    pthread_attr_t attributes;
    sigset_t all, before; /* other threads of the program handle signals */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, WORKER_STACK);
    while (pool.workers < pool.wanted - 1) {
        if (pthread_create(&pool.threads[pool.workers], &attributes, worker, NULL) != 0) break;
        pool.workers++;
    }
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pool.wanted = pool.workers + 1;
}

/* A forked child has no threads; it starts new threads at its next job. */
static void after_fork(void) {
    pthread_mutex_init(&pool.owner, NULL);
    pthread_mutex_init(&pool.sleep, NULL);
    pthread_cond_init(&pool.wake, NULL);
    atomic_store(&pool.opened, 0);
    atomic_store(&pool.active, 0);
    atomic_store(&pool.sleepers, 0);
    pool.workers = 0;
    pool.wanted = 0;
}

static pthread_key_t scratch_key;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void set_up(void) {
    pthread_key_create(&scratch_key, free);
    pthread_atfork(NULL, NULL, after_fork);
}

void pool_set_threads(int count) {
    pthread_once(&once, set_up);
    if (count < 1) count = pool_cores();
    if (count > MAX_THREADS) count = MAX_THREADS;
    pthread_mutex_lock(&pool.owner);
    if (count != pool.workers + 1) {
        stop_workers();
        pool.wanted = count;
        start_workers();
    }
    pool.wanted = pool.workers + 1;
    pthread_mutex_unlock(&pool.owner);
}

int pool_threads(void) {
    int count = atomic_load(&pool.wanted);
    return count > 0 ? count : pool_cores();
}

void parallel_for(long count, long grain, range_fn run, const void *context) {
    if (count <= 0) return;
    if (count <= grain || pthread_mutex_trylock(&pool.owner) != 0) {
        run(context, 0, count);
        return;
    }
    if (pool.wanted == 0) {
        pthread_once(&once, set_up);
        int cores = pool_cores();
        pool.wanted = cores < MAX_THREADS ? cores : MAX_THREADS;
        start_workers();
    }
    if (pool.workers == 0) {
        run(context, 0, count);
        pthread_mutex_unlock(&pool.owner);
        return;
    }
    pool.run = run;
    pool.context = context;
    pool.count = count;
    pool.grain = grain;
    atomic_store_explicit(&pool.next, 0, memory_order_relaxed);
    atomic_store(&pool.opened, ++pool.number);
    wake_all();
    take_ranges();
    atomic_store(&pool.opened, 0);
    for (unsigned turn = 0; atomic_load(&pool.active) != 0; turn++) {
        /* The worker may have lost its core to another process: yield this one. */
        if (turn > 1000) sched_yield();
        else RELAX();
    }
    pthread_mutex_unlock(&pool.owner);
}

struct scratch {
    size_t bytes;
    char pad[56];
};

void *pool_scratch(size_t bytes) {
    pthread_once(&once, set_up);
    struct scratch *held = pthread_getspecific(scratch_key);
    if (held == NULL || held->bytes < bytes) {
        void *fresh = NULL;
        size_t size = bytes + bytes / 4;
        if (posix_memalign(&fresh, 64, sizeof(struct scratch) + size) != 0) return NULL;
        free(held);
        held = fresh;
        held->bytes = size;
        pthread_setspecific(scratch_key, held);
    }
    return held + 1;
}

void memory_huge(void *start, size_t bytes) {
#if defined(MADV_HUGEPAGE)
    const uintptr_t page = (uintptr_t)2 << 20;
    const uintptr_t begin = ((uintptr_t)start + page - 1) / page * page, end = ((uintptr_t)start + bytes) / page * page;
    if (begin < end) (void)madvise((void *)begin, end - begin, MADV_HUGEPAGE);
#else
    (void)start, (void)bytes;
#endif
}
