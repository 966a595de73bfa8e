// y[rows, N] = x[rows, K] W[N, K]^T for 1..16 or 1..32 rows, where blocks of a cluster can reach each other's shared
// memory (SM90 and later): each activation is read once a block, weights once.
//
// Work is units of 32 weight rows (decode.cuh). K is cut into parts. Either the SPLITS blocks of a cluster have one each, or
// (SPLITS 1) a block takes them in turn. A block keeps the part of x in shared memory, in the order of the fragments. Its
// warps are teams of 4: a team owns units, its warps share the part of K, a slice each. Every lane copies its own bytes of weights into its own places of a ring of DEPTH pieces, ahead of
// use and across the borders of units, so that the stream needs no synchronisation. At the end of a unit:
//
//   warps write their sums; half a unit later each thread adds four warps' sums, in order, and sends them to the block
//   that finishes them; that one, half a unit later, adds the SPLITS sums in the order of the blocks and stores
//
// A block that takes parts in turn does so for ``per_pass`` units of each team at a time, whose sums so far wait in shared
// memory; the four or two warps of a slice change its x together, while other slices go on.
//
// The order of a sum depends on K and the number of parts: never on the activation rows, the unit's place, the number of
// blocks, or on how parts are shared out.
//
// The last units of a launch that do not give every team a whole one are dealt as halves (tiles of 16 rows). ``side`` is a
// second, BF16 stack on the same x: its tiles go to the last teams.
#include "job.cuh"

// Not for SM120 and SM121, where a block has not the half of 228 KiB: linear.cu runs there.
#if !defined(__CUDA_ARCH__) || (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200)
#include "cluster.cuh"

static constexpr int SLICES = 4, TEAM_THREADS = 32 * SLICES;
static constexpr int BLOCK_K = 64;  // K values: the grain of splits and slices
static constexpr int SLOTS = 2;     // units whose sums may be under way between blocks
// Lanes of a warp that arrive at FREE and FULL. One would be enough, as __syncwarp orders what the others did before its
// arrival, and layers would take 1 % less; but racecheck follows all lanes only.
static constexpr int ARRIVING = 32;
static constexpr u32 RECEIVED = 0, FREE = 64, FULL = 96, BEST = 128, EXCHANGE = 384;  // offsets in shared memory

// Who this thread is, and what outlives a stack.
template <int ROWS, int SPLITS, int TEAM_COUNT, int RING_BYTES>
struct Block {
  static constexpr int TEAMS = TEAM_COUNT, WARPS = TEAMS * SLICES;
  static constexpr int HALVES = ROWS / 16, SUMS = 2048 * HALVES;  // bytes of a warp's sums of a unit
  static constexpr u32 SLOT_BASE = EXCHANGE + WARPS * SUMS;
  static constexpr u32 X_BASE = SLOT_BASE + (SPLITS > 1 ? TEAMS * SLOTS * SUMS : 0);

  u32 shared;
  int lane, team, slice, thread;  // ``thread`` of the team
  int rank;                       // of the block in its cluster
  int begin_k, stop_k;            // in blocks of BLOCK_K: this warp's slice of the part of K
  u32 x;                          // this slice's in shared memory
  u32 handed = 0;                 // sums handed over so far
  u32 numbered = 0;               // GREEDY: units finished so far
  u32 ring;                       // this lane's bytes of the warp's first piece
  u32 inverse;                    // 2^32 / the number of parts, rounded up: quotients of small numbers are exact
  u32 sums;                       // this thread's of the team's units, while parts are taken in turn
  u32 best[HALVES][2];            // GREEDY: of two rows, order of the largest logit, then the complement of its number

