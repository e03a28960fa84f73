// Launches; plain C entry points.
#include <cuda_runtime.h>

#include "geometry.h"
#include "kernel.cuh"
#include "packet_kernel.cuh"

namespace one_shot {
namespace {

template <typename Kernel, typename... Arguments>
cudaError_t start(Kernel kernel, const Call& call, const Geometry& g, cudaStream_t stream, const Arguments&... rest) {
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
  return cudaLaunchKernelEx(&config, kernel, rest...);
}

template <int RANKS>
PacketCall<RANKS> packet_call(const Call& c, const Geometry& g) {
  PacketCall<RANKS> p = {};
  p.source_stride = 2 * c.layout.packet_capacity;
  const auto slot = [&](int owner, int source) {
    const int64_t cell = static_cast<int64_t>(c.first_channel) * 2 * c.ranks + source;
    return reinterpret_cast<Packet*>(c.base[owner] + c.layout.packets) + cell * p.source_stride;
  };
  p.x = reinterpret_cast<const uint4*>(c.x);
  p.epoch = reinterpret_cast<uint64_t*>(c.base[c.rank] + c.layout.epochs) + c.first_channel;
  p.poison = reinterpret_cast<uint32_t*>(c.base[c.rank] + c.layout.poison);
  p.from = slot(c.rank, RANKS == 2 ? 1 - c.rank : 0);
  for (int k = 1; k < c.ranks; ++k) p.to[k - 1] = slot((c.rank + k) % c.ranks, c.rank);
  p.units = c.hidden / kUnitElements, p.rows = c.rows, p.turns = g.turns;
  while (1 << p.log_cluster < g.cluster) ++p.log_cluster;
  p.rank = c.rank, p.ranks = c.ranks;
  p.residual = reinterpret_cast<const uint4*>(c.residual);
  p.weight = reinterpret_cast<const uint4*>(c.weight);
  p.out = reinterpret_cast<uint4*>(c.out);
  p.residual_out = reinterpret_cast<uint4*>(c.residual_out);
  p.control = reinterpret_cast<Control*>(c.control);
  p.limit_ns = c.limit_ns;
  p.inverse_hidden = 1.0f / static_cast<float>(c.hidden), p.eps = c.eps;
  p.first_channel = c.first_channel;
  p.weaken = c.weaken, p.delay_ns = c.delay_ns;
  return p;
}

template <typename T, bool FUSED>
cudaError_t launch_packets(const Call& c, const Geometry& g, cudaStream_t stream) {
  if (c.ranks == 2) return start(packet_kernel<T, FUSED, 2>, c, g, stream, packet_call<2>(c, g));
  if (c.ranks <= 4) return start(packet_kernel<T, FUSED, 4>, c, g, stream, packet_call<4>(c, g));
  return start(packet_kernel<T, FUSED, 8>, c, g, stream, packet_call<8>(c, g));
}

template <typename T, bool FUSED>
cudaError_t launch(const Call& c, const Geometry& g, cudaStream_t stream) {
  if (c.variant == kPackets) return launch_packets<T, FUSED>(c, g, stream);
  if (c.variant == kTwoStage) return start(all_reduce_kernel<T, FUSED, true>, c, g, stream, c, g.cluster);
  return start(all_reduce_kernel<T, FUSED, false>, c, g, stream, c, g.cluster);
}

template <typename T>
cudaError_t dispatch(const Call& c, const Geometry& g, cudaStream_t stream) {
  return c.fused ? launch<T, true>(c, g, stream) : launch<T, false>(c, g, stream);
}

// False if the call is outside the limits or does not fit its workspace.
bool geometry(const Call& c, Geometry* g) {
  const bool limits = c.ranks >= 2 && c.ranks <= kMaxRanks && c.rank >= 0 && c.rank < c.ranks && c.rows >= 1 &&
                      c.max_blocks >= 1 && c.hidden >= kUnitElements && c.hidden <= 8192 &&
                      c.hidden % kUnitElements == 0 && c.variant >= kOneShot && c.variant <= kPackets &&
                      c.first_channel >= 0;
  if (!limits) return false;
  const uint32_t everyone = (1u << c.ranks) - 1u;
  const bool members = (c.members & ~everyone) == 0 && (c.members >> c.rank & 1u) &&
                       (c.variant == kOneShot || c.members == everyone);
  const int units = c.hidden / kUnitElements;
  if (c.variant == kPackets) {
    if (!fits_packets(c.rows, units, c.ranks) || !packet_shape(c.shape, c.ranks, c.fused != 0)) return false;
    *g = packet_geometry(c.rows, units, c.max_blocks, c.ranks, c.fused != 0, c.shape);
    return members && g->threads <= packet_threads(c.ranks) && c.first_channel + g->blocks <= c.layout.channels &&
           g->turns * g->threads <= c.layout.packet_capacity;
  }
  *g = c.fused ? fused_geometry(c.rows, units, c.max_blocks) : plain_geometry(c.rows, units, c.max_blocks);
  return members && c.shape == 0 && g->threads <= kMaxThreads && c.first_channel + g->blocks <= c.layout.channels &&
         g->turns * g->threads <= c.layout.capacity;
}

// Units of a slot of packets for calls of `units` a row in every shape that may be asked for.
int packet_capacity(int rows, int units, int max_blocks, int ranks) {
  int most = 0;
  if (!fits_packets(rows, units, ranks)) return most;
  for (const bool fused : {false, true}) {
    for (int shape = 0; shape <= packet_threads(ranks); shape = shape == 0 ? 1 : 2 * shape) {
      if (!packet_shape(shape, ranks, fused)) continue;
      const Geometry g = packet_geometry(rows, units, max_blocks, ranks, fused, shape);
      if (g.turns * g.threads > most) most = g.turns * g.threads;
    }
  }
  return most;
}

template <typename T>
cudaError_t load_kernels() {
  const void* kernels[] = {
      reinterpret_cast<const void*>(all_reduce_kernel<T, false, false>),
      reinterpret_cast<const void*>(all_reduce_kernel<T, false, true>),
      reinterpret_cast<const void*>(all_reduce_kernel<T, true, false>),
      reinterpret_cast<const void*>(all_reduce_kernel<T, true, true>),
      reinterpret_cast<const void*>(packet_kernel<T, false, 2>),
      reinterpret_cast<const void*>(packet_kernel<T, false, 4>),
      reinterpret_cast<const void*>(packet_kernel<T, false, 8>),
      reinterpret_cast<const void*>(packet_kernel<T, true, 2>),
      reinterpret_cast<const void*>(packet_kernel<T, true, 4>),
      reinterpret_cast<const void*>(packet_kernel<T, true, 8>),
  };
  cudaError_t error = cudaSuccess;
  cudaFuncAttributes attributes;
  for (const void* kernel : kernels) {
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kernel);
  }
  return error;
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
  int capacity = 0, in_packets = 0;
  for (int r = 1; r <= rows; ++r) {
    // A smaller hidden size may take fewer CTAs a row and then more threads in each.
    for (int u = 1; u <= units; ++u) {
      const Geometry shapes[] = {plain_geometry(r, u, max_blocks), fused_geometry(r, u, max_blocks),
                                 plain_geometry(r, u, pairs ? 1 : max_blocks)};
      for (const Geometry& g : shapes) capacity = g.turns * g.threads > capacity ? g.turns * g.threads : capacity;
      const int needed = packet_capacity(r, u, max_blocks, ranks);
      in_packets = needed > in_packets ? needed : in_packets;
    }
  }
  auto aligned = [](int64_t bytes) { return (bytes + 255) / 256 * 256; };
  out->capacity = (capacity + 1) / 2 * 2;
  out->packet_capacity = in_packets;
  out->channels = max_blocks + (pairs ? ranks * (ranks - 1) / 2 : 0);
  out->unused = 0;
  out->flags = 0;
  out->epochs = aligned(static_cast<int64_t>(out->channels) * 2 * kMaxRanks * sizeof(uint64_t));
  out->poison = out->epochs + aligned(static_cast<int64_t>(out->channels) * sizeof(uint64_t));
  out->slots = out->poison + 256;
  out->packets = aligned(out->slots + static_cast<int64_t>(out->channels) * 2 * ranks * out->capacity * kUnitBytes);
  out->bytes = aligned(out->packets + static_cast<int64_t>(out->channels) * 2 * ranks * 2 * in_packets * sizeof(Packet));
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
  if (error == cudaSuccess) error = load_kernels<__nv_bfloat16>();
  if (error == cudaSuccess) error = load_kernels<__half>();
  if (error != cudaSuccess) (void)cudaGetLastError();
  return error;
}

const char* one_shot_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

}  // extern "C"
