#include "kernels/cuda/cublaslt.h"

#include <dlfcn.h>

#include <array>
#include <filesystem>
#include <vector>

#include "core/error.h"
#include "kernels/cuda/launch_math.h"

namespace llmserve::cuda {

using namespace cublaslt;

namespace {

// What NVIDIA's documentation recommends for Hopper; enough for any of its algorithms.
constexpr int64_t kWorkspaceBytes = int64_t{32} << 20;
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
  HeuristicResult chosen{};
  bool has_algorithm = false;

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

const CublasLt::Product& CublasLt::product(const Key& key) {
  std::unique_ptr<Product>& slot = products_[key];
  if (slot) return *slot;
  const auto [m, n, k, x_stride, out_stride, x_align, weight_align, out_align, storage] = key;
  const cudaDataType type = storage == Storage::kF32 ? CUDA_R_32F : CUDA_R_16BF;
  auto made = std::make_unique<Product>(f_);
  check("cublasLtMatmulDescCreate", f_.MatmulDescCreate(&made->desc, kCompute32F, CUDA_R_32F));
  const int32_t transposed = kOpT;
  check("cublasLtMatmulDescSetAttribute",
        f_.MatmulDescSetAttribute(made->desc, kDescTransA, &transposed, sizeof transposed));
  check("cublasLtMatrixLayoutCreate", f_.MatrixLayoutCreate(&made->weight, type, k, n, k));
  check("cublasLtMatrixLayoutCreate", f_.MatrixLayoutCreate(&made->x, type, k, m, x_stride));
  check("cublasLtMatrixLayoutCreate",
        f_.MatrixLayoutCreate(&made->out, CUDA_R_32F, n, m, out_stride));
  check("cublasLtMatmulPreferenceCreate", f_.MatmulPreferenceCreate(&made->preference));
  const auto prefer = [&](int attribute, auto value) {
    check("cublasLtMatmulPreferenceSetAttribute",
          f_.MatmulPreferenceSetAttribute(made->preference, attribute, &value, sizeof value));
  };
  prefer(kPrefMaxWorkspaceBytes, static_cast<uint64_t>(kWorkspaceBytes));
  prefer(kPrefMinAlignmentA, weight_align);
  prefer(kPrefMinAlignmentB, x_align);
  prefer(kPrefMinAlignmentC, out_align);
  prefer(kPrefMinAlignmentD, out_align);
  int returned = 0;
  const Status status =
      f_.MatmulAlgoGetHeuristic(handle_, made->desc, made->weight, made->x, made->out, made->out,
                                made->preference, 1, &made->chosen, &returned);
  made->has_algorithm = status == 0 && returned > 0 && made->chosen.state == 0;
  slot = std::move(made);
  return *slot;
}

bool CublasLt::add_product(const void* x, int64_t x_stride, const LinearParams& params) {
  const auto alignment = [](const void* data, int64_t stride, int64_t size) {
    return std::min(alignment_bytes(reinterpret_cast<uintptr_t>(data)),
                    alignment_bytes(static_cast<uint64_t>(stride * size)));
  };
  const int64_t size = params.storage == Storage::kF32 ? 4 : 2;
  // One row has no stride that matters; cuBLAS wants one that is at least the width.
  const bool is_row = params.num_rows == 1;
  const int64_t x_leading = is_row ? params.in_features : x_stride;
  const int64_t out_leading = is_row ? params.out_features : params.out.stride;
  const Product& chosen =
      product({params.num_rows, params.out_features, params.in_features, x_leading, out_leading,
               alignment(x, x_leading, size), alignment(params.weight, params.in_features, size),
               alignment(params.out.data, out_leading, 4), params.storage});
  if (!chosen.has_algorithm) return false;
  const float one = 1.0f;
  check("cublasLtMatmul",
        f_.Matmul(handle_, chosen.desc, &one, params.weight, chosen.weight, x, chosen.x, &one,
                  params.out.data, chosen.out, params.out.data, chosen.out, &chosen.chosen.algo,
                  workspace_.data(), static_cast<size_t>(kWorkspaceBytes), memory_.stream()));
  return true;
}

}  // namespace llmserve::cuda
