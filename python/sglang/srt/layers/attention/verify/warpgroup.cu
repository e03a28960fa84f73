// Split-KV attention over an absorbed MLA cache (latent 576, value = its first 512) in two launches for Hopper, for up to 32
// query rows (draft tokens x heads) and 2-byte caches. docs/verify-attention.md explains the tile, warpgroup.py launches.
//
// `verify_split`: a block takes a run of keys of one request. Four warps copy their rows into a ring of tiles in the order that
// the matrix instructions want, a warpgroup multiplies: S^T[keys, rows] = K Q^T, O^T[dims, rows] = V^T P^T, both from the same
// tile. What it has goes out as its threads hold it, 16 bytes a thread, side by side: nothing is turned.
// `verify_merge`: adds the blocks of a request, in an order that never changes, and puts values where they belong.
// `verify_list`: in front of a forward pass' first split, writes down what every block of every layer would find out for itself.
//
// Compile-time: NT (row tiles of 8), HALF (0: bf16, 1: fp16), LISTED (split and merge read such a list), PACE and its like (below).
// No headers: the run-time compiler has none.

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;
typedef unsigned long long u64;

#ifndef NT
#define NT 3
#endif
#ifndef HALF
#define HALF 0
#endif
#ifndef LISTED
#define LISTED 0
#endif
#define FP8 0

constexpr int KEYS = 64;             // keys a tile
#ifndef STAGES
#define STAGES 5
#endif
constexpr int STAGE_KEYS = 32;       // half a tile: one lies in two stages side by side
// Keys are asked for in parts, 16 keys by 192 dims (6 KiB a multiprocessor), of which PACE are under way at once; PACE_EARLY until the
// queries are there, and PACE_FIRST of the first stage. More stand in queues of the memory, in which what else is loaded stands as well:
// the last call's results on their way to its merge, then the queries. A block of no more than a tile has no time to lose.
constexpr int PART_LINES = 3;
#ifndef PACE
#define PACE 8
#endif
#ifndef PACE_EARLY
#define PACE_EARLY 4
#endif
#ifndef PACE_FIRST
#define PACE_FIRST 3
#endif
static_assert(PACE_FIRST >= 1 && PACE_FIRST <= PACE_EARLY && PACE_EARLY <= PACE);
constexpr int CONSUMERS = 4;         // warps that multiply: a warpgroup
constexpr int PRODUCERS = 4;         // warps that copy
constexpr int THREADS = 32 * (CONSUMERS + PRODUCERS);
constexpr int LATENT = 576, VALUE = 512;
constexpr int ROWS8 = 8 * NT;        // query rows, padded
constexpr int BLOCK = 64;            // dims that lie side by side: a row of 128 bytes, its 16-byte pieces swizzled
constexpr int BLOCKS = LATENT / BLOCK, OUTPUTS = VALUE / BLOCK;
constexpr int CHUNKS = 2 * LATENT / 16;
constexpr int STAGE_BYTES = STAGE_KEYS * 128;  // of a block of dims
constexpr int BLOCK_BYTES = STAGES * STAGE_BYTES;
constexpr int Q_BLOCK_BYTES = ROWS8 * 128;
constexpr int SPLIT_PACKETS = NT * 4 * 128;  // [row tile][pair of dim blocks][thread], 16 bytes each
constexpr int OUT_PITCH = 2 * VALUE + 16;    // a lone block's result on its way out, in the ring

// Shared memory of the split: ring, queries, probabilities twice, what warps tell each other of a row, barriers (full, empty).
constexpr int AT_QUERIES = BLOCKS * BLOCK_BYTES;
constexpr int AT_P = AT_QUERIES + BLOCKS * Q_BLOCK_BYTES;
constexpr int P_BYTES = ROWS8 * KEYS * 2;
constexpr int AT_ROWS = AT_P + 2 * P_BYTES;
constexpr int AT_BARRIER = AT_ROWS + 2 * ROWS8 * CONSUMERS * 4;
constexpr int AT_QUERIES_THERE = AT_BARRIER + 16 * STAGES;
constexpr int SHARED_BYTES = AT_QUERIES_THERE + 16;

