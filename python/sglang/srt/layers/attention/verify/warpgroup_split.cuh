// Keys of a block: copies into the ring, both products, online softmax, the result on its way. Part of warpgroup.cu.
#pragma once

// Byte of 16-byte piece `chunk` of row `row` in an operand of 128-byte rows, one block of dims after the other.
DEVICE u32 piece(int row, int chunk, int block_bytes) {
  return (chunk >> 3) * block_bytes + row * 128 + (((chunk ^ row) & 7) << 4);
}

constexpr int MINE = STAGE_KEYS / PRODUCERS;  // rows of a stage that a warp copies, four at a time
static_assert(BLOCKS % PART_LINES == 0);
constexpr int SLOT_STAGES = SLOTS / STAGE_KEYS;  // that the slots are for
static_assert(MINE * SLOT_STAGES == 32);

// Which of the keys of so many stages a copying thread has the slot of: row lane % 8 of its warp's, of stage lane / 8.
DEVICE int key_of(int thread) {
  const int warp = thread >> 5, lane = thread & 31;
  return lane / MINE * STAGE_KEYS + warp * MINE + lane % MINE;
}
DEVICE int slot_of(const Params& p, const Work& w, int key) {
  return key < w.hi ? read_index(p.slots, w.pool + key, p.flags & SLOTS_WIDE) : 0;
}
DEVICE int first_slot(const Params& p, const Work& w, int thread) { return slot_of(p, w, w.lo + key_of(thread)); }

