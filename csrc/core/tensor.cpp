#include "core/tensor.h"

#include <sstream>

namespace llmserve {

std::string describe(const ConstTensor& tensor) {
  std::ostringstream out;
  out << name(tensor.dtype) << " [";
  for (int d = 0; d < tensor.rank; ++d) out << (d ? ", " : "") << tensor.shape[d];
  out << "]";
  return out.str();
}

}  // namespace llmserve
