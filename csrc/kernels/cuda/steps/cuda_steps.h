// Steps in flight on one GPU (kernels/device_steps.h): a ring of pinned blocks and its twin on the
// device, the tokens drawn last, and results in mapped memory that the host polls.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <utility>

#include "core/buffer.h"
#include "kernels/backend.h"
#include "kernels/cuda/cuda_event.h"
#include "kernels/cuda/cuda_memory.h"
#include "kernels/cuda/index_upload.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/pinned_memory.h"
#include "kernels/cuda/queue_marks.h"
#include "kernels/cuda/sampling/cuda_sample.h"
#include "kernels/cuda/steps/recorded_work.h"
#include "kernels/device_steps.h"

namespace llmserve::cuda {

class CudaSteps final : public DeviceSteps {
 public:
  // Tells `block` where a step's integers are on the device. A mark goes behind what is launched
  // with exchanges in it.
  CudaSteps(DeviceMemory& memory, PinnedMemory& pinned, StepBlock& block, QueueMarks& marks)
      : memory_(memory), pinned_(pinned), block_(block), marks_(marks), counts_(memory) {}

  // Device memory that steps of at most this shape take, and reserve() takes, so that none grows.
  static int64_t device_bytes(const StepShape& shape);
  void reserve(const StepShape& shape);
  // Whether recorded steps of so few rows that all their kernels are the backend's own may have
  // them start early. Among a library's, which do not wait for the one before by themselves, that
  // cost more than it saved: 2.4 ms instead of 2.1 ms for 32 rows of Qwen3-0.6B on an H200.
  void allow_early_starts(bool is_allowed) { allows_early_starts_ = is_allowed; }

  // What max_exact_rows() says.
  void bound_exact_rows(int64_t num_rows) { max_exact_rows_ = num_rows; }
  int64_t max_exact_rows() const override { return max_exact_rows_; }

  std::span<std::byte> begin(int64_t num_bytes, int64_t num_rows, int64_t max_rows) override;
  void follow(std::span<const std::byte> block, int64_t num_rows, int64_t max_rows) override;
  void bring_over() override;
  Tensor brought(std::span<const int32_t> ids) override;
  void take_awaited(std::span<const int32_t> token_ids,
                    std::span<const int32_t> awaited_rows) override;
  void own_experts(const OwnExperts& args) override;
  void draw(const ConstTensor& logits, std::span<const SeededDraw> draws,
            int64_t first_row) override;
  void sample(const SampleArgs& args, int64_t first_row, const LateTokens& late,
              std::span<const KeptCounts> kept) override;
  void forget_counts(uint64_t counts_id) override { counts_.forget(counts_id); }
  Recording recording(const RecordKey& key) override;
  void run_asked(const RecordKey& key, const std::function<void()>& work) override;
  bool record(const RecordKey& key, const std::function<void()>& work) override;
  void refuse_recording(const RecordKey& key) override;
  void replay(const RecordKey& key) override;
  void forget_recorded() override;
  // The same without a wait for the device, which keeps what is under way until it is done. Any
  // thread, and what is captured meanwhile is dropped, too.
  void drop_recorded() noexcept;
  RecordCounts record_counts() const override;
  PoolUse pool_use() const override { return memory_.pool_use(); }
  std::unique_ptr<IdCounts> make_id_counts(int64_t size) override;
  int64_t end() override;
  std::span<const DrawnRow> wait(int64_t step) override;
  void abandon() noexcept override;

 private:
  // One is being filled, two are in flight, one to spare.
  static constexpr int64_t kNumSlots = 4;
  // A slot begins with what the kernels of a graph cannot be told otherwise.
  static constexpr int64_t kHeaderBytes = 64;
  static_assert(sizeof(StepHeader) <= kHeaderBytes);
  // Rows of results follow their header, one step after another.
  static constexpr int64_t kResultHeaderBytes = 64;

