#include "core/shape_check.h"

#include <algorithm>
#include <sstream>

#include "core/error.h"

namespace llmserve {
namespace {

[[noreturn]] void refuse(std::string_view what, const ConstTensor& tensor,
                         std::initializer_list<Dim> dims, std::initializer_list<DType> dtypes) {
  std::ostringstream out;
  out << what << ": expected ";
  bool first = true;
  for (const DType dtype : dtypes) {
    out << (first ? "" : " or ") << name(dtype);
    first = false;
  }
  out << " [";
  first = true;
  for (const Dim& dim : dims) {
    out << (first ? "" : ", ") << dim.letter;
    if (dim.size >= 0) out << "=" << dim.size;
    first = false;
  }
  out << "] with a contiguous last dimension, got "
      << (tensor.data ? describe(tensor) : std::string("no tensor"));
  throw InvalidArgument(out.str());
}

}  // namespace

void check_tensor(std::string_view what, const ConstTensor& tensor, std::initializer_list<Dim> dims,
                  std::initializer_list<DType> dtypes) {
  bool ok = tensor.rank == static_cast<int>(dims.size()) &&
            std::find(dtypes.begin(), dtypes.end(), tensor.dtype) != dtypes.end() &&
            (tensor.data != nullptr || tensor.num_elements() == 0);
  int d = 0;
  for (const Dim& dim : dims) {
    if (!ok) break;
    ok = dim.size < 0 || tensor.shape[d] == dim.size;
    ++d;
  }
  if (ok && tensor.rank > 0)
    ok = tensor.shape[tensor.rank - 1] <= 1 || tensor.strides[tensor.rank - 1] == 1;
  if (!ok) refuse(what, tensor, dims, dtypes);
}

}  // namespace llmserve
