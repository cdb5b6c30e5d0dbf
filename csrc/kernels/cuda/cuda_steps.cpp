#include "kernels/cuda/cuda_steps.h"

#include <algorithm>
#include <atomic>
#include <thread>

#include "core/error.h"
#include "kernels/cuda/cuda_check.h"

namespace llmserve::cuda {
namespace {

static_assert(sizeof(DrawnRow) == sizeof(Drawn) && sizeof(DrawSettings) == sizeof(DrawParams));

// Looks at the number of a step so often between two looks at the stream, whose state costs a call
// of the driver (about a microsecond): a step that is done is seen within nanoseconds.
constexpr int kLooks = 200;

}  // namespace

std::span<std::byte> CudaSteps::begin(int64_t num_bytes, int64_t num_rows) {
  memory_.make_current();
  const int64_t all_bytes = kHeaderBytes + num_bytes;
  if (twin_.num_bytes() < all_bytes || max_rows_ < std::max(num_rows, int64_t{1}))
    grow(all_bytes, std::max(num_rows, int64_t{1}));
  ++step_;
  slot().brought_over.wait();
  num_bytes_ = all_bytes;
  num_rows_[static_cast<size_t>(step_ % kNumSlots)] = num_rows;
  *reinterpret_cast<StepHeader*>(slot().data.data()) = {
      .step = step_, .num_rows = num_rows, .result_begin = step_ % kNumSlots * result_bytes_};
  return {slot().data.data() + kHeaderBytes, static_cast<size_t>(num_bytes)};
}

// Twice what is asked for, so that it is rare. Nothing that is in use moves: the device is waited
// for, and results that nobody has taken are copied.
void CudaSteps::grow(int64_t num_bytes, int64_t num_rows) {
  memory_.synchronize();
  if (twin_.num_bytes() < num_bytes) {
    for (Slot& slot : slots_) slot.data = Buffer(2 * num_bytes, pinned_);
    twin_ = Buffer(2 * num_bytes, memory_);
  }
  if (max_rows_ >= num_rows) return;
  const int64_t max_rows = 2 * num_rows;
  const int64_t bytes = kResultHeaderBytes + max_rows * static_cast<int64_t>(sizeof(Drawn));
  const int64_t result_bytes = (bytes + 63) / 64 * 64;
  Buffer results(kNumSlots * result_bytes, pinned_);
  for (int64_t i = 0; i < kNumSlots; ++i)
    std::copy_n(results_.data() + i * result_bytes_, result_bytes_,
                results.data() + i * result_bytes);
  Buffer drawn(max_rows * static_cast<int64_t>(sizeof(Drawn)), memory_);
  if (max_rows_ > 0) {
    check(
        "cudaMemcpyAsync of drawn tokens",
        cudaMemcpyAsync(drawn.data(), drawn_.data(), static_cast<size_t>(max_rows_) * sizeof(Drawn),
                        cudaMemcpyDeviceToDevice, memory_.stream()));
    memory_.synchronize();
  }
  results_ = std::move(results);
  drawn_ = std::move(drawn);
  draw_rows_ = Buffer(max_rows * static_cast<int64_t>(sizeof(DrawRow)), memory_);
  result_bytes_ = result_bytes;
  max_rows_ = max_rows;
}

void CudaSteps::bring_over() {
  check("cudaMemcpyAsync of a step's integers",
        cudaMemcpyAsync(twin_.data(), slot().data.data(), static_cast<size_t>(num_bytes_),
                        cudaMemcpyHostToDevice, memory_.stream()));
  slot().brought_over.record(memory_.stream());
  block_ = {.host = slot().data.data(), .device = twin_.data(), .num_bytes = num_bytes_};
}

void CudaSteps::take_awaited(std::span<const int32_t> token_ids,
                             std::span<const int32_t> awaited_rows) {
  cuda::take_awaited(reinterpret_cast<const Drawn*>(drawn_.data()),
                     block_.on_device(awaited_rows.data()), static_cast<int64_t>(token_ids.size()),
                     const_cast<int32_t*>(block_.on_device(token_ids.data())), memory_.stream());
}

void CudaSteps::draw(const ConstTensor& logits, std::span<const DrawSettings> settings,
                     int64_t first_row) {
  const int64_t num_rows = logits.shape[0];
  const int64_t vocabulary = logits.shape[1];
  const int64_t weight_bytes = num_rows * vocabulary * static_cast<int64_t>(sizeof(float));
  if (weights_.num_bytes() < weight_bytes) weights_ = Buffer(weight_bytes, memory_);
  auto* rows = reinterpret_cast<DrawRow*>(draw_rows_.data()) + first_row;
  make_draw_rows(reinterpret_cast<const DrawParams*>(block_.on_device(settings.data())),
                 {logits.as<float>(), logits.strides[0]}, num_rows, rows, memory_.stream());
  cuda::draw(rows, num_rows, nullptr, vocabulary, reinterpret_cast<float*>(weights_.data()),
             reinterpret_cast<Drawn*>(drawn_.data()) + first_row, memory_.stream());
}

int64_t CudaSteps::end() {
  publish(reinterpret_cast<const StepHeader*>(twin_.data()),
          reinterpret_cast<const Drawn*>(drawn_.data()), results_.data(), kResultHeaderBytes,
          memory_.stream());
  block_ = {};
  return step_;
}

std::span<const DrawnRow> CudaSteps::wait(int64_t step) {
  const std::atomic_ref<int64_t> number(*reinterpret_cast<int64_t*>(result(step)));
  memory_.make_current();
  for (int looks = 0; number.load(std::memory_order_acquire) != step; ++looks) {
    if (looks % kLooks != kLooks - 1) continue;
    // A device that has failed writes no more.
    const cudaError_t code = cudaStreamQuery(memory_.stream());
    if (code == cudaErrorNotReady) {
      std::this_thread::yield();
      continue;
    }
    check("a step", code);
    check_internal(number.load(std::memory_order_acquire) == step, "a step gives its results");
  }
  return {reinterpret_cast<const DrawnRow*>(result(step) + kResultHeaderBytes),
          static_cast<size_t>(num_rows_[static_cast<size_t>(step % kNumSlots)])};
}

void CudaSteps::abandon() noexcept {
  cudaSetDevice(memory_.device());
  cudaStreamSynchronize(memory_.stream());
  cudaGetLastError();
  block_ = {};
}

}  // namespace llmserve::cuda
