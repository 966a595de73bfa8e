// Small kernels of a pass: gather, norm, row selection, commit.
#include "control.cuh"
#include "norm.cuh"

static constexpr int THREADS = NORM_THREADS;

// Row ids[blockIdx.x] of table [V, H] BF16; pieces of 8 values. Ids outside the table give row 0 (never in a valid row).
extern "C" __global__ void __launch_bounds__(THREADS)
    gather_rows(const int* ids, const u16* table, u16* out, int columns, int vocabulary, int out_stride) {
  pdl_wait();
  pdl_trigger();
  const int row = blockIdx.x, asked = ids[row], id = asked >= 0 && asked < vocabulary ? asked : 0;
  const uint4* from = (const uint4*)(table + (u64)id * columns);
  uint4* to = (uint4*)(out + (u64)row * out_stride);
  for (int i = threadIdx.x; i < columns / 8; i += THREADS) to[i] = from[i];
}

// bf16(x / sqrt(mean(x^2) + eps) * w), one block a row; the order of the sum depends on the columns alone.
extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm(const u16* x, const float* weight, u16* out, int columns, int x_stride, int out_stride, float eps) {
  __shared__ float sums[THREADS / 32];
  pdl_wait();
  pdl_trigger();
  const u32* from = (const u32*)(x + (u64)blockIdx.x * x_stride);
  u32* to = (u32*)(out + (u64)blockIdx.x * out_stride);
  float squares = 0.0f;
  for (int i = threadIdx.x; i < columns / 2; i += THREADS) squares = add_squares(squares, from[i]);
  leave_squares(sums, squares);
  __syncthreads();
  const float inverse = inverse_root_mean(sums, columns, eps);
  for (int i = threadIdx.x; i < columns / 2; i += THREADS)
    to[i] = normed(from[i], inverse, *(const float2*)(weight + 2 * i));
}

// Last valid row (control word ROWS, or `rows`) of x [rows, columns] BF16.
extern "C" __global__ void __launch_bounds__(THREADS)
    last_row(const u16* x, u16* out, const int* rows_there, int rows, int columns, int x_stride) {
  pdl_wait();
  pdl_trigger();
  const int row = max((rows_there ? min(*rows_there, rows) : rows) - 1, 0), i = blockIdx.x * THREADS + threadIdx.x;
  if (i < columns / 8) ((uint4*)out)[i] = ((const uint4*)(x + (u64)row * x_stride))[i];
}

// rows < 0: a pass or flush has replayed the pending rows. rows >= 0: commit so many rows of the last verify.
extern "C" __global__ void commit_rows(int* control, int rows) {
  pdl_wait();
  pdl_trigger();
  if (threadIdx.x) return;
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
