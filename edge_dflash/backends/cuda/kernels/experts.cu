// A mixture of experts, all but its products with experts' weights (experts_linear.cu): router, choice, work list, sum.
//
// Router logits are products of 16 rows of weights with 16 rows of activations, K cut into WARPS parts by its absolute place:
// a row's bits do not depend on other rows. Choice and weights of a row are a warp's, in an order that depends on the number
// of experts alone. The list is made without atomics on memory: masks of rows by expert, counts, prefix sums.
#include "blocks.cuh"
#include "experts.cuh"
#include "job.cuh"
#include "norm.cuh"

static constexpr int WARPS = 16, THREADS = 32 * WARPS, GROUP = 16;  // rows of a group: one a warp
static constexpr int MOST_CHOSEN = 16, MOST_MEMBERS = 2 * THREADS;  // members of a thread of the list: two

// Router [experts, hidden] and judge [1, hidden] (the shared expert's gate, or null) times x.
struct Route {
  const u16* x;
  const u16* router;
  const u16* judge;
  u16* logits;
  int x_stride, hidden, experts, rows, stride;
};

struct Choice {
  const u16* logits;
  const int* valid;   // rows that count, of ``rows``; null: all
  const int* forced;  // [positions, chosen] experts in place of the best, by position; null: none
  const int* length;  // position of row 0
  u64* distinct;      // grows by the number of experts that some row chose
  int* list;
  int* ids;        // [rows, chosen]: ascending
  float* weights;  // [rows, slots]
  u16* masks;      // [groups, MOST_MEMBERS]: rows of a group that chose an expert; of several groups
  int* before;     // [groups, MOST_MEMBERS]: rows of the groups before that chose it
  int* first;      // [MOST_MEMBERS]: its first entry
  int experts, chosen, shared, rows, stride, renormalised, positions, tile;
};

__device__ __forceinline__ int valid_rows(const int* valid, int rows) { return valid ? min(*valid, rows) : rows; }

// Largest of 32 unsigned values, of a warp.
__device__ __forceinline__ u32 warp_largest(u32 x) {
  u32 y;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
  return y;
}

__device__ __forceinline__ uint4 vector_or_zero(const u16* row, int k, int hidden) {
  return row && k < hidden ? __ldcg(reinterpret_cast<const uint4*>(row + k)) : uint4{0, 0, 0, 0};
}

// Block (tile of 16 weight rows, group of 16 rows of x). Lane t has 8 consecutive k of a window of 32, as Bf16 in decode.cuh.
extern "C" __global__ void __launch_bounds__(THREADS) experts_route(const __grid_constant__ Route job) {
  constexpr int AHEAD = 4, WINDOW = 32;
  __shared__ float sums[WARPS][GROUP][GROUP + 1];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int windows = (job.hidden + WINDOW - 1) / WINDOW, begin = warp * windows / WARPS,
            end = (warp + 1) * windows / WARPS;
  const u16 *weights[2], *x[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = blockIdx.x * 16 + g + 8 * i, line = blockIdx.y * GROUP + g + 8 * i;
    const u16* other = row == job.experts ? job.judge : nullptr;
    weights[i] = row < job.experts ? job.router + static_cast<long long>(row) * job.hidden : other;
    x[i] = line < job.rows ? job.x + static_cast<long long>(line) * job.x_stride : nullptr;
  }
  const bool wide = job.rows - static_cast<int>(blockIdx.y) * GROUP > 8;
  uint4 a[AHEAD][2];
  const auto load = [&](uint4(&to)[AHEAD][2], const u16*(&from)[2], int v) {
#pragma unroll
    for (int s = 0; s < AHEAD; ++s)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        to[s][i] = vector_or_zero(from[i], v + s < end ? (v + s) * WINDOW + t * 8 : job.hidden, job.hidden);
  };
  load(a, weights, begin);
  pdl_wait();
  pdl_trigger();
  float sum[2][4] = {};
#pragma unroll 1
  for (int v = begin; v < end; v += AHEAD) {
    uint4 b[AHEAD][2];
    load(b, x, v);
    if (v > begin) load(a, weights, v);
#pragma unroll
    for (int s = 0; s < AHEAD; ++s) {
      const u32 first[4] = {a[s][0].x, a[s][1].x, a[s][0].y, a[s][1].y},
                second[4] = {a[s][0].z, a[s][1].z, a[s][0].w, a[s][1].w};
      mma<false>(sum[0], first, b[s][0].x, b[s][0].y);
      mma<false>(sum[0], second, b[s][0].z, b[s][0].w);
      if (!wide) continue;
      mma<false>(sum[1], first, b[s][1].x, b[s][1].y);
      mma<false>(sum[1], second, b[s][1].z, b[s][1].w);
    }
  }
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[warp][n * 8 + t * 2 + i % 2][g + i / 2 * 8] = sum[n][i];
  __syncthreads();
  const int row = threadIdx.x / 16, column = threadIdx.x % 16;
  if (row >= GROUP) return;
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) total = __fadd_rn(total, sums[w][row][column]);
  const int line = blockIdx.y * GROUP + row, expert = blockIdx.x * 16 + column;
  if (line < job.rows && expert < job.stride)
    job.logits[static_cast<long long>(line) * job.stride + expert] = to_bf16(total);
}

