// What warpgroup_device.cuh has, on the device of device.h.
//
// The matrix instructions are as late as they may be, and each warp's part for itself: it reads shared memory and adds only when
// that warp waits for its group, whatever the other warps have done by then. Until then the sums hold NaN, and what somebody
// stores there is lost. An operand that no fence made visible before the instruction, or that was overwritten since, is NaN.
//
// What a copying thread has under way is counted, by what it waits for alone: more than its pace ends the run.
#pragma once
#include <deque>

#include "device.h"

namespace device {
typedef unsigned long long u64;
constexpr int GROUP_THREADS = 128, SUMS = 4 * NT;
// One matrix instruction, as all threads of the warpgroup must give it.
struct Product { u64 a, b; bool across, keep; int sent = 0; };
struct Group { int end; order::Clock fenced; };
// What a thread has sent: sums of unfinished instructions, by where they go.
struct Unfinished { float sums[SUMS]; int last; };
struct Sender {
  bool begun = false;
  int sent = 0, done = 0;
  std::deque<float*> to;
  std::deque<Group> groups;
  order::Clock fenced;
  std::map<float*, Unfinished> sums;
};
// What a copying thread knows to be under way: lines of its parts, the last one open; whether it last saw the queries not there.
constexpr int LINES = 3, STAGE_LINES = 18;  // of a part, of a stage; warpgroup.cu has the same
struct Parts {
  std::deque<int> lines = {0};
  int all = 0;
  bool early = false;
};
struct Warpgroup {
  std::vector<Product> products;
  std::vector<Sender> senders = std::vector<Sender>(GROUP_THREADS);
  std::vector<Parts> parts = std::vector<Parts>(ORDERED);
  bool vote[2] = {};
};
inline std::vector<Warpgroup> warpgroups;  // one a block

inline Warpgroup& warpgroup() { return warpgroups[S->now->block]; }
inline Parts& parts() { return warpgroup().parts[S->now->thread]; }
// A line more of this thread's; queries are in no part.
inline void line_sent() {
  if (S->now->thread < GROUP_THREADS) return;
  Parts& mine = parts();
  const int most = !mine.early ? PACE : mine.all < STAGE_LINES ? PACE_FIRST : PACE_EARLY;
  int under_way = ++mine.lines.back();
  for (size_t i = 0; i + 1 < mine.lines.size(); i++) under_way += mine.lines[i];
  if (under_way > most * LINES) fail("more keys under way than the pace allows");
  mine.all++;
}
inline Sender& sender() {
  if (S->now->thread >= GROUP_THREADS) fail("a matrix instruction outside the first warpgroup");
  return warpgroup().senders[S->now->thread];
}
// Address of element (along: of the summed dimension, across) of an operand.
inline u32 element(u64 operand, bool summed_across, int along, int across) {
  const u32 base = (u32)S->now->block << BLOCK_SHIFT, start = (u32)(operand & 0x3fff) << 4;
  const u32 leading = (u32)(operand >> 16 & 0x3fff) << 4, stride = (u32)(operand >> 32 & 0x3fff) << 4;
  if (operand >> 62 == 0) {
    if (summed_across) fail("plain matrices with the summed dimension across are not emulated");
    return base + start + along / 8 * leading + across / 8 * stride + across % 8 * 16 + along % 8 * 2;
  }
  if (operand >> 62 != 1) fail("a swizzle that is not emulated");
  const int row = summed_across ? along : across, column = summed_across ? across : along;
  const u32 a = start + row / 8 * stride + row % 8 * 128 + column * 2;
  return base + (a ^ (a >> 7 & 7) << 4);
}
// An element for the matrix instructions: NaN where they need not see what was written.
inline float operand_value(u32 a, const order::Clock& fenced) {
  const unsigned char* p = at(a, 2);
  if (!block().writes.known(offset(a), 2, fenced)) return NAN;
  unsigned short x;
  std::memcpy(&x, p, 2);
  return half_value(x, !HALF);
}
// This thread's part of one instruction: rows g and g + 8 of its warp's sixteen, two columns of each row tile.
inline void multiply(const Product& p, const order::Clock& fenced, float* sums) {
  const int g = S->now->thread / 32 * 16 + lane() / 4, t = lane() % 4;
  float a[2][16], b[2 * NT][16];
  for (int k = 0; k < 16; k++) {
    for (int h = 0; h < 2; h++) a[h][k] = operand_value(element(p.a, p.across, k, g + 8 * h), fenced);
    for (int n = 0; n < 2 * NT; n++) b[n][k] = operand_value(element(p.b, false, k, n / 2 * 8 + 2 * t + n % 2), fenced);
  }
  for (int i = 0; i < SUMS; i++) {
    const float *x = a[i >> 1 & 1], *y = b[i / 4 * 2 + (i & 1)];
    float sum = 0;
    for (int k = 0; k < 16; k++) sum += x[k] * y[k];
    sums[i] = (p.keep ? sums[i] : 0.f) + sum;
  }
}
inline void send(float* d, u64 a, u64 b, bool across, bool keep) {
  Sender& mine = sender();
  if (!mine.begun) fail("a matrix instruction that no fence keeps behind its registers");
  auto& all = warpgroup().products;
  if (mine.sent == (int)all.size()) all.push_back({a, b, across, keep});
  Product& p = all[mine.sent];
  if (p.a != a || p.b != b || p.across != across || p.keep != keep) fail("threads of a warpgroup disagree about a matrix instruction");
  if (++p.sent == GROUP_THREADS) S->progress++;
  auto found = mine.sums.find(d);
  if (found == mine.sums.end()) {
    found = mine.sums.emplace(d, Unfinished{}).first;
    std::memcpy(found->second.sums, d, sizeof found->second.sums);
    for (int i = 0; i < SUMS; i++) d[i] = NAN;
  }
  found->second.last = mine.sent++;
  mine.to.push_back(d);
}
inline void finish(int left) {
  unsigned x = 0;
  exchange(&x, 1);
  Sender& mine = sender();
  while ((int)mine.groups.size() > left) {
    const Group& group = mine.groups.front();
    for (; mine.done < group.end; mine.done++) {
      float* d = mine.to.front();
      auto found = mine.sums.find(d);
      multiply(warpgroup().products[mine.done], group.fenced, found->second.sums);
      if (found->second.last == mine.done) {
        std::memcpy(d, found->second.sums, sizeof found->second.sums);
        mine.sums.erase(found);
      }
      mine.to.pop_front();
    }
    mine.groups.pop_front();
  }
}
}  // namespace device

