// Split-KV attention over an absorbed MLA cache (latent 576, value = its first 512) in ONE launch, for up to 32 query rows
// (draft tokens x heads). docs/verify-attention.md explains the tile and the merge, fused.py launches.
//
// A block takes a run of keys of one request. It streams their rows into a ring in shared memory, one bulk copy a key, and
// keeps the whole result [512 dims, rows] in registers. Where a request has several blocks, each leaves its result
// as packets in global memory, and each merges one slice of the outputs: it reads that slice's packets of all blocks, in
// the order of the blocks, so repeats are bitwise equal. A packet needs no flag and no fence: every word of the buffer
// holds EMPTY until its writer stores a value (never EMPTY), and its one reader puts EMPTY back. Readers wait for
// words, so all blocks of a launch must be resident at once: the grid never exceeds the number of multiprocessors.
//
// Compile-time: NT (row tiles of 8), HALF (0: bf16, 1: fp16), FP8 (1: e4m3 cache, products in fp16), STAGES.
// No headers: the run-time compiler has none.

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

#ifndef NT
#define NT 3
#endif
#ifndef HALF
#define HALF 0
#endif
#ifndef FP8
#define FP8 0
#endif
#ifndef NAME
#define NAME verify_fused
#endif
#ifndef STAGES
#define STAGES 5
#endif

constexpr int KEYS = 32;             // keys a stage
constexpr int CONSUMERS = 8;         // warps that multiply
constexpr int PRODUCERS = 4;          // warps that copy, and later gather the weights of the merge
constexpr int THREADS = 32 * (CONSUMERS + PRODUCERS);
constexpr int LATENT = 576, VALUE = 512;
constexpr int ROWS8 = 8 * NT;        // query rows, padded
constexpr int ROW_BYTES = FP8 ? LATENT : 2 * LATENT;
// 16 bytes of padding put the rows that one matrix load touches into different banks.
constexpr int PITCH = ROW_BYTES + 16;
constexpr int Q_BYTES = 2 * LATENT, Q_PITCH = Q_BYTES + 16;
// Stages that are multiplied at once: two where shared memory and registers allow.
constexpr int GROUP = STAGES >= 5 && NT + FP8 <= 3 ? 2 : 1;
constexpr int TILE = GROUP * KEYS;
constexpr int SPREAD = TILE + 4;     // floats from row to row of the scores: no two lanes of a store share a bank
constexpr int P_PITCH = 2 * TILE + 16;  // bytes from row to row of the probabilities
constexpr int QUARTER = LATENT / 16 / 4;  // 16-dim steps of the first product a warp does

constexpr int STAGE_BYTES = KEYS * PITCH;
// The queries arrive in the last stages of the ring, which join it once they are in registers.
constexpr int HELD = (ROWS8 * Q_PITCH + STAGE_BYTES - 1) / STAGE_BYTES;
constexpr int OUT_PITCH = 2 * VALUE + 16;  // the result on its way out, at the start of the ring
constexpr int PACKETS = VALUE / 8;         // 16-byte packets a row

// Shared memory: ring; then scores, probabilities and rescaling, later weights and sums of the merge.
constexpr int AT_QUERIES = (STAGES - HELD) * STAGE_BYTES;
constexpr int AT_SCORES = STAGES * STAGE_BYTES;
constexpr int AT_P = AT_SCORES + 4 * ROWS8 * SPREAD * 4;
constexpr int AT_ALPHA = AT_P + ROWS8 * P_PITCH;
constexpr int AT_ML = AT_ALPHA + ROWS8 * 4;
constexpr int AT_BARRIER = AT_ML + ROWS8 * 8;
constexpr int SHARED_BYTES = AT_BARRIER + 16 * STAGES;
// Of the merge, in the ring behind the result: what a group of threads has summed, and the weights.
constexpr int AT_SUMS = (ROWS8 * OUT_PITCH + 127) / 128 * 128;
constexpr int AT_WEIGHTS = AT_SUMS + 256 * 32;
static_assert(HELD < STAGES, "no stage is left for keys");
static_assert(ROWS8 * OUT_PITCH <= AT_SCORES, "the result does not fit into the ring");

#include "fused_work.cuh"

constexpr u32 EMPTY = ~0u;  // no conversion gives this pattern: a NaN comes out positive
constexpr int PATIENCE = 1 << 22;  // polls, seconds: then something is broken, and a fault is better than a hang
DEVICE u32 block_number() { return block_id(); }

#include "fused_merge.cuh"
#include "fused_tile.cuh"

KERNEL void NAME(const __grid_constant__ Params p) {
  SHARED_BASE();
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, item = block_id();
  let_next_kernel_start();
  STAMP_BEGIN();
  init_ring(sm + AT_BARRIER, tid);
  __syncthreads();
  const Work w = find_work(p, item, lane);
  STAMP(LENGTHS_READ);
  // Requests without keys have no block of their own: block i writes the zeros of request i.
  const bool padding = item < p.batch && request_length(p, item) == 0;
  if (warp >= CONSUMERS) {
    if (w.request >= 0) {
      produce(p, w, sm, warp - CONSUMERS, lane);
      if (w.count > 1) {
        await_result();
        weigh(p, w, sm, tid - 32 * CONSUMERS, item);
      }
    }
    // Every block waits, also one without work: the end of this grid stands for the end of those before it.
    wait_for_previous_kernel();
  } else {
    wait_for_previous_kernel();
    STAMP(WAIT_OVER);
    if (w.request >= 0) {
      float o[4][NT][4];
#pragma unroll
      for (int d = 0; d < 4; d++)
#pragma unroll
        for (int t = 0; t < NT; t++)
#pragma unroll
          for (int i = 0; i < 4; i++) o[d][t][i] = 0.f;
      consume(p, w, sm, tid, o);
      STAMP(PRODUCTS_DONE);
      if (w.count == 1) write_alone(p, w, sm, tid, o);
      else {
        result_ready();
        send(p, sm, tid, item, o);
        STAMP(LEFT_FOR_OTHERS);
        merge(p, w, sm, tid, item);
      }
    }
  }
  if (padding) write_padding(p, tid, item);
  STAMP_END(w.hi - w.lo);
}
