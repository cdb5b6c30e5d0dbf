// Preloaded: the n-th call of open, fstat, read or mmap on a file below a folder fails.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_FDS 4096

static char folder[4096];
static char is_below[MAX_FDS];
static int calls_left = -1;  // to the one that fails; -1: none does
static int fault_errno;      // 0: a read gives half of what it could
static int num_faults;

// Called by the test. Counts anew.
void disk_faults_arm(const char* below, int nth, int error) {
  strncpy(folder, below, sizeof(folder) - 1);
  calls_left = nth;
  fault_errno = error;
  num_faults = 0;
}

int disk_faults_count(void) { return num_faults; }

static int fails(void) {
  if (calls_left < 0 || calls_left-- > 0) return 0;
  ++num_faults;
  return 1;
}

static int opened(int fd, const char* path) {
  if (fd >= 0 && fd < MAX_FDS) is_below[fd] = folder[0] && strstr(path, folder) == path;
  return fd;
}

static int open_fails(const char* path) {
  if (!folder[0] || strstr(path, folder) != path || fault_errno == 0 || !fails()) return 0;
  errno = fault_errno;
  return 1;
}

static int fd_fails(int fd) {
  if (fd < 0 || fd >= MAX_FDS || !is_below[fd] || fault_errno == 0 || !fails()) return 0;
  errno = fault_errno;
  return 1;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define DEFINE_OPEN(name)                      \
  int name(const char* path, int flags, ...) { \
    va_list arguments;                         \
    va_start(arguments, flags);                \
    const mode_t mode = va_arg(arguments, mode_t); \
    va_end(arguments);                         \
    if (open_fails(path)) return -1;           \
    return opened(NEXT(name)(path, flags, mode), path); \
  }
DEFINE_OPEN(open)
DEFINE_OPEN(open64)

int fstat(int fd, struct stat* status) { return fd_fails(fd) ? -1 : NEXT(fstat)(fd, status); }
int fstat64(int fd, struct stat64* status) {
  return fd_fails(fd) ? -1 : NEXT(fstat64)(fd, status);
}

ssize_t read(int fd, void* to, size_t size) {
  if (fd_fails(fd)) return -1;
  if (fault_errno == 0 && fd >= 0 && fd < MAX_FDS && is_below[fd] && size > 1 && fails()) size /= 2;
  return NEXT(read)(fd, to, size);
}

void* mmap(void* address, size_t size, int protection, int flags, int fd, off_t offset) {
  if (fd_fails(fd)) return MAP_FAILED;
  return NEXT(mmap)(address, size, protection, flags, fd, offset);
}
void* mmap64(void* address, size_t size, int protection, int flags, int fd, off64_t offset) {
  if (fd_fails(fd)) return MAP_FAILED;
  return NEXT(mmap64)(address, size, protection, flags, fd, offset);
}

int close(int fd) {
  if (fd >= 0 && fd < MAX_FDS) is_below[fd] = 0;
  return NEXT(close)(fd);
}