  __device__ __forceinline__ Block(const Job& job, u32 start) : shared(start) {
    lane = threadIdx.x % 32;
    const int warp = __shfl_sync(ALL, threadIdx.x / 32, 0);
    team = warp / SLICES, slice = warp % SLICES, thread = slice * 32 + lane;
    rank = blockIdx.x % SPLITS;
    const int blocks = (job.k + BLOCK_K - 1) / BLOCK_K;
    inverse = SPLITS > 1 ? 0 : 0xFFFFFFFFu / job.splits + 1;
    u32 x_blocks;
    if (SPLITS > 1) {
      const int first = part_of(job, rank);
      begin_k = slice_of(job, rank, slice), stop_k = slice_of(job, rank, slice + 1);
      x = shared + X_BASE + (begin_k - first) * ROWS * 128;
      x_blocks = (blocks + SPLITS - 1) / SPLITS;
    } else {  // slices of a part have the same place in all parts
      const int most = ((blocks + job.splits - 1) / job.splits + SLICES - 1) / SLICES;
      begin_k = slice_of(job, 0, slice), stop_k = slice_of(job, 0, slice + 1);
      x = shared + X_BASE + slice * most * ROWS * 128;
      x_blocks = SLICES * most;
    }
    const u32 rings = shared + X_BASE + x_blocks * (ROWS * 128);
    ring = rings + warp * RING_BYTES + lane * 16;
    sums = rings + WARPS * RING_BYTES + team * job.per_pass * SUMS + thread * 16;
#pragma unroll
    for (int i = 0; i < HALVES * 2; ++i) (&best[0][0])[i] = 0;
  }

  // First of BLOCK_K of a part, and of a slice of it.
  __device__ __forceinline__ int part_of(const Job& job, int part) const {
    const int n = part * ((job.k + BLOCK_K - 1) / BLOCK_K);
    return SPLITS > 1 ? n / SPLITS : inverse == 0 ? n : __umulhi(n, inverse);
  }
  __device__ __forceinline__ int slice_of(const Job& job, int part, int slice) const {
    const int first = part_of(job, part);
    return first + (part_of(job, part + 1) - first) * slice / SLICES;
  }

  // BEST is cleared by warp 0. The arrival at the cluster hands over barriers only (it is relaxed); every warp that ranks
  // logits comes after stage_x, where warp 0 meets the first warp of each team, and FULL, where the warps of a team meet.
  __device__ __forceinline__ void init_barriers() {
    if (threadIdx.x < TEAMS * SLOTS) barrier_init(shared + RECEIVED + threadIdx.x * 8, 1);
    if (threadIdx.x < TEAMS) {
      barrier_init(shared + FREE + threadIdx.x * 8, SLICES * ARRIVING);
      barrier_init(shared + FULL + threadIdx.x * 8, SLICES * ARRIVING);
    }
    if (threadIdx.x < 32) {
      *reinterpret_cast<u64*>(__cvta_shared_to_generic(shared + BEST + threadIdx.x * 8)) = 0;
      barriers_ready();
    }
    if (SPLITS > 1)
      cluster_arrive();
    else
      __syncthreads();
  }

  // This warp's share of its slice of x. Chunk c (8 values) of row r of a block of 64 lies at
  // r/8 * 1024 + c%2 * 512 + ((r%8 * 64 + c/2 * 16) ^ (c%2 * 64)): fragments load and rows store without bank conflicts.
  __device__ __forceinline__ void stage_x(const Job& job) {
    const int chunk = lane % 8, h = chunk % 2;
    const u16* from = job.x + begin_k * BLOCK_K + chunk * 8;
    u32 to = x + h * 512;
    int left = job.k - begin_k * BLOCK_K - chunk * 8;
#pragma unroll 1
    for (int b = begin_k; b < stop_k; ++b) {
#pragma unroll
      for (int i = 0; i < ROWS / 4 / TEAMS; ++i) {
        const int row = (team * (ROWS / 4 / TEAMS) + i) * 4 + lane / 8;
        copy16_or_zero_cached(to + row / 8 * 1024 + ((row % 8 * 64 + chunk / 2 * 16) ^ (h * 64)),
                              from + static_cast<long long>(first_row(ROWS) + row) * job.x_stride, left > 0);
      }
      to += ROWS * 128, from += BLOCK_K, left -= BLOCK_K;
    }
    copy_commit();
    copy_wait<0>();
    named_barrier<32 * TEAMS>(1 + slice);  // of the warps that read this slice
  }

  // Goes on to a part: when the slice's warps have read the x of the last one.
  __device__ __forceinline__ void turn_to(const Job& job, int part) {
    begin_k = slice_of(job, part, slice), stop_k = slice_of(job, part, slice + 1);
    named_barrier<32 * TEAMS>(1 + slice);
    stage_x(job);
  }
};

