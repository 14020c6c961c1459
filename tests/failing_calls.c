// A library to preload that lets the n-th call on files below one folder fail, or end the process.
//
// Each thread counts its own calls, between failing_calls_arm and failing_calls_disarm. A call is
// on the folder by its path, by the open file that it is given, or by the open folder that its
// path is relative to.

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { FAIL_ONCE, FAIL_FROM_THEN_ON, END_PROCESS };
enum { FILES = 1 << 16 };

static char root[4096];
static size_t root_length;
static char watched[FILES];  // open files and folders below the root

static __thread long chosen;   // the number of the call that fails; 0: none is counted
static __thread long counted;
static __thread int how;
static __thread char failed[128];  // name of the first call that failed

void failing_calls_arm(const char *folder, long number, int what) {
    snprintf(root, sizeof root, "%s", folder);
    root_length = strlen(root);
    failed[0] = 0;
    counted = 0;
    how = what;
    chosen = number;
}

long failing_calls_disarm(char *name, size_t size) {
    chosen = 0;
    snprintf(name, size, "%s", failed);
    return counted;
}

static int below(const char *path) {
    return path && root_length && !strncmp(path, root, root_length) &&
           (path[root_length] == '/' || !path[root_length]);
}

static int at(int folder, const char *path) {
    if (path && path[0] == '/') return below(path);
    return folder >= 0 && folder < FILES && watched[folder];
}

static int on(int file) { return file >= 0 && file < FILES && watched[file]; }

static int fails(int concerned, const char *name, const char *path, int error) {
    if (!chosen || !concerned) return 0;
    counted++;
    if (counted != chosen && !(how == FAIL_FROM_THEN_ON && counted > chosen)) return 0;
    if (how == END_PROCESS) kill(getpid(), SIGKILL);
    if (!failed[0]) snprintf(failed, sizeof failed, "%s(%.90s)", name, path ? path : "");
    errno = error;
    return 1;
}

