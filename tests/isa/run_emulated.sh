#!/bin/sh
# Runs isa_check on a CPU that this machine does not have: on the bare machine of machine/, under the Bochs emulator.
#
#   tests/isa/run_emulated.sh [CPU model [isa_check's arguments …]]
#
# The model is one of `bochs --help cpu`: the default, corei7_skylake_x, has AVX-512 F, BW, VL and DQ; corei7_icelake_u
# has VNNI, too; from Bochs 3.0 on, sapphire_rapids has BF16 and AMX as well, and arrow_lake AVX-VNNI without AVX-512.
# The boot takes some 2 seconds of CPU time; isa_check runs some hundred times slower than on the machine itself.
#
# Needs, besides what a build needs, the Debian packages bochs, bochsbios, vgabios, isolinux, syslinux-common and xorriso
# (apt-get install --no-install-recommends). Debian 12 has Bochs 2.7; Debian 13's source of 3.0 builds there by
# `./configure --with-rfb --enable-cpu-level=6 --enable-x86-64 --enable-avx --enable-evex --enable-amx --enable-pci
# --enable-all-optimizations --disable-docbook && make`, and runs with Debian 12's BIOS. Before `make`, mend AMX's signed
# bytes, which 3.0 takes as unsigned, and the upper half of VCVTNE2PS2BF16, which it reads from past the operand's end:
#   sed -i -E -e '/ DPBD(SS|SU)\(/,/^}/ s/Bit32s\((xbyte...)\)/Bit32s(Bit8s(\1))/' \
#     -e '/ DPBD(SS|US)\(/,/^}/ s/Bit32s\((ybyte...)\)/Bit32s(Bit8s(\1))/' cpu/avx/amx.cc
#   sed -i '/::VCVTNE2PS2BF16/,/^}/ s/op1.vmm32u(n)/op1.vmm32u(n - DWORD_ELEMENTS(len))/' cpu/avx/avx512_bf16.cc
# Variables: BOCHS (bochs), PYTHON (python3), CXX (g++), BUILD_DIR (build/emulated), TIMEOUT (3600 seconds). The exit
# status is isa_check's, or 2 without one.
set -eu
cd "$(dirname "$0")/../.."
model=${1:-corei7_skylake_x}
[ $# -eq 0 ] || shift
arguments=${*:-avx512 avx2}
build=${BUILD_DIR:-build/emulated}
python=${PYTHON:-python3}
bochs=${BOCHS:-bochs}

cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DLLMSERVE_ISA_CHECK_STATIC=ON \
  -DPython_EXECUTABLE="$(command -v "$python")" -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)" >/dev/null
cmake --build "$build" --target isa_check

# A disc that boots machine/ with isa_check as its module.
machine=$build/machine-$model
rm -rf "$machine"
mkdir -p "$machine/disc/isolinux"
"${CXX:-g++}" -std=c++20 -O2 -Wall -Wextra -ffreestanding -mgeneral-regs-only -mno-red-zone -fno-pic -fno-exceptions \
  -fno-rtti -fno-stack-protector -fcf-protection=none -fno-asynchronous-unwind-tables -nostdlib -static -no-pie \
  -Wl,-n,-Ttext=0x1000000,--section-start=.multiboot=0xfff000,--build-id=none,--no-warn-rwx-segments \
  -o "$machine/machine64" tests/isa/machine/start.S tests/isa/machine/machine.cpp
objcopy -O elf32-i386 "$machine/machine64" "$machine/disc/machine" # what Multiboot loads
strip -o "$machine/disc/check" "$build/tests/isa/isa_check"
for file in /usr/lib/ISOLINUX/isolinux.bin /usr/lib/syslinux/modules/bios/ldlinux.c32 \
  /usr/lib/syslinux/modules/bios/mboot.c32 /usr/lib/syslinux/modules/bios/libcom32.c32; do
  cp "$file" "$machine/disc/isolinux"
done
cat >"$machine/disc/isolinux/isolinux.cfg" <<END
DEFAULT check
PROMPT 0
LABEL check
  KERNEL mboot.c32
  APPEND /machine --- /check --threads 1 --exact $arguments
END
xorriso -as mkisofs -quiet -o "$machine/disc.iso" -b isolinux/isolinux.bin -c isolinux/boot.cat -no-emul-boot \
  -boot-load-size 4 -boot-info-table "$machine/disc" 2>/dev/null
# The fewest instructions a second, so that the BIOS's waits are short.
cat >"$machine/bochsrc" <<END
plugin_ctrl: speaker=0
display_library: rfb, options="timeout=0"
memory: guest=1024, host=1024
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/vgabios/vgabios.bin
cpu: model=$model, count=1, ips=1000000, reset_on_triple_fault=0
ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14
ata0-master: type=cdrom, path="$machine/disc.iso", status=inserted
boot: cdrom
clock: sync=none
com1: enabled=1, mode=file, dev="$machine/serial"
log: $machine/log
panic: action=fatal
END
# Debian's Bochs has a debugger, which waits for a command.
echo continue >"$machine/commands"
commands=
if "$bochs" --help 2>&1 | grep -q -e '^ *-rc '; then commands="-rc $machine/commands"; fi
# Powering off ends Bochs with status 1.
timeout "${TIMEOUT:-3600}" nice -n 19 "$bochs" -q -f "$machine/bochsrc" $commands </dev/null >"$machine/output" 2>&1 || true
[ -s "$machine/serial" ] || { echo "the machine did not boot: see $machine/log" >&2; exit 2; }
cat "$machine/serial"
status=$(sed -n 's/^exit status //p' "$machine/serial")
exit "${status:-2}"
