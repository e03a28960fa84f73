// The C interface: plain structures and functions, so that the library links neither PyTorch nor libcuda and loads
// with ctypes. `library.py` mirrors it; kAbi changes with it.
#pragma once
#include <stdint.h>

namespace one_shot {

constexpr int kAbi = 3;
constexpr int kMaxRanks = 8;
constexpr int kUnitBytes = 16;  // one store; 8 elements
constexpr int kUnitElements = 8;

constexpr int kPacketElements = 4;  // 8 bytes of data and 8 of epoch in one store

enum Dtype : int32_t { kBfloat16 = 0, kFloat16 = 1 };
enum Variant : int32_t { kOneShot = 0, kTwoStage = 1, kPackets = 2 };

// Host memory mapped into the device: the watchdog writes `abort`, a kernel whose wait ran out writes the rest,
// `code` last. One a workspace and rank.
struct Control {
  uint32_t abort;
  uint32_t code;  // 0: nothing happened, 1: out of time, 2: aborted
  uint32_t peer;
  uint32_t channel;
  uint32_t stage;
  uint32_t epoch;  // of this and the next, the low 32 bits: for a sentence
  uint32_t seen;
  uint32_t unused;
};

// Bytes of one rank's workspace, by section. The same on every rank.
struct Layout {
  int64_t flags;     // uint64 [channels][2 stages][8 sources]: written by peers
  int64_t epochs;    // uint64 [channels]: written by this rank's kernels only
  int64_t poison;    // uint32: not 0 once a wait has run out
  int64_t slots;     // 16-byte units [channels][2 buffers][ranks][capacity]: written by peers
  int64_t packets;   // packets of half a unit [channels][2 buffers][ranks][2 packet_capacity]: written by peers
  int64_t bytes;     // total
  int32_t channels;  // max_blocks, then one a pair of ranks if `pairs`
  int32_t capacity;  // units of one slot
  int32_t packet_capacity;  // units of one slot of packets
  int32_t unused;
};

struct Call {
  uint64_t base[kMaxRanks];  // this workspace at every rank, as mapped here
  uint64_t control;          // device address of this rank's Control
  uint64_t x, residual, weight, out, residual_out;
  uint64_t limit_ns;  // longest wait; 0: until aborted
  Layout layout;
  int32_t rank, ranks;
  uint32_t members;  // bit set of the ranks that take part
  int32_t first_channel;
  int32_t max_blocks;
  int32_t rows, hidden;
  int32_t dtype;
  int32_t fused;
  int32_t variant;
  int32_t shape;  // packets only; CTAs a row (fused) or threads a CTA (plain), the same on every rank; 0: the default
  int32_t dependent_launch;  // 1: programmatic dependent launch
  float eps;
  // Race tests only; ignored by a library that was built without ONE_SHOT_RACE_TEST.
  uint32_t weaken;
  uint64_t delay_ns;
};

enum Weaken : uint32_t {
  kOneBuffer = 1,       // the same slots in every epoch
  kFlagFirst = 2,       // publish, wait delay_ns, then push
  kDelayRead = 4,       // wait delay_ns between await (packets: push) and read
  kTorn = 8,            // packets: the epoch, then after delay_ns the data
  kAnyEpoch = 16,       // packets: take what an earlier use of the slot left
  kDelayPush = 32,      // wait delay_ns before push
};

}  // namespace one_shot
