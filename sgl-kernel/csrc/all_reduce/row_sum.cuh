// Sum over a row that one CTA or a cluster of CTAs holds, in an order that depends on neither rank nor timing.
#pragma once
#include <stdint.h>

#include "vector.cuh"

namespace one_shot {

// Every warp sends its partial sum to each CTA of the cluster (distributed shared memory, `st.async`); the bytes
// arrive on an mbarrier there. A cluster barrier would do too, but its release waits for all earlier stores of the
// CTA, those to the peers among them.
struct RowSum {
  struct Shared {
    float partial[2][32];  // used in turns: a warp sends for turn t + 2 only after every warp has read turn t
    uint64_t arrived[2];   // mbarriers
  };
  Shared& shared;
  int cluster_size;  // a power of two

  static __device__ __forceinline__ uint32_t address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
  }

  // Ready to be sent to. Ends in `started`, so that the wait for the slowest CTA overlaps what is in between.
  __device__ __forceinline__ void start() const {
    if (cluster_size == 1) return;
    if (threadIdx.x == 0) {
      for (int k = 0; k < 2; ++k) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(&shared.arrived[k])) : "memory");
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
  }
  __device__ __forceinline__ void started() const {
    if (cluster_size > 1) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
  }

  __device__ __forceinline__ float of(float value, int turn) const {
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int half = turn & 1;
    value = warp_sum(value);
    const int mine = static_cast<int>(blockIdx.x & (cluster_size - 1)) * warps + warp;
    if (cluster_size == 1) {
      if (lane == 0) shared.partial[half][mine] = value;
      __syncthreads();
    } else {
      const uint32_t barrier = address(&shared.arrived[half]);
      if (threadIdx.x == 0) {
        const uint32_t bytes = 4 * warps * cluster_size;
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
      }
      if (lane < cluster_size) {
        uint32_t there, barrier_there;
        asm("mapa.shared::cluster.u32 %0, %1, %2;"
            : "=r"(there)
            : "r"(address(&shared.partial[half][mine])), "r"(lane));
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier_there) : "r"(barrier), "r"(lane));
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(there),
                     "r"(__float_as_uint(value)), "r"(barrier_there)
                     : "memory");
      }
      for (uint32_t done = 0; done == 0;) {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n"
            "}\n"
            : "=r"(done)
            : "r"(barrier), "r"(static_cast<uint32_t>(turn >> 1 & 1))
            : "memory");
      }
    }
    return warp_sum(lane < warps * cluster_size ? shared.partial[half][lane] : 0.0f);
  }
};

}  // namespace one_shot