// The producer warps: rows of keys [lo, hi) into the ring, zeros behind the last. Rows older than this call's tokens may be
// read while the kernel before this one still runs, rows of its tokens may not. `slot` is this thread's for the first stages.
//
// Eight lanes copy a row, a line of 128 bytes at a time: a lane's 18 copies of a stage have two places each in memory and in the
// ring, the rest is in the instructions.
struct Places {
  int row0, mine;  // a lane's first row of a stage; the key it has the slot of
  u32 to;
  const char* from;
};
DEVICE Places places(const Params& p, u32 sm, int thread) {
  const int lane = thread & 31, row0 = (thread >> 5) * MINE + (lane >> 3);
  Places my = {row0, key_of(thread), sm + piece(row0, lane & 7, BLOCK_BYTES), p.latent + (lane & 7) * 16};
  forget(my.to);  // computed here, not where it is used
  return my;
}
DEVICE void produce(const Params& p, const Work& w, u32 sm, int lane, int slot, const Places& my) {
  const u32 full = sm + AT_BARRIER, empty = full + 8 * STAGES;
  const int fresh = w.length - p.tokens;
  int next = 0;
  bool waited = false;
  bool early = w.hi - w.lo > KEYS;
  int stage = 0, known = 0;  // the latter of those that the slots are for
  u32 parity = 1;
  if (slot >= 0) STAMP_COPIES(SLOTS_READ);
  for (int at = w.lo; at < w.hi; at += STAGE_KEYS) {
    const int n = w.hi - at < STAGE_KEYS ? w.hi - at : STAGE_KEYS, done = at - w.lo;
    const u32 rows = my.to + stage * STAGE_BYTES;
    if (done >= STAGES * STAGE_KEYS) barrier_wait(empty + 8 * stage, parity);
    if (!waited && at + n > fresh) {
      wait_for_previous_kernel();
      waited = true;
    }
#pragma unroll
    for (int g = 0; g < MINE / 4; g++) {
      const int their = __shfl_sync(~0u, slot, known * MINE + 4 * g + (lane >> 3));
      const char* row = my.from + (u64)(u32)their * (u32)p.stride_slot;
      // Four rows on, the swizzle flips its third bit.
      const u32 here = (rows ^ (g & 1) << 6) + g * 512;
      const bool there = my.row0 + 4 * g < n;
      if (early) early = !barrier_passed(sm + AT_QUERIES_THERE, 0);
#pragma unroll
      for (int i = 0; i < BLOCKS; i++) {
        if (i % PART_LINES == 0) {
          if (early && at == w.lo) parts_under_way<PACE_FIRST - 1>();
          else if (early) parts_under_way<PACE_EARLY - 1>();
          else parts_under_way<PACE - 1>();
        }
        copy16_or_zero(here + i * BLOCK_BYTES, row + i * 128, there);
        if (i % PART_LINES == PART_LINES - 1) part_sent();
      }
    }
    barrier_arrive_after_copies(full + 8 * stage);
    if (at == w.lo) STAMP_COPIES(FIRST_COPIES_SENT);
    STAMP_COPIES(LAST_COPIES_SENT);
    // Behind the first copies: it takes its time, and is needed some stages on.
    if (known == 0) next = slot_of(p, w, at + SLOTS + my.mine);
    if (++known == SLOT_STAGES) {
      known = 0;
      slot = next;
    }
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
  copies_done();
}

// State of a block's rows: sums of values, base-2 maxima, this thread's part of the sums of weights; and where the probabilities of
// the present tile are. Two places take turns: a warp that has its values may write the next ones while another's are still read.
struct Result {
  u32 p;
  float o[OUTPUTS][4 * NT];
  float m[NT][2], l[NT][2];
};

struct Larger { DEVICE float operator()(float x, float y) const { return fmaxf(x, y); } };
struct Sum { DEVICE float operator()(float x, float y) const { return x + y; } };

// The four warps that hold a row's scores, 16 keys each, leave what they have of it: [row][warp].
template <class Combine>
DEVICE void tell(u32 area, int part, int lane, float (&x)[NT][2], Combine combine) {
#pragma unroll
  for (int j = 0; j < NT; j++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
#pragma unroll
      for (int d = 4; d < 32; d <<= 1) x[j][c] = combine(x[j][c], __shfl_xor_sync(~0u, x[j][c], d));
      if (lane < 4) shared_put_f32(area + ((8 * j + 2 * lane + c) * CONSUMERS + part) * 4, x[j][c]);
    }
}
template <class Combine>
DEVICE float told(u32 area, int row, Combine combine) {
  const float4 f = shared_f32x4(area + row * 16);
  return combine(combine(f.x, f.y), combine(f.z, f.w));
}

// What softmax knows of a tile: its first key, the end of its keys, the first key that token 0 does not see, and four bits a row
// of this thread's, its token.
struct Sight {
  int at, end, fresh;
  u32 tokens;
};

// Address of an operand, the same in all lanes, and each time anew: a compiler that knows it from before keeps what it made of
// it, some 70 words, in every thread's registers.
DEVICE u32 anew(u32 a) {
  forget(a);
  return __shfl_sync(~0u, a, 0);
}

// Sends off the scores of a tile.
DEVICE void send_scores(u32 sm, u32 tile, float (&s)[4 * NT]) {
  const u64 keys = swizzled(anew(tile)), queries = swizzled(anew(sm + AT_QUERIES));
  products_begin();
#pragma unroll
  for (int b = 0; b < BLOCKS; b++)
#pragma unroll
    for (int k = 0; k < 4; k++)
      product<false>(s, keys + (b * BLOCK_BYTES + k * 32) / 16, queries + (b * Q_BLOCK_BYTES + k * 32) / 16, b + k > 0);
  products_sent();
}

// Sends off what a tile adds to the sums of values: all of it, or of its first half.
DEVICE void send_values(u32 sm, u32 tile, bool whole, bool first, Result& r) {
  const u64 keys = swizzled(anew(tile)), weights = matrices(anew(sm + r.p), NT * 128, 128);
  products_begin();
#pragma unroll
  for (int k = 0; k < KEYS / 16; k++)
    if (k < 2 || whole) {
#pragma unroll
      for (int b = 0; b < OUTPUTS; b++)
        product<true>(r.o[b], keys + (b * BLOCK_BYTES + k * 2048) / 16, weights + k * 2 * NT * 128 / 16, !first || k > 0);
    }
  products_sent();
}

DEVICE void settle(Result& r) {
#pragma unroll
  for (int b = 0; b < OUTPUTS; b++) settle(r.o[b]);
}

// Probabilities of a tile from its scores and the rows' maxima, turned into matrices of eight rows of eight keys:
// [key / 8][row tile]. Adds to `l`.
DEVICE void weigh(u32 probabilities, int warp, int lane, const float (&s)[4 * NT], const float (&m)[NT][2], float (&l)[NT][2]) {
#pragma unroll
  for (int j = 0; j < NT; j++) {
    u32 pairs[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float x = exp2_of(s[4 * j + 2 * h] - m[j][0]), y = exp2_of(s[4 * j + 2 * h + 1] - m[j][1]);
      l[j][0] += x;
      l[j][1] += y;
      pairs[h] = pack(x, y);
    }
    matrix_store_turned2(probabilities + ((2 * warp + (lane >> 3 & 1)) * NT + j) * 128 + (lane & 7) * 16, pairs[0], pairs[1]);
  }
  shared_to_matrix();
}

// Online softmax of a tile, scores to probabilities. A row's reference is the maximum of its first tile until a later score is
// more than 2^SLACK times larger; only then must all warps agree on a new one and the sums be scaled. What a row does depends on
// its own scores alone.
constexpr float SLACK = 8.f;
DEVICE void soften(const Params& p, u32 sm, const Sight& see, int tid, bool first, float (&s)[4 * NT], Result& r) {
  const int warp = tid >> 5, lane = tid & 31;
  const int key = see.at + 16 * warp + (lane >> 2);
  const bool masked = see.at + KEYS > see.fresh || see.at + KEYS > see.end;
  float top[NT][2];
#pragma unroll
  for (int j = 0; j < NT; j++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const int causal = see.fresh + (see.tokens >> 4 * (2 * j + c) & 15), limit = causal < see.end ? causal : see.end;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float& x = s[4 * j + 2 * h + c];
        x *= p.score_scale;
        if (masked) x = key + 8 * h < limit ? x : -1e38f;
      }
      top[j][c] = fmaxf(s[4 * j + c], s[4 * j + 2 + c]);
    }
  if (!first) {
    float l[NT][2];
    bool larger = false;
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        larger = larger || top[j][c] > r.m[j][c] + SLACK;
        l[j][c] = r.l[j][c];
      }
    weigh(sm + r.p, warp, lane, s, r.m, l);
    if (!warpgroup_any(larger)) {
#pragma unroll
      for (int j = 0; j < NT; j++)
#pragma unroll
        for (int c = 0; c < 2; c++) r.l[j][c] = l[j][c];
      return;
    }
  }
  tell(sm + AT_ROWS, warp, lane, top, Larger());
  warpgroup_sync();
  float alpha[NT][2];
