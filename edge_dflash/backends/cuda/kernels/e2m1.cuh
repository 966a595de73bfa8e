// NVFP4 words with a pair of codes in each byte, the even one in its low bits, decoded by an instruction of SM100 and later.
#pragma once
#include "prelude.cuh"

#if __CUDA_ARCH__ >= 1000

// Compilers before CUDA 13.2 have no conversion to BF16. E2M1 as F16, times 2^-23, is a subnormal F16: 2 e2m1 in units of
// its last bit. The same bits as BF16 are e2m1 * 2^-132. Both ways end at e2m1 * scale * 2^-19, as with masks and shifts.
#if __CUDACC_VER_MAJOR__ > 13 || (__CUDACC_VER_MAJOR__ == 13 && __CUDACC_VER_MINOR__ >= 2)
#define CONVERT_E2M1 "cvt.rn.bf16x2.e2m1x2"
static constexpr u32 SCALE_BIAS = 0x31003100u;  // a block scale times 2^-19

__device__ __forceinline__ u32 as_bf16(u32 pair) { return pair; }
#else
#define CONVERT_E2M1 "cvt.rn.f16x2.e2m1x2"
static constexpr u32 SCALE_BIAS = 0x73007300u;  // times 2^113

__device__ __forceinline__ u32 as_bf16(u32 pair) {
  u32 d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(pair), "r"(0x00020002u));
  return d;
}
#endif

// The four BF16 pairs of a word.
__device__ __forceinline__ void byte_pairs(u32 w, u32 (&pair)[4]) {
  asm("{\n\t.reg .b8 a, b, c, d;\n\tmov.b32 {a, b, c, d}, %4;\n\t" CONVERT_E2M1 " %0, a;\n\t" CONVERT_E2M1
      " %1, b;\n\t" CONVERT_E2M1 " %2, c;\n\t" CONVERT_E2M1 " %3, d;\n\t}"
      : "=r"(pair[0]), "=r"(pair[1]), "=r"(pair[2]), "=r"(pair[3])
      : "r"(w));
#pragma unroll
  for (int i = 0; i < 4; ++i) pair[i] = as_bf16(pair[i]);
}
#undef CONVERT_E2M1

// Scale bytes 2m and 2m + 1 as a BF16 pair: the factors of rows g and g + 8 of tile ``m``.
__device__ __forceinline__ u32 scale_pair(u32 bytes, int m) {
  return __byte_perm(bytes, 0, m ? 0x4342u : 0x4140u) * 16u + SCALE_BIAS;
}

#endif
