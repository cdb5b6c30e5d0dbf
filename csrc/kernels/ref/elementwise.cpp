// Embedding, norms, rotary embedding, activation, gather: ops of one row at a time.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/float_types.h"
#include "kernels/host_ops.h"
#include "kernels/ref/ref_backend.h"
#include "kernels/ref/scalar_math.h"

namespace llmserve {
namespace {

const float* row(const ConstTensor& tensor, int64_t i) {
  return tensor.as<float>() + i * tensor.strides[0];
}
float* row(const Tensor& tensor, int64_t i) { return tensor.as<float>() + i * tensor.strides[0]; }

void rms_norm_row(const float* x, const float* weight, int64_t width, const NormNumbers& norm,
                  float* out) {
  float sum = 0;
  for (int64_t i = 0; i < width; ++i) sum += x[i] * x[i];
  const float factor = ref::norm_factor(sum / static_cast<float>(width), norm);
  for (int64_t i = 0; i < width; ++i) out[i] = ref::v_normed(x[i], factor, weight[i], norm);
}

void layer_norm_row(const float* x, const float* weight, const float* bias, int64_t width,
                    const NormNumbers& norm, float* out) {
  float sum = 0;
  for (int64_t i = 0; i < width; ++i) sum += x[i];
  const float mean = sum / static_cast<float>(width);
  float squares = 0;
  for (int64_t i = 0; i < width; ++i) squares += (x[i] - mean) * (x[i] - mean);
  const float factor = ref::norm_factor(squares / static_cast<float>(width), norm);
  for (int64_t i = 0; i < width; ++i)
    out[i] = ref::v_normed(x[i] - mean, factor, weight[i], norm) + (bias ? bias[i] : 0.0f);
}

}  // namespace

void RefBackend::do_embedding(const EmbeddingArgs& args) {
  for (size_t t = 0; t < args.token_ids.size(); ++t)
    read_table_row(args, args.token_ids[t], row(args.out, static_cast<int64_t>(t)));
  copy_given_rows(args);
}

void RefBackend::do_rms_norm(const RmsNormArgs& args) {
  for (int64_t r = 0; r < num_rows(args.x); ++r) {
    rms_norm_row(row_of(args.x, r), args.weight.as<float>(), args.weight.shape[0], args.numbers,
                 row_of(args.out, r));
  }
}

void RefBackend::do_add_rms_norm(const AddRmsNormArgs& args) {
  const int64_t width = args.x.shape[1];
  for (int64_t t = 0; t < args.x.shape[0]; ++t) {
    float* residual = row(args.residual, t);
    const float* x = row(args.x, t);
    for (int64_t i = 0; i < width; ++i) residual[i] += x[i];
    rms_norm_row(residual, args.weight.as<float>(), width, args.numbers, row(args.out, t));
  }
}

void RefBackend::do_layer_norm(const LayerNormArgs& args) {
  for (int64_t r = 0; r < args.x.shape[0]; ++r) {
    layer_norm_row(row(args.x, r), args.weight.as<float>(), args.bias.as<float>(), args.x.shape[1],
                   args.numbers, row(args.out, r));
  }
}

void RefBackend::do_add(const AddArgs& args) {
  for (int64_t r = 0; r < args.out.shape[0]; ++r)
    for (int64_t i = 0; i < args.out.shape[1]; ++i)
      row(args.out, r)[i] += row(args.x, r)[i] * args.scale;
}

void RefBackend::do_rotary_table(const RotaryTableArgs& args) { compute_rotary_table(args); }

void RefBackend::do_rotary(const RotaryArgs& args) {
  const int64_t half = args.cos_sin.shape[1] / 2;
  for (int64_t t = 0; t < args.heads.shape[0]; ++t) {
    const float* cos = row(args.cos_sin, t);
    const float* sin = cos + half;
    for (int64_t h = 0; h < args.heads.shape[1]; ++h) {
      float* x = row(args.heads, t) + h * args.heads.strides[1];
      if (args.out) {
        float* to = row(args.out, t) + h * args.out.strides[1];
        std::copy_n(x, args.heads.shape[2], to);
        x = to;
      }
      for (int64_t i = 0; i < half; ++i) {
        float& a = args.interleaved ? x[2 * i] : x[i];
        float& b = args.interleaved ? x[2 * i + 1] : x[half + i];
        const float rotated_a = a * cos[i] - b * sin[i];
        const float rotated_b = b * cos[i] + a * sin[i];
        a = rotated_a;
        b = rotated_b;
      }
    }
  }
}

void RefBackend::do_gated_activation(const GatedActivationArgs& args) {
  const int64_t width = args.out.shape[1];
  for (int64_t t = 0; t < args.out.shape[0]; ++t) {
    const float* gate = row(args.gate_up, t);
    const float* up = gate + width;
    float* out = row(args.out, t);
    for (int64_t i = 0; i < width; ++i) out[i] = ref::v_gate(args.activation, gate[i], up[i]);
  }
}

void RefBackend::do_activation(const ActivationArgs& args) {
  for (int64_t t = 0; t < args.x.shape[0]; ++t)
    for (int64_t i = 0; i < args.x.shape[1]; ++i)
      row(args.out, t)[i] = ref::v_activate(args.activation, row(args.x, t)[i]);
}

void RefBackend::do_cap_logits(const CapLogitsArgs& args) {
  const float cap = args.soft_cap;
  for (int64_t s = 0; s < args.logits.shape[0]; ++s) {
    float* x = row(args.logits, s);
    for (int64_t i = 0; i < args.logits.shape[1]; ++i) {
      x[i] *= args.scale;
      if (cap > 0) x[i] = cap * ref::v_tanh(x[i] / cap);
    }
  }
}

void RefBackend::do_gather_rows(const GatherRowsArgs& args) {
  for (size_t s = 0; s < args.rows.size(); ++s) {
    std::memcpy(row(args.out, static_cast<int64_t>(s)), row(args.x, args.rows[s]),
                static_cast<size_t>(args.x.shape[1]) * sizeof(float));
  }
}

int64_t RefBackend::first_non_finite(const ConstTensor& tensor) {
  for (int64_t i = 0; i < tensor.num_elements(); ++i) {
    float value;
    convert_to_f32(tensor, i, 1, &value);
    if (!std::isfinite(value)) return i;
  }
  return -1;
}

std::unique_ptr<Backend> make_ref_backend(const BackendOptions& options) {
  return std::make_unique<RefBackend>(options);
}

}  // namespace llmserve