#define KERNEL_SPLIT static
#define KERNEL_MERGE static
#define KERNEL_LIST static
DEVICE unsigned block_columns() { return device::S->width; }
DEVICE unsigned block_row() { return (device::S->first + device::S->now->block) / device::S->width; }
DEVICE void warpgroup_sync() { device::meet(device::block().consumers, device::GROUP_THREADS); }
DEVICE bool warpgroup_any(bool x) {
  auto& meeting = device::block().consumers;
  auto& votes = device::warpgroup().vote;
  const unsigned round = meeting.round;
  votes[round & 1] |= x;
  if (meeting.arrived == device::GROUP_THREADS - 1) votes[~round & 1] = false;
  device::meet(meeting, device::GROUP_THREADS);
  return votes[round & 1];
}
DEVICE void copy16_or_zero(unsigned to, const char* from, bool there) {
  static const char zeros[16] __attribute__((aligned(16))) = {};
  device::line_sent();
  copy16(to, there ? from : zeros);
}
// Waiting for one's own copies tells nobody else, and here they land as late as they may.
DEVICE void part_sent() { device::parts().lines.push_back(0); }
template <int LEFT> void parts_under_way() {
  auto& lines = device::parts().lines;
  while (lines.size() > LEFT + 1) lines.pop_front();
}
DEVICE void shared_to_matrix() { device::S->now->known.fence(); }
// Row r of matrix i goes to the address that lane 8 i + r gave: it is column r of what the lanes hold.
DEVICE void matrix_store_turned2(unsigned a, unsigned x, unsigned y) {
  const unsigned mine[2] = {x, y};
  auto all = device::exchange(mine, 2);
  const int l = device::lane();
  if (l < 16) {
    unsigned short row[8];
    for (int k = 0; k < 8; k++) row[k] = all[4 * k + l % 8 / 2][l / 8] >> 16 * (l & 1);
    uint4 packet;
    std::memcpy(&packet, row, 16);
    device::write(a, packet);
  }
}
DEVICE uint4 global_u32x4(const unsigned* a) {
  if ((size_t)a % 16) device::fail("misaligned packet");
  return *(const uint4*)a;
}
DEVICE float2 global_f32x2(const float* a) {
  if ((size_t)a % 8) device::fail("misaligned pair");
  return *(const float2*)a;
}
DEVICE unsigned global_u32(const unsigned* a) { return *a; }
DEVICE uint2 global_u32x2(const unsigned* a) {
  if ((size_t)a % 8) device::fail("misaligned pair");
  return *(const uint2*)a;
}
DEVICE void global_put_u32x4(unsigned* a, uint4 x) {
  if ((size_t)a % 16) device::fail("misaligned packet");
  *(uint4*)a = x;
}
// A test that never waits: what it has not seen it may see the next time.
DEVICE bool barrier_passed(unsigned a, unsigned parity) {
  auto& b = device::barrier(a);
  const bool passed = (b.phase & 1) != parity;
  if (passed) b.known.leave(device::S->now->known, parity);
  device::parts().early = !passed;
  return passed;
}
DEVICE float inverse(float f) { return 1.f / f; }
DEVICE void forget(unsigned&) {}
template <int N> void settle(float (&)[N]) {}

DEVICE unsigned long long swizzled(unsigned a) { return (device::u64)(a >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62; }
DEVICE unsigned long long matrices(unsigned a, unsigned along, unsigned across) {
  return (device::u64)(a >> 4 & 0x3fff) | (device::u64)(along >> 4) << 16 | (device::u64)(across >> 4) << 32;
}
DEVICE void products_begin() {
  auto& mine = device::sender();
  mine.begun = true;
  mine.fenced = device::S->now->known.fenced;
}
DEVICE void products_sent() {
  auto& mine = device::sender();
  mine.begun = false;
  mine.groups.push_back({mine.sent, mine.fenced});
}
template <int LEFT> void products_done() { device::finish(LEFT); }
template <bool SUMMED_ACROSS> void product(float (&d)[4 * NT], unsigned long long a, unsigned long long b, bool keep) {
  device::send(d, a, b, SUMMED_ACROSS, keep);
}
