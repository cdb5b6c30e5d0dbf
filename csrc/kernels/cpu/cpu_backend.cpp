#include "kernels/cpu/cpu_backend.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "core/float_types.h"
#include "kernels/host_ops.h"

namespace llmserve {
namespace {

// Less work than this many elements is not worth a thread: waking one and waiting for it costs a
// microsecond or two.
constexpr int64_t kMinElementsPerThread = 4096;
static_assert(kActivationNames.size() == cpu::kNumActivations);

int64_t row_grain(int64_t width) {
  return std::max<int64_t>(1, kMinElementsPerThread / std::max<int64_t>(1, width));
}

float* row(const Tensor& tensor, int64_t i) { return tensor.as<float>() + i * tensor.strides[0]; }
const float* row(const ConstTensor& tensor, int64_t i) {
  return tensor.as<float>() + i * tensor.strides[0];
}

}  // namespace

CpuBackend::CpuBackend(const BackendOptions& options)
    : isa_(select_cpu_isa(options.isa)),
      kernels_(isa_.kernels()),
      pool_(options.num_threads),
      scratch_(static_cast<size_t>(options.num_threads)) {}

std::string CpuBackend::description() const {
  const int threads = pool_.num_threads();
  return concat("cpu/", isa_.name, ", ", threads, threads == 1 ? " thread" : " threads");
}

int64_t CpuBackend::thread_scratch_bytes(const StepShape& shape) const {
  // Of sample(), and of a row that is normed.
  int64_t floats = std::max(3 * shape.vocab_size, shape.max_in_features);
  // A few rows may take more than many, see linear.inc.
  for (int64_t m = 1; m <= shape.max_tokens; ++m)
    for (const cpu::LinearKernel& linear : {kernels_.linear_f32, kernels_.linear_bf16})
      floats = std::max(floats, linear.scratch_floats(m, shape.max_in_features));
  // Of weights in less than 8 bits.
  if (shape.activation_bytes > 0)
    floats = std::max(floats, cpu::kRoomBytes / static_cast<int64_t>(sizeof(float)));
  if (shape.max_tokens >= kGatedRows) floats += kGatedFloats;
  return std::max(floats * static_cast<int64_t>(sizeof(float)),
                  attention_scratch_bytes(shape.max_tokens, shape));
}

int64_t CpuBackend::scratch_bytes(const StepShape& shape, int num_threads) const {
  return num_threads * thread_scratch_bytes(shape) + attention_partial_bytes() +
         rounded_bytes(shape);
}

void CpuBackend::reserve_scratch(const StepShape& shape) {
  reserve_scratch(thread_scratch_bytes(shape));
  const int64_t bytes = rounded_bytes(shape);
  if (rounded_.num_bytes() < bytes) rounded_ = Buffer(bytes);
}

void CpuBackend::reserve_scratch(int64_t bytes) {
  for (Buffer& buffer : scratch_)
    if (buffer.num_bytes() < bytes) buffer = Buffer(bytes);
  const int64_t partial_bytes = attention_partial_bytes();
  if (partials_.num_bytes() < partial_bytes) partials_ = Buffer(partial_bytes);
}

void CpuBackend::embedding(const EmbeddingArgs& args) {
  validate(args);
  pool_.parallel_for(static_cast<int64_t>(args.token_ids.size()), row_grain(args.out.shape[1]),
                     [&](int64_t begin, int64_t end, int) {
                       for (int64_t t = begin; t < end; ++t)
                         read_table_row(args, args.token_ids[static_cast<size_t>(t)],
                                        row(args.out, t));
                     });
  copy_given_rows(args);
}

void CpuBackend::rms_norm(const RmsNormArgs& args) {
  validate(args);
  const int64_t width = args.weight.shape[0];
  pool_.parallel_for(num_rows(args.x), row_grain(width), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      kernels_.rms_norm(row_of(args.x, r), args.weight.as<float>(), width, args.eps,
                        args.weight_offset, row_of(args.out, r));
    }
  });
}