// Units of a team: ``count`` from ``first``, then tile ``tile`` of unit ``extra`` (-1: none).
struct Share {
  int first, count, extra, tile;

  __device__ __forceinline__ Share(int f, int c, int e, int t) : first(f), count(c), extra(e), tile(t) {}
  __device__ __forceinline__ Share(const Job& job, int group) {
    const int base = job.units / job.groups, rest = job.units % job.groups;
    const bool halves = 2 * rest <= job.groups;
    first = group * base + (halves ? 0 : min(group, rest)), count = base + (!halves && group < rest);
    extra = halves && group < 2 * rest ? job.groups * base + group / 2 : -1;
    tile = group % 2;
  }
  __device__ __forceinline__ int units() const { return count + (extra >= 0); }
  __device__ __forceinline__ int unit(int i) const { return i < count ? first + i : extra; }
  __device__ __forceinline__ u32 tiles(int i) const { return i < count ? 3 : 1 << tile; }  // bit mask
};

template <class F, class B, int ROWS, int SPLITS, int DEPTH, int PIECE>
struct Stream {
  static constexpr int COLUMN_TILES = ROWS / 8, HALVES = B::HALVES, PIECES = BLOCK_K / F::WINDOW,
                       CHUNKS = F::WINDOW / 32;
  static constexpr int PART = TEAM_THREADS / SPLITS;  // vectors of four sums that a block finishes, a half

  const Job& job;
  B& block;
  const Share share;
  int pieces;                   // of the unit in this warp's slice
  u32 tiles;                    // of the unit, bit mask
  const u8* at;                 // where the next load comes from
  int at_first, at_stop;        // units of the share that take parts in turn at the time
  int at_unit, at_part;         // of these, of K
  int at_begin, at_pieces = 0;  // first piece of the slice of that part, number of pieces
  int at_left;                  // pieces left to load of that unit
  u32 wanted;                   // bit mask of its tiles
  u32 x_at;
  float sum[2][COLUMN_TILES][4];
  u32 stage;                            // of the ring: where the next piece lies
  int summed = -1, summed_part = 0;     // the unit whose sums the warps have written
  u32 summed_tiles = 3, summed_at = 0;  // its tiles; where its sums of the parts so far lie
  int pending = -1;                     // the unit whose sums are under way between blocks
  u32 pending_tiles = 3;

  __device__ __forceinline__ Stream(const Job& j, B& b, Share mine) : job(j), block(b), share(mine) {
    at_first = at_unit = 0, at_part = -1;
    at_stop = min(share.units(), per_pass());
    next_part();
    load_unit();
    stage = b.ring;
#pragma unroll 1
    for (int i = 0; i < DEPTH; ++i) fill(b.ring + i * PIECE);
  }

  __device__ __forceinline__ int parts() const { return SPLITS > 1 ? 1 : job.splits; }
  // Units that go through all parts before the next ones do.
  __device__ __forceinline__ int per_pass() const { return SPLITS > 1 || job.per_pass == 0 ? 1 << 30 : job.per_pass; }
  __device__ __forceinline__ int pieces_of(int begin, int stop) const {
    return min(stop * PIECES, job.windows) - begin * PIECES;
  }

  // Goes on to a part of which the slice has something.
  __device__ __forceinline__ void next_part() {
    do {
      if (++at_part == parts()) at_part = 0, at_first = at_stop, at_stop = min(share.units(), at_stop + per_pass());
      at_unit = at_first;
      const int part = SPLITS > 1 ? block.rank : at_part, begin = block.slice_of(job, part, block.slice);
      at_begin = begin * PIECES, at_pieces = pieces_of(begin, block.slice_of(job, part, block.slice + 1));
    } while (SPLITS == 1 && at_pieces <= 0 && at_unit < share.units());
  }
  __device__ __forceinline__ void load_unit() {
    const bool there = at_unit < share.units();
    wanted = there && at_pieces > 0 ? share.tiles(at_unit) : 0;
    at_left = there ? at_pieces : 1 << 30;
    at = job.weights + (static_cast<long long>(share.unit(at_unit)) * job.windows + at_begin) * F::UNIT +
         block.lane * 16;
  }

