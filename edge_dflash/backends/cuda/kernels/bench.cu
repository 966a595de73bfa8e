// Kernels of benchmarks: read memory as fast as the device can, fill memory with weights that no cache compresses, and
// keep multiprocessors busy so that few are left (tests/scripts/few_multiprocessors.py).
#include "prelude.cuh"

// Reads ``vectors`` pieces of 16 bytes; the sum keeps the loads alive.
extern "C" __global__ void __launch_bounds__(512) bench_read(const uint4* from, long long vectors, u32* sink) {
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  u32 sum = 0;
  long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + 7 * step < vectors; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = __ldcs(from + i + j * step);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  for (; i < vectors; i += step) sum += from[i].x;
  if (sum == 0x12345678u) *sink = sum;
}

// Splitmix64 of a place, its high half.
__device__ __forceinline__ u32 random_word(long long i, u32 seed) {
  u64 z = (i + 1) * 0x9E3779B97F4A7C15ull + seed;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return static_cast<u32>(z >> 32);
}

// Random words; the last 32 words of every 288 are NVFP4 scale bytes around 1 (weights/layout.py).
extern "C" __global__ void bench_fill(u32* to, long long words, u32 seed) {
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < words; i += step) {
    const u32 word = random_word(i, seed);
    to[i] = i % 288 < 256 ? word : (word & 0x0F0F0F0Fu) + 0x48484848u;
  }
}

// Random weights that are legal in a stack (weights/layout.py; its users compute the same words): NVFP4 codes
// with scale bytes from 0.5 to 1.875, or FP8 or BF16 values with exponent fields ``exponent`` to ``exponent`` + 3.
extern "C" __global__ void bench_weights(u32* to, long long words, u32 seed, int value_bits, u32 exponent) {
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < words; i += step) {
    u32 word = random_word(i, seed);
    if (value_bits == 4 && i % 288 >= 256) word = (word & 0x0F0F0F0Fu) + 0x48484848u;
    if (value_bits == 8) word = (word & 0x87878787u) | ((((word >> 3) & 0x03030303u) + exponent * 0x01010101u) << 3);
    if (value_bits == 16) word = (word & 0x807F807Fu) | ((((word >> 7) & 0x00030003u) + exponent * 0x00010001u) << 7);
    to[i] = word;
  }
}

__device__ __forceinline__ u32 multiprocessor() {
  u32 id;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
  return id;
}
__device__ __forceinline__ u64 nanoseconds() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// A block of all shared memory sleeps on each multiprocessor that is not in the bit mask ``left``, until ``stop`` or
// for ``limit`` ns. said [multiprocessor]: 0, then the cycles and nanoseconds that it slept.
extern "C" __global__ void bench_sleep(const u32* left, const volatile u32* stop, u64 limit, volatile u64* said) {
  const u32 id = multiprocessor();
  if (threadIdx.x > 0 || left[id / 32] >> id % 32 & 1) return;
  const u64 begin = nanoseconds(), cycles = clock64();
  said[3 * id] = 1;
  while (*stop == 0 && nanoseconds() - begin < limit) __nanosleep(50000);
  said[3 * id + 1] = clock64() - cycles;
  said[3 * id + 2] = nanoseconds() - begin;
}

// where [block] = the multiprocessor that ran it; for 50 us none takes a second block of all shared memory.
extern "C" __global__ void bench_place(u32* where) {
  if (threadIdx.x > 0) return;
  const u64 begin = nanoseconds();
  where[blockIdx.x] = multiprocessor();
  while (nanoseconds() - begin < 50000) {
  }
}
