// What all kernels share: programmatic dependent launch, conversions, fast functions, sums over lanes, copies to shared
// memory, tensor-core fragments. No CUDA header is included, so that a unit compiles fast.
//
// Arithmetic whose bits matter is written with the _rn intrinsics: the compiler may then not contract it differently
// in two places that must agree. A BF16 or F16 pair is a 32-bit register, element 0 in the low half.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

#define NEG_INF __int_as_float(0xff800000)
static constexpr u32 ALL = 0xffffffffu;  // lanes of a warp

// Wait for the kernels before this one: their writes are then visible. A kernel launched without overlap passes at once.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Let the next kernel start; it still waits for this one's end before it reads. Kernels that wait first and trigger right
// after let code before the wait of the next kernel rely on everything that ran before this one.
__device__ __forceinline__ void pdl_trigger() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// A word of the control block before the wait of its reader: from L2, where the kernel that wrote it left it. The L1 of
// this multiprocessor may still hold what a kernel read before that, as only a wait promises to make writes visible.
__device__ __forceinline__ int early_word(const int* word) { return __ldcg(word); }

__device__ __forceinline__ float from_bf16(u16 x) { return __uint_as_float(static_cast<u32>(x) << 16); }
__device__ __forceinline__ float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ u16 to_bf16(float x) {
  u16 d;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(d) : "f"(x));
  return d;
}
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ u32 pack_f16(float low, float high) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ u32 mul_bf16x2(u32 a, u32 b) {
  u32 d;
#if __CUDA_ARCH__ >= 900
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#else
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));  // a * b + (-0): exact sign
#endif
  return d;
}

// E4M3 code of x / scale: nearest, ties to even, saturating at 448, NaN gives 0x7F. Bytes equal weights/quantize.to_e4m3.
__device__ __forceinline__ u32 to_e4m3(float x, float scale) {
  float y = __fdiv_rn(x, scale);
  u32 bits = __float_as_uint(y), sign = (bits >> 24) & 0x80u, size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return 0x7fu;
  size = min(size, 0x43e00000u);                                                              // 448
  if (size < 0x3c800000u) return sign | (u32)__float2int_rn(__uint_as_float(size) * 512.0f);  // below 2^-6
  size += 0x7ffffu + ((size >> 20) & 1u);
  return sign | ((size >> 20) - (120u << 3));
}

// Two E4M3 codes (low 16 bits of x) as an F16 pair, times E4M3_PAIR_SCALE^-1. Exact.
#if __CUDA_ARCH__ >= 890
static constexpr float E4M3_PAIR_SCALE = 1.0f;
__device__ __forceinline__ u32 e4m3_pair(u32 x) {
  u32 pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"((u16)x));
  return pair;
}
#else
static constexpr float E4M3_PAIR_SCALE = 256.0f;  // the exponent field is not moved to F16's bias
__device__ __forceinline__ u32 e4m3_pair(u32 x) {
  u32 spread = __byte_perm(x, 0, 0x1404);  // each code in the high byte of its half
  return (spread & 0x80008000u) | ((spread >> 1) & 0x3f803f80u);
}
#endif

// One instruction of the special function unit: 2^x (2^0 is exactly 1, 2^-inf exactly 0), log2, 1 / x (within 1 ulp),
// 1 / sqrt(x).
#define FAST(NAME, INSTRUCTION)                     \
  __device__ __forceinline__ float NAME(float x) {  \
    float y;                                        \
    asm(INSTRUCTION " %0, %1;" : "=f"(y) : "f"(x)); \
    return y;                                       \
  }
FAST(exp2_fast, "ex2.approx.ftz.f32")
FAST(log2_fast, "lg2.approx.ftz.f32")
FAST(reciprocal_fast, "rcp.approx.ftz.f32")
FAST(reciprocal_root_fast, "rsqrt.approx.ftz.f32")
#undef FAST

__device__ __forceinline__ float sigmoid(float x) {  // relative error below 2^-21
  return reciprocal_fast(__fadd_rn(1.0f, exp2_fast(__fmul_rn(x, -1.4426950408889634f))));
}
__device__ __forceinline__ float silu(float x) { return __fmul_rn(x, sigmoid(x)); }

// Sum over the lanes that differ in the bits below `lanes`; every lane gets the same bits.
template <int lanes>
__device__ __forceinline__ float lane_sum(float x) {
#pragma unroll
  for (int bit = lanes / 2; bit > 0; bit /= 2) x = __fadd_rn(x, __shfl_xor_sync(ALL, x, bit));
  return x;
}

__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// Asynchronous copies from global to shared memory, which do not pass through registers, in groups that a thread commits.
__device__ __forceinline__ void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy16(void* to, const void* from) { copy16(shared_address(to), from); }
__device__ __forceinline__ void copy8(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void copy4(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
// Zeros when ``valid`` is false: ``from`` is then not read.
__device__ __forceinline__ void copy16_or_zero(u32 to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy16_or_zero(void* to, const void* from, bool valid) {
  copy16_or_zero(shared_address(to), from, valid);
}
// Through L1, for what several warps or passes read again.
__device__ __forceinline__ void copy16_or_zero_cached(u32 to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait until all but the newest `left` committed groups of this thread have arrived.
template <int left>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory");
}

__device__ __forceinline__ uint4 load_shared16(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
  return v;
}
__device__ __forceinline__ u32 load_shared4(u32 at) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
  return v;
}
__device__ __forceinline__ void store_shared4(u32 at, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory");
}

// Four 8 x 8 matrices of 16-bit values: lane 8 i + r names row r of matrix i (16 bytes).
#define LOAD_MATRICES(NAME, TRANSPOSED)                                                        \
  __device__ __forceinline__ void NAME(u32(&r)[4], u32 address) {                              \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4" TRANSPOSED ".shared.b16 {%0,%1,%2,%3}, [%4];" \
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])                              \
                 : "r"(address)                                                                \
                 : "memory");                                                                  \
  }
LOAD_MATRICES(load_matrices, "")
LOAD_MATRICES(load_matrices_transposed, ".trans")
#undef LOAD_MATRICES

// c [16 x 8] += a [16 x 16] b [16 x 8], F16 or BF16 operands, FP32 sums. With g = lane / 4 and t = lane % 4 a lane holds
// a0: row g, k 2t 2t+1;  a1: row g+8, same k;  a2, a3: the same rows, k + 8;  b0: k 2t 2t+1, column g;  b1: k + 8;
// c0 c1: row g, columns 2t 2t+1;  c2 c3: row g+8.
template <bool f16>
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#define MMA(TYPE)                                                           \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE       \
               ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])             \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
  if (f16)
    MMA("f16");
  else
    MMA("bf16");
#undef MMA
}
