#include "kernels/cuda/cuda_backend.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include "core/error.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cuda/argument_views.h"
#include "kernels/cuda/attention/column_plan.h"
#include "kernels/cuda/attention/wgmma_kernels.h"
#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/launch_math.h"
#include "kernels/cuda/linear/quantized.h"
#include "kernels/cuda/linear/wgmma_linear.h"
#include "kernels/cuda/pinned_copies.h"
#include "kernels/host_ops.h"

namespace llmserve::cuda {
namespace {

Transfers::RunOnThreads threads_of(Backend& host) {
  return [&host](int64_t count, const std::function<void(int64_t, int64_t)>& work) {
    host.run_on_host_threads(count, 1, work);
  };
}

// Whether none of some bytes' numbers has all bits of its exponent set; they may be unaligned.
template <class Bits>
bool are_finite(const std::byte* bytes, int64_t num_bytes, Bits exponent) {
  Bits any = 0;  // as many bits as a vector has, instead of a branch
  for (int64_t at = 0; at < num_bytes; at += static_cast<int64_t>(sizeof(Bits))) {
    Bits bits;
    std::memcpy(&bits, bytes + at, sizeof bits);
    any = static_cast<Bits>(any | ((bits & exponent) == exponent ? Bits{1} : Bits{0}));
  }
  return any == 0;
}

bool are_finite(const std::byte* bytes, int64_t num_bytes, DType dtype) {
  if (dtype == DType::kF32) return are_finite<uint32_t>(bytes, num_bytes, 0x7f800000u);
  return are_finite<uint16_t>(bytes, num_bytes, dtype == DType::kBF16 ? 0x7f80 : 0x7c00);
}

// What an environment variable chooses, the first choice by default.
std::string chosen(const char* name, std::initializer_list<std::string_view> choices) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return std::string(*choices.begin());
  if (std::ranges::find(choices, text) != choices.end()) return text;
  std::string expected;
  for (const std::string_view choice : choices)
    expected += concat(expected.empty()                 ? ""
                       : choice == *(choices.end() - 1) ? " or "
                                                        : ", ",
                       choice);
  throw InvalidArgument(concat(name, ": expected ", expected, ", got ", text));
}

}  // namespace

CudaBackend::CudaBackend(const BackendOptions& options, int device)
    : host_(make_cpu_backend(options)),
      memory_(device),
      transfers_(memory_, threads_of(*host_)),
      steps_(memory_, transfers_.pinned(), block_, marks_),
      token_ids_(memory_, block_),
      positions_(memory_, block_),
      slots_(memory_, block_),
      query_starts_(memory_, block_),
      kv_lens_(memory_, block_),
      block_tables_(memory_, block_),
      rows_(memory_, block_),
      sampling_(memory_, block_) {
  memory_.set_upload([this](void* to, const void* from, int64_t num_bytes) {
    transfers_.upload(to, from, num_bytes);
    transfers_.lead_ops();
  });
  cudaDeviceProp properties{};
  check("cudaGetDeviceProperties", cudaGetDeviceProperties(&properties, device));
  device_name_ = concat(properties.name, ", sm_", properties.major, properties.minor);
  const std::string choice =
      chosen("LLMSERVE_CUDA_GEMM", {"auto", "fastest", "plain", "invariant", "wgmma", "cublaslt"});
  const bool is_free = choice == "auto" || choice == "fastest";  // to take any for each shape
  std::string problem = "asked for";
  if (is_free || choice == "cublaslt") cublaslt_ = CublasLt::open(memory_, problem);
  if (choice == "cublaslt" && !cublaslt_)
    throw NotSupported(concat("LLMSERVE_CUDA_GEMM=cublaslt: ", problem));
  uses_mma_ = choice == "invariant" || choice == "wgmma";
  if (uses_mma_ && properties.major < 8)
    throw NotSupported(concat("LLMSERVE_CUDA_GEMM=", choice,
                              ": expected compute capability 8.0 or ", "later, got ", device_name_,
                              "; use plain"));
  uses_gemv_ = is_free;
  uses_mma_gemv_ = uses_gemv_ && properties.major >= 8;
  // Beyond eight rows, or always, the library chooses an algorithm by their number.
  if (is_free) steps_.bound_exact_rows(8);
  if (choice == "cublaslt") steps_.bound_exact_rows(1);
  can_run_integers_ = properties.major >= 8;
  if (cublaslt_ && properties.major * 10 + properties.minor >= 89 &&
      chosen("LLMSERVE_CUDA_FP8", {"auto", "plain"}) == "auto")
    fp8_rows_ = choice == "cublaslt" ? 1 : kFp8MinRows;
  has_mma_ = choice != "plain" && properties.major >= 8;
  if (has_mma_) prepare_mma_linear();
  open_wgmma_linear(choice, properties.major, properties.minor, properties.multiProcessorCount);
  choose_attention(choice, properties.major, properties.minor,
                   static_cast<int64_t>(properties.sharedMemPerBlockOptin));
  steps_.allow_early_starts(chosen("LLMSERVE_CUDA_LAUNCH", {"early", "plain"}) == "early" &&
                            properties.major >= 9 && kernels_wait());
  gemm_description_ =
      concat(uses_gemv_ ? "gemv and " : "",
             !uses_mma_      ? ""
             : wgmma_linear_ ? "wgmma of one order and "
                             : "mma of one order and ",
             cublaslt_ ? cublaslt_->description() : concat("plain matrix products, ", problem),
             cublaslt_ && wgmma_linear_ ? " or wgmma" : "");
}

