// A CUDA device small enough to read: the primitives of fused_device.cuh on a CPU, one fiber a thread.
//
// Made to expose mistakes, not to be fast. Shared memory starts as NaN. An asynchronous copy reads its source and makes NaN of
// its target at once, and lands only when somebody waits for its barrier: what it reads must be there, what it overwrites must be
// done with, data used without waiting is NaN. The kernel before this one "ends" as late as it can: when no thread can go on
// without it; only then does the caller's callback write what it owed. Warps take turns in no order, some ahead of the others.
// Stores and loads outside the own block's memory, misaligned matrix loads and deadlocks end the run with a message. With
// ORDERED, order.h also notices what is read before anything orders it behind its writing.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "order.h"

struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };

namespace device {
typedef unsigned int u32;
constexpr u32 BLOCK_SHIFT = 20;  // a shared address: the block above, the offset below

struct Copy { u32 to; std::vector<char> data; int by; };  // `by` a thread
struct Barrier { int count = 0, pending = 0; u32 phase = 0; std::vector<Copy> copies; int arrivals = 0; order::Handover known; };
struct Meeting { int arrived = 0; u32 round = 0; order::Handover known; };
struct Warp { Meeting meet; u32 word[2][32][6]; };
struct Block {
  std::vector<unsigned char> memory;
  order::Memory writes;
  std::map<u32, Barrier> barriers;
  Meeting all, consumers, producers, result, weights;
  std::vector<Warp> warps;
};
struct Fiber { ucontext_t context; std::unique_ptr<char[]> stack; int block, thread; bool done = false; std::vector<Copy> copies; order::Known known; };

struct State {
  ucontext_t scheduler;
  std::vector<Fiber> fibers;
  std::vector<Block> blocks;
  Fiber* now = nullptr;
  int threads = 0, first = 0, width = 0;
  long progress = 0;
  bool previous_done = false, failed = false;
  std::function<void()> body;
};
inline State* S = nullptr;
inline std::string message;

// Ends the launch: the thread that found something never goes on.
inline void fail(const char* what) {
  char text[200];
  std::snprintf(text, sizeof text, "%s (block %d, thread %d)", what, S->first + S->now->block, S->now->thread);
  message = text;
  S->failed = true;
  while (true) swapcontext(&S->now->context, &S->scheduler);
}
inline void yield() { swapcontext(&S->now->context, &S->scheduler); }
template <class F> inline void wait_until(F ready) {
  while (!ready()) yield();
  S->progress++;
}
inline void arrive(Meeting& m, int everybody, bool orders = true) {
  if (orders) m.known.arrive(S->now->known);
  if (++m.arrived == everybody) {
    m.arrived = 0;
    if (orders) m.known.turn(m.round);
    m.round++;
  }
  S->progress++;
}
// `orders`: a barrier, behind which everybody sees what was written before it; a shuffle is none.
inline void meet(Meeting& m, int everybody, bool orders = true) {
  const u32 round = m.round;
  arrive(m, everybody, orders);
  if (m.round == round) wait_until([&] { return m.round != round; });
  if (orders) m.known.leave(S->now->known, round);
}
inline Block& block() { return S->blocks[S->now->block]; }
inline Warp& warp() { return block().warps[S->now->thread / 32]; }
inline int lane() { return S->now->thread % 32; }
inline unsigned char* at(u32 a, u32 bytes) {
  const int b = a >> BLOCK_SHIFT;
  const u32 offset = a & ((1u << BLOCK_SHIFT) - 1);
  if (b != S->now->block) fail("local access to another block's shared memory");
  if (b >= (int)S->blocks.size() || offset + bytes > S->blocks[b].memory.size()) fail("access outside shared memory");
  if (offset % (bytes > 16 ? 16 : bytes)) fail("misaligned access to shared memory");
  return &S->blocks[b].memory[offset];
}
inline u32 offset(u32 a) { return a & ((1u << BLOCK_SHIFT) - 1); }
// What nothing orders behind its writing reads as NaN.
template <class T> inline T read(u32 a) {
  T x;
  std::memcpy(&x, at(a, sizeof(T)), sizeof(T));
  if (!block().writes.known(offset(a), sizeof(T), S->now->known.seen)) std::memset(&x, 0xff, sizeof(T));
  return x;
}
template <class T> inline void write(u32 a, T x) {
  std::memcpy(at(a, sizeof(T)), &x, sizeof(T));
  S->now->known.seen.saw(S->now->thread, block().writes.note(offset(a), sizeof(T), S->now->thread));
}
// A copy is there: seen by nobody yet.
inline u32 land(const Copy& c) {
  std::memcpy(at(c.to, 1), c.data.data(), c.data.size());
  return block().writes.note(offset(c.to), c.data.size(), c.by);
}
// Every lane gives some words and then sees everybody's.
inline const u32 (*exchange(const u32* words, int n))[6] {
  Warp& w = warp();
  const int buffer = w.meet.round & 1;
  std::memcpy(w.word[buffer][lane()], words, n * 4);
  meet(w.meet, 32, false);
  return w.word[buffer];
}
inline Barrier& barrier(u32 a) {
  auto& all = block().barriers;
  auto found = all.find(a);
  if (found == all.end()) fail("barrier that was not initialised");
  return found->second;
}
inline void settle(Barrier& b) {
  if (b.pending == 0) {
    b.known.turn(b.phase);
    b.phase++;
    b.pending = b.count;
    S->progress++;
  }
}
inline float half_value(unsigned short x, bool bf16) {
  if (bf16) { u32 u = (u32)x << 16; float f; std::memcpy(&f, &u, 4); return f; }
  _Float16 h; std::memcpy(&h, &x, 2); return (float)h;
}
inline unsigned short half_bits(float f, bool bf16) {
  if (bf16) {
    u32 u; std::memcpy(&u, &f, 4);
    if (f != f) return 0x7fff;
    return (u + 0x7fff + (u >> 16 & 1)) >> 16;
  }
  const _Float16 h = (_Float16)f; unsigned short x; std::memcpy(&x, &h, 2); return x;
}
inline void entry() {
  S->body();
  S->now->done = true;
  S->progress++;
  while (true) yield();
}
inline std::vector<std::unique_ptr<char[]>> stacks;  // of threads that have ended
// `blocks` blocks of a grid `width` wide, from number `first` on, all resident. `previous` is the end of the kernel before this
// one, if that has not ended. False: `message` says what went wrong.
inline bool run_blocks(int first, int blocks, int width, int threads, size_t shared, bool ended, std::function<void()> previous, std::function<void()> body) {
  auto state = std::make_unique<State>();
  S = state.get();
  S->first = first;
  S->width = width;
  S->threads = threads;
  S->previous_done = ended;
  S->body = body;
  S->blocks.resize(blocks);
  S->fibers.resize((size_t)blocks * threads);
  for (auto& b : S->blocks) {
    b.memory.assign(shared, 0xff);
    b.writes.reset(shared);
    b.warps.resize(threads / 32);
  }
  constexpr size_t STACK = 96 * 1024;
  for (size_t i = 0; i < S->fibers.size(); i++) {
    Fiber& f = S->fibers[i];
    f.block = i / threads;
    f.thread = i % threads;
    if (stacks.empty()) f.stack = std::make_unique_for_overwrite<char[]>(STACK);
    else {
      f.stack = std::move(stacks.back());
      stacks.pop_back();
    }
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.get();
    f.context.uc_stack.ss_size = STACK;
    f.context.uc_link = nullptr;
    makecontext(&f.context, entry, 0);
  }
  constexpr int QUIET = 4, STUCK = 100;  // rounds without progress; a poll costs its thread one
  int quiet = 0;
  u32 dice = 1;
  const auto roll = [&](u32 sides) { return ((dice = dice * 1664525 + 1013904223) >> 8) % sides; };
  std::vector<Fiber*> order;  // the first of each warp
  for (size_t i = 0; i < S->fibers.size(); i += 32) order.push_back(&S->fibers[i]);
  for (long last = -1; !S->failed;) {
    bool all = true;
    for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[roll(i)]);
    for (Fiber* first : order)
      for (int turns = roll(4) ? 1 : 8; turns; turns--)
        for (Fiber* f = first; f < first + 32 && !S->failed; f++) {
          if (f->done) continue;
          all = false;
          S->now = f;
          swapcontext(&S->scheduler, &f->context);
        }
    if (all) break;
    quiet = S->progress == last ? quiet + 1 : 0;
    if (quiet == QUIET && !S->previous_done) {
      if (previous) previous();
      S->previous_done = true;
    }
    if (quiet == STUCK) {
      message = "deadlock";
      S->failed = true;
    }
    last = S->progress;
  }
  const bool ok = !S->failed;
  for (auto& f : S->fibers) stacks.push_back(std::move(f.stack));
  S = nullptr;
  return ok;
}
}  // namespace device

