// What the state kernels share: programmatic dependent launch, 16-bit and E4M3 conversions, tensor-core fragments,
// asynchronous copies. No CUDA header is included, so that a unit compiles fast.
//
// Arithmetic whose bits matter is written with the _rn intrinsics: the compiler may then not contract it differently
// in two places that must agree.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define NEG_INF __int_as_float(0xff800000)
static constexpr u32 ALL = 0xffffffffu;

// Words of the control block in device memory (int32), mirrored by memory.Control.
enum Control { LENGTH = 0, PENDING = 1, ROWS = 2, ANCHOR = 3 };

// Every kernel waits first and triggers right after: code before the wait of the next kernel may then rely on
// everything that ran before this one.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void pdl_trigger() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float bf16_float(u16 x) { return __uint_as_float((u32)x << 16); }

__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ u16 to_bf16(float x) { return (u16)pack_bf16(x, 0.0f); }

__device__ __forceinline__ u32 pack_f16(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// E4M3 code of x / scale: nearest, ties to even, saturating at 448, NaN gives 0x7F. Bytes equal quant/fp8.to_e4m3.
__device__ __forceinline__ u32 to_e4m3(float x, float scale) {
    float y = __fdiv_rn(x, scale);
    u32 bits = __float_as_uint(y), sign = (bits >> 24) & 0x80u, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return 0x7fu;
    size = min(size, 0x43e00000u);                                                   // 448
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

__device__ __forceinline__ float exp2_fast(float x) {  // 2^0 is exactly 1, 2^-inf exactly 0
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal_fast(float x) {  // within 1 ulp
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float reciprocal_root_fast(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
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

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void copy16(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
__device__ __forceinline__ void copy16_or_zero(void* shared, const void* global, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(there ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int left>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory");
}

__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// c [16 x 8] += a [16 x 16] b [16 x 8], F16 or BF16 operands, FP32 sums.
template <bool f16>
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if (f16)
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
