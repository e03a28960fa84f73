// Geometry and launches; plain C entry points.
#include <cuda_runtime.h>

#include "kernel.cuh"

namespace one_shot {
namespace {

constexpr int kPlainThreads = 256;

struct Geometry {
  int blocks, threads, cluster, turns;
};

int ceil_div(int a, int b) { return (a + b - 1) / b; }

// The same on every rank for the same call: channels meet by index.
Geometry plain_geometry(int rows, int units, int max_blocks) {
  const int total = rows * units;
  const int blocks = total < max_blocks * kPlainThreads ? ceil_div(total, kPlainThreads) : max_blocks;
  return {blocks, kPlainThreads, 1, ceil_div(total, blocks * kPlainThreads)};
}

// Few rows: four CTAs a row, for more stores in flight; many rows: two.
Geometry fused_geometry(int rows, int units, int max_blocks) {
  int cluster = rows <= 8 ? 4 : 2;
  while (cluster > 1 && (cluster > max_blocks || units <= 32 * (cluster / 2))) cluster /= 2;
  const int most = max_blocks / cluster;
  const int clusters = rows < most ? rows : most;
  return {clusters * cluster, 32 * ceil_div(units, 32 * cluster), cluster, ceil_div(rows, clusters)};
}

template <typename T, bool FUSED, bool TWO_STAGE>
cudaError_t launch(const Call& call, const Geometry& g, cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(g.blocks);
  config.blockDim = dim3(g.threads);
  config.stream = stream;
  cudaLaunchAttribute attributes[2];
  int count = 0;
  if (g.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = g.cluster;
    attributes[count].val.clusterDim.y = 1;
    attributes[count].val.clusterDim.z = 1;
    ++count;
  }
  if (call.dependent_launch) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count].val.programmaticStreamSerializationAllowed = 1;
    ++count;
  }
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, all_reduce_kernel<T, FUSED, TWO_STAGE>, call, g.cluster);
}

template <typename T>
cudaError_t dispatch(const Call& call, const Geometry& g, cudaStream_t stream) {
  if (call.fused) {
    return call.two_stage ? launch<T, true, true>(call, g, stream) : launch<T, true, false>(call, g, stream);
  }
  return call.two_stage ? launch<T, false, true>(call, g, stream) : launch<T, false, false>(call, g, stream);
}

// False if the call is outside the limits or does not fit its workspace.
bool geometry(const Call& c, Geometry* g) {
  const bool limits = c.ranks >= 2 && c.ranks <= kMaxRanks && c.rank >= 0 && c.rank < c.ranks && c.rows >= 1 &&
                      c.max_blocks >= 1 && c.hidden >= kUnitElements && c.hidden <= 8192 &&
                      c.hidden % kUnitElements == 0;
  if (!limits) return false;
  const uint32_t everyone = (1u << c.ranks) - 1u;
  const bool members = (c.members & ~everyone) == 0 && (c.members >> c.rank & 1u) &&
                       (!c.two_stage || c.members == everyone);
  const int units = c.hidden / kUnitElements;
  *g = c.fused ? fused_geometry(c.rows, units, c.max_blocks) : plain_geometry(c.rows, units, c.max_blocks);
  return members && g->threads <= kMaxThreads && c.first_channel >= 0 &&
         c.first_channel + g->blocks <= c.layout.channels && g->turns * g->threads <= c.layout.capacity;
}

}  // namespace
}  // namespace one_shot

using namespace one_shot;

extern "C" {

int one_shot_abi() { return kAbi; }

int one_shot_sizes(int32_t* call, int32_t* layout, int32_t* control) {
  *call = sizeof(Call), *layout = sizeof(Layout), *control = sizeof(Control);
  return 0;
}

// Room for up to `rows` x `hidden` on `max_blocks` channels, and, if `pairs`, for one-CTA calls between two ranks.
int one_shot_layout(int32_t rows, int32_t hidden, int32_t max_blocks, int32_t ranks, int32_t pairs, Layout* out) {
  if (rows < 1 || hidden < kUnitElements || hidden > 8192 || max_blocks < 1 || ranks < 2 || ranks > kMaxRanks) {
    return cudaErrorInvalidValue;
  }
  const int units = hidden / kUnitElements;
  int capacity = 0;
  for (int r = 1; r <= rows; ++r) {
    // A smaller hidden size may take fewer CTAs a row and then more threads in each.
    for (int u = 1; u <= units; ++u) {
      const Geometry shapes[] = {plain_geometry(r, u, max_blocks), fused_geometry(r, u, max_blocks),
                                 plain_geometry(r, u, pairs ? 1 : max_blocks)};
      for (const Geometry& g : shapes) capacity = g.turns * g.threads > capacity ? g.turns * g.threads : capacity;
    }
  }
  auto aligned = [](int64_t bytes) { return (bytes + 255) / 256 * 256; };
  out->capacity = (capacity + 1) / 2 * 2;
  out->channels = max_blocks + (pairs ? ranks * (ranks - 1) / 2 : 0);
  out->flags = 0;
  out->epochs = aligned(static_cast<int64_t>(out->channels) * 2 * kMaxRanks * sizeof(uint64_t));
  out->poison = out->epochs + aligned(static_cast<int64_t>(out->channels) * sizeof(uint64_t));
  out->slots = out->poison + 256;
  out->bytes = aligned(out->slots + static_cast<int64_t>(out->channels) * 2 * ranks * out->capacity * kUnitBytes);
  return cudaSuccess;
}

// CTAs, threads, CTAs a cluster, turns of a call; an error if it does not fit its workspace.
int one_shot_geometry(const Call* call, int32_t* out) {
  Geometry g;
  if (!geometry(*call, &g)) return cudaErrorInvalidValue;
  out[0] = g.blocks, out[1] = g.threads, out[2] = g.cluster, out[3] = g.turns;
  return cudaSuccess;
}

int one_shot_launch(const Call* call, void* stream) {
  Geometry g;
  if (!geometry(*call, &g)) return cudaErrorInvalidValue;
  const auto s = static_cast<cudaStream_t>(stream);
  return call->dtype == kBfloat16 ? dispatch<__nv_bfloat16>(*call, g, s) : dispatch<__half>(*call, g, s);
}

// Loads every kernel of the library now. A lazy load in the middle of a wait could wait for that wait.
int one_shot_load(int device) {
  cudaError_t error = cudaSetDevice(device);
  cudaFuncAttributes attributes;
  const void* kernels[] = {
      reinterpret_cast<const void*>(all_reduce_kernel<__nv_bfloat16, false, false>),
      reinterpret_cast<const void*>(all_reduce_kernel<__nv_bfloat16, false, true>),
      reinterpret_cast<const void*>(all_reduce_kernel<__nv_bfloat16, true, false>),
      reinterpret_cast<const void*>(all_reduce_kernel<__nv_bfloat16, true, true>),
      reinterpret_cast<const void*>(all_reduce_kernel<__half, false, false>),
      reinterpret_cast<const void*>(all_reduce_kernel<__half, false, true>),
      reinterpret_cast<const void*>(all_reduce_kernel<__half, true, false>),
      reinterpret_cast<const void*>(all_reduce_kernel<__half, true, true>),
  };
  for (const void* kernel : kernels) {
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kernel);
  }
  if (error != cudaSuccess) (void)cudaGetLastError();
  return error;
}

const char* one_shot_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

}  // extern "C"