#define DEVICE inline
#define KERNEL static
#define __grid_constant__
#define SHARED_BASE() const u32 sm = (u32)device::S->now->block << device::BLOCK_SHIFT
struct ThreadIndex { int x; };
#define threadIdx (ThreadIndex{device::S->now->thread})

DEVICE int __ffs(unsigned x) { return __builtin_ffs((int)x); }
DEVICE float __int_as_float(int x) { float f; std::memcpy(&f, &x, 4); return f; }
DEVICE void __syncwarp() { device::meet(device::warp().meet, 32); }
DEVICE void __syncthreads() { device::meet(device::block().all, device::S->threads); }
template <class T> T __shfl_sync(unsigned, T x, int from) {
  unsigned u; std::memcpy(&u, &x, 4);
  auto all = device::exchange(&u, 1);
  T y; std::memcpy(&y, &all[from & 31][0], 4); return y;
}
template <class T> T __shfl_xor_sync(unsigned m, T x, int d) { return __shfl_sync(m, x, device::lane() ^ d); }
template <class T> T __shfl_up_sync(unsigned m, T x, int d) { return __shfl_sync(m, x, device::lane() >= d ? device::lane() - d : device::lane()); }
DEVICE unsigned __ballot_sync(unsigned, bool p) {
  unsigned u = p;
  auto all = device::exchange(&u, 1);
  unsigned r = 0;
  for (int i = 0; i < 32; i++) r |= all[i][0] << i;
  return r;
}
DEVICE bool __all_sync(unsigned m, bool p) { return __ballot_sync(m, p) == ~0u; }