void CpuBackend::add_rms_norm(const AddRmsNormArgs& args) {
  validate(args);
  const int64_t width = args.x.shape[1];
  pool_.parallel_for(args.x.shape[0], row_grain(width), [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      kernels_.add(row(args.residual, t), row(args.x, t), 1.0f, width);
      kernels_.rms_norm(row(args.residual, t), args.weight.as<float>(), width, args.eps,
                        args.weight_offset, row(args.out, t));
    }
  });
}

void CpuBackend::layer_norm(const LayerNormArgs& args) {
  validate(args);
  const int64_t width = args.x.shape[1];
  pool_.parallel_for(args.x.shape[0], row_grain(width), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      kernels_.layer_norm(row(args.x, r), args.weight.as<float>(), args.bias.as<float>(), width,
                          args.eps, args.weight_offset, row(args.out, r));
    }
  });
}

void CpuBackend::add(const AddArgs& args) {
  validate(args);
  const int64_t width = args.out.shape[1];
  pool_.parallel_for(args.out.shape[0], row_grain(width), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r)
      kernels_.add(row(args.out, r), row(args.x, r), args.scale, width);
  });
}

void CpuBackend::rotary_table(const RotaryTableArgs& args) {
  validate(args);
  const int64_t width = args.cos_sin.shape[1];
  pool_.parallel_for(
      args.cos_sin.shape[0], row_grain(16 * width), [&](int64_t begin, int64_t end, int) {
        RotaryTableArgs part = args;
        part.positions =
            args.positions.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
        part.cos_sin = args.cos_sin.slice(0, begin, end - begin);
        compute_rotary_table(part);
      });
}

void CpuBackend::rotary(const RotaryArgs& args) {
  validate(args);
  const int64_t half = args.cos_sin.shape[1] / 2;
  const int64_t heads = args.heads.shape[1];
  pool_.parallel_for(args.heads.shape[0], row_grain(heads * 2 * half),
                     [&](int64_t begin, int64_t end, int) {
                       for (int64_t t = begin; t < end; ++t) {
                         const float* cos = row(args.cos_sin, t);
                         for (int64_t h = 0; h < heads; ++h) {
                           kernels_.rotary(row(args.heads, t) + h * args.heads.strides[1], cos,
                                           cos + half, half, args.interleaved);
                         }
                       }
                     });
}

void CpuBackend::gated_activation(const GatedActivationArgs& args) {
  validate(args);
  const int64_t width = args.out.shape[1];
  const auto kernel = kernels_.gated[static_cast<size_t>(args.activation)];
  pool_.parallel_for(args.out.shape[0], row_grain(width), [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t)
      kernel(row(args.gate_up, t), row(args.gate_up, t) + width, width, row(args.out, t));
  });
}

void CpuBackend::activation(const ActivationArgs& args) {
  validate(args);
  const int64_t width = args.x.shape[1];
  const auto kernel = kernels_.activate[static_cast<size_t>(args.activation)];
  pool_.parallel_for(args.x.shape[0], row_grain(width), [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) kernel(row(args.x, t), width, row(args.out, t));
  });
}

void CpuBackend::cap_logits(const CapLogitsArgs& args) {
  validate(args);
  const int64_t width = args.logits.shape[1];
  pool_.parallel_for(args.logits.shape[0], row_grain(width), [&](int64_t begin, int64_t end, int) {
    for (int64_t s = begin; s < end; ++s)
      kernels_.cap_logits(row(args.logits, s), width, args.scale, args.soft_cap);
  });
}

void CpuBackend::gather_rows(const GatherRowsArgs& args) {
  validate(args);
  const int64_t width = args.x.shape[1];
  pool_.parallel_for(static_cast<int64_t>(args.rows.size()), row_grain(width),
                     [&](int64_t begin, int64_t end, int) {
                       for (int64_t s = begin; s < end; ++s) {
                         std::memcpy(row(args.out, s), row(args.x, args.rows[s]),
                                     static_cast<size_t>(width) * sizeof(float));
                       }
                     });
}

std::unique_ptr<Backend> make_cpu_backend(const BackendOptions& options) {
  return std::make_unique<CpuBackend>(options);
}

}  // namespace llmserve
