// The CUDA backend: checks arguments, brings the host's integers over, launches the kernels of one
// GPU on one stream. Ops return before they are done; what reads their results on the host waits
// (Memory::copy_to_host, sample).
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/device_queue.h"
#include "kernels/backend.h"
#include "kernels/cuda/cuda_memory.h"
#include "kernels/cuda/index_upload.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/linear/cublaslt.h"
#include "kernels/cuda/linear/quantized.h"
#include "kernels/cuda/queue_marks.h"
#include "kernels/cuda/steps/cuda_steps.h"
#include "kernels/cuda/transfers.h"
#include "kernels/device_copies.h"
#include "kernels/unchecked_packing.h"

namespace llmserve::cuda {

class WgmmaLinear;

class CudaBackend final : public Backend, public UncheckedPacking {
 public:
  // On one of the visible devices. Products, by LLMSERVE_CUDA_GEMM: auto or nothing is mma_gemv or
  // gemv for few rows and, for more, cuBLASLt where it is found; fastest is the same, and the
  // faster of cuBLASLt and wgmma_linear, where that runs; invariant is mma_linear for bf16 weights
  // and plain_linear for others, with the same bits whatever M is; wgmma promises the same, by
  // wgmma_linear, and insists on it; plain is plain_linear for all, with that promise, too;
  // cublaslt is cuBLASLt for all, and insists on it. Throws InvalidArgument, NotSupported,
  // DeviceError. Attention over caches in bf16 and f8 is tiled_attention where that can run,
  // column_attention of other shapes, and paged_attention otherwise. Of those the plain is for all
  // with LLMSERVE_CUDA_ATTENTION=plain. With fastest prompts are wgmma_attention on sm_90 unless
  // products promise bits, once it was found to give what tiled_attention does, and with wgmma that
  // or an error. Many rows of weights in E4M3 whose checkpoint has activations in E4M3 are
  // cuBLASLt's where it runs, but with LLMSERVE_CUDA_FP8=plain. Kernels of recorded steps of few
  // rows start early where the device can do that, but with LLMSERVE_CUDA_LAUNCH=plain.
  explicit CudaBackend(const BackendOptions& options, int device = 0);
  ~CudaBackend() override;

  std::string_view name() const override { return "cuda"; }
  std::string description() const override;
  // The stream of the ops, for as long as this lives.
  DeviceQueue queue();
  // Of its memory. It outlives them.
  std::unique_ptr<DeviceCopies> make_copies(int64_t max_bytes) const;
  Memory& memory() override { return memory_; }
  void run_on_stream(uint64_t stream, const std::function<void()>& work) override {
    memory_.run_on(reinterpret_cast<cudaStream_t>(stream), work);
  }

  // Row-major [N, K] on the device, converted there. On their way when it returns, in front of the
  // ops asked for later.
  LinearWeight pack_linear(std::span<const ConstTensor> parts, DType dtype) override;
  LinearWeight pack_unchecked(std::span<const ConstTensor> parts, DType dtype,
                              bool& is_finite) override;
  Buffer bring_over(const ConstTensor& tensor, bool& is_finite) override;
  int64_t packed_bytes(int64_t out_features, int64_t in_features, DType dtype) const override;
  // Integers of every format that has a kernel, packed on the host's threads.
  bool can_run(const LinearFormat& format) const override;
  LinearWeight pack_quantized(const LinearFormat& format, int64_t out_features, int64_t in_features,
                              const QuantizedRowReader& read) override;
  int64_t packed_bytes(int64_t out_features, int64_t in_features,
                       const LinearFormat& format) const override;
  int64_t first_non_finite(const ConstTensor& tensor) override;
  void run_on_host_threads(int64_t count, int64_t grain,
                           const std::function<void(int64_t, int64_t)>& work) override {
    host_->run_on_host_threads(count, grain, work);
  }

  // Where a graph is kept, nothing of this may move: a larger step would end all graphs.
  int64_t scratch_bytes(const StepShape& shape, int num_threads) const override;
  void reserve_scratch(const StepShape& shape) override;

