// What a device must do to run every model: the LLM-level ops of op_list.inc, some of which stand
// for several others, and the packing of weights.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/tensor.h"
#include "kernels/ops.h"

namespace llmserve {

class DeviceSteps;

// The largest products of rows with weights of their own (grouped_linear) that a model asks for.
struct GroupedShape {
  int64_t max_tokens = 0;        // at a time
  int64_t rows_per_token = 0;    // k; 0: there are none
  int64_t num_weights = 0;       // X
  int64_t in_features = 0;       // K
  int64_t activation_bytes = 0;  // as of StepShape
  int64_t out_features = 0;      // N, of those that are not within fused_experts
};

// The largest step that a model will ask for, as far as a backend's own working memory goes.
struct StepShape {
  int64_t max_tokens = 0;       // T: rows of a linear
  int64_t max_in_features = 0;  // K of a linear
  int64_t num_kv_heads = 1;     // K
  int64_t group = 1;            // query heads a KV head
  int64_t key_dim = 0;          // D
  int64_t value_dim = 0;        // Dv
  bool has_values_in_keys = false;
  int64_t vocab_size = 0;  // V
  // Of a row of x as integers, the most of all quantized weights (quantized_activation_bytes).
  int64_t activation_bytes = 0;
  DType weight_dtype = DType::kF32;
  DType cache_dtype = DType::kF32;
  int64_t max_sequences = 1;   // B
  int64_t max_context = 0;     // tokens of one, in whole blocks
  int64_t max_logit_rows = 0;  // whose logits are computed together
  int64_t block_bytes = 0;     // of all integers of a step, where they lie in one block
  GroupedShape grouped;
};

class Backend {
 public:
  virtual ~Backend() = default;

  // The registry's name: "ref", "cpu".
  virtual std::string_view name() const = 0;
  // What does the work, for the log: "cpu/avx2, 2 threads".
  virtual std::string description() const = 0;

  // Where every tensor of the ops lives: weights, activations, KV cache. The host's unless said
  // otherwise; token ids, slots, tables and the other spans of ops.h are always in host memory.
  virtual Memory& memory() { return host_memory(); }

  // Runs `work`, which asks for ops and copies of this backend, on another library's stream: a
  // cudaStream_t as a number. In its order, after all that was asked for before, and done by the
  // time that what is asked for afterwards begins. A host backend has no streams and just runs it.
  virtual void run_on_stream(uint64_t /*stream*/, const std::function<void()>& work) { work(); }

  // Packs the row-major [N_i, K] matrices, stacked along N, into one weight of the given dtype (f32
  // or bf16; the parts, in host memory, may be f32, bf16 or f16). Throws InvalidArgument on
  // shapes, CorruptFile never: `first_non_finite` finds bad values.
  virtual LinearWeight pack_linear(std::span<const ConstTensor> parts, DType dtype) = 0;
  // The same weight, but linear() runs on the parts where they lie, with the same bits and in more
  // time, until pack_rows() lays it out, between two ops. Their memory has to stay until then. A
  // backend that has no kernel for that packs at once: then the weight has no `rows`.
  virtual LinearWeight defer_linear(std::span<const ConstTensor> parts, DType dtype) {
    return pack_linear(parts, dtype);
  }
  virtual void pack_rows(LinearRows& /*rows*/) {}
  // Names the layout of packed weights, where it is the same on every machine and they lie in host
  // memory: a file may then hold them. Its number grows when a byte of any weight changes. Empty:
  // packed weights are nobody else's.
  virtual std::string_view packed_layout() const { return {}; }
  // Bytes that pack_linear will take, exact.
  virtual int64_t packed_bytes(int64_t out_features, int64_t in_features, DType dtype) const = 0;

