// Every number of nccl_api.h against the real header, where the build finds it.
#if __has_include(<nccl.h>) && __has_include(<cuda_runtime_api.h>)
#include <nccl.h>

#include <type_traits>

#include "comm/nccl_api.h"

namespace llmserve::nccl {

static_assert(sizeof(UniqueId) == sizeof(ncclUniqueId));
static_assert(sizeof(ncclResult_t) == sizeof(Result) && kSuccess == ncclSuccess &&
              kInProgress == ncclInProgress);
static_assert(kInt8 == ncclInt8 && kInt32 == ncclInt32 && kFloat16 == ncclFloat16 &&
              kFloat32 == ncclFloat32 && kBfloat16 == ncclBfloat16);
static_assert(kSum == ncclSum && kMax == ncclMax);
static_assert(Config{}.magic == NCCL_API_MAGIC && INT_MIN == NCCL_CONFIG_UNDEF_INT);
static_assert(offsetof(Config, blocking) == offsetof(ncclConfig_t, blocking));
static_assert(offsetof(Config, net_name) == offsetof(ncclConfig_t, netName));
static_assert(offsetof(Config, split_share) == offsetof(ncclConfig_t, splitShare));
static_assert(sizeof(Config) <= sizeof(ncclConfig_t));

// Same number and kinds of arguments: what differs is the names of pointers and enumerations.
template <class Ours, class Theirs>
inline constexpr bool kIsCalledAlike = false;
template <class... Ours, class... Theirs>
inline constexpr bool kIsCalledAlike<Result (*)(Ours...), ncclResult_t (*)(Theirs...)> =
    sizeof...(Ours) == sizeof...(Theirs) &&
    ((sizeof(Ours) == sizeof(Theirs) && std::is_pointer_v<Ours> == std::is_pointer_v<Theirs>) &&
     ...);
static_assert(
    kIsCalledAlike<decltype(Functions::CommInitRankConfig), decltype(&ncclCommInitRankConfig)>);
static_assert(kIsCalledAlike<decltype(Functions::AllReduce), decltype(&ncclAllReduce)>);
static_assert(kIsCalledAlike<decltype(Functions::AllGather), decltype(&ncclAllGather)>);
static_assert(kIsCalledAlike<decltype(Functions::ReduceScatter), decltype(&ncclReduceScatter)>);
static_assert(kIsCalledAlike<decltype(Functions::Broadcast), decltype(&ncclBroadcast)>);
static_assert(kIsCalledAlike<decltype(Functions::Reduce), decltype(&ncclReduce)>);
static_assert(kIsCalledAlike<decltype(Functions::Send), decltype(&ncclSend)>);
static_assert(kIsCalledAlike<decltype(Functions::Recv), decltype(&ncclRecv)>);
static_assert(kIsCalledAlike<decltype(Functions::GroupStart), decltype(&ncclGroupStart)>);
static_assert(kIsCalledAlike<decltype(Functions::GroupEnd), decltype(&ncclGroupEnd)>);
static_assert(
    kIsCalledAlike<decltype(Functions::CommGetAsyncError), decltype(&ncclCommGetAsyncError)>);

}  // namespace llmserve::nccl
#endif
