#include "kernels/cpu/cpu_features.h"

#ifdef LLMSERVE_X86
#include <cpuid.h>
#endif
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstdlib>
#include <sstream>

#include "core/error.h"

namespace llmserve {
namespace {

bool can_always_run() { return true; }

#ifdef LLMSERVE_X86
// Clang's builtin does not know it before version 16.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
// The compilers' builtins look at what the operating system saves, too.
bool can_run_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}
// Clang's builtin does not know it before version 16.
bool can_run_avx_vnni() {
  constexpr unsigned kAvxVnni = 1u << 4;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return can_run_avx2() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 &&
         (eax & kAvxVnni) != 0;
}
bool can_run_avx512() {
  return can_run_avx2() && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq");
}
bool can_run_avx512_vnni() { return can_run_avx512() && __builtin_cpu_supports("avx512vnni"); }
// Every CPU with BF16 has VBMI, too, but Cooper Lake, and virtual machines that hide it.
bool can_run_avx512_bf16() {
  return can_run_avx512_vnni() && __builtin_cpu_supports("avx512bf16") &&
         __builtin_cpu_supports("avx512vbmi");
}

// Clang's builtin does not know them before version 15.
bool has_amx() {
  constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24, kInt8 = 1u << 25;
  constexpr unsigned kAll = kBf16 | kTiles | kInt8;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & kAll) == kAll;
}
// Linux gives tiles to a process that asks, for all of its threads, from 5.16 on; a kernel that
// does not know them, or a sandbox that forbids them, refuses.
bool may_use_tiles() {
#ifdef __linux__
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM, which old headers lack
  constexpr long kTileData = 18;               // the state's bit of XCR0
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
bool can_run_amx() { return can_run_avx512_bf16() && has_amx() && may_use_tiles(); }
#endif

cpu::KernelTable generic() { return cpu::generic::kTable; }
#ifdef LLMSERVE_X86
cpu::KernelTable avx2() { return cpu::avx2::kTable; }
cpu::KernelTable avx_vnni() {
  cpu::KernelTable table = avx2();
  table.quantized_linear = &cpu::avx_vnni::quantized_linear;
  return table;
}
cpu::KernelTable avx512() { return cpu::avx512::kTable; }
cpu::KernelTable avx512_vnni() {
  cpu::KernelTable table = avx512();
  table.quantized_linear = &cpu::avx512_vnni::quantized_linear;
  return table;
}
cpu::KernelTable avx512_bf16() {
  cpu::KernelTable table = avx512_vnni();
  table.linear_bf16 = cpu::avx512_bf16::kLinear;
  table.coded_linear = &cpu::avx512_bf16::coded_linear;
  table.attention[static_cast<size_t>(cpu::CacheStorage::kBf16)] =
      &cpu::avx512_bf16::attention_bf16;
  table.attention[static_cast<size_t>(cpu::CacheStorage::kFp8)] = &cpu::avx512_bf16::attention_fp8;
  table.merge_attention = &cpu::avx512_bf16::merge_attention_rounded;
  return table;
}
cpu::KernelTable amx() {
  cpu::KernelTable table = avx512_bf16();
  table.linear_bf16 = cpu::amx::kLinear;
  table.quantized_linear = &cpu::amx::quantized_linear;
  return table;
}
#endif

constexpr CpuIsa kRegistry[] = {
#ifdef LLMSERVE_X86
    {"amx", &can_run_amx, &amx},
    {"avx512_bf16", &can_run_avx512_bf16, &avx512_bf16},
    {"avx512_vnni", &can_run_avx512_vnni, &avx512_vnni},
    {"avx512", &can_run_avx512, &avx512},
    {"avx_vnni", &can_run_avx_vnni, &avx_vnni},
    {"avx2", &can_run_avx2, &avx2},
#endif
    {"generic", &can_always_run, &generic},
};

}  // namespace

std::span<const CpuIsa> cpu_isa_registry() { return kRegistry; }

const CpuIsa& select_cpu_isa(std::string_view cap) {
  const char* environment = std::getenv("LLMSERVE_CPU_ISA");
  const bool is_from_environment = cap.empty() && environment != nullptr;
  if (is_from_environment) cap = environment;
  bool is_below_cap = cap.empty();
  std::ostringstream names;
  const CpuIsa* best = nullptr;
  for (const CpuIsa& isa : kRegistry) {
    is_below_cap = is_below_cap || isa.name == cap;
    if (is_below_cap && best == nullptr && isa.can_run()) best = &isa;
    names << (names.tellp() > 0 ? ", " : "") << isa.name;
  }
  if (!is_below_cap) {
    throw InvalidArgument(concat(is_from_environment ? "LLMSERVE_CPU_ISA" : "isa",
                                 ": expected one of ", names.str(), ", got '", cap, "'"));
  }
  return *best;
}

int64_t l1_data_bytes() {
#ifdef _SC_LEVEL1_DCACHE_SIZE
  const int64_t bytes = sysconf(_SC_LEVEL1_DCACHE_SIZE);
  if (bytes > 0) return bytes;
#endif
  return 32 * 1024;
}

}  // namespace llmserve
