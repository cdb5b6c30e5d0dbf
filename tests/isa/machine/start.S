# From the boot loader (Multiboot 1, 32-bit) to machine_main: identity pages of 4 KiB over the first
# GiB, every vector state that the CPU has, the syscall instruction, and faults that are reported.
# All code runs in ring 0 with interrupts off.
.set TABLES, 0x2000000  # page tables; machine.cpp knows this address too

.section .multiboot, "a"
.align 4
.long 0x1badb002, 3, -(0x1badb002 + 3)

.text
.code32
.globl _start
_start:
  cli
  mov $stack_top, %esp
  mov %ebx, boot_info
  # PML4, PDPT, 512 page directory entries, 512 tables of 512 pages.
  mov $TABLES, %edi
  movl $(TABLES + 0x1003), (%edi)
  movl $(TABLES + 0x2003), 0x1000(%edi)
  lea 0x2000(%edi), %eax
  mov $(TABLES + 0x3003), %edx
  mov $512, %ecx
1:
  mov %edx, (%eax)
  add $0x1000, %edx
  add $8, %eax
  loop 1b
  lea 0x3000(%edi), %eax
  mov $3, %edx  # present, writable
  mov $(512 * 512), %ecx
2:
  mov %edx, (%eax)
  add $0x1000, %edx
  add $8, %eax
  loop 2b
  mov %edi, %cr3
  mov %cr4, %eax
  or $0x40620, %eax  # PAE, OSFXSR, OSXMMEXCPT, OSXSAVE
  mov %eax, %cr4
  mov $0xc0000080, %ecx  # EFER
  rdmsr
  or $0x101, %eax  # LME, SCE
  wrmsr
  mov %cr0, %eax
  and $~4, %eax  # EM
  or $0x80010002, %eax  # PG, WP, MP
  mov %eax, %cr0
  lgdt gdt_register
  ljmp $8, $long_mode

.code64
long_mode:
  mov $16, %eax
  mov %eax, %ds
  mov %eax, %es
  mov %eax, %ss
  mov $0xd, %eax  # which vector states there are
  xor %ecx, %ecx
  cpuid
  and $0x600e7, %eax  # x87, SSE, AVX, the three of AVX-512, the two of AMX
  xor %edx, %edx
  xor %ecx, %ecx
  xsetbv
  mov $0xc0000081, %ecx  # STAR: code segment 8
  xor %eax, %eax
  mov $0x00080008, %edx
  wrmsr
  mov $0xc0000082, %ecx  # LSTAR
  mov $syscall_entry, %eax
  xor %edx, %edx
  wrmsr
  mov $0xc0000084, %ecx  # FMASK
  xor %eax, %eax
  wrmsr
  # Every exception goes to its 16 bytes of `vectors`.
  mov $interrupt_table, %rdi
  mov $vectors, %rax
  mov $32, %ecx
3:
  mov %ax, (%rdi)
  movw $8, 2(%rdi)
  movw $0x8e00, 4(%rdi)
  mov %rax, %rdx
  shr $16, %rdx
  mov %dx, 6(%rdi)
  add $16, %rdi
  add $16, %rax
  loop 3b
  lidt interrupt_register
  mov $stack_top, %rsp
  mov boot_info, %edi
  call machine_main

.align 16
vectors:
.set i, 0
.rept 32
  push $i
  jmp fault_entry
  .align 16
  .set i, i + 1
.endr

fault_entry:
  mov %rsp, %rdi  # the vector, an error code where it has one, rip
  mov %cr2, %rsi
  mov $stack_top, %rsp
  call machine_fault

# The C library's system calls; rcx holds the return address, r11 the flags.
syscall_entry:
  mov %rsp, caller_rsp
  mov $syscall_stack_top, %rsp
  push %rcx
  push %r11
  push %rdi
  push %rsi
  push %rdx
  push %r10
  push %r8
  push %r9
  mov %rax, %rcx
  call machine_syscall  # (rdi, rsi, rdx, number)
  pop %r9
  pop %r8
  pop %r10
  pop %rdx
  pop %rsi
  pop %rdi
  pop %r11
  pop %rcx
  mov caller_rsp, %rsp
  jmp *%rcx

# machine_enter(entry, stack)
.globl machine_enter
machine_enter:
  mov %rsi, %rsp
  xor %edx, %edx
  xor %ebp, %ebp
  jmp *%rdi

.data
.align 16
gdt:
  .quad 0, 0x00af9a000000ffff, 0x00cf92000000ffff
gdt_register:
  .word 23
  .long gdt
interrupt_register:
  .word 32 * 16 - 1
  .quad interrupt_table
boot_info:
  .long 0
caller_rsp:
  .quad 0

.bss
.align 16
interrupt_table:
  .skip 32 * 16
  .skip 65536
stack_top:
  .skip 65536
syscall_stack_top:

.section .note.GNU-stack, "", @progbits
