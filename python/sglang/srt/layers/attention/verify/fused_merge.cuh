// From a block's result to the output, alone or with the other blocks of its request. Part of fused.cu.
#pragma once

// Rows [0, rows) of the result, normalised and times `scale`, to shared memory as 2-byte values [row][dim].
DEVICE void stage_result(u32 sm, int tid, float scale, bool as_output, const float (&o)[4][NT][4]) {
  const int warp = tid >> 5, lane = tid & 31;
  float2 factor[NT];
#pragma unroll
  for (int t = 0; t < NT; t++) {
    const float4 ml = shared_f32x4(sm + AT_ML + (t * 8 + 2 * (lane & 3)) * 8);
    factor[t].x = ml.y > 0.f ? scale / ml.y : 0.f;
    factor[t].y = ml.w > 0.f ? scale / ml.w : 0.f;
  }
#if FP8
  // Row i of a tile is dim 2 i, row 8 + i dim 2 i + 1: neighbours in one thread.
  const u32 to = sm + 2 * (lane & 3) * OUT_PITCH + (warp * 64 + 2 * (lane >> 2)) * 2;
#pragma unroll
  for (int d = 0; d < 4; d++)
#pragma unroll
    for (int t = 0; t < NT; t++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float f = i ? factor[t].y : factor[t].x, low = o[d][t][i] * f, high = o[d][t][2 + i] * f;
        shared_put_u32(to + (t * 8 + i) * OUT_PITCH + d * 32, as_output ? pack_output(low, high) : pack(low, high));
      }
#else
  // Two tiles of 16 dims at once: four 8 x 8 matrices, turned into 8 rows of 16 bytes each.
  const u32 to = sm + (lane & 7) * OUT_PITCH + (warp * 64 + (lane >> 3) * 8) * 2;
#pragma unroll
  for (int d = 0; d < 4; d += 2)
#pragma unroll
    for (int t = 0; t < NT; t++) {
      u32 r[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float low = o[d + i / 2][t][i % 2 * 2] * factor[t].x, high = o[d + i / 2][t][i % 2 * 2 + 1] * factor[t].y;
        r[i] = pack(low, high);
      }
      matrix_store_turned(to + t * 8 * OUT_PITCH + d * 32, r);
    }
  (void)as_output;
#endif
  consumers_sync();
}

DEVICE float row_lse(u32 sm, int row) {
  const float2 ml = shared_f32x2(sm + AT_ML + row * 8);
  return ml.y > 0.f ? ml.x + log2_of(ml.y) : -__int_as_float(0x7f800000);
}

// The only block of its request.
DEVICE void write_alone(const Params& p, const Work& w, u32 sm, int tid, const float (&o)[4][NT][4]) {
  const int rows = p.tokens * p.heads;
  stage_result(sm, tid, p.value_scale, true, o);
  u16* out = p.out + (i64)w.request * rows * VALUE;
  for (int i = tid; i < rows * PACKETS; i += 32 * CONSUMERS)
    *(uint4*)(out + i * 8) = shared_u32x4(sm + i / PACKETS * OUT_PITCH + i % PACKETS * 16);
  if ((p.flags & HAS_LSE) && tid < rows) p.lse[(i64)w.request * rows + tid] = row_lse(sm, tid) * LN2;
}

// Slices of packets [i * width, (i + 1) * width) of the rows' packets, one a block; the rows that slice i touches.
struct Slice {
  int width, begin, end, row0, row1;
};
DEVICE Slice slice_of(int rows, int count, int i) {
  Slice s;
  s.width = (rows * PACKETS + count - 1) / count;
  s.begin = i * s.width;
  s.end = s.begin + s.width < rows * PACKETS ? s.begin + s.width : rows * PACKETS;
  s.row0 = s.begin / PACKETS;
  s.row1 = (s.end - 1) / PACKETS;
  return s;
}

// Leaves this block's result.
DEVICE void send(const Params& p, u32 sm, int tid, int item, const float (&o)[4][NT][4]) {
  const int rows = p.tokens * p.heads;
  stage_result(sm, tid, 1.f, false, o);
  u32* to = p.packets + (i64)item * rows * PACKETS * 4;
  for (int i = tid; i < rows * PACKETS; i += 32 * CONSUMERS)
    packet_put(to + i * 4, shared_u32x4(sm + i / PACKETS * OUT_PITCH + i % PACKETS * 16));
}

DEVICE bool incomplete(uint4 x) { return x.x == EMPTY || x.y == EMPTY || x.z == EMPTY || x.w == EMPTY; }

