// The all-reduce kernel: one-shot or two-stage, plain or fused with residual add and RMSNorm.
//
// A CTA is one channel of the protocol: it talks to the CTAs with its index on the other ranks and to no other.
// Plain: the rows are one flat run of 16-byte units dealt out to the CTAs. Fused: a cluster of 1, 2 or 4 CTAs
// holds a row, one unit a thread, and adds up the sum of squares through distributed shared memory.
#pragma once
#include "memory.cuh"
#include "row_sum.cuh"
#include "vector.cuh"

namespace one_shot {

// 512 threads leave 128 registers each: the slots of eight ranks are in flight at once without a spill.
constexpr int kMaxThreads = 512;

// Which unit of the tensors this thread has in its i-th turn; -1: none.
template <bool FUSED>
struct Deal {
  int units, rows, cluster_size;

  __device__ __forceinline__ int turns() const {
    if (FUSED) {
      const int clusters = gridDim.x / cluster_size;
      return (rows + clusters - 1) / clusters;
    }
    const int round = gridDim.x * blockDim.x;
    return (units * rows + round - 1) / round;
  }
  __device__ __forceinline__ int column(int thread) const {
    return static_cast<int>(blockIdx.x % cluster_size) * blockDim.x + thread;
  }
  __device__ __forceinline__ int unit(int turn, int thread) const {
    if (FUSED) {
      const int row = blockIdx.x / cluster_size + turn * (gridDim.x / cluster_size);
      return row < rows && column(thread) < units ? row * units + column(thread) : -1;
    }
    const int at = (turn * gridDim.x + blockIdx.x) * blockDim.x + thread;
    return at < units * rows ? at : -1;
  }
};

// Sum over the members, in the order of ranks, of one unit: the own one from `x`, the others from the slots.
template <typename T>
__device__ __forceinline__ Sum ordered_sum(const Workspace& ws, const uint4* x, int unit, int channel,
                                           uint32_t buffer, int at) {
  const Call& call = ws.call;
  uint4 parts[kMaxRanks];
#pragma unroll
  for (int q = 0; q < kMaxRanks; ++q) {
    if (!ws.takes_part(q)) continue;
    parts[q] = load_unit(q == call.rank ? x + unit : ws.slot(call.rank, channel, buffer, q) + at);
  }
  Sum sum = all(0.0f);
  bool first = true;
#pragma unroll
  for (int q = 0; q < kMaxRanks; ++q) {
    if (!ws.takes_part(q)) continue;
    const Sum part = unpack<T>(parts[q]);
    if (first) {
      sum = part;
      first = false;
    } else {
      add(sum, part);
    }
  }
  return sum;
}

// push of the one-shot variant: every unit to every peer, successors first.
template <bool FUSED>
__device__ __forceinline__ void push_all(const Workspace& ws, const Deal<FUSED>& deal, const uint4* x, int turns,
                                         int channel, uint32_t buffer) {
  const Call& call = ws.call;
  for (int turn = 0; turn < turns; ++turn) {
    const int unit = deal.unit(turn, threadIdx.x);
    if (unit < 0) continue;
    const uint4 value = load_unit(x + unit);
    for (int k = 1; k < call.ranks; ++k) {
      int peer = call.rank + k;
      if (peer >= call.ranks) peer -= call.ranks;
      if (!ws.takes_part(peer)) continue;
      store_unit(ws.slot(peer, channel, buffer, call.rank) + turn * blockDim.x + threadIdx.x, value);
    }
  }
}

// Two-stage: units of a channel, counted turn by turn and thread by thread, belong to ranks in runs of `shard`.
struct Shards {
  int count, shard, half;  // half: where the gathered results begin in a slot