// What a block knows of the choices of its rows.
struct Chosen {
  u32 masks[MOST_MEMBERS];      // rows that chose an expert
  int ids[GROUP][MOST_CHOSEN];  // by slot
  float p[GROUP][MOST_CHOSEN];  // exp(logit - largest)
};

// Experts that a row has to take, one a lane, asked for before the launch before has ended.
__device__ __forceinline__ int forced_expert(const Choice& job, int row) {
  if (!job.forced || static_cast<int>(threadIdx.x % 32) >= job.chosen) return -1;
  return __ldcg(job.forced + (early_word(job.length) + row) % job.positions * job.chosen + threadIdx.x % 32);
}

// The value of a logit, by its order (order_of).
__device__ __forceinline__ float logit_of(u32 order) {
  return from_bf16(static_cast<u16>(order & 0x8000u ? order ^ 0x8000u : ~order));
}

// The choice of a row by a warp; lane l has experts PER l .. PER l + PER - 1. Order and expert of a logit make a key: of equal
// ones the lower expert comes first, as among those whose probability is 0 in FP32. ``place``: of the row in its group;
// ``forced``: its lane's expert, or -1.
template <int PER>
__device__ __forceinline__ void choose_row(const Choice& job, Chosen& chosen, int row, int place, int forced) {
  constexpr float VANISHES = -104.0f;
  const int lane = threadIdx.x % 32, slots = job.chosen + job.shared;
  const u16* logits = job.logits + static_cast<long long>(row) * job.stride;
  const float judged = from_bf16(__ldcg(logits + job.experts));
  u32 order[PER], best = 0;  // 0: there is no such expert
#pragma unroll
  for (int h = 0; h < PER / 8; ++h) {
    const int e = lane * PER + h * 8;
    const uint4 v = e < job.stride ? __ldcg(reinterpret_cast<const uint4*>(logits + e)) : uint4{0, 0, 0, 0};
    const u32 pair[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      order[h * 8 + j] = e + j < job.experts ? order_of(static_cast<u16>(pair[j / 2] >> j % 2 * 16)) : 0;
      best = max(best, order[h * 8 + j]);
    }
  }
  const float most = logit_of(warp_largest(best));
  float total = 0.0f;
  if (!job.renormalised) {
#pragma unroll
    for (int j = 0; j < PER; ++j)
      if (lane * PER + j < job.experts) total = __fadd_rn(total, expf(__fsub_rn(logit_of(order[j]), most)));
    total = lane_sum<32>(total);
  }
  u32 mine = 0;
  if (job.forced) {
    mine = 0xffffu - forced;
  } else {
    u32 key[PER];
#pragma unroll
    for (int j = 0; j < PER; ++j) {
      const u32 kept = logit_of(order[j]) - most < VANISHES ? 0 : order[j] << 16, e = lane * PER + j;
      key[j] = e < job.experts ? kept | (0xffffu - e) : 0;
    }
#pragma unroll 1
    for (int i = 0; i < job.chosen; ++i) {
      best = key[0];
#pragma unroll
      for (int j = 1; j < PER; ++j) best = max(best, key[j]);
      best = warp_largest(best);
      if (lane == i) mine = best;
#pragma unroll
      for (int j = 0; j < PER; ++j) key[j] = key[j] == best ? 0 : key[j];
    }
  }
  const int expert = 0xffff - static_cast<int>(mine & 0xffffu);
  int slot = 0;
  for (int i = 0; i < job.chosen; ++i) slot += __shfl_sync(ALL, expert, i) < expert;
  if (lane < job.chosen) {
    chosen.ids[place][slot] = expert;
    chosen.p[place][slot] = mine >> 16 ? expf(__fsub_rn(logit_of(mine >> 16), most)) : 0.0f;
    atomicOr(&chosen.masks[expert], 1u << place);
  }
  __syncwarp();
  float* weights = job.weights + static_cast<long long>(row) * slots;
  if (lane < job.chosen) {
    if (job.renormalised)
      for (int i = 0; i < job.chosen; ++i) total = __fadd_rn(total, chosen.p[place][i]);
    weights[lane] = __fdiv_rn(job.forced ? 1.0f : chosen.p[place][lane], job.forced ? job.chosen : total);
    job.ids[static_cast<long long>(row) * job.chosen + lane] = chosen.ids[place][lane];
  } else if (lane < slots) {
    weights[lane] = __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-judged)));
  }
}