// The merge: a block adds up PACKETS packets of every split of a request, GROUPS threads each.
constexpr int MERGE_THREADS = 256, PACKETS = 16, GROUPS = MERGE_THREADS / PACKETS;
constexpr int MERGE_BLOCKS = SPLIT_PACKETS / PACKETS;  // a request
// Where a request has at most so many blocks, one of so many merge blocks does the work of all.
constexpr int FEW = 16, FEW_FOLD = 4, FEWEST = 8, FEWEST_FOLD = 16;

constexpr int SLOTS = 32 * PRODUCERS;  // of keys that the copying threads hold at once, one each
constexpr int LIST_THREADS = SLOTS;    // of a block of the work list

#include "fused_work.cuh"
#include "warpgroup_device.cuh"

// Of the split or the merge: only the latter has rows.
DEVICE u32 block_number() { return block_row() * MERGE_BLOCKS + block_id(); }

#include "warpgroup_split.cuh"
#include "warpgroup_merge.cuh"
#include "warpgroup_list.cuh"

KERNEL_SPLIT void verify_split(const __grid_constant__ Params p) {
  SHARED_BASE();
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, item = block_id();
#if LISTED
  // The kernel in front wrote the list. Waiting comes before letting others start: what starts from here on finds it written.
  if (p.flags & FRESH_LIST) wait_for_previous_kernel();
#endif
  let_next_kernel_start();
  STAMP_BEGIN();
  if (tid == 0) barrier_init(sm + AT_QUERIES_THERE, 1);
#if LISTED
  // All of it is asked for at once; the ring and the copies' places are made ready meanwhile.
  const Entry e = read_entry(p, item);
#endif
  init_ring(sm + AT_BARRIER, tid);
#if !LISTED
  const Work w = find_work(p, item, lane);
  STAMP(LENGTHS_READ);
#endif
  if (warp >= CONSUMERS) {
    const int copier = tid - 32 * CONSUMERS;
#if LISTED
    const int slot = read_slot(p, item, copier);
#endif
    const Places my = places(p, sm, copier);
    __syncthreads();
#if LISTED
    const Work w = work_of(e);
#else
    const int slot = first_slot(p, w, copier);
#endif
    produce(p, w, sm, lane, slot, my);
    // Every block waits, also one without work: the end of this grid stands for the end of those before it.
    wait_for_previous_kernel();
  } else {
    __syncthreads();
#if LISTED
    const Work w = work_of(e);
    if (w.request >= -1) STAMP(LENGTHS_READ);
#endif
    if (w.request >= 0) consume(p, w, sm, tid, item);
    else wait_for_previous_kernel();
  }
  // Requests without keys have no block of their own: block i writes the zeros of request i.
#if LISTED
  const bool padding = e.is_padding();
#else
  const bool padding = item < p.batch && request_length(p, item) == 0;
#endif
  if (padding) write_padding(p, tid, item);
#if LISTED
  STAMP_END((int)(e.keys.z - e.keys.y));
#else
  STAMP_END(w.hi - w.lo);
#endif
}

// Grid (MERGE_BLOCKS or fewer, batch).
KERNEL_MERGE void verify_merge(const __grid_constant__ Params p) {
  SHARED_BASE();
  let_next_kernel_start();
  STAMP_BEGIN();
#if LISTED
  const Share s = read_share(p, block_row());
  if (s.count >= 0) STAMP(LENGTHS_READ);
#else
  const Share s = find_share(p, block_row(), threadIdx.x & 31);
  STAMP(LENGTHS_READ);
#endif
  wait_for_previous_kernel();
  STAMP(WAIT_OVER);
  const int tid = threadIdx.x;
  if (s.count > FEW) merge_all<1, 132>(p, s, sm, tid, block_row());  // the multiprocessors of an H200
  else if (s.count > FEWEST) merge_all<FEW_FOLD, FEW>(p, s, sm, tid, block_row());
  else if (s.count > 1) merge_all<FEWEST_FOLD, FEWEST>(p, s, sm, tid, block_row());
  STAMP_END(s.count);
}

#if LISTED
// Grid: as the split's.
KERNEL_LIST void verify_list(const __grid_constant__ Params p) {
  // Lengths may be of the kernel in front, and what reads an older list in this one's place is over behind it. No other kernel is let
  // start: the split behind this one waits before it lets any.
  wait_for_previous_kernel();
  write_list(p, block_id(), threadIdx.x);
}
#endif