CudaBackend::~CudaBackend() = default;

// Asked for by name until a GPU has run it: what hangs or faults there takes the device with it.
void CudaBackend::open_wgmma_linear(std::string_view choice, int major, int minor, int num_sms) {
  const bool insists = choice == "wgmma";
  if (!insists && !(choice == "fastest" && cublaslt_)) return;
  std::string problem;
  wgmma_linear_ = WgmmaLinear::open(memory_, major, minor, num_sms, problem);
  // Beside the library it is tried at the first product of more rows than eight.
  if (wgmma_linear_ && insists) problem = wgmma_linear_->find_problem();
  if (problem.empty()) return;
  wgmma_linear_.reset();
  if (insists)
    throw NotSupported(
        concat("LLMSERVE_CUDA_GEMM=wgmma: ", problem, ", got ", device_name_, "; use invariant"));
  wgmma_problem_ += concat(", products without wgmma: ", problem);
}

void CudaBackend::choose_attention(std::string_view gemm, int major, int minor,
                                   int64_t shared_bytes) {
  const std::string choice =
      chosen("LLMSERVE_CUDA_ATTENTION", {"mma", "fastest", "wgmma", "plain"});
  if (choice != "plain" && major >= 8) tiled_shared_bytes_ = shared_bytes;
  const std::string spans = chosen("LLMSERVE_CUDA_DECODE_SPANS", {"one", "two", "enough", "all"});
  decode_spans_ = spans == "two"      ? DecodeSpans::kTwo
                  : spans == "enough" ? DecodeSpans::kEnough
                  : spans == "all"    ? DecodeSpans::kAll
                                      : DecodeSpans::kOne;
  const std::string merge = chosen("LLMSERVE_CUDA_MERGE", {"auto", "last", "kernel"});
  span_merge_ = merge == "last"     ? SpanMerge::kLast
                : merge == "kernel" ? SpanMerge::kKernel
                                    : SpanMerge::kFew;
  const std::string prepare = chosen("LLMSERVE_CUDA_PREPARE", {"auto", "attention", "kernel"});
  preparation_ = prepare == "attention" ? Preparation::kAttention
                 : prepare == "kernel"  ? Preparation::kKernel
                                        : Preparation::kFew;
  holds_codes_ = chosen("LLMSERVE_CUDA_DECODE_F8", {"shared", "registers"}) == "registers";
  const bool promises_bits = uses_mma_ || gemm == "plain";
  const bool has_wgmma = major == 9 && minor == 0 && wgmma_kernels(128).run != nullptr;
  insists_on_wgmma_ = choice == "wgmma";
  if (insists_on_wgmma_ && promises_bits) {
    throw InvalidArgument(
        concat("LLMSERVE_CUDA_ATTENTION=wgmma: the bits of a prompt's tokens are ",
               "not those of decoding, as LLMSERVE_CUDA_GEMM=", gemm, " promises; use mma"));
  }
  if (insists_on_wgmma_ && !has_wgmma) {
    throw NotSupported(concat("LLMSERVE_CUDA_ATTENTION=wgmma: expected compute capability 9.0 and ",
                              "a build for it, got ", device_name_, "; use mma"));
  }
  may_wgmma_ = has_wgmma && (insists_on_wgmma_ || (choice == "fastest" && !promises_bits));
}

