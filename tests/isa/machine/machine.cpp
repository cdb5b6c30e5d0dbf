// Just enough of Linux for one static executable on an emulated PC: it is copied to its addresses,
// entered, and the system calls that the C library makes of one thread are answered. To boot a real
// kernel took Bochs 38 s of CPU time, this takes 2. What is printed goes to the first serial port;
// exit powers Bochs off.
#include <elf.h>
#include <stdint.h>

namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kPageTables = 0x2000000 + 0x3000;  // start.S: one entry a page, from address 0
constexpr uint64_t kStackBytes = 1 << 21;
constexpr uint64_t kMemoryEnd = 0x3ff00000;
uint64_t next_page = 0x4000000;  // memory is given out once: fresh pages are zero
uint64_t break_begin = 0;
uint64_t break_end = 0;
char arguments[512];
uint64_t random_bytes[2] = {0x243f6a8885a308d3, 0x13198a2e03707344};

void out(uint16_t port, uint8_t value) { asm volatile("outb %0, %1" ::"a"(value), "Nd"(port)); }
uint8_t in(uint16_t port) {
  uint8_t value;
  asm volatile("inb %1, %0" : "=a"(value) : "Nd"(port));
  return value;
}

void print(const char* text, uint64_t length) {
  for (uint64_t i = 0; i < length; ++i) {
    while ((in(0x3fd) & 0x20) == 0) {
    }
    out(0x3f8, static_cast<uint8_t>(text[i]));
  }
}
void print(const char* text) {
  while (*text != 0) print(text++, 1);
}
void print_hex(uint64_t value) {
  for (int shift = 60; shift >= 0; shift -= 4) print(&"0123456789abcdef"[value >> shift & 15], 1);
  print(" ");
}

[[noreturn]] void power_off() {
  while ((in(0x3fd) & 0x40) == 0) {
  }
  for (const char* at = "Shutdown"; *at != 0; ++at) out(0x8900, static_cast<uint8_t>(*at));
  for (;;) asm volatile("cli; hlt");
}

// Accessible or not, as the guard pages of checker.h need it.
void protect(uint64_t begin, uint64_t bytes, bool is_present) {
  auto* entry = reinterpret_cast<uint64_t*>(kPageTables);
  for (uint64_t page = begin / kPage; page < (begin + bytes + kPage - 1) / kPage; ++page) {
    entry[page] = is_present ? entry[page] | 1 : entry[page] & ~uint64_t{1};
    asm volatile("invlpg (%0)" ::"r"(page * kPage) : "memory");
  }
}

}  // namespace

extern "C" {

// The compiler calls these by name.
void* memcpy(void* to, const void* from, uint64_t bytes) {
  void* result = to;
  asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes)::"memory");
  return result;
}
void* memset(void* to, int value, uint64_t bytes) {
  void* result = to;
  asm volatile("rep stosb" : "+D"(to), "+c"(bytes) : "a"(value) : "memory");
  return result;
}

[[noreturn]] void machine_enter(uint64_t entry, uint64_t stack);

[[noreturn]] void machine_fault(const uint64_t* stack, uint64_t address) {
  print("\nexception, then its stack, then the address: ");
  for (int i = 0; i < 4; ++i) print_hex(stack[i]);
  print_hex(address);
  print("\nexit status 3\n");
  power_off();
}

