// The CPU backend: partitions every op over a thread pool, never along a sum, and calls the kernels
// of one instruction set. Linear layers and attention have owners of their own; the other ops are
// in the cpu_*.cpp of their names.
#pragma once

#include <span>

#include "kernels/backend.h"
#include "kernels/cpu/cpu_attention.h"
#include "kernels/cpu/cpu_linear.h"
#include "kernels/cpu/cpu_workers.h"

namespace llmserve {

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(const BackendOptions& options)
      : workers_(options), linear_(workers_), attention_(workers_) {}

  std::string_view name() const override { return "cpu"; }
  std::string description() const override;

  // Panels as described in kernel_table.h.
  LinearWeight pack_linear(std::span<const ConstTensor> parts, DType dtype) override;
  LinearWeight defer_linear(std::span<const ConstTensor> parts, DType dtype) override;
  void pack_rows(LinearRows& rows) override;
  int64_t packed_bytes(int64_t out_features, int64_t in_features, DType dtype) const override;
  std::string_view packed_layout() const override { return "cpu panels 4"; }
  bool can_run(const LinearFormat&) const override { return true; }
  LinearWeight pack_quantized(const LinearFormat& format, int64_t out_features, int64_t in_features,
                              const QuantizedRowReader& read) override;
  int64_t packed_bytes(int64_t out_features, int64_t in_features,
                       const LinearFormat& format) const override;
  int64_t first_non_finite(const ConstTensor& tensor) override;
  void run_on_host_threads(int64_t count, int64_t grain,
                           const std::function<void(int64_t, int64_t)>& work) override;

  int64_t scratch_bytes(const StepShape& shape, int num_threads) const override;
  void reserve_scratch(const StepShape& shape) override;

  // Panels, where paged_attention need not copy the cache to read it.
  KeyLayout key_layout(int64_t block_size, int64_t key_dim, int64_t value_dim,
                       DType dtype) const override;

  // Of the last attention, items of prefixes that sequences share, and spans that were walked for
  // several ranks: for tests.
  int64_t num_prefix_items() const { return attention_.num_prefix_items(); }
  int64_t num_shared_spans() const { return attention_.num_shared_spans(); }

 private:
#define LLMSERVE_OP(name, Args) void do_##name(const Args& args) override;
#include "kernels/op_list.inc"

  int64_t thread_scratch_bytes(const StepShape& shape) const;

  CpuWorkers workers_;
  CpuLinear linear_;
  CpuAttention attention_;
};

std::unique_ptr<Backend> make_cpu_backend(const BackendOptions& options);

}  // namespace llmserve