std::string CudaBackend::description() const {
  const std::string_view attention = tiled_shared_bytes_ == 0 ? "; plain attention"
                                     : may_wgmma_ ? "; tiled attention, wgmma for prompts"
                                                  : "; tiled attention";
  return concat("cuda (", device_name_, "), ", gemm_description_, attention, wgmma_problem_);
}

DeviceQueue CudaBackend::queue() {
  memory_.make_current();
  memory_.show_to_peers();
  const auto is_done = [this] {
    memory_.make_current();
    const cudaError_t state = cudaStreamQuery(stream());
    if (state != cudaErrorNotReady) check("cudaStreamQuery", state);
    return state == cudaSuccess;
  };
  const auto copy_rows = [this](const RowCopy& copy) {
    memory_.make_current();
    check("cudaMemcpy2DAsync of exchanged rows",
          cudaMemcpy2DAsync(copy.to, static_cast<size_t>(copy.to_stride), copy.from,
                            static_cast<size_t>(copy.from_stride),
                            static_cast<size_t>(copy.row_bytes), static_cast<size_t>(copy.num_rows),
                            cudaMemcpyDeviceToDevice, stream()));
  };
  const auto mark = [this] {
    if (block_.is_captured) return;  // each launch has one behind it
    memory_.make_current();
    marks_.put(stream());
  };
  const auto progress = [this] {
    memory_.make_current();
    return marks_.look();
  };
  return {.stream = stream(),
          .is_done = is_done,
          .copy_rows = copy_rows,
          .mark = mark,
          .progress = progress,
          .forget = [this] { steps_.drop_recorded(); },
          .is_recorded = [this] { return block_.is_captured; }};
}

std::unique_ptr<DeviceCopies> CudaBackend::make_copies(int64_t max_bytes) const {
  return std::make_unique<PinnedCopies>(memory_, max_bytes);
}

int64_t CudaBackend::attention_scratch_bytes(const StepShape& shape) const {
  if (shape.cache_dtype == DType::kF32) return 0;
  if (shape.key_dim == shape.value_dim && shape.group <= kTiledRows && !shape.has_values_in_keys &&
      tiled_fits(shape.key_dim, tiled_shared_bytes_))
    return max_partial_bytes(shape.max_sequences, shape.max_context, shape.num_kv_heads,
                             shape.group, shape.key_dim);
  const ColumnShape columns{.key_width = static_cast<int>(shape.key_dim),
                            .value_width = static_cast<int>(shape.value_dim),
                            .has_values_in_keys = shape.has_values_in_keys,
                            .is_f8 = shape.cache_dtype == DType::kF8E4M3};
  if (!columns_fit(columns, tiled_shared_bytes_)) return 0;
  return max_column_bytes(shape.max_sequences, shape.max_context, shape.num_kv_heads,
                          shape.value_dim);
}

