// What a call gives to a kernel over a latent cache, and which keys a block takes. Part of fused.cu and warpgroup.cu, which say
// before it what THREADS, STAGES, PRODUCERS and CONSUMERS are, and behind it a block's number.
#pragma once

enum Flags { LENS_WIDE = 1, REQ_WIDE = 2, SLOTS_WIDE = 4, INCLUDE_NEW = 8, HAS_TABLE = 16, HAS_LSE = 32, FRESH_LIST = 64 };

struct Params {
  const char* q;
  const char* latent;
  u16* out;
  float* lse;
  u32* packets;        // fused: [items, rows, 64, 4], 8 values of one row and block, EMPTY between launches;
                       // warpgroup: [items, SPLIT_PACKETS, 4], 8 values of a thread, two rows
  u32* headers;        // fused: [items, header_width], base-2 LSE of a row for the block that merges it, EMPTY likewise;
                       // warpgroup: [items, ROWS8], base-2 LSE of a row
  const void* lens;
  const void* requests;
  const void* slots;
  const int* indptr;
  u32* list;           // warpgroup: the work list of a forward pass (warpgroup_list.cuh), or nothing
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
  do { if (threadIdx.x == (thread)) p.trace[(i64)block_number() * RECORD + (field)] = (what); } while (0)
#else
#define NOTE(thread, field, what)
#endif
#define STAMP(field) NOTE(0, field, clock_now())
// Beginning and end of a block, with what ties its clock to the others', and how much it had to do.
#define STAMP_BEGIN() \
  NOTE(0, TIMER_FIRST, timer_now()); \
  STAMP(START); \
  NOTE(0, MULTIPROCESSOR, multiprocessor())
#define STAMP_END(work) \
  NOTE(0, TIMER_LAST, timer_now()); \
  STAMP(WRITTEN); \
  NOTE(0, WORK, work)
#define STAMP_COPIES(field) NOTE(32 * CONSUMERS, field, clock_now())

constexpr float LN2 = 0.6931471805599453f;

struct Work {
  int request, first, count, length, lo, hi;
  i64 pool;
};

DEVICE int read_index(const void* p, i64 i, bool wide) {
  return wide ? (int)((const i64*)p)[i] : ((const int*)p)[i];
}

// Keys of request b, new tokens included; 0 for padding.
DEVICE int request_length(const Params& p, int b) {
  // Both are asked for before either is looked at.
  const int pool = p.flags & HAS_TABLE ? read_index(p.requests, b, p.flags & REQ_WIDE) : 0;
  int n = read_index(p.lens, b, p.flags & LENS_WIDE);
  if (!(p.flags & INCLUDE_NEW)) n += p.tokens;
  if (pool < 0) n = 0;
  return n > 0 ? n : 0;
}

DEVICE int blocks_for(int length, int keys) { return (length + keys - 1) / keys; }

// The bound on a block's keys where a batch has `total`: as small as fills `target` blocks, and at least min_keys.
DEVICE int most_keys(const Params& p, int total) {
  const int fair = blocks_for(total, p.target);
  return fair > p.min_keys ? fair : p.min_keys;
}

// Keys of all requests. The whole warp calls it.
DEVICE int total_keys(const Params& p, int lane) {
  int total = 0;
  for (int b = lane; b < p.batch; b += 32) total += request_length(p, b);
  for (int d = 16; d; d >>= 1) total += __shfl_xor_sync(~0u, total, d);
  return total;
}

// A ring's barriers: a stage is full when every copying thread's copies have landed, empty when every other warp has read it.
DEVICE void init_ring(u32 barriers, int tid) {
  if (tid == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(barriers + 8 * i, 32 * PRODUCERS);
      barrier_init(barriers + 8 * (STAGES + i), CONSUMERS);
    }
    barriers_ready();
  }
}

// What block `item` does: some keys of one request, evened out between its blocks. The whole warp calls it. Unused blocks get
// request -1.
DEVICE Work find_work(const Params& p, int item, int lane) {
  Work w = {-1, 0, 0, 0, 0, 0, 0};
  if (p.batch == 1) {
    w.length = request_length(p, 0);
    w.count = blocks_for(w.length, most_keys(p, w.length));
    if (item < w.count) w.request = 0;
  } else {
    const int chunk = most_keys(p, total_keys(p, lane));
    int before = 0;
    for (int b0 = 0; b0 < p.batch && w.request < 0; b0 += 32) {
      const int length = b0 + lane < p.batch ? request_length(p, b0 + lane) : 0;
      const int count = blocks_for(length, chunk);
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
  const int even = blocks_for(w.length, w.count);
  w.count = blocks_for(w.length, even);
  if (item - w.first >= w.count) {
    w.request = -1;
    return w;
  }
  w.lo = (item - w.first) * even;
  w.hi = w.lo + even < w.length ? w.lo + even : w.length;
  return w;
}

// Padding: zeros and an LSE of -inf.
DEVICE void write_padding(const Params& p, int tid, int request) {
  const int rows = p.tokens * p.heads;
  u32* out = (u32*)(p.out + (i64)request * rows * VALUE);
  for (int i = tid; i < rows * VALUE / 2; i += THREADS) out[i] = 0;
  if (p.flags & HAS_LSE)
    for (int i = tid; i < rows; i += THREADS) p.lse[(i64)request * rows + i] = -__int_as_float(0x7f800000);
}