// The producer warps' part of the merge, beside what the others do with packets: this block's headers to all, and
// weights [row][block] of this slice's rows from everybody's headers. Slices and rows both grow from header to header,
// so slice + row counts them.
DEVICE void weigh(const Params& p, const Work& w, u32 sm, int tid, int item) {
  constexpr int N = 32 * PRODUCERS;
  const int rows = p.tokens * p.heads, warp = tid >> 5, lane = tid & 31, mine = item - w.first;
  for (int i = tid; i < w.count; i += N) {
    const Slice s = slice_of(rows, w.count, i);
    if (s.begin < s.end)
      for (int row = s.row0; row <= s.row1; row++)
        word_put(p.headers + (i64)item * p.header_width + i + row, bits_of(row_lse(sm, row)));
  }
  const Slice s = slice_of(rows, w.count, mine);
  if (s.begin >= s.end) return;
  const u32 weights = sm + AT_WEIGHTS;
  const int touched = s.row1 - s.row0 + 1;
  for (int i = tid; i < touched * w.count; i += N) {
    const int row = i / w.count, block = i - row * w.count;
    u32* a = p.headers + (i64)(w.first + block) * p.header_width + mine + s.row0 + row;
    u32 x = word_get(a);
    for (int n = 0; x == EMPTY; n++) {
      if (n == PATIENCE) give_up();
      x = word_get(a);
    }
    word_put(a, EMPTY);
    shared_put_u32(weights + i * 4, x);
  }
  producers_sync();
  for (int row = warp; row < touched; row += PRODUCERS) {
    const u32 at = weights + row * w.count * 4;
    float top = -1e30f, sum = 0.f;
    for (int i = lane; i < w.count; i += 32) top = fmaxf(top, shared_f32(at + i * 4));
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    for (int i = lane; i < w.count; i += 32) {
      const float e = exp2_of(shared_f32(at + i * 4) - top);
      shared_put_f32(at + i * 4, e);
      sum += e;
    }
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) sum += __shfl_xor_sync(~0u, sum, d);
    const float factor = sum > 0.f ? p.value_scale / sum : 0.f;
    for (int i = lane; i < w.count; i += 32) shared_put_f32(at + i * 4, shared_f32(at + i * 4) * factor);
    // The slice that holds a row's first packet reports its LSE.
    if ((p.flags & HAS_LSE) && lane == 0 && (s.row0 + row) * PACKETS >= s.begin)
      p.lse[(i64)w.request * rows + s.row0 + row] = (sum > 0.f ? top + log2_of(sum) : -__int_as_float(0x7f800000)) * LN2;
  }
  weights_ready();
}

DEVICE void add_packet(float (&sum)[8], uint4 x, float weight) {
  const u32 v[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    sum[2 * i] += weight * unpack(v[i], 0);
    sum[2 * i + 1] += weight * unpack(v[i], 1);
  }
}

// This block's slice of the outputs from the packets of all blocks of its request.
DEVICE void merge(const Params& p, const Work& w, u32 sm, int tid, int item) {
  constexpr int N = 32 * CONSUMERS, BATCH = 8;
  const int rows = p.tokens * p.heads, mine = item - w.first;
  const Slice s = slice_of(rows, w.count, mine);
  if (s.begin >= s.end) return;
  // `groups` threads share a packet; thread (group, k) adds blocks group, group + groups, ... of packet k.
  const int width = s.width < N ? s.width : N, groups = N / width;
  const int group = tid / width, k = tid - group * width;
  const u32 weights = sm + AT_WEIGHTS, sums = sm + AT_SUMS;
  u16* out = p.out + (i64)w.request * rows * VALUE;
  for (int base = s.begin; base < s.end; base += width) {
    const int packet = base + k;
    const bool active = group < groups && packet < s.end;
    u32* from = p.packets + ((i64)w.first * rows * PACKETS + packet) * 4;
    const i64 step = (i64)rows * PACKETS * 4;
    float sum[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
    const u32 at = weights + (packet / PACKETS - s.row0) * w.count * 4;
    uint4 x[BATCH];
    for (int b0 = group; b0 - group < w.count; b0 += BATCH * groups) {
      // All loads of a batch go out before the first is looked at.
#pragma unroll
      for (int i = 0; i < BATCH; i++)
        if (active && b0 + i * groups < w.count) x[i] = packet_get(from + (b0 + i * groups) * step);
      if (active) {
        // Missing ones are asked for together: a poll costs a trip to the cache and back.
        bool missing = true;
        for (int n = 0; missing; n++) {
          missing = false;
#pragma unroll
          for (int i = 0; i < BATCH; i++)
            if (b0 + i * groups < w.count && incomplete(x[i])) {
              x[i] = packet_get(from + (b0 + i * groups) * step);
              missing = true;
            }
          if (n == PATIENCE) give_up();
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++)
          if (b0 + i * groups < w.count) packet_put(from + (b0 + i * groups) * step, uint4{EMPTY, EMPTY, EMPTY, EMPTY});
      }
      if (base == s.begin && b0 == group) {
        await_weights();
        STAMP(OTHERS_THERE);
      }
#pragma unroll
      for (int i = 0; i < BATCH; i++)
        if (active && b0 + i * groups < w.count) add_packet(sum, x[i], shared_f32(at + (b0 + i * groups) * 4));
    }
    if (groups > 1) {
      if (active) {
        shared_put_f32x4(sums + tid * 32, sum[0], sum[1], sum[2], sum[3]);
        shared_put_f32x4(sums + tid * 32 + 16, sum[4], sum[5], sum[6], sum[7]);
      }
      consumers_sync();
      // A thread a packet half, groups in order.
      if (tid < 2 * (s.end - s.begin)) {
        const int q = tid >> 1, half = tid & 1;
        float4 total = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 4
        for (int g = 0; g < groups; g++) {
          const float4 f = shared_f32x4(sums + (g * width + q) * 32 + half * 16);
          total.x += f.x;
          total.y += f.y;
          total.z += f.z;
          total.w += f.w;
        }
        *(uint2*)(out + (s.begin + q) * 8 + half * 4) = uint2{pack_output(total.x, total.y), pack_output(total.z, total.w)};
      }
    } else if (active) {
      *(uint4*)(out + packet * 8) = uint4{pack_output(sum[0], sum[1]), pack_output(sum[2], sum[3]), pack_output(sum[4], sum[5]),
                                          pack_output(sum[6], sum[7])};
    }
  }
}