int64_t CudaBackend::op_scratch_bytes(const StepShape& shape) const {
  const bool is_rounded = shape.weight_dtype == DType::kBF16 && (uses_mma_ || cublaslt_);
  // Rows of integers, which this backend rounds up to more than the host does.
  const int64_t integer_bytes =
      shape.activation_bytes > 0 ? shape.activation_bytes + kQuantizedUnit : 0;
  // Of a gated layer's rows that run at a time, what the gate writes lies beside what it reads.
  const int64_t rounded_rows =
      std::max(shape.max_tokens, wgmma_linear_ ? 2 * std::min(shape.max_tokens, kMlpRows) : 0);
  return std::max({is_rounded ? rounded_rows * shape.max_in_features * 2 : 0,
                   shape.max_tokens * integer_bytes, grouped_scratch_bytes(shape.grouped),
                   attention_scratch_bytes(shape)});
}

// Of blocks that are counted as they arrive, however the shape's sequences are split.
int64_t CudaBackend::arrival_bytes(const StepShape& shape) const {
  return tiled_shared_bytes_ > 0
             ? shape.max_sequences * shape.num_kv_heads * static_cast<int64_t>(sizeof(uint32_t))
             : 0;
}

int64_t CudaBackend::scratch_bytes(const StepShape& shape, int) const {
  return op_scratch_bytes(shape) + arrival_bytes(shape) + CudaSteps::device_bytes(shape) +
         (cublaslt_ ? CublasLt::kWorkspaceBytes : 0) +
         (wgmma_linear_ ? WgmmaLinear::kWorkingBytes : 0);
}

void CudaBackend::reserve_scratch(const StepShape& shape) {
  piece_ = Buffer();  // all weights are there
  scratch(op_scratch_bytes(shape));
  arrivals(arrival_bytes(shape) / static_cast<int64_t>(sizeof(uint32_t)));
  if (may_wgmma_ && shape.cache_dtype == DType::kBF16 && shape.key_dim == shape.value_dim) {
    memory_.make_current();
    passes_wgmma(shape.key_dim);
  }
  steps_.reserve(shape);
}

std::byte* CudaBackend::scratch(int64_t num_bytes) {
  if (scratch_.num_bytes() < num_bytes) {
    block_.move();
    scratch_ = Buffer();  // waits for the ops that use it, and both need not fit
    scratch_ = Buffer(num_bytes, memory_);
  }
  return scratch_.data();
}

int64_t CudaBackend::packed_bytes(int64_t out_features, int64_t in_features, DType dtype) const {
  return out_features * in_features * size_bytes(dtype);
}

LinearWeight CudaBackend::pack_linear(std::span<const ConstTensor> parts, DType dtype) {
  return pack(parts, dtype, nullptr);
}

LinearWeight CudaBackend::pack_unchecked(std::span<const ConstTensor> parts, DType dtype,
                                         bool& is_finite) {
  std::atomic<bool> is_good{true};
  LinearWeight weight = pack(parts, dtype, &is_good);
  is_finite = is_good;
  return weight;
}

Buffer CudaBackend::bring_over(const ConstTensor& tensor, bool& is_finite) {
  check_internal(tensor.is_contiguous(), "what is brought over lies in one piece");
  std::atomic<bool> is_good{true};
  Buffer data(tensor.num_bytes(), memory_);
  upload(data.data(), tensor.dtype, tensor, &is_good);
  transfers_.lead_ops();
  is_finite = is_good;
  return data;
}

LinearWeight CudaBackend::pack(std::span<const ConstTensor> parts, DType dtype,
                               std::atomic<bool>* is_finite) {
  const int64_t n = check_linear_parts(parts, dtype);
  const int64_t k = parts[0].shape[1];
  LinearWeight weight{.out_features = n,
                      .in_features = k,
                      .dtype = dtype,
                      .data = Buffer(packed_bytes(n, k, dtype), memory_)};
  std::byte* to = weight.data.data();
  for (const ConstTensor& part : parts) {
    upload(to, dtype, part, is_finite);
    to += part.num_elements() * size_bytes(dtype);
  }
  transfers_.lead_ops();
  return weight;
}

