// warpgroup.cu on the emulated device: a work list, if it has one, then split and merge.
#define EMULATED
#define FP8 0
#define ORDERED 256
#include "warpgroup_device.h"
#include "warpgroup.cu"

static_assert(THREADS == ORDERED && MERGE_THREADS == ORDERED);
static_assert(PART_LINES == device::LINES && MINE / 4 * BLOCKS == device::STAGE_LINES);

extern "C" int params_bytes() { return sizeof(Params); }
extern "C" int shared_bytes() { return SHARED_BYTES; }
extern "C" int merge_bytes() { return MERGE_BYTES; }
extern "C" int split_packets() { return SPLIT_PACKETS; }
extern "C" int merge_blocks() { return MERGE_BLOCKS; }
extern "C" int list_line() { return LIST_LINE; }

#if LISTED
// What the work list's kernel has written and the next kernel may not see before it has waited.
struct Owed {
  std::vector<u32> lines;
  u32* to = nullptr;
  void land() {
    if (to) std::memcpy(to, lines.data(), lines.size() * 4);
    to = nullptr;
  }
} owed;

// The work list, for the next split: it lands when that waits. Returns what went wrong, or null.
extern "C" const char* lay_out(const Params* p, int items, void (*previous)()) {
  owed.land();
  owed.lines.assign((size_t)items * LIST_LINE, 0xdeadbeef);
  Params here = *p;
  std::vector<uint4> aligned(owed.lines.size() / 4);
  here.list = (u32*)aligned.data();
  if (!device::run_blocks(0, items, items, LIST_THREADS, 0, false, previous, [&] { verify_list(here); })) return device::message.c_str();
  std::memcpy(owed.lines.data(), aligned.data(), owed.lines.size() * 4);
  owed.to = p->list;
  return nullptr;
}
#endif

// What the split leaves for the merge lands only when the merge waits for it. Returns what went wrong, or null.
extern "C" const char* launch(const Params* split, const Params* merge, int items, int columns, int batch, void (*previous)()) {
  const size_t packets = (size_t)items * SPLIT_PACKETS * 4, headers = (size_t)items * ROWS8;
  std::vector<uint4> late_packets(packets / 4);
  std::vector<u32> late_headers(headers);
  std::memcpy(late_packets.data(), split->packets, packets * 4);
  std::memcpy(late_headers.data(), split->headers, headers * 4);
  Params here = *split;
  here.packets = (u32*)late_packets.data();
  here.headers = late_headers.data();
  device::warpgroups.assign(items, {});
  const auto before = [&] {
#if LISTED
    owed.land();
#endif
    if (previous) previous();
  };
  if (!device::run_blocks(0, items, items, THREADS, SHARED_BYTES, false, before, [&] { verify_split(here); })) return device::message.c_str();
  const auto land = [&] {
    std::memcpy(split->packets, late_packets.data(), packets * 4);
    std::memcpy(split->headers, late_headers.data(), headers * 4);
  };
  // Blocks of the merge have nothing to do with each other.
  for (int i = 0; i < columns * batch; i++)
    if (!device::run_blocks(i, 1, columns, MERGE_THREADS, MERGE_BYTES, i > 0, land, [&] { verify_merge(*merge); })) return device::message.c_str();
  return nullptr;
}
