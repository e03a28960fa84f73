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

__device__ __forceinline__ void store_release(uint64_t* at, uint64_t v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(v) : "memory");
}

__device__ __forceinline__ void store_release(uint32_t* at, uint32_t v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}

__device__ __forceinline__ uint64_t load_acquire(const uint64_t* at) {
  uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
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

  template <typename Word>
  __device__ __forceinline__ Word* word(int rank, int64_t section, int64_t index) const {
    return reinterpret_cast<Word*>(call.base[rank] + section) + index;
  }
  __device__ __forceinline__ uint64_t* flag(int owner, int channel, int stage, int source) const {
    return word<uint64_t>(owner, call.layout.flags, (channel * 2 + stage) * kMaxRanks + source);
  }
  __device__ __forceinline__ uint64_t* epoch(int channel) const {
    return word<uint64_t>(call.rank, call.layout.epochs, channel);
  }
  __device__ __forceinline__ uint32_t* poison() const { return word<uint32_t>(call.rank, call.layout.poison, 0); }
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
__device__ __forceinline__ bool wait_for(const Workspace& ws, int peer, int channel, int stage, uint64_t epoch) {
  const uint64_t* flag = ws.flag(ws.call.rank, channel, stage, peer);
  uint64_t start = 0;
  for (uint32_t polls = 1;; ++polls) {
    const uint64_t seen = load_acquire(flag);
    // A peer may be one epoch ahead. 64 bits never wrap; 32 would: a second stage that is used once in days finds a
    // flag that is 2^31 epochs old, which a comparison of differences takes for one of the future.
    if (seen >= epoch) return true;
    if ((polls & 255u) == 0u) {
      const uint64_t now = now_ns();
      if (start == 0) start = now;
      Control* c = reinterpret_cast<Control*>(ws.call.control);
      const bool aborted = load_relaxed(&c->abort) != 0u;
      if (aborted || (ws.call.limit_ns != 0 && now - start > ws.call.limit_ns)) {
        report(ws.poison(), c, aborted ? 2u : 1u, peer, channel, stage, static_cast<uint32_t>(epoch),
               static_cast<uint32_t>(seen));
        return false;
      }
    }
  }
}

// Whole CTA: everything that it pushed and read so far comes before the flags that it sets here. False, and no flag
// is set, if any thread is not well: another CTA may poison the workspace while this one looks, so that its threads
// differ in what they saw, and a part of a message must not be published.
__device__ __forceinline__ bool publish(const Workspace& ws, int channel, int stage, uint64_t epoch, bool well) {
  if (!__syncthreads_and(well)) return false;
  const int peer = threadIdx.x;
  if (peer != ws.call.rank && ws.takes_part(peer)) {
    store_release(ws.flag(peer, channel, stage, ws.call.rank), epoch);
  }
  return true;
}

// Whole CTA: false if a wait ran out.
__device__ __forceinline__ bool await(const Workspace& ws, int channel, int stage, uint64_t epoch) {
  const int peer = threadIdx.x;
  bool failed = false;
  if (peer != ws.call.rank && ws.takes_part(peer)) failed = !wait_for(ws, peer, channel, stage, epoch);
  return !__syncthreads_or(failed);
}

}  // namespace one_shot
