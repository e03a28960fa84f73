// From the blocks of a request to its outputs. Part of warpgroup.cu.
#pragma once

struct Share {
  int first, count;
};

// The blocks that request b has, by the arithmetic of `find_work`. The whole warp calls it.
DEVICE Share find_share(const Params& p, int b, int lane) {
  const int total = p.batch == 1 ? request_length(p, 0) : total_keys(p, lane);
  const int chunk = most_keys(p, total);
  int before = 0;
  if (p.batch > 1) {
    for (int i = lane; i < b; i += 32) before += blocks_for(request_length(p, i), chunk);
    for (int d = 16; d; d >>= 1) before += __shfl_xor_sync(~0u, before, d);
  }
  const int length = p.batch == 1 ? total : request_length(p, b);
  Share s = {before, blocks_for(length, chunk)};
  if (s.count > 1) s.count = blocks_for(length, blocks_for(length, s.count));
  return s;
}

// Shared memory of the merge: what a thread has of its packet; of a pair of rows, a group's maxima and sums of weights.
constexpr int SPREAD = 40;  // bytes from packet to packet: 32 and some, for the banks; more has no room beside a block of the split
constexpr int AT_SUMS = 0, AT_MAXIMA = MERGE_THREADS * SPREAD;
constexpr int MERGE_BYTES = AT_MAXIMA + MERGE_THREADS / 8 * 16;

// Half a warp's packets of a split, of all blocks of request b: four rows, 16 dims side by side of two dim blocks. So outputs are
// whole sectors; a part of one would have to be read from memory first. FOLD of them where a request has few blocks, with
// GROUPS / FOLD threads a packet. Every thread has all its loads under way at once for up to MOST blocks.
template <int FOLD, int MOST>
DEVICE void merge(const Params& p, const Share& s, u32 sm, int tid, int b, int block) {
  const int mine = block + tid / PACKETS % FOLD;
  constexpr int SIZE = PACKETS * FOLD, COUNT = GROUPS / FOLD;
  constexpr int BATCH = (MOST + COUNT - 1) / COUNT;
  const int rows = p.tokens * p.heads;
  const int group = tid / SIZE, slot = tid % PACKETS, half = mine & 1, j = mine / 32;
  const int column = 2 * half + (slot & 1), packet = mine / 2 * 32 + (slot >> 1) * 4 + column;
  const u32* from = p.packets + ((i64)(s.first + group) * SPLIT_PACKETS + packet) * 4;
  const float* lse = (const float*)p.headers + (i64)(s.first + group) * ROWS8 + 8 * j + 2 * column;
  float sum[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f}, m[2] = {-1e30f, -1e30f}, n[2] = {0.f, 0.f};
  for (int at = group; at - group < s.count; at += COUNT * BATCH) {
    uint4 x[BATCH];
    float2 w[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; i++)
      w[i] = at + i * COUNT < s.count ? global_f32x2(lse + (i64)(at - group + i * COUNT) * ROWS8) : float2{-1e38f, -1e38f};
#pragma unroll
    for (int i = 0; i < BATCH; i++)
      x[i] = at + i * COUNT < s.count ? global_u32x4(from + (i64)(at - group + i * COUNT) * SPLIT_PACKETS * 4) : uint4{0, 0, 0, 0};
    float m0 = m[0], m1 = m[1];
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      m0 = fmaxf(m0, w[i].x);
      m1 = fmaxf(m1, w[i].y);
    }
    const float f[2] = {exp2_of(m[0] - m0), exp2_of(m[1] - m1)};
    m[0] = m0;
    m[1] = m1;
    n[0] *= f[0];
    n[1] *= f[1];
#pragma unroll
    for (int i = 0; i < 8; i++) sum[i] *= f[i & 1];
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      w[i] = float2{exp2_of(w[i].x - m0), exp2_of(w[i].y - m1)};
      n[0] += w[i].x;
      n[1] += w[i].y;
    }
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const u32 v[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
      for (int k = 0; k < 4; k++) {
        sum[2 * k] += w[i].x * unpack(v[k], 0);
        sum[2 * k + 1] += w[i].y * unpack(v[k], 1);
      }
    }
  }
  STAMP(INPUTS_THERE);
  const u32 to = sm + AT_SUMS + tid * SPREAD;
#pragma unroll
  for (int i = 0; i < 8; i += 2) shared_put_f32x2(to + i * 4, sum[i], sum[i + 1]);
  if (slot < 2) shared_put_f32x4(sm + AT_MAXIMA + (tid / PACKETS * 2 + slot) * 16, m[0], n[0], m[1], n[1]);
  __syncthreads();
  // A thread a value, groups in order.
#pragma unroll
  for (int i = tid; i < SIZE * 8; i += MERGE_THREADS) {
    const int dim16 = i % 16, row4 = i / 16 % 4, side = i / 64 % 2, part = i / 128;
    const u32 sums = sm + AT_SUMS + (part * PACKETS + dim16 % 8 * 2 + row4 / 2) * SPREAD + (side * 4 + dim16 / 8 * 2 + row4 % 2) * 4;
    const u32 maxima = sm + AT_MAXIMA + part * 32 + row4 * 8;
    float2 of[COUNT];
    float top = -1e30f, norm = 0.f, total = 0.f;
#pragma unroll
    for (int g = 0; g < COUNT; g++) {
      of[g] = shared_f32x2(maxima + g * FOLD * 32);
      top = fmaxf(top, of[g].x);
    }
#pragma unroll
    for (int g = 0; g < COUNT; g++) {
      const float f = exp2_of(of[g].x - top);
      norm += f * of[g].y;
      total += f * shared_f32(sums + g * SIZE * SPREAD);
    }
    const int at = block + part;
    const int row = at / 32 * 8 + 4 * (at & 1) + row4, dim = (2 * (at / 8 % 4) + side) * BLOCK + at / 2 % 4 * 16 + dim16;
    if (row < rows) {
      p.out[((i64)b * rows + row) * VALUE + dim] = to_output(norm > 0.f ? total * (p.value_scale * inverse(norm)) : 0.f);
      // Dim 0 stands for its row.
      if ((p.flags & HAS_LSE) && dim == 0) p.lse[(i64)b * rows + row] = (norm > 0.f ? top + log2_of(norm) : -__int_as_float(0x7f800000)) * LN2;
    }
  }
}

// All that request b needs, between the blocks of its row of the grid: one each, or several where the grid has fewer.
template <int FOLD, int MOST>
DEVICE void merge_all(const Params& p, const Share& s, u32 sm, int tid, int b) {
  for (int block = block_id() * FOLD; block < MERGE_BLOCKS; block += block_columns() * FOLD) {
    if (block >= (int)block_columns() * FOLD) __syncthreads();  // the last one's sums are read
    merge<FOLD, MOST>(p, s, sm, tid, b, block);
  }
}
