// Loads, stores and waits of the protocol (protocol.py), with the orderings that PTX gives them.
//
// push:    plain 16-byte stores. What makes them visible is the flag.
// publish: bar.sync, then st.release.sys by one thread a peer. The barrier puts every store (and every read of an
//          earlier epoch) of the CTA before that thread's release; release is cumulative, so whoever acquires the
//          flag sees all of them.
// await:   ld.acquire.sys by one thread a peer, then bar.sync: every later read of the CTA comes after it.
#pragma once
#include <cuda_runtime.h>

#include "call.h"

namespace one_shot {

__device__ __forceinline__ uint4 load_unit(const uint4* at) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_unit(uint4* at, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ void store_release(uint32_t* at, uint32_t v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* at) {
  uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}

__device__ __forceinline__ uint32_t load_relaxed(const uint32_t* at) {
  uint32_t v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}

__device__ __forceinline__ void store_relaxed(uint32_t* at, uint32_t v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}

__device__ __forceinline__ uint64_t now_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// Both are no-ops in a grid that was launched without the attribute.
__device__ __forceinline__ void wait_for_previous_grid() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void let_next_grid_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ void sleep_ns(uint64_t ns) {
  for (const uint64_t start = now_ns(); now_ns() - start < ns;) {
  }
}

struct Workspace {
  const Call& call;

  __device__ __forceinline__ uint32_t* word(int rank, int64_t section, int64_t index) const {
    return reinterpret_cast<uint32_t*>(call.base[rank] + section) + index;
  }
  __device__ __forceinline__ uint32_t* flag(int owner, int channel, int stage, int source) const {
    return word(owner, call.layout.flags, (channel * 2 + stage) * kMaxRanks + source);
  }
  __device__ __forceinline__ uint32_t* epoch(int channel) const {
    return word(call.rank, call.layout.epochs, channel);
  }
  __device__ __forceinline__ uint32_t* poison() const { return word(call.rank, call.layout.poison, 0); }
  __device__ __forceinline__ uint4* slot(int owner, int channel, uint32_t buffer, int source) const {
    const int64_t cell = (static_cast<int64_t>(channel) * 2 + buffer) * call.ranks + source;
    return reinterpret_cast<uint4*>(call.base[owner] + call.layout.slots) + cell * call.layout.capacity;
  }
  __device__ __forceinline__ bool takes_part(int rank) const {
    return rank < call.ranks && (call.members >> rank & 1u);
  }
};

// The first wait that fails on a workspace writes the record; `code` goes last, so the host reads a whole one.
__device__ __noinline__ void report(uint32_t* poison, Control* c, uint32_t code, int peer, int channel, int stage,
                                    uint32_t epoch, uint32_t seen) {
  if (atomicCAS(poison, 0u, code) != 0u) return;
  store_relaxed(&c->peer, peer);
  store_relaxed(&c->channel, channel);
  store_relaxed(&c->stage, stage);
  store_relaxed(&c->epoch, epoch);
  store_relaxed(&c->seen, seen);
  store_release(&c->code, code);
}

// One thread waits for one peer. The clock and the abort word are looked at every 256 polls only.
__device__ __forceinline__ bool wait_for(const Workspace& ws, int peer, int channel, int stage, uint32_t epoch) {
  const uint32_t* flag = ws.flag(ws.call.rank, channel, stage, peer);
  uint64_t start = 0;
  for (uint32_t polls = 1;; ++polls) {
    const uint32_t seen = load_acquire(flag);
    // A peer may be one epoch ahead; counters wrap.
    if (static_cast<int32_t>(seen - epoch) >= 0) return true;
    if ((polls & 255u) == 0u) {
      const uint64_t now = now_ns();
      if (start == 0) start = now;
      Control* c = reinterpret_cast<Control*>(ws.call.control);
      const bool aborted = load_relaxed(&c->abort) != 0u;
      if (aborted || (ws.call.limit_ns != 0 && now - start > ws.call.limit_ns)) {
        report(ws.poison(), c, aborted ? 2u : 1u, peer, channel, stage, epoch, seen);
        return false;
      }
    }
  }
}

// Whole CTA: everything that it pushed and read so far comes before the flags that it sets here.
__device__ __forceinline__ void publish(const Workspace& ws, int channel, int stage, uint32_t epoch) {
  __syncthreads();
  const int peer = threadIdx.x;
  if (peer != ws.call.rank && ws.takes_part(peer)) {
    store_release(ws.flag(peer, channel, stage, ws.call.rank), epoch);
  }
}

// Whole CTA: false if a wait ran out.
__device__ __forceinline__ bool await(const Workspace& ws, int channel, int stage, uint32_t epoch) {
  const int peer = threadIdx.x;
  bool failed = false;
  if (peer != ws.call.rank && ws.takes_part(peer)) failed = !wait_for(ws, peer, channel, stage, epoch);
  return !__syncthreads_or(failed);
}

}  // namespace one_shot
