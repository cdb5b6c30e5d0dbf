#include "kernels/cuda/pinned_copies.h"

#include <algorithm>

#include "core/error.h"
#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/named_stream.h"
#include "kernels/piece_runs.h"

namespace llmserve::cuda {
namespace {

// Makes a device current for as long as it lives.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    check("cudaGetDevice", cudaGetDevice(&before_));
    check("cudaSetDevice", cudaSetDevice(device));
  }
  ~CurrentDevice() { cudaSetDevice(before_); }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
};

// What cudaMemcpy2DAsync takes at most between two rows (cudaDevAttrMaxPitch of every device).
constexpr int64_t kMaxPitch = (int64_t{1} << 31) - 1;

}  // namespace

class PinnedCopies::Taken {
 public:
  explicit Taken(PinnedCopies& owner) : owner_(owner) {
    std::unique_lock lock(owner_.mutex_);
    const auto find = [&] {
      return std::ranges::find_if(owner_.slots_, [](const Slot& slot) { return !slot.is_taken; });
    };
    owner_.is_free_.wait(lock, [&] { return find() != owner_.slots_.end(); });
    slot_ = &*find();
    slot_->is_taken = true;
  }
  ~Taken() {
    const std::lock_guard lock(owner_.mutex_);
    slot_->is_taken = false;
    owner_.is_free_.notify_one();
  }
  Taken(const Taken&) = delete;
  Taken& operator=(const Taken&) = delete;

  Slot& operator*() const { return *slot_; }

 private:
  PinnedCopies& owner_;
  Slot* slot_ = nullptr;
};

PinnedCopies::PinnedCopies(const DeviceMemory& memory, int64_t max_bytes)
    : memory_(memory), max_bytes_(max_bytes), pinned_(memory.device()) {
  const CurrentDevice current(memory.device());
  for (Slot& slot : slots_) slot.data = Buffer(max_bytes, pinned_);
  for (Mark& mark : marks_) mark.event.emplace();
  for (Slot& slot : slots_) slot.stream = make_stream("hand-over transfer", StreamPriority::kLast);
}

PinnedCopies::~PinnedCopies() {
  for (const Slot& slot : slots_)
    if (slot.stream != nullptr) cudaStreamDestroy(slot.stream);
}

void PinnedCopies::mark(int64_t step) {
  const std::lock_guard lock(mutex_);
  Mark& mark = marks_[next_mark_++ % marks_.size()];
  mark.event->record(memory_.stream());
  mark.step = step;
}

void PinnedCopies::follow(int64_t step) {
  const std::lock_guard lock(mutex_);
  const Mark* newest = nullptr;
  for (size_t i = 0; i < marks_.size(); ++i) {
    const Mark& mark = marks_[(next_mark_ + i) % marks_.size()];
    if (mark.step > 0 && mark.step <= step) newest = &mark;
  }
  if (newest == nullptr) return;
  for (const Slot& slot : slots_) newest->event->hold(slot.stream);
}

void PinnedCopies::copy(const Slot& slot, std::span<const DevicePiece> pieces, bool to_host) {
  std::byte* host = slot.data.data();
  for (const PieceRun& run : piece_runs(pieces, kMaxPitch)) {
    const auto width = static_cast<size_t>(run.num_bytes);
    const auto stride = static_cast<size_t>(run.stride);
    check("cudaMemcpy2DAsync of blocks",
          cudaMemcpy2DAsync(
              to_host ? host : run.data, to_host ? width : stride, to_host ? run.data : host,
              to_host ? stride : width, width, static_cast<size_t>(run.count),
              to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice, slot.stream));
    host += run.count * run.num_bytes;
  }
  check("cudaStreamSynchronize", cudaStreamSynchronize(slot.stream));
}

void PinnedCopies::check_size(std::span<const DevicePiece> pieces) const {
  int64_t num_bytes = 0;
  for (const DevicePiece& piece : pieces) num_bytes += piece.num_bytes;
  check_internal(num_bytes <= max_bytes_, "pieces fit their buffer");
}

void PinnedCopies::read(std::span<const DevicePiece> pieces,
                        const std::function<void(const std::byte*)>& take) {
  check_size(pieces);
  const Taken taken(*this);
  const CurrentDevice current(memory_.device());
  copy(*taken, pieces, true);
  take((*taken).data.data());
}

void PinnedCopies::write(std::span<const DevicePiece> pieces,
                         const std::function<void(std::byte*)>& fill) {
  check_size(pieces);
  const Taken taken(*this);
  const CurrentDevice current(memory_.device());
  fill((*taken).data.data());
  copy(*taken, pieces, false);
}

}  // namespace llmserve::cuda
