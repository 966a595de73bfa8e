// Small kernels of a pass: gather, norm, row selection, commit.
#include "blocks.cuh"
#include "control.cuh"
#include "norm.cuh"

static constexpr int THREADS = NORM_THREADS;

// Row ids[blockIdx.x] of a table [V, columns]; V + i is row i of `images` [gridDim.x, columns], unless that is null.
__device__ __forceinline__ const u16* embedding(const int* ids, const u16* table, int columns, int vocabulary,
                                                const u16* images) {
  const int asked = ids[blockIdx.x], image = asked - vocabulary;
  if (images && image >= 0 && image < gridDim.x) return images + (u64)image * columns;
  return table + (u64)(asked >= 0 && asked < vocabulary ? asked : 0) * columns;
}

// The norm of row blockIdx.x, whose pairs `keep` is told, AHEAD of them loaded together.
template <class Keep>
__device__ __forceinline__ void norm_row(const u16* row, const float* weight, u16* out, int columns, int out_stride,
                                         float eps, const Keep& keep) {
  constexpr int AHEAD = 8;
  __shared__ float sums[THREADS / 32];
  const u32* from = (const u32*)row;
  const int pairs = columns / 2;
  float squares = 0.0f;
  for (int first = threadIdx.x; first < pairs; first += AHEAD * THREADS) {
    u32 pair[AHEAD];
#pragma unroll
    for (int k = 0; k < AHEAD; ++k) pair[k] = first + k * THREADS < pairs ? from[first + k * THREADS] : 0;
#pragma unroll
    for (int k = 0; k < AHEAD; ++k) {
      squares = add_squares(squares, pair[k]);  // zeros beyond the row change nothing
      if (first + k * THREADS < pairs) keep(first + k * THREADS, pair[k]);
    }
  }
  leave_squares(sums, squares);
  __syncthreads();
  const float inverse = inverse_root_mean(sums, columns, eps);
  u16* to = out + element_at(out_stride, blockIdx.x, 2 * threadIdx.x);
  const int step = elements_to(out_stride, 2 * THREADS);
#pragma unroll 4
  for (int i = threadIdx.x; i < pairs; i += THREADS, to += step)
    *(u32*)to = normed(from[i], inverse, *(const float2*)(weight + 2 * i));
}

// Row ids[blockIdx.x] of table [V, H] BF16; pieces of 8 values. Ids outside the table give row 0 (never in a valid row).
extern "C" __global__ void __launch_bounds__(THREADS)
    gather_rows(const int* ids, const u16* table, u16* out, int columns, int vocabulary, int out_stride,
                const u16* images) {
  pdl_wait();
  pdl_trigger();
  const uint4* from = (const uint4*)embedding(ids, table, columns, vocabulary, images);
  uint4* to = (uint4*)(out + (u64)blockIdx.x * out_stride);
  for (int i = threadIdx.x; i < columns / 8; i += THREADS) to[i] = from[i];
}

// gather_rows, and rms_norm of what it gathers.
extern "C" __global__ void __launch_bounds__(THREADS)
    gather_norm(const int* ids, const u16* table, u16* out, int columns, int vocabulary, int out_stride,
                const u16* images, const float* weight, float eps, u16* norm_out, int norm_stride) {
  pdl_wait();
  pdl_trigger();
  u32* to = (u32*)(out + (u64)blockIdx.x * out_stride);
  norm_row(embedding(ids, table, columns, vocabulary, images), weight, norm_out, columns, norm_stride, eps,
           [&](int i, u32 pair) { to[i] = pair; });
}

// bf16(x / sqrt(mean(x^2) + eps) * w), one block a row; the order of the sum depends on the columns alone.
extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm(const u16* x, const float* weight, u16* out, int columns, int x_stride, int out_stride, float eps) {
  pdl_wait();
  pdl_trigger();
  norm_row(x + (u64)blockIdx.x * x_stride, weight, out, columns, out_stride, eps, [](int, u32) {});
}

// Last valid row (control word ROWS, or `rows`) of x [rows, columns] BF16.
extern "C" __global__ void __launch_bounds__(THREADS)
    last_row(const u16* x, u16* out, const int* rows_there, int rows, int columns, int x_stride) {
  pdl_wait();
  pdl_trigger();
  const int row = max((rows_there ? min(*rows_there, rows) : rows) - 1, 0), i = blockIdx.x * THREADS + threadIdx.x;
  if (i < columns / 8) ((uint4*)out)[i] = ((const uint4*)(x + (u64)row * x_stride))[i];
}

// rows < 0: a pass or flush has replayed the pending rows. rows >= 0: commit so many rows of the last verify. Thread t has
// slot t.
extern "C" __global__ void commit_rows(int* control, int rows, int slots) {
  pdl_wait();
  pdl_trigger();
  if ((int)threadIdx.x >= slots) return;
  control += threadIdx.x * CONTROL_WORDS;
  if (rows < 0) {
    control[PENDING] = 0;
  } else {
    control[LENGTH] += rows, control[PENDING] = rows;
  }
}

// End of a prefill pass: its ROWS rows are committed and in the recurrent state.
extern "C" __global__ void commit_prefill(int* control) {
  pdl_wait();
  pdl_trigger();
  if (threadIdx.x) return;
  control[LENGTH] += control[ROWS], control[PENDING] = 0;
}
