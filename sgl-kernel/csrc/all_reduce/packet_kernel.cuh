// The all-reduce kernel for messages whose bytes do not matter: one-shot by push, in packets (packet_memory.cuh).
//
// One one-way trip: load x, push it, poll the own slots until they hold this epoch, add up. A thread waits for the
// packets of its own unit and for no other's. It is templated on the number of ranks, which leaves few registers and
// little code: with two ranks one CTA of 1024 threads may hold a row.
#pragma once
#include "geometry.h"
#include "packet_memory.cuh"
#include "row_sum.cuh"
#include "vector.cuh"

namespace one_shot {

// Which unit of the tensors this thread has in its i-th turn; -1: none.
template <bool FUSED, int RANKS>
__device__ __forceinline__ int packet_unit(const PacketCall<RANKS>& call, int column, int turn) {
  if (FUSED) {
    const int row = static_cast<int>((blockIdx.x + turn * gridDim.x) >> call.log_cluster);
    return row < call.rows && column < call.units ? row * call.units + column : -1;
  }
  const int at = (turn * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x;
  return at < call.units * call.rows ? at : -1;
}

__device__ __forceinline__ uint64_t word_of(uint32_t low, uint32_t high) {
  return static_cast<uint64_t>(high) << 32 | low;
}

// To every peer, successors first; `at` counts from the pointers of the call.
template <int RANKS>
__device__ __forceinline__ void push_packets(const PacketCall<RANKS>& call, uint4 value, uint32_t at, uint64_t epoch) {
#pragma unroll
  for (int k = 0; k < RANKS - 1; ++k) {
    if (RANKS > 2 && k >= call.ranks - 1) break;
    Packet* to = call.to[k] + at;
#ifdef ONE_SHOT_RACE_TEST
    if (call.weaken & kTorn) {
      to[0].epoch = epoch, to[blockDim.x].epoch = epoch;
      __threadfence_system();
      sleep_ns(call.delay_ns);
    }
#endif
    store_packet(to, word_of(value.x, value.y), epoch);
    store_packet(to + blockDim.x, word_of(value.z, value.w), epoch);
  }
}

// Polls between two looks at the clock and the abort word, some milliseconds. The word lies in host memory, and here
// every thread waits by itself: a thousand warps that read it at once take longer than the wait of a call. With a look
// every 256 polls a rank that was late by that much made its peer look too, which then was late in its turn: at 24 rows
// and more, calls of 10 us took hundreds, until a batch ended. Looks that are this rare end such a chain by themselves.
constexpr uint32_t kLookPolls = 1u << 13;

// One thread waits for the packets of its unit from every peer; a source that is not awaited (this rank, or one that
// there is not) keeps what `parts` has. Of two ranks part 1 is the peer's, whichever it is: a + b is b + a, to the bit.
template <int RANKS>
__device__ __forceinline__ bool receive(const PacketCall<RANKS>& call, uint4 (&parts)[RANKS], uint32_t at, uint64_t epoch) {
  constexpr int kFirst = RANKS == 2 ? 1 : 0;
  const Packet* from = call.from + at;
  asm volatile("" : "+l"(from));  // or the compiler works it out anew before every poll
  const uint32_t stride = RANKS == 2 ? 0u : static_cast<uint32_t>(call.source_stride);
  uint32_t missing = RANKS == 2 ? 2u : ((1u << call.ranks) - 1u) & ~(1u << call.rank);
  uint64_t start = 0;
  for (uint32_t polls = 1;; ++polls) {
    Packet low[RANKS], high[RANKS];
#pragma unroll
    for (int q = kFirst; q < RANKS; ++q) {
      if (!(missing >> q & 1u)) continue;
      low[q] = load_packet(from + q * stride);
      high[q] = load_packet(from + q * stride + blockDim.x);
    }
#pragma unroll
    for (int q = kFirst; q < RANKS; ++q) {
      if (!(missing >> q & 1u)) continue;
      bool arrived = low[q].epoch == epoch && high[q].epoch == epoch;
#ifdef ONE_SHOT_RACE_TEST
      if (call.weaken & kAnyEpoch) arrived = low[q].epoch != 0u && high[q].epoch != 0u;
#endif
      if (!arrived) continue;
      parts[q] = make_uint4(static_cast<uint32_t>(low[q].data), static_cast<uint32_t>(low[q].data >> 32),
                            static_cast<uint32_t>(high[q].data), static_cast<uint32_t>(high[q].data >> 32));
      missing &= ~(1u << q);
    }
    if (missing == 0u) return true;
    if ((polls & (kLookPolls - 1u)) == 0u) {
      const uint64_t now = now_ns();
      if (start == 0) start = now;
      // The host writes 1. A read over PCIe that fails has all bits set, and is no reason to leave a peer waiting.
      const bool aborted = load_relaxed(&call.control->abort) == 1u;
      // No order is needed for a packet to be seen. But nothing says how soon a relaxed store is seen or a relaxed load
      // looks anew, and after milliseconds a fence costs nothing.
      __threadfence_system();
      if (aborted || (call.limit_ns != 0 && now - start > call.limit_ns)) {
        const int late = __ffs(missing) - 1;
        // Of the half that is missing: an epoch that is the awaited one came between the last poll and this line.
        uint64_t seen = load_packet(from + late * stride).epoch;
        if (seen == epoch) seen = load_packet(from + late * stride + blockDim.x).epoch;
        report(call.poison, call.control, aborted ? 2u : 1u, RANKS == 2 ? 1 - call.rank : late,
               call.first_channel + blockIdx.x, 0, static_cast<uint32_t>(epoch), static_cast<uint32_t>(seen));
        return false;
      }
    }
  }
}

template <typename T, bool FUSED, int RANKS>
__global__ void __launch_bounds__(packet_threads(RANKS), 1)
    packet_kernel(const __grid_constant__ PacketCall<RANKS> call) {
  __shared__ RowSum::Shared shared;
  const int column =
      static_cast<int>(blockIdx.x & ((1u << call.log_cluster) - 1u)) * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
  // The weight never changes, so it may be read while the previous kernel still runs; nothing else may.
  uint4 weight = make_uint4(0u, 0u, 0u, 0u);
  if (FUSED && column < call.units) weight = load_unit(call.weight + column);
  const RowSum row_sum{shared, FUSED ? 1 << call.log_cluster : 1};
  if (FUSED) row_sum.start();
  wait_for_previous_grid();

  const uint32_t here = call.here(), turn_stride = 2u * blockDim.x;
  // All of these are under way at once: nothing is looked at before the last is issued.
  const int first = packet_unit<FUSED>(call, column, 0);
  uint64_t* counter = call.epoch + blockIdx.x;
  const uint64_t before = load_own(counter);
  const uint32_t poison = load_own(call.poison);
  uint4 first_x = make_uint4(0u, 0u, 0u, 0u), first_residual = make_uint4(0u, 0u, 0u, 0u);
  if (first >= 0) {
    first_x = load_unit(call.x + first);
    if (FUSED) first_residual = load_unit(call.residual + first);
  }
  const uint64_t epoch = before + 1u;
  bool ok = poison == 0u;  // of this thread only: what a peer misses of it is never taken for data
  bool second = (epoch & 1u) != 0u;  // of the two buffers
#ifdef ONE_SHOT_RACE_TEST
  if (call.weaken & kOneBuffer) second = false;
  if (call.weaken & kDelayPush) sleep_ns(call.delay_ns);
#endif
  const uint32_t at = second ? here + call.buffer_stride() : here;
  if (ok && first >= 0) push_packets(call, first_x, at, epoch);
#pragma unroll 1
  for (int turn = 1; turn < call.turns; ++turn) {
    const int unit = packet_unit<FUSED>(call, column, turn);
    if (ok && unit >= 0) push_packets(call, load_unit(call.x + unit), at + turn * turn_stride, epoch);
  }
  let_next_grid_start();
  // Every thread has read the counter before it moves on. The packets are on their way meanwhile.
  __syncthreads();
  if (threadIdx.x == 0) *counter = epoch;
#ifdef ONE_SHOT_RACE_TEST
  if (call.weaken & kDelayRead) sleep_ns(call.delay_ns);
#endif
  if (FUSED) row_sum.started();

#pragma unroll 1
  for (int turn = 0; turn < call.turns; ++turn) {
    const int unit = turn == 0 ? first : packet_unit<FUSED>(call, column, turn);
    Sum sum = all(0.0f);
    if (unit >= 0) {
      uint4 parts[RANKS];
      const uint4 own = turn == 0 ? first_x : load_unit(call.x + unit);
#pragma unroll
      for (int q = 0; q < RANKS; ++q) parts[q] = own;
      ok = ok && receive(call, parts, at + turn * turn_stride, epoch);
      sum = unpack<T>(parts[0]);
#pragma unroll
      for (int q = 1; q < RANKS; ++q) {
        if (RANKS == 2 || q < call.ranks) add(sum, unpack<T>(parts[q]));
      }
      if (!ok) sum = all(__uint_as_float(0x7fffffffu));  // NaN: a failed sum must not pass for a result
    }
    if (FUSED) {
      float squares = 0.0f;
      if (unit >= 0) {
        add(sum, unpack<T>(turn == 0 ? first_residual : load_unit(call.residual + unit)));
#pragma unroll
        for (int k = 0; k < 8; ++k) squares += sum.v[k] * sum.v[k];
      }
      const float total = row_sum.of(squares, turn);
      if (unit >= 0) store_unit(call.residual_out + unit, pack<T>(sum));
      const float scale = rsqrtf(total * call.inverse_hidden + call.eps);
      const Sum weights = unpack<T>(weight);
#pragma unroll
      for (int k = 0; k < 8; ++k) sum.v[k] *= scale * weights.v[k];
    }
    if (unit >= 0) store_unit(call.out + unit, pack<T>(sum));
  }
}

}  // namespace one_shot
