// Who may have seen what of shared memory: vector clocks of threads, for device.h. Without ORDERED nothing is kept.
//
// Every word remembers who wrote it last, and when. A thread knows up to when it has seen each thread's writes: its own at once,
// another's when a barrier brings them. It also knows which of those the matrix instructions may read: what a thread had seen
// when it fenced, if the fence is its own or a barrier brought news of it.
#pragma once
#include <cstddef>
#include <vector>

namespace order {
typedef unsigned int u32;
#ifdef ORDERED
constexpr int THREADS = ORDERED;  // of a block

struct Clock {
  u32 upto[THREADS] = {};
  void join(const Clock& other) {
    for (int i = 0; i < THREADS; i++) upto[i] = upto[i] > other.upto[i] ? upto[i] : other.upto[i];
  }
  void saw(int who, u32 when) { upto[who] = when; }
};
struct Known {
  Clock seen, fenced;
  void fence() { fenced.join(seen); }
};
// A barrier: what arrives is handed to those who leave the same round.
struct Handover {
  Known in, out[2];
  void arrive(const Known& k) {
    in.seen.join(k.seen);
    in.fenced.join(k.fenced);
  }
  void turn(u32 round) { out[round & 1] = in; }
  void leave(Known& k, u32 round) const {
    k.seen.join(out[round & 1].seen);
    k.fenced.join(out[round & 1].fenced);
  }
};
struct Memory {
  struct Word { u32 when = 0; int who = 0; };
  std::vector<Word> words;
  u32 now = 0;
  void reset(size_t bytes) { words.assign((bytes + 3) / 4, {}); }
  u32 note(u32 at, size_t bytes, int who) {
    now++;
    for (size_t i = at / 4; i < (at + bytes + 3) / 4; i++) words[i] = {now, who};
    return now;
  }
  bool known(u32 at, size_t bytes, const Clock& clock) const {
    for (size_t i = at / 4; i < (at + bytes + 3) / 4; i++)
      if (words[i].when > clock.upto[words[i].who]) return false;
    return true;
  }
};
#else
struct Clock { void saw(int, u32) {} };
struct Known { Clock seen; };
struct Handover {
  Known in;
  void arrive(const Known&) {}
  void turn(u32) {}
  void leave(Known&, u32) const {}
};
struct Memory {
  void reset(size_t) {}
  u32 note(u32, size_t, int) { return 0; }
  bool known(u32, size_t, const Clock&) const { return true; }
};
#endif
}  // namespace order