  // Whether weights of this format can be packed and run.
  virtual bool can_run(const LinearFormat&) const { return false; }
  // A weight [N, K] of integers from its rows, which are read once each, by all threads. The format
  // fits K (check_fits) and can_run().
  virtual LinearWeight pack_quantized(const LinearFormat& format, int64_t out_features,
                                      int64_t in_features, const QuantizedRowReader& read);
  // Bytes that pack_quantized will take, exact.
  virtual int64_t packed_bytes(int64_t, int64_t, const LinearFormat&) const { return 0; }

  // Index of the first NaN or infinity of a contiguous f32, bf16 or f16 tensor in host memory, or
  // -1. At memory speed.
  virtual int64_t first_non_finite(const ConstTensor& tensor) = 0;

  // Work on host memory at load, cut into ranges [begin, end) of [0, count) at multiples of
  // `grain`, on the threads that the backend has; `work` does not throw.
  virtual void run_on_host_threads(int64_t count, int64_t /*grain*/,
                                   const std::function<void(int64_t, int64_t)>& work) {
    work(0, count);
  }

  // Bytes of working memory that the ops of such a step take beside their arguments, in all of
  // `num_threads`. reserve_scratch() takes them, so that no step of this shape or smaller does.
  virtual int64_t scratch_bytes(const StepShape&, int /*num_threads*/) const { return 0; }
  virtual void reserve_scratch(const StepShape&) {}

  // Host memory that blocks are transferred to and from: pinned where there is a device.
  virtual Memory& transfer_memory() { return host_memory(); }
  // Copies blocks between memory() and transfer_memory() beside the ops: it sees what was asked for
  // before, and later ops do not wait for it. Returns its number; numbers grow. Until it is
  // transferred nobody may write what it reads, or read what it writes.
  virtual int64_t transfer_blocks(const TransferBlocksArgs& args);
  // Whether this transfer and all before it are done. Never waits. Throws DeviceError.
  virtual bool is_transferred(int64_t /*id*/) { return true; }
  // Ops asked for from now on come after this transfer.
  virtual void await_transfer(int64_t /*id*/) {}

  // A device's way to have steps in flight; null where ops are done when they return.
  virtual DeviceSteps* steps() { return nullptr; }

  // Rows that a feed-forward layer takes at a time: 3 F floats a row are the largest activations of
  // a step, and this bounds them whatever T is. 512 rows use a weight 512 times a read, many times
  // what keeps a CPU busy.
  virtual int64_t mlp_rows() const { return 512; }

  // The layout of keys that paged_attention reads fastest from blocks of this shape.
  virtual KeyLayout key_layout(int64_t /*block_size*/, int64_t /*key_dim*/, int64_t /*value_dim*/,
                               DType) const {
    return KeyLayout::kRows;
  }

  // Every op: checks its arguments by validate(), and runs.
#define LLMSERVE_OP(name, Args) void name(const Args& args);
#include "kernels/op_list.inc"

 protected:
  // What runs, with arguments that have been checked. Fused ops run here as the ops that they stand
  // for (composed.cpp). A backend overrides what it does better, and may still call these where it
  // does not.
#define LLMSERVE_OP(name, Args) virtual void do_##name(const Args& args) = 0;
#define LLMSERVE_FUSED_OP(name, Args) virtual void do_##name(const Args& args);
#include "kernels/op_list.inc"
};

struct BackendOptions {
  int32_t num_threads = 1;
  // The best instruction set to use, of cpu_isa_registry(). Empty: the environment's
  // LLMSERVE_CPU_ISA, or else the best of the machine. For ref: the set whose linear layers over
  // bf16 weights it specifies; empty: those of floats.
  std::string isa;
};

// One row a backend: the only place that lists them.
struct BackendRow {
  std::string_view name;
  std::string_view summary;
  std::unique_ptr<Backend> (*make)(const BackendOptions&);
};
std::span<const BackendRow> backend_registry();

// Throws NotSupported that lists the names.
std::unique_ptr<Backend> make_backend(std::string_view name, const BackendOptions& options);

}  // namespace llmserve