  // Of one shape of steps. Kernels of a model of 36 layers are some 400 nodes of it; more shapes
  // than this are in use at a time only where hundreds of contexts grow apart.
  static constexpr size_t kMaxGraphs = 128;
  class Graph {
   public:
    Graph() = default;
    ~Graph() {
      if (exec_ != nullptr) cudaGraphExecDestroy(exec_);  // when the device is done with it
    }
    Graph(Graph&& other) noexcept
        : exec_(std::exchange(other.exec_, nullptr)), num_bytes_(other.num_bytes_) {}
    Graph& operator=(Graph&& other) noexcept {
      std::swap(exec_, other.exec_);
      std::swap(num_bytes_, other.num_bytes_);
      return *this;
    }

    // False: the work cannot be captured, and nothing has been asked of the device.
    bool capture(const DeviceMemory& memory, const std::function<void()>& work);
    bool is_captured() const { return exec_ != nullptr; }
    void launch(cudaStream_t stream) const;
    // That the device had less afterwards: others' doings of that moment included.
    int64_t num_bytes() const { return num_bytes_; }

   private:
    cudaGraphExec_t exec_ = nullptr;
    int64_t num_bytes_ = 0;
  };
  struct Slot {
    Buffer data;
    Event brought_over;
  };
  // One sample(): what it asks for and what comes back, in pinned memory, which stays with its
  // place in a slot of the ring.
  struct Sampling {
    SampleCall call;
    int64_t first_row = 0;
    std::span<SampledRow> out;
    Buffer asked;
    Buffer answers;
    Event is_answered;
  };
  struct Samplings {
    std::deque<Sampling> calls;
    size_t count = 0;  // of this step
  };

  Slot& slot() { return slots_[static_cast<size_t>(step_ % kNumSlots)]; }
  std::byte* result(int64_t step) const {
    return results_.data() + step % kNumSlots * result_bytes_;
  }
  Samplings& samplings(int64_t step) { return samplings_[static_cast<size_t>(step % kNumSlots)]; }
  void grow_block(int64_t num_bytes);
  void grow_rows(int64_t max_rows);
  std::byte* weights(int64_t num_bytes);
  // On the device, of the step under way.
  const StepHeader* header() const { return reinterpret_cast<const StepHeader*>(twin_.data()); }
  void ask(const RecordKey& key, const std::function<void()>& work);
  void publish_results();

  DeviceMemory& memory_;
  PinnedMemory& pinned_;
  StepBlock& block_;
  QueueMarks& marks_;
  int64_t step_ = 0;  // begun last
  int64_t num_bytes_ = 0;
  const std::byte* followed_ = nullptr;  // another rank's block, under way here; null: its own
  std::array<Slot, kNumSlots> slots_;
  std::array<int64_t, kNumSlots> num_rows_{};
  Buffer twin_;       // of the step under way
  Buffer drawn_;      // DrawnRow [max rows], of the step that drew last
  Buffer draw_rows_;  // DrawRow [max rows]
  Buffer weights_;    // [S', V], working memory of the draw
  Buffer asked_;      // of the sampling under way
  Buffer answers_;    // likewise
  DeviceCounts counts_;
  std::array<Samplings, kNumSlots> samplings_;
  Buffer results_;  // mapped: [kNumSlots][header, max rows]
  int64_t result_bytes_ = 0;
  mutable std::mutex recorded_mutex_;  // guards what follows, and is never held while work is asked
  RecordedWork<RecordKey, Graph> recorded_{kMaxGraphs};
  RecordCounts record_counts_;
  int64_t num_forgotten_ = 0;   // times that all of it was
  int64_t num_moves_seen_ = 0;  // of block_, by what is recorded
  bool is_published_ = false;   // the step under way
  bool allows_early_starts_ = false;
  int64_t max_exact_rows_ = 0;
  int64_t max_rows_ = 0;
};

}  // namespace llmserve::cuda