  Memory& transfer_memory() override { return transfers_.pinned(); }
  int64_t transfer_blocks(const TransferBlocksArgs& args) override {
    return transfers_.transfer_blocks(args);
  }
  bool is_transferred(int64_t id) override { return transfers_.is_transferred(id); }
  void await_transfer(int64_t id) override { transfers_.await_transfer(id); }
  DeviceSteps* steps() override { return &steps_; }
  int64_t mlp_rows() const override { return kMlpRows; }

 private:
  // Products of floats sum in float32. With bf16 weights x is rounded to bf16 first, to nearest
  // even. Of the fused ops, some products norm and gate on the way, and one kernel prepares queries
  // and keys.
#define LLMSERVE_OP(name, Args) void do_##name(const Args& args) override;
#define LLMSERVE_FUSED_OP(name, Args)
#include "kernels/op_list.inc"
  void do_fused_linear(const FusedLinearArgs& args) override;
  void do_fused_mlp(const FusedMlpArgs& args) override;
  void do_prepare_qkv(const PrepareQkvArgs& args) override;
  void do_fused_attention(const FusedAttentionArgs& args) override;

  bool uses_gemv(int64_t num_rows) const { return uses_gemv_ && num_rows <= kGemvMaxRows; }
  bool uses_mma_gemv(const LinearParams& params, const LinearFusion& fusion) const {
    return uses_mma_gemv_ && can_mma_gemv(params, fusion);
  }
  bool uses_cublaslt(const LinearParams& params) const {
    return cublaslt_ && params.in_features > 0;
  }
  // One arithmetic for every number of rows, by wgmma or by mma.
  bool uses_mma(const LinearParams& params) const;
  bool takes_rounded(const LinearParams& params) const {
    return uses_mma(params) || (uses_cublaslt(params) && params.storage == Storage::kBF16);
  }
  // Working memory for x as bf16, [M, K].
  uint16_t* rounded_rows(const LinearParams& params);
  // Of x, or of what `source` makes of its rows.
  void quantized_linear(const LinearArgs& args, const RoundParams* source = nullptr);
  // The same by cuBLASLt, of rows in E4M3; false if that cannot do it.
  bool multiply_fp8(const LinearArgs& args, const RoundParams& rows, const QuantizedLayout& layout);
  void fuse_in_rounding(const FusedLinearArgs& args);
  static RoundedX rounded_x(std::byte* memory, int64_t num_rows, const QuantizedLayout& layout);
  const int32_t* input_order(const LinearWeight& weight);
  // grouped_linear: rows brought together by their weights, in working memory.
  static int64_t grouped_scratch_bytes(const GroupedShape& shape);
  RowGroups group(const GroupedLinearArgs& args, int64_t rows_at_once, std::byte* memory);
  const void* const* grouped_weights(std::span<const LinearWeight* const> weights);
  void grouped_quantized_linear(const GroupedLinearArgs& args);
  // By tensor cores or cuBLASLt, of x as bf16 or, if null, as it is, and then the gate, if there is
  // one; false if neither does this.
  bool multiply(const LinearParams& params, const uint16_t* rounded,
                const GatedActivationArgs* gate = nullptr);
  // Whether wgmma_linear does this product: of those that library's algorithms are chosen for,
  // where it was measured to be faster.
  bool uses_wgmma(const LinearParams& params, const uint16_t* rounded);
  bool is_wgmma_faster(const LinearParams& params, const uint16_t* rounded);
  using WgmmaBucket = std::array<int64_t, 3>;  // N, K, bucket of M
  static WgmmaBucket bucket_of(const LinearParams& params) {
    return {params.out_features, params.in_features, gemm_bucket(params.num_rows)};
  }
  void open_wgmma_linear(std::string_view choice, int major, int minor, int num_sms);
  static LinearFusion fusion_of(const FusedLinearArgs& args);
  bool fuse_in_mma_gemv(const FusedLinearArgs& args);
  void fuse_in_gemv(const FusedLinearArgs& args);
  bool norm_rounded(const FusedLinearArgs& args);
  void round_normed(const RmsNormArgs& norm, uint16_t* to);
  bool fuse_in_wgmma(const FusedMlpArgs& args);
  // At least this many bytes of device memory for the op at hand; grows, and then stays.
  std::byte* scratch(int64_t num_bytes);
  int64_t attention_scratch_bytes(const StepShape& shape) const;
  int64_t op_scratch_bytes(const StepShape& shape) const;
  int64_t arrival_bytes(const StepShape& shape) const;
  const float* frequencies(std::span<const float> inv_freq);
  cudaStream_t stream() const { return memory_.stream(); }
  void choose_attention(std::string_view gemm, int major, int minor, int64_t shared_bytes);
  bool can_tile(const AttentionParams& params) const;
  AttentionParams attention_params(const PagedAttentionArgs& args);
  // What one kernel for all of prepare_qkv takes; none where there is no such kernel.
  std::optional<QkvParams> qkv_params(const PrepareQkvArgs& args);
  // Both ops as one kernel; false where there is none.
  bool attend_unprepared(const PrepareQkvArgs& prepare, const PagedAttentionArgs& args);
  // `unprepared`: null, or what prepares queries, keys and values on the way.
  void attend_in_tiles(const PagedAttentionArgs& args, AttentionParams params,
                       const QkvParams* unprepared);
  uint32_t* arrivals(int64_t count);
  bool can_attend_by_columns(const AttentionParams& params) const;
  void attend_by_columns(const PagedAttentionArgs& args, const AttentionParams& params);
  // Whether sequences of many rows may be wgmma's; tries it at the first call of a width.
  bool can_wgmma(const AttentionParams& params);
  bool passes_wgmma(int64_t width);