// Rows of group ``group`` that count choose, a warp each; waits for the launch before. The count of all rows that count.
__device__ __forceinline__ int choose_rows(const Choice& job, Chosen& chosen, int group) {
  const int place = threadIdx.x / 32, row = group * GROUP + place, forced = forced_expert(job, row);
  for (int i = threadIdx.x; i < MOST_MEMBERS; i += THREADS) chosen.masks[i] = 0;
  pdl_wait();
  pdl_trigger();
  __syncthreads();
  const int valid = valid_rows(job.valid, job.rows);
  if (row < valid) {
    if (job.experts <= 256)
      choose_row<8>(job, chosen, row, place, forced);
    else
      choose_row<16>(job, chosen, row, place, forced);
  }
  __syncthreads();
  return valid;
}

// Entries of all members: member 2 i and 2 i + 1, with ``count`` rows each, by thread i, which keeps their first entries in
// ``first``. Of the shared expert's slices all rows count.
__device__ __forceinline__ void make_entries(const Choice& job, const int (&count)[2], int valid, int (&first)[2]) {
  __shared__ int warps[WARPS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int rows[2], entries[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int member = 2 * threadIdx.x + i;
    rows[i] = member < job.experts ? count[i] : member < job.experts + job.shared ? valid : 0;
    entries[i] = (rows[i] + job.tile - 1) / job.tile;
  }
  const int at = 2 * threadIdx.x, distinct = (rows[0] > 0 && at < job.experts) + (rows[1] > 0 && at + 1 < job.experts);
  const int own = entries[0] + entries[1] | distinct << 16;  // entries of all rows have less than 16 bits
  int sum = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(ALL, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < WARPS - 1; ++w) sum += w < warp ? warps[w] : 0;
  int before = (sum - own) & 0xffff;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    first[i] = before;
    for (int n = 0; n < entries[i]; ++n)
      job.list[entry_at(before + n, job.tile)] = at + i | min(job.tile, rows[i] - n * job.tile) << 16;
    before += entries[i];
  }
  if (threadIdx.x == THREADS - 1) {
    job.list[0] = before;
    if (job.distinct) *job.distinct += static_cast<u32>(sum) >> 16;
  }
}

// The line of slot ``slot`` of a row: ``number`` rows before it chose the same member, whose first entry is ``first``.
__device__ __forceinline__ void write_line(const Choice& job, int first, int number, int row, int slot) {
  job.list[entry_at(first + number / job.tile, job.tile) + ENTRY_HEAD + number % job.tile] = row << 8 | slot;
}

// One group: all of it in one block.
extern "C" __global__ void __launch_bounds__(THREADS) experts_choose(const __grid_constant__ Choice job) {
  __shared__ Chosen chosen;
  __shared__ int firsts[MOST_MEMBERS];
  const int valid = choose_rows(job, chosen, 0);
  const int at = 2 * threadIdx.x;
  const int count[2] = {__popc(chosen.masks[at]), __popc(chosen.masks[at + 1])};
  int first[2];
  make_entries(job, count, valid, first);
  firsts[at] = first[0], firsts[at + 1] = first[1];
  __syncthreads();
  const int row = threadIdx.x / 32, slot = threadIdx.x % 32;
  if (row >= valid || slot >= job.chosen + job.shared) return;
  const bool shared = slot >= job.chosen;
  const int member = shared ? job.experts + slot - job.chosen : chosen.ids[row][slot];
  const int number = shared ? row : __popc(chosen.masks[member] & ((1u << row) - 1));
  write_line(job, firsts[member], number, row, slot);
}

// Several groups: a block chooses for each, one makes the entries, a block for each writes its rows' lines.
extern "C" __global__ void __launch_bounds__(THREADS) experts_choose_group(const __grid_constant__ Choice job) {
  __shared__ Chosen chosen;
  choose_rows(job, chosen, blockIdx.x);
  u32* masks = reinterpret_cast<u32*>(job.masks + blockIdx.x * MOST_MEMBERS);
  masks[threadIdx.x] = chosen.masks[2 * threadIdx.x] | chosen.masks[2 * threadIdx.x + 1] << 16;
}

