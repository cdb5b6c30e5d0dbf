#include <cstring>
#include <vector>

#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/sampling/cuda_sample.h"

namespace llmserve::cuda {

void CudaBackend::do_sample(const SampleArgs& args) {
  memory_.make_current();
  SampleCall call(args.logits, args.rows);
  std::vector<std::byte> asked(static_cast<size_t>(call.asked_bytes()));
  call.write_asked(asked.data(), nullptr);  // which nothing that stays is told from
  Layout layout;
  const int64_t drawn_begin = layout.add<DrawnRow>(std::ssize(args.rows));
  const int64_t answers_begin = layout.add<std::byte>(call.answer_bytes());
  const int64_t num_bytes = layout.num_bytes();
  const int64_t weights_begin = layout.add<std::byte>(call.weight_bytes());
  std::byte* memory = scratch(layout.num_bytes());
  // The kernels leave what they write there as they found it.
  call.launch(const_cast<std::byte*>(sampling_(std::span<const std::byte>(asked))),
              memory + answers_begin, memory + weights_begin,
              reinterpret_cast<DrawnRow*>(memory + drawn_begin), stream());

  std::vector<std::byte> bytes(static_cast<size_t>(num_bytes));
  memory_.copy_to_host(bytes.data(), memory, num_bytes);
  call.read(reinterpret_cast<const DrawnRow*>(bytes.data() + drawn_begin),
            bytes.data() + answers_begin, args.out);
}

}  // namespace llmserve::cuda
