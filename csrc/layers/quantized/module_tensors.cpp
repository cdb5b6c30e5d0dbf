#include "layers/quantized/module_tensors.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <sstream>

#include "core/error.h"
#include "quant/quant_format.h"

namespace llmserve {
namespace {

constexpr std::string_view kWeight = "weight";

float power_of_two(uint8_t exponent) {
  if (exponent == 255) return std::numeric_limits<float>::quiet_NaN();
  // 2^-127 is below the least normal float.
  return exponent == 0 ? std::bit_cast<float>(uint32_t{1} << 22)
                       : std::bit_cast<float>(uint32_t{exponent} << 23);
}

std::string shape_text(std::initializer_list<int64_t> shape) {
  std::ostringstream out;
  out << "[";
  for (const int64_t* dim = shape.begin(); dim != shape.end(); ++dim) {
    out << (dim == shape.begin() ? "" : ", ");
    if (*dim < 0)
      out << "any";
    else
      out << *dim;
  }
  out << "]";
  return out.str();
}

std::string dtype_text(std::initializer_list<DType> dtypes) {
  std::string out;
  for (const DType dtype : dtypes) out += concat(out.empty() ? "" : " or ", name(dtype));
  return out;
}

}  // namespace

float StoredArray::value(int64_t i) const {
  switch (entry->dtype) {
    case DType::kF32:
      return std::bit_cast<float>(word(i));
    case DType::kF16:
    case DType::kBF16: {
      uint16_t bits;
      std::memcpy(&bits, data + 2 * i, sizeof(bits));
      return entry->dtype == DType::kF16 ? f16_to_f32(bits) : bf16_to_f32(bits);
    }
    case DType::kF8E4M3:
      return fp8_to_f32(byte(i));
    case DType::kF8E5M2:
      return f16_to_f32(static_cast<uint16_t>(byte(i) << 8));
    default:
      return power_of_two(byte(i));
  }
}

std::string ModuleRequest::module() const {
  constexpr std::string_view kSuffix = ".weight";
  return name.ends_with(kSuffix) ? name.substr(0, name.size() - kSuffix.size()) : name;
}

std::string ModuleTensors::full_name(std::string_view suffix) const {
  if (suffix.starts_with(kWeight)) return concat(request_.name, suffix.substr(kWeight.size()));
  return concat(module_, suffix.starts_with('_') ? "" : ".", suffix);
}

const TensorEntry* ModuleTensors::look_up(std::string_view suffix) const {
  const std::string wanted = full_name(suffix);
  const TensorEntry* entry = checkpoint_.find(wanted);
  // Base models are saved without "model." or "transformer.".
  return entry ? entry : checkpoint_.find(std::string_view(wanted).substr(wanted.find('.') + 1));
}

StoredArray ModuleTensors::find(std::string_view suffix) {
  const TensorEntry* entry = look_up(suffix);
  if (!entry) return {};
  used_.insert(entry->name);
  return {checkpoint_.file(*entry)->bytes().data() + entry->offset, entry};
}

void ModuleTensors::ignore(std::initializer_list<std::string_view> suffixes) {
  for (const std::string_view suffix : suffixes) find(suffix);
}

StoredArray ModuleTensors::need_any(std::string_view suffix, std::initializer_list<DType> dtypes,
                                    const std::string& expected) {
  const StoredArray array = find(suffix);
  if (!array)
    throw CorruptFile(concat(checkpoint_.path(), ": the tensor \"", full_name(suffix), "\" ",
                             expected, " is absent from the checkpoint, which has others of \"",
                             module_, "\""));
  if (std::ranges::find(dtypes, array.entry->dtype) == dtypes.end() ||
      checkpoint_.storage(*array.entry).blocks)
    fail(array, concat("expected ", expected, ", got ", checkpoint_.describe(*array.entry)));
  entries_.push_back(array.entry);
  return array;
}

StoredArray ModuleTensors::need(std::string_view suffix, std::initializer_list<DType> dtypes,
                                std::initializer_list<int64_t> shape) {
  const std::string expected = concat(dtype_text(dtypes), " ", shape_text(shape));
  const StoredArray array = need_any(suffix, dtypes, expected);
  const TensorShape& got = array.entry->shape;
  bool is_same = got.size() == shape.size();
  for (size_t d = 0; is_same && d < got.size(); ++d)
    is_same = shape.begin()[d] < 0 || shape.begin()[d] == got[d];
  if (!is_same)
    fail(array, concat("expected ", expected, ", as the configuration has it, got ",
                       checkpoint_.describe(*array.entry)));
  return array;
}

StoredArray ModuleTensors::need_elements(std::string_view suffix,
                                         std::initializer_list<DType> dtypes, int64_t count) {
  const std::string expected =
      count == kAnyCount ? dtype_text(dtypes) : concat(count, " of ", dtype_text(dtypes));
  const StoredArray array = need_any(suffix, dtypes, expected);
  if (count == kAnyCount ? array.size() == 0 : array.size() != count)
    fail(array, concat("expected ", expected, ", got ", checkpoint_.describe(*array.entry)));
  return array;
}

void ModuleTensors::fail(const StoredArray& array, std::string_view reason) const {
  throw CorruptFile(concat(checkpoint_.file(*array.entry)->path().string(), ": tensor \"",
                           array.entry->name, "\": ", reason));
}

}  // namespace llmserve