  // The next piece into a place of the ring: of half a unit only its tile, where tile 0 belongs.
  __device__ __forceinline__ void fill(u32 to) {
    if (wanted == 3)
      F::fetch(to, at, block.lane);
    else if (wanted)
      F::fetch_tile(to, at, block.lane, share.tile);
    copy_commit();
    at += F::UNIT;
    if (--at_left == 0) next_unit();
  }

  __device__ __forceinline__ void next_unit() {
    if (++at_unit == at_stop && SPLITS == 1) next_part();
    load_unit();
  }

  template <int TILES>
  __device__ __forceinline__ void multiply(const typename F::Words& w, u32 here) {
    u32 b[COLUMN_TILES][4 * CHUNKS];
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; ++n)
#pragma unroll
      for (int h = 0; h < CHUNKS; ++h) {
        const uint4 v =
            load_shared16(PIECES == 1 ? x_at + n * 1024 + h * 512 + (block.lane * 16 ^ h * 64) : x_at + n * 1024);
        b[n][4 * h] = v.x, b[n][4 * h + 1] = v.y, b[n][4 * h + 2] = v.z, b[n][4 * h + 3] = v.w;
      }
    fill(here);
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
      for (int h = 0; h < CHUNKS; ++h) {
        u32 a[2][4];
        F::fragments(w, m, h, a);
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
          for (int n = 0; n < COLUMN_TILES; ++n)
            mma<false>(sum[m][n], a[j], b[n][4 * h + 2 * j], b[n][4 * h + 2 * j + 1]);
      }
  }

  __device__ __forceinline__ void step() {
    const u32 here = stage;
    stage = here == block.ring + (DEPTH - 1) * PIECE ? block.ring : here + PIECE;
    copy_wait<DEPTH - 1>();
    if (tiles == 3) {
      multiply<2>(F::read(here, block.lane), here);
    } else {
      multiply<1>(F::read_tile(here, block.lane, share.tile), here);
    }
    if (PIECES == 1)
      x_at += ROWS * 128;
    else  // two pieces a block of 64: chunks t and 4 + t of a row
      x_at += (x_at - block.x) & 32 ? ROWS * 128 - 32 : 32;
  }

  // Sums of a unit, weight tile m, rows of column tile n, lane l: four of them in vector (n / 2) * 128 + m * 64 + n % 2 * 32 + l.
  // Before the arrival, __syncwarp orders all that the warp did: its sums here, its reads of the slots in
  // add_blocks, and its reads of the ring, which a side stack divides among the lanes in another way.
  __device__ __forceinline__ void hand_over(int i, int part, int place) {
    if (block.handed > 0) barrier_wait(block.shared + FREE + block.team * 8, (block.handed - 1) & 1);
    summed = share.unit(i), summed_tiles = tiles;
    if (SPLITS == 1) {
      summed_part = part, summed_at = block.sums + place * B::SUMS;
      if (part == parts() - 1) load_early(block.thread, summed);
    }
    const u32 to = block.shared + EXCHANGE + (block.team * SLICES + block.slice) * B::SUMS + block.lane * 16;
    const int shift = tiles == 3 ? 0 : share.tile * 1024;
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < COLUMN_TILES; ++n)
        if (m == 0 || tiles == 3) store_sums(to + n / 2 * 2048 + m * 1024 + n % 2 * 512 + shift, sum[m][n]);
    __syncwarp();
    if (block.lane < ARRIVING) barrier_arrive(block.shared + FULL + block.team * 8);
  }

  __device__ __forceinline__ u32 slot(u32 number) const {
    return block.shared + B::SLOT_BASE + (block.team * SLOTS + number % SLOTS) * B::SUMS;
  }
  __device__ __forceinline__ u32 received(u32 number) const {
    return block.shared + RECEIVED + (block.team * SLOTS + number % SLOTS) * 8;
  }

  // Adds the warps' sums in order; sends them on, or finishes them where K is not split.
  //
  // A slot is free when it is sent to: a block sends unit n + 2 after it received all of unit n + 1; the block it sends to
  // sent its part of that after FULL of n + 1, at which its warps arrive after they have read slot n. So no phase of
  // RECEIVED gets bytes of the next one, and two slots suffice. Bytes may come before this block expects them: the phase
  // ends with both.
  __device__ __forceinline__ void add_warps() {
    barrier_wait(block.shared + FULL + block.team * 8, block.handed & 1);
    Float4 total[HALVES];
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      const u32 from = block.shared + EXCHANGE + block.team * SLICES * B::SUMS + h * 2048 + block.thread * 16;
      total[h] = load_sums(from);
#pragma unroll
      for (int s = 1; s < SLICES; ++s) add(total[h], load_sums(from + s * B::SUMS));
    }
    __syncwarp();
    if (block.lane < ARRIVING) barrier_arrive(block.shared + FREE + block.team * 8);
    const u32 number = block.handed++;
    if (SPLITS == 1) {
      const int done = summed;
      summed = -1;
      if (parts() > 1 && !add_part(total)) return;
#pragma unroll
      for (int h = 0; h < HALVES; ++h) emit(total[h], h, block.thread, done, summed_tiles);
      ++block.numbered;
      return;
    }
    if (block.thread == 0) barrier_expect(received(number), B::SUMS);
    const u32 owner = block.thread / PART;
    const u32 to = address_in(slot(number) + block.rank * (B::SUMS / SPLITS) + block.thread % PART * 16, owner);
    const u32 barrier = address_in(received(number), owner);
