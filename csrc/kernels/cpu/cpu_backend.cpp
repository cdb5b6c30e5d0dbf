#include "kernels/cpu/cpu_backend.h"

#include <algorithm>

#include "core/error.h"
#include "kernels/cpu/cpu_experts.h"
#include "kernels/cpu/quantized_packing.h"

namespace llmserve {

std::string CpuBackend::description() const {
  const int threads = workers_.num_threads();
  return concat("cpu/", workers_.isa().name, ", ", threads, threads == 1 ? " thread" : " threads");
}

LinearWeight CpuBackend::pack_linear(std::span<const ConstTensor> parts, DType dtype) {
  return linear_.pack_linear(parts, dtype);
}

LinearWeight CpuBackend::defer_linear(std::span<const ConstTensor> parts, DType dtype) {
  return linear_.defer_linear(parts, dtype);
}

void CpuBackend::pack_rows(LinearRows& rows) { linear_.pack_rows(rows); }

int64_t CpuBackend::packed_bytes(int64_t out_features, int64_t in_features, DType dtype) const {
  return cpu::panels_bytes(out_features, in_features, dtype);
}

LinearWeight CpuBackend::pack_quantized(const LinearFormat& format, int64_t out_features,
                                        int64_t in_features, const QuantizedRowReader& read) {
  return cpu::pack_quantized(workers_, format, out_features, in_features, read);
}

int64_t CpuBackend::packed_bytes(int64_t out_features, int64_t in_features,
                                 const LinearFormat& format) const {
  return cpu::quantized_bytes(format, out_features, in_features);
}

void CpuBackend::run_on_host_threads(int64_t count, int64_t grain,
                                     const std::function<void(int64_t, int64_t)>& work) {
  workers_.pool().parallel_for(count, grain,
                               [&](int64_t begin, int64_t end, int) { work(begin, end); });
}

int64_t CpuBackend::thread_scratch_bytes(const StepShape& shape) const {
  const int64_t floats = std::max({3 * shape.vocab_size, linear_.scratch_floats(shape),
                                   router_floats(shape.grouped.num_weights)}) +
                         CpuLinear::gated_floats(shape);
  return std::max(floats * static_cast<int64_t>(sizeof(float)),
                  attention_.scratch_bytes(shape.max_tokens, shape));
}

int64_t CpuBackend::scratch_bytes(const StepShape& shape, int num_threads) const {
  return num_threads * thread_scratch_bytes(shape) + CpuAttention::partial_bytes() +
         linear_.rounded_bytes(shape) + linear_.grouped_bytes(shape);
}

void CpuBackend::reserve_scratch(const StepShape& shape) {
  workers_.reserve_scratch(thread_scratch_bytes(shape));
  attention_.reserve();
  linear_.reserve(shape);
}

void CpuBackend::do_linear(const LinearArgs& args) { linear_.linear(args); }

void CpuBackend::do_fused_linear(const FusedLinearArgs& args) { linear_.fused_linear(args); }

void CpuBackend::do_fused_mlp(const FusedMlpArgs& args) { linear_.fused_mlp(args); }

void CpuBackend::do_grouped_linear(const GroupedLinearArgs& args) { linear_.grouped_linear(args); }

void CpuBackend::do_fused_experts(const FusedExpertsArgs& args) { linear_.fused_experts(args); }

void CpuBackend::do_route_experts(const RouteExpertsArgs& args) { route_rows(workers_, args); }

void CpuBackend::do_combine_experts(const CombineExpertsArgs& args) {
  combine_rows(workers_, args, nullptr);
}

void CpuBackend::do_paged_attention(const PagedAttentionArgs& args) { attention_.run(args, {}); }

void CpuBackend::do_fused_attention(const FusedAttentionArgs& args) {
  if (args.prepare) do_prepare_qkv(*args.prepare);
  const Tensor& values = args.attention.cache.values;
  RoundedRows between;
  if (values.dtype != DType::kF32 && values.shape[3] % cpu::kPanelWidth == 0)
    between = linear_.rounded_in(args.attention.out.data, args.output);
  attention_.run(args.attention, between);
  linear_.multiply_written(args.output, between);
}

std::unique_ptr<Backend> make_cpu_backend(const BackendOptions& options) {
  return std::make_unique<CpuBackend>(options);
}

}  // namespace llmserve
