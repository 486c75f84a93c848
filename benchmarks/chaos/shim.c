/* Faults in file operations of one rank, by LD_PRELOAD. The variables:
 *   CHAOS_FS_PATH   operations on paths that contain this text count (a file descriptor's path is read from /proc)
 *   CHAOS_FS_OP     only operations of this name: write, fsync, rename, mkdir, unlink, ...; without it, all
 *   CHAOS_FS_RANK   only in the process with this RANK
 *   CHAOS_FS_AT     the operation, counted from 1, at which the fault begins
 *   CHAOS_FS_DO     count | kill | hang | slow | error
 *   CHAOS_FS_MARK   file: written when the fault begins; if it exists at the start of the process, nothing happens
 *   CHAOS_FS_ERRNO  error: the error's number
 *   CHAOS_FS_MS     slow: milliseconds per operation
 *   CHAOS_CLOCK_S   seconds by which the wall clock of that rank is wrong
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static const char *path_part, *only, *action, *mark;
static long at, count, milliseconds, error, skew;
static int ready, active;

static void setup(void) {
    if (ready) return;
    ready = 1;
    const char *rank = getenv("RANK"), *wanted = getenv("CHAOS_FS_RANK");
    if (!rank || !wanted || strcmp(rank, wanted)) return;
    path_part = getenv("CHAOS_FS_PATH");
    only = getenv("CHAOS_FS_OP");
    action = getenv("CHAOS_FS_DO");
    mark = getenv("CHAOS_FS_MARK");
    at = getenv("CHAOS_FS_AT") ? atol(getenv("CHAOS_FS_AT")) : 1;
    milliseconds = getenv("CHAOS_FS_MS") ? atol(getenv("CHAOS_FS_MS")) : 0;
    error = getenv("CHAOS_FS_ERRNO") ? atol(getenv("CHAOS_FS_ERRNO")) : EIO;
    skew = getenv("CHAOS_CLOCK_S") ? atol(getenv("CHAOS_CLOCK_S")) : 0;
    active = path_part && action && mark && (access(mark, F_OK) != 0 || !strcmp(action, "count"));
}

static void write_mark(const char *text) {
    int (*real_open)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
    ssize_t (*real_write)(int, const void *, size_t) = dlsym(RTLD_NEXT, "write");
    int file = real_open(mark, O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (file >= 0) {
        (void)!real_write(file, text, strlen(text));
        close(file);
    }
}

/* Returns 0, or an errno with which the operation fails. */
static int before(const char *path, const char *operation) {
    setup();
    if (!active || !path || !strstr(path, path_part) || (only && strcmp(only, operation))) return 0;
    long number = __atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST);
    char line[PATH_MAX + 64];
    snprintf(line, sizeof line, "%ld %s %s\n", number, operation, path);
    if (!strcmp(action, "count")) {
        write_mark(line);
        return 0;
    }
    if (number < at) return 0;
    if (number == at) write_mark(line);
    if (!strcmp(action, "kill")) raise(SIGKILL);
    while (!strcmp(action, "hang")) pause();
    if (!strcmp(action, "slow")) usleep(milliseconds * 1000);
    return strcmp(action, "error") ? 0 : (int)error;
}

static int before_fd(int fd, const char *operation) {
    setup();
    if (!active || fd < 3) return 0;
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return before(path, operation);
}

static int before_at(int dir, const char *name, const char *operation) {
    setup();
    if (!active) return 0;
    if (dir == AT_FDCWD || name[0] == '/') return before(name, operation);
    char link[64], path[2 * PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length <= 0) return 0;
    snprintf(path + length, PATH_MAX, "/%s", name);
    return before(path, operation);
}

#define REAL(name) __typeof__(name) *real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)
#define TRY(check) do { int code = check; if (code) { errno = code; return -1; } } while (0)

ssize_t write(int fd, const void *data, size_t n) { REAL(write); TRY(before_fd(fd, "write")); return real(fd, data, n); }
ssize_t writev(int fd, const struct iovec *v, int n) { REAL(writev); TRY(before_fd(fd, "writev")); return real(fd, v, n); }
ssize_t pwrite64(int fd, const void *data, size_t n, off64_t o) { REAL(pwrite64); TRY(before_fd(fd, "pwrite")); return real(fd, data, n, o); }
int fsync(int fd) { REAL(fsync); TRY(before_fd(fd, "fsync")); return real(fd); }
int fdatasync(int fd) { REAL(fdatasync); TRY(before_fd(fd, "fdatasync")); return real(fd); }
int ftruncate64(int fd, off64_t n) { REAL(ftruncate64); TRY(before_fd(fd, "ftruncate")); return real(fd, n); }
int rename(const char *a, const char *b) { REAL(rename); TRY(before(b, "rename")); return real(a, b); }
int renameat(int d, const char *a, int e, const char *b) { REAL(renameat); TRY(before_at(e, b, "rename")); return real(d, a, e, b); }
int mkdir(const char *a, mode_t m) { REAL(mkdir); TRY(before(a, "mkdir")); return real(a, m); }
int mkdirat(int d, const char *a, mode_t m) { REAL(mkdirat); TRY(before_at(d, a, "mkdir")); return real(d, a, m); }
int unlink(const char *a) { REAL(unlink); TRY(before(a, "unlink")); return real(a); }
int unlinkat(int d, const char *a, int f) { REAL(unlinkat); TRY(before_at(d, a, "unlink")); return real(d, a, f); }
int rmdir(const char *a) { REAL(rmdir); TRY(before(a, "rmdir")); return real(a); }
int link(const char *a, const char *b) { REAL(link); TRY(before(b, "link")); return real(a, b); }

int clock_gettime(clockid_t clock, struct timespec *t) {
    REAL(clock_gettime);
    setup();
    int result = real(clock, t);
    if (skew && clock == CLOCK_REALTIME) t->tv_sec += skew;
    return result;
}
int gettimeofday(struct timeval *restrict t, void *restrict zone) {
    REAL(gettimeofday);
    setup();
    int result = real(t, zone);
    if (skew) t->tv_sec += skew;
    return result;
}