  __device__ __forceinline__ int owner(int local) const { return local / shard; }
};

template <typename T, bool FUSED>
__device__ __forceinline__ bool reduce_and_gather(const Workspace& ws, const Deal<FUSED>& deal, const Shards& shards,
                                                  const uint4* x, int turns, int channel, uint32_t buffer,
                                                  uint64_t epoch, bool well) {
  const Call& call = ws.call;
  for (int turn = 0; turn < turns && well; ++turn) {
    const int unit = deal.unit(turn, threadIdx.x);
    const int local = turn * blockDim.x + threadIdx.x;
    const int owner = shards.owner(local);
    if (unit < 0 || owner == call.rank) continue;
    store_unit(ws.slot(owner, channel, buffer, call.rank) + (local - owner * shards.shard), load_unit(x + unit));
  }
  if (!publish(ws, channel, 0, epoch, well) || !await(ws, channel, 0, epoch)) return false;
  for (int at = threadIdx.x; at < shards.shard; at += blockDim.x) {
    const int local = call.rank * shards.shard + at;
    const int unit = local < shards.count ? deal.unit(local / blockDim.x, local % blockDim.x) : -1;
    if (unit < 0) continue;
    const uint4 value = pack<T>(ordered_sum<T>(ws, x, unit, channel, buffer, at));
    for (int k = 0; k < call.ranks; ++k) {  // the own copy too: any thread of this CTA may need it
      int peer = call.rank + k;
      if (peer >= call.ranks) peer -= call.ranks;
      store_unit(ws.slot(peer, channel, buffer, call.rank) + shards.half + at, value);
    }
  }
  return publish(ws, channel, 1, epoch, true) && await(ws, channel, 1, epoch);
}

template <typename T, bool FUSED, bool TWO_STAGE>
__global__ void __launch_bounds__(kMaxThreads, 1) all_reduce_kernel(const __grid_constant__ Call call, int cluster_size) {
  __shared__ RowSum::Shared shared;
  const Workspace ws{call};
  const Deal<FUSED> deal{call.hidden / kUnitElements, call.rows, cluster_size};
  const int channel = call.first_channel + blockIdx.x;
  const int turns = deal.turns();
  const uint4* x = reinterpret_cast<const uint4*>(call.x);
  const uint4* residual = reinterpret_cast<const uint4*>(call.residual);
  uint4* out = reinterpret_cast<uint4*>(call.out);
  uint4* residual_out = reinterpret_cast<uint4*>(call.residual_out);

  // The weight never changes, so it may be read while the previous kernel still runs; nothing else may.
  uint4 weight = make_uint4(0u, 0u, 0u, 0u);
  if (FUSED && deal.column(threadIdx.x) < deal.units) {
    weight = load_unit(reinterpret_cast<const uint4*>(call.weight) + deal.column(threadIdx.x));
  }
  RowSum row_sum{shared, cluster_size};
  if (FUSED) row_sum.start();
  wait_for_previous_grid();

  const uint64_t epoch = *ws.epoch(channel) + 1u;
  bool ok = *ws.poison() == 0u;  // of this thread only, until `publish` has asked the whole CTA
  uint32_t buffer = static_cast<uint32_t>(epoch) & 1u;
#ifdef ONE_SHOT_RACE_TEST
  if (call.weaken & kOneBuffer) buffer = 0;
#endif

  const int local_units = turns * blockDim.x;
  const Shards shards{local_units, (local_units + call.ranks - 1) / call.ranks, call.layout.capacity / 2};
  uint4 first_residual = make_uint4(0u, 0u, 0u, 0u);
  if (FUSED && deal.unit(0, threadIdx.x) >= 0) first_residual = load_unit(residual + deal.unit(0, threadIdx.x));
  if (TWO_STAGE) {
    let_next_grid_start();
    ok = reduce_and_gather<T>(ws, deal, shards, x, turns, channel, buffer, epoch, ok);
  } else {
#ifdef ONE_SHOT_RACE_TEST
    if (call.weaken & kFlagFirst) {
      ok = publish(ws, channel, 0, epoch, ok);
      sleep_ns(call.delay_ns);
    }
#endif
    if (ok) push_all(ws, deal, x, turns, channel, buffer);
#ifdef ONE_SHOT_RACE_TEST
    if (!(call.weaken & kFlagFirst))
#endif
      ok = publish(ws, channel, 0, epoch, ok);
    let_next_grid_start();
    ok = ok && await(ws, channel, 0, epoch);
#ifdef ONE_SHOT_RACE_TEST
    if (call.weaken & kDelayRead) sleep_ns(call.delay_ns);
#endif
  }
  if (FUSED) row_sum.started();

  for (int turn = 0; turn < turns; ++turn) {
    const int unit = deal.unit(turn, threadIdx.x);
    const int local = turn * blockDim.x + threadIdx.x;
    Sum sum = all(0.0f);
    if (unit >= 0) {
      if (!ok) {
        sum = all(__uint_as_float(0x7fffffffu));  // NaN: a failed sum must not pass for a result
      } else if (TWO_STAGE) {
        const int owner = shards.owner(local);
        sum = unpack<T>(load_unit(ws.slot(call.rank, channel, buffer, owner) + shards.half + local -
                                  owner * shards.shard));
      } else {
        sum = ordered_sum<T>(ws, x, unit, channel, buffer, local);
      }
    }
    if (FUSED) {
      float squares = 0.0f;
      if (unit >= 0) {
        add(sum, unpack<T>(turn == 0 ? first_residual : load_unit(residual + unit)));
#pragma unroll
        for (int k = 0; k < 8; ++k) squares += sum.v[k] * sum.v[k];
      }
      const float total = row_sum.of(squares, turn);
      if (unit >= 0) store_unit(residual_out + unit, pack<T>(sum));
      const float scale = rsqrtf(total / static_cast<float>(call.hidden) + call.eps);
      const Sum weights = unpack<T>(weight);
#pragma unroll
      for (int k = 0; k < 8; ++k) sum.v[k] *= scale * weights.v[k];
    }
    if (unit >= 0) store_unit(out + unit, pack<T>(sum));
  }
  if (ok && threadIdx.x == 0) *ws.epoch(channel) = epoch;
}

}  // namespace one_shot
