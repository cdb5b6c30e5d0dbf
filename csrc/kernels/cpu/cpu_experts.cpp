// Routers of mixtures of experts, and the sums of what experts give: a token at a time.
#include "kernels/cpu/cpu_experts.h"

#include "kernels/cpu/cpu_norm.h"

namespace llmserve {

void route_rows(CpuWorkers& workers, const RouteExpertsArgs& args) {
  const int64_t experts = args.logits.shape[1];
  const int64_t k = args.ids.shape[1];
  workers.reserve_scratch_floats(router_floats(experts));
  // An expert's score is an exponential, and every slot looks at all of them.
  workers.pool().parallel_for(
      args.logits.shape[0], row_grain((8 + k) * experts), [&](int64_t begin, int64_t end, int idx) {
        for (int64_t t = begin; t < end; ++t)
          workers.kernels().route_row(args.logits.as<float>() + t * args.logits.strides[0], experts,
                                      args.choice_bias.as<float>(), args.expert_scales.as<float>(),
                                      &args.numbers, k, args.ids.as<int32_t>() + t * k,
                                      args.weights.as<float>() + t * k,
                                      workers.scratch<float>(idx));
      });
}

void combine_rows(CpuWorkers& workers, const CombineExpertsArgs& args, const int32_t* places) {
  const int64_t k = args.weights.shape[1];
  const int64_t width = args.out.shape[1];
  const int64_t stride = args.x.strides[0];
  workers.pool().parallel_for(
      args.out.shape[0], row_grain(k * width), [&](int64_t begin, int64_t end, int) {
        for (int64_t t = begin; t < end; ++t) {
          float* out = args.out.as<float>() + t * args.out.strides[0];
          const float* x = args.x.as<float>() + (places ? 0 : t * k * stride);
          workers.kernels().combine_row(x, stride, places ? places + t * k : nullptr,
                                        args.weights.as<float>() + t * k, k, width,
                                        args.accumulate ? out : nullptr, out);
        }
      });
}

}  // namespace llmserve
