/* Preload it: the wall clock of a process is off by the seconds in the file $WALL_CLOCK, read at every look; the monotonic one is not.

   libfaketime 0.9.10 with FAKETIME_DONT_FAKE_MONOTONIC lets clock_nanosleep fail for times of the monotonic clock, Python's time.sleep. */
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long offset_s(void) {
    static const long none;
    static const volatile long *place;
    if (!place) {
        const char *path = getenv("WALL_CLOCK");
        const int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
        const void *mapped = mmap(NULL, sizeof none, PROT_READ, MAP_SHARED, file, 0);
        place = mapped == MAP_FAILED ? &none : mapped;
        close(file);
    }
    return *place;
}

int clock_gettime(clockid_t id, struct timespec *now) {
    const int status = syscall(SYS_clock_gettime, id, now);
    if (!status && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += offset_s();
    return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec exact;
    const int status = clock_gettime(CLOCK_REALTIME, &exact);
    *now = (struct timeval){exact.tv_sec, exact.tv_nsec / 1000};
    return status;
}

time_t time(time_t *place) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (place) *place = now.tv_sec;
    return now.tv_sec;
}