#pragma unroll
    for (int h = 0; h < HALVES; ++h) send(to + h * PART * 16, barrier, total[h]);
    pending = summed, pending_tiles = summed_tiles, summed = -1;
    if (mine_of(number) < PART) load_early(block.rank * PART + mine_of(number), pending);
  }

  // Adds the sums of the parts before; false: parts follow, for which this thread keeps what there is.
  __device__ __forceinline__ bool add_part(Float4 (&total)[HALVES]) const {
    const bool last = summed_part == parts() - 1;
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      if (summed_part > 0) {
        Float4 before = load_sums(summed_at + h * 2048);
        add(before, total[h]);
        total[h] = before;
      }
      if (!last) store_sums(summed_at + h * 2048, total[h].v);
    }
    return last;
  }

  // Which of the block's vectors of a unit is this thread's. Where one warp suffices they take turns.
  __device__ __forceinline__ int mine_of(u32 number) const {
    return (block.thread - (PART <= 32 ? number % SLICES * 32 : 0)) & (TEAM_THREADS - 1);
  }

  // Adds the blocks' sums of unit ``pending``, in order, and finishes them.
  __device__ __forceinline__ void add_blocks() {
    const u32 number = block.handed - 1;
    const int done = pending;
    pending = -1, block.numbered = number;
    const int mine = mine_of(number);
    if (mine >= PART) return;
    barrier_wait_cluster(received(number), number / SLOTS & 1);
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      const u32 from = slot(number) + (h * PART + mine) * 16;
      Float4 total = load_sums(from);
#pragma unroll
      for (int s = 1; s < SPLITS; ++s) add(total, load_sums(from + s * (B::SUMS / SPLITS)));
      emit(total, h, block.rank * PART + mine, done, pending_tiles);
    }
  }

  // What the sums of vector ``v`` need from memory, long before they are there.
  struct Early {
    float scale[2];
    u32 residual[HALVES][2];  // [half][weight row], a pair of activation rows
  } early;

  __device__ __forceinline__ static int tile_of(int v) { return v / 64; }
  __device__ __forceinline__ static int padded_of(int v, int u) {
    return u * UNIT_ROWS + tile_of(v) * TILE + v % 32 / 4;
  }

  __device__ __forceinline__ void load_early(int v, int u) {
    const int padded = padded_of(v, u);
    early.scale[0] = __ldg(job.scale + padded), early.scale[1] = __ldg(job.scale + padded + 8);
    if (job.mode != RESIDUAL) return;
#pragma unroll
    for (int w = 0; w < 2; ++w)
#pragma unroll
      for (int h = 0; h < HALVES; ++h) {
        const Place from = place_of(job, u, padded + 8 * w, first_row(ROWS) + h * 16 + row_of(v));
        if (!from.inside) continue;
        early.residual[h][w] = job.residual[from.offset] | job.residual[from.offset + from.stride] << 16;
      }
  }

  // Four sums: weight rows g and g + 8 of a tile, two activation rows each (vector ``v`` of half ``half``).
  __device__ __forceinline__ void emit(const Float4& s, int half, int v, int u, int tiles) {
    const int m = tile_of(v), row = first_row(ROWS) + half * 16 + row_of(v), padded = padded_of(v, u);
    if (!(tiles >> m & 1)) return;
    u16 y[2][2];  // [weight row][activation row]
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i / 2][i % 2] = to_bf16(s.v[i] * early.scale[i / 2]);
    if (job.mode == SWIGLU) {
      const int column = u * 16 + m * 8 + v % 32 / 4;
      if (column >= job.columns[0]) return;
#pragma unroll
      for (int i = 0; i < 2; ++i)
        job.out[0][static_cast<long long>(row + i) * job.out_stride[0] + column] =
            gated(from_bf16(y[0][i]), from_bf16(y[1][i]));
      return;
    }
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      const Place to = place_of(job, u, padded + 8 * w, row);
      if (!to.inside) continue;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        u16 z = y[w][i];
        if (job.mode == RESIDUAL) z = sum_of(early.residual[half][w] >> 16 * i, z);
        if (job.mode == GREEDY) {
          const u32 found = order_of(z) << 16 | (0xFFFFu - (block.numbered * 2 + w));
          block.best[half][i] = found > block.best[half][i] ? found : block.best[half][i];
          if (to.out == nullptr) continue;
        }
        to.out[to.offset + static_cast<long long>(i) * to.stride] = z;
      }
    }
  }

  // Unit ``i`` of the share, ``place`` of those that take parts in turn at the time, with a part of K.
  __device__ __forceinline__ void multiply_unit(int i, int part, int place) {
    tiles = share.tiles(i);
#pragma unroll
    for (int e = 0; e < 2 * COLUMN_TILES * 4; ++e) (&sum[0][0][0])[e] = 0.0f;
    x_at = block.x;
    if (PIECES == 2)
      x_at += block.lane % 2 * 512 + ((block.lane / 4 * 64 + block.lane % 4 / 2 * 16) ^ (block.lane % 2 * 64));
    int left = (pieces + 1) / 2;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
#pragma unroll 1
      for (; left > 0; --left) step();
      left = pieces / 2;
      if (half == 0 && summed >= 0) add_warps();
    }
    if (SPLITS > 1 && pending >= 0) add_blocks();
    hand_over(i, part, place);
  }

  // All units; ``passes``: of the block's team with most of them. ``fresh``: the x that is there is of the first part.
  __device__ __forceinline__ void run(int passes, bool fresh) {
    pieces = pieces_of(block.begin_k, block.stop_k);
#pragma unroll 1
    for (int first = 0; passes > 0; --passes, first += per_pass()) {
      const int stop = min(share.units(), first + per_pass());
#pragma unroll 1
      for (int part = 0; part < parts(); ++part) {
        if (parts() > 1 && !fresh) {
          block.turn_to(job, part);
          pieces = pieces_of(block.begin_k, block.stop_k);
        }
        fresh = false;
#pragma unroll 1
        for (int i = first; i < stop; ++i) multiply_unit(i, part, i - first);
      }
    }
    if (summed >= 0) add_warps();
    if (SPLITS > 1 && pending >= 0)
      add_blocks();  // every byte sent to this block has come: it may end, others need not
  }
};