// REAL(result, name, arguments) calls what this library stands before.
#define REAL(result, name, ...)                                         \
    static result (*real)(__VA_ARGS__);                                 \
    if (!real) real = (result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

#define OPEN(name)                                                              \
    int name(const char *path, int flags, ...) {                                \
        REAL(int, #name, const char *, int, ...);                               \
        va_list rest;                                                           \
        va_start(rest, flags);                                                  \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest);                                                           \
        if (fails(below(path), #name, path, EMFILE)) return -1;                 \
        int file = real(path, flags, mode);                                     \
        if (file >= 0 && file < FILES) watched[file] = below(path);             \
        return file;                                                            \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                            \
    int name(int folder, const char *path, int flags, ...) {                    \
        REAL(int, #name, int, const char *, int, ...);                          \
        va_list rest;                                                           \
        va_start(rest, flags);                                                  \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest);                                                           \
        int concerned = at(folder, path);                                       \
        if (fails(concerned, #name, path, EMFILE)) return -1;                   \
        int file = real(folder, path, flags, mode);                             \
        if (file >= 0 && file < FILES) watched[file] = concerned;               \
        return file;                                                            \
    }
OPENAT(openat)
OPENAT(openat64)

int close(int file) {
    REAL(int, "close", int);
    int concerned = on(file);
    if (concerned) watched[file] = 0;
    int result = real(file);
    return fails(concerned, "close", 0, EIO) ? -1 : result;
}

// Calls on an open file: result, name, parameters, arguments, the file, the error.
#define ON_FILE(result, name, parameters, types, arguments, file, error) \
    result name parameters {                                             \
        REAL(result, #name, types);                                      \
        if (fails(on(file), #name, 0, error)) return (result)-1;         \
        return real arguments;                                           \
    }
#define LIST(...) __VA_ARGS__
#define ON(result, name, parameters, types, arguments, file, error) \
    ON_FILE(result, name, parameters, LIST types, arguments, file, error)
ON(ssize_t, read, (int f, void *b, size_t n), (int, void *, size_t), (f, b, n), f, EIO)
ON(ssize_t, pread, (int f, void *b, size_t n, off_t o), (int, void *, size_t, off_t), (f, b, n, o), f, EIO)
ON(ssize_t, pread64, (int f, void *b, size_t n, off64_t o), (int, void *, size_t, off64_t), (f, b, n, o), f, EIO)
ON(ssize_t, write, (int f, const void *b, size_t n), (int, const void *, size_t), (f, b, n), f, ENOSPC)
ON(ssize_t, pwrite, (int f, const void *b, size_t n, off_t o), (int, const void *, size_t, off_t), (f, b, n, o), f, ENOSPC)
ON(ssize_t, pwrite64, (int f, const void *b, size_t n, off64_t o), (int, const void *, size_t, off64_t), (f, b, n, o), f, ENOSPC)
ON(ssize_t, writev, (int f, const struct iovec *v, int n), (int, const struct iovec *, int), (f, v, n), f, ENOSPC)
ON(int, ftruncate, (int f, off_t n), (int, off_t), (f, n), f, EIO)
ON(int, ftruncate64, (int f, off64_t n), (int, off64_t), (f, n), f, EIO)
ON(int, fchmod, (int f, mode_t m), (int, mode_t), (f, m), f, EIO)
ON(int, fstat, (int f, struct stat *s), (int, struct stat *), (f, s), f, ESTALE)
ON(int, fstat64, (int f, struct stat64 *s), (int, struct stat64 *), (f, s), f, ESTALE)

// No power fails here, so nothing is brought to the disk: it would take most of the time.
int fsync(int file) {
    REAL(int, "fsync", int);
    if (on(file)) return fails(1, "fsync", 0, EIO) ? -1 : 0;
    return real(file);
}

// Calls on a path.
#define OF(result, name, parameters, types, arguments, path, error)         \
    result name parameters {                                                \
        REAL(result, #name, LIST types);                                    \
        if (fails(below(path), #name, path, error)) return (result)-1;      \
        return real arguments;                                              \
    }
OF(int, stat, (const char *p, struct stat *s), (const char *, struct stat *), (p, s), p, ESTALE)
OF(int, stat64, (const char *p, struct stat64 *s), (const char *, struct stat64 *), (p, s), p, ESTALE)
OF(int, lstat, (const char *p, struct stat *s), (const char *, struct stat *), (p, s), p, ESTALE)
OF(int, lstat64, (const char *p, struct stat64 *s), (const char *, struct stat64 *), (p, s), p, ESTALE)
OF(int, truncate, (const char *p, off_t n), (const char *, off_t), (p, n), p, EIO)
OF(int, truncate64, (const char *p, off64_t n), (const char *, off64_t), (p, n), p, EIO)
OF(int, mkdir, (const char *p, mode_t m), (const char *, mode_t), (p, m), p, ENOSPC)
OF(int, rmdir, (const char *p), (const char *), (p), p, EIO)
OF(int, unlink, (const char *p), (const char *), (p), p, EIO)
OF(int, chmod, (const char *p, mode_t m), (const char *, mode_t), (p, m), p, EIO)
OF(int, rename, (const char *p, const char *q), (const char *, const char *), (p, q), p, EIO)

// Calls on a path in an open folder.
#define AT(name, parameters, types, arguments, folder, path, error)         \
    int name parameters {                                                   \
        REAL(int, #name, LIST types);                                       \
        if (fails(at(folder, path), #name, path, error)) return -1;         \
        return real arguments;                                              \
    }
AT(fstatat, (int d, const char *p, struct stat *s, int f), (int, const char *, struct stat *, int), (d, p, s, f), d, p, ESTALE)
AT(fstatat64, (int d, const char *p, struct stat64 *s, int f), (int, const char *, struct stat64 *, int), (d, p, s, f), d, p, ESTALE)
AT(statx, (int d, const char *p, int f, unsigned m, struct statx *s), (int, const char *, int, unsigned, struct statx *), (d, p, f, m, s), d, p, ESTALE)
AT(mkdirat, (int d, const char *p, mode_t m), (int, const char *, mode_t), (d, p, m), d, p, ENOSPC)
AT(unlinkat, (int d, const char *p, int f), (int, const char *, int), (d, p, f), d, p, EIO)
AT(renameat, (int d, const char *p, int e, const char *q), (int, const char *, int, const char *), (d, p, e, q), d, p, EIO)

DIR *opendir(const char *path) {
    REAL(DIR *, "opendir", const char *);
    if (fails(below(path), "opendir", path, EMFILE)) return 0;
    DIR *folder = real(path);
    if (folder && below(path) && dirfd(folder) < FILES) watched[dirfd(folder)] = 1;
    return folder;
}

int closedir(DIR *folder) {
    REAL(int, "closedir", DIR *);
    int file = dirfd(folder);
    if (file >= 0 && file < FILES) watched[file] = 0;
    return real(folder);
}

#define READDIR(entry, name)                                         \
    entry *name(DIR *folder) {                                       \
        REAL(entry *, #name, DIR *);                                 \
        if (fails(on(dirfd(folder)), #name, 0, ESTALE)) return 0;    \
        return real(folder);                                         \
    }
READDIR(struct dirent, readdir)
READDIR(struct dirent64, readdir64)

#define MMAP(name, offset)                                                              \
    void *name(void *place, size_t size, int protect, int flags, int file, offset at) { \
        REAL(void *, #name, void *, size_t, int, int, int, offset);                     \
        if (file >= 0 && fails(on(file), #name, 0, ENOMEM)) return MAP_FAILED;          \
        return real(place, size, protect, flags, file, at);                             \
    }
MMAP(mmap, off_t)
MMAP(mmap64, off64_t)
