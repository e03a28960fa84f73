// The work list of a forward pass. Part of warpgroup.cu.
//
// What a block of the split takes, which blocks a request has and where their first keys lie is the same in every layer: written down
// once, a block asks for all of it at once instead of for lengths, then slots. A line an item of the grid, its first words the slots
// of its first keys, as the copying threads have them; then an entry. Item b's has the share of request b as well.
#pragma once

constexpr int LIST_SLOTS = SLOTS, LIST_LINE = LIST_SLOTS + 32;  // words: whole lines of 128 bytes

struct Entry {
  uint4 keys, more;  // request, lo, hi, length; slots' place (two words), share of the request with the item's number
  DEVICE bool is_padding() const { return more.w == 0; }
};

DEVICE const u32* list_entry(const Params& p, int item) { return p.list + (i64)item * LIST_LINE + LIST_SLOTS; }
DEVICE Entry read_entry(const Params& p, int item) {
  const u32* at = list_entry(p, item);
  return Entry{global_u32x4(at), global_u32x4(at + 4)};
}
DEVICE int read_slot(const Params& p, int item, int thread) { return (int)global_u32(p.list + (i64)item * LIST_LINE + thread); }
DEVICE Share read_share(const Params& p, int request) {
  const uint2 x = global_u32x2(list_entry(p, request) + 6);
  return Share{(int)x.x, (int)x.y};
}
DEVICE Work work_of(const Entry& e) {
  Work w = {(int)e.keys.x, 0, 0, (int)e.keys.w, (int)e.keys.y, (int)e.keys.z, (i64)((u64)e.more.y << 32 | e.more.x)};
  w.count = w.hi - w.lo == w.length ? 1 : 2;  // alone or not, nobody asks for more
  return w;
}

// The line of `item`; four warps call it.
DEVICE void write_list(const Params& p, int item, int tid) {
  const int lane = tid & 31;
  const Work w = find_work(p, item, lane);
  u32* line = p.list + (i64)item * LIST_LINE;
  line[tid] = first_slot(p, w, tid);
  if (tid >= 32) return;
  Share s = {0, -1};
  if (item < p.batch) s = find_share(p, item, lane);
  if (lane == 0) {
    global_put_u32x4(line + LIST_SLOTS, uint4{(u32)w.request, (u32)w.lo, (u32)w.hi, (u32)w.length});
    global_put_u32x4(line + LIST_SLOTS + 4, uint4{(u32)w.pool, (u32)((u64)w.pool >> 32), (u32)s.first, (u32)s.count});
  }
}