// Number of a team among all: neighbours are in different blocks, so that what is left over is spread over blocks.
template <int SPLITS>
__device__ __forceinline__ int group_of(int team) {
  return team * (gridDim.x / SPLITS) + blockIdx.x / SPLITS;
}

template <class F, int ROWS, int SPLITS, int TEAMS, int DEPTH>
__device__ __forceinline__ void run_blocks(const Job& main, const Job& side) {
  extern __shared__ __align__(128) u8 memory[];
  using B = Block<ROWS, SPLITS, TEAMS, DEPTH * F::UNIT>;
  B block(main, shared_address(memory));
  Stream<F, B, ROWS, SPLITS, DEPTH, F::UNIT> stream(main, block, Share(main, group_of<SPLITS>(block.team)));
  block.init_barriers();
  pdl_trigger();
  pdl_wait();
  block.stage_x(main);
  if (SPLITS > 1) cluster_wait();
  const int most = main.units / main.groups + (main.units % main.groups > 0);
  stream.run((most + stream.per_pass() - 1) / stream.per_pass(), true);
#pragma unroll 1
  for (int first = 0; first < 2 * side.units; first += main.groups) {
    const int tile = first + main.groups - 1 - group_of<SPLITS>(block.team),
              unit = tile < 2 * side.units ? tile / 2 : -1;
    constexpr int TILE_BYTES = Bf16::UNIT / 2, PLACES = DEPTH * F::UNIT / TILE_BYTES;
    Stream<Bf16, B, ROWS, SPLITS, PLACES, TILE_BYTES> more(side, block, Share(0, 0, unit, tile % 2));
    more.run(1, false);
  }
  if (main.mode != GREEDY) return;
  const Share done(main, group_of<SPLITS>(block.team));
  const int v = block.rank * (TEAM_THREADS / SPLITS) + (SPLITS < 4 ? block.thread : block.lane);
#pragma unroll
  for (int i = 0; i < 2 * B::HALVES; ++i) {
    const u32 best = block.best[i / 2][i % 2], number = 0xFFFFu - (best & 0xFFFFu);
    const int unit = number / 2 < done.count ? done.first + number / 2 : done.extra;
    const u32 id = unit * UNIT_ROWS + v / 64 * TILE + v % 32 / 4 + number % 2 * 8;
    const u64 top = largest_rank<16, 2>(best == 0 ? 0 : rank_of(best >> 16, id));
    const int row = i / 2 * 16 + v / 32 % 2 * 8 + v % 4 * 2 + i % 2;
    if (block.lane < 4 && top > 0) atomicMax(reinterpret_cast<u64*>(memory + BEST) + row, top);
  }
  __syncthreads();
  if (threadIdx.x < ROWS)
    *best_at(main, blockIdx.x, ROWS, threadIdx.x) = reinterpret_cast<const u64*>(memory + BEST)[threadIdx.x];
}

