// Barriers in shared memory, named barriers, and what the blocks of a cluster send each other (SM90 and later).
#pragma once
#include "prelude.cuh"

// Four sums of a unit: weight rows g and g + 8 of a tile, activation rows row and row + 1 of each. Vector v of a unit's
// sums, with 128 vectors a half of 16 activation rows, is that of tile v / 64 and row row_of(v).
struct Float4 {
  float v[4];
};

__device__ __forceinline__ int row_of(int v) { return v / 32 % 2 * 8 + v % 4 * 2; }

__device__ __forceinline__ Float4 load_sums(u32 at) {
  const uint4 v = load_shared16(at);
  return {{__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)}};
}

__device__ __forceinline__ void add(Float4& to, const Float4& more) {
#pragma unroll
  for (int i = 0; i < 4; ++i) to.v[i] = __fadd_rn(to.v[i], more.v[i]);
}

__device__ __forceinline__ void store_sums(u32 at, const float (&s)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(at), "f"(s[0]), "f"(s[1]), "f"(s[2]), "f"(s[3])
               : "memory");
}

// Barrier ``number`` (1..15) of THREADS threads.
template <int THREADS>
__device__ __forceinline__ void named_barrier(int number) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(THREADS) : "memory");
}

__device__ __forceinline__ void barrier_init(u32 at, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}

// After the initialisations of this thread.
__device__ __forceinline__ void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void barrier_arrive(u32 at) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 at, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}

#define BARRIER_WAIT(NAME, ORDER)                            \
  __device__ __forceinline__ void NAME(u32 at, u32 parity) { \
    u32 done;                                                \
    do {                                                     \
      asm volatile(                                          \
          "{\n.reg .pred p;\n"                               \
          "mbarrier.try_wait.parity" ORDER                   \
          ".shared::cta.b64 p, [%1], %2;\n"                  \
          "selp.u32 %0, 1, 0, p;\n}"                         \
          : "=r"(done)                                       \
          : "r"(at), "r"(parity)                             \
          : "memory");                                       \
    } while (!done);                                         \
  }
BARRIER_WAIT(barrier_wait, "")
BARRIER_WAIT(barrier_wait_cluster, ".acquire.cluster")  // for what other blocks of the cluster sent

// Of this block in its cluster.
__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The address of the same place in another block's shared memory.
__device__ __forceinline__ u32 address_in(u32 at, u32 rank) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
  return there;
}

// Store to another block; its barrier counts the bytes.
__device__ __forceinline__ void send(u32 to, u32 barrier, const Float4& x) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(to),
               "f"(x.v[0]), "f"(x.v[1]), "f"(x.v[2]), "f"(x.v[3]), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
