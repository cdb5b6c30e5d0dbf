// Ops of one row at a time, dealt to threads.
#include <cstring>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/cpu_norm.h"
#include "kernels/host_ops.h"

namespace llmserve {
namespace {

float* row(const Tensor& tensor, int64_t i) { return tensor.as<float>() + i * tensor.strides[0]; }
const float* row(const ConstTensor& tensor, int64_t i) {
  return tensor.as<float>() + i * tensor.strides[0];
}

}  // namespace

void CpuBackend::do_embedding(const EmbeddingArgs& args) {
  workers_.pool().parallel_for(static_cast<int64_t>(args.token_ids.size()),
                               row_grain(args.out.shape[1]), [&](int64_t begin, int64_t end, int) {
                                 for (int64_t t = begin; t < end; ++t)
                                   read_table_row(args, args.token_ids[static_cast<size_t>(t)],
                                                  row(args.out, t));
                               });
  copy_given_rows(args);
}

void CpuBackend::do_rms_norm(const RmsNormArgs& args) { norm_rows(workers_, args); }

void CpuBackend::do_add_rms_norm(const AddRmsNormArgs& args) {
  const int64_t width = args.x.shape[1];
  workers_.pool().parallel_for(
      args.x.shape[0], row_grain(width), [&](int64_t begin, int64_t end, int) {
        for (int64_t t = begin; t < end; ++t) {
          workers_.kernels().add(row(args.residual, t), row(args.x, t), 1.0f, width);
          workers_.kernels().rms_norm(row(args.residual, t), args.weight.as<float>(), width,
                                      &args.numbers, row(args.out, t));
        }
      });
}

void CpuBackend::do_layer_norm(const LayerNormArgs& args) {
  const int64_t width = args.x.shape[1];
  workers_.pool().parallel_for(
      args.x.shape[0], row_grain(width), [&](int64_t begin, int64_t end, int) {
        for (int64_t r = begin; r < end; ++r) {
          workers_.kernels().layer_norm(row(args.x, r), args.weight.as<float>(),
                                        args.bias.as<float>(), width, &args.numbers,
                                        row(args.out, r));
        }
      });
}

void CpuBackend::do_add(const AddArgs& args) {
  const int64_t width = args.out.shape[1];
  workers_.pool().parallel_for(
      args.out.shape[0], row_grain(width), [&](int64_t begin, int64_t end, int) {
        for (int64_t r = begin; r < end; ++r)
          workers_.kernels().add(row(args.out, r), row(args.x, r), args.scale, width);
      });
}

void CpuBackend::do_rotary_table(const RotaryTableArgs& args) {
  const int64_t width = args.cos_sin.shape[1];
  workers_.pool().parallel_for(
      args.cos_sin.shape[0], row_grain(16 * width), [&](int64_t begin, int64_t end, int) {
        RotaryTableArgs part = args;
        part.positions =
            args.positions.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
        part.cos_sin = args.cos_sin.slice(0, begin, end - begin);
        compute_rotary_table(part);
      });
}

void CpuBackend::do_rotary(const RotaryArgs& args) {
  const int64_t half = args.cos_sin.shape[1] / 2;
  const int64_t heads = args.heads.shape[1];
  workers_.pool().parallel_for(
      args.heads.shape[0], row_grain(heads * 2 * half), [&](int64_t begin, int64_t end, int) {
        for (int64_t t = begin; t < end; ++t) {
          const float* cos = row(args.cos_sin, t);
          for (int64_t h = 0; h < heads; ++h) {
            float* head = row(args.heads, t) + h * args.heads.strides[1];
            if (args.out)
              head = static_cast<float*>(
                  std::memcpy(row(args.out, t) + h * args.out.strides[1], head,
                              static_cast<size_t>(args.heads.shape[2]) * sizeof(float)));
            workers_.kernels().rotary(head, cos, cos + half, half, args.interleaved);
          }
        }
      });
}

void CpuBackend::do_gated_activation(const GatedActivationArgs& args) {
  const int64_t width = args.out.shape[1];
  const auto kernel = workers_.kernels().gated[static_cast<size_t>(args.activation)];
  workers_.pool().parallel_for(
      args.out.shape[0], row_grain(width), [&](int64_t begin, int64_t end, int) {
        for (int64_t t = begin; t < end; ++t)
          kernel(row(args.gate_up, t), row(args.gate_up, t) + width, width, row(args.out, t));
      });
}

void CpuBackend::do_activation(const ActivationArgs& args) {
  const int64_t width = args.x.shape[1];
  const auto kernel = workers_.kernels().activate[static_cast<size_t>(args.activation)];
  workers_.pool().parallel_for(args.x.shape[0], row_grain(width),
                               [&](int64_t begin, int64_t end, int) {
                                 for (int64_t t = begin; t < end; ++t)
                                   kernel(row(args.x, t), width, row(args.out, t));
                               });
}

void CpuBackend::do_cap_logits(const CapLogitsArgs& args) {
  const int64_t width = args.logits.shape[1];
  workers_.pool().parallel_for(
      args.logits.shape[0], row_grain(width), [&](int64_t begin, int64_t end, int) {
        for (int64_t s = begin; s < end; ++s)
          workers_.kernels().cap_logits(row(args.logits, s), width, args.scale, args.soft_cap);
      });
}

void CpuBackend::do_gather_rows(const GatherRowsArgs& args) {
  const int64_t width = args.x.shape[1];
  workers_.pool().parallel_for(static_cast<int64_t>(args.rows.size()), row_grain(width),
                               [&](int64_t begin, int64_t end, int) {
                                 for (int64_t s = begin; s < end; ++s) {
                                   std::memcpy(row(args.out, s), row(args.x, args.rows[s]),
                                               static_cast<size_t>(width) * sizeof(float));
                                 }
                               });
}

}  // namespace llmserve