// Two blocks of two teams or one of four fit on a multiprocessor; 32 rows take a block of two teams each.
#define LINEAR(FORMAT, F, ROWS, SPLITS, TEAMS, DEPTH)                                               \
  extern "C" __global__ void __cluster_dims__(SPLITS, 1, 1)                                         \
      __launch_bounds__(TEAMS* TEAM_THREADS, (ROWS) * (TEAMS) == 32 ? 2 : 1)                        \
          linear_cluster_##FORMAT##_##ROWS##_##SPLITS##_##TEAMS(const __grid_constant__ Job main,   \
                                                                const __grid_constant__ Job side) { \
    run_blocks<F, ROWS, SPLITS, TEAMS, DEPTH>(main, side);                                          \
  }
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 1000
#define LARGE_CLUSTERS(FORMAT, F, ROWS, TEAMS, DEPTH) \
  LINEAR(FORMAT, F, ROWS, 4, TEAMS, DEPTH)            \
  LINEAR(FORMAT, F, ROWS, 8, TEAMS, DEPTH)
#else  // of 2 blocks, as many as a texture processing cluster has multiprocessors
#define LARGE_CLUSTERS(FORMAT, F, ROWS, TEAMS, DEPTH)
#endif
#define LINEAR_SPLITS(FORMAT, F, ROWS, TEAMS, DEPTH) \
  LINEAR(FORMAT, F, ROWS, 1, TEAMS, DEPTH)           \
  LINEAR(FORMAT, F, ROWS, 2, TEAMS, DEPTH)           \
  LARGE_CLUSTERS(FORMAT, F, ROWS, TEAMS, DEPTH)
#define LINEAR_FORMAT(FORMAT, F, DEPTH, DEPTH_32) \
  LINEAR_SPLITS(FORMAT, F, 16, 2, DEPTH)          \
  LINEAR_SPLITS(FORMAT, F, 16, 4, DEPTH)          \
  LINEAR_SPLITS(FORMAT, F, 32, 2, DEPTH_32)

LINEAR_FORMAT(nvfp4, Nvfp4, 5, 2)
LINEAR_FORMAT(fp8, Fp8, 3, 2)
LINEAR_FORMAT(bf16, Bf16, 3, 2)

extern "C" __global__ void __launch_bounds__(256)
    linear_cluster_greedy(const u64* best, int* ids, int blocks, int rows) {
  best_of_blocks<256>(best, ids, blocks, rows);
}
#endif