#pragma unroll
  for (int j = 0; j < NT; j++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const float m = told(sm + AT_ROWS, 8 * j + 2 * (lane & 3) + c, Larger());
      alpha[j][c] = 1.f;
      if (m > r.m[j][c] + (first ? 0.f : SLACK)) {
        alpha[j][c] = exp2_of(r.m[j][c] - m);
        r.m[j][c] = m;
        r.l[j][c] *= alpha[j][c];
      }
    }
  weigh(sm + r.p, warp, lane, s, r.m, r.l);
  if (!first) {
#pragma unroll
    for (int b = 0; b < OUTPUTS; b++)
#pragma unroll
      for (int i = 0; i < 4 * NT; i++) r.o[b][i] *= alpha[i >> 2][i & 1];
  }
  warpgroup_sync();
}

// The only block of its request: turned through the ring, in which nothing is needed any more.
DEVICE void write_alone(const Params& p, const Work& w, u32 sm, int tid, const float (&factor)[NT][2], const Result& r) {
  const int warp = tid >> 5, lane = tid & 31, rows = p.tokens * p.heads;
  const u32 to = sm + (lane & 7) * OUT_PITCH + ((lane >> 4) * BLOCK + warp * 16 + (lane >> 3 & 1) * 8) * 2;
#pragma unroll
  for (int b = 0; b < OUTPUTS; b += 2)
#pragma unroll
    for (int j = 0; j < NT; j++) {
      u32 x[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float* o = &r.o[b + i / 2][4 * j + i % 2 * 2];
        x[i] = pack(o[0] * (factor[j][0] * p.value_scale), o[1] * (factor[j][1] * p.value_scale));
      }
      matrix_store_turned(to + j * 8 * OUT_PITCH + b * BLOCK * 2, x);
    }
  warpgroup_sync();
  u16* out = p.out + (i64)w.request * rows * VALUE;
  for (int i = tid; i < rows * (VALUE / 8); i += 32 * CONSUMERS)
    *(uint4*)(out + i * 8) = shared_u32x4(sm + i / (VALUE / 8) * OUT_PITCH + i % (VALUE / 8) * 16);
}

// A block's packets: [row tile][pair of dim blocks][thread]; of the pair, this thread's two dims of both, two rows each.
DEVICE void leave(const Params& p, int tid, int item, const float (&factor)[NT][2], const Result& r) {
  u32* to = p.packets + ((i64)item * SPLIT_PACKETS + tid) * 4;
#pragma unroll
  for (int j = 0; j < NT; j++)
#pragma unroll
    for (int b = 0; b < OUTPUTS; b += 2) {
      const float* x = &r.o[b][4 * j];
      const float* y = &r.o[b + 1][4 * j];
      const float f = factor[j][0], g = factor[j][1];
      *(uint4*)(to + (j * 4 + b / 2) * 128 * 4) =
          uint4{pack(x[0] * f, x[1] * g), pack(x[2] * f, x[3] * g), pack(y[0] * f, y[1] * g), pack(y[2] * f, y[3] * g)};
    }
}

