// Keys of a block: copies into the ring, both products, online softmax. Part of fused.cu.
#pragma once

// The producer warps: rows of keys [lo, hi) into the ring. Rows older than this call's tokens may be read while the kernel
// before this one still runs, rows of its tokens may not.
DEVICE void produce(const Params& p, const Work& w, u32 sm, int warp, int lane) {
  constexpr int MINE = KEYS / PRODUCERS;                 // rows of a stage a warp copies
  constexpr int CHUNKS = ROW_BYTES / 16, ROUNDS = (MINE * CHUNKS + 31) / 32;
  const u32 full = sm + AT_BARRIER, empty = full + 8 * STAGES;
  const int fresh = w.length - p.tokens, row0 = warp * MINE;
  bool waited = false;
  int stage = 0;
  u32 parity = 1;
  int slot = lane < MINE && w.lo + row0 + lane < w.hi ? read_index(p.slots, w.pool + w.lo + row0 + lane, p.flags & SLOTS_WIDE) : 0;
  if (slot >= 0) STAMP_COPIES(SLOTS_READ);
  for (int at = w.lo; at < w.hi; at += KEYS) {
    const int n = w.hi - at < KEYS ? w.hi - at : KEYS;
    const u32 tile = sm + stage * STAGE_BYTES;
    barrier_wait(empty + 8 * stage, stage < STAGES - HELD ? parity : parity ^ 1);
    if (!waited && at + n > fresh) {
      wait_for_previous_kernel();
      waited = true;
    }
    // Products run over 16 keys at once: what is behind the last key must be a number.
    if (n < KEYS && warp == 0) {
      const int most = (n + 15) / 16 * 16;
      for (int i = lane; i < (most - n) * (PITCH / 16); i += 32) shared_put_zero(tile + n * PITCH + i * 16);
      __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
      const int chunk = i * 32 + lane, row = chunk / CHUNKS;
      const int from = __shfl_sync(~0u, slot, row < MINE ? row : 0);
      if (row < MINE && row0 + row < n)
        copy16(tile + (row0 + row) * PITCH + (chunk - row * CHUNKS) * 16, p.latent + from * p.stride_slot + (chunk - row * CHUNKS) * 16);
    }
    barrier_arrive_after_copies(full + 8 * stage);
    if (at == w.lo) STAMP_COPIES(FIRST_COPIES_SENT);
    STAMP_COPIES(LAST_COPIES_SENT);
    const int next = at + KEYS + row0 + lane;
    slot = lane < MINE && next < w.hi ? read_index(p.slots, w.pool + next, p.flags & SLOTS_WIDE) : 0;
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
  copies_done();
}

// The queries as second operand of the first product, kept in registers: rows [0, ROWS8), this warp's quarter of the dims.
// `scale`, of the scores of row tid / 8, takes up what an fp8 cache asks of the queries.
DEVICE void load_queries(const Params& p, const Work& w, u32 sm, int warp, int lane, u32 (&q)[QUARTER][NT][2], float& scale) {
  const u32 area = sm + AT_QUERIES;
  const int rows = p.tokens * p.heads;
  for (int row = warp; row < ROWS8; row += CONSUMERS) {
    const char* from = p.q + ((i64)w.request * p.tokens + row / p.heads) * p.stride_token + row % p.heads * p.stride_head;
    for (int i = lane; i < Q_BYTES / 16; i += 32) {
      if (row < rows) copy16(area + row * Q_PITCH + i * 16, from + i * 16);
      else shared_put_zero(area + row * Q_PITCH + i * 16);
    }
  }
  copies_done();
  consumers_sync();
  const int quarter = warp >> 1;
#if FP8
  // Into fp16 range by a power of two a row, exact both ways; clamped so that it stays a normal number.
  const int row = threadIdx.x >> 3, part = threadIdx.x & 7;
  if (threadIdx.x < 8 * ROWS8) {
    float top = 0.f;
    for (int i = 0; i < LATENT / 8 / 4; i++) {
      const uint2 x = shared_u32x2(area + row * Q_PITCH + (i * 8 + part) * 8);
      top = fmaxf(top, fmaxf(fabsf(query_value(x.x, 0)), fabsf(query_value(x.x, 1))));
      top = fmaxf(top, fmaxf(fabsf(query_value(x.y, 0)), fabsf(query_value(x.y, 1))));
    }
#pragma unroll
    for (int d = 1; d < 8; d <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    const float power = ceilf(log2_of(fminf(fmaxf(top, 1e-30f), 1e30f)));
    scale *= exp2_of(power);
    if (part == 0) shared_put_f32(sm + AT_ML + row * 4, exp2_of(-power));
  }
  consumers_sync();
  // A matrix load of bytes hands a thread dims 4 i .. 4 i + 3 of its key: the queries follow that order.
  const u32 from = area + (lane >> 2) * Q_PITCH + quarter * QUARTER * 32 + (lane & 3) * 8;
#pragma unroll
  for (int t = 0; t < NT; t++) {
    const float down = shared_f32(sm + AT_ML + (t * 8 + (lane >> 2)) * 4);
#pragma unroll
    for (int k = 0; k < QUARTER; k++) {
      const uint2 x = shared_u32x2(from + t * 8 * Q_PITCH + k * 32);
      q[k][t][0] = pack(query_value(x.x, 0) * down, query_value(x.x, 1) * down);
      q[k][t][1] = pack(query_value(x.y, 0) * down, query_value(x.y, 1) * down);
    }
  }
#else
  // One load brings both halves of two 16-dim steps for 8 rows.
  const u32 from = area + (lane & 7) * Q_PITCH + quarter * QUARTER * 32 + (lane >> 3) * 16;
#pragma unroll
  for (int t = 0; t < NT; t++) {
#pragma unroll
    for (int k = 0; k < QUARTER; k += 2) {
      u32 r[4];
      // The last step is single: the second half of its load repeats the first.
      matrix_load(r, from + t * 8 * Q_PITCH + k * 32 - (k + 1 == QUARTER && lane >= 16 ? 32 : 0));
      q[k][t][0] = r[0];
      q[k][t][1] = r[1];
      if (k + 1 < QUARTER) {
        q[k + 1][t][0] = r[2];
        q[k + 1][t][1] = r[3];
      }
    }
  }
#endif
  __syncwarp();
  if (lane == 0)
    for (int i = STAGES - HELD; i < STAGES; i++) barrier_arrive(sm + AT_BARRIER + 8 * (STAGES + i));
}

// Scores of 16 keys a stage and warp over a quarter of the dims, to shared memory: [quarter][row][key]. What it makes of
// stages behind the last key is never used.
template <int STAGES_NOW>
DEVICE void first_product(const u32 (&tile)[GROUP], u32 sm, int warp, int lane, const u32 (&q)[QUARTER][NT][2]) {
  const int keys = (warp & 1) * 16, quarter = warp >> 1;
  float s[STAGES_NOW][NT][4];
#pragma unroll
  for (int h = 0; h < STAGES_NOW; h++)
#pragma unroll
    for (int t = 0; t < NT; t++)
#pragma unroll
      for (int i = 0; i < 4; i++) s[h][t][i] = 0.f;
#if FP8
  const u32 from = (keys + (lane & 15)) * PITCH + quarter * QUARTER * 16 + (lane >> 4) * 16;
#pragma unroll
  for (int k = 0; k < QUARTER; k += 2)
#pragma unroll
    for (int h = 0; h < STAGES_NOW; h++) {
      u32 r[4];
      matrix_load(r, tile[h] + from + k * 16 - (k + 1 == QUARTER && lane >= 16 ? 16 : 0));
#pragma unroll
      for (int i = 0; i < 2; i++)
        if (k + i < QUARTER) {
          const u32 a[4] = {widen(r[2 * i]), widen(r[2 * i + 1]), widen(r[2 * i] >> 16), widen(r[2 * i + 1] >> 16)};
#pragma unroll
          for (int t = 0; t < NT; t++) multiply(s[h][t], a, q[k + i][t][0], q[k + i][t][1]);
        }
    }
#else
  const u32 from = (keys + (lane & 15)) * PITCH + quarter * QUARTER * 32 + (lane >> 4) * 16;
#pragma unroll
  for (int k = 0; k < QUARTER; k++)
#pragma unroll
    for (int h = 0; h < STAGES_NOW; h++) {
      u32 a[4];
      matrix_load(a, tile[h] + from + k * 32);
#pragma unroll
      for (int t = 0; t < NT; t++) multiply(s[h][t], a, q[k][t][0], q[k][t][1]);
    }
#endif
  const u32 to = sm + AT_SCORES + ((quarter * ROWS8 + 2 * (lane & 3)) * SPREAD + keys + (lane >> 2)) * 4;
#pragma unroll
  for (int h = 0; h < STAGES_NOW; h++)
#pragma unroll
    for (int t = 0; t < NT; t++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        shared_put_f32(to + ((t * 8 + (i & 1)) * SPREAD + h * KEYS + (i >> 1) * 8) * 4, s[h][t][i]);
}

// Online softmax of one tile: eight threads a row, four keys of each stage. `m` (base 2) and `l` are kept by those threads.
DEVICE void soften(u32 sm, int at, int limit, float scale, int tid, float& m, float& l) {
  const int row = tid >> 3, part = tid & 7;
  float4 s[GROUP];
  float top = m;
#pragma unroll
  for (int h = 0; h < GROUP; h++) {
    const u32 from = sm + AT_SCORES + (row * SPREAD + h * KEYS + part * 4) * 4;
    s[h] = shared_f32x4(from);
#pragma unroll
    for (int i = 1; i < 4; i++) {
      const float4 more = shared_f32x4(from + i * ROWS8 * SPREAD * 4);
      s[h].x += more.x;
      s[h].y += more.y;
      s[h].z += more.z;
      s[h].w += more.w;
    }
    const int seen = limit - at - h * KEYS - part * 4;  // keys of mine that the row sees; scores behind them may be anything
    s[h].x = seen > 0 ? s[h].x * scale : -1e38f;
    s[h].y = seen > 1 ? s[h].y * scale : -1e38f;
    s[h].z = seen > 2 ? s[h].z * scale : -1e38f;
    s[h].w = seen > 3 ? s[h].w * scale : -1e38f;
    top = fmaxf(top, fmaxf(fmaxf(s[h].x, s[h].y), fmaxf(s[h].z, s[h].w)));
  }
#pragma unroll
  for (int d = 1; d < 8; d <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  const float alpha = exp2_of(m - top);
  l *= alpha;
  m = top;
#pragma unroll
  for (int h = 0; h < GROUP; h++) {
    s[h].x = exp2_of(s[h].x - top);
    s[h].y = exp2_of(s[h].y - top);
    s[h].z = exp2_of(s[h].z - top);
    s[h].w = exp2_of(s[h].w - top);
    l += (s[h].x + s[h].y) + (s[h].z + s[h].w);
    shared_put_u32x2(sm + AT_P + row * P_PITCH + h * 2 * KEYS + part * 8, pack(s[h].x, s[h].y), pack(s[h].z, s[h].w));
  }
  if (part == 0) shared_put_f32(sm + AT_ALPHA + row * 4, alpha);
}

// Makes the sums so far relative to the new maxima.
DEVICE void rescale(u32 sm, int lane, float (&o)[4][NT][4]) {
  bool same = true;
  float2 alpha[NT];
#pragma unroll
  for (int t = 0; t < NT; t++) {
    alpha[t] = shared_f32x2(sm + AT_ALPHA + (t * 8 + 2 * (lane & 3)) * 4);
    same = same && alpha[t].x == 1.f && alpha[t].y == 1.f;
  }
  if (!__all_sync(~0u, same)) {
#pragma unroll
    for (int d = 0; d < 4; d++)
#pragma unroll
      for (int t = 0; t < NT; t++) {
        o[d][t][0] *= alpha[t].x;
        o[d][t][1] *= alpha[t].y;
        o[d][t][2] *= alpha[t].x;
        o[d][t][3] *= alpha[t].y;
      }
  }
}

// Adds V^T P^T of stage `half` of a tile with `n` keys left from it on: 64 dims a warp, all rows.
DEVICE void second_product(u32 tile, u32 sm, int half, int n, int warp, int lane, float (&o)[4][NT][4]) {
  u32 b[NT][4];
#pragma unroll
  for (int t = 0; t < NT; t++)
    matrix_load(b[t], sm + AT_P + (t * 8 + (lane & 7)) * P_PITCH + half * 2 * KEYS + (lane >> 3) * 16);
#if FP8
  // Turned, a matrix of bytes hands a thread dims 2 i and 2 i + 1 of two keys: row i of a tile is dim 2 i, row 8 + i dim 2 i + 1.
  const u32 from = tile + (lane & 15) * PITCH + warp * 64 + (lane >> 4) * 16;
#pragma unroll
  for (int k = 0; k < 2; k++) {
    if (k * 16 < n) {
#pragma unroll
      for (int d = 0; d < 4; d += 2) {
        u32 r[4];
        matrix_load_turned(r, from + k * 16 * PITCH + d * 16);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const u32 low = swap_middle(r[2 * i]), high = swap_middle(r[2 * i + 1]);
          const u32 a[4] = {widen(low), widen(low >> 16), widen(high), widen(high >> 16)};
#pragma unroll
          for (int t = 0; t < NT; t++) multiply(o[d + i][t], a, b[t][2 * k], b[t][2 * k + 1]);
        }
      }
    }
  }
#else
  const u32 from = tile + ((lane >> 4) * 8 + (lane & 7)) * PITCH + (warp * 64 + (lane >> 3 & 1) * 8) * 2;
#pragma unroll
  for (int k = 0; k < 2; k++) {
    if (k * 16 < n) {
#pragma unroll
      for (int d = 0; d < 4; d++) {
        u32 a[4];
        matrix_load_turned(a, from + k * 16 * PITCH + d * 32);
#pragma unroll
        for (int t = 0; t < NT; t++) multiply(o[d][t], a, b[t][2 * k], b[t][2 * k + 1]);
      }
    }
  }
#endif
}

// All stages of this block. Afterwards `o` is unnormalised and AT_ML holds (m, l) of every row.
DEVICE void consume(const Params& p, const Work& w, u32 sm, int tid, float (&o)[4][NT][4]) {
  const int warp = tid >> 5, lane = tid & 31;
  const u32 full = sm + AT_BARRIER, empty = full + 8 * STAGES;
  const int row = tid >> 3, rows = p.tokens * p.heads;
  float m = -1e30f, l = 0.f;
  if (w.lo < w.hi) {
    u32 q[QUARTER][NT][2];
    float scale = p.score_scale;
    load_queries(p, w, sm, warp, lane, q, scale);
    STAMP(INPUTS_THERE);
    const int causal = w.length - p.tokens + row / p.heads + 1;
    const int limit = row < rows && causal < w.hi ? causal : w.hi;
    int stage = 0;
    u32 parity = 0;
    for (int at = w.lo; at < w.hi; at += TILE) {
      const int n = w.hi - at;
      u32 tile[GROUP];
      int stages[GROUP];
#pragma unroll
      for (int h = 0; h < GROUP; h++) {
        stages[h] = stage;
        tile[h] = sm + stage * STAGE_BYTES;
        if (h * KEYS < n) {
          barrier_wait(full + 8 * stage, parity);
          if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
          }
        }
      }
      if (at == w.lo) STAMP(FIRST_KEYS_THERE);
      STAMP(LAST_KEYS_THERE);
      if (GROUP > 1 && n > KEYS) first_product<GROUP>(tile, sm, warp, lane, q);
      else first_product<1>(tile, sm, warp, lane, q);
      consumers_sync();
      if (tid < 8 * ROWS8) soften(sm, at, limit, scale, tid, m, l);
      consumers_sync();
      rescale(sm, lane, o);
#pragma unroll
      for (int h = 0; h < GROUP; h++) {
        if (h * KEYS < n) {
          second_product(tile[h], sm, h, n - h * KEYS, warp, lane, o);
          __syncwarp();
          if (lane == 0) barrier_arrive(empty + 8 * stages[h]);
        }
      }
    }
  }
  if (tid < 8 * ROWS8) {
#pragma unroll
    for (int d = 1; d < 8; d <<= 1) l += __shfl_xor_sync(~0u, l, d);
    if ((tid & 7) == 0) shared_put_f32x2(sm + AT_ML + row * 8, m, l);
  }
  consumers_sync();
}
