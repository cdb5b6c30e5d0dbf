// Routers of mixtures of experts, and the sums of what experts give.
#include <vector>

#include "kernels/ref/ref_backend.h"
#include "kernels/ref/scalar_math.h"

namespace llmserve {

void RefBackend::do_route_experts(const RouteExpertsArgs& args) {
  const int64_t experts = args.logits.shape[1];
  const int64_t k = args.ids.shape[1];
  std::vector<float> room(static_cast<size_t>(3 * experts));
  for (int64_t t = 0; t < args.logits.shape[0]; ++t)
    ref::route_row(args.logits.as<float>() + t * args.logits.strides[0], experts,
                   args.choice_bias.as<float>(), args.expert_scales.as<float>(), &args.numbers, k,
                   args.ids.as<int32_t>() + t * k, args.weights.as<float>() + t * k, room.data());
}

void RefBackend::do_combine_experts(const CombineExpertsArgs& args) {
  const int64_t k = args.weights.shape[1];
  for (int64_t t = 0; t < args.out.shape[0]; ++t) {
    float* out = args.out.as<float>() + t * args.out.strides[0];
    ref::combine_row(args.x.as<float>() + t * k * args.x.strides[0], args.x.strides[0], nullptr,
                     args.weights.as<float>() + t * k, k, args.out.shape[1],
                     args.accumulate ? out : nullptr, out);
  }
}

}  // namespace llmserve