int64_t machine_syscall(uint64_t a, uint64_t b, uint64_t c, uint64_t number) {
  constexpr int64_t kNoEntry = -2;
  constexpr int64_t kNoMemory = -12;
  constexpr int64_t kInvalid = -22;
  constexpr int64_t kNotATerminal = -25;
  constexpr int64_t kNoSuchCall = -38;
  switch (number) {
    case 1:  // write
      print(reinterpret_cast<const char*>(b), c);
      return static_cast<int64_t>(c);
    case 9: {  // mmap
      const uint64_t begin = next_page;
      const uint64_t end = begin + (b + kPage - 1) / kPage * kPage;
      if (end > kMemoryEnd) return kNoMemory;
      next_page = end;
      return static_cast<int64_t>(begin);
    }
    case 10:  // mprotect
      protect(a, b, c != 0);
      return 0;
    case 12:  // brk
      if (a >= break_begin && a < break_begin + 0x800000) break_end = a;
      return static_cast<int64_t>(break_end);
    case 11:   // munmap
    case 13:   // rt_sigaction
    case 14:   // rt_sigprocmask
    case 28:   // madvise
    case 202:  // futex
    case 273:  // set_robust_list
      return 0;
    case 16:  // ioctl
      return kNotATerminal;
    case 39:   // getpid
    case 218:  // set_tid_address
      return 1;
    case 158:                                          // arch_prctl
      if (a == 0x1023) return b == 18 ? 0 : kInvalid;  // ARCH_REQ_XCOMP_PERM: AMX tiles
      if (a != 0x1002) return kInvalid;
      asm volatile("wrmsr" ::"c"(0xc0000100), "a"(b), "d"(b >> 32));
      return 0;
    case 257:  // openat
    case 267:  // readlinkat
      return kNoEntry;
    case 262:  // newfstatat: a character device
      memset(reinterpret_cast<void*>(c), 0, 144);
      *reinterpret_cast<uint32_t*>(c + 24) = 0020620;
      return 0;
    case 318:  // getrandom
      memset(reinterpret_cast<void*>(a), 0x5a, b);
      return static_cast<int64_t>(b);
    case 60:     // exit
    case 231: {  // exit_group
      const char digit = static_cast<char>('0' + (a < 9 ? a : 9));
      print("exit status ");
      print(&digit, 1);
      print("\n");
      power_off();
    }
    default:
      return kNoSuchCall;
  }
}

// The loader's one module is the executable, the module's command line its arguments.
[[noreturn]] void machine_main(const uint32_t* boot_info) {
  // The serial port: 115,200 baud, 8 bits, with its FIFO.
  constexpr struct {
    uint16_t port;
    uint8_t value;
  } kSetup[] = {{0x3fb, 0x80}, {0x3f8, 1}, {0x3f9, 0}, {0x3fb, 3}, {0x3fa, 7}};
  for (const auto& [port, value] : kSetup) out(port, value);

  const auto* module = reinterpret_cast<const uint32_t*>(static_cast<uint64_t>(boot_info[6]));
  const auto* file = reinterpret_cast<const uint8_t*>(static_cast<uint64_t>(module[0]));
  const auto* text = reinterpret_cast<const char*>(static_cast<uint64_t>(module[2]));
  const auto* header = reinterpret_cast<const Elf64_Ehdr*>(file);
  const auto* segments = reinterpret_cast<const Elf64_Phdr*>(file + header->e_phoff);
  uint64_t segments_address = 0;
  for (int i = 0; i < header->e_phnum; ++i) {
    const Elf64_Phdr& segment = segments[i];
    if (segment.p_type != PT_LOAD) continue;
    const uint64_t end = segment.p_vaddr + segment.p_memsz;
    memset(reinterpret_cast<void*>(segment.p_vaddr), 0, segment.p_memsz);
    memcpy(reinterpret_cast<void*>(segment.p_vaddr), file + segment.p_offset, segment.p_filesz);
    if (segment.p_offset == 0) segments_address = segment.p_vaddr + header->e_phoff;
    if (end > break_begin) break_begin = end;
  }
  break_begin = (break_begin + kPage - 1) / kPage * kPage;
  break_end = break_begin;

  // argc, the arguments, no environment, the auxiliary vector.
  next_page += kStackBytes;
  auto* stack = reinterpret_cast<uint64_t*>(next_page - kPage);
  uint64_t count = 0;
  for (uint64_t i = 0; i + 1 < sizeof(arguments) && text[i] != 0; ++i) {
    const bool is_first = i == 0 || text[i - 1] == ' ';
    arguments[i] = text[i] == ' ' ? '\0' : text[i];
    if (is_first && text[i] != ' ') stack[++count] = reinterpret_cast<uint64_t>(arguments + i);
  }
  stack[0] = count;
  const uint64_t auxiliary[] = {AT_PHDR,   segments_address,
                                AT_PHENT,  sizeof(Elf64_Phdr),
                                AT_PHNUM,  header->e_phnum,
                                AT_PAGESZ, kPage,
                                AT_ENTRY,  header->e_entry,
                                AT_RANDOM, reinterpret_cast<uint64_t>(random_bytes),
                                AT_SECURE, 0,
                                AT_NULL,   0};
  memset(stack + count + 1, 0, 16);
  memcpy(stack + count + 3, auxiliary, sizeof(auxiliary));
  machine_enter(header->e_entry, reinterpret_cast<uint64_t>(stack));
}

}  // extern "C"
