#include "kernels/cuda/linear/cublaslt.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <limits>
#include <vector>

#include "core/error.h"
#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/launch_math.h"
#include "kernels/cuda/linear/stopwatch.h"

namespace llmserve::cuda {

using namespace cublaslt;

namespace {

// That it is asked to propose; more of them were hardly ever faster in others' reports.
constexpr int kMaxCandidates = 8;
constexpr std::array kSonames{"libcublasLt.so.13", "libcublasLt.so.12"};

void check(const char* call, Status status) {
  if (status != 0) throw DeviceError(concat(call, " failed with cuBLAS status ", status));
}

// Where the nvidia-cublas wheels put the library, if they are installed beside this package.
std::vector<std::filesystem::path> wheel_folders() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&wheel_folders), &info) == 0) return {};
  // <packages>/llmserve/lib/libllmserve_cuda.so
  const auto packages =
      std::filesystem::path(info.dli_fname).parent_path().parent_path().parent_path();
  return {packages / "nvidia/cu13/lib", packages / "nvidia/cublas/lib"};
}

void* open_library() {
  for (const char* soname : kSonames)
    if (void* library = dlopen(soname, RTLD_NOW | RTLD_NOLOAD)) return library;
  for (const std::filesystem::path& folder : wheel_folders()) {
    for (const char* soname : kSonames)
      if (void* library = dlopen((folder / soname).c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
  }
  for (const char* soname : kSonames)
    if (void* library = dlopen(soname, RTLD_NOW | RTLD_LOCAL)) return library;
  return nullptr;
}

template <class Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

bool find_all(void* library, Functions& f) {
  return find(library, "cublasLtCreate", f.Create) && find(library, "cublasLtDestroy", f.Destroy) &&
         find(library, "cublasLtGetVersion", f.GetVersion) &&
         find(library, "cublasLtMatmulDescCreate", f.MatmulDescCreate) &&
         find(library, "cublasLtMatmulDescDestroy", f.MatmulDescDestroy) &&
         find(library, "cublasLtMatmulDescSetAttribute", f.MatmulDescSetAttribute) &&
         find(library, "cublasLtMatrixLayoutCreate", f.MatrixLayoutCreate) &&
         find(library, "cublasLtMatrixLayoutDestroy", f.MatrixLayoutDestroy) &&
         find(library, "cublasLtMatmulPreferenceCreate", f.MatmulPreferenceCreate) &&
         find(library, "cublasLtMatmulPreferenceDestroy", f.MatmulPreferenceDestroy) &&
         find(library, "cublasLtMatmulPreferenceSetAttribute", f.MatmulPreferenceSetAttribute) &&
         find(library, "cublasLtMatmulAlgoGetHeuristic", f.MatmulAlgoGetHeuristic) &&
         find(library, "cublasLtMatmulAlgoCheck", f.MatmulAlgoCheck) &&
         find(library, "cublasLtMatmul", f.Matmul);
}

}  // namespace

// cuBLAS counts by columns: a row-major [R, C] matrix is its [C, R] one. So out^T [N, M] = W^T as
// stored, transposed, times x^T as stored.
struct CublasLt::Product {
  const Functions& f;
  MatmulDesc desc = nullptr;
  MatrixLayout weight = nullptr;
  MatrixLayout x = nullptr;
  MatrixLayout out = nullptr;
  Preference preference = nullptr;
  Algo algorithm{};
  bool has_algorithm = false;
  bool is_settled = false;  // else: chosen while a graph was captured, and nothing measured

  explicit Product(const Functions& functions) : f(functions) {}
  ~Product() {
    if (preference) f.MatmulPreferenceDestroy(preference);
    for (const MatrixLayout layout : {weight, x, out})
      if (layout) f.MatrixLayoutDestroy(layout);
    if (desc) f.MatmulDescDestroy(desc);
  }
};

std::unique_ptr<CublasLt> CublasLt::open(DeviceMemory& memory, std::string& problem) {
  void* library = open_library();
  if (library == nullptr) {
    problem = "no libcublasLt.so.13 or .12 found; `pip install llmserve[cuda]` brings one";
    return nullptr;
  }
  Functions functions{};
  if (!find_all(library, functions)) {
    problem = "the libcublasLt that was found lacks a function";
    return nullptr;
  }
  return std::unique_ptr<CublasLt>(new CublasLt(memory, functions));
}

CublasLt::CublasLt(DeviceMemory& memory, const Functions& functions)
    : memory_(memory), f_(functions), workspace_(kWorkspaceBytes, memory) {
  check("cublasLtCreate", f_.Create(&handle_));
}

CublasLt::~CublasLt() {
  products_.clear();
  f_.Destroy(handle_);
}

std::string CublasLt::description() const {
  const size_t version = f_.GetVersion();  // 130002 is 13.0.2
  return concat("cuBLASLt ", version / 10000, ".", version / 100 % 100, ".", version % 100);
}

CublasLt::Product& CublasLt::product(const Key& key, const Operands& operands) {
  std::unique_ptr<Product>& slot = products_[key];
  if (slot && (slot->is_settled || !slot->has_algorithm)) return *slot;
  if (!slot) {
    auto made = std::make_unique<Product>(f_);
    describe(*made, key);
    slot = std::move(made);
  }
  choose(*slot, key, operands);
  return *slot;
}

void CublasLt::describe(Product& made, const Key& key) {
  const auto [m, n, k, x_stride, out_stride, x_align, weight_align, out_align, storage, has_bias,
              scales] = key;
  const cudaDataType type = storage == Storage::kF32  ? CUDA_R_32F
                            : storage == Storage::kF8 ? CUDA_R_8F_E4M3
                                                      : CUDA_R_16BF;
  check("cublasLtMatmulDescCreate", f_.MatmulDescCreate(&made.desc, kCompute32F, CUDA_R_32F));
  const auto set = [&](int attribute, auto value) {
    check("cublasLtMatmulDescSetAttribute",
          f_.MatmulDescSetAttribute(made.desc, attribute, &value, sizeof value));
  };
  set(kDescTransA, static_cast<int32_t>(kOpT));
  if (has_bias) set(kDescEpilogue, kEpilogueBias);
  if (scales != Fp8Scales::kNone) {
    const int32_t mode = scales == Fp8Scales::kRows ? kScaleColumns : kScaleColumns128;
    set(kDescScaleModeA, mode);
    set(kDescScaleModeB, mode);
  }
  check("cublasLtMatrixLayoutCreate", f_.MatrixLayoutCreate(&made.weight, type, k, n, k));
  check("cublasLtMatrixLayoutCreate", f_.MatrixLayoutCreate(&made.x, type, k, m, x_stride));
  check("cublasLtMatrixLayoutCreate",
        f_.MatrixLayoutCreate(&made.out, CUDA_R_32F, n, m, out_stride));
  check("cublasLtMatmulPreferenceCreate", f_.MatmulPreferenceCreate(&made.preference));
  const auto prefer = [&](int attribute, auto value) {
    check("cublasLtMatmulPreferenceSetAttribute",
          f_.MatmulPreferenceSetAttribute(made.preference, attribute, &value, sizeof value));
  };
  prefer(kPrefMaxWorkspaceBytes, static_cast<uint64_t>(kWorkspaceBytes));
  prefer(kPrefMinAlignmentA, weight_align);
  prefer(kPrefMinAlignmentB, x_align);
  prefer(kPrefMinAlignmentC, out_align);
  prefer(kPrefMinAlignmentD, out_align);
}

void CublasLt::choose(Product& product, const Key& key, const Operands& operands) {
  const auto [m, n, k, x_stride, out_stride, x_align, weight_align, out_align, storage, has_bias,
              scales] = key;
  const BucketKey bucket{n,         k,       gemm_bucket(m), x_align, weight_align,
                         out_align, storage, has_bias,       scales};
  if (const auto found = measured_.find(bucket); found != measured_.end()) {
    HeuristicResult needs{};
    if (f_.MatmulAlgoCheck(handle_, product.desc, product.weight, product.x, product.out,
                           product.out, &found->second, &needs) == 0 &&
        needs.workspace_bytes <= static_cast<size_t>(kWorkspaceBytes)) {
      product.algorithm = found->second;
      product.has_algorithm = product.is_settled = true;
      return;
    }
  }
  std::array<HeuristicResult, kMaxCandidates> candidates{};
  int returned = 0;
  const Status status = f_.MatmulAlgoGetHeuristic(handle_, product.desc, product.weight, product.x,
                                                  product.out, product.out, product.preference,
                                                  kMaxCandidates, candidates.data(), &returned);
  const auto end =
      std::remove_if(candidates.begin(), candidates.begin() + (status == 0 ? returned : 0),
                     [](const HeuristicResult& c) { return c.state != 0; });
  const std::span<const HeuristicResult> usable(candidates.begin(), end);
  if (usable.empty()) return;
  product.is_settled = !is_capturing(memory_.stream());
  product.algorithm = usable[product.is_settled ? measure(product, key, operands, usable) : 0].algo;
  product.has_algorithm = true;
  if (product.is_settled) measured_[bucket] = product.algorithm;
}

size_t CublasLt::measure(const Product& product, const Key& key, const Operands& operands,
                         std::span<const HeuristicResult> candidates) {
  // Where `out` is added to, it must not be touched yet: D goes elsewhere, in the same layout.
  Buffer elsewhere;
  void* to = operands.out;
  if (operands.accumulate) {
    const int64_t num_bytes = std::get<0>(key) * std::get<4>(key) * 4;
    if (num_bytes > memory_.available_bytes() / 2) return 0;
    elsewhere = Buffer(num_bytes, memory_);
    to = elsewhere.data();
  }
  Stopwatch watch(memory_.stream());
  size_t fastest = 0;
  float least = std::numeric_limits<float>::infinity();
  for (size_t i = 0; i < candidates.size(); ++i) {
    if (run(product, operands, candidates[i].algo, to) != 0) continue;
    watch.start();
    for (int repeat = 0; repeat < kTimedRuns; ++repeat)
      check("cublasLtMatmul", run(product, operands, candidates[i].algo, to));
    const float time = watch.stop();
    if (time >= kWorthwhile * least) continue;
    fastest = i;
    least = time;
  }
  return fastest;
}

Status CublasLt::run(const Product& product, const Operands& operands, const Algo& algorithm,
                     void* to) {
  const auto point = [&](int attribute, const float* data) {
    if (data == nullptr) return;
    check("cublasLtMatmulDescSetAttribute",
          f_.MatmulDescSetAttribute(product.desc, attribute, &data, sizeof data));
  };
  point(kDescBiasPointer, operands.bias);
  point(kDescScalePointerA, operands.weight_scales);
  point(kDescScalePointerB, operands.x_scales);
  const float one = 1.0f;
  const float beta = operands.accumulate ? 1.0f : 0.0f;
  return f_.Matmul(handle_, product.desc, &one, operands.weight, product.weight, operands.x,
                   product.x, &beta, operands.out, product.out, to, product.out, &algorithm,
                   workspace_.data(), static_cast<size_t>(kWorkspaceBytes), memory_.stream());
}

namespace {

// Of the rows of a matrix.
uint32_t alignment(const void* data, int64_t stride, int64_t size) {
  return std::min(alignment_bytes(reinterpret_cast<uintptr_t>(data)),
                  alignment_bytes(static_cast<uint64_t>(stride * size)));
}

}  // namespace

bool CublasLt::multiply(const Key& key, const Operands& operands) {
  const Product& chosen = product(key, operands);
  if (!chosen.has_algorithm) return false;
  check("cublasLtMatmul", run(chosen, operands, chosen.algorithm, operands.out));
  return true;
}

bool CublasLt::multiply(const void* x, int64_t x_stride, const LinearParams& params) {
  const int64_t size = params.storage == Storage::kF32 ? 4 : 2;
  // One row has no stride that matters; cuBLAS wants one that is at least the width.
  const bool is_row = params.num_rows == 1;
  const int64_t x_leading = is_row ? params.in_features : x_stride;
  const int64_t out_leading = is_row ? params.out_features : params.out.stride;
  const uint32_t out_alignment =
      std::min(alignment(params.out.data, out_leading, 4),
               alignment_bytes(reinterpret_cast<uintptr_t>(params.bias)));  // 256 without one
  const Operands operands{.x = x,
                          .weight = params.weight,
                          .bias = params.bias,
                          .out = params.out.data,
                          .accumulate = params.accumulate};
  return multiply(
      {params.num_rows, params.out_features, params.in_features, x_leading, out_leading,
       alignment(x, x_leading, size), alignment(params.weight, params.in_features, size),
       out_alignment, params.storage, params.bias != nullptr, Fp8Scales::kNone},
      operands);
}

bool CublasLt::multiply(const Fp8Product& p, Fp8Scales scales) {
  const int64_t out_leading = p.num_rows == 1 ? p.out_features : p.out.stride;
  return multiply({p.num_rows, p.out_features, p.in_features, p.in_features, out_leading,
                   alignment(p.x, p.in_features, 1), alignment(p.weight, p.in_features, 1),
                   alignment(p.out.data, out_leading, 4), Storage::kF8, false, scales},
                  {.x = p.x,
                   .weight = p.weight,
                   .bias = nullptr,
                   .out = p.out.data,
                   .accumulate = p.accumulate,
                   .x_scales = scales == Fp8Scales::kNone ? nullptr : p.x_scales,
                   .weight_scales = scales == Fp8Scales::kNone ? nullptr : p.weight_scales});
}

bool CublasLt::can_scale(Fp8Scales scales) {
  std::optional<bool>& can = can_scale_[static_cast<size_t>(scales)];
  if (!can) {
    can = false;  // should it throw
    can = scales_rightly(scales);
  }
  return *can;
}

// Libraries and devices differ in the scales that they know. What is multiplied is exact in any
// order: codes of 0, 1 and 2, and scales that are powers of two, no two neighbours alike.
bool CublasLt::scales_rightly(Fp8Scales scales) {
  constexpr int64_t kM = 32;
  constexpr int64_t kN = 64;
  constexpr int64_t kK = 256;
  constexpr int64_t kBlocks = kK / 128;
  constexpr std::array kCodes{0x00, 0x38, 0x40};  // 0, 1, 2
  const auto code_at = [](int64_t row, int64_t k) {
    return static_cast<size_t>((row * 7 + k * 5 + k / 128) % 3);
  };
  const auto scale_at = [&](int64_t row, int64_t block) {
    return scales == Fp8Scales::kNone ? 1.0f : static_cast<float>(1 << (row + 2 * block) % 5);
  };
  const auto operand = [&](int64_t rows) {
    std::vector<std::byte> bytes(static_cast<size_t>(rows * kK));
    for (int64_t i = 0; i < rows * kK; ++i)
      bytes[static_cast<size_t>(i)] = static_cast<std::byte>(kCodes[code_at(i / kK, i % kK)]);
    return bytes;
  };
  const bool is_blocked = scales == Fp8Scales::kBlocks;
  const auto factors = [&](int64_t rows) {
    std::vector<float> values;
    for (int64_t b = 0; b < (is_blocked ? kBlocks : 1); ++b)
      for (int64_t row = 0; row < rows; ++row) values.push_back(scale_at(row, b));
    return values;
  };
  const auto to_device = [&](const auto& values) {
    const auto num_bytes = static_cast<int64_t>(values.size() * sizeof values[0]);
    Buffer buffer(num_bytes, memory_);
    llmserve::cuda::check(
        "cudaMemcpyAsync of a trial",
        cudaMemcpyAsync(buffer.data(), values.data(), static_cast<size_t>(num_bytes),
                        cudaMemcpyHostToDevice, memory_.stream()));
    memory_.synchronize();
    return buffer;
  };
  std::vector<float> got(static_cast<size_t>(kM * kN));
  try {
    const Buffer x = to_device(operand(kM));
    const Buffer weight = to_device(operand(kN));
    const Buffer x_scales = to_device(factors(kM));
    const Buffer weight_scales = to_device(factors(kN));
    const Buffer out(kM * kN * 4, memory_);
    const bool has_run =
        multiply({.x = x.data(),
                  .x_scales = reinterpret_cast<const float*>(x_scales.data()),
                  .weight = weight.data(),
                  .weight_scales = reinterpret_cast<const float*>(weight_scales.data()),
                  .out = {reinterpret_cast<float*>(out.data()), kN},
                  .num_rows = kM,
                  .out_features = kN,
                  .in_features = kK,
                  .accumulate = false},
                 scales);
    if (!has_run) return false;
    memory_.copy_to_host(got.data(), out.data(), out.num_bytes());
  } catch (const DeviceError&) {  // an attribute that an older library does not have
    return false;
  }
  for (int64_t m = 0; m < kM; ++m) {
    for (int64_t n = 0; n < kN; ++n) {
      float sum = 0;
      for (int64_t k = 0; k < kK; ++k) {
        const int64_t block = is_blocked ? k / 128 : 0;
        sum += static_cast<float>(code_at(m, k) * code_at(n, k)) * scale_at(m, block) *
               scale_at(n, block);
      }
      if (got[static_cast<size_t>(m * kN + n)] != sum) return false;
    }
  }
  return true;
}

}  // namespace llmserve::cuda
