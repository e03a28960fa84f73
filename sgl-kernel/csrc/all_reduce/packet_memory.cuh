// Packets: data and the epoch that it belongs to in one store, so that nothing has to be ordered behind anything.
//
// A packet is one 16-byte word: 8 bytes of data and the 64-bit epoch of the call. It is written by `st.b128` and read
// by `ld.b128`, both strong at system scope. PTX takes such an access for one memory operation (it is what CUDA's own
// 16-byte atomics are made of), so whoever reads the epoch of this call has this call's data: no release, no fence, no
// flag behind the data, no barrier before the read. A vector of two 64-bit words would be the same machine
// instruction, but two operations by the model; its words would need an epoch each, of 32 bits, which wraps in a day.
//
// The epoch is asked for equality. It has 64 bits and starts at 1, so what a slot held before, whatever its age, is
// never taken for what is awaited.
#pragma once
#include "memory.cuh"

namespace one_shot {

struct alignas(16) Packet {
  uint64_t data, epoch;
};

__device__ __forceinline__ void store_packet(Packet* at, uint64_t data, uint64_t epoch) {
  asm volatile(
      "{\n"
      ".reg .b128 packet;\n"
      "mov.b128 packet, {%1, %2};\n"
      "st.relaxed.sys.global.b128 [%0], packet;\n"
      "}\n" ::"l"(at),
      "l"(data), "l"(epoch)
      : "memory");
}

__device__ __forceinline__ Packet load_packet(const Packet* at) {
  Packet p;
  asm volatile(
      "{\n"
      ".reg .b128 packet;\n"
      "ld.relaxed.sys.global.b128 packet, [%2];\n"
      "mov.b128 {%0, %1}, packet;\n"
      "}\n"
      : "=l"(p.data), "=l"(p.epoch)
      : "l"(at)
      : "memory");
  return p;
}

// Of what this rank's own kernels wrote.
__device__ __forceinline__ uint64_t load_own(const uint64_t* at) {
  uint64_t v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
  return v;
}

__device__ __forceinline__ uint32_t load_own(const uint32_t* at) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}

// A launch with every address worked out: what a kernel of 3 us computes of them is part of its time.
template <int RANKS>
struct PacketCall {
  const uint4* x;
  uint64_t* epoch;            // of the first channel
  uint32_t* poison;
  const Packet* from;         // here, of source 0 (two ranks: of the peer)
  Packet* to[RANKS - 1];      // at the successors of this rank, what comes from it
  int source_stride;          // packets: 2 capacity; [channels][2 buffers][ranks][2 capacity]
  int units, rows, turns;     // units of a row
  int log_cluster;            // CTAs a row, a power of two
  int rank, ranks;
  const uint4* residual;
  const uint4* weight;
  uint4* out;
  uint4* residual_out;
  Control* control;
  uint64_t limit_ns;          // 0: until aborted
  float inverse_hidden, eps;
  int first_channel;
  uint32_t weaken;            // of the race tests, as in Call
  uint64_t delay_ns;

  // From a pointer above to this thread's packet in buffer 0. The second half of its unit is one block of threads on,
  // so that a warp's packets are whole lines.
  __device__ __forceinline__ uint32_t here() const {
    return blockIdx.x * 2u * buffer_stride() + threadIdx.x;
  }
  __device__ __forceinline__ uint32_t buffer_stride() const { return static_cast<uint32_t>(ranks * source_stride); }
};

}  // namespace one_shot
