// kernels/prelude.cuh for a CPU: each thread of a block is a fiber, warps meet where the hardware makes them. Slow, and
// without a memory model: it shows what a kernel computes, not whether it waits where it has to.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static
#define __align__(n) alignas(n)
#define __CUDA_ARCH__ 900

struct Dim {
  int x, y, z;
};
struct float2 {
  float x, y;
};

namespace cpu {
static constexpr int MOST = 1024, STACK = 1 << 16;
struct Fiber {
  ucontext_t context;
  Dim thread;
  bool done;
};
inline Fiber fibers[MOST];
inline std::vector<char> stacks;
inline ucontext_t host;
inline int now, threads;
inline Dim block, grid;
inline u64 met[MOST / 32 + 1], arrived[MOST / 32 + 1];  // of each warp, then of the block
inline std::function<void()> body;

inline void yield() { swapcontext(&fibers[now].context, &host); }
inline void meet(int place, int all) {
  const u64 round = met[place];
  if (++arrived[place] == (u64)all) {
    arrived[place] = 0, met[place]++;
    return;
  }
  while (met[place] == round) yield();
}
inline void enter() {
  body();
  fibers[now].done = true;
  yield();
}
inline void launch(Dim blocks, int count, std::function<void()> kernel) {
  body = kernel, threads = count, grid = blocks;
  stacks.resize((size_t)count * STACK);
  for (block.z = 0; block.z < blocks.z; block.z++)
    for (block.y = 0; block.y < blocks.y; block.y++)
      for (block.x = 0; block.x < blocks.x; block.x++) {
        std::fill(std::begin(arrived), std::end(arrived), 0);
        for (int i = 0; i < count; i++) {
          Fiber& f = fibers[i];
          f.thread = {i, 0, 0}, f.done = false;
          getcontext(&f.context);
          f.context.uc_stack.ss_sp = stacks.data() + (size_t)i * STACK;
          f.context.uc_stack.ss_size = STACK;
          makecontext(&f.context, enter, 0);
        }
        for (int left = count; left > 0;) {
          left = 0;
          for (now = 0; now < count; now++)
            if (!fibers[now].done) swapcontext(&host, &fibers[now].context), left += !fibers[now].done;
        }
      }
}
inline int lane() { return now % 32; }
inline int warp() { return now / 32; }
inline void warp_meets() { meet(warp(), 32); }
inline u32 exchanged[MOST][8];
alignas(16) inline char memory[1 << 18];  // shared
}  // namespace cpu

#define threadIdx (cpu::fibers[cpu::now].thread)
#define blockIdx (cpu::block)
#define gridDim (cpu::grid)

inline void __syncthreads() { cpu::meet(cpu::MOST / 32, cpu::threads); }
inline void pdl_wait() {}
inline void pdl_trigger() {}
static constexpr u32 ALL = 0xffffffffu;
#define NEG_INF (-INFINITY)

inline u32 __float_as_uint(float x) { u32 y; memcpy(&y, &x, 4); return y; }
inline float __uint_as_float(u32 x) { float y; memcpy(&y, &x, 4); return y; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }

inline float from_bf16(u16 x) { return __uint_as_float((u32)x << 16); }
inline float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
inline float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
inline u16 to_bf16(float x) {
  const u32 bits = __float_as_uint(x);
  return x != x ? 0x7fff : (u16)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
inline u32 pack_bf16(float low, float high) { return to_bf16(low) | (u32)to_bf16(high) << 16; }
inline float exp2_fast(float x) { return std::exp2(x); }

inline float __shfl_xor_sync(u32, float x, int bit) {
  cpu::exchanged[cpu::now][0] = __float_as_uint(x);
  cpu::warp_meets();
  const float other = __uint_as_float(cpu::exchanged[cpu::now ^ bit][0]);
  cpu::warp_meets();
  return other;
}
template <int lanes>
inline float lane_sum(float x) {
  for (int bit = lanes / 2; bit > 0; bit /= 2) x += __shfl_xor_sync(ALL, x, bit);
  return x;
}

inline u32 shared_address(const void* p) { return (u32)((const char*)p - cpu::memory); }
inline void copy16_or_zero(u32 to, const void* from, bool valid) {
  if (to % 16 || (uintptr_t)from % 16) abort();  // as the hardware does
  if (valid)
    memcpy(cpu::memory + to, from, 16);
  else
    memset(cpu::memory + to, 0, 16);
}
inline void copy_commit() {}
template <int left>
inline void copy_wait() {}
inline void store_shared4(u32 at, float x) { memcpy(cpu::memory + at, &x, 4); }

inline void load_rows(u32 (&r)[4], u32 address, bool transposed) {
  if (address % 16) abort();
  const int first = cpu::now - cpu::lane(), g = cpu::lane() / 4, t = cpu::lane() % 4;
  cpu::exchanged[cpu::now][0] = address;
  cpu::warp_meets();
  for (int i = 0; i < 4; i++)
    for (int e = 0; e < 2; e++) {
      const int row = transposed ? 2 * t + e : g, column = transposed ? g : 2 * t + e;
      u16 x;
      memcpy(&x, cpu::memory + cpu::exchanged[first + 8 * i + row][0] + 2 * column, 2);
      r[i] = e ? r[i] | (u32)x << 16 : x;
    }
  cpu::warp_meets();
}
inline void load_matrices(u32 (&r)[4], u32 address) { load_rows(r, address, false); }
inline void load_matrices_transposed(u32 (&r)[4], u32 address) { load_rows(r, address, true); }

template <bool f16>
inline void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  static_assert(!f16);
  const int first = cpu::now - cpu::lane(), g = cpu::lane() / 4, t = cpu::lane() % 4;
  u32* mine = cpu::exchanged[cpu::now];
  memcpy(mine, a, 16), mine[4] = b0, mine[5] = b1;
  cpu::warp_meets();
  auto value = [&](int lane, int word, int e) { return from_bf16((u16)(cpu::exchanged[first + lane][word] >> 16 * e)); };
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 16; k++) {
      const int row = g + 8 * (i / 2), column = 2 * t + i % 2;
      c[i] += value(row % 8 * 4 + k % 8 / 2, row / 8 + k / 8 * 2, k % 2) * value(column * 4 + k % 8 / 2, 4 + k / 8, k % 2);
    }
  cpu::warp_meets();
}
