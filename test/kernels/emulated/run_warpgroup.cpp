// warpgroup.cu on the emulated device: split, then merge.
#define EMULATED
#define FP8 0
#define ORDERED 256
#include "warpgroup_device.h"
#include "warpgroup.cu"

static_assert(THREADS == ORDERED && MERGE_THREADS == ORDERED);

extern "C" int params_bytes() { return sizeof(Params); }
extern "C" int shared_bytes() { return SHARED_BYTES; }
extern "C" int merge_bytes() { return MERGE_BYTES; }
extern "C" int split_packets() { return SPLIT_PACKETS; }
extern "C" int merge_blocks() { return MERGE_BLOCKS; }

// What the split leaves for the merge lands only when the merge waits for it. Returns what went wrong, or null.
extern "C" const char* launch(const Params* split, const Params* merge, int items, int batch, void (*previous)()) {
  const size_t packets = (size_t)items * SPLIT_PACKETS * 4, headers = (size_t)items * ROWS8;
  std::vector<uint4> late_packets(packets / 4);
  std::vector<u32> late_headers(headers);
  std::memcpy(late_packets.data(), split->packets, packets * 4);
  std::memcpy(late_headers.data(), split->headers, headers * 4);
  Params here = *split;
  here.packets = (u32*)late_packets.data();
  here.headers = late_headers.data();
  device::warpgroups.assign(items, {});
  if (!device::run_blocks(0, items, items, THREADS, SHARED_BYTES, false, previous, [&] { verify_split(here); })) return device::message.c_str();
  const auto land = [&] {
    std::memcpy(split->packets, late_packets.data(), packets * 4);
    std::memcpy(split->headers, late_headers.data(), headers * 4);
  };
  // Blocks of the merge have nothing to do with each other.
  for (int i = 0; i < MERGE_BLOCKS * batch; i++)
    if (!device::run_blocks(i, 1, MERGE_BLOCKS, MERGE_THREADS, MERGE_BYTES, i > 0, land, [&] { verify_merge(*merge); })) return device::message.c_str();
  return nullptr;
}
