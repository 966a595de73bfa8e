// delta_verify where a multiprocessor has three blocks: several slots on Hopper.
#pragma once
#include "delta_cluster.cuh"

#if __CUDA_ARCH__ == 900
namespace clustered {

// Three of them have room in a multiprocessor.
struct CrowdedHead {
  union {
    float tile[D * WIDE];  // the block's part of S, in memory before the own rows begin
    Outputs outputs[BLOCK];
  };
  union {
    struct {  // until own rows are prepared
      Row rows[BLOCK];
      RawTape raw[BEFORE + BLOCK];
    } before;
    OwnRow rows[BLOCK];
  };
  float conv[TAPS][2 * D + WIDE];
  RawOwn raw[BEFORE + BLOCK];
  float squares[BLOCK];
  u64 squares_there;
  int hint;
};
static_assert(sizeof(CrowdedHead) == 70864, "delta.py has this number");

// As delta_verify, without a warp beside those that have columns.
extern "C" __global__ void __cluster_dims__(1, CLUSTER, 1) __launch_bounds__(WARPS * 32, 3)
    delta_verify_crowded(const u16* qkv, const u16* z, const u16* a, const u16* b, int qkv_stride, int z_stride,
                         int a_stride, int b_stride, const float* conv, const float* a_log, const float* dt_bias,
                         const float* norm, float* state, u16* history, u16* tape_u, float* tape_g, float* tape_beta,
                         int* arrived, u16* out, const int* control, int lanes, int own, int tape_rows, int hk, int hv,
                         int out_stride, float eps) {
  extern __shared__ uint4 dynamic[];
  CrowdedHead& h = *(CrowdedHead*)dynamic;
  const int* words = words_of(control, blockIdx.z);
  const int seen = min(early_word(words + PENDING), BLOCK);  // a hint, as there
  const int home = home_of(words, lanes), first_row = blockIdx.z * own;
  const int head = blockIdx.x, rank = blockIdx.y, key_head = head / (hv / hk);
  const int warp = __shfl_sync(ALL, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const bool gates_here = warp == ((head * 2 + rank) & (WARPS - 1));
  const int channels = 2 * hk * D + hv * D;
  if (home < 0) return leave_idle(out, first_row, own, head * D + rank * WIDE + lane * 2, out_stride, WARPS);
  history += (u64)home * BEFORE * channels;
  tape_u += (u64)home * tape_rows * channels;
  const int gates = home * tape_rows * hv + head;  // of the tape's first row
  const Channels at{key_head * D, (hk + key_head) * D, 2 * hk * D + head * D + rank * WIDE};
  const Line line{history, tape_u, qkv, BLOCK, channels, qkv_stride, TAPS};
  const Tile tile{h.tile, state + ((u64)home * hv + head) * D * D + rank * WIDE};
  cluster_start(&h.squares_there, own * 4);

  auto fetch_tape = [&](int t) { at.fetch(&h.before.raw[BEFORE + t], line.row(t)); };
  float tape_gate[2] = {0.0f, 0.0f};    // a row of the tape a lane of one warp: g, beta
  auto fetch_rest = [&](int pending) {  // what depends on the number of pending rows
    if (gates_here) {
      const int i = gates + lane * hv;
      if (lane < pending) tape_gate[0] = __ldcg(tape_g + i), tape_gate[1] = __ldcg(tape_beta + i);
    }
    if (warp < BEFORE) at.fetch(&h.raw[warp], line.row(pending - BEFORE + warp));
#pragma unroll 1
    for (int t = WARPS + warp; t < pending; t += WARPS) fetch_tape(t);
  };
  auto prepare_pending = [&](int pending) {
    if (gates_here && lane < pending)
      *(float2*)&h.before.rows[lane].decay = make_float2(expf(tape_gate[0]), tape_gate[1]);
#pragma unroll 1
    for (int t = warp; t < pending; t += WARPS) prepare(h.conv, &h.before.rows[t], &h.before.raw[t]);
  };
  Columns s;
  auto replay_pending = [&](int pending) {
    tile.get(s);
    steps(s, h.before.rows, pending, h.outputs);
    if (pending > 0) tile.put(s);
  };

  // Weights, and the rows of the tape that are mostly pending, first.
  {
    const int n = threadIdx.x / 64, c = threadIdx.x % 64 * 4;
    copy16(&h.conv[n][c], conv + n * channels + (c < D ? at.q : at.k - D) + c);
  }
  if (warp >= WARPS - 2) {
    const int n = threadIdx.x / 16 % 4, c = threadIdx.x % 16 * 4;
    copy16(&h.conv[n][2 * D + c], conv + n * channels + at.v + c);
  }
  if (warp < BEFORE) fetch_tape(warp - BEFORE);
  if (warp < tape_rows) fetch_tape(warp);
  copy_commit();
  tile.fetch();
  copy_commit();
  fetch_rest(seen);
  copy_commit();
  if (threadIdx.x == 0) h.hint = seen;
  if (seen > WARPS)
    copy_wait<0>();
  else
    copy_wait<2>();
  __syncthreads();  // weights and the tape are there
  const int hint = h.hint;
  prepare_pending(hint);
  copy_wait<0>();
  __syncthreads();  // S and the pending rows are there
  replay_pending(hint);
  pdl_wait();
  pdl_trigger();

  const int pending = min(__ldcg(words + PENDING), BLOCK);
  u16 a_raw = 0, b_raw = 0;
  if (gates_here && lane < own)
    a_raw = a[(u64)(first_row + lane) * a_stride + head], b_raw = b[(u64)(first_row + lane) * b_stride + head];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int r = warp + i * WARPS;
    if (r < own) at.fetch(&h.raw[BEFORE + r], qkv + (u64)(first_row + r) * qkv_stride);
  }
  copy_commit();
  copy_wait<0>();
  if (__syncthreads_or(seen != pending)) {  // a wrong hint: again
    fetch_rest(pending);
    tile.fetch();
    if (warp < tape_rows) fetch_tape(warp);
    copy_commit();
    copy_wait<0>();
    __syncthreads();
    prepare_pending(pending);
    __syncthreads();
    replay_pending(pending);
    __syncthreads();
  }
  float rate = 0.0f, bias = 0.0f;
  if (gates_here) rate = a_log[head], bias = dt_bias[head];
  // This block has read the tape: its columns of v go there, and S to memory.
  if (pending > 0) {
    u64 place = ((u64)home * hv + head) * D * D;
    asm volatile("" : "+l"(place));  // computed anew: registers are dearer
    Tile{h.tile, state + place + rank * WIDE}.flush_all();
  }
  if (warp < BLOCK / 4) {
    const int r = warp * 4 + lane / 8;
    if (r < own)
      *(uint4*)(tape_u + (u64)r * channels + at.v + lane % 8 * 8) = *(const uint4*)(h.raw[BEFORE + r].v + lane % 8 * 8);
  }
  if (warp == BLOCK / 4 && pending > 0 && lane / 8 < BEFORE)
    *(uint4*)(history + (u64)(lane / 8) * channels + at.v + lane % 8 * 8) =
        *(const uint4*)(h.raw[lane / 8].v + lane % 8 * 8);
  if (gates_here) {
    const float g = log_decay(a_raw, -expf(rate), bias);
    if (lane < own) *(float4*)&h.rows[lane].decay = make_float4(expf(g), sigmoid(from_bf16(b_raw)), g, 0.0f);
  }
  if (2 * warp < own) prepare(h.conv, &h.rows[2 * warp], &h.raw[2 * warp]);
  __syncthreads();  // all rows are there, S is on its way
  cluster_wait();
  steps(s, h.rows, own, h.outputs);
  int arrivals = 0;
  if (threadIdx.x == 0) arrivals = atomicAdd(arrived + blockIdx.z * hk + key_head, 1);
  finish(h, z, norm, out, first_row, own, head, rank, z_stride, out_stride, eps);
  if (gates_here && rank == 0 && lane < own) {
    tape_g[gates + lane * hv] = h.rows[lane].g;
    tape_beta[gates + lane * hv] = h.rows[lane].beta;
  }
  if (warp != 0 || __shfl_sync(ALL, arrivals, 0) != CLUSTER * (hv / hk) - 1) return;
#pragma unroll 4
  for (int r = 0; r < own; r++) at.write(tape_u + (u64)r * channels, h.raw[BEFORE + r]);
  if (pending > 0)
    for (int n = 0; n < BEFORE; n++) at.write(history + (u64)n * channels, h.raw[n]);
  if (lane == 0) arrived[blockIdx.z * hk + key_head] = 0;
}

}  // namespace clustered
#endif
