// NCCL's functions for one rank in host memory, with faults that a test asks for: compiled by
// tests/unit/comm/test_nccl.py, which sets the variables by ctypes.
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

enum { kSuccess = 0, kUnhandledCudaError = 1, kInvalidArgument = 4, kRemoteError = 6, kInProgress = 7 };

struct Config {
  size_t size;
  unsigned magic;
  unsigned version;
  int blocking;
};
struct UniqueId {
  char bytes[128];
};

int fake_version = 22703;
int fake_id_result = kSuccess;
int fake_init_result = kInProgress;
int fake_call_result = kSuccess;
int fake_async_error = kSuccess;
int fake_in_progress = 0;  // looks that find calls under way; -1: all
int fake_calls = 0;
int fake_finalized = 0;
int fake_destroyed = 0;
int fake_aborted = 0;
int fake_rank = -1;
int fake_world_size = -1;
void* fake_stream = 0;
char fake_log[4096];  // what was asked for
static char comm;

int ncclGetVersion(int* version) {
  *version = fake_version;
  return kSuccess;
}
int ncclGetUniqueId(struct UniqueId* id) {
  memset(id->bytes, 7, sizeof(id->bytes));
  return fake_id_result;
}
int ncclCommInitRankConfig(void** out, int world_size, struct UniqueId id, int rank,
                           struct Config* config) {
  if (config->magic != 0xcafebeef || config->blocking != 0 || id.bytes[127] != 7)
    return kInvalidArgument;
  fake_rank = rank;
  fake_world_size = world_size;
  *out = &comm;
  return fake_init_result;
}
int ncclCommGetAsyncError(void* c, int* state) {
  *state = fake_async_error;
  if (fake_in_progress != 0 && fake_async_error == kSuccess) *state = kInProgress;
  if (fake_in_progress > 0) --fake_in_progress;
  return c == &comm ? kSuccess : kInvalidArgument;
}
int ncclCommFinalize(void* c) {
  (void)c;
  ++fake_finalized;
  return kSuccess;
}
int ncclCommDestroy(void* c) {
  (void)c;
  ++fake_destroyed;
  return kSuccess;
}
int ncclCommAbort(void* c) {
  ++fake_aborted;
  return c == &comm ? kSuccess : kInvalidArgument;
}
const char* ncclGetErrorString(int result) {
  return result == kRemoteError ? "remote process exited" : "unhandled cuda error";
}
#ifndef FAKE_WITHOUT_LAST_ERROR
const char* ncclGetLastError(void* c) {
  (void)c;
  return "socket 3 closed";
}
#endif

static void note(const char* format, ...) {
  const size_t used = strlen(fake_log);
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(fake_log + used, sizeof(fake_log) - used, format, arguments);
  va_end(arguments);
}

// Types 0, 6, 7 and 9 are int8, float16, float32 and bfloat16.
static size_t bytes_of(size_t count, int type) { return count * (type == 0 ? 1 : type == 7 ? 4 : 2); }
static int move(const void* from, void* to, size_t count, int type, void* stream) {
  ++fake_calls;
  fake_stream = stream;
  if (fake_call_result == kSuccess) memmove(to, from, bytes_of(count, type));
  return fake_call_result;
}
static int is_op(int op) { return op == 0 || op == 2; }

int ncclAllReduce(const void* from, void* to, size_t count, int type, int op, void* c, void* s) {
  (void)c;
  note("all_reduce %zu type %d op %d;", count, type, op);
  return is_op(op) ? move(from, to, count, type, s) : kInvalidArgument;
}
int ncclAllGather(const void* from, void* to, size_t count, int type, void* c, void* s) {
  (void)c;
  note("all_gather %zu type %d;", count, type);
  return move(from, to, count, type, s);
}
int ncclReduceScatter(const void* from, void* to, size_t count, int type, int op, void* c,
                      void* s) {
  (void)c;
  note("reduce_scatter %zu type %d op %d;", count, type, op);
  return is_op(op) ? move(from, to, count, type, s) : kInvalidArgument;
}
int ncclReduce(const void* from, void* to, size_t count, int type, int op, int root, void* c,
               void* s) {
  (void)c;
  note("reduce %zu type %d op %d root %d;", count, type, op, root);
  if (!is_op(op)) return kInvalidArgument;
  return root == fake_rank ? move(from, to, count, type, s) : fake_call_result;
}
int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, void* c, void* s) {
  (void)c;
  note("broadcast %zu type %d root %d;", count, type, root);
  return root >= 0 && root < fake_world_size ? move(from, to, count, type, s) : kInvalidArgument;
}

// Of messages only those to itself arrive: one, sent before it is asked for.
static const void* sent;
int ncclSend(const void* from, size_t count, int type, int to, void* c, void* s) {
  (void)c;
  note("send %zu type %d to %d;", count, type, to);
  ++fake_calls;
  fake_stream = s;
  if (to == fake_rank) sent = from;
  return fake_call_result;
}
int ncclRecv(void* to, size_t count, int type, int from, void* c, void* s) {
  (void)c;
  note("recv %zu type %d from %d;", count, type, from);
  return from == fake_rank ? move(sent, to, count, type, s) : fake_call_result;
}
int ncclGroupStart(void) {
  note("group;");
  return kSuccess;
}
int ncclGroupEnd(void) {
  note("end;");
  return kSuccess;
}
