// Every op of the cpu backend, under every instruction set that this machine can run, against the
// ref backend, and bit for bit against itself where kernels/ops.h promises the same bits. Needs no
// Python and links statically, so that it also runs in an emulated machine (run_emulated.sh).
//
//   isa_check [--threads N] [--exact] [ISA …]   the named sets only, and all of them must run;
//                                               exact: products of bf16 have the manual's bits
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include "checker.h"
#include "checks.h"
#include "kernels/cpu/cpu_features.h"

namespace llmserve::isa_check {
namespace {

constexpr struct {
  const char* name;
  void (*check)(Checker&);
} kFamilies[] = {
    {"rms_norm, add_rms_norm", &check_norms},
    {"gated_activation", &check_activations},
    {"rotary_table, rotary", &check_rotary},
    {"embedding, gather_rows, store_kv, copy_blocks", &check_rows_and_cache},
    {"first_non_finite", &check_first_non_finite},
    {"pack_linear, linear", &check_linear},
    {"pack_quantized, linear", &check_quantized},
    {"pack_quantized, linear of traits", &check_formats},
    {"grouped_linear", &check_grouped_linear},
    {"paged_attention", &check_attention},
    {"fused_mlp, prepare_qkv, fused_attention", &check_fused},
    {"sample", &check_sampling},
};

int run(int argc, char** argv) {
  int num_threads = 1;
  std::vector<std::string> wanted;
  Checker check;
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--threads" && i + 1 < argc)
      num_threads = std::atoi(argv[++i]);
    else if (std::string(argv[i]) == "--exact")
      check.is_exact = true;
    else
      wanted.push_back(argv[i]);
  }
  for (const CpuIsa& isa : cpu_isa_registry()) {
    const std::string name(isa.name);
    if (!wanted.empty() && std::find(wanted.begin(), wanted.end(), name) == wanted.end()) continue;
    if (isa.can_run()) {
      check.isas.push_back(
          {.name = name,
           .backend = make_backend("cpu", {.num_threads = num_threads, .isa = name}),
           .ref = make_backend("ref", {.isa = name})});
      std::printf("%s: %s\n", name.c_str(), check.isas.back().backend->description().c_str());
    } else {
      std::printf("%s: this machine cannot run it\n", name.c_str());
    }
  }
  if (check.isas.empty() || (!wanted.empty() && check.isas.size() != wanted.size())) {
    std::printf("not every instruction set asked for can run\n");
    return 2;
  }
  for (const auto& family : kFamilies) {
    const int passed = check.passed;
    const int failed = check.failed;
    family.check(check);
    std::printf("%s: %d passed, %d failed\n", family.name, check.passed - passed,
                check.failed - failed);
    std::fflush(stdout);
  }
  std::printf("%d passed, %d failed\n", check.passed, check.failed);
  return check.failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace llmserve::isa_check

int main(int argc, char** argv) {
  try {
    return llmserve::isa_check::run(argc, argv);
  } catch (const std::exception& error) {
    std::printf("stopped: %s\n", error.what());
    return 2;
  }
}
