// CTAs, threads and turns of a call: the same on every rank for the same call, since channels meet by index.
#pragma once
#include "call.h"

namespace one_shot {

struct Geometry {
  int blocks, threads, cluster, turns;
};

constexpr int kPlainThreads = 256;
// A cluster of more CTAs needs a launch attribute that not every device grants.
constexpr int kMaxCluster = 8;
// What a call in packets pushes to all peers together, in bytes of the tensor: beyond it the doubled bytes cost more
// than the fence that they save, and the slots would be most of a workspace.
constexpr int64_t kPacketBytes = 1 << 20;

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

inline Geometry plain_geometry(int rows, int units, int max_blocks) {
  const int total = rows * units;
  const int blocks = total < max_blocks * kPlainThreads ? ceil_div(total, kPlainThreads) : max_blocks;
  return {blocks, kPlainThreads, 1, ceil_div(total, blocks * kPlainThreads)};
}

inline Geometry fused_shape(int rows, int units, int max_blocks, int cluster) {
  while (cluster > 1 && (cluster > max_blocks || units <= 32 * (cluster / 2))) cluster /= 2;
  const int most = max_blocks / cluster;
  const int clusters = rows < most ? rows : most;
  return {clusters * cluster, 32 * ceil_div(units, 32 * cluster), cluster, ceil_div(rows, clusters)};
}

// Few rows: four CTAs a row, for more stores in flight; many rows: two.
inline Geometry fused_geometry(int rows, int units, int max_blocks) {
  return fused_shape(rows, units, max_blocks, rows <= 8 ? 4 : 2);
}

// Most threads of a CTA: as many as leave registers for a poll of every peer at once.
constexpr int packet_threads(int ranks) { return ranks == 2 ? 896 : ranks <= 4 ? 512 : 256; }

inline bool fits_packets(int rows, int units, int ranks) {
  return static_cast<int64_t>(rows) * units * kUnitBytes * (ranks - 1) <= kPacketBytes;
}

// Whether the last CTA of a row would have no unit: warps come whole, so 28 of them fill 7 CTAs of 8.
inline bool leaves_idle(int units, int cluster) { return (cluster - 1) * 32 * ceil_div(units, 32 * cluster) >= units; }

// `shape`: CTAs a row, 0 for the default. One where a row fits one CTA and there are many rows. Halved while a CTA would
// be left without a unit: it would exchange nothing with its peers, and be only one more that has to be resident.
inline Geometry packet_fused_geometry(int rows, int units, int max_blocks, int ranks, int shape) {
  int cluster = shape != 0 ? shape : rows <= 8 ? 4 : rows * 2 <= max_blocks || ranks > 2 ? 2 : 1;
  while (32 * ceil_div(units, 32 * cluster) > packet_threads(ranks)) cluster *= 2;
  while (cluster > 1 && leaves_idle(units, cluster)) cluster /= 2;
  return fused_shape(rows, units, max_blocks, cluster);
}

// `shape`: threads a CTA, 0 for the default: small ones, so that the stores of few rows leave from many
// multiprocessors.
inline Geometry packet_plain_geometry(int rows, int units, int max_blocks, int ranks, int shape) {
  const int total = rows * units, most = ranks <= 4 ? 512 : 256;
  int threads = shape != 0 ? shape : 128;
  while (threads < most && total > max_blocks * threads) threads *= 2;
  const int needed = ceil_div(total, threads);
  const int blocks = needed < max_blocks ? needed : max_blocks;
  return {blocks, threads, 1, ceil_div(total, blocks * threads)};
}

inline Geometry packet_geometry(int rows, int units, int max_blocks, int ranks, bool fused, int shape) {
  return fused ? packet_fused_geometry(rows, units, max_blocks, ranks, shape)
               : packet_plain_geometry(rows, units, max_blocks, ranks, shape);
}

// Shapes that a caller may ask for; powers of two.
inline bool packet_shape(int shape, int ranks, bool fused) {
  const int least = fused ? 1 : 32, most = fused ? kMaxCluster : ranks <= 4 ? 512 : 256;
  return shape == 0 || (shape >= least && shape <= most && (shape & (shape - 1)) == 0);
}

}  // namespace one_shot
