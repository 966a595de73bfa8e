// DFlash2's grouped dynamic convolution over the rows of a block in each slot, with what follows it: the residual and the
// next RMS norm.
#include "blocks.cuh"
#include "norm.cuh"

static constexpr int THREADS = 512;

struct Conv {
  const u16* u;         // [rows, columns]
  const u16* c;         // coefficients: [rows, taps, columns / group] in rows of c_stride, at this side
  const float* base;    // [taps, columns]
  const u16* residual;  // null: none
  u16* out;
  const float* weight;  // of the norm; null: none
  u16* norm_out;
  int u_stride, c_stride, residual_stride, out_stride, norm_stride;
  int taps, group, columns;
  float eps;
};

// One pair of columns of a row: sum over taps t, in order, of (base[t] + c[row, t]) * u[row - t], of rows of its block;
// `before` lie there before it.
__device__ __forceinline__ u32 convolved(const Conv& v, int row, int before, int i) {
  const int low = 2 * i / v.group, high = (2 * i + 1) / v.group, groups = v.columns / v.group;
  float x = 0.0f, y = 0.0f;
#pragma unroll 2
  for (int t = 0; t < v.taps && t <= before; t++) {
    const float2 base = *(const float2*)(v.base + t * v.columns + 2 * i);
    const u16* c = v.c + (u64)row * v.c_stride + t * groups;
    const u32 u = *(const u32*)(v.u + (u64)(row - t) * v.u_stride + 2 * i);
    x = __fadd_rn(x, __fmul_rn(__fadd_rn(base.x, from_bf16(c[low])), bf16_low(u)));
    y = __fadd_rn(y, __fmul_rn(__fadd_rn(base.y, from_bf16(c[high])), bf16_high(u)));
  }
  return pack_bf16(x, y);
}

// out = bf16(conv), or bf16(residual + bf16(conv)), and its norm in the order of the kernel rms_norm, bit for bit. Blocks
// (rows of a block, parts of the columns, slots), one part where there is a norm; columns is even. Dynamic shared memory:
// 2 * columns bytes.
extern "C" __global__ void __launch_bounds__(THREADS) conv_rows(const __grid_constant__ Conv v) {
  extern __shared__ u32 kept[];
  __shared__ float sums[NORM_THREADS / 32];
  const int row = blockIdx.z * gridDim.x + blockIdx.x, pairs = v.columns / 2;
  pdl_wait();
  pdl_trigger();
  for (int i = blockIdx.y * THREADS + threadIdx.x; i < pairs; i += gridDim.y * THREADS) {
    u32 y = convolved(v, row, blockIdx.x, i);
    if (v.residual) {
      const u32 before = *(const u32*)(v.residual + (u64)row * v.residual_stride + 2 * i);
      y = pack_bf16(__fadd_rn(bf16_low(before), bf16_low(y)), __fadd_rn(bf16_high(before), bf16_high(y)));
    }
    *(u32*)(v.out + element_at(v.out_stride, row, 2 * i)) = y;
    if (v.weight) kept[i] = y;
  }
  if (!v.weight) return;
  __syncthreads();
  if (threadIdx.x < NORM_THREADS) {
    float squares = 0.0f;
#pragma unroll 4
    for (int i = threadIdx.x; i < pairs; i += NORM_THREADS) squares = add_squares(squares, kept[i]);
    leave_squares(sums, squares);
  }
  __syncthreads();
  const float inverse = inverse_root_mean(sums, v.columns, v.eps);
  for (int i = threadIdx.x; i < pairs; i += THREADS)
    *(u32*)(v.norm_out + element_at(v.norm_stride, row, 2 * i)) =
        normed(kept[i], inverse, *(const float2*)(v.weight + 2 * i));
}
