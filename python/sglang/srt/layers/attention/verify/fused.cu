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

enum Flags { LENS_WIDE = 1, REQ_WIDE = 2, SLOTS_WIDE = 4, INCLUDE_NEW = 8, HAS_TABLE = 16, HAS_LSE = 32 };

struct Params {
  const char* q;
  const char* latent;
  u16* out;
  float* lse;
  u32* packets;        // [items, rows, 64, 4]: 8 values of one row and block; EMPTY between launches
  u32* headers;        // [items, header_width]: base-2 LSE of a row for the block that merges it; likewise
  const void* lens;
  const void* requests;
  const void* slots;
  const int* indptr;
  i64 stride_table;    // elements
  i64 stride_token;    // bytes
  i64 stride_head;     // bytes
  i64 stride_slot;     // bytes
  float score_scale;   // times log2(e)
  float value_scale;
  int batch, target, min_keys, tokens, heads, flags, header_width;
#ifdef TRACE
  i64* trace;          // [blocks, RECORD]: time stamps of this launch
#endif
};

#include "fused_device.cuh"

// Fields of a record of time stamps, as in stamps.py. Only a build with TRACE leaves any.
enum Stamp {
  MULTIPROCESSOR, TIMER_FIRST, START, LENGTHS_READ, SLOTS_READ, FIRST_COPIES_SENT, LAST_COPIES_SENT, WAIT_OVER, INPUTS_THERE,
  FIRST_KEYS_THERE, LAST_KEYS_THERE, PRODUCTS_DONE, WRITTEN, TIMER_LAST, WORK, LEFT_FOR_OTHERS, OTHERS_THERE, RECORD = 24
};
#ifdef TRACE
#define NOTE(thread, field, what) \
  do { if (threadIdx.x == (thread)) p.trace[(i64)block_id() * RECORD + (field)] = (what); } while (0)
#else
#define NOTE(thread, field, what)
#endif
#define STAMP(field) NOTE(0, field, clock_now())
#define STAMP_COPIES(field) NOTE(32 * CONSUMERS, field, clock_now())

constexpr float LN2 = 0.6931471805599453f;
constexpr u32 EMPTY = ~0u;  // no conversion gives this pattern: a NaN comes out positive
constexpr int PATIENCE = 1 << 22;  // polls, seconds: then something is broken, and a fault is better than a hang

struct Work {
  int request, first, count, length, lo, hi;
  i64 pool;
};

DEVICE int read_index(const void* p, i64 i, bool wide) {
  return wide ? (int)((const i64*)p)[i] : ((const int*)p)[i];
}

// Keys of request b, new tokens included; 0 for padding.
DEVICE int request_length(const Params& p, int b) {
  int n = read_index(p.lens, b, p.flags & LENS_WIDE);
  if (!(p.flags & INCLUDE_NEW)) n += p.tokens;
  if ((p.flags & HAS_TABLE) && read_index(p.requests, b, p.flags & REQ_WIDE) < 0) n = 0;
  return n > 0 ? n : 0;
}

// What block `item` does: some keys of one request. The whole warp calls it. The bound on a block's keys is as small as
// fills `target` blocks and at least min_keys; each request is then evened out. Unused blocks get request -1.
DEVICE Work find_work(const Params& p, int item, int lane) {
  Work w = {-1, 0, 0, 0, 0, 0, 0};
  int chunk = 0;
  if (p.batch == 1) {
    w.length = request_length(p, 0);
    const int fair = (w.length + p.target - 1) / p.target;
    chunk = fair > p.min_keys ? fair : p.min_keys;
    w.count = (w.length + chunk - 1) / chunk;
    if (item < w.count) w.request = 0;
  } else {
    int total = 0;
    for (int b = lane; b < p.batch; b += 32) total += request_length(p, b);
    for (int d = 16; d; d >>= 1) total += __shfl_xor_sync(~0u, total, d);
    const int fair = (total + p.target - 1) / p.target;
    chunk = fair > p.min_keys ? fair : p.min_keys;
    int before = 0;
    for (int b0 = 0; b0 < p.batch && w.request < 0; b0 += 32) {
      const int length = b0 + lane < p.batch ? request_length(p, b0 + lane) : 0;
      const int count = (length + chunk - 1) / chunk;
      int upto = count;
      for (int d = 1; d < 32; d <<= 1) {
        const int other = __shfl_up_sync(~0u, upto, d);
        if (lane >= d) upto += other;
      }
      const u32 here = __ballot_sync(~0u, before + upto > item);
      if (here) {
        const int at = __ffs(here) - 1;
        w.request = b0 + at;
        w.count = __shfl_sync(~0u, count, at);
        w.length = __shfl_sync(~0u, length, at);
        w.first = before + __shfl_sync(~0u, upto, at) - w.count;
      }
      before += __shfl_sync(~0u, upto, 31);
    }
  }
  if (w.request < 0) return w;
  if (p.flags & HAS_TABLE) w.pool = read_index(p.requests, w.request, p.flags & REQ_WIDE) * p.stride_table;
  else w.pool = p.indptr[w.request];
  const int even = (w.length + w.count - 1) / w.count;
  w.count = (w.length + even - 1) / even;
  if (item - w.first >= w.count) {
    w.request = -1;
    return w;
  }
  w.lo = (item - w.first) * even;
  w.hi = w.lo + even < w.length ? w.lo + even : w.length;
  return w;
}

#include "fused_merge.cuh"
#include "fused_tile.cuh"

// Padding: zeros and an LSE of -inf.
DEVICE void write_padding(const Params& p, int tid, int request) {
  const int rows = p.tokens * p.heads;
  u32* out = (u32*)(p.out + (i64)request * rows * VALUE);
  for (int i = tid; i < rows * VALUE / 2; i += THREADS) out[i] = 0;
  if (p.flags & HAS_LSE)
    for (int i = tid; i < rows; i += THREADS) p.lse[(i64)request * rows + i] = -__int_as_float(0x7f800000);
}

KERNEL void NAME(const __grid_constant__ Params p) {
  SHARED_BASE();
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, item = block_id();
  let_next_kernel_start();
  NOTE(0, TIMER_FIRST, timer_now());
  STAMP(START);
  NOTE(0, MULTIPROCESSOR, multiprocessor());
  if (tid == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(sm + AT_BARRIER + 8 * i, 32 * PRODUCERS);
      barrier_init(sm + AT_BARRIER + 8 * (STAGES + i), CONSUMERS);
    }
    barriers_ready();
  }
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
  NOTE(0, TIMER_LAST, timer_now());
  STAMP(WRITTEN);
  NOTE(0, WORK, w.hi - w.lo);
}
