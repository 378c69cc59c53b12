"""A program of its own: multiplies two bf16 tiles with AMX, and exits with what came of it.

0: the product is right. 3: the kernel refuses the tile registers. 4: the product is wrong. 5: the CPU does not say how
large its tiles are, so who asks it, as oneDNN does, makes tiles of no size and dies of them. Killed by a signal (SIGILL
on machines that advertise AMX and do not have it): it traps. Anything else: it could not be tried.

It needs only the standard library, so it costs an interpreter's start (20 ms), not an import of torch (1.3 s).
Its steps are those of oneDNN: ask the kernel for the tile registers and the CPU for their size, then use them.
"""

import ctypes
import mmap
import sys

REFUSED, WRONG, UNSIZED = 3, 4, 5
SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18
PR_SET_DUMPABLE = 4

# void f(unsigned out[3] *rdi): the last leaf that cpuid has; ebx and ecx of leaf 0x1d, 1: of palette 1.
ASK = bytes.fromhex(
    "53"  # push rbx
    "31c00fa28907"  # cpuid of leaf 0; out[0] = eax
    "b81d000000b9010000000fa2"  # cpuid of leaf 0x1d, 1
    "895f04894f08"  # out[1] = ebx: bytes of a row, tiles << 16; out[2] = ecx: rows
    "5bc3"  # pop rbx; ret
)
PALETTE_LEAF, LEAST_PALETTE = 0x1D, (64, 8, 16)  # bytes of a row, tiles, rows: what palette 1 has by definition

# void f(config *rdi, a *rsi, b *rdx, c *rcx): c = a @ b, one 16x32 by 32x16 product of bf16 with fp32 sums.
CODE = bytes.fromhex(
    "c4e2784907"  # ldtilecfg [rdi]
    "b840000000"  # mov eax, 64: bytes from row to row
    "c4e27b49c0"  # tilezero tmm0
    "c4e27b4b0c06"  # tileloadd tmm1, [rsi+rax]
    "c4e27b4b1402"  # tileloadd tmm2, [rdx+rax]
    "c4e26a5cc1"  # tdpbf16ps tmm0, tmm1, tmm2
    "c4e27a4b0401"  # tilestored [rcx+rax], tmm0
    "c4e27849c0"  # tilerelease
    "c3"  # ret
)
# Palette 1; tiles 0, 1 and 2 have 16 rows of 64 bytes.
TILE_CONFIG = bytes([1]) + bytes(15) + bytes([64, 0] * 3) + bytes(26) + bytes([16] * 3) + bytes(13)
_PAGES: list[ctypes.c_char] = []
ONES = b"\x80\x3f" * (16 * 32)  # 1.0 in bf16


def runnable(code: bytes) -> int:
    """Its address. For as long as the process lives."""
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    held = ctypes.c_char.from_buffer(page)
    _PAGES.append(held)
    return ctypes.addressof(held)


def ask() -> tuple[int, int, int]:
    """What ASK leaves."""
    found = (ctypes.c_uint32 * 3)()
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(runnable(ASK))(ctypes.addressof(found))
    return found[0], found[1], found[2]


def sized(found: tuple[int, int, int]) -> bool:
    """Whether cpuid describes palette 1. Beyond its last leaf it repeats another one."""
    last, row, rows = found
    told = row & 0xFFFF, row >> 16, rows & 0xFFFF
    return last >= PALETTE_LEAF and all(each >= least for each, least in zip(told, LEAST_PALETTE, strict=True))


def main() -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_DUMPABLE, 0)  # a trap that we expect leaves no core file
    if libc.syscall(SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) != 0:
        return REFUSED
    if not sized(ask()):
        return UNSIZED
    entry = runnable(CODE)
    product = ctypes.create_string_buffer(16 * 16 * 4)
    ctypes.CFUNCTYPE(None, *[ctypes.c_char_p] * 3, ctypes.c_void_p)(entry)(
        TILE_CONFIG, ONES, ONES, ctypes.addressof(product)
    )
    right = all(value == 32.0 for value in (ctypes.c_float * 256).from_buffer(product))
    return 0 if right else WRONG


if __name__ == "__main__":
    sys.exit(main())