extern "C" __global__ void __launch_bounds__(THREADS) experts_list(const __grid_constant__ Choice job) {
  constexpr int AHEAD = 16;
  pdl_wait();
  pdl_trigger();
  const int valid = valid_rows(job.valid, job.rows), groups = (job.rows + GROUP - 1) / GROUP;
  const u32* masks = reinterpret_cast<const u32*>(job.masks) + threadIdx.x;
  int count[2] = {0, 0}, first[2];
  for (int group = 0; group < groups; group += AHEAD) {
    u32 pair[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) pair[i] = group + i < groups ? masks[(group + i) * THREADS] : 0;
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      if (group + i < groups)
        *reinterpret_cast<int2*>(job.before + (group + i) * MOST_MEMBERS + 2 * threadIdx.x) = int2{count[0], count[1]};
      count[0] += __popc(pair[i] & 0xffffu), count[1] += __popc(pair[i] >> 16);
    }
  }
  make_entries(job, count, valid, first);
  *reinterpret_cast<int2*>(job.first + 2 * threadIdx.x) = int2{first[0], first[1]};
}

extern "C" __global__ void __launch_bounds__(THREADS) experts_place(const __grid_constant__ Choice job) {
  pdl_wait();
  pdl_trigger();
  const int place = threadIdx.x / 32, row = blockIdx.x * GROUP + place, slot = threadIdx.x % 32;
  if (row >= valid_rows(job.valid, job.rows) || slot >= job.chosen + job.shared) return;
  if (slot >= job.chosen) {
    write_line(job, job.first[job.experts + slot - job.chosen], row, row, slot);
    return;
  }
  const int member = job.ids[static_cast<long long>(row) * job.chosen + slot], at = blockIdx.x * MOST_MEMBERS + member;
  write_line(job, job.first[member], job.before[at] + __popc(job.masks[at] & ((1u << place) - 1)), row, slot);
}

// out = bf16(residual + bf16(sum over slots, in order, of weight * y)), or without residual; and, when norm_weight is given,
// its RMS norm in the order of the kernel rms_norm, bit for bit. One block a row; columns is a multiple of 4. Dynamic shared
// memory: 2 * columns bytes.
extern "C" __global__ void __launch_bounds__(THREADS)
    experts_sum(const float* y, const float* weights, int slots, const int* valid, int rows, const u16* residual,
                int residual_stride, u16* out, int out_stride, int columns, const float* norm_weight, float eps,
                u16* norm_out, int norm_stride) {
  extern __shared__ u32 kept[];
  __shared__ float sums[NORM_THREADS / 32], weight[MOST_CHOSEN * 2];
  const int row = blockIdx.x;
  if (threadIdx.x < slots) weight[threadIdx.x] = __ldcg(weights + static_cast<long long>(row) * slots + threadIdx.x);
  pdl_wait();
  pdl_trigger();
  if (row >= valid_rows(valid, rows)) return;
  __syncthreads();
  const float4* from = reinterpret_cast<const float4*>(y + static_cast<long long>(row) * slots * columns);
  const uint2* extra = residual ? (const uint2*)(residual + static_cast<long long>(row) * residual_stride) : nullptr;
  uint2* to = reinterpret_cast<uint2*>(out + static_cast<long long>(row) * out_stride);
  for (int i = threadIdx.x; i < columns / 4; i += THREADS) {
    uint2 before = {0, 0};
    if (extra) before = extra[i];
    float4 total = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 8
    for (int s = 0; s < slots; ++s) {
      const float4 v = __ldcg(from + s * (columns / 4) + i);
      const float w = weight[s];
      total.x = __fmaf_rn(w, v.x, total.x), total.y = __fmaf_rn(w, v.y, total.y);
      total.z = __fmaf_rn(w, v.z, total.z), total.w = __fmaf_rn(w, v.w, total.w);
    }
    uint2 z = {pack_bf16(total.x, total.y), pack_bf16(total.z, total.w)};
    if (extra) {
      z.x = pack_bf16(__fadd_rn(bf16_low(before.x), bf16_low(z.x)), __fadd_rn(bf16_high(before.x), bf16_high(z.x)));
      z.y = pack_bf16(__fadd_rn(bf16_low(before.y), bf16_low(z.y)), __fadd_rn(bf16_high(before.y), bf16_high(z.y)));
    }
    to[i] = z;
    *reinterpret_cast<uint2*>(kept + 2 * i) = z;
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
  u16* normal = norm_out + element_at(norm_stride, row, 2 * threadIdx.x);
  const int step = elements_to(norm_stride, 2 * THREADS);
  for (int i = threadIdx.x; i < columns / 2; i += THREADS, normal += step)
    *reinterpret_cast<u32*>(normal) = normed(kept[i], inverse, *reinterpret_cast<const float2*>(norm_weight + 2 * i));
}