// Values are looked at while a thread has them in its cache.
void CudaBackend::upload(std::byte* to, DType dtype, const ConstTensor& from,
                         std::atomic<bool>* is_finite) {
  constexpr int64_t kLookedAt = int64_t{64} << 10;
  const auto fill = [&](std::byte* piece, int64_t begin, int64_t num_bytes) {
    const std::byte* bytes = static_cast<const std::byte*>(from.data) + begin;
    if (!is_finite) {
      std::memcpy(piece, bytes, static_cast<size_t>(num_bytes));
      return;
    }
    for (int64_t at = 0; at < num_bytes; at += kLookedAt) {
      const int64_t size = std::min(kLookedAt, num_bytes - at);
      std::memcpy(piece + at, bytes + at, static_cast<size_t>(size));
      if (!are_finite(piece + at, size, from.dtype)) *is_finite = false;
    }
  };
  if (from.dtype == dtype) {
    transfers_.upload(to, from.num_bytes(), kStagingBytes, fill);
    return;
  }
  if (piece_.num_bytes() == 0) piece_ = Buffer(kStagingBytes, memory_);
  const int64_t width = size_bytes(from.dtype);
  const auto take = [&](const std::byte* piece, int64_t begin, int64_t num_bytes) {
    convert(piece, storage_of(from.dtype), num_bytes / width,
            to + begin / width * size_bytes(dtype), storage_of(dtype), transfers_.stream());
  };
  transfers_.upload(piece_.data(), from.num_bytes(), kStagingBytes, fill, take);
}

int64_t CudaBackend::first_non_finite(const ConstTensor& tensor) {
  return host_->first_non_finite(tensor);
}

void CudaBackend::do_embedding(const EmbeddingArgs& args) {
  check_internal(!args.blocks, "tables are in floats on a device");
  const auto num_tokens = static_cast<int64_t>(args.token_ids.size());
  check_grid("embedding", num_tokens);
  memory_.make_current();
  cuda::embedding(args.table.data, storage_of(args.table.dtype), args.table.strides[0],
                  token_ids_(args.token_ids), num_tokens, args.table.shape[1], args.scale,
                  rows_of(args.out), stream());
  // Rows of the host, over what the table gave; the runtime has taken them over when it returns.
  const auto row_bytes = static_cast<size_t>(args.table.shape[1]) * sizeof(float);
  for (const GivenRows& given : args.given) {
    check("cudaMemcpy2DAsync of given embeddings",
          cudaMemcpy2DAsync(args.out.as<float>() + given.begin * args.out.strides[0],
                            static_cast<size_t>(args.out.strides[0]) * sizeof(float), given.rows,
                            row_bytes, row_bytes, static_cast<size_t>(given.count),
                            cudaMemcpyHostToDevice, stream()));
  }
}

void CudaBackend::do_rms_norm(const RmsNormArgs& args) {
  const int64_t num_heads = args.x.rank == 3 ? args.x.shape[1] : 1;
  const int64_t num_rows = args.x.shape[0] * num_heads;
  check_grid("rms_norm", num_rows);
  memory_.make_current();
  cuda::rms_norm({.x = rows_of(args.x),
                  .residual = {nullptr, 0},
                  .weight = args.weight.as<float>(),
                  .out = rows_of(args.out),
                  .num_rows = num_rows,
                  .width = args.weight.shape[0],
                  .numbers = args.numbers,
                  .num_heads = num_heads,
                  .x_head_stride = args.x.strides[1],
                  .out_head_stride = args.out.strides[1]},
                 stream());
}

void CudaBackend::do_add_rms_norm(const AddRmsNormArgs& args) {
  check_grid("add_rms_norm", args.x.shape[0]);
  memory_.make_current();
  cuda::rms_norm({.x = rows_of(args.x),
                  .residual = rows_of(args.residual),
                  .weight = args.weight.as<float>(),
                  .out = rows_of(args.out),
                  .num_rows = args.x.shape[0],
                  .width = args.x.shape[1],
                  .numbers = args.numbers},
                 stream());
}