// Queries, then all tiles of this block, and the result to the output or, as one of several, to the merge.
DEVICE void consume(const Params& p, const Work& w, u32 sm, int tid, int item) {
  const int warp = tid >> 5, lane = tid & 31, rows = p.tokens * p.heads;
  const u32 full = sm + AT_BARRIER, empty = full + 8 * STAGES;
  // As the keys: eight lanes a row of four, a line of 128 bytes at a time; warps share the lines.
  const char* from[2 * NT];
  const int of_four = lane >> 3;
  u32 to = sm + AT_QUERIES + warp * Q_BLOCK_BYTES + piece(of_four, lane & 7, Q_BLOCK_BYTES);
  u32 tokens = 0;
  Result r;
  r.p = AT_P;
  // One division for all rows: exact up to 64 of them.
  const u32 share = 65536u / p.heads + 1;
#pragma unroll
  for (int i = 0; i < 2 * NT; i++) {
    const int row = 4 * i + of_four, token = row * share >> 16;
    from[i] = p.q + (row < rows ? ((i64)w.request * p.tokens + token) * p.stride_token + (row - token * p.heads) * p.stride_head : 0) +
        warp * 128 + (lane & 7) * 16;
  }
#pragma unroll
  for (int j = 0; j < NT; j++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      tokens |= ((8 * j + 2 * (lane & 3) + c) * share >> 16) << 4 * (2 * j + c);
      r.m[j][c] = -1e30f;
      r.l[j][c] = 0.f;
    }
  forget(to);
  wait_for_previous_kernel();
  STAMP(WAIT_OVER);
  // Rows behind the last are zeros.
#pragma unroll
  for (int i = 0; i < 2 * NT; i++)
#pragma unroll
    for (int k = 0; k < (BLOCKS + CONSUMERS - 1) / CONSUMERS; k++)
      if (k * CONSUMERS + warp < BLOCKS)
        copy16_or_zero((to ^ (i & 1) << 6) + i * 512 + k * CONSUMERS * Q_BLOCK_BYTES, from[i] + k * CONSUMERS * 128, 4 * i + of_four < rows);
  copies_done();
  shared_to_matrix();
  warpgroup_sync();
  STAMP(INPUTS_THERE);
  if (tid == 0) barrier_arrive(sm + AT_QUERIES_THERE);
  const u32 sums = sm + AT_ROWS + ROWS8 * CONSUMERS * 4;
  int stage = 0;
  u32 parity = 0;
  for (int at = w.lo; at < w.hi;) {
    float s[4 * NT];
    // A tile does not go over the end of the ring: there half of one comes. Of more than two tiles the last comes as two halves: what is
    // left to do when its keys are there is shorter by half of the second product.
    const int left = w.hi - at;
    const bool first = at == w.lo, whole = stage + 1 < STAGES && left > (w.hi - w.lo > 2 * KEYS ? KEYS : STAGE_KEYS);
    const int end = at + (whole ? KEYS : STAGE_KEYS);
    const u32 tile = sm + stage * STAGE_BYTES;
    barrier_wait(full + 8 * stage, parity);
    if (whole) barrier_wait(full + 8 * stage + 8, parity);
    shared_to_matrix();
    if (first) STAMP(FIRST_KEYS_THERE);
    STAMP(LAST_KEYS_THERE);
    send_scores(sm, tile, s);
    products_done<0>();
    settle(s);
    STAMP(LEFT_FOR_OTHERS);
    soften(p, sm, Sight{at, end < w.hi ? end : w.hi, w.length - p.tokens + 1, tokens}, tid, first, s, r);
    STAMP(OTHERS_THERE);
    send_values(sm, tile, whole, first, r);
    if (end >= w.hi) tell(sums, warp, lane, r.l, Sum());
    products_done<0>();
    settle(r);
    if (lane == 0) {
      barrier_arrive(empty + 8 * stage);
      if (whole) barrier_arrive(empty + 8 * stage + 8);
    }
    at = end;
    r.p = 2 * AT_P + P_BYTES - r.p;
    stage += whole ? 2 : 1;
    if (stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
  STAMP(PRODUCTS_DONE);
  warpgroup_sync();  // all sums are told
  float factor[NT][2];
#pragma unroll
  for (int j = 0; j < NT; j++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const float l = told(sums, 8 * j + 2 * (lane & 3) + c, Sum());
      r.l[j][c] = l;
      factor[j][c] = l > 0.f ? inverse(l) : 0.f;
    }
  const bool alone = w.count == 1;
  if (alone) write_alone(p, w, sm, tid, factor, r);
  else leave(p, tid, item, factor, r);
  if (tid < 4 && (!alone || (p.flags & HAS_LSE))) {
#pragma unroll
    for (int j = 0; j < NT; j++) {
      const int row = 8 * j + 2 * tid;
      float lse[2];
#pragma unroll
      for (int c = 0; c < 2; c++) lse[c] = r.l[j][c] > 0.f ? r.m[j][c] + log2_of(r.l[j][c]) : -__int_as_float(0x7f800000);
      if (!alone) *(float2*)((float*)p.headers + (i64)item * ROWS8 + row) = float2{lse[0], lse[1]};
      else {
        if (row < rows) p.lse[(i64)w.request * rows + row] = lse[0] * LN2;
        if (row + 1 < rows) p.lse[(i64)w.request * rows + row + 1] = lse[1] * LN2;
      }
    }
  }
}
