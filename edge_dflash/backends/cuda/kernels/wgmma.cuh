// Hopper's own instructions (sm90a): warpgroup products, the bulk tensor copy, barriers in shared memory, clusters.
#pragma once
#include "cluster.cuh"

// A CUtensorMap, encoded by the host (linear.bf16_map).
struct alignas(64) TensorMap {
  u64 words[16];
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// d[64 x N] (+)= a[64 x 16] b[16 x N]: BF16 or F16 in, FP32 out. a: warp w of the warpgroup holds rows 16 w .. 16 w + 15,
// in its lanes as mma has them; d[4 j ..]: those rows x columns 8 j .. 8 j + 7, likewise. b: N rows of 16 k in shared memory
// (``k_major``). a and d must not be touched before wgmma_wait.
template <int N, bool f16 = false>
struct Wgmma;

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
#define D32(i) D16(i), D16(i + 16)
#define D64(i) D32(i), D32(i + 32)
#define P8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define P16 P8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define P32 P16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define P48 P32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define P64 P48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define P80 P64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define P96 P80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define P112 P96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define P128 P112 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define WGMMA(N, F16, TYPE, PLACES, A, B, ADD, ...)                                                         \
  template <>                                                                                               \
  struct Wgmma<N, F16> {                                                                                    \
    static __device__ __forceinline__ void multiply(float (&d)[N / 2], const u32 (&a)[4], u64 b, int add) { \
      asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N \
                   "k16.f32." TYPE "." TYPE " {" PLACES "}, {" A "}, " B ", add, 1, 1, 0;\n}"               \
                   : __VA_ARGS__                                                                            \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                         \
    }                                                                                                       \
  };
WGMMA(16, false, "bf16", P8, "%8,%9,%10,%11", "%12", "%13", D4(0), D4(4))
WGMMA(32, false, "bf16", P16, "%16,%17,%18,%19", "%20", "%21", D16(0))
WGMMA(64, false, "bf16", P32, "%32,%33,%34,%35", "%36", "%37", D32(0))
WGMMA(128, false, "bf16", P64, "%64,%65,%66,%67", "%68", "%69", D64(0))
WGMMA(192, false, "bf16", P96, "%96,%97,%98,%99", "%100", "%101", D64(0), D32(64))
WGMMA(256, false, "bf16", P128, "%128,%129,%130,%131", "%132", "%133", D64(0), D64(64))
WGMMA(32, true, "f16", P16, "%16,%17,%18,%19", "%20", "%21", D16(0))
WGMMA(64, true, "f16", P32, "%32,%33,%34,%35", "%36", "%37", D32(0))
WGMMA(96, true, "f16", P48, "%48,%49,%50,%51", "%52", "%53", D32(0), D16(32))

// Rows of 128 bytes in shared memory at ``at`` (1,024-byte aligned), 16-byte chunk c of row r at c ^ (r % 8): what the
// tensor copy writes with its 128-byte swizzle. The next 16 k are at + 2.
__device__ __forceinline__ u64 k_major(u32 at) {
  return static_cast<u64>((at & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int N>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Keeps the compiler from using registers of products in flight before this point.
template <int N>
__device__ __forceinline__ void keep(u32 (&a)[N][4]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
}

template <int N>
__device__ __forceinline__ void keep(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Arrives once this thread's copies so far are there.
__device__ __forceinline__ void barrier_arrive_after_copies(u32 at) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at) : "memory");
}

// Arrives at the barrier at the same place of block ``rank`` of the cluster. Orders nothing between blocks: what is
// handed over is room for tensor copies, and its readers are done. (A release for the cluster is a fence of the whole
// device: it took longer than the products of a stage.)
__device__ __forceinline__ void barrier_arrive(u32 at, u32 rank) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(at),
      "r"(rank)
      : "memory");
}

// Every thread of every block of the cluster; also orders barrier_init.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// One box of the map, from (column, row), to the same place in every block of ``blocks``; counts on their barriers.
__device__ __forceinline__ void copy_box(u32 to, const TensorMap& map, int column, int row, u32 barrier, u16 blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(blocks)
      : "memory");
}

// ``bytes`` (a multiple of 16) from global memory; counts on a barrier of this block.
__device__ __forceinline__ void copy_bulk(u32 to, const void* from, int bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// Four 8 x 8 tiles to shared memory, transposed: lane 8 i + r names where row r of tile i goes (16 bytes).
__device__ __forceinline__ void store_transposed(u32 to, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

// What this thread wrote to shared memory is seen by products after the next barrier.
__device__ __forceinline__ void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int N>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

#endif
