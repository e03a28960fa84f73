// From the blocks of a request to its outputs. Part of warpgroup.cu.
#pragma once

struct Share {
  int first, count;
};

// The blocks that request b has, by the arithmetic of `find_work`. The whole warp calls it.
DEVICE Share find_share(const Params& p, int b, int lane) {
  int total = 0, before = 0;
  if (p.batch == 1) total = request_length(p, 0);
  else {
    for (int i = lane; i < p.batch; i += 32) total += request_length(p, i);
    for (int d = 16; d; d >>= 1) total += __shfl_xor_sync(~0u, total, d);
  }
  const int fair = (total + p.target - 1) / p.target;
  const int chunk = fair > p.min_keys ? fair : p.min_keys;
  if (p.batch > 1) {
    for (int i = lane; i < b; i += 32) before += (request_length(p, i) + chunk - 1) / chunk;
    for (int d = 16; d; d >>= 1) before += __shfl_xor_sync(~0u, before, d);
  }
  const int length = p.batch == 1 ? total : request_length(p, b);
  Share s = {before, (length + chunk - 1) / chunk};
  if (s.count > 1) {
    const int even = (length + s.count - 1) / s.count;
    s.count = (length + even - 1) / even;
  }
  return s;
}

// Shared memory of the merge: what a group of threads has of every packet; of a row its maximum and sum of weights.
constexpr int SPREAD = 48;  // bytes from packet to packet: 32 and some, for the banks
constexpr int AT_SUMS = 0, AT_MAXIMA = GROUPS * PACKETS * SPREAD;
constexpr int MERGE_BYTES = AT_MAXIMA + GROUPS * 32;

// Half a warp's packets of a split, of all blocks of request b: four rows, 16 dims side by side of two dim blocks. So outputs are
// whole sectors; a part of one would have to be read from memory first.
DEVICE void merge(const Params& p, const Share& s, u32 sm, int tid, int b, int mine) {
  constexpr int BATCH = (132 + GROUPS - 1) / GROUPS;  // of an H200's multiprocessors: all loads of a thread at once
  const int rows = p.tokens * p.heads;
  const int group = tid / PACKETS, slot = tid % PACKETS, half = mine & 1, at16 = mine / 2 % 4, pair = mine / 8 % 4, j = mine / 32;
  const int column = 2 * half + (slot & 1), packet = mine / 2 * 32 + (slot >> 1) * 4 + column;
  const u32* from = p.packets + ((i64)(s.first + group) * SPLIT_PACKETS + packet) * 4;
  const float* lse = (const float*)p.headers + (i64)(s.first + group) * ROWS8 + 8 * j + 2 * column;
  float sum[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f}, m[2] = {-1e30f, -1e30f}, n[2] = {0.f, 0.f};
  for (int at = group; at - group < s.count; at += GROUPS * BATCH) {
    uint4 x[BATCH];
    float2 w[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; i++)
      w[i] = at + i * GROUPS < s.count ? global_f32x2(lse + (i64)(at - group + i * GROUPS) * ROWS8) : float2{-1e38f, -1e38f};
#pragma unroll
    for (int i = 0; i < BATCH; i++)
      x[i] = at + i * GROUPS < s.count ? global_u32x4(from + (i64)(at - group + i * GROUPS) * SPLIT_PACKETS * 4) : uint4{0, 0, 0, 0};
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
  shared_put_f32x4(to, sum[0], sum[1], sum[2], sum[3]);
  shared_put_f32x4(to + 16, sum[4], sum[5], sum[6], sum[7]);
  if (slot < 2) shared_put_f32x4(sm + AT_MAXIMA + (group * 2 + slot) * 16, m[0], n[0], m[1], n[1]);
  __syncthreads();
  if (tid >= PACKETS * 8) return;
  // A thread a value, groups in order.
  const int dim16 = tid % 16, row4 = tid / 16 % 4, block = tid / 64;
  float2 of[GROUPS];
  float top = -1e30f, norm = 0.f, total = 0.f;
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    of[g] = shared_f32x2(sm + AT_MAXIMA + (g * 4 + row4) * 8);
    top = fmaxf(top, of[g].x);
  }
  const u32 at = sm + AT_SUMS + (dim16 % 8 * 2 + row4 / 2) * SPREAD + (block * 4 + dim16 / 8 * 2 + row4 % 2) * 4;
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    const float f = exp2_of(of[g].x - top);
    norm += f * of[g].y;
    total += f * shared_f32(at + g * PACKETS * SPREAD);
  }
  const int row = 8 * j + 4 * half + row4, dim = (2 * pair + block) * BLOCK + at16 * 16 + dim16;
  if (row < rows) {
    p.out[((i64)b * rows + row) * VALUE + dim] = to_output(norm > 0.f ? total * (p.value_scale * inverse(norm)) : 0.f);
    // Dim 0 stands for its row.
    if ((p.flags & HAS_LSE) && dim == 0) p.lse[(i64)b * rows + row] = (norm > 0.f ? top + log2_of(norm) : -__int_as_float(0x7f800000)) * LN2;
  }
}