DEVICE void barrier_init(unsigned a, unsigned n) { auto& b = device::block().barriers[a]; b.count = b.pending = n; }
DEVICE void barriers_ready() {}
DEVICE void barrier_arrive(unsigned a) {
  auto& b = device::barrier(a);
  b.known.arrive(device::S->now->known);
  b.pending--;
  device::settle(b);
}
DEVICE void barrier_wait(unsigned a, unsigned parity) {
  auto& b = device::barrier(a);
  device::wait_until([&] {
    if ((b.phase & 1) != parity) return true;
    if (b.copies.empty() && !b.arrivals) return false;
    for (auto& c : b.copies) b.known.in.seen.saw(c.by, device::land(c));
    b.copies.clear();
    for (; b.arrivals; b.arrivals--) {
      b.pending--;
      device::settle(b);
    }
    return false;
  });
  b.known.leave(device::S->now->known, parity);
}
DEVICE void copy16(unsigned to, const char* from) {
  if ((size_t)from % 16) device::fail("copies must be 16-byte aligned");
  std::memset(device::at(to, 16), 0xff, 16);
  device::S->now->copies.push_back({to, std::vector<char>(from, from + 16), device::S->now->thread});
}
DEVICE void barrier_arrive_after_copies(unsigned a) {
  auto& b = device::barrier(a);
  auto& mine = device::S->now->copies;
  b.copies.insert(b.copies.end(), mine.begin(), mine.end());
  mine.clear();
  b.arrivals++;
}
DEVICE void copies_done() {
  for (auto& c : device::S->now->copies) device::S->now->known.seen.saw(c.by, device::land(c));
  device::S->now->copies.clear();
}
DEVICE void wait_for_previous_kernel() { device::wait_until([] { return device::S->previous_done; }); }
DEVICE void let_next_kernel_start() {}
DEVICE unsigned block_id() { return (device::S->first + device::S->now->block) % device::S->width; }
// Some arrive and go on, the others wait for all.
DEVICE void result_ready() { device::arrive(device::block().result, 384); }
DEVICE void await_result() { device::meet(device::block().result, 384); }
DEVICE void weights_ready() { device::arrive(device::block().weights, 384); }
DEVICE void await_weights() { device::meet(device::block().weights, 384); }
DEVICE void producers_sync() { device::meet(device::block().producers, 128); }
DEVICE void consumers_sync() { device::meet(device::block().consumers, 256); }
DEVICE void matrix_load(unsigned (&r)[4], unsigned a) {
  device::at(a, 16);
  auto all = device::exchange(&a, 1);
  const int l = device::lane();
  for (int i = 0; i < 4; i++) r[i] = device::read<unsigned>(all[i * 8 + l / 4][0] + (l % 4) * 4);
}
DEVICE void matrix_load_turned(unsigned (&r)[4], unsigned a) {
  device::at(a, 16);
  auto all = device::exchange(&a, 1);
  const int l = device::lane();
  for (int i = 0; i < 4; i++) {
    const unsigned low = device::read<unsigned short>(all[i * 8 + 2 * (l % 4)][0] + (l / 4) * 2);
    const unsigned high = device::read<unsigned short>(all[i * 8 + 2 * (l % 4) + 1][0] + (l / 4) * 2);
    r[i] = low | high << 16;
  }
}
#if HALF || FP8
constexpr bool PRODUCT_BF16 = false;
#else
constexpr bool PRODUCT_BF16 = true;
#endif
DEVICE float unpack(unsigned x, int upper) { return device::half_value(upper ? x >> 16 : x & 0xffff, PRODUCT_BF16); }
DEVICE unsigned pack(float lower, float upper) {
  return device::half_bits(lower, PRODUCT_BF16) | (unsigned)device::half_bits(upper, PRODUCT_BF16) << 16;
}
DEVICE float query_value(unsigned x, int upper) { return device::half_value(upper ? x >> 16 : x & 0xffff, !HALF); }
DEVICE unsigned widen(unsigned x) {
  unsigned r = 0;
  for (int i = 0; i < 2; i++) {
    const unsigned b = x >> 8 * i & 0xff, e = b >> 3 & 15, m = b & 7;
    float f = e ? std::ldexp(1.f + m / 8.f, (int)e - 7) : std::ldexp(m / 8.f, -6);
    if (e == 15 && m == 7) f = NAN;
    r |= (unsigned)device::half_bits(b & 0x80 ? -f : f, false) << 16 * i;
  }
  return r;
}
DEVICE unsigned swap_middle(unsigned x) { return (x & 0xff0000ffu) | (x >> 8 & 0xff00u) | (x & 0xff00u) << 8; }
DEVICE unsigned short to_output(float f) { return device::half_bits(f, !HALF); }
DEVICE void multiply(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  const unsigned mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
  auto all = device::exchange(mine, 6);
  const int g = device::lane() / 4, t = device::lane() % 4;
  for (int i = 0; i < 4; i++) {
    const int row = g + 8 * (i >> 1), column = 2 * t + (i & 1);
    float sum = 0;
    for (int k = 0; k < 16; k++) {
      const int word = (row >= 8) + 2 * (k >= 8), from = (row % 8) * 4 + (k % 8) / 2;
      const int b_from = column * 4 + (k % 8) / 2;
      sum += unpack(all[from][word], k & 1) * unpack(all[b_from][4 + (k >= 8)], k & 1);
    }
    d[i] += sum;
  }
}
DEVICE float exp2_of(float f) { return exp2f(f); }
DEVICE float log2_of(float f) { return log2f(f); }
DEVICE float shared_f32(unsigned a) { return device::read<float>(a); }
DEVICE float2 shared_f32x2(unsigned a) { return device::read<float2>(a); }
DEVICE float4 shared_f32x4(unsigned a) { return device::read<float4>(a); }
DEVICE uint2 shared_u32x2(unsigned a) { return device::read<uint2>(a); }
DEVICE uint4 shared_u32x4(unsigned a) { return device::read<uint4>(a); }
DEVICE unsigned shared_u32(unsigned a) { return device::read<unsigned>(a); }
DEVICE void shared_put_f32(unsigned a, float f) { device::write(a, f); }
DEVICE void shared_put_u32(unsigned a, unsigned x) { device::write(a, x); }
DEVICE void shared_put_f32x2(unsigned a, float x, float y) { device::write(a, float2{x, y}); }
DEVICE void shared_put_u32x2(unsigned a, unsigned x, unsigned y) { device::write(a, uint2{x, y}); }
DEVICE void shared_put_zero(unsigned a) { device::write(a, uint4{0, 0, 0, 0}); }
DEVICE void shared_put_f32x4(unsigned a, float x, float y, float z, float w) { device::write(a, float4{x, y, z, w}); }
DEVICE unsigned bits_of(float f) { unsigned u; std::memcpy(&u, &f, 4); return u; }
DEVICE unsigned pack_output(float lower, float upper) { return to_output(lower) | (unsigned)to_output(upper) << 16; }
DEVICE void matrix_store_turned(unsigned a, const unsigned (&r)[4]) {
  const unsigned mine[5] = {r[0], r[1], r[2], r[3], a};
  auto all = device::exchange(mine, 5);
  const int l = device::lane();
  // Row j of matrix i, as stored, goes to the address that lane 8 i + j gave: it is column j of what the lanes hold.
  for (int i = 0; i < 4; i++)
    for (int h = 0; h < 2; h++) {
      const int row = l / 4, column = 2 * (l % 4) + h;
      device::write<unsigned short>(all[i * 8 + column][4] + row * 2, all[l][i] >> 16 * h);
    }
  __syncwarp();
}
// Words of global memory that blocks hand each other: a reader lets the others run.
DEVICE unsigned word_get(const unsigned* a) { device::yield(); return *a; }
DEVICE uint4 packet_get(const unsigned* a) { device::yield(); return uint4{a[0], a[1], a[2], a[3]}; }
DEVICE void word_put(unsigned* a, unsigned x) { *a = x; device::S->progress++; }
DEVICE void packet_put(unsigned* a, uint4 x) {
  if ((size_t)a % 16) device::fail("misaligned packet");
  // The halves arrive one after the other, as memory may deliver them.
  a[2] = x.z; a[3] = x.w;
  device::S->progress++;
  device::yield();
  a[0] = x.x; a[1] = x.y;
  device::S->progress++;
}
inline long long stamps_taken = 0;
DEVICE long long clock_now() { return ++stamps_taken; }
DEVICE long long timer_now() { return ++stamps_taken; }
DEVICE long long multiprocessor() { return device::S->now->block; }
DEVICE void give_up() { device::fail("gave up waiting for another block"); }