void CudaBackend::do_layer_norm(const LayerNormArgs& args) {
  check_grid("layer_norm", args.x.shape[0]);
  memory_.make_current();
  cuda::layer_norm({.x = rows_of(args.x),
                    .weight = args.weight.as<float>(),
                    .bias = args.bias.as<float>(),
                    .out = rows_of(args.out),
                    .num_rows = args.x.shape[0],
                    .width = args.x.shape[1],
                    .numbers = args.numbers},
                   stream());
}

void CudaBackend::do_add(const AddArgs& args) {
  check_grid("add", args.out.shape[0]);
  memory_.make_current();
  cuda::add(rows_of(args.out), rows_of(args.x), args.out.shape[0], args.out.shape[1], args.scale,
            stream());
}

// A model has one or two, and each stays where it is, as recorded steps need it.
const float* CudaBackend::frequencies(std::span<const float> inv_freq) {
  constexpr size_t kMaxHeld = 8;
  for (IndexUpload& held : frequencies_)
    if (held.has(inv_freq)) return held(inv_freq);
  if (frequencies_.size() < kMaxHeld) frequencies_.emplace_back(memory_, block_);
  return frequencies_.back()(inv_freq);
}

void CudaBackend::do_rotary_table(const RotaryTableArgs& args) {
  check_grid("rotary_table", static_cast<int64_t>(args.positions.size()));
  memory_.make_current();
  cuda::rotary_table(positions_(args.positions), static_cast<int64_t>(args.positions.size()),
                     frequencies(args.inv_freq), static_cast<int64_t>(args.inv_freq.size()),
                     {args.scale, args.growth, args.period}, rows_of(args.cos_sin), stream());
}

void CudaBackend::do_rotary(const RotaryArgs& args) {
  check_grid("rotary", args.heads.shape[0]);
  memory_.make_current();
  cuda::rotary({.heads = args.heads.as<float>(),
                .token_stride = args.heads.strides[0],
                .head_stride = args.heads.strides[1],
                .num_tokens = args.heads.shape[0],
                .num_heads = args.heads.shape[1],
                .cos_sin = rows_of(args.cos_sin),
                .half = args.cos_sin.shape[1] / 2,
                .interleaved = args.interleaved,
                .out = args.out ? args.out.as<float>() : nullptr,
                .out_token_stride = args.out.strides[0],
                .out_head_stride = args.out.strides[1],
                .width = args.heads.shape[2]},
               stream());
}

void CudaBackend::do_gated_activation(const GatedActivationArgs& args) {
  check_grid("gated_activation", args.out.shape[0]);
  memory_.make_current();
  cuda::activation(rows_of(args.gate_up), args.out.shape[0], args.out.shape[1], args.activation,
                   /*is_gated=*/true, rows_of(args.out), stream());
}

void CudaBackend::do_activation(const ActivationArgs& args) {
  check_grid("activation", args.out.shape[0]);
  memory_.make_current();
  cuda::activation(rows_of(args.x), args.x.shape[0], args.x.shape[1], args.activation,
                   /*is_gated=*/false, rows_of(args.out), stream());
}

void CudaBackend::do_cap_logits(const CapLogitsArgs& args) {
  check_grid("cap_logits", args.logits.shape[0]);
  memory_.make_current();
  cuda::cap_logits(rows_of(args.logits), args.logits.shape[0], args.logits.shape[1], args.scale,
                   args.soft_cap, stream());
}

void CudaBackend::do_gather_rows(const GatherRowsArgs& args) {
  const auto num_rows = static_cast<int64_t>(args.rows.size());
  check_grid("gather_rows", num_rows);
  memory_.make_current();
  cuda::gather_rows(rows_of(args.x), rows_(args.rows), num_rows, args.x.shape[1], rows_of(args.out),
                    stream());
}

}  // namespace llmserve::cuda
