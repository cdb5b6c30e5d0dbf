// The part of NCCL's C interface that is used here, declared by ourselves: the build needs no NCCL,
// and the library is found at run time (nccl_library.h). The numbers are those of the public
// interface since NCCL 2.18; where the build finds the real header, nccl_api_check.cpp compares
// every one of them.
#pragma once

#include <climits>
#include <cstddef>

namespace llmserve::nccl {

using Comm = void*;
using Stream = void*;
using Result = int;
inline constexpr Result kSuccess = 0;
inline constexpr Result kInProgress = 7;

struct UniqueId {
  char bytes[128];
};

inline constexpr int kInt8 = 0;
inline constexpr int kInt32 = 2;
inline constexpr int kFloat16 = 6;
inline constexpr int kFloat32 = 7;
inline constexpr int kBfloat16 = 9;
inline constexpr int kSum = 0;
inline constexpr int kMax = 2;

// The oldest version whose settings these are: they only ever grow, and say how large they are.
inline constexpr int kMinVersion = 21800;
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = kMinVersion;
  int blocking = INT_MIN;  // not set
  int cga_cluster_size = INT_MIN;
  int min_ctas = INT_MIN;
  int max_ctas = INT_MIN;
  const char* net_name = nullptr;
  int split_share = INT_MIN;
};

// The functions, by their names without "nccl".
struct Functions {
  Result (*GetVersion)(int* version);
  Result (*GetUniqueId)(UniqueId*);
  Result (*CommInitRankConfig)(Comm*, int num_ranks, UniqueId, int rank, Config*);
  Result (*CommFinalize)(Comm);
  Result (*CommDestroy)(Comm);
  Result (*CommAbort)(Comm);
  Result (*CommGetAsyncError)(Comm, Result*);
  const char* (*GetErrorString)(Result);
  const char* (*GetLastError)(Comm);
  Result (*AllReduce)(const void* from, void* to, size_t count, int type, int op, Comm, Stream);
  Result (*AllGather)(const void* from, void* to, size_t count_of_part, int type, Comm, Stream);
  Result (*ReduceScatter)(const void* from, void* to, size_t count_of_part, int type, int op, Comm,
                          Stream);
  Result (*Broadcast)(const void* from, void* to, size_t count, int type, int root, Comm, Stream);
  Result (*Reduce)(const void* from, void* to, size_t count, int type, int op, int root, Comm,
                   Stream);
  Result (*Send)(const void* from, size_t count, int type, int to, Comm, Stream);
  Result (*Recv)(void* to, size_t count, int type, int from, Comm, Stream);
  Result (*GroupStart)();  // until GroupEnd, calls begin together
  Result (*GroupEnd)();
};

}  // namespace llmserve::nccl