  // is_finite: becomes false where a value is not; null: nobody looks.
  LinearWeight pack(std::span<const ConstTensor> parts, DType dtype, std::atomic<bool>* is_finite);
  // To the device, converted to another storage on the way.
  void upload(std::byte* to, DType dtype, const ConstTensor& from, std::atomic<bool>* is_finite);

  const std::unique_ptr<Backend> host_;  // the cpu backend, for what lies on the host
  DeviceMemory memory_;
  Transfers transfers_;
  StepBlock block_;
  QueueMarks marks_;  // in the stream of the ops
  CudaSteps steps_;
  Buffer piece_;  // of weights that are converted, in the transfer stream's order
  std::string device_name_;
  std::string gemm_description_;
  bool uses_gemv_ = false;
  bool uses_mma_gemv_ = false;
  bool uses_mma_ = false;
  bool has_mma_ = false;           // rows with weights of their own may be mma_linear's
  bool can_run_integers_ = false;  // products of bytes by tensor cores
  // Rows from which on weights and activations in E4M3 are cuBLASLt's; 0: never.
  int64_t fp8_rows_ = 0;
  int64_t tiled_shared_bytes_ = 0;  // that a block may ask for; 0: no attention by tensor cores
  std::vector<std::pair<int64_t, Storage>> tiled_kernels_;  // widths and caches that are prepared
  std::vector<std::pair<bool, Storage>> column_kernels_;    // narrow or not, likewise
  DecodeSpans decode_spans_ = DecodeSpans::kOne;
  SpanMerge span_merge_ = SpanMerge::kFew;
  Preparation preparation_ = Preparation::kFew;
  bool holds_codes_ = false;  // of f8 caches, in decoding
  Buffer arrivals_;           // of blocks that split a row
  bool may_wgmma_ = false;
  bool insists_on_wgmma_ = false;
  std::map<int64_t, bool> wgmma_widths_;  // that were tried, and whether they are to be believed
  std::string wgmma_problem_;
  std::unique_ptr<CublasLt> cublaslt_;           // null: plain products
  std::unique_ptr<WgmmaLinear> wgmma_linear_;    // null: none
  std::map<WgmmaBucket, bool> wgmma_is_faster_;  // than cuBLASLt, of what was measured
  Buffer scratch_;
  IndexUpload token_ids_;
  IndexUpload positions_;
  std::deque<IndexUpload> frequencies_;  // of the rotary embeddings that there are
  std::map<const std::vector<int32_t>*, IndexUpload> orders_;   // of weights' columns
  std::map<const LinearWeight*, IndexUpload> grouped_weights_;  // by the first of them
  std::vector<int64_t> weight_places_;                          // of the call at hand
  IndexUpload slots_;
  IndexUpload query_starts_;
  IndexUpload kv_lens_;
  IndexUpload block_tables_;
  IndexUpload rows_;
  IndexUpload sampling_;
};

}  // namespace llmserve::cuda
