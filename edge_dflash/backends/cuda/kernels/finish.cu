// What follows a linear whose K was split over blocks: the sum of the splits, the residual, and the next RMS norm.
#include "blocks.cuh"
#include "norm.cuh"

static constexpr int THREADS = 1024;

// One block a row. y = bf16(scale * sum over splits, in order); out = bf16(residual + y) or y; and, when norm_weight is
// given, norm_out = bf16(out / sqrt(mean(out^2) + eps) * norm_weight), in the order of the kernel rms_norm, bit for bit.
// partial is [splits, rows, width]; columns is even. Dynamic shared memory: 2 * columns bytes.
extern "C" __global__ void __launch_bounds__(THREADS)
    linear_finish(const float* partial, int splits, int width, const float* scale, const u16* residual,
                  int residual_stride, u16* out, int out_stride, int columns, const float* norm_weight, float eps,
                  u16* norm_out, int norm_stride) {
  extern __shared__ u32 kept[];
  __shared__ float sums[NORM_THREADS / 32];
  pdl_trigger();
  pdl_wait();
  const u32* extra = residual ? (const u32*)(residual + (u64)blockIdx.x * residual_stride) : nullptr;
  u32* to = (u32*)(out + (u64)blockIdx.x * out_stride);
  const float* from = partial + (u64)blockIdx.x * width;
  const u64 plane = (u64)gridDim.x * width;
  for (int i = threadIdx.x; i < columns / 2; i += THREADS) {
    const float2 w = *(const float2*)(scale + 2 * i);
    const u32 before = extra ? extra[i] : 0;
    float2 total = *(const float2*)(from + 2 * i);
#pragma unroll 4
    for (int s = 1; s < splits; s++) {
      const float2 more = *(const float2*)(from + s * plane + 2 * i);
      total.x = __fadd_rn(total.x, more.x), total.y = __fadd_rn(total.y, more.y);
    }
    u32 y = pack_bf16(__fmul_rn(total.x, w.x), __fmul_rn(total.y, w.y));
    if (extra) y = pack_bf16(__fadd_rn(bf16_low(before), bf16_low(y)), __fadd_rn(bf16_high(before), bf16_high(y)));
    to[i] = y;
    kept[i] = y;
  }
  if (!norm_weight) return;
  __syncthreads();
  if (threadIdx.x < NORM_THREADS) {
    float squares = 0.0f;
#pragma unroll 4
    for (int i = threadIdx.x; i < columns / 2; i += NORM_THREADS) squares = add_squares(squares, kept[i]);
    leave_squares(sums, squares);
  }
  __syncthreads();
  const float inverse = inverse_root_mean(sums, columns, eps);
  u32* normal = (u32*)(norm_out + (u64)blockIdx.x * norm_stride);
  for (int i = threadIdx.x; i < columns / 2; i += THREADS)
    normal[i] = normed(kept[i], inverse, *(const float2*)(norm_weight + 2 * i));
}

// norm_out = bf16(x / sqrt(mean(x^2) + eps) * norm_weight), in the order of the kernel rms_norm, bit for bit; x is read
// once, its weights before it is there. One block a row; columns is even and at most 2 * PAIRS * NORM_THREADS.
template <int PAIRS>
__device__ __forceinline__ void norm_row(const u16* x, int x_stride, int columns, const float* norm_weight, float eps,
                                         u16* norm_out, int norm_stride) {
  __shared__ float sums[NORM_THREADS / 32];
  float2 w[PAIRS];
  u32 kept[PAIRS];
  const int pairs = columns / 2;
#pragma unroll
  for (int k = 0; k < PAIRS; k++) {
    const int i = threadIdx.x + k * NORM_THREADS;
    w[k] = i < pairs ? *(const float2*)(norm_weight + 2 * i) : make_float2(0.0f, 0.0f);
  }
  u16* to = norm_out + element_at(norm_stride, blockIdx.x, 2 * threadIdx.x);
  const int step = elements_to(norm_stride, 2 * NORM_THREADS);
  pdl_trigger();
  pdl_wait();
  const u32* from = (const u32*)(x + (u64)blockIdx.x * x_stride);
#pragma unroll
  for (int k = 0; k < PAIRS; k++) {
    const int i = threadIdx.x + k * NORM_THREADS;
    kept[k] = i < pairs ? from[i] : 0;
  }
  float squares = 0.0f;
#pragma unroll
  for (int k = 0; k < PAIRS; k++) squares = add_squares(squares, kept[k]);  // zeros beyond the row change nothing
  leave_squares(sums, squares);
  __syncthreads();
  const float inverse = inverse_root_mean(sums, columns, eps);
#pragma unroll
  for (int k = 0; k < PAIRS; k++) {
    const int i = threadIdx.x + k * NORM_THREADS;
    if (i < pairs) *(u32*)(to + k * step) = normed(kept[k], inverse, w[k]);
  }
}

#define NORM(COLUMNS)                                                                                                 \
  extern "C" __global__ void __launch_bounds__(NORM_THREADS) linear_norm_##COLUMNS(                                   \
      const u16* x, int x_stride, int columns, const float* norm_weight, float eps, u16* norm_out, int norm_stride) { \
    norm_row<COLUMNS / 2 / NORM_THREADS>(x, x_stride, columns, norm_weight, eps, norm_out, norm_stride);              \
  }
NORM(512)
NORM(2560)
NORM(4096)
NORM(5120)
NORM(8192)
